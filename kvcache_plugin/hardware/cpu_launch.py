"""K, V and buffers as the C kernels take them: addresses, lengths and strides.

What cannot be done here is passed on: with tensors that have no address, be it for their type, or
since they stand for others while torch transforms a function; and with those whose use torch
records, as when it traces a function: it does not see what C does.
"""

from __future__ import annotations

import os
from struct import pack
from typing import TYPE_CHECKING, Final

import torch

from kvcache_plugin import OutBuffers, QuantizedKV

if TYPE_CHECKING:
    from kvcache_plugin.hardware.cpu_library import Library

# What follows is in the order of the enumerations in the C source.
_QUANTIZE: Final = 0
_DEQUANTIZE: Final = 1
_DTYPES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
FORMATS: Final = {"fp8_e4m3": 0, "fp8_e5m2": 1, "fp8_e4m3fnuz": 2, "nvfp4": 3}
#: Numbers of a job without its geometry, and the format of one that is a row.
_FIELDS: Final = 9
_PACKED: Final = "11q"
#: In place of an address that the job does not use: 0 is that of a tensor without memory.
_NOTHING: Final = 1
#: How many leading dimensions a job can have.
_MOST_DIMS: Final = 8

_NVFP4: Final = "nvfp4"
_VALUES_PER_SCALE: Final = 16
_FP8_DTYPES: Final = {
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "fp8_e4m3fnuz": torch.float8_e4m3fnuz,
}

# torch has public names for neither; for the first one, none that is as fast.
_tracing_state: Final = torch._C._get_tracing_state
_modes: Final = torch._C._len_torch_dispatch_stack

#: Other types may be anything, and so may be what they have for memory.
_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)

#: Values. A job of no more takes no longer than it may take to get the interpreter's lock again.
_SHORT: Final = 1 << 16
#: Values for each thread: some 80 µs of work, so that starting it is worth it.
_WORTH_A_THREAD: Final = 1 << 18


def quantize(
    library: Library,
    tensor: torch.Tensor,
    scale: torch.Tensor,
    kv_cache_dtype: str,
    out: OutBuffers | None,
) -> QuantizedKV | None:
    """Quantize K or V; ``None`` for tensors that have no address, or whose use is recorded."""
    if _is_recording():
        return None
    if out is None:
        data, block_scales = _new_buffers(tensor, kv_cache_dtype)
    else:
        data, block_scales = out
        if data.requires_grad:  # which a write of torch's own may refuse
            return None
        if not _has_rows(data) or not (block_scales is None or _has_rows(block_scales)):
            made = quantize(library, tensor, scale, kv_cache_dtype, None)
            return None if made is None else _copied(made, data, block_scales)
    if not _are_plain(tensor, data, block_scales, scale):
        return None
    source = _readable(tensor)
    if not _run(library, _QUANTIZE, kv_cache_dtype, source, data, block_scales, scale):
        return None
    return QuantizedKV(data, block_scales, scale, kv_cache_dtype)


def dequantize(library: Library, quantized: QuantizedKV, dtype: torch.dtype) -> torch.Tensor | None:
    """The values of the codes, rounded once to ``dtype``; ``None`` as ``quantize`` has it."""
    if _is_recording():
        return None
    data, block_scales, scale = quantized.data, quantized.block_scales, quantized.scale
    shape = data.shape if block_scales is None else (*data.shape[:-1], 2 * data.shape[-1])
    values = torch.empty(shape, dtype=dtype, device=data.device)
    if not _are_plain(values, data, block_scales, scale):
        return None
    data = _readable(data)
    block_scales = None if block_scales is None else _readable(block_scales)
    name = quantized.kv_cache_dtype
    return values if _run(library, _DEQUANTIZE, name, values, data, block_scales, scale) else None


