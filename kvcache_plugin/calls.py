"""One call through the hooks: arguments checked, implementation called, result checked.

The manager and the device are given, so that one implementation can be tried by itself, and for
hardware that this machine does not have. Nothing here asks a tensor what hardware it is on.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias

import torch

from kvcache_plugin.arguments import (
    check_is_quantized,
    check_is_tensor,
    check_pair,
    check_quantized,
    check_tensor,
    check_value_dtype,
    is_usual,
    out_buffers,
    out_pair,
    scale_tensor,
)
from kvcache_plugin.errors import KVCacheError, KVQuantizeError, KVScaleError
from kvcache_plugin.plugins import PAIR
from kvcache_plugin.quantized import OutBuffers, QuantizedKV
from kvcache_plugin.results import kind_of, wrong_result
from kvcache_plugin.scales import KVScales, ScaleSite, resolve_scales, serve_scales

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcache_plugin.arguments import Out, OutPair, Scale
    from kvcache_plugin.device import Device
    from kvcache_plugin.formats import KVFormat
    from kvcache_plugin.manager import Manager
    from kvcache_plugin.plugins import HookName
    from kvcache_plugin.scales import Granularity
    from kvcache_plugin.serving import Serving

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
    serving = manager.for_quantizing(device, kv_cache_dtype)
    if serving is None:
        raise unknown_format(manager, kv_cache_dtype, partial(KVScaleError, layer=layer))
    site = ScaleSite(serving.kv_format, layer, granularity, num_kv_heads)
    scales = resolve_scales(k_scale, v_scale, site)
    try:
        converted = serving.validate(scales, serving.kv_format.name, device, layer)
    except KVScaleError as error:
        if layer and not error.layer:  # an implementation that left it to us
            problem = error.problem or str(error)
            raise KVScaleError(
                problem, layer=layer, remedy=error.remedy, name=error.name
            ) from error
        raise
    if not isinstance(converted, KVScales) or _head_shape(converted) != _head_shape(scales):
        problem = f"{kind_of(converted)} instead of KVScales of the granularity that it was given"
        raise _no_answer(manager, "validate_kv_scales", serving, converted, problem)
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
    serving = manager.for_quantizing(device, kv_cache_dtype)
    if serving is None:
        raise unknown_format(manager, kv_cache_dtype, KVQuantizeError)
    multiplier, buffers = prepared(tensor, scale, serving.kv_format, out)
    return _quantize_one(manager, serving, tensor, multiplier, buffers)


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
    serving = manager.for_quantizing(device, kv_cache_dtype)
    if serving is None:
        raise unknown_format(manager, kv_cache_dtype, KVQuantizeError)
    kv_format = serving.kv_format
    # Both before either: what is refused for V must not leave K written.
    (k_multiplier, k_buffers), (v_multiplier, v_buffers) = prepared_pair(
        key, value, k_scale, v_scale, kv_format, out
    )
    result: object = None
    if serving.pair is not None:
        buffers = None if k_buffers is None or v_buffers is None else (k_buffers, v_buffers)
        result = serving.pair(
            key, value, k_multiplier, v_multiplier, kv_format.name, device, buffers
        )
    if result is None:
        return (
            _quantize_one(manager, serving, key, k_multiplier, k_buffers),
            _quantize_one(manager, serving, value, v_multiplier, v_buffers),
        )
    if not isinstance(result, tuple) or len(result) != 2:
        problem = f"{kind_of(result)} instead of a tuple of two QuantizedKV"
        raise _no_answer(manager, PAIR, serving, result, problem)
    k_result, v_result = result
    problem = wrong_result(k_result, key, k_multiplier, kv_format, k_buffers)
    if problem:
        raise _no_answer(manager, PAIR, serving, result, problem, side="K")
    problem = wrong_result(v_result, value, v_multiplier, kv_format, v_buffers)
    if problem:
        raise _no_answer(manager, PAIR, serving, result, problem, side="V")
    return k_result, v_result


def dequantize(
    manager: Manager, device: Device, quantized: QuantizedKV, dtype: torch.dtype
) -> torch.Tensor:
    """What ``dequantize_kv`` does."""
    check_is_quantized(quantized)
    check_value_dtype(dtype)
    serving = manager.for_dequantizing(device, quantized.kv_cache_dtype)
    if serving is None:
        raise unknown_format(manager, quantized.kv_cache_dtype, KVQuantizeError)
    shape = check_quantized(quantized, serving.kv_format)
    result: torch.Tensor = serving.dequantize(quantized, dtype, device)
    is_fit = isinstance(result, torch.Tensor) and result.dtype is dtype and result.shape == shape
    if not is_fit:
        problem = f"{kind_of(result)} instead of a tensor of {dtype} with shape {shape}"
        raise _no_answer(manager, "dequantize_kv", serving, result, problem)
    return result


def unknown_format(
    manager: Manager, kv_cache_dtype: object, error: Callable[..., KVCacheError]
) -> KVCacheError:
    unquantized = " (a cache that is not quantized needs nothing from here)"
    hint = unquantized if kv_cache_dtype in _UNQUANTIZED else ""
    known = ", ".join(manager.format_names)
    return error(
        f"unknown kv_cache_dtype {kv_cache_dtype!r}{hint}; known names are {known}",
        name="format-unknown",
    )


def prepared(tensor: torch.Tensor, scale: Scale, kv_format: KVFormat, out: Out | None) -> Prepared:
    """See that K or V can be quantized, to buffers that fit."""
    if is_usual(scale, tensor, kv_format):
        multiplier = scale
    else:
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
        raise KVQuantizeError(f"{side}: {error.problem}", name=error.name) from error


def _quantize_one(
    manager: Manager,
    serving: Serving,
    tensor: torch.Tensor,
    multiplier: torch.Tensor,
    buffers: OutBuffers | None,
) -> QuantizedKV:
    kv_format = serving.kv_format
    result: QuantizedKV = serving.quantize(
        tensor, multiplier, kv_format.name, serving.device, buffers
    )
    problem = wrong_result(result, tensor, multiplier, kv_format, buffers)
    if problem:
        raise _no_answer(manager, "quantize_kv", serving, result, problem)
    return result


def _no_answer(
    manager: Manager, hook: HookName, serving: Serving, result: object, problem: str, side: str = ""
) -> KVCacheError:
    """The error for a result that is none, or is wrong.

    :param side: of a pair, which one is.
    """
    if result is None:
        return manager.no_implementation(hook, serving)
    answered = f"answered, for {side}, with" if side else "answered with"
    return KVCacheError(
        f"{hook} of {serving.kv_format.name} on {serving.device} {answered} {problem}; mend "
        f"implementation {manager.who_answers(hook, serving)}",
        name="wrong-answer",
    )


def _head_shape(scales: KVScales) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    if isinstance(scales.k, torch.Tensor) and isinstance(scales.v, torch.Tensor):
        return tuple(scales.k.shape), tuple(scales.v.shape)
    return None
