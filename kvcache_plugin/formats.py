"""The storage formats of a quantized KV cache: torch dtype, largest value, block size, packing.

Names are the engines' own. torch dtypes are kept by name, so that a format can be named, listed
and explained without importing torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING

from kvcache_plugin.errors import anchored

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import TypeAlias

    import torch

    from kvcache_plugin.device import Device

    #: Shapes of ``data`` and of ``block_scales``, the latter ``None`` for a format without.
    Shapes: TypeAlias = tuple[tuple[int, ...], tuple[int, ...] | None]

_MOST_SHAPES_KNOWN = 1024


@dataclass(frozen=True)
class KVFormat:
    """How one quantized K or V is laid out in memory.

    A tensor of shape ``[..., head_dim]`` becomes ``data`` of shape
    ``[..., head_dim / values_per_element]`` and, where the format has blocks, ``block_scales`` of
    shape ``[..., head_dim / block_size]``.

    :param name: the value of ``kv_cache_dtype``.
    :param family: what messages call it: ``"fp8"``, ``"nvfp4"``.
    :param data_dtype: the torch dtype of ``data``, by name.
    :param largest: the largest magnitude of a code, before any scale.
    :param values_per_element: how many values share one element of ``data``.
    :param block_size: how many values along ``head_dim`` share a block scale; ``None`` for none.
    :param block_scale_dtype: the torch dtype of ``block_scales``, by name; ``None`` for none.
    :param per_head: whether the scale may also be one for each head, shape ``[H]``.
    :raises ValueError: for parameters that do not go together.
    """

    name: str
    family: str
    data_dtype: str
    largest: float
    values_per_element: int = 1
    block_size: int | None = None
    block_scale_dtype: str | None = None
    per_head: bool = False

    def __post_init__(self) -> None:
        if not self.name or self.name != self.name.strip().lower():
            raise ValueError(
                anchored(
                    f"a format's name is lower case and not empty, got {self.name!r}",
                    "invalid-kv-format",
                )
            )
        if not 0 < self.largest < float("inf"):
            raise ValueError(
                anchored(
                    f"{self.name}: largest must be positive and finite, got {self.largest!r}",
                    "invalid-kv-format",
                )
            )
        for name, count in (
            ("values_per_element", self.values_per_element),
            ("block_size", self.values_per_element if self.block_size is None else self.block_size),
        ):
            if not isinstance(count, int) or count < 1 or count % self.values_per_element:
                raise ValueError(
                    anchored(
                        f"{self.name}: {name} must be a positive multiple of values_per_element, "
                        f"got {count!r}",
                        "invalid-kv-format",
                    )
                )
        if (self.block_size is None) != (self.block_scale_dtype is None):
            raise ValueError(
                anchored(
                    f"{self.name}: block_size and block_scale_dtype go together, got "
                    f"{self.block_size!r} and {self.block_scale_dtype!r}",
                    "invalid-kv-format",
                )
            )

    @cached_property
    def torch_dtype(self) -> torch.dtype:
        """The torch dtype of ``data``."""
        return _torch_dtype(self.data_dtype)

    @cached_property
    def torch_block_scale_dtype(self) -> torch.dtype | None:
        """The torch dtype of ``block_scales``, ``None`` where the format has none."""
        return None if self.block_scale_dtype is None else _torch_dtype(self.block_scale_dtype)

    def check_dtypes(self) -> None:
        """See that torch has the dtypes.

        :raises ValueError: for a dtype that the installed torch does not know.
        """
        for name in filter(None, (self.data_dtype, self.block_scale_dtype)):
            try:
                _torch_dtype(name)
            except AttributeError as error:
                raise ValueError(
                    anchored(f"{self.name}: torch has no dtype {name!r}", "invalid-kv-format")
                ) from error

    @cached_property
    def head_dim_multiple(self) -> int:
        """``head_dim`` must be a multiple of this."""
        return self.block_size or self.values_per_element

    def data_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of ``data`` for K or V of this shape."""
        return self.shapes(shape)[0]

    def block_scales_shape(self, shape: Sequence[int]) -> tuple[int, ...] | None:
        """Shape of ``block_scales`` for K or V of this shape, ``None`` for a format without."""
        return self.shapes(shape)[1]

    def shapes(self, shape: Sequence[int]) -> Shapes:
        """Shapes of ``data`` and of ``block_scales`` for K or V of this shape."""
        try:
            return self._known_shapes[shape]  # type: ignore[index]
        except (KeyError, TypeError):  # a new one, or one that is no key: symbolic, or a list
            return self._new_shapes(shape)

    @cached_property
    def _known_shapes(self) -> dict[tuple[int, ...], Shapes]:
        """K and V of few shapes are quantized again and again."""
        return {}

    def _new_shapes(self, shape: Sequence[int]) -> Shapes:
        *lead, head_dim = shape
        data_shape = (*lead, head_dim // self.values_per_element)
        if self.block_size is None:
            shapes: Shapes = data_shape, None
        else:
            shapes = data_shape, (*lead, head_dim // self.block_size)
        if all(type(size) is int for size in shape):
            if len(self._known_shapes) >= _MOST_SHAPES_KNOWN:
                self._known_shapes.clear()
            self._known_shapes[tuple(shape)] = shapes
        return shapes


def _torch_dtype(name: str) -> torch.dtype:
    import torch

    dtype: torch.dtype = getattr(torch, name)
    return dtype


# Largest values: OCP 8-bit floating point specification 1.0 (e4m3fn, e5m2), AMD's FNUZ variant of
# it (e4m3fnuz), OCP Microscaling specification 1.0 (e2m1).
FP8_E4M3 = KVFormat("fp8_e4m3", "fp8", "float8_e4m3fn", 448.0, per_head=True)
FP8_E5M2 = KVFormat("fp8_e5m2", "fp8", "float8_e5m2", 57344.0, per_head=True)
FP8_E4M3FNUZ = KVFormat("fp8_e4m3fnuz", "fp8", "float8_e4m3fnuz", 240.0, per_head=True)
NVFP4 = KVFormat(
    "nvfp4",
    "nvfp4",
    "uint8",
    6.0,
    values_per_element=2,
    block_size=16,
    block_scale_dtype="float8_e4m3fn",
)

BUILT_IN: tuple[KVFormat, ...] = (FP8_E4M3, FP8_E5M2, FP8_E4M3FNUZ, NVFP4)
ALIASES: Mapping[str, str] = MappingProxyType({"fp8": FP8_E4M3.name})


def canonical(kv_cache_dtype: str) -> str:
    """The one name of a format: ``fp8`` is ``fp8_e4m3``; unknown names come back as they are."""
    name = kv_cache_dtype.strip().lower()
    return ALIASES.get(name, name)


def on_device(kv_cache_dtype: str, device: Device) -> str:
    """The format that is really stored: ``fp8_e4m3`` is ``fp8_e4m3fnuz`` on FNUZ hardware."""
    name = canonical(kv_cache_dtype)
    return FP8_E4M3FNUZ.name if name == FP8_E4M3.name and device.is_fnuz else name
