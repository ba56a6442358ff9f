"""What ``quantize_kv`` and ``dequantize_kv`` accept: tensors, scales and buffers that fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

import torch

from kvcache_plugin.errors import KVQuantizeError
from kvcache_plugin.quantized import OutBuffers, QuantizedKV
from kvcache_plugin.tensor_kinds import as_float, describe, holds_numbers, is_plain

if TYPE_CHECKING:
    from typing import TypeGuard

    from kvcache_plugin.formats import KVFormat

Scale: TypeAlias = float | torch.Tensor
Out: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor | None] | QuantizedKV
OutPair: TypeAlias = tuple[Out, Out]

VALUE_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
_VALUE_DTYPE_NAMES: Final = "float32, bfloat16 or float16"
_FLOAT32_MAX: Final = torch.finfo(torch.float32).max
_ONE: Final = (1,)
#: Half of the smallest positive float32: this and what is below becomes 0 there.
_FLOAT32_UNDERFLOW: Final = 2.0**-150


def check_is_tensor(tensor: object, side: str = "K or V") -> None:
    if not isinstance(tensor, torch.Tensor):
        raise KVQuantizeError(
            f"{side} must be a tensor, got {type(tensor).__name__}", name="kv-not-a-tensor"
        )


def check_pair(key: object, value: object) -> None:
    """K and V are tensors on one device; the rest is checked for each."""
    if not isinstance(key, torch.Tensor) or not isinstance(value, torch.Tensor):
        check_is_tensor(key, "K")
        check_is_tensor(value, "V")
    elif key.device != value.device:
        raise KVQuantizeError(
            f"K and V must be on one device to be quantized together, K is on {key.device}, V is "
            f"on {value.device}; call quantize_kv for each",
            name="kv-on-two-devices",
        )


def check_is_quantized(quantized: object) -> None:
    if not isinstance(quantized, QuantizedKV):
        raise KVQuantizeError(
            f"expected a QuantizedKV, got {type(quantized).__name__}", name="invalid-quantized-kv"
        )
    for name, part in (("data", quantized.data), ("scale", quantized.scale)):
        if not isinstance(part, torch.Tensor):
            raise KVQuantizeError(
                f"the {name} of quantized K or V must be a tensor, got {type(part).__name__}; take "
                "it from quantize_kv",
                name="invalid-quantized-kv",
            )


def is_usual(scale: object, tensor: torch.Tensor, kv_format: KVFormat) -> TypeGuard[torch.Tensor]:
    """Whether a quick look at K or V and its scale finds all as it is in most calls.

    Then nothing is to be refused, and the scale is taken as it is. Anything else is looked at step
    by step, which takes longer.
    """
    try:
        return (
            isinstance(scale, torch.Tensor)
            and scale.shape == _ONE
            and scale.layout is torch.strided
            and scale.dtype is torch.float32
            and not scale.requires_grad
            and len(shape := tensor.shape) > 0
            and shape[-1] % kv_format.head_dim_multiple == 0
            and tensor.layout is torch.strided
            and tensor.dtype in VALUE_DTYPES
            and scale.device == tensor.device
        )
    except RuntimeError:  # a nested tensor has no shape
        return False


def check_tensor(tensor: torch.Tensor, kv_format: KVFormat) -> None:
    if not is_plain(tensor):
        raise KVQuantizeError(
            f"K or V must be a plain tensor to be quantized to {kv_format.name}, got "
            f"{describe(tensor)}; make it dense",
            name="kv-not-a-tensor",
        )
    if tensor.dtype not in VALUE_DTYPES:
        raise KVQuantizeError(
            f"K or V must be {_VALUE_DTYPE_NAMES} to be quantized to {kv_format.name}, got "
            f"{tensor.dtype} of shape {tuple(tensor.shape)}; K and V that are quantized already "
            "are not quantized again",
            name="kv-wrong-dtype",
        )
    shape = tensor.shape
    if not shape:
        raise KVQuantizeError(
            "K or V must have shape [..., head_dim], got a tensor of shape ()",
            name="kv-wrong-shape",
        )
    if shape[-1] % kv_format.head_dim_multiple:
        raise KVQuantizeError(
            f"{kv_format.name} needs a head_dim that is a multiple of "
            f"{kv_format.head_dim_multiple}, got head_dim={shape[-1]} in a tensor of shape "
            f"{tuple(shape)}; pad it, or use an FP8 KV cache",
            name="kv-wrong-shape",
        )


def scale_tensor(scale: object, tensor: torch.Tensor, kv_format: KVFormat) -> torch.Tensor:
    """The scale as float32 on the tensor's device, ``[1]`` or ``[H]``; the host copies nothing."""
    if isinstance(scale, torch.Tensor):
        return _checked_scale_tensor(scale, tensor, kv_format)
    return filled(scale, tensor.device)


