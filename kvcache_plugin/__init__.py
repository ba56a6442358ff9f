"""FP8 and NVFP4 KV caches done right: scales are checked at load, K and V quantized by hardware.

``validate_kv_scales`` refuses a corrupt checkpoint scale, ``quantize_kv`` writes K or V in the
format of the cache, each by the implementation that serves the device. See ``docs/``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcache_plugin.api import (
        dequantize_kv,
        explain,
        quantize_kv,
        quantize_kv_pair,
        register,
        unregister,
        validate_kv_scales,
    )
    from kvcache_plugin.checkpoint.report import CheckpointReport
    from kvcache_plugin.checkpoint.scan import scan_checkpoint
    from kvcache_plugin.description import KVDescription, KVTolerance
    from kvcache_plugin.device import Device
    from kvcache_plugin.errors import (
        CheckpointError,
        KVCacheError,
        KVQuantizeError,
        KVScaleError,
        NoImplementationError,
    )
    from kvcache_plugin.explaining import Explanation
    from kvcache_plugin.formats import KVFormat
    from kvcache_plugin.hookspecs import hookimpl, hookspec
    from kvcache_plugin.quantized import OutBuffers, QuantizedKV
    from kvcache_plugin.scales import KVScales

__version__ = "0.1.0"

# Where each public name lives. They are imported when they are first asked for (PEP 562), so that
# the command line answers without waiting for torch.
_HOMES = {
    "CheckpointError": "errors",
    "CheckpointReport": "checkpoint.report",
    "Device": "device",
    "Explanation": "explaining",
    "KVCacheError": "errors",
    "KVDescription": "description",
    "KVFormat": "formats",
    "KVQuantizeError": "errors",
    "KVScaleError": "errors",
    "KVScales": "scales",
    "KVTolerance": "description",
    "NoImplementationError": "errors",
    "OutBuffers": "quantized",
    "QuantizedKV": "quantized",
    "dequantize_kv": "api",
    "explain": "api",
    "hookimpl": "hookspecs",
    "hookspec": "hookspecs",
    "quantize_kv": "api",
    "quantize_kv_pair": "api",
    "register": "api",
    "scan_checkpoint": "checkpoint.scan",
    "unregister": "api",
    "validate_kv_scales": "api",
}

__all__ = [
    "CheckpointError",
    "CheckpointReport",
    "Device",
    "Explanation",
    "KVCacheError",
    "KVDescription",
    "KVFormat",
    "KVQuantizeError",
    "KVScaleError",
    "KVScales",
    "KVTolerance",
    "NoImplementationError",
    "OutBuffers",
    "QuantizedKV",
    "__version__",
    "dequantize_kv",
    "explain",
    "hookimpl",
    "hookspec",
    "quantize_kv",
    "quantize_kv_pair",
    "register",
    "scan_checkpoint",
    "unregister",
    "validate_kv_scales",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
