"""What implementations are given: values, the ways a tensor can lie in memory, buffers to fill.

Values are made on the CPU from a seed, so that a failure on another machine can be repeated here.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from kvcache_plugin.conformance.comparing import BLOCK, E2M1_MAGNITUDES
from kvcache_plugin.quantized import OutBuffers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvcache_plugin.formats import KVFormat

_INF: Final = float("inf")
_NAN: Final = float("nan")
#: What fills the memory around a buffer.
_GUARD: Final = 0xA5
_GUARD_ELEMENTS: Final = 64


# Values, in float32


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=_generator(seed), dtype=torch.float32, device="cpu")


def uniform(low: float, high: float, *shape: int, seed: int = 0) -> torch.Tensor:
    x = torch.rand(shape, generator=_generator(seed), dtype=torch.float32, device="cpu")
    return low + (high - low) * x


def heavy_tailed(*shape: int, seed: int = 0) -> torch.Tensor:
    """A ratio of normals: single values that are far above all the others, as in K."""
    return normal(*shape, seed=seed) / normal(*shape, seed=seed + 1).abs().clamp(min=1e-3)


def log_uniform(low: float, high: float, *shape: int, seed: int = 0) -> torch.Tensor:
    """Magnitudes from ``10^low`` to ``10^high``, each power as likely as another."""
    signs = normal(*shape, seed=seed).sign()
    return signs * 10.0 ** uniform(low, high, *shape, seed=seed + 1)


def every_pattern(dtype: torch.dtype) -> torch.Tensor:
    """The 65,536 values of bfloat16 or float16, in the order of their bits."""
    return torch.arange(1 << 16, dtype=torch.int32, device="cpu").to(torch.int16).view(dtype)


def random_patterns(count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Values of any exponent, infinities and NaN among them."""
    size = torch.finfo(dtype).bits
    integer = torch.int32 if size == 32 else torch.int16
    low, high = -(1 << (size - 1)), 1 << (size - 1)
    patterns = torch.randint(low, high, (count,), generator=_generator(seed), device="cpu")
    return patterns.to(integer).view(dtype)


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounded to ``dtype``; a NaN keeps its sign, which torch's own cast may change."""
    rounded = x.to(dtype)
    if dtype == torch.float32:
        return rounded
    magnitude = rounded.view(torch.int16) & 0x7FFF
    return torch.where(x.signbit(), magnitude | -0x8000, magnitude).view(dtype)


def shuffled(x: torch.Tensor, seed: int = 0) -> torch.Tensor:
    return x[torch.randperm(len(x), generator=_generator(seed), device="cpu")]


def hard(*shape: int) -> dict[str, torch.Tensor]:
    """Values that are rare where K and V come from, each kind by itself."""
    values = normal(*shape)
    signs = values.sign()
    lone_nan, lone_infinity, mixed = values.clone(), values.clone(), values.clone()
    lone_nan[..., ::16] = _NAN
    lone_infinity[..., 3::16] = -_INF
    mixed[..., 5::32], mixed[..., 7::16], mixed[..., 8::16] = _INF, _NAN, -0.0
    return {
        "multiples of a quarter": (values * 8).round() / 4,
        "magnitudes of any power of ten": log_uniform(-44, 38, *shape),
        "magnitudes around 1e-38": values * 1e-38,
        "magnitudes around 3e38": signs * uniform(1.5e38, 3e38, *shape),
        "zeros of both signs": signs * 0.0,
        "infinities": signs * _INF,
        "NaN of both signs": torch.copysign(torch.full_like(values, _NAN), signs),
        "a NaN in each block": lone_nan,
        "an infinity in each block": lone_infinity,
        "infinity, NaN and -0": mixed,
    }