def filled(scale: object, device: torch.device) -> torch.Tensor:
    """A number as float32 ``[1]``."""
    return torch.full((1,), checked_number(scale), dtype=torch.float32, device=device)


def checked_number(scale: object) -> float:
    """A number that can be a scale."""
    value = as_float(scale)
    if value is None:
        raise KVQuantizeError(
            f"the scale must be a number or a floating-point tensor, got "
            f"{type(scale).__name__} {scale!r}; take scales from validate_kv_scales",
            name="scale-unusable",
        )
    if not _FLOAT32_UNDERFLOW < value <= _FLOAT32_MAX:
        raise KVQuantizeError(
            f"the scale must be finite and > 0 in torch.float32, got {scale!r}; take scales from "
            "validate_kv_scales, which refuses corrupt ones",
            name="scale-unusable",
        )
    return value


def _checked_scale_tensor(
    scale: torch.Tensor, tensor: torch.Tensor, kv_format: KVFormat
) -> torch.Tensor:
    if scale.device != tensor.device:
        raise KVQuantizeError(
            f"{_scale_name(kv_format)} must already be on the KV tensor device. It is on "
            f"{scale.device}, K or V is on {tensor.device}; move it once, when the model is loaded",
            name="scale-on-other-device",
        )
    if not holds_numbers(scale.dtype) or not is_plain(scale):
        raise KVQuantizeError(
            f"{_scale_name(kv_format)} must have a floating-point dtype and a plain layout, got "
            f"{describe(scale)}; take scales from validate_kv_scales",
            name="scale-unusable",
        )
    if scale.numel() != 1:
        _check_heads(scale, tensor, kv_format)
    elif scale.dim() != 1:
        scale = scale.reshape(1)
    # Either costs half a microsecond where it has nothing to do.
    if scale.requires_grad:
        scale = scale.detach()
    return scale if scale.dtype is torch.float32 else scale.to(torch.float32)


def _check_heads(scale: torch.Tensor, tensor: torch.Tensor, kv_format: KVFormat) -> None:
    if not kv_format.per_head:
        raise KVQuantizeError(
            f"{_scale_name(kv_format)} must have one element, got shape {tuple(scale.shape)}",
            name="scale-does-not-fit",
        )
    heads = tensor.shape[-2] if tensor.dim() > 1 else None
    if heads is None or scale.shape != (heads,):
        raise KVQuantizeError(
            f"{_scale_name(kv_format)} must have one element, or shape [H] for K or V of shape "
            f"[..., H, head_dim], got shape {tuple(scale.shape)} for K or V of shape "
            f"{tuple(tensor.shape)}",
            name="scale-does-not-fit",
        )


def _scale_name(kv_format: KVFormat) -> str:
    family = kv_format.family.upper()
    return "NVFP4 global scale tensor" if family == "NVFP4" else f"{family} scale tensor"


def out_buffers(out: object, tensor: torch.Tensor, kv_format: KVFormat) -> OutBuffers:
    buffers = buffers_of(out)
    check_layout(*buffers, tensor.shape, tensor.device, kv_format, "out")
    for name, part in zip(buffers._fields, buffers, strict=True):
        if part is not None and 0 in part.stride():
            _check_is_writable(part, f"out: {name}")
    return buffers


def _check_is_writable(part: torch.Tensor, what: str) -> None:
    shape, strides = tuple(part.shape), part.stride()
    if any(step == 0 and length > 1 for length, step in zip(shape, strides, strict=True)):
        raise KVQuantizeError(
            f"{what} must have a place of its own for each element, got shape {shape} with strides "
            f"{strides}; give a buffer that is not expanded",
            name="buffer-does-not-fit",
        )


def buffers_of(out: object) -> OutBuffers:
    """What ``out`` names, not yet looked at."""
    if isinstance(out, QuantizedKV):
        return OutBuffers(out.data, out.block_scales)
    if isinstance(out, torch.Tensor):
        return OutBuffers(out)
    if isinstance(out, tuple) and 1 <= len(out) <= 2:
        return OutBuffers(*out)
    raise KVQuantizeError(
        "out is a tensor for data, a tuple (data, block_scales) or a QuantizedKV, got "
        f"{type(out).__name__}",
        name="out-unusable",
    )


def out_pair(out: object) -> tuple[Out | None, Out | None]:
    """What K is written to and what V is, both ``None`` for new buffers."""
    if out is None:
        return None, None
    if not isinstance(out, tuple) or len(out) != 2 or out[0] is None or out[1] is None:
        kind = type(out).__name__
        if isinstance(out, tuple):
            kind += f" of {', '.join(type(part).__name__ for part in out) or 'nothing'}"
        raise KVQuantizeError(
            f"out is a pair of what quantize_kv takes, one for K and one for V, got {kind}",
            name="out-unusable",
        )
    return out


