"""Known answers as tensors: what is given, and the ``QuantizedKV`` that it must become."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from kvcache_plugin.conformance import tables
from kvcache_plugin.conformance.comparing import BLOCK, packed
from kvcache_plugin.quantized import QuantizedKV

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvcache_plugin.formats import KVFormat

_INF: Final = float("inf")
_HEAD_DIM: Final = 128
#: fp32(1/448) · 448 is 1: beside a block scale of 448 values are multiplied by 1.
UNIT_GLOBAL_SCALE: Final = 1 / 448


class Answer(NamedTuple):
    """:param x: float32, whose values the dtype in question has."""

    what: str
    x: torch.Tensor
    expected: QuantizedKV


def answers(kv_format: KVFormat, section: str, dtype: torch.dtype) -> list[Answer]:
    """The known answers of a section of the tables, as far as ``dtype`` has the values."""
    if kv_format.name in tables.FP8:
        return [_fp8(kv_format, section, dtype)]
    return [_e2m1(kv_format, section, dtype), _block_scales(kv_format, section, dtype)]


def worked_block(kv_format: KVFormat) -> Answer:
    values, codes, _ = zip(*tables.WORKED_BLOCK, strict=True)
    block_scale = _bytes([tables.WORKED_BLOCK_SCALE])
    expected = _nvfp4(_bytes(codes), block_scale, tables.WORKED_GLOBAL_SCALE, kv_format)
    return Answer("a block worked by hand", floats(values).view(1, 1, -1), expected)


def values(kv_format: KVFormat) -> tuple[QuantizedKV, torch.Tensor]:
    """Codes, and the float32 values that they have."""
    if kv_format.name in tables.FP8_VALUES:
        known, codes = zip(*tables.FP8_VALUES[kv_format.name], strict=True)
        data = _filled(_HEAD_DIM, _bytes(codes)).view(kv_format.torch_dtype).view(1, 1, -1)
        quantized = QuantizedKV(data, None, floats([1.0]), kv_format.name)
        return quantized, _filled(_HEAD_DIM, floats(known)).view(1, 1, -1)
    _, _, known = zip(*tables.WORKED_BLOCK, strict=True)
    return worked_block(kv_format).expected, floats(known).view(1, 1, -1)


def floats(values: Iterable[float]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.float32, device="cpu")


def _fp8(kv_format: KVFormat, section: str, dtype: torch.dtype) -> Answer:
    rows = [row for row in tables.FP8[kv_format.name][section] if _has(dtype, row[0])]
    x = _filled(_HEAD_DIM, floats(value for value, _ in rows))
    codes = _filled(_HEAD_DIM, _bytes(bits for _, bits in rows))
    data = codes.view(kv_format.torch_dtype).view(1, 1, -1)
    expected = QuantizedKV(data, None, floats([1.0]), kv_format.name)
    return Answer("known answers", x.view(1, 1, -1), expected)


def _e2m1(kv_format: KVFormat, section: str, dtype: torch.dtype) -> Answer:
    """15 values and an infinity to a block."""
    rows = [row for row in tables.E2M1[section] if _has(dtype, row[0])]
    blocks, beside = _HEAD_DIM // BLOCK, BLOCK - 1
    x = _filled(blocks * beside, floats(value for value, _ in rows)).view(blocks, beside)
    codes = _filled(blocks * beside, _bytes(bits for _, bits in rows)).view(blocks, beside)
    infinities = floats([_INF] * blocks).unsqueeze(1)
    x = torch.cat([x, infinities], dim=1)
    codes = torch.cat([codes, _bytes(["0_11_1"] * blocks).unsqueeze(1)], dim=1)
    expected = _nvfp4(codes, _bytes(["0_1111_110"] * blocks), UNIT_GLOBAL_SCALE, kv_format)
    return Answer("known answers beside infinities", x.view(1, 1, -1), expected)


def _block_scales(kv_format: KVFormat, section: str, dtype: torch.dtype) -> Answer:
    """One value and 15 zeros to a block."""
    rows = [row for row in tables.BLOCK_SCALES[section] if _has(dtype, row[0])]
    blocks = 2 * _HEAD_DIM // BLOCK
    places = torch.arange(len(rows), device="cpu")
    x = floats([0.0] * blocks * BLOCK).view(blocks, BLOCK)
    x[places, places] = floats(value for value, _, _ in rows)
    codes = torch.zeros(blocks, BLOCK, dtype=torch.uint8, device="cpu")
    codes[places, places] = _bytes(bits for _, _, bits in rows)
    block_scales = _filled(blocks, _bytes(bits for _, bits, _ in rows))
    expected = _nvfp4(codes.view(2, -1), block_scales.view(2, -1), 1.0, kv_format)
    return Answer("known answers beside zeros", x.view(1, 2, -1), expected)


def _nvfp4(
    codes: torch.Tensor, block_scales: torch.Tensor, g: float, kv_format: KVFormat
) -> QuantizedKV:
    rows = block_scales.numel() * BLOCK // _HEAD_DIM or 1
    return QuantizedKV(
        packed(codes.reshape(1, rows, -1)),
        block_scales.reshape(1, rows, -1).view(torch.float8_e4m3fn),
        floats([g]),
        kv_format.name,
    )


def _filled(count: int, first: torch.Tensor) -> torch.Tensor:
    """As many elements, zeros after the first ones."""
    tensor = torch.zeros(count, dtype=first.dtype, device="cpu")
    tensor[: len(first)] = first
    return tensor


def _bytes(codes: Iterable[str]) -> torch.Tensor:
    return torch.tensor([tables.code(bits) for bits in codes], dtype=torch.uint8, device="cpu")


def _has(dtype: torch.dtype, value: float) -> bool:
    stored = floats([value]).to(dtype).item()
    return stored == value or math.isnan(value)
