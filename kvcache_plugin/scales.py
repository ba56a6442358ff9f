"""The rules that a checkpoint's K/V scales must meet, and their conversion.

Everything here runs on the host while a model loads, never per token. A scale is read once, as
float64, so that a value that float32 cannot hold is still seen as what it is.
"""

from __future__ import annotations

import logging
import math
import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import torch

from kvcache_plugin.errors import KVScaleError, anchored
from kvcache_plugin.formats import FP8_E4M3FNUZ
from kvcache_plugin.tensor_kinds import as_float, describe, holds_numbers, is_plain

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvcache_plugin.formats import KVFormat

logger = logging.getLogger(__name__)

Granularity: TypeAlias = Literal["tensor", "head"]
Source: TypeAlias = Literal["checkpoint", "duplicated", "default"]

#: One number, or one for each head: numbers of the host, since 128 layers are read in one go and
#: an operation of torch on one element takes as long as a dozen of these.
_Values: TypeAlias = tuple[float, ...]
#: A layer's scales by name, ``None`` for one that is not set.
_Scales: TypeAlias = "Mapping[str, _Values | None]"

GRANULARITIES: Final = ("tensor", "head")
SOURCES: Final = ("checkpoint", "duplicated", "default")

_REMEDY: Final = (
    "Calibrate and export the K/V scales again, or remove both scales of the layer to serve it "
    "with 1.0, or serve with an unquantized KV cache (kv_cache_dtype=bfloat16)"
)
_ATTENTION_REMEDY: Final = (
    "Calibrate and export q_scale and prob_scale again, or remove them from the layer to serve it "
    "with 1.0, or serve with an unquantized KV cache (kv_cache_dtype=bfloat16)"
)
_MOST_VALUES_SHOWN: Final = 8
_FLOAT32: Final = struct.Struct("f")
_FLOAT32_MAX: Final = torch.finfo(torch.float32).max
_FNUZ_FACTOR: Final = 2.0


@dataclass(frozen=True)
class KVScales:
    """The scales of one layer, as dequantization multipliers: ``x ≈ code · scale``.

    :param k: a float per tensor, or a CPU tensor of shape ``[H]`` per head (float32 once served).
    :param v: likewise; both sides have the same granularity.
    :param k_source: ``"checkpoint"``, ``"duplicated"`` (taken from the other side) or
        ``"default"`` (1.0, because the checkpoint has none).
    :param v_source: likewise.
    :raises ValueError: for a source that is none of these.
    :raises TypeError: for scales that are neither floats nor tensors, or one of each.
    """

    k: float | torch.Tensor
    v: float | torch.Tensor
    k_source: Source
    v_source: Source

    def __post_init__(self) -> None:
        for side, scale, source in (
            ("k", self.k, self.k_source),
            ("v", self.v, self.v_source),
        ):
            if source not in SOURCES:
                raise ValueError(
                    anchored(
                        f"{side}_source must be one of {SOURCES}, got {source!r}",
                        "invalid-kv-scales",
                    )
                )
            if not isinstance(scale, (float, torch.Tensor)):
                raise TypeError(
                    anchored(
                        f"{side} must be a float or a tensor of one scale per head, got {scale!r}",
                        "invalid-kv-scales",
                    )
                )
        if isinstance(self.k, torch.Tensor) != isinstance(self.v, torch.Tensor):
            raise TypeError(
                anchored(
                    "k and v must both be floats or both be tensors of one scale per head",
                    "invalid-kv-scales",
                )
            )

    @property
    def per_head(self) -> bool:
        """Whether the scales are tensors of one value per KV head."""
        return isinstance(self.k, torch.Tensor)

    def converted(self, factor: float) -> KVScales:
        """The same scales times ``factor``; 1.0 by default is not a checkpoint's and stays."""
        if factor == 1.0:
            return self
        return replace(
            self,
            k=self.k if self.k_source == "default" else self.k * factor,
            v=self.v if self.v_source == "default" else self.v * factor,
        )

    def for_fnuz(self) -> KVScales:
        """The scales for e4m3fnuz, twice what a checkpoint was written with for the OCP e4m3.

        OCP codes reach 448, those of e4m3fnuz 240, and the same bits mean half as much. Twice the
        scale keeps within reach whatever the checkpoint's could represent: 448 · s ≤ 240 · 2s.
        """
        return self.converted(_FNUZ_FACTOR)


