"""Example NPU: FP8 K and V on an accelerator that does not exist.

A template for the implementation of real hardware. It is an ordinary module, named in the
entry-point group ``kvcache_plugin`` of ``pyproject.toml``. Nothing is registered in code, and
nothing touches the hardware while the module is imported.

The device is ``Device("npu", "npu_v2")``. Its first generation, ``npu_v1``, has no FP8.
"""

from __future__ import annotations

import torch

import kvcache_plugin as kv

_FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
# The hardware flushes subnormal scales to zero.
_SMALLEST_SCALE = torch.finfo(torch.float32).smallest_normal


@kv.hookimpl
def supports_kv(device: kv.Device, kv_cache_dtype: str) -> bool | str:
    """Asked once for each device and format. A reason is shown by ``explain`` and in errors."""
    if device.kind != "npu":
        return f"serves NPUs, and this is {device}"
    if device.arch == "npu_v1":
        return "FP8 came with npu_v2, and this is npu_v1"
    if kv_cache_dtype not in _FP8:
        return f"stores {' and '.join(_FP8)}, and this is {kv_cache_dtype}"
    return True


@kv.hookimpl
def validate_kv_scales(scales: kv.KVScales, layer: str) -> kv.KVScales:
    """Called once for each layer. Scales are finite and positive here: check what is special.

    A hook function names the arguments that it needs, and leaves out the others.
    """
    for side, scale in (("k_scale", scales.k), ("v_scale", scales.v)):
        if torch.as_tensor(scale).min() < _SMALLEST_SCALE:
            raise kv.KVScaleError(
                f"the NPU needs scales of at least {_SMALLEST_SCALE}, got {side}={scale}",
                layer=layer,
                remedy="Export the checkpoint with larger scales",
            )
    return scales


@kv.hookimpl
def quantize_kv(
    tensor: torch.Tensor,
    scale: torch.Tensor,
    kv_cache_dtype: str,
    out: kv.OutBuffers | None,
) -> kv.QuantizedKV:
    """Called for each write to the cache. Here a kernel is launched; this one is written in torch.

    Read no value of a tensor on the host: the call may be captured into a graph.
    """
    dtype = _FP8[kv_cache_dtype]
    largest = torch.finfo(dtype).max
    scaled = tensor.float() / _for_each_head(scale)
    data = scaled.clamp(-largest, largest).to(dtype)
    if out is not None:
        data = out.data.copy_(data)
    return kv.QuantizedKV(data, None, scale, kv_cache_dtype)


@kv.hookimpl
def dequantize_kv(quantized: kv.QuantizedKV, dtype: torch.dtype) -> torch.Tensor:
    """The inverse map of the codes."""
    return (quantized.data.float() * _for_each_head(quantized.scale)).to(dtype)


def _for_each_head(scale: torch.Tensor) -> torch.Tensor:
    """``[1]``, or ``[H, 1]`` that broadcasts against ``[..., H, head_dim]``."""
    return scale if scale.numel() == 1 else scale.unsqueeze(-1)
