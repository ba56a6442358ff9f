"""What quantizing K or V gives, and the buffers that it may be given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class QuantizedKV:
    """Quantized K or V.

    :param data: the codes. FP8: the format's torch dtype, ``[..., head_dim]``. NVFP4: uint8,
        ``[..., head_dim / 2]``, the even element in the low nibble.
    :param block_scales: NVFP4: float8_e4m3fn, ``[..., head_dim / 16]``, linear. Else ``None``.
    :param scale: dequantization multiplier, float32 on the same device, ``[1]`` or ``[H]``. It
        shares memory with the caller's scale where that is a float32 tensor.
    :param kv_cache_dtype: the format of the codes, ``"fp8_e4m3"`` for instance.
    """

    data: torch.Tensor
    block_scales: torch.Tensor | None
    scale: torch.Tensor
    kv_cache_dtype: str


class OutBuffers(NamedTuple):
    """Buffers that the caller owns, to be filled: of the shapes and dtypes of a ``QuantizedKV``.

    :ivar data: for the codes.
    :ivar block_scales: for the block scales; ``None`` for a format without.
    """

    data: torch.Tensor
    block_scales: torch.Tensor | None = None
