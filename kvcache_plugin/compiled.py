"""The same calls as custom ops, which ``torch.compile`` need not look into.

What is traced is no more than taking arguments apart and putting results together. An op checks its
arguments when it is traced, and calls the implementation when it runs: a compiled function uses the
implementations that are registered then, and the values that its scale tensors have then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvcache_plugin import calls
from kvcache_plugin.arguments import (
    buffers_of,
    check_pair,
    check_quantized,
    check_value_dtype,
    checked_number,
    out_pair,
)
from kvcache_plugin.device import Device, of_existing
from kvcache_plugin.errors import KVQuantizeError
from kvcache_plugin.manager import get_manager
from kvcache_plugin.quantized import OutBuffers, QuantizedKV

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcache_plugin.arguments import Out, OutPair, Scale
    from kvcache_plugin.formats import KVFormat


def quantize(
    tensor: torch.Tensor, scale: Scale, kv_cache_dtype: str, out: Out | None
) -> QuantizedKV:
    """``quantize_kv`` while it is traced."""
    name = _stored_name(kv_cache_dtype, tensor.device)
    given = _scale(scale, tensor.device)
    if out is None:
        data, block_scales = _both(_quantize(tensor.detach(), given, name))
    else:
        data, block_scales = _tensors_of(out, "out")
        _quantize_out(tensor.detach(), given, name, data, block_scales)
    return QuantizedKV(data, block_scales, _multiplier(given), name)


def quantize_pair(
    key: torch.Tensor,
    value: torch.Tensor,
    k_scale: Scale,
    v_scale: Scale,
    kv_cache_dtype: str,
    out: OutPair | None,
) -> tuple[QuantizedKV, QuantizedKV]:
    """``quantize_kv_pair`` while it is traced."""
    check_pair(key, value)
    name = _stored_name(kv_cache_dtype, key.device)
    k_given, v_given = _scale(k_scale, key.device), _scale(v_scale, value.device)
    inputs = (key.detach(), value.detach(), k_given, v_given, name)
    k_out, v_out = out_pair(out)
    if k_out is None or v_out is None:
        parts = _quantize_pair(*inputs)
        half = len(parts) // 2
        k_parts, v_parts = _both(parts[:half]), _both(parts[half:])
    else:
        k_parts, v_parts = _tensors_of(k_out, "K: out"), _tensors_of(v_out, "V: out")
        _quantize_pair_out(*inputs, *k_parts, *v_parts)
    return (
        QuantizedKV(*k_parts, _multiplier(k_given), name),
        QuantizedKV(*v_parts, _multiplier(v_given), name),
    )


def dequantize(quantized: QuantizedKV, dtype: torch.dtype) -> torch.Tensor:
    """``dequantize_kv`` while it is traced."""
    check_value_dtype(dtype)
    name = _stored_name(quantized.kv_cache_dtype, None)
    data, block_scales = _tensors_of(quantized, "quantized K or V")
    values: torch.Tensor = _dequantize(data, block_scales, quantized.scale.detach(), name, dtype)
    return values


# Taking apart and putting together: all of this is traced.


def _stored_name(kv_cache_dtype: str, device: torch.device | None) -> str:
    name: str
    name, problem = _named_or_not(kv_cache_dtype, device)
    if problem:
        raise KVQuantizeError(problem, name="format-unknown")
    return name


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _named_or_not(kv_cache_dtype: str, device: torch.device | None) -> tuple[str, str]:
    """The format's name where it is stored, or what is wrong; asked once, and not traced."""
    manager, hardware = get_manager(), None if device is None else Device.of(device)
    kv_format = manager.kv_format(kv_cache_dtype, hardware)
    if kv_format is None:
        return "", calls.unknown_format(manager, kv_cache_dtype, KVQuantizeError).problem
    return kv_format.name, ""


def _scale(scale: Scale, device: torch.device) -> torch.Tensor:
    """A tensor as it is, for the op to look at; a number in a tensor.

    A fill would make the number a constant of what is compiled, a product does not. In float64 it
    is exact, so that it is rounded once, as by a fill.
    """
    if isinstance(scale, torch.Tensor):
        return scale.detach()
    one = torch.ones((1,), dtype=torch.float64, device=device)
    return (one * checked_number(scale)).to(torch.float32)


