"""What is quantized and dequantized: more of it than a cache holds, taken in turns."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from kvcache_plugin.quantized import OutBuffers, QuantizedKV

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache_plugin.formats import KVFormat

#: K of a usual model: the heads of a layer, and their values.
HEADS: Final = 8
HEAD_DIM: Final = 128
DTYPE: Final = torch.bfloat16

#: K of all inputs fills this many caches, and no more bytes than that. Codes are as many, and so
#: smaller: those to be dequantized stay in a cache, in part.
_CACHES: Final = 2
_MOST_BYTES: Final = 512 << 20
#: Of small inputs, which are many; these stay in a cache, in part.
_MOST_INPUTS: Final = 1024
#: Tokens that are made; the rest repeats them.
_DISTINCT_TOKENS: Final = 1024
_SEED: Final = 0
#: Where the kernel does not tell the size of the last cache.
_USUAL_CACHE: Final = 64 << 20
_CPU_CACHES: Final = Path("/sys/devices/system/cpu/cpu0/cache")


@dataclass(frozen=True)
class Inputs:
    """K of one number of tokens, several times over.

    :param count: how many there are.
    """

    tokens: int
    count: int
    device: torch.device

    @classmethod
    def of(cls, tokens: int, device: torch.device) -> Inputs:
        wanted = min(_CACHES * last_cache_bytes(device), _MOST_BYTES)
        one = tokens * HEADS * HEAD_DIM * DTYPE.itemsize
        return cls(tokens, max(2, min(_MOST_INPUTS, -(-wanted // one))), device)

    @cached_property
    def keys(self) -> Sequence[torch.Tensor]:
        """Each ``[tokens, HEADS, HEAD_DIM]``, side by side in memory."""
        return self.repeated(self.first_tokens)

    def scale(self, kv_format: KVFormat) -> torch.Tensor:
        """The scale with which K's largest magnitude is the format's largest."""
        reach = kv_format.largest
        if kv_format.torch_block_scale_dtype is not None:
            reach *= torch.finfo(kv_format.torch_block_scale_dtype).max
        return (_distinct(self.device).abs().max().float() / reach).reshape(1)

    def empty(self, kv_format: KVFormat) -> Sequence[OutBuffers]:
        """Buffers for the codes of each K."""
        data_shape, scales_shape = kv_format.shapes((self.tokens * self.count, HEADS, HEAD_DIM))
        scales: Sequence[torch.Tensor | None] = [None] * self.count
        if scales_shape is not None:
            scales = self._zeros(scales_shape, kv_format.torch_block_scale_dtype)
        data = self._zeros(data_shape, kv_format.torch_dtype)
        return [OutBuffers(*parts) for parts in zip(data, scales, strict=True)]

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype | None) -> Sequence[torch.Tensor]:
        # Written to, since a system hands out memory page by page when it is first touched.
        whole = torch.empty(shape, dtype=dtype, device=self.device).zero_()
        return torch.split(whole, self.tokens)

    def codes(self, sample: QuantizedKV) -> Sequence[QuantizedKV]:
        """What quantizing each K gives.

        :param sample: what quantizing ``first_tokens`` gave.
        """
        scales: Sequence[torch.Tensor | None] = [None] * self.count
        if sample.block_scales is not None:
            scales = self.repeated(sample.block_scales)
        return [
            QuantizedKV(data, block_scales, sample.scale, sample.kv_cache_dtype)
            for data, block_scales in zip(self.repeated(sample.data), scales, strict=True)
        ]

    def repeated(self, part: torch.Tensor) -> Sequence[torch.Tensor]:
        """For each K what there is of ``first_tokens``."""
        return torch.split(_repeated(part, self.tokens * self.count), self.tokens)

    @property
    def first_tokens(self) -> torch.Tensor:
        """The tokens that K repeats."""
        return _distinct(self.device)


def bytes_per_token(kv_format: KVFormat) -> tuple[int, int]:
    """Bytes of one token's K, and of its codes and block scales."""
    data_shape, scales_shape = kv_format.shapes((1, HEADS, HEAD_DIM))
    stored = _count(data_shape) * kv_format.torch_dtype.itemsize
    if scales_shape is not None and kv_format.torch_block_scale_dtype is not None:
        stored += _count(scales_shape) * kv_format.torch_block_scale_dtype.itemsize
    return HEADS * HEAD_DIM * DTYPE.itemsize, stored


def last_cache_bytes(device: torch.device) -> int:
    """The size of the last cache before the memory."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    if device.type == "cpu":
        try:
            sizes = [path.read_text().strip() for path in _CPU_CACHES.glob("index*/size")]
            return max(int(size.removesuffix("K")) << 10 for size in sizes)
        except (OSError, ValueError):
            return _USUAL_CACHE
    return _USUAL_CACHE


@cache
def _distinct(device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(_SEED)
    shape = (_DISTINCT_TOKENS, HEADS, HEAD_DIM)
    return torch.randn(shape, generator=generator).to(device, DTYPE)


def _repeated(chunk: torch.Tensor, tokens: int) -> torch.Tensor:
    """A tensor of so many tokens that repeats the chunk's."""
    whole = torch.empty(tokens, *chunk.shape[1:], dtype=chunk.dtype, device=chunk.device)
    for part in torch.split(whole, len(chunk)):
        part.copy_(chunk[: len(part)])
    return whole


def _count(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())