@dataclass(frozen=True)
class ScaleSite:
    """Where a pair of scales belongs: what the rules need to know, and what errors name.

    :param kv_format: the format that the KV cache is stored in.
    :param layer: the layer's name, for messages.
    :param granularity: ``"tensor"`` or ``"head"``.
    :param num_kv_heads: the number of KV heads; needed for ``"head"``.
    :param subject: what is quantized with the scales, for messages.
    :param remedy: what to do about a corrupt one.
    """

    kv_format: KVFormat
    layer: str = ""
    granularity: Granularity = "tensor"
    num_kv_heads: int | None = None
    subject: str = "KV cache"
    remedy: str = _REMEDY

    def __post_init__(self) -> None:
        if self.granularity not in GRANULARITIES:
            raise self.error(
                f"granularity must be 'tensor' or 'head', got {self.granularity!r}",
                name="invalid-granularity",
                remedy="",
            )
        if self.granularity == "tensor":
            return
        if not self.kv_format.per_head:
            raise self.error(
                f"{self.kv_format.name} has one scale per tensor, got granularity='head'",
                name="invalid-granularity",
                remedy="Per-head scales go with the FP8 formats",
            )
        heads = self.num_kv_heads
        if not isinstance(heads, int) or isinstance(heads, bool) or heads < 1:
            raise self.error(
                "granularity='head' needs the number of KV heads, got "
                f"num_kv_heads={self.num_kv_heads!r}",
                name="invalid-granularity",
                remedy="Pass num_kv_heads",
            )

    @property
    def quantized(self) -> str:
        """``fp8 KV cache``"""
        return f"{self.kv_format.family} {self.subject}"

    def error(self, problem: str, *, name: str, remedy: str | None = None) -> KVScaleError:
        remedy = self.remedy if remedy is None else remedy
        return KVScaleError(problem, layer=self.layer, remedy=remedy, name=name)

    def warn(self, sentence: str, *, name: str) -> None:
        layer = f"{self.layer}: " if self.layer else ""
        logger.warning("%s", anchored(f"{layer}{sentence}", name))


def resolve_scales(k_scale: object, v_scale: object, site: ScaleSite) -> KVScales:
    """Read a checkpoint's pair of scales and decide which pair is used, before any conversion.

    Per-head scales come back as float64, so that a conversion cannot hide an overflow.

    :param k_scale: a number, a floating tensor on any device, or ``None`` for "not in the
        checkpoint".
    :param v_scale: likewise.
    :raises KVScaleError: for a scale that is corrupt, or is no scale at all.
    """
    scales = _checked({"k_scale": k_scale, "v_scale": v_scale}, site)
    return _choose_pair(scales, site)


def check_attention_scales(q_scale: object, prob_scale: object, site: ScaleSite) -> None:
    """Check the scales of the query and of the probabilities, which an engine may quantize too.

    Each stands for itself, and one that is not positive counts as absent.

    :param q_scale: as in ``resolve_scales``.
    :param prob_scale: likewise.
    :param site: with the format that they are quantized to.
    :raises KVScaleError: for a scale that is corrupt, or is no scale at all.
    """
    site = replace(site, subject="attention", remedy=_ATTENTION_REMEDY)
    scales = _checked({"q_scale": q_scale, "prob_scale": prob_scale}, site)
    positive = {name: v for name, v in scales.items() if v and _state(v) == "positive"}
    if any(_state(v) == "not positive" for v in scales.values()):
        site.warn(
            f"{site.quantized} scales that are not positive count as absent, got "
            f"{_show_all(scales)}; 1.0 is used. Calibrate and export them again if the model needs "
            "scales",
            name="scale-counts-as-absent",
        )
    factor = _FNUZ_FACTOR if site.kv_format.name == FP8_E4M3FNUZ.name else 1.0
    _check_range({name: tuple(x * factor for x in v) for name, v in positive.items()}, site)


def serve_scales(scales: KVScales, site: ScaleSite) -> KVScales:
    """The scales as they are served, after conversion: checked, and float32 where per head.

    :raises KVScaleError: with the values as they are now, after conversion.
    """
    k, v = _values(scales.k), _values(scales.v)
    _check_range({"k_scale": k, "v_scale": v}, site)
    if scales.per_head:
        return replace(scales, k=_tensor(k).float(), v=_tensor(v).float())
    return scales