def _multiplier(scale: torch.Tensor) -> torch.Tensor:
    """The scale as the implementation got it; the op has seen that it fits."""
    scale = scale.to(torch.float32)
    return scale.reshape(1) if scale.numel() == 1 else scale


def _tensors_of(out: Out, what: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Data and block scales for the op to look at; it takes no more than tensors."""
    data, block_scales = buffers_of(out)
    _check_tensor(data, f"{what}: data")
    if block_scales is not None:
        _check_tensor(block_scales, f"{what}: block_scales")
    return data, block_scales


def _check_tensor(part: object, what: str) -> None:
    if not isinstance(part, torch.Tensor):
        raise KVQuantizeError(
            f"{what} must be a tensor, got {type(part).__name__}", name="buffer-does-not-fit"
        )


def _both(parts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
    return parts[0], parts[1] if len(parts) > 1 else None


# The ops. Results that an op gives are new, dense, and share no memory with what it was given.


def _op(
    name: str, schema: str, fake: Callable[..., Any], *written: str
) -> Callable[[Callable[..., Any]], Any]:
    """A decorator that makes a custom op of a function.

    :param fake: checks the arguments, and gives results without values.
    :param written: the names of the arguments that are written.
    """

    def make(function: Callable[..., Any]) -> Any:
        op = torch.library.custom_op(
            f"kvcache_plugin::{name}", function, schema=schema, mutates_args=written
        )
        op.register_fake(fake)
        return op

    return make


def _quantize_fake(
    tensor: torch.Tensor, scale: torch.Tensor, kv_cache_dtype: str
) -> list[torch.Tensor]:
    kv_format = _format_of(kv_cache_dtype)
    calls.prepared(tensor, scale, kv_format, None)
    return _new(tensor, kv_format)


@_op("quantize", "(Tensor tensor, Tensor scale, str kv_cache_dtype) -> Tensor[]", _quantize_fake)
def _quantize(tensor: torch.Tensor, scale: torch.Tensor, kv_cache_dtype: str) -> list[torch.Tensor]:
    device = of_existing(tensor.device)
    result = calls.quantize(get_manager(), device, tensor, scale, kv_cache_dtype)
    return _unshared(_parts(result), [tensor, scale])


def _quantize_out_fake(
    tensor: torch.Tensor,
    scale: torch.Tensor,
    kv_cache_dtype: str,
    data: torch.Tensor,
    block_scales: torch.Tensor | None,
) -> None:
    out = OutBuffers(data, block_scales)
    calls.prepared(tensor, scale, _format_of(kv_cache_dtype), out)


@_op(
    "quantize_out",
    "(Tensor tensor, Tensor scale, str kv_cache_dtype, Tensor(a!) data, Tensor(b!)? block_scales)"
    " -> ()",
    _quantize_out_fake,
    "data",
    "block_scales",
)
def _quantize_out(
    tensor: torch.Tensor,
    scale: torch.Tensor,
    kv_cache_dtype: str,
    data: torch.Tensor,
    block_scales: torch.Tensor | None,
) -> None:
    device = of_existing(tensor.device)
    out = OutBuffers(data, block_scales)
    calls.quantize(get_manager(), device, tensor, scale, kv_cache_dtype, out)


def _quantize_pair_fake(
    key: torch.Tensor,
    value: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    kv_cache_dtype: str,
) -> list[torch.Tensor]:
    kv_format = _format_of(kv_cache_dtype)
    calls.prepared_pair(key, value, k_scale, v_scale, kv_format, None)
    return [*_new(key, kv_format), *_new(value, kv_format)]


@_op(
    "quantize_pair",
    "(Tensor key, Tensor value, Tensor k_scale, Tensor v_scale, str kv_cache_dtype) -> Tensor[]",
    _quantize_pair_fake,
)
def _quantize_pair(
    key: torch.Tensor,
    value: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    kv_cache_dtype: str,
) -> list[torch.Tensor]:
    device = of_existing(key.device)
    k, v = calls.quantize_pair(get_manager(), device, key, value, k_scale, v_scale, kv_cache_dtype)
    return _unshared([*_parts(k), *_parts(v)], [key, value, k_scale, v_scale])


def _quantize_pair_out_fake(
    key: torch.Tensor,
    value: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    kv_cache_dtype: str,
    k_data: torch.Tensor,
    k_block_scales: torch.Tensor | None,
    v_data: torch.Tensor,
    v_block_scales: torch.Tensor | None,
) -> None:
    out = OutBuffers(k_data, k_block_scales), OutBuffers(v_data, v_block_scales)
    calls.prepared_pair(key, value, k_scale, v_scale, _format_of(kv_cache_dtype), out)


@_op(
    "quantize_pair_out",
    "(Tensor key, Tensor value, Tensor k_scale, Tensor v_scale, str kv_cache_dtype,"
    " Tensor(a!) k_data, Tensor(b!)? k_block_scales, Tensor(c!) v_data, Tensor(d!)? v_block_scales)"
    " -> ()",
    _quantize_pair_out_fake,
    "k_data",
    "k_block_scales",
    "v_data",
    "v_block_scales",
)
def _quantize_pair_out(
    key: torch.Tensor,
    value: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    kv_cache_dtype: str,
    k_data: torch.Tensor,
    k_block_scales: torch.Tensor | None,
    v_data: torch.Tensor,
    v_block_scales: torch.Tensor | None,
) -> None:
    device = of_existing(key.device)
    out = OutBuffers(k_data, k_block_scales), OutBuffers(v_data, v_block_scales)
    calls.quantize_pair(get_manager(), device, key, value, k_scale, v_scale, kv_cache_dtype, out)


def _dequantize_fake(
    data: torch.Tensor,
    block_scales: torch.Tensor | None,
    scale: torch.Tensor,
    kv_cache_dtype: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    kv_format = _format_of(kv_cache_dtype)
    shape = check_quantized(QuantizedKV(data, block_scales, scale, kv_cache_dtype), kv_format)
    return data.new_empty(shape, dtype=dtype)


@_op(
    "dequantize",
    "(Tensor data, Tensor? block_scales, Tensor scale, str kv_cache_dtype, ScalarType dtype)"
    " -> Tensor",
    _dequantize_fake,
)
def _dequantize(
    data: torch.Tensor,
    block_scales: torch.Tensor | None,
    scale: torch.Tensor,
    kv_cache_dtype: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    quantized = QuantizedKV(data, block_scales, scale, kv_cache_dtype)
    values = calls.dequantize(get_manager(), of_existing(data.device), quantized, dtype)
    return _unshared([values], [scale, *_parts(quantized)])[0]


def _format_of(kv_cache_dtype: str) -> KVFormat:
    manager = get_manager()
    kv_format = manager.kv_format(kv_cache_dtype)
    if kv_format is None:
        raise calls.unknown_format(manager, kv_cache_dtype, KVQuantizeError)
    return kv_format


def _new(tensor: torch.Tensor, kv_format: KVFormat) -> list[torch.Tensor]:
    """What quantizing the tensor gives, without values."""
    layouts = (
        (kv_format.data_shape(tensor.shape), kv_format.torch_dtype),
        (kv_format.block_scales_shape(tensor.shape), kv_format.torch_block_scale_dtype),
    )
    return [
        tensor.new_empty(shape, dtype=dtype)
        for shape, dtype in layouts
        if shape is not None and dtype is not None
    ]


def _parts(result: QuantizedKV) -> list[torch.Tensor]:
    return [part for part in (result.data, result.block_scales) if part is not None]


def _unshared(results: list[torch.Tensor], given: list[torch.Tensor]) -> list[torch.Tensor]:
    """The results of an op as the compiler expects them: dense, each with memory of its own."""
    taken = {tensor.untyped_storage().data_ptr() for tensor in given}
    own = []
    for result in results:
        memory = result.untyped_storage().data_ptr()
        dense = result.contiguous()
        own.append(dense.clone() if dense is result and memory in taken else dense)
        taken.add(memory)
    return own
