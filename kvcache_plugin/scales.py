"""The rules that a checkpoint's K/V scales must meet, and their conversion.

Everything here runs on the host while a model loads, never per token. A scale is read once, as
float64, so that a value that float32 cannot hold is still seen as what it is.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from numbers import Real
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import torch

from kvcache_plugin.errors import KVScaleError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcache_plugin.formats import KVFormat

logger = logging.getLogger(__name__)

Granularity: TypeAlias = Literal["tensor", "head"]
Source: TypeAlias = Literal["checkpoint", "duplicated", "default"]

GRANULARITIES: Final = ("tensor", "head")
SOURCES: Final = ("checkpoint", "duplicated", "default")

_REMEDY: Final = (
    "Calibrate and export the K/V scales again, or remove both scales of the layer to serve it "
    "with 1.0, or serve with an unquantized KV cache (kv_cache_dtype=bfloat16)"
)
_MOST_VALUES_SHOWN: Final = 8


@dataclass(frozen=True)
class KVScales:
    """The scales of one layer, as dequantization multipliers: ``x ≈ code · scale``.

    :param k: a float per tensor, or a CPU tensor of shape ``[H]`` per head (float32 once served).
    :param v: likewise; both sides have the same granularity.
    :param k_source: ``"checkpoint"``, ``"duplicated"`` (taken from the other side) or
        ``"default"`` (1.0, because the checkpoint has none).
    :param v_source: likewise.
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
                raise ValueError(f"{side}_source must be one of {SOURCES}, got {source!r}")
            if not isinstance(scale, (float, torch.Tensor)):
                raise TypeError(
                    f"{side} must be a float or a tensor of one scale per head, got {scale!r}"
                )
        if isinstance(self.k, torch.Tensor) != isinstance(self.v, torch.Tensor):
            raise TypeError("k and v must both be floats or both be tensors of one scale per head")

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
        return self.converted(2.0)


@dataclass(frozen=True)
class ScaleSite:
    """Where a pair of scales belongs: what the rules need to know, and what errors name.

    :param kv_format: the format that the KV cache is stored in.
    :param layer: the layer's name, for messages.
    :param granularity: ``"tensor"`` or ``"head"``.
    :param num_kv_heads: the number of KV heads; needed for ``"head"``.
    """

    kv_format: KVFormat
    layer: str = ""
    granularity: Granularity = "tensor"
    num_kv_heads: int | None = None

    def __post_init__(self) -> None:
        if self.granularity not in GRANULARITIES:
            raise self.error(
                f"granularity must be 'tensor' or 'head', got {self.granularity!r}", remedy=""
            )
        if self.granularity == "tensor":
            return
        if not self.kv_format.per_head:
            raise self.error(
                f"{self.kv_format.name} has one scale per tensor, got granularity='head'",
                remedy="Per-head scales go with the FP8 formats",
            )
        heads = self.num_kv_heads
        if not isinstance(heads, int) or isinstance(heads, bool) or heads < 1:
            raise self.error(
                "granularity='head' needs the number of KV heads, got "
                f"num_kv_heads={self.num_kv_heads!r}",
                remedy="Pass num_kv_heads",
            )

    def error(self, problem: str, *, remedy: str = _REMEDY) -> KVScaleError:
        return KVScaleError(problem, layer=self.layer, remedy=remedy)

    def warn(self, sentence: str) -> None:
        logger.warning("%s%s", f"{self.layer}: " if self.layer else "", sentence)


def resolve_scales(k_scale: object, v_scale: object, site: ScaleSite) -> KVScales:
    """Read a checkpoint's pair of scales and decide which pair is used, before any conversion.

    Per-head scales come back as float64, so that a conversion cannot hide an overflow.

    :param k_scale: a number, a floating tensor on any device, or ``None`` for "not in the
        checkpoint".
    :param v_scale: likewise.
    :raises KVScaleError: for a scale that is corrupt, or is no scale at all.
    """
    k, v = _read("k_scale", k_scale, site), _read("v_scale", v_scale, site)
    _check_shapes(k, v, site)
    k, v = _flat(k), _flat(v)
    _check_finite(k, v, site)
    return _choose_pair(k, v, site)


