"""The public functions: each checks its arguments, and calls the implementation chosen for them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias

import torch

from kvcache_plugin import formats
from kvcache_plugin.arguments import (
    VALUE_DTYPES,
    check_quantized,
    check_tensor,
    dtype_names,
    kind_of,
    out_buffers,
    scale_tensor,
    values_shape,
    wrong_result,
)
from kvcache_plugin.device import Device
from kvcache_plugin.errors import KVCacheError, KVQuantizeError, KVScaleError
from kvcache_plugin.manager import Explanation, get_manager
from kvcache_plugin.quantized import QuantizedKV
from kvcache_plugin.scales import (
    Granularity,
    KVScales,
    ScaleSite,
    resolve_scales,
    serve_scales,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcache_plugin.formats import KVFormat
    from kvcache_plugin.plugins import HookName

Scale: TypeAlias = float | torch.Tensor
#: What engines call a KV cache in the model's own dtype.
_UNQUANTIZED: Final = ("auto", "bf16", "bfloat16", "float16", "fp16", "half", "float32")
DeviceLike: TypeAlias = Device | torch.device | torch.Tensor | str


def validate_kv_scales(
    k_scale: Scale | None,
    v_scale: Scale | None,
    *,
    kv_cache_dtype: str,
    device: DeviceLike = "cpu",
    layer: str = "",
    granularity: Granularity = "tensor",
    num_kv_heads: int | None = None,
) -> KVScales:
    """Check the K and V scale that a checkpoint brought for one layer, and convert them.

    :param k_scale: dequantization multiplier: a number, a floating tensor of one element on any
        device, or ``None`` for "not in the checkpoint". With ``granularity="head"`` a tensor of
        shape ``[H]`` or ``[H, 1, 1]``.
    :param v_scale: likewise for V.
    :param kv_cache_dtype: ``"fp8"``, ``"fp8_e4m3"``, ``"fp8_e5m2"``, ``"fp8_e4m3fnuz"``,
        ``"nvfp4"``, or a format that a plugin adds.
    :param device: where the cache will be: a name (``"sm_90"``, ``"gfx942"``, ``"cuda:0"``), a
        ``Device``, a ``torch.device`` or a tensor on it.
    :param layer: the layer's name, for messages.
    :param granularity: ``"tensor"`` or ``"head"``.
    :param num_kv_heads: H, needed for ``"head"``.
    :returns: final multipliers: floats, or float32 CPU tensors of shape ``[H]`` per head.
    :raises KVScaleError: for a corrupt scale, with layer, side, value and remedy.
    :raises NoImplementationError: when no implementation serves the device and format.
    """
    hardware = Device.of(device)
    kv_format = _format_of(kv_cache_dtype, hardware, partial(KVScaleError, layer=layer))
    site = ScaleSite(kv_format, layer, granularity, num_kv_heads)
    scales = resolve_scales(k_scale, v_scale, site)
    try:
        converted = get_manager().call(
            "validate_kv_scales",
            hardware,
            kv_format.name,
            scales=scales,
            kv_cache_dtype=kv_format.name,
            device=hardware,
            layer=layer,
        )
    except KVScaleError as error:
        if layer and not error.layer:  # an implementation that left it to us
            problem = error.problem or str(error)
            raise KVScaleError(problem, layer=layer, remedy=error.remedy) from error
        raise
    if not isinstance(converted, KVScales) or _head_shape(converted) != _head_shape(scales):
        problem = f"{kind_of(converted)} instead of KVScales of the granularity that it was given"
        raise _wrong_answer("validate_kv_scales", hardware, kv_format.name, problem)
    return serve_scales(converted, site)


def quantize_kv(
    tensor: torch.Tensor,
    scale: Scale,
    kv_cache_dtype: str,
    *,
    out: torch.Tensor | tuple[torch.Tensor, torch.Tensor | None] | QuantizedKV | None = None,
) -> QuantizedKV:
    """Quantize K or V by the implementation for the device that it is on.

    :param tensor: float32, bfloat16 or float16, ``[..., head_dim]``, any strides, also empty. It is
        never changed. For NVFP4 ``head_dim`` is a multiple of 16.
    :param scale: dequantization multiplier, ``x ≈ code · scale`` (FP8) or
        ``x ≈ e2m1 · block_scale · scale`` (NVFP4): a number, or a floating tensor of one element on
        the tensor's device; FP8 also takes ``[H]`` for ``[..., H, head_dim]``. A tensor's value is
        not read here, so that a CUDA graph can be captured around the call.
    :param kv_cache_dtype: ``"fp8"``, ``"fp8_e4m3"``, ``"fp8_e5m2"``, ``"fp8_e4m3fnuz"``,
        ``"nvfp4"``, or a format that a plugin adds. On FNUZ GPUs ``fp8_e4m3`` is ``fp8_e4m3fnuz``.
    :param out: buffers to fill, which share no memory with the tensor: ``data`` for FP8,
        ``(data, block_scales)`` for NVFP4, or an earlier result to write over; of the two only the
        new result is valid then.
    :raises KVQuantizeError: for a tensor, scale, format or buffer that does not fit.
    :raises NoImplementationError: when no implementation serves the device and format.
    """
    if not isinstance(tensor, torch.Tensor):
        raise KVQuantizeError(f"K or V must be a tensor, got {type(tensor).__name__}")
    device = Device.of(tensor.device)
    kv_format = _format_of(kv_cache_dtype, device, KVQuantizeError)
    check_tensor(tensor, kv_format)
    multiplier = scale_tensor(scale, tensor, kv_format)
    buffers = None if out is None else out_buffers(out, tensor, kv_format)
    result: QuantizedKV = get_manager().call(
        "quantize_kv",
        device,
        kv_format.name,
        tensor=tensor,
        scale=multiplier,
        kv_cache_dtype=kv_format.name,
        device=device,
        out=buffers,
    )
    problem = wrong_result(result, tensor, kv_format, buffers)
    if problem:
        raise _wrong_answer("quantize_kv", device, kv_format.name, problem)
    return result


def dequantize_kv(quantized: QuantizedKV, *, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The values of quantized K or V: the inverse map of the codes, rounded once to ``dtype``.

    :param quantized: what ``quantize_kv`` gave.
    :param dtype: float32, bfloat16 or float16.
    :returns: a new tensor of shape ``[..., head_dim]`` on the same device.
    :raises KVQuantizeError: for codes or scales that do not fit their format, or another dtype.
    :raises NoImplementationError: when no implementation serves the device and format.
    """
    if not isinstance(quantized, QuantizedKV):
        raise KVQuantizeError(f"expected a QuantizedKV, got {type(quantized).__name__}")
    if dtype not in VALUE_DTYPES:
        raise KVQuantizeError(f"values come as {dtype_names(VALUE_DTYPES)}, got dtype={dtype}")
    # The codes say what they are: fp8_e4m3 codes stay that, also on FNUZ hardware.
    kv_format = _format_of(quantized.kv_cache_dtype, None, KVQuantizeError)
    check_quantized(quantized, kv_format)
    device = Device.of(quantized.data.device)
    result: torch.Tensor = get_manager().call(
        "dequantize_kv", device, kv_format.name, quantized=quantized, dtype=dtype, device=device
    )
    shape = values_shape(quantized.data, kv_format)
    if not isinstance(result, torch.Tensor) or (tuple(result.shape), result.dtype) != (
        shape,
        dtype,
    ):
        problem = f"{kind_of(result)} instead of a tensor of {dtype} with shape {shape}"
        raise _wrong_answer("dequantize_kv", device, kv_format.name, problem)
    return result