def scaled_ties(kv_format: KVFormat) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """Values in float64 that their scale brings to halfway between two codes, and the scales.

    A quotient that is not rounded as IEEE division rounds, or a reciprocal, moves some of them.
    """
    whole = torch.arange(3, 67, 2, dtype=torch.float32, device="cpu") / 64
    scales = {"scales of few bits": whole, "scales of 24 bits": uniform(0.01, 0.1, 32)}
    if kv_format.block_size is None:
        halfway = _halfway(_finite(kv_format.torch_dtype))
        ties = torch.stack([halfway, -halfway]).unsqueeze(1)
        return [(kind, ties * s.double().unsqueeze(1), s) for kind, s in scales.items()]
    # A block has the scale that is a sixth of its largest value: with halfway points below a scale,
    # then alone, halfway between two scales.
    halfway = _halfway(torch.tensor(E2M1_MAGNITUDES, dtype=torch.float64, device="cpu"))
    block_scales = _finite(torch.float8_e4m3fn)[8:]
    below = (
        torch.cat([halfway.new_tensor([6.0, 0.0]), halfway, -halfway]) * block_scales[:112, None]
    )
    alone = torch.nn.functional.pad(6 * _halfway(block_scales)[-112:, None], (0, BLOCK - 1))
    blocks = torch.cat([below, alone]).view(2, -1, 128)
    return [
        (f"{kind}: {g:.9g}", blocks * g.double(), g.view(1))
        for kind, s in scales.items()
        for g in s[:3]
    ]


def _finite(dtype: torch.dtype) -> torch.Tensor:
    """The positive values of an 8-bit float and 0, in their order."""
    values = torch.arange(128, dtype=torch.uint8, device="cpu").view(dtype).double()
    return values[values.isfinite()]


def _halfway(values: torch.Tensor) -> torch.Tensor:
    return (values[1:] + values[:-1]) / 2


def calibrated_scale(x: torch.Tensor, kv_format: KVFormat) -> float:
    """The scale that brings the largest finite magnitude to the largest code."""
    finite = x.float().abs().nan_to_num(nan=0.0, posinf=0.0)
    largest = float(finite.max()) if x.numel() else 0.0
    reach = kv_format.largest
    if kv_format.torch_block_scale_dtype is not None:
        reach *= torch.finfo(kv_format.torch_block_scale_dtype).max
    return largest / reach or 1.0


def _generator(seed: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)


# Ways to lie in memory

#: Views of values of shape ``[8, 4, 128]``, packed.
VIEWS: Final[Mapping[str, Callable[[torch.Tensor], torch.Tensor]]] = MappingProxyType(
    {
        "heads before tokens": lambda x: x.transpose(0, 1),
        "every second token": lambda x: x[1::2],
        "K of fused QKV": lambda x: x.flatten(1)[:, 128:384].view(8, 2, 128),
        "K of a cache of K and V": lambda x: x.view(4, 2, 4, 128)[:, 0],
        "the second half of head_dim": lambda x: x[..., 64:],
        "every second element": lambda x: x[..., 1::2],
        "head_dim first in memory": lambda x: x.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        "an expanded token": lambda x: x[:1].expand(5, -1, -1),
        "an expanded head": lambda x: x[:, :1].expand(-1, 3, -1),
        "an expanded element": lambda x: x[..., :1].expand(-1, -1, 128),
        "windows that overlap": lambda x: x.flatten().unfold(0, 128, 48)[:6],
        "one element after an aligned place": lambda x: x.flatten()[1:1025].view(2, 4, 128),
        "five leading dimensions in another order": lambda x: x.reshape(2, 2, 2, 2, 2, 128).permute(
            4, 2, 0, 3, 1, 5
        ),
    }
)

#: Orders in memory, and gaps, of a buffer of any shape: each is given the shape and makes a room
#: (a packed shape, and the view of the buffer in it).
_Room = tuple[tuple[int, ...], "Callable[[torch.Tensor], torch.Tensor]"]


def _packed(shape: tuple[int, ...]) -> _Room:
    return shape, lambda room: room


def _reversed(shape: tuple[int, ...]) -> _Room:
    *lead, last = shape
    order = range(len(lead))
    return (*lead[::-1], last), lambda room: room.permute(*reversed(order), len(lead))


