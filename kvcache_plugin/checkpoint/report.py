"""What a scan of a checkpoint's K/V scales gives: plain frozen data, fit for JSON but for NaN."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from kvcache_plugin.errors import anchored, counted, shown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvcache_plugin.checkpoint.conventions import Meaning, Role, Side
    from kvcache_plugin.checkpoint.declaration import Declaration
    from kvcache_plugin.checkpoint.engine_rules import EngineVerdict
    from kvcache_plugin.checkpoint.model_shape import ModelShape

Severity: TypeAlias = Literal["problem", "remark"]
Values: TypeAlias = "tuple[float, ...]"
#: What layers are sorted by: whether it is a draft, its stack, its number there, its name.
Place: TypeAlias = "tuple[bool, str, int, str]"

SEVERITIES: Final = ("problem", "remark")

#: Every kind of finding. The names stay.
KINDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "corrupt-scale": "validate_kv_scales refuses the pair, and so do the engines with it",
        "wrong-shape": "a scale does not have one value, or one for each KV head where declared",
        "wrong-dtype": "a scale is not stored as a floating-point number",
        "not-positive": "neither scale is positive, so the pair counts as absent",
        "one-side": "one side has no scale and takes the other's",
        "two-names": "the same scale is stored under two names",
        "zero-point": "a zero point is not 0, and no engine applies it",
        "affine": "K or V is stored shifted by a bias, and no engine applies it",
        "missing-layers": "layers have no scales while others have",
        "no-such-layer": "scales belong to layers of which the checkpoint has no weights",
        "declared-absent": "a quantized KV cache is declared, and there are no scales",
        "undeclared": "there are scales, and no quantized KV cache is declared",
        "declarations-differ": "two declarations say different things",
        "unserved-scheme": "an engine does not serve the declared scheme",
        "asked-format": "the asked format is not the declared one, or an engine refuses it",
        "not-found": "an engine's own loading does not bring a scale to its layer",
        "all-zero": "every scale is 0: the producer has not calibrated",
        "all-one": "every scale is exactly 1.0: the producer has not calibrated",
        "k-equals-v": "K and V have the same scale in every layer",
        "outlier": "a scale is more than 20 times its neighbours' median, or less than a 20th",
        "reciprocal": "scales are, or seem to be, the reciprocal of what engines take",
        "convention": "what the stored numbers mean depends on the producer",
        "unknown-name": "a tensor looks like a K/V scale, and nobody is known to use its name",
        "not-in-index": "a scale is in a file, and the index does not name it",
        "missing-tensor": "the index names a scale that no file holds",
        "skipped-file": "a file that engines do not load holds scales",
    }
)


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or worth to know.

    :param kind: one of ``KINDS``.
    :param severity: ``"problem"`` or ``"remark"``.
    :param message: what, in a sentence, without the layers' names.
    :param remedy: what to do, empty where nothing needs to be done.
    :param layers: attention modules that it is about, empty for the whole checkpoint.
    :param side: ``"k"``, ``"v"``, or empty for both.
    :param value: the number that it is about, where there is one.
    """

    kind: str
    severity: Severity
    message: str
    remedy: str = ""
    layers: tuple[str, ...] = ()
    side: str = ""
    value: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(
                anchored(
                    f"unknown kind {self.kind!r}; known are {', '.join(KINDS)}", "finding-unknown"
                )
            )
        if self.severity not in SEVERITIES:
            raise ValueError(
                anchored(
                    f"severity must be one of {SEVERITIES}, got {self.severity!r}",
                    "finding-unknown",
                )
            )

    def __str__(self) -> str:
        where = f"{some(self.layers)}: " if self.layers else ""
        way_out = f". {self.remedy}" if self.remedy else ""
        return f"{self.severity} {self.kind}: {where}{self.message}{way_out}"


@dataclass(frozen=True)
class StoredScale:
    """One tensor whose name is that of a K/V scale, or of what belongs to one.

    :param name: as it stands in the file.
    :param file: the file's name in the checkpoint.
    :param module: the attention module, ``"model.layers.3.self_attn"``.
    :param convention: the key in ``conventions.CONVENTIONS``.
    :param dtype: safetensors' name for it, ``"BF16"``.
    :param shape: as stored.
    :param values: the stored numbers; empty for more than 4096, or a dtype that holds none.
    :param meaning: what they are.
    :param engines: whether each engine would find it.
    """

    name: str
    file: str
    module: str
    convention: str
    side: Side
    role: Role
    dtype: str
    shape: tuple[int, ...]
    values: Values
    meaning: Meaning
    engines: tuple[EngineVerdict, ...] = ()

    @property
    def is_marker(self) -> bool:
        """Whether it is -1, which both engines take for "not loaded", wherever it comes from."""
        return bool(self.values) and all(value == -1.0 for value in self.values)