def explain(device: DeviceLike, kv_cache_dtype: str) -> tuple[Explanation, ...]:
    """Every implementation in call order: name, distribution, chosen or not, and the reason.

    :param device: as in ``validate_kv_scales``; no such hardware needs to be present.
    :raises KVCacheError: for a device or format that is unknown.
    """
    hardware = Device.of(device)
    kv_format = _format_of(kv_cache_dtype, hardware, KVCacheError)
    return get_manager().explain(hardware, kv_format.name)


def register(plugin: object, name: str | None = None) -> None:
    """Add an implementation at run time, in a test or a notebook; packages use the entry point.

    :param plugin: a module or an object with functions marked by ``hookimpl``.
    :param name: what ``explain`` calls it.
    :raises KVCacheError: for a plugin that is broken, or a name that is taken.
    """
    get_manager().register(plugin, name)


def unregister(plugin: object) -> None:
    """Take out an implementation that ``register`` added.

    :raises KVCacheError: for a plugin that is not registered.
    """
    get_manager().unregister(plugin)


def _format_of(
    kv_cache_dtype: object, device: Device | None, error: Callable[[str], KVCacheError]
) -> KVFormat:
    """The format of this name, as a device stores it where one is given."""
    manager = get_manager()
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


def _wrong_answer(
    hook: HookName, device: Device, kv_cache_dtype: str, problem: str
) -> KVCacheError:
    return KVCacheError(
        f"{hook} of {kv_cache_dtype} on {device} answered with {problem}; mend implementation "
        f"{get_manager().answering(hook, device, kv_cache_dtype)}"
    )


def _head_shape(scales: KVScales) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    if isinstance(scales.k, torch.Tensor) and isinstance(scales.v, torch.Tensor):
        return tuple(scales.k.shape), tuple(scales.v.shape)
    return None
