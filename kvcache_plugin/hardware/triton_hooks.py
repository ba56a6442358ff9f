"""The hooks as the Triton kernels serve them, for the modules of GPUs to take over.

Triton is imported when a device is selected for the first time, and not before.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from kvcache_plugin import Device, KVScales, OutBuffers, QuantizedKV, hookimpl

if TYPE_CHECKING:
    import torch

FNUZ: Final = "fp8_e4m3fnuz"
NVFP4: Final = "nvfp4"
FORMATS: Final = ("fp8_e4m3", "fp8_e5m2", FNUZ, NVFP4)
#: The first CUDA capability where Triton casts float32 to FP8 in one step. 8.9 has the instruction,
#: but before 3.9 Triton goes by way of float16 there, and so rounds twice.
_FP8_CAST: Final = (9, 0)
#: The first Triton whose ``div_rn`` keeps subnormals on CUDA: 3.5 still makes ``div.rn.ftz`` of it.
_FIRST_IEEE_DIVISION: Final = (3, 6)


def supports(kv_cache_dtype: str) -> bool | str:
    """Whether the kernels serve a format on the GPUs that a module serves, or why not."""
    if kv_cache_dtype not in FORMATS:
        return f"serves {', '.join(FORMATS)}, and this is {kv_cache_dtype}"
    return _why_not_triton() or True


@cache
def _why_not_triton() -> str:
    """Why Triton cannot be used here, with the remedy; empty when it can."""
    try:
        _launch()
    except ImportError as error:
        if error.name == "triton":
            return "needs Triton, which is not installed: pip install triton"
        return f"Triton cannot be imported ({error}): pip install --force-reinstall triton"
    except Exception as error:  # whatever an import runs into
        what = f"{type(error).__name__}: {error}"
        return f"Triton cannot be imported ({what}): pip install --force-reinstall triton"
    return ""


def has_cast(device: Device, kv_cache_dtype: str) -> bool:
    """Whether the GPU has a cast to this format that the kernels use.

    AMD's are left alone, since how they round has not been seen on the hardware.
    """
    is_ocp = kv_cache_dtype in ("fp8_e4m3", "fp8_e5m2")
    return is_ocp and device.capability is not None and device.capability >= _FP8_CAST


def how(device: Device, kv_cache_dtype: str) -> str:
    """How the kernels quantize on a device, for ``explain``."""
    flushes = _flushing_release() if device.kind == "cuda" else ""
    note = f"; Triton {flushes} takes subnormal quotients for 0, newer ones do not" * bool(flushes)
    if kv_cache_dtype == NVFP4 or has_cast(device, kv_cache_dtype):
        return f"Triton kernels{note}"
    if device.kind != "cuda":
        return "Triton kernels that round in integers"
    missing = "FNUZ cast" if kv_cache_dtype == FNUZ else "FP8 cast that rounds once"
    return f"Triton kernels that round in integers, for want of an {missing}{note}"


@cache
def _flushing_release() -> str:
    """The installed Triton, where its division on CUDA flushes subnormals; empty where not."""
    release: str = importlib.import_module("triton").__version__
    major, minor = (int(part) for part in release.split(".")[:2])
    return release if (major, minor) < _FIRST_IEEE_DIVISION else ""


@hookimpl
def validate_kv_scales(scales: KVScales, kv_cache_dtype: str) -> KVScales:
    return scales.for_fnuz() if kv_cache_dtype == FNUZ else scales


@hookimpl
def quantize_kv(
    tensor: torch.Tensor,
    scale: torch.Tensor,
    kv_cache_dtype: str,
    device: Device,
    out: OutBuffers | None,
) -> QuantizedKV:
    outs = None if out is None else (out,)
    (result,) = _launch().quantize((tensor,), (scale,), kv_cache_dtype, device, outs)
    return result  # type: ignore[no-any-return]


@hookimpl
def quantize_kv_pair(
    key: torch.Tensor,
    value: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    kv_cache_dtype: str,
    device: Device,
    out: tuple[OutBuffers, OutBuffers] | None,
) -> tuple[QuantizedKV, QuantizedKV] | None:
    """In one launch; passes where K and V are not given the same way."""
    return _launch().quantize(  # type: ignore[no-any-return]
        (key, value), (k_scale, v_scale), kv_cache_dtype, device, out
    )


@hookimpl
def dequantize_kv(quantized: QuantizedKV, dtype: torch.dtype) -> torch.Tensor:
    return _launch().dequantize(quantized, dtype)  # type: ignore[no-any-return]


@cache
def _launch() -> Any:
    return importlib.import_module("kvcache_plugin.hardware.triton_launch")
