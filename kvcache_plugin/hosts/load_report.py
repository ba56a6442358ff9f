"""What came of a load: one line for the log, and an object for ``KVCACHE_PLUGIN_REPORT``."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kvcache_plugin import __version__
from kvcache_plugin.api import explain
from kvcache_plugin.errors import anchored, counted
from kvcache_plugin.hosts.engines import ENGINES
from kvcache_plugin.settings import REPORT

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvcache_plugin.hosts.coverage import LostScale
    from kvcache_plugin.hosts.engine_log import EngineLog
    from kvcache_plugin.hosts.loaded import LoadedScales
    from kvcache_plugin.scales import KVScales


@dataclass(frozen=True)
class LoadFacts:
    """What is known of one load.

    :param model: the path that the engine loads, empty where it is not known.
    :param kv_cache_dtype: the format of the first quantized layer, empty when there is none.
    :param validated_by: the implementation that converts scales for the device.
    :param quantized_by: the one that quantizes there.
    :param checked: how many layers were checked.
    :param from_checkpoint: how many of them have both scales from the checkpoint.
    :param duplicated: how many have one side's for both.
    :param default: how many have 1.0, because the checkpoint brought none that counts.
    :param k_scale: the smallest and the largest that a checkpoint brought, as served.
    :param v_scale: likewise.
    :param coverage: what came of the comparison with the files, in words.
    :param lost: scales in the files that did not arrive.
    :param problems: what is corrupt, a line for each layer.
    :param refused: why the load was stopped, empty when it was not.
    """

    model: str = ""
    kv_cache_dtype: str = ""
    device: str = ""
    validated_by: str = ""
    quantized_by: str = ""
    checked: int = 0
    from_checkpoint: int = 0
    duplicated: int = 0
    default: int = 0
    k_scale: tuple[float, float] | None = None
    v_scale: tuple[float, float] | None = None
    coverage: str = ""
    lost: tuple[LostScale, ...] = ()
    problems: tuple[str, ...] = ()
    refused: str = ""

    @property
    def summary(self) -> str:
        """One line about the layers that were checked."""
        by = " and ".join(dict.fromkeys(filter(None, (self.validated_by, self.quantized_by))))
        ranges = [
            f"{side} {_between(*scales)}"
            for side, scales in (("K", self.k_scale), ("V", self.v_scale))
            if scales is not None
        ]
        parts = [
            f"checked the K/V scales of {counted(self.checked, 'layer')} "
            f"({self.kv_cache_dtype} on {self.device}{f', {by}' if by else ''}): "
            f"{self.from_checkpoint} from the checkpoint, {self.duplicated} duplicated, "
            f"{self.default} default",
            ", ".join(ranges),
            self.coverage,
        ]
        return "; ".join(filter(None, parts))


def gather(
    layers: Sequence[LoadedScales], served: Iterable[KVScales], *, checked: int, model: str
) -> LoadFacts:
    """The facts about layers whose scales were checked.

    :param layers: all layers with a quantized cache.
    :param served: the final scales of those that are sound.
    :param checked: how many layers were checked, sound or not.
    """
    if not layers:
        return LoadFacts(model)
    served = list(served)
    first = layers[0]
    default = sum(scales.k_source == "default" for scales in served)
    duplicated = sum("duplicated" in (scales.k_source, scales.v_source) for scales in served)
    brought = [scales for scales in served if scales.k_source != "default"]
    by = {
        hook: explanation.name
        for explanation in explain(first.device, first.kv_cache_dtype)
        for hook in explanation.chosen_for
    }
    return LoadFacts(
        model=model,
        kv_cache_dtype=first.kv_cache_dtype,
        device=str(first.device),
        validated_by=by.get("validate_kv_scales", ""),
        quantized_by=by.get("quantize_kv", ""),
        checked=checked,
        from_checkpoint=len(served) - default - duplicated,
        duplicated=duplicated,
        default=default,
        k_scale=_range(scales.k for scales in brought),
        v_scale=_range(scales.v for scales in brought),
    )


@dataclass
class ReportFile:
    """The file of one process, written anew after each load; it never raises.

    :param file: the value of ``KVCACHE_PLUGIN_REPORT``, empty for no file.
    :param log: where a file is told that cannot be written.
    """

    file: str
    mode: str
    coverage: str
    log: EngineLog
    _loads: list[LoadFacts] = field(default_factory=list)

    @property
    def path(self) -> Path:
        """The file with the process's number before its ending: each process has its own."""
        file = Path(self.file)
        return file.with_name(f"{file.stem}.{os.getpid()}{file.suffix}")

    def add(self, facts: LoadFacts) -> None:
        """Add a load, and write all of them."""
        if not self.file:
            return
        self._loads.append(facts)
        try:
            _replace(self.path, json.dumps(self._object(), indent=2, allow_nan=False) + "\n")
        except (OSError, ValueError) as error:
            self.log.warn_once(
                REPORT.name,
                anchored("%s=%s cannot be written: %s", "report-not-written"),
                REPORT.name,
                self.file,
                error,
            )

    def _object(self) -> dict[str, object]:
        versions = {engine.title: engine.version for engine in ENGINES}
        return {
            "kvcache_plugin": __version__,
            "engine": self.log.engine,
            "engine_version": versions.get(self.log.engine),
            "pid": os.getpid(),
            "mode": self.mode,
            "coverage": self.coverage,
            "loads": [asdict(facts) for facts in self._loads],
        }


def _replace(path: Path, text: str) -> None:
    """Write a file whole or not at all: under another name first."""
    temporary = path.with_name(f".{path.name}.part")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def _range(scales: Iterable[float | torch.Tensor]) -> tuple[float, float] | None:
    values = [
        value
        for scale in scales
        for value in (scale.tolist() if isinstance(scale, torch.Tensor) else [scale])
    ]
    return (min(values), max(values)) if values else None


def _between(smallest: float, largest: float) -> str:
    same = smallest == largest
    return f"{smallest:.4g}" if same else f"{smallest:.4g} to {largest:.4g}"