def _run(
    library: Library,
    operation: int,
    kv_cache_dtype: str,
    values: torch.Tensor,
    data: torch.Tensor,
    block_scales: torch.Tensor | None,
    scale: torch.Tensor,
) -> bool:
    """Do a job; ``False`` where torch has put something without an address in a tensor's place."""
    count = values.numel()
    if not count:
        return True
    scale = _readable(scale)
    addresses = _addresses(values, data, block_scales, scale)
    if addresses is None:
        return False
    is_short = count <= _SHORT
    heads = scale.numel()
    geometry = _geometry(values, data, block_scales, heads)
    job = pack(
        _PACKED if geometry is None else f"{_FIELDS + len(geometry)}q",
        operation,
        _DTYPES[values.dtype],
        FORMATS[kv_cache_dtype],
        heads,
        1 if is_short else _threads(count),
        *addresses,
        *((count, 0) if geometry is None else geometry),
    )
    if is_short:
        library.run(job)
    else:
        library.run_long(job)
    return True


def _addresses(
    values: torch.Tensor, data: torch.Tensor, block_scales: torch.Tensor | None, scale: torch.Tensor
) -> tuple[int, int, int, int] | None:
    """Where the elements are; ``None`` where some are nowhere."""
    try:
        found = (
            values.data_ptr(),
            data.data_ptr(),
            _NOTHING if block_scales is None else block_scales.data_ptr(),
            scale.data_ptr(),
        )
    except RuntimeError:  # inside torch.func
        return None
    return found if all(found) else None  # 0 while torch makes a function functional


def _geometry(
    values: torch.Tensor, data: torch.Tensor, block_scales: torch.Tensor | None, heads: int
) -> tuple[int, ...] | None:
    """Values of a row, number of leading dimensions, their lengths, and each tensor's strides.

    ``None`` where all are packed and have one scale: they are a row.
    """
    is_packed = (
        values.is_contiguous()
        and data.is_contiguous()
        and (block_scales is None or block_scales.is_contiguous())
    )
    if is_packed and heads == 1:
        return None
    width = values.shape[-1]
    if is_packed:
        token = heads * width
        return width, 2, values.numel() // token, heads, token, width, token, width, 0, 0
    lead = values.shape[:-1]
    none = (0,) * len(lead)
    return (
        width,
        len(lead),
        *lead,
        *values.stride()[:-1],
        *data.stride()[:-1],
        *(none if block_scales is None else block_scales.stride()[:-1]),
    )


def _threads(count: int) -> int:
    """As many as torch uses, on the cores that this thread may run on."""
    cores = min(torch.get_num_threads(), len(os.sched_getaffinity(0)))
    return max(1, min(cores, count // _WORTH_A_THREAD))


# Tensors


def _new_buffers(
    tensor: torch.Tensor, kv_cache_dtype: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if kv_cache_dtype != _NVFP4:
        dtype = _FP8_DTYPES[kv_cache_dtype]
        # Of torch's ways to make a tensor the fastest.
        return torch.empty_like(tensor, dtype=dtype, memory_format=torch.contiguous_format), None
    *lead, width = tensor.shape
    device = tensor.device
    return (
        torch.empty((*lead, width // 2), dtype=torch.uint8, device=device),
        torch.empty((*lead, width // _VALUES_PER_SCALE), dtype=torch.float8_e4m3fn, device=device),
    )


def _is_recording() -> bool:
    """Whether a tracer or another mode of torch wants to see each operation."""
    return _tracing_state() is not None or _modes() > 0


def _are_plain(
    values: torch.Tensor, data: torch.Tensor, block_scales: torch.Tensor | None, scale: torch.Tensor
) -> bool:
    return (
        type(values) in _PLAIN
        and type(data) in _PLAIN
        and (block_scales is None or type(block_scales) in _PLAIN)
        and type(scale) in _PLAIN
    )


def _has_rows(tensor: torch.Tensor) -> bool:
    """Whether a job can describe it: the elements of a row are side by side."""
    return tensor.is_contiguous() or (tensor.stride(-1) == 1 and tensor.dim() <= _MOST_DIMS + 1)


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements where a job can describe them: no copy, mostly."""
    if _has_rows(tensor) and not tensor.is_neg():
        return tensor
    return tensor.detach().resolve_neg().contiguous()


def _copied(
    made: QuantizedKV, data: torch.Tensor, block_scales: torch.Tensor | None
) -> QuantizedKV:
    with torch.no_grad():
        data.copy_(made.data)
        if block_scales is not None and made.block_scales is not None:
            block_scales.copy_(made.block_scales)
    return QuantizedKV(data, block_scales, made.scale, made.kv_cache_dtype)
