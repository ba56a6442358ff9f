"""Example NPU: FP8 K and V on an accelerator that does not exist.

A template for the implementation of real hardware. It is an ordinary module, named in the
entry-point group ``kvcache_plugin`` of ``pyproject.toml``. Nothing is registered in code, and
nothing touches the hardware while the module is imported.
"""

from __future__ import annotations

import torch

import kvcache_plugin as kv

#: What torch calls the device: a name of its own, or the one before the vendor's package is there.
KINDS = ("npu", "privateuseone")
_FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
# The hardware flushes subnormal scales to zero.
_SMALLEST_SCALE = torch.finfo(torch.float32).smallest_normal


@kv.hookimpl
def supports_kv(device: kv.Device, kv_cache_dtype: str) -> bool | str:
    """Asked once for each device and format. A reason is shown by ``explain`` and in errors."""
    if device.kind not in KINDS:
        return f"serves NPUs, and this is {device}"
    if _generation(device) == "npu_v1":
        return "FP8 came with npu_v2, and this is npu_v1"
    if kv_cache_dtype not in _FP8:
        return f"stores {' and '.join(_FP8)}, and this is {kv_cache_dtype}"
    return True


@kv.hookimpl
def describe_kv() -> kv.KVDescription:
    """What ``explain`` shows where this serves. No tolerance: the codes are the reference's."""
    return kv.KVDescription("FP8 in torch, where an NPU would run a kernel")


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
@torch.no_grad()
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


def _generation(device: kv.Device) -> str:
    """Torch knows no generations, and leaves ``arch`` empty: here the driver would be asked."""
    return device.arch or "npu_v2"
