"""What the rules about a whole checkpoint go by, and the words that they share."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Final

from kvcache_plugin.checkpoint.conventions import AUTO_ROUND, COMPRESSED_TENSORS, MODELOPT, QUARK

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvcache_plugin.checkpoint.declaration import Declaration
    from kvcache_plugin.checkpoint.files import CheckpointFiles
    from kvcache_plugin.checkpoint.model_shape import ModelShape
    from kvcache_plugin.checkpoint.report import LayerScales, StoredScale

_CALIBRATE: Final = {
    COMPRESSED_TENSORS: (
        "Calibrate and export again with llm-compressor: oneshot() with calibration data and a "
        "kv_cache_scheme"
    ),
    MODELOPT: "Calibrate and export again with ModelOpt: hf_ptq.py --kv_cache_qformat fp8",
    AUTO_ROUND: "Calibrate and export again with auto-round: --static_kv_dtype fp8",
    QUARK: "Calibrate and export again with Quark: quantize_quark.py --kv_cache_dtype fp8",
}


#: For a checkpoint whose producer has not calibrated, and means it so.
CALIBRATE_MODELOPT: Final = (
    "For calibrated scales export again with hf_ptq.py --kv_cache_qformat fp8"
)


@dataclass(frozen=True)
class Evidence:
    """All that a scan has seen.

    :param kv_format: the format that the layers were checked for.
    :param declared_format: the declared one, as the device stores it; empty when none is.
    :param is_asked: whether the format was asked for, and not taken from the checkpoint.
    :param owners: modules that weights belong to.
    :param attention: modules that have projections for K and V.
    :param not_in_index: scales that are in a file and not in the index.
    :param missing: scales that are in the index and in no file.
    :param skipped: files with scales that engines do not load.
    """

    files: CheckpointFiles
    declaration: Declaration
    shape: ModelShape
    kv_format: str
    layers: tuple[LayerScales, ...]
    scales: tuple[StoredScale, ...]
    unknown: tuple[str, ...] = ()
    owners: frozenset[str] = frozenset()
    attention: frozenset[str] = frozenset()
    not_in_index: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    declared_format: str = ""
    is_asked: bool = False

    @property
    def calibrate(self) -> str:
        """How one calibrates with this checkpoint's producer."""
        return _CALIBRATE.get(
            self.declaration.producer.name, "Calibrate and export the K/V scales again"
        )

    @property
    def is_cast_on_purpose(self) -> bool:
        """Whether 1.0 is what the producer means: ModelOpt's cast modes, since its 0.43."""
        producer = self.declaration.producer
        return producer.name == MODELOPT and producer.is_older(0, 43) is False

    @property
    def used(self) -> tuple[StoredScale, ...]:
        """The tensors that the layers' pairs are taken from."""
        return tuple(scale for layer in self.layers for scale in layer.stored)

    def all_are(self, number: float) -> bool:
        """Whether every used scale is this number."""
        return bool(self.used) and all(
            scale.values and all(value == number for value in scale.values) for scale in self.used
        )


def names(layers: Iterable[LayerScales]) -> tuple[str, ...]:
    return tuple(layer.layer for layer in layers)


def stacks(layers: Iterable[LayerScales]) -> Iterator[list[LayerScales]]:
    """The numbered layers of each stack, in order; a model's own and its draft layers apart."""
    for _, group in groupby(layers, key=lambda layer: (layer.is_draft, layer.stack)):
        stack = [layer for layer in group if layer.index is not None]
        if stack:
            yield stack
