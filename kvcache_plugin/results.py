"""What an implementation may answer with: codes that fit what it was given, and its buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvcache_plugin.arguments import check_layout, has_layout
from kvcache_plugin.errors import KVQuantizeError
from kvcache_plugin.quantized import OutBuffers, QuantizedKV
from kvcache_plugin.tensor_kinds import describe

if TYPE_CHECKING:
    from kvcache_plugin.formats import KVFormat


def wrong_result(
    result: object,
    tensor: torch.Tensor,
    scale: torch.Tensor,
    kv_format: KVFormat,
    buffers: OutBuffers | None,
) -> str:
    """What is wrong with what an implementation made of K or V; empty when nothing is.

    Only what costs no look at a value: a result that is not in the caller's buffers, or has another
    layout, would be read as garbage later.
    """
    if not isinstance(result, QuantizedKV):
        return f"{kind_of(result)} instead of QuantizedKV"
    if result.kv_cache_dtype != kv_format.name:
        return f"codes of {result.kv_cache_dtype!r}"
    data, block_scales = result.data, result.block_scales
    if buffers is not None:
        if data is not buffers[0] or block_scales is not buffers[1]:
            return "buffers of its own instead of those that it was given"
    elif not has_layout(data, block_scales, tensor.shape, tensor.device, kv_format):
        try:
            check_layout(data, block_scales, tensor.shape, tensor.device, kv_format, "QuantizedKV")
        except KVQuantizeError as error:
            return f"a result that does not fit: {error.problem}"
    if result.scale is not scale and not _is_same_memory(result.scale, scale):
        return "a scale of its own instead of the one that it was given"
    return ""


def _is_same_memory(one: object, other: torch.Tensor) -> bool:
    """Whether a tensor is a view of all of another, as what ``contiguous`` gives may be."""
    return (
        isinstance(one, torch.Tensor)
        and (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
        and (one.data_ptr(), one.stride()) == (other.data_ptr(), other.stride())
    )


def kind_of(answer: object) -> str:
    """What an implementation answered with, for a message."""
    return describe(answer) if isinstance(answer, torch.Tensor) else type(answer).__name__