def serve_scales(scales: KVScales, site: ScaleSite) -> KVScales:
    """The scales as they are served, after conversion: checked, and float32 where per head.

    Kernels read the scale as float32, and several of them multiply by its reciprocal: both must
    be finite.

    :raises KVScaleError: with the values as they are now, after conversion.
    """
    largest = torch.finfo(torch.float32).max
    k, v = _as_float64(scales.k), _as_float64(scales.v)
    sentence = f"{site.kv_format.family} KV cache scales must be finite and fit in torch.float32"
    got = f"got {_pair(k, v)}"
    too_large = _sides(k, v, lambda t: ~(t.isfinite() & (t <= largest)))
    if too_large:
        raise site.error(f"{sentence}, {got} (corrupt: {too_large})")
    no_reciprocal = _sides(k, v, lambda t: ~(t.float().reciprocal().isfinite() & (t > 0)))
    if no_reciprocal:
        raise site.error(
            f"{sentence}, {got} (corrupt: {no_reciprocal}, whose reciprocal is not finite in "
            "torch.float32)"
        )
    if isinstance(scales.k, torch.Tensor):
        return replace(scales, k=k.float(), v=v.float())
    return scales


def as_float(number: object) -> float | None:
    """A real number of any type as a float, ``None`` for anything else, a bool among it."""
    if isinstance(number, bool) or not isinstance(number, Real):
        return None
    try:
        return float(number)
    except OverflowError:  # an integer beyond float64
        return math.inf if number > 0 else -math.inf  # type: ignore[operator]


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is an ordinary array in memory: not sparse, and not nested."""
    return tensor.layout is torch.strided and not tensor.is_nested


def describe(tensor: torch.Tensor) -> str:
    """Dtype, shape and, where it is special, layout of a tensor, for a message."""
    shape = "nested" if tensor.is_nested else f"shape {tuple(tensor.shape)}"
    layout = "" if tensor.layout is torch.strided else f" in layout {tensor.layout}"
    return f"{tensor.dtype} of {shape}{layout}"


def holds_numbers(dtype: torch.dtype) -> bool:
    """Whether each element of a tensor is one floating-point number; packed float4 holds two."""
    return dtype.is_floating_point and dtype != getattr(torch, "float4_e2m1fn_x2", None)


def _read(name: str, scale: object, site: ScaleSite) -> torch.Tensor | None:
    """The scale as a float64 CPU tensor of its own shape, or ``None`` where it is not set."""
    if scale is None:
        return None
    if isinstance(scale, torch.Tensor):
        if not holds_numbers(scale.dtype) or not is_plain(scale):
            raise site.error(f"{name} must be a plain floating-point tensor, got {describe(scale)}")
        if scale.is_meta:
            raise site.error(
                f"{name} is on the meta device and has no value, shape {tuple(scale.shape)}",
                remedy="Load the checkpoint's tensors before the scales are checked",
            )
        return scale.detach().cpu().double()
    number = as_float(scale)
    if number is not None:
        return _float64(number)
    raise site.error(
        f"{name} must be a number, a floating-point tensor or None, got "
        f"{type(scale).__name__} {scale!r}"
    )


def _check_shapes(k: torch.Tensor | None, v: torch.Tensor | None, site: ScaleSite) -> None:
    def fits(scale: torch.Tensor | None) -> bool:
        if scale is None:
            return True
        if site.granularity == "tensor":
            return scale.numel() == 1
        heads = site.num_kv_heads
        return tuple(scale.shape) in ((heads,), (heads, 1, 1))

    if fits(k) and fits(v):
        return
    shapes = f"got k_scale shape={_shape(k)} v_scale shape={_shape(v)}"
    family = site.kv_format.family
    if site.granularity == "tensor":
        raise site.error(f"Only support per-tensor scaling factor for {family} KV cache, {shapes}")
    heads = site.num_kv_heads
    raise site.error(
        f"Per-head scaling factors for {family} KV cache have shape ({heads},) or "
        f"({heads}, 1, 1) for {heads} KV heads, {shapes}"
    )


def _check_finite(k: torch.Tensor | None, v: torch.Tensor | None, site: ScaleSite) -> None:
    corrupt = _sides(k, v, lambda t: ~t.isfinite())
    if corrupt:
        raise site.error(
            f"{site.kv_format.family} KV cache scales must be finite, got {_pair(k, v)} "
            f"(corrupt: {corrupt})"
        )


def _choose_pair(k: torch.Tensor | None, v: torch.Tensor | None, site: ScaleSite) -> KVScales:
    """Which pair is used when a side is unset, positive, or loaded and not positive."""
    positive = f"{site.kv_format.family} KV cache scales must be positive, got {_pair(k, v)}"
    divided = _sides(k, v, lambda t: (t <= 0) & (t > 0).any())
    if divided:
        raise site.error(f"{positive} (corrupt: {divided})")
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
                "that writes one scale for both writes it for K: check the export"
            )
            return KVScales(_value(v, site), _value(v, site), "duplicated", "checkpoint")
        case ("positive", _) | (_, "positive") as states:
            corrupt = "v_scale" if states[0] == "positive" else "k_scale"
            raise site.error(
                f"{positive} (corrupt: {corrupt}); one corrupt side is never replaced by the other"
            )
    site.warn(
        f"K/V scales that are not positive count as absent, got {_pair(k, v)}; 1.0 is used. "
        "Calibrate and export them again if the model needs scales"
    )
    return _default(site)


def _state(scale: torch.Tensor | None) -> Literal["unset", "positive", "not positive"]:
    if scale is None:
        return "unset"
    return "positive" if bool((scale > 0).all()) else "not positive"


def _default(site: ScaleSite) -> KVScales:
    if site.granularity == "tensor":
        return KVScales(1.0, 1.0, "default", "default")
    ones = torch.ones(site.num_kv_heads or 0, dtype=torch.float64, device="cpu")
    return KVScales(ones, ones.clone(), "default", "default")


def _value(scale: torch.Tensor | None, site: ScaleSite) -> float | torch.Tensor:
    assert scale is not None
    return float(scale.item()) if site.granularity == "tensor" else scale


def _as_float64(scale: float | torch.Tensor) -> torch.Tensor:
    if isinstance(scale, torch.Tensor):
        return scale.detach().cpu().double()
    return _float64(scale).reshape(1)


def _float64(value: float) -> torch.Tensor:
    # Engines load under a default device and dtype of their own: name both.
    return torch.tensor(value, dtype=torch.float64, device="cpu")


def _flat(scale: torch.Tensor | None) -> torch.Tensor | None:
    return None if scale is None else scale.reshape(-1)


def _sides(
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    is_corrupt: Callable[[torch.Tensor], torch.Tensor],
) -> str:
    """The sides, and of per-head scales the heads, that are corrupt: ``"k_scale of head 3"``."""
    found = []
    for name, scale in (("k_scale", k), ("v_scale", v)):
        if scale is None:
            continue
        heads = torch.nonzero(is_corrupt(scale)).flatten().tolist()
        if heads:
            found.append(name if scale.numel() == 1 else f"{name} of {_heads(heads)}")
    return " and ".join(found)


def _heads(heads: list[int]) -> str:
    shown = ", ".join(map(str, heads[:_MOST_VALUES_SHOWN]))
    more = f" and {len(heads) - _MOST_VALUES_SHOWN} more" * (len(heads) > _MOST_VALUES_SHOWN)
    return f"head {shown}" if len(heads) == 1 else f"heads {shown}{more}"


def _pair(k: torch.Tensor | None, v: torch.Tensor | None) -> str:
    return f"k_scale={_show(k)} v_scale={_show(v)}"


def _show(scale: torch.Tensor | None) -> str:
    if scale is None:
        return "unset"
    if scale.numel() == 1:
        return repr(float(scale.item()))
    values = [repr(value) for value in scale.tolist()]
    if len(values) > _MOST_VALUES_SHOWN:
        values[_MOST_VALUES_SHOWN:] = [f"... {len(values)} heads"]
    return f"[{', '.join(values)}]"


def _shape(scale: torch.Tensor | None) -> str:
    return "unset" if scale is None else str(tuple(scale.shape))