def _last_first(shape: tuple[int, ...]) -> _Room:
    *lead, last = shape
    return (last, *lead), lambda room: room.permute(*range(1, len(shape)), 0)


def _rows_apart(shape: tuple[int, ...]) -> _Room:
    *lead, last = shape
    return (*lead, 2 * last + 1), lambda room: room[..., 1 : 1 + last]


def _gaps_everywhere(shape: tuple[int, ...]) -> _Room:
    return tuple(2 * n for n in shape), lambda room: room[(slice(1, None, 2),) * len(shape)]


def _one_side(shape: tuple[int, ...]) -> _Room:
    first, *rest = shape
    return (first, 2, *rest), lambda room: room[:, 1]


LAYOUTS: Final[Mapping[str, Callable[[tuple[int, ...]], _Room]]] = MappingProxyType(
    {
        "packed": _packed,
        "V of a cache of K and V": _one_side,
        "rows with gaps": _rows_apart,
        "leading dimensions in another order": _reversed,
        "head_dim first in memory": _last_first,
        "gaps in every dimension": _gaps_everywhere,
    }
)


class Layout(NamedTuple):
    """A name in ``LAYOUTS`` for data, and one for block scales."""

    data: str
    block_scales: str

    def __str__(self) -> str:
        if self.data == self.block_scales:
            return self.data
        return f"{self.data}, block scales {self.block_scales}"

    @property
    def is_mixed(self) -> bool:
        return self.data != self.block_scales


PACKED: Final = Layout("packed", "packed")


def layouts(kv_format: KVFormat) -> list[Layout]:
    """Data and block scales that lie alike, and one of both packed where there are both."""
    found = [Layout(name, name) for name in LAYOUTS]
    if kv_format.block_size is not None:
        others = [name for name in LAYOUTS if name != "packed"]
        found += [Layout("packed", name) for name in others]
        found += [Layout(name, "packed") for name in others]
    return found


class Buffers(NamedTuple):
    """Buffers of the caller, and the memory that they lie in.

    :param rooms: for data, and for block scales where there are any, all of the memory as bytes.
    """

    out: OutBuffers
    rooms: tuple[torch.Tensor, ...]

    def overwritten(self) -> int:
        """How many bytes beside the buffers were written. The buffers are wiped."""
        for part in self.out:
            if part is not None:
                guard = torch.full((part.element_size(),), _GUARD, dtype=torch.uint8)
                part.copy_(guard.to(part.device).view(part.dtype).expand(part.shape))
        return sum(int((room != _GUARD).sum()) for room in self.rooms)


def new_buffers(
    shape: Sequence[int],
    kv_format: KVFormat,
    layout: Layout,
    device: torch.device,
    *,
    offset: int = 0,
) -> Buffers:
    """Buffers for K or V of a shape, laid out as in ``LAYOUTS``, with guards before and after.

    :param offset: elements between an aligned place and the buffers.
    """
    data, data_room = _buffer(
        kv_format.data_shape(shape), kv_format.torch_dtype, layout.data, device, offset
    )
    scales_shape, scales_dtype = (
        kv_format.block_scales_shape(shape),
        kv_format.torch_block_scale_dtype,
    )
    if scales_shape is None or scales_dtype is None:
        return Buffers(OutBuffers(data), (data_room,))
    block_scales, scales_room = _buffer(
        scales_shape, scales_dtype, layout.block_scales, device, offset
    )
    return Buffers(OutBuffers(data, block_scales), (data_room, scales_room))


def _buffer(
    shape: tuple[int, ...], dtype: torch.dtype, layout: str, device: torch.device, offset: int
) -> tuple[torch.Tensor, torch.Tensor]:
    room_shape, view = LAYOUTS[layout](shape)
    count = 1
    for length in room_shape:
        count *= length
    size = dtype.itemsize
    start = _GUARD_ELEMENTS + offset
    room = torch.full(
        ((start + count + _GUARD_ELEMENTS) * size,), _GUARD, dtype=torch.uint8, device=device
    )
    inside = room[start * size : (start + count) * size].view(dtype)
    return view(inside.view(room_shape)), room
