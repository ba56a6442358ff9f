"""One call through the hooks: arguments checked, implementation called, result checked.

The manager and the device are given, so that one implementation can be tried by itself, and for
hardware that this machine does not have. Nothing here asks a tensor what hardware it is on.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias

import torch

from kvcache_plugin import formats
from kvcache_plugin.arguments import (
    check_is_quantized,
    check_is_tensor,
    check_pair,
    check_quantized,
    check_tensor,
    check_value_dtype,
    kind_of,
    out_buffers,
    out_pair,
    scale_tensor,
    values_shape,
    wrong_result,
)
from kvcache_plugin.errors import KVCacheError, KVQuantizeError, KVScaleError
from kvcache_plugin.plugins import PAIR
from kvcache_plugin.quantized import OutBuffers, QuantizedKV
from kvcache_plugin.scales import KVScales, ScaleSite, resolve_scales, serve_scales

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcache_plugin.arguments import Out, OutPair, Scale
    from kvcache_plugin.device import Device
    from kvcache_plugin.formats import KVFormat
    from kvcache_plugin.manager import Manager
    from kvcache_plugin.plugins import HookName
    from kvcache_plugin.scales import Granularity

#: The scale and the buffers as an implementation gets them.
Prepared: TypeAlias = tuple[torch.Tensor, OutBuffers | None]

#: What engines call a KV cache in the model's own dtype.
_UNQUANTIZED: Final = ("auto", "bf16", "bfloat16", "float16", "fp16", "half", "float32")


def convert_scales(
    manager: Manager,
    device: Device,
    k_scale: Scale | None,
    v_scale: Scale | None,
    *,
    kv_cache_dtype: str,
    layer: str,
    granularity: Granularity,
    num_kv_heads: int | None,
) -> KVScales:
    """What ``validate_kv_scales`` does."""
    kv_format = format_of(manager, kv_cache_dtype, device, partial(KVScaleError, layer=layer))
    site = ScaleSite(kv_format, layer, granularity, num_kv_heads)
    scales = resolve_scales(k_scale, v_scale, site)
    try:
        converted = manager.call(
            "validate_kv_scales",
            device,
            kv_format.name,
            scales=scales,
            kv_cache_dtype=kv_format.name,
            device=device,
            layer=layer,
        )
    except KVScaleError as error:
        if layer and not error.layer:  # an implementation that left it to us
            problem = error.problem or str(error)
            raise KVScaleError(problem, layer=layer, remedy=error.remedy) from error
        raise
    if not isinstance(converted, KVScales) or _head_shape(converted) != _head_shape(scales):
        problem = f"{kind_of(converted)} instead of KVScales of the granularity that it was given"
        raise _wrong_answer(manager, "validate_kv_scales", device, kv_format, problem)
    return serve_scales(converted, site)


def quantize(
    manager: Manager,
    device: Device,
    tensor: torch.Tensor,
    scale: Scale,
    kv_cache_dtype: str,
    out: Out | None = None,
) -> QuantizedKV:
    """What ``quantize_kv`` does."""
    check_is_tensor(tensor)
    kv_format = format_of(manager, kv_cache_dtype, device, KVQuantizeError)
    multiplier, buffers = prepared(tensor, scale, kv_format, out)
    return _quantize_one(manager, device, tensor, multiplier, kv_format, buffers)


def quantize_pair(
    manager: Manager,
    device: Device,
    key: torch.Tensor,
    value: torch.Tensor,
    k_scale: Scale,
    v_scale: Scale,
    kv_cache_dtype: str,
    out: OutPair | None = None,
) -> tuple[QuantizedKV, QuantizedKV]:
    """What ``quantize_kv_pair`` does."""
    kv_format = format_of(manager, kv_cache_dtype, device, KVQuantizeError)
    # Both before either: what is refused for V must not leave K written.
    (k_multiplier, k_buffers), (v_multiplier, v_buffers) = prepared_pair(
        key, value, k_scale, v_scale, kv_format, out
    )
    buffers = None if k_buffers is None or v_buffers is None else (k_buffers, v_buffers)
    result: object = manager.call_pair(
        device,
        kv_format.name,
        key=key,
        value=value,
        k_scale=k_multiplier,
        v_scale=v_multiplier,
        kv_cache_dtype=kv_format.name,
        device=device,
        out=buffers,
    )
    if result is None:
        return (
            _quantize_one(manager, device, key, k_multiplier, kv_format, k_buffers),
            _quantize_one(manager, device, value, v_multiplier, kv_format, v_buffers),
        )
    if not isinstance(result, tuple) or len(result) != 2:
        problem = f"{kind_of(result)} instead of a tuple of two QuantizedKV"
        raise _wrong_answer(manager, PAIR, device, kv_format, problem)
    k_result, v_result = result
    for side, problem in (
        ("K", wrong_result(k_result, key, k_multiplier, kv_format, k_buffers)),
        ("V", wrong_result(v_result, value, v_multiplier, kv_format, v_buffers)),
    ):
        if problem:
            raise _wrong_answer(manager, PAIR, device, kv_format, f"{side}: {problem}")
    return k_result, v_result


def dequantize(
    manager: Manager, device: Device, quantized: QuantizedKV, dtype: torch.dtype
) -> torch.Tensor:
    """What ``dequantize_kv`` does."""
    check_is_quantized(quantized)
    check_value_dtype(dtype)
    # The codes say what they are: fp8_e4m3 codes stay that, also on FNUZ hardware.
    kv_format = format_of(manager, quantized.kv_cache_dtype, None, KVQuantizeError)
    check_quantized(quantized, kv_format)
    result: torch.Tensor = manager.call(
        "dequantize_kv", device, kv_format.name, quantized=quantized, dtype=dtype, device=device
    )
    shape = values_shape(quantized.data, kv_format)
    if not isinstance(result, torch.Tensor) or (tuple(result.shape), result.dtype) != (
        shape,
        dtype,
    ):
        problem = f"{kind_of(result)} instead of a tensor of {dtype} with shape {shape}"
        raise _wrong_answer(manager, "dequantize_kv", device, kv_format, problem)
    return result


def format_of(
    manager: Manager,
    kv_cache_dtype: object,
    device: Device | None,
    error: Callable[[str], KVCacheError],
) -> KVFormat:
    """The format of this name, as a device stores it where one is given."""
    kv_format = None
    if isinstance(kv_cache_dtype, str):
        stored = formats.on_device(kv_cache_dtype, device) if device else kv_cache_dtype
        kv_format = manager.kv_format(stored)
    if kv_format is None:
        unquantized = " (a cache that is not quantized needs nothing from here)"
        hint = unquantized if kv_cache_dtype in _UNQUANTIZED else ""
        known = ", ".join(manager.format_names)
        raise error(f"unknown kv_cache_dtype {kv_cache_dtype!r}{hint}; known names are {known}")
    return kv_format


def prepared(tensor: torch.Tensor, scale: Scale, kv_format: KVFormat, out: Out | None) -> Prepared:
    """See that K or V can be quantized, to buffers that fit."""
    check_tensor(tensor, kv_format)
    multiplier = scale_tensor(scale, tensor, kv_format)
    return multiplier, None if out is None else out_buffers(out, tensor, kv_format)


def prepared_pair(
    key: torch.Tensor,
    value: torch.Tensor,
    k_scale: Scale,
    v_scale: Scale,
    kv_format: KVFormat,
    out: OutPair | None,
) -> tuple[Prepared, Prepared]:
    """See that K and V can be quantized, and say which cannot."""
    check_pair(key, value)
    k_out, v_out = out_pair(out)
    side = "K"
    try:
        k_prepared = prepared(key, k_scale, kv_format, k_out)
        side = "V"
        return k_prepared, prepared(value, v_scale, kv_format, v_out)
    except KVQuantizeError as error:
        raise KVQuantizeError(f"{side}: {error}") from error


def _quantize_one(
    manager: Manager,
    device: Device,
    tensor: torch.Tensor,
    multiplier: torch.Tensor,
    kv_format: KVFormat,
    buffers: OutBuffers | None,
) -> QuantizedKV:
    result: QuantizedKV = manager.call(
        "quantize_kv",
        device,
        kv_format.name,
        tensor=tensor,
        scale=multiplier,
        kv_cache_dtype=kv_format.name,
        device=device,
        out=buffers,
    )
    problem = wrong_result(result, tensor, multiplier, kv_format, buffers)
    if problem:
        raise _wrong_answer(manager, "quantize_kv", device, kv_format, problem)
    return result


def _wrong_answer(
    manager: Manager, hook: HookName, device: Device, kv_format: KVFormat, problem: str
) -> KVCacheError:
    return KVCacheError(
        f"{hook} of {kv_format.name} on {device} answered with {problem}; mend implementation "
        f"{manager.answering(hook, device, kv_format.name)}"
    )


def _head_shape(scales: KVScales) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    if isinstance(scales.k, torch.Tensor) and isinstance(scales.v, torch.Tensor):
        return tuple(scales.k.shape), tuple(scales.v.shape)
    return None