def check_value_dtype(dtype: object) -> None:
    if dtype not in VALUE_DTYPES:
        raise KVQuantizeError(
            f"values come as {_VALUE_DTYPE_NAMES}, got dtype={dtype}", name="kv-wrong-dtype"
        )


def check_quantized(quantized: QuantizedKV, kv_format: KVFormat) -> tuple[int, ...]:
    """See that codes and scales fit their format.

    :returns: the shape of the values whose codes these are.
    """
    data, scale = quantized.data, quantized.scale
    if data.dim() == 0:
        raise KVQuantizeError(
            "quantized K or V has shape [..., head_dim], got data of shape ()",
            name="invalid-quantized-kv",
        )
    *lead, width = data.shape
    shape = (*lead, width * kv_format.values_per_element)
    if shape[-1] % kv_format.head_dim_multiple:
        raise KVQuantizeError(
            f"{kv_format.name} has a head_dim that is a multiple of {kv_format.head_dim_multiple}, "
            f"got data of shape {tuple(data.shape)}, which is head_dim={shape[-1]}",
            name="invalid-quantized-kv",
        )
    device = data.device
    check_layout(data, quantized.block_scales, shape, device, kv_format, "quantized K or V")
    if scale.device != device or scale.dtype is not torch.float32:
        raise KVQuantizeError(
            f"the scale of quantized K or V must be torch.float32 on {device}, got "
            f"{scale.dtype} on {scale.device}",
            name="invalid-quantized-kv",
        )
    heads = lead[-1] if kv_format.per_head and lead else 1
    if scale.shape != (1,) and scale.shape != (heads,):
        raise KVQuantizeError(
            f"the scale of quantized K or V has shape (1,) or one for each head, got "
            f"{tuple(scale.shape)} for data of shape {tuple(data.shape)}",
            name="invalid-quantized-kv",
        )
    return shape


def check_layout(
    data: object,
    block_scales: object,
    shape: tuple[int, ...],
    device: torch.device,
    kv_format: KVFormat,
    what: str,
) -> None:
    """Compare data and block scales with what the format stores for K or V of this shape."""
    if has_layout(data, block_scales, shape, device, kv_format):
        return
    data_shape, scales_shape = kv_format.shapes(shape)
    _check_buffer(data, data_shape, kv_format.torch_dtype, device, f"{what}: data")
    scales_dtype = kv_format.torch_block_scale_dtype
    if scales_shape is not None and scales_dtype is not None:
        _check_buffer(block_scales, scales_shape, scales_dtype, device, f"{what}: block_scales")
    elif block_scales is not None:
        raise KVQuantizeError(
            f"{what}: {kv_format.name} has no block_scales, leave them out",
            name="buffer-does-not-fit",
        )


def has_layout(
    data: object,
    block_scales: object,
    shape: tuple[int, ...],
    device: torch.device,
    kv_format: KVFormat,
) -> bool:
    """Whether a quick look finds nothing wrong."""
    data_shape, scales_shape = kv_format.shapes(shape)
    try:
        return (
            isinstance(data, torch.Tensor)
            and data.shape == data_shape
            and data.dtype is kv_format.torch_dtype
            and data.layout is torch.strided
            and data.device == device
            and (
                block_scales is None
                if scales_shape is None
                else isinstance(block_scales, torch.Tensor)
                and block_scales.shape == scales_shape
                and block_scales.dtype is kv_format.torch_block_scale_dtype
                and block_scales.layout is torch.strided
                and block_scales.device == device
            )
        )
    except RuntimeError:  # a nested tensor has no shape
        return False


def _check_buffer(
    buffer: object, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, what: str
) -> None:
    expected = f"{dtype} with shape {tuple(shape)}"
    if not isinstance(buffer, torch.Tensor):
        raise KVQuantizeError(
            f"{what} must be a tensor of {expected}, got {type(buffer).__name__}",
            name="buffer-does-not-fit",
        )
    if not is_plain(buffer):
        raise KVQuantizeError(
            f"{what} must be a plain tensor, got {describe(buffer)}", name="buffer-does-not-fit"
        )
    if (tuple(buffer.shape), buffer.dtype, buffer.device) != (shape, dtype, device):
        raise KVQuantizeError(
            f"{what} must be {expected} on {device}, got {buffer.dtype} with shape "
            f"{tuple(buffer.shape)} on {buffer.device}",
            name="buffer-does-not-fit",
        )
