"""SGLang: K and V are written to FP8 caches as the hook rounds them.

What SGLang's fused CUDA kernels write is left alone; ``write_paths.py`` lists what is whose.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any, Final

import torch

from kvcache_plugin.api import dequantize_kv, quantize_kv, quantize_kv_pair
from kvcache_plugin.arguments import VALUE_DTYPES, checked_number, scale_tensor
from kvcache_plugin.errors import KVQuantizeError, NoImplementationError, anchored
from kvcache_plugin.formats import FP8_E4M3, NVFP4
from kvcache_plugin.hosts import seams
from kvcache_plugin.hosts.writes import FP8_BY_DTYPE, third_party_writer
from kvcache_plugin.quantized import QuantizedKV

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcache_plugin.hosts.engine_log import EngineLog
    from kvcache_plugin.hosts.seams import Seam

#: A number would be filled into a tensor for each token: on a CPU that is much of a write.
_ONE: Final = torch.ones(1, dtype=torch.float32, device="cpu")


def wrappers(log: EngineLog) -> tuple[tuple[Seam, Callable[..., Any]], ...]:
    """What is put around SGLang's functions."""
    writes = _Writes(log)
    return (
        (seams.SGLANG_POOL_WRITE, writes.write_pool),
        (seams.SGLANG_PREFIX_WRITE, writes.write_prefix),
        (seams.SGLANG_CPU_WRITE, writes.write_cpu),
        (seams.SGLANG_NVFP4_QUANTIZE, writes.quantize_nvfp4),
        (seams.SGLANG_NVFP4_DEQUANTIZE, writes.dequantize_nvfp4),
    )


