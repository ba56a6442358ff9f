"""The hooks: what a hardware implementation, or a policy, may implement.

Every hook function may take fewer arguments than its specification has. See ``docs/hooks.md``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kvcache_plugin.description import KVDescription
    from kvcache_plugin.device import Device
    from kvcache_plugin.formats import KVFormat
    from kvcache_plugin.quantized import OutBuffers, QuantizedKV
    from kvcache_plugin.scales import KVScales

PROJECT_NAME = "kvcache_plugin"

hookspec = pluggy.HookspecMarker(PROJECT_NAME)
hookimpl = pluggy.HookimplMarker(PROJECT_NAME)


@hookspec
def supports_kv(device: Device, kv_cache_dtype: str) -> bool | str:
    """Whether this implementation serves the format on the device: ``True``, or why not.

    A plugin without this hook takes part everywhere.

    :param device: the hardware that K and V are on.
    :param kv_cache_dtype: the format as it is stored: ``"fp8_e4m3fnuz"`` on FNUZ GPUs.
    :returns: ``True``, or the reason why not, which ``explain`` shows.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def validate_kv_scales(
    scales: KVScales, kv_cache_dtype: str, device: Device, layer: str
) -> KVScales | None:
    """Convert the scales of one layer for this hardware; ``None`` passes to the next plugin.

    They are finite and positive here. The result is checked again: finite, and within float32.

    :param scales: floats, or CPU tensors of shape ``[H]``, float64.
    :param kv_cache_dtype: the format as it is stored.
    :param device: where the cache will be.
    :param layer: the layer's name, empty when the caller gave none.
    :returns: scales of the same granularity.
    :raises KVScaleError: refuses the layer.
    """


@hookspec(firstresult=True)
def quantize_kv(
    tensor: torch.Tensor,
    scale: torch.Tensor,
    kv_cache_dtype: str,
    device: Device,
    out: OutBuffers | None,
) -> QuantizedKV | None:
    """Quantize K or V, which must not change; ``None`` passes to the next plugin.

    :param tensor: float32, bfloat16 or float16, ``[..., head_dim]``, any strides.
    :param scale: dequantization multiplier, float32 on the tensor's device, ``[1]`` or per head
        ``[H]`` for ``[..., H, head_dim]``. Its value may change under a CUDA graph: do not read it.
    :param kv_cache_dtype: the format as it is stored.
    :param device: what the tensor is on.
    :param out: buffers of the caller to fill instead of new ones, of the right shapes and dtypes.
    :returns: the codes, in ``out`` where it is given, with the scale that was given.
    """


@hookspec(firstresult=True)
def quantize_kv_pair(
    key: torch.Tensor,
    value: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    kv_cache_dtype: str,
    device: Device,
    out: tuple[OutBuffers, OutBuffers] | None,
) -> tuple[QuantizedKV, QuantizedKV] | None:
    """Quantize K and V in one launch; ``None`` passes, and ``quantize_kv`` is called for each.

    Only that plugin is asked which is the first for ``quantize_kv``, and only while nobody wraps
    that hook. Each argument is as in ``quantize_kv``; the shapes of K and V may differ.

    :returns: the quantized K and V.
    """


@hookspec(firstresult=True)
def dequantize_kv(
    quantized: QuantizedKV, dtype: torch.dtype, device: Device
) -> torch.Tensor | None:
    """The values of the codes, ``[..., head_dim]``; ``None`` passes to the next plugin.

    :param quantized: codes and scales that fit their format.
    :param dtype: float32, bfloat16 or float16.
    :param device: what they are on.
    :returns: a tensor of this dtype.
    """


@hookspec
def describe_kv(device: Device, kv_cache_dtype: str) -> KVDescription:
    """What this implementation says of itself for a device and format that it serves.

    ``explain`` and the conformance checks ask; a selection, and so a token, does not.

    :param device: as in ``supports_kv``.
    :param kv_cache_dtype: likewise.
    """
    raise NotImplementedError


@hookspec
def kv_formats() -> Sequence[KVFormat]:
    """Storage formats that this plugin adds to the built-in ones.

    :returns: formats of names that nobody has yet.
    """
    raise NotImplementedError