def _admitted(name: str, scale: object, site: ScaleSite) -> torch.Tensor | float | None:
    """The scale, if it is of a kind that can be one; ``None`` where it is not set."""
    if scale is None:
        return None
    if isinstance(scale, torch.Tensor):
        if not holds_numbers(scale.dtype) or not is_plain(scale):
            raise site.error(
                f"{name} must be a plain floating-point tensor, got {describe(scale)}",
                name="scale-not-a-number",
            )
        if scale.is_meta:
            raise site.error(
                f"{name} is on the meta device and has no value, shape {tuple(scale.shape)}",
                name="scale-not-loaded",
                remedy="Load the checkpoint's tensors before the scales are checked",
            )
        return scale
    number = as_float(scale)
    if number is not None:
        return number
    raise site.error(
        f"{name} must be a number, a floating-point tensor or None, got "
        f"{type(scale).__name__} {scale!r}",
        name="scale-not-a-number",
    )


def _checked(scales: Mapping[str, object], site: ScaleSite) -> _Scales:
    """The scales, each by itself a scale: of a shape that fits, finite, of one sign."""
    admitted = {name: _admitted(name, scale, site) for name, scale in scales.items()}
    _check_shapes(admitted, site)
    read = {name: None if scale is None else _values(scale) for name, scale in admitted.items()}
    corrupt = _sides(read, lambda x: not math.isfinite(x))
    if corrupt:
        raise site.error(
            f"{site.quantized} scales must be finite, got {_show_all(read)} (corrupt: {corrupt})",
            name="scale-not-finite",
        )
    in_part = {name: values for name, values in read.items() if values and max(values) > 0}
    divided = _sides(in_part, lambda x: x <= 0)
    if divided:
        raise site.error(
            f"{site.quantized} scales must be positive, got {_show_all(read)} (corrupt: {divided})",
            name="scale-not-positive",
        )
    return read


def _check_shapes(scales: Mapping[str, torch.Tensor | float | None], site: ScaleSite) -> None:
    def fits(scale: torch.Tensor | float | None) -> bool:
        if scale is None:
            return True
        if not isinstance(scale, torch.Tensor):
            return site.granularity == "tensor"
        if site.granularity == "tensor":
            return scale.numel() == 1
        heads = site.num_kv_heads
        return tuple(scale.shape) in ((heads,), (heads, 1, 1))

    if all(map(fits, scales.values())):
        return
    shapes = " ".join(f"{name} shape={_shape(scale)}" for name, scale in scales.items())
    if site.granularity == "tensor":
        raise site.error(
            f"Only support per-tensor scaling factor for {site.quantized}, got {shapes}",
            name="scale-wrong-shape",
        )
    heads = site.num_kv_heads
    raise site.error(
        f"Per-head scaling factors for {site.quantized} have shape ({heads},) or "
        f"({heads}, 1, 1) for {heads} KV heads, got {shapes}",
        name="scale-wrong-shape",
    )


def _check_range(scales: _Scales, site: ScaleSite) -> None:
    """Kernels read a scale as float32, and several of them multiply by its reciprocal."""
    sentence = f"scales must be finite and fit in torch.float32, got {_show_all(scales)}"
    too_large = _sides(scales, lambda x: not -math.inf < x <= _FLOAT32_MAX)
    if too_large:
        raise site.error(
            f"{site.quantized} {sentence} (corrupt: {too_large})", name="scale-out-of-range"
        )
    no_reciprocal = _sides(scales, lambda x: not _has_reciprocal(x))
    if no_reciprocal:
        raise site.error(
            f"{site.quantized} {sentence} (corrupt: {no_reciprocal}, whose reciprocal is not "
            "finite in torch.float32)",
            name="scale-out-of-range",
        )


def _has_reciprocal(value: float) -> bool:
    """Whether a number up to the largest float32 is positive, and its reciprocal a float32."""
    if value <= 0:
        return False
    rounded = _rounded(value)
    # No quotient is between the largest float32 and what is rounded to it: float32 numbers that
    # are so small are too far apart.
    return rounded > 0 and 1.0 / rounded <= _FLOAT32_MAX