class _Writes:
    """The functions that are put around SGLang's own writes."""

    def __init__(self, log: EngineLog) -> None:
        self._log = log
        # Where no implementation serves, found out once: a device and a format.
        self._unserved: set[tuple[torch.device, str]] = set()

    def write_pool(
        self,
        original: Callable[..., Any],
        pool: Any,
        layer: Any,
        loc_info: Any,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        k_scale: Any = None,
        v_scale: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """``MHATokenToKVPool.set_kv_buffer``: hand K and V on in FP8, which passes through it."""
        codes = self._pool_codes(pool, cache_k, cache_v, k_scale, v_scale)
        if codes is not None:
            (cache_k, cache_v), k_scale, v_scale = codes, None, None
        return original(pool, layer, loc_info, cache_k, cache_v, k_scale, v_scale, *args, **kwargs)

    def write_prefix(
        self,
        original: Callable[..., Any],
        pool: Any,
        layer: Any,
        loc_2d: torch.Tensor,
        commit_lens: torch.Tensor,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        k_scale: Any = None,
        v_scale: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """``MHATokenToKVPool.set_kv_buffer_prefix_valid``, where no fused kernel writes.

        Elsewhere than on CUDA and HIP it calls ``set_kv_buffer``, with the tokens that count.
        """
        is_fused = _is_fused(pool.dtype, layer, k_scale, v_scale)
        if cache_k.device.type == "cuda" and not (is_fused and self._stays_fused(pool, cache_k)):
            codes = self._pool_codes(pool, cache_k, cache_v, k_scale, v_scale)
            if codes is not None:
                (cache_k, cache_v), k_scale, v_scale = codes, None, None
        return original(
            pool, layer, loc_2d, commit_lens, cache_k, cache_v, k_scale, v_scale, *args, **kwargs
        )

    def write_cpu(
        self,
        original: Callable[..., Any],
        method: Any,
        k_buffer: torch.Tensor,
        v_buffer: torch.Tensor,
        k_scale_buffer: Any,
        v_scale_buffer: Any,
        loc: torch.Tensor,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        k_scale: Any = None,
        v_scale: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """``CPUFP8KVCacheMethod.quantize_and_store``, which would divide what is FP8 already."""
        codes = self._codes(k_buffer.dtype, cache_k, cache_v, k_scale, v_scale)
        if codes is not None:
            k_buffer[loc], v_buffer[loc] = codes
            return
        original(
            method,
            k_buffer,
            v_buffer,
            k_scale_buffer,
            v_scale_buffer,
            loc,
            cache_k,
            cache_v,
            k_scale,
            v_scale,
            *args,
            **kwargs,
        )

    def quantize_nvfp4(
        self, original: Callable[..., Any], tensor: torch.Tensor, global_scale: Any
    ) -> Any:
        """``NVFP4KVQuantizeUtil.quantize``: codes, block scales, and the scale as SGLang has it.

        :raises KVQuantizeError: for a scale on another device, in SGLang's words.
        """
        if (tensor.device, NVFP4.name) in self._unserved:
            return original(tensor, global_scale)
        try:
            quantized = quantize_kv(tensor, global_scale, NVFP4.name)
        except NoImplementationError as error:
            self._leave(tensor.device, NVFP4.name, error)
            return original(tensor, global_scale)
        if isinstance(global_scale, torch.Tensor):
            scale = global_scale if global_scale.dim() else global_scale.unsqueeze(0)
        else:
            scale = quantized.scale
        return quantized.data, quantized.block_scales, scale

    def dequantize_nvfp4(
        self,
        original: Callable[..., Any],
        quant_tensor: torch.Tensor,
        block_scales: torch.Tensor,
        global_scale: Any,
        dtype: torch.dtype = torch.bfloat16,
    ) -> Any:
        """``NVFP4KVQuantizeUtil.dequantize``: codes and block scales in any one-byte dtype."""
        device = quant_tensor.device
        if (device, NVFP4.name) in self._unserved:
            return original(quant_tensor, block_scales, global_scale, dtype)
        codes = quant_tensor.view(torch.uint8)
        quantized = QuantizedKV(
            codes,
            block_scales.view(torch.float8_e4m3fn).reshape(*codes.shape[:-1], -1),
            scale_tensor(global_scale, codes, NVFP4),
            NVFP4.name,
        )
        try:
            return dequantize_kv(quantized, dtype=dtype)
        except NoImplementationError as error:
            self._leave(device, NVFP4.name, error)
            return original(quant_tensor, block_scales, global_scale, dtype)

    def _pool_codes(
        self,
        pool: Any,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        k_scale: Any,
        v_scale: Any,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        # A pool with a quantization of its own comes here, too; it has a hook of its own.
        if cache_k.dtype is pool.dtype or getattr(pool, "is_quantized_kv_cache", False):
            return None
        return self._codes(pool.dtype, cache_k, cache_v, k_scale, v_scale)

    def _codes(
        self,
        dtype: torch.dtype,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        k_scale: Any,
        v_scale: Any,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """K and V in FP8; ``None`` for what is SGLang's to write."""
        kv_format = FP8_BY_DTYPE.get(dtype)
        if (
            kv_format is None
            # In another dtype they are quantized already, or nothing that the hook takes.
            or cache_k.dtype not in VALUE_DTYPES
            or cache_v.dtype not in VALUE_DTYPES
            or (cache_k.device, kv_format) in self._unserved
        ):
            return None
        try:
            k, v = _usable(k_scale, cache_k), _usable(v_scale, cache_v)
        except KVQuantizeError as error:
            self._leave_scales(error)
            return None
        try:
            k_codes, v_codes = quantize_kv_pair(cache_k, cache_v, k, v, kv_format)
        except NoImplementationError as error:
            self._leave(cache_k.device, kv_format, error)
            return None
        # A pool of OCP codes on FNUZ hardware, where the hook's are others.
        return (k_codes.data, v_codes.data) if k_codes.data.dtype is dtype else None

    def _stays_fused(self, pool: Any, tensor: torch.Tensor) -> bool:
        """Whether no third party claims what SGLang's fused kernel would write."""
        kv_format = FP8_BY_DTYPE.get(pool.dtype)
        return kv_format is None or not _third_party_writer(tensor.device, kv_format)

    def _leave(self, device: torch.device, kv_format: str, error: NoImplementationError) -> None:
        if getattr(error, "__notes__", ()):  # an implementation raised it, and is named there
            raise error
        self._unserved.add((device, kv_format))
        self._log.say(
            logging.WARNING,
            anchored("SGLang writes %s on %s as it does by itself: %s", "writes-left-to-sglang"),
            kv_format,
            device,
            error.problem,
        )

    def _leave_scales(self, error: KVQuantizeError) -> None:
        self._log.say_once(
            "scales that the hook does not take",
            logging.WARNING,
            anchored(
                "SGLang writes K and V with such scales as it does by itself: %s",
                "writes-left-to-sglang",
            ),
            error.problem,
        )


#: Asked for each write, and the answer takes a while.
_third_party_writer = functools.cache(third_party_writer)


def _is_fused(dtype: torch.dtype, layer: Any, k_scale: Any, v_scale: Any) -> bool:
    """Whether SGLang's kernel quantizes and writes at once: e4m3, with scales that the host knows.

    Where this says no and the kernel would, K and V reach it in FP8, and it is not used.
    """
    return dtype is not torch.float8_e5m2 and all(
        isinstance(scale, (float, int))
        or (
            isinstance(scale, torch.Tensor)
            and scale.dim() == 0
            and (scale.device.type == "cpu" or scale is getattr(layer, name, None))
        )
        for scale, name in ((k_scale, "k_scale"), (v_scale, "v_scale"))
    )


def _usable(scale: Any, tensor: torch.Tensor) -> Any:
    """The scale as the hook takes it.

    :raises KVQuantizeError: for one that it does not take: a number that is corrupt, which is only
        served where a corrupt scale does not stop the load, or a tensor of another shape or kind,
        which SGLang may still divide by.
    """
    if scale is None:
        return _ONE if tensor.device.type == "cpu" else 1.0
    if isinstance(scale, torch.Tensor):
        is_on_host = scale.device.type == "cpu" and tensor.device.type != "cpu"
        if not is_on_host or scale.numel() != 1:
            # The rules for scales are the same for all FP8 formats.
            return scale_tensor(scale, tensor, FP8_E4M3)
        scale = scale.item()
    return checked_number(scale)