@dataclass(frozen=True)
class LayerScales:
    """The K and V scale of one layer, as stored and as they would be served.

    :param layer: the attention module, ``"model.layers.3.self_attn"``.
    :param stack: the layers that it is one of, ``"model.layers"``; the module where it has no
        number.
    :param index: its number among them.
    :param is_draft: whether the layer predicts further tokens and is no layer of the model itself.
    :param stored_k: what K's scale is taken from, ``None`` when it is not stored.
    :param stored_v: likewise; one scale for both counts as K's.
    :param k_scale: the multipliers that would be served on the device: one, or one for each KV
        head; empty when the pair is refused.
    :param v_scale: likewise.
    :param k_source: ``"checkpoint"``, ``"duplicated"``, ``"default"``; empty when refused.
    :param v_source: likewise.
    :param refusal: why the pair is refused, empty when it is not.
    :param refused_as: the kind of finding that this is, empty when it is not refused.
    """

    layer: str
    stack: str
    index: int | None
    is_draft: bool
    stored_k: StoredScale | None
    stored_v: StoredScale | None
    k_scale: Values = ()
    v_scale: Values = ()
    k_source: str = ""
    v_source: str = ""
    refusal: str = ""
    refused_as: str = ""

    @property
    def place(self) -> Place:
        """Where it stands in the order of layers, drafts last."""
        return self.is_draft, self.stack, self.index or 0, self.layer

    @property
    def stored(self) -> tuple[StoredScale, ...]:
        """The tensors that the pair is taken from."""
        return tuple(scale for scale in (self.stored_k, self.stored_v) if scale is not None)


@dataclass(frozen=True)
class CheckpointReport:
    """All that a scan found.

    :param path: what was scanned, as it was named.
    :param files: the ``.safetensors`` files that were read.
    :param num_tensors: how many tensors they hold.
    :param declaration: what the checkpoint says of its KV cache.
    :param shape: what it says of its layers.
    :param kv_cache_dtype: the format that the scales were checked for.
    :param kv_cache_dtype_from: ``"asked"``, ``"declared"`` or ``"assumed"``.
    :param device: the hardware that the scales were checked for.
    :param layers: every layer that has a K or V scale, in order.
    :param scales: every tensor that was understood, zero points and the like among them.
    :param unknown: names that look like those of K/V scales and fit no convention.
    :param findings: problems first.
    """

    path: str
    files: tuple[str, ...]
    num_tensors: int
    declaration: Declaration
    shape: ModelShape
    kv_cache_dtype: str
    kv_cache_dtype_from: Literal["asked", "declared", "assumed"]
    device: str
    layers: tuple[LayerScales, ...]
    scales: tuple[StoredScale, ...]
    unknown: tuple[str, ...]
    findings: tuple[Finding, ...]

    @property
    def problems(self) -> tuple[Finding, ...]:
        """What has to be mended before the checkpoint is served with a quantized KV cache."""
        return tuple(finding for finding in self.findings if finding.severity == "problem")

    @property
    def remarks(self) -> tuple[Finding, ...]:
        """What is worth to know."""
        return tuple(finding for finding in self.findings if finding.severity == "remark")

    @property
    def is_sound(self) -> bool:
        """Whether there is no problem."""
        return not self.problems

    @property
    def summary(self) -> str:
        """One line: how many layers have scales, for which format, and what was found."""
        return (
            f"{counted(len(self.layers), 'layer')} with K/V scales in "
            f"{counted(len(self.files), 'file')}, checked for {self.kv_cache_dtype} "
            f"({self.kv_cache_dtype_from}) on {self.device}: "
            f"{counted(len(self.problems), 'problem')}, {counted(len(self.remarks), 'remark')}"
        )


def some(names: Sequence[str], most: int = 5) -> str:
    """The first few of many names, for a message."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(shown, names[:most])) + more