def _choose_pair(scales: _Scales, site: ScaleSite) -> KVScales:
    """Which pair is used when a side is unset, positive, or loaded and not positive."""
    k, v = scales["k_scale"], scales["v_scale"]
    match _state(k), _state(v):
        case "unset", "unset":
            return _default(site)
        case "positive", "positive":
            return KVScales(_value(k, site), _value(v, site), "checkpoint", "checkpoint")
        case "positive", "unset":
            return KVScales(_value(k, site), _value(k, site), "checkpoint", "duplicated")
        case "unset", "positive":
            site.warn(
                f"only v_scale={_show(v)} is in the checkpoint, it is used for K too. A producer "
                "that writes one scale for both writes it for K: check the export",
                name="k-scale-missing",
            )
            return KVScales(_value(v, site), _value(v, site), "duplicated", "checkpoint")
        case ("positive", _) | (_, "positive") as states:
            corrupt = "v_scale" if states[0] == "positive" else "k_scale"
            raise site.error(
                f"{site.quantized} scales must be positive, got {_show_all(scales)} (corrupt: "
                f"{corrupt}); one corrupt side is never replaced by the other",
                name="scale-not-positive",
            )
    site.warn(
        f"K/V scales that are not positive count as absent, got {_show_all(scales)}; 1.0 is used. "
        "Calibrate and export them again if the model needs scales",
        name="scale-counts-as-absent",
    )
    return _default(site)


def _state(values: _Values | None) -> Literal["unset", "positive", "not positive"]:
    if values is None:
        return "unset"
    return "positive" if all(x > 0 for x in values) else "not positive"


def _default(site: ScaleSite) -> KVScales:
    if site.granularity == "tensor":
        return KVScales(1.0, 1.0, "default", "default")
    ones = torch.ones(site.num_kv_heads or 0, dtype=torch.float64, device="cpu")
    return KVScales(ones, ones.clone(), "default", "default")


def _value(values: _Values | None, site: ScaleSite) -> float | torch.Tensor:
    assert values is not None
    return values[0] if site.granularity == "tensor" else _tensor(values)


def _values(scale: float | torch.Tensor) -> _Values:
    if isinstance(scale, torch.Tensor):
        return tuple(scale.detach().cpu().double().reshape(-1).tolist())
    return (scale,)


def _tensor(values: _Values) -> torch.Tensor:
    # Engines load under a default device and dtype of their own: name both.
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def _sides(scales: _Scales, is_corrupt: Callable[[float], bool]) -> str:
    """The sides, and of per-head scales the heads, that are corrupt: ``"k_scale of head 3"``."""
    found = []
    for name, values in scales.items():
        heads = [head for head, value in enumerate(values or ()) if is_corrupt(value)]
        if heads:
            found.append(name if len(values or ()) == 1 else f"{name} of {_heads(heads)}")
    return " and ".join(found)


def _heads(heads: list[int]) -> str:
    shown = ", ".join(map(str, heads[:_MOST_VALUES_SHOWN]))
    more = f" and {len(heads) - _MOST_VALUES_SHOWN} more" * (len(heads) > _MOST_VALUES_SHOWN)
    return f"head {shown}" if len(heads) == 1 else f"heads {shown}{more}"


def _show_all(scales: _Scales) -> str:
    return " ".join(f"{name}={_show(scale)}" for name, scale in scales.items())


def _show(values: _Values | None) -> str:
    if values is None:
        return "unset"
    if len(values) == 1:
        return _digits(values[0])
    shown = [_digits(value) for value in values[:_MOST_VALUES_SHOWN]]
    if len(values) > _MOST_VALUES_SHOWN:
        shown.append(f"... {len(values)} heads")
    return f"[{', '.join(shown)}]"


def _digits(value: float) -> str:
    """All digits of a number; of a float32, as files have them, those that tell it from others."""
    if _rounded(value) != value:
        return repr(value)
    shorter = (float(f"{value:.{digits}g}") for digits in range(1, 10))
    return repr(next(x for x in shorter if _rounded(x) == value))


def _rounded(value: float) -> float:
    """As a float32, which is infinite where the number is beyond the largest."""
    try:
        rounded: float = _FLOAT32.unpack(_FLOAT32.pack(value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)
    return rounded


def _shape(scale: torch.Tensor | float | None) -> str:
    if scale is None:
        return "unset"
    return str(tuple(scale.shape)) if isinstance(scale, torch.Tensor) else "()"
