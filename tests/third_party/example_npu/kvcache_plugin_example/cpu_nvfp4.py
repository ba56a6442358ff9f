"""Example NVFP4 on the CPU: takes one format over and leaves the rest to the built-in reference.

An implementation need not bring every hook. This one quantizes; the reference goes on converting
scales and dequantizing. No flag is needed: a plugin of another package comes before the built-in
ones wherever its ``supports_kv`` answers ``True``.
"""

from __future__ import annotations

import torch

import kvcache_plugin as kv

#: How often K or V was quantized here.
calls = 0

_BLOCK = 16
_LARGEST_CODE = 6.0
_LARGEST_BLOCK_SCALE = torch.finfo(torch.float8_e4m3fn).max
_LARGEST_FLOAT32 = torch.finfo(torch.float32).max
_SIGN = 0b1000
# Halfway points between the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4 and 6 of codes 0 to 7. A tie goes
# to the even code: down to it, or up to it.
_TIES_DOWN = torch.tensor([0.25, 1.25, 2.5, 5.0], device="cpu", dtype=torch.float32)
_TIES_UP = torch.tensor([0.75, 1.75, 3.5], device="cpu", dtype=torch.float32)


@kv.hookimpl
def supports_kv(device: kv.Device, kv_cache_dtype: str) -> bool | str:
    if (device.kind, kv_cache_dtype) != ("cpu", "nvfp4"):
        return f"serves nvfp4 on cpu, and this is {kv_cache_dtype} on {device}"
    return True


@kv.hookimpl
@torch.no_grad()
def quantize_kv(
    tensor: torch.Tensor, scale: torch.Tensor, kv_cache_dtype: str, out: kv.OutBuffers | None
) -> kv.QuantizedKV:
    global calls
    calls += 1
    blocks = tensor.float().reshape(*tensor.shape[:-1], tensor.shape[-1] // _BLOCK, _BLOCK)
    magnitudes = blocks.abs()
    largest = magnitudes.nan_to_num(nan=0.0, posinf=torch.inf).amax(-1)
    block_scales = _block_scales(largest, scale)
    codes = _codes(magnitudes * _reciprocal(block_scales, scale).unsqueeze(-1))
    codes = torch.where(blocks.signbit(), codes | _SIGN, codes).flatten(-2)
    data = codes[..., 0::2] | codes[..., 1::2] << 4
    if out is not None and out.block_scales is not None:
        data = out.data.copy_(data)
        block_scales = out.block_scales.copy_(block_scales)
    return kv.QuantizedKV(data, block_scales, scale, kv_cache_dtype)


def _block_scales(largest: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """What brings the largest magnitude of each block to the largest code, as e4m3."""
    # NVFP4 has one global scale, always of shape [1]: nothing is per head here.
    ideal = largest / (_LARGEST_CODE * scale)
    saturated = ideal.clamp(max=_LARGEST_BLOCK_SCALE)
    return saturated.masked_fill(largest.isinf(), _LARGEST_BLOCK_SCALE).to(torch.float8_e4m3fn)


def _reciprocal(block_scales: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """What a block is multiplied by; 0 where its scale has become 0."""
    served = block_scales.float()
    return (1.0 / (served * scale)).clamp(max=_LARGEST_FLOAT32).masked_fill(served == 0, 0.0)


def _codes(magnitudes: torch.Tensor) -> torch.Tensor:
    """Codes 0 to 7: how many halfway points a magnitude has passed; NaN has passed none."""
    each = magnitudes.unsqueeze(-1)
    passed = (each > _TIES_DOWN).sum(-1) + (each >= _TIES_UP).sum(-1)
    return passed.to(torch.uint8)
