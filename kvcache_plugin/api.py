"""The public functions: each is one call with the process's implementations on a real device."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch
from torch.compiler import is_compiling

from kvcache_plugin import calls
from kvcache_plugin.arguments import check_is_quantized, check_is_tensor
from kvcache_plugin.device import Device, of_existing
from kvcache_plugin.errors import KVCacheError
from kvcache_plugin.manager import get_manager

if TYPE_CHECKING:
    from kvcache_plugin.arguments import Out, OutPair, Scale
    from kvcache_plugin.explaining import Explanation
    from kvcache_plugin.quantized import QuantizedKV
    from kvcache_plugin.scales import Granularity, KVScales

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
    return calls.convert_scales(
        get_manager(),
        Device.of(device),
        k_scale,
        v_scale,
        kv_cache_dtype=kv_cache_dtype,
        layer=layer,
        granularity=granularity,
        num_kv_heads=num_kv_heads,
    )


def quantize_kv(
    tensor: torch.Tensor,
    scale: Scale,
    kv_cache_dtype: str,
    *,
    out: Out | None = None,
) -> QuantizedKV:
    """Quantize K or V by the implementation for the device that it is on.

    The codes are those of the CPU reference, which ``docs/numerics.md`` defines, but for what an
    implementation declares.

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
    :returns: the codes and what dequantizes them, on the tensor's device.
    :raises KVQuantizeError: for a tensor, scale, format or buffer that does not fit.
    :raises NoImplementationError: when no implementation serves the device and format.
    """
    check_is_tensor(tensor)
    if is_compiling():
        from kvcache_plugin import compiled

        return compiled.quantize(tensor, scale, kv_cache_dtype, out)
    device = of_existing(tensor.device)
    return calls.quantize(get_manager(), device, tensor, scale, kv_cache_dtype, out)


def quantize_kv_pair(
    key: torch.Tensor,
    value: torch.Tensor,
    k_scale: Scale,
    v_scale: Scale,
    kv_cache_dtype: str,
    *,
    out: OutPair | None = None,
) -> tuple[QuantizedKV, QuantizedKV]:
    """Quantize the K and V of a layer, in one launch where the implementation can do that.

    The result is that of ``quantize_kv`` for each. Nothing is written when either is refused.

    :param key: K, as in ``quantize_kv``.
    :param value: V, on the same device; its shape may be another one.
    :param k_scale: as in ``quantize_kv``.
    :param v_scale: likewise for V.
    :param kv_cache_dtype: as in ``quantize_kv``.
    :param out: a pair of what ``quantize_kv`` takes, the first for K; an earlier result is one.
    :returns: the quantized K and V.
    :raises KVQuantizeError: for a tensor, scale, format or buffer that does not fit.
    :raises NoImplementationError: when no implementation serves the device and format.
    """
    check_is_tensor(key, "K")
    if is_compiling():
        from kvcache_plugin import compiled

        return compiled.quantize_pair(key, value, k_scale, v_scale, kv_cache_dtype, out)
    device = of_existing(key.device)
    return calls.quantize_pair(
        get_manager(), device, key, value, k_scale, v_scale, kv_cache_dtype, out
    )


def dequantize_kv(quantized: QuantizedKV, *, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The values of quantized K or V: the inverse map of the codes, rounded once to ``dtype``.

    :param quantized: what ``quantize_kv`` gave.
    :param dtype: float32, bfloat16 or float16.
    :returns: a new tensor of shape ``[..., head_dim]`` on the same device.
    :raises KVQuantizeError: for codes or scales that do not fit their format, or another dtype.
    :raises NoImplementationError: when no implementation serves the device and format.
    """
    check_is_quantized(quantized)
    if is_compiling():
        from kvcache_plugin import compiled

        return compiled.dequantize(quantized, dtype)
    return calls.dequantize(get_manager(), of_existing(quantized.data.device), quantized, dtype)


def explain(device: DeviceLike, kv_cache_dtype: str) -> tuple[Explanation, ...]:
    """Every implementation in call order: name, distribution, chosen or not, and the reason.

    :param device: as in ``validate_kv_scales``; no such hardware needs to be present.
    :param kv_cache_dtype: as in ``validate_kv_scales``.
    :returns: one for each, the first that is called in front.
    :raises KVCacheError: for a device or format that is unknown.
    """
    hardware = Device.of(device)
    manager = get_manager()
    kv_format = manager.kv_format(kv_cache_dtype, hardware)
    if kv_format is None:
        raise calls.unknown_format(manager, kv_cache_dtype, KVCacheError)
    return manager.explain(hardware, kv_format.name)


def register(plugin: object, name: str | None = None) -> None:
    """Add an implementation at run time, in a test or a notebook; packages use the entry point.

    :param plugin: a module or an object with functions marked by ``hookimpl``.
    :param name: what ``explain`` calls it.
    :raises KVCacheError: for a plugin that is broken, or a name that is taken.
    """
    get_manager().register(plugin, name)


def unregister(plugin: object) -> None:
    """Take out an implementation that ``register`` added.

    :param plugin: the object that ``register`` was given.
    :raises KVCacheError: for a plugin that is not registered.
    """
    get_manager().unregister(plugin)
