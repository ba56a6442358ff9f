"""Launches the Triton kernels: what K, V and the buffers are to them, and how the work is cut.

Nothing here reads a value of a tensor or waits for the device.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
import triton

from kvcache_plugin import Device, OutBuffers, QuantizedKV
from kvcache_plugin.hardware import triton_kernels
from kvcache_plugin.hardware.triton_hooks import has_cast

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager


@dataclass(frozen=True)
class _Minifloat:
    """An FP8 format as the kernels need it."""

    dtype: torch.dtype
    mantissa: int
    bias: int
    fnuz: bool = False


# OCP 8-bit floating point specification 1.0; AMD's FNUZ variant has a bias of one more.
_FP8: Final = {
    "fp8_e4m3": _Minifloat(torch.float8_e4m3fn, mantissa=3, bias=7),
    "fp8_e5m2": _Minifloat(torch.float8_e5m2, mantissa=2, bias=15),
    "fp8_e4m3fnuz": _Minifloat(torch.float8_e4m3fnuz, mantissa=3, bias=8, fnuz=True),
}
_NVFP4: Final = "nvfp4"
_VALUES_PER_SCALE: Final = 16

#: Elements of a program: each of the 128 threads of four warps stores 16 bytes of codes, or (when
#: dequantizing) loads them.
_FP8_BLOCK: Final = 2048
_NVFP4_BLOCK: Final = 4096
#: No contraction: a product that is rounded once more or less can be another code.
_OPTIONS: Final[dict[str, Any]] = {"num_warps": 4, "enable_fp_fusion": False}
#: How many leading dimensions the kernels address by strides.
_MOST_DIMS: Final = 3
_INT32_MAX: Final = torch.iinfo(torch.int32).max


@dataclass(frozen=True)
class _Rows:
    """Where the rows of some tensors with the same leading dimensions begin.

    :param dims: how many leading dimensions are left when neighbours that can be are merged.
    :param middle: length of the last but one of them, 1 where there is none; ``inner`` of the last.
    :param strides: for each tensor those of the last three, in elements, 0 where there is none.
    """

    dims: int
    middle: int
    inner: int
    strides: tuple[tuple[int, int, int], ...]


#: Whether Triton runs the kernels in Python, on the CPU (``TRITON_INTERPRET=1``).
INTERPRETED: Final = not isinstance(triton_kernels.quantize_fp8, triton.JITFunction)


def quantize(
    tensors: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    kv_cache_dtype: str,
    device: Device,
    outs: Sequence[OutBuffers] | None,
) -> tuple[QuantizedKV, ...] | None:
    """Quantize K, or K and V in one launch.

    :param tensors: K, or K and V; ``scales`` and ``outs`` likewise.
    :returns: ``None`` for K and V that are not given the same way: shape, dtype, strides, one scale
        or one for each head.
    """
    sources = [_readable(tensor) for tensor in tensors]
    multipliers = [scale.resolve_neg().contiguous() for scale in scales]
    if not _alike(*zip(sources, multipliers, strict=True)):
        return None
    if outs is None:
        outs = targets = [
            _new_buffers(tensor.shape, kv_cache_dtype, tensor.device) for tensor in tensors
        ]
    else:
        targets = [_writable(out) for out in outs]
    parts = [_byte_views(target) for target in targets]
    if not _alike(*parts):
        return None
    rows = _rows(sources[0], *parts[0])
    if rows.dims > _MOST_DIMS:
        sources = [source.contiguous() for source in sources]
        rows = _rows(sources[0], *parts[0])
    if sources[0].numel():
        with _on(sources[0].device):
            if kv_cache_dtype == _NVFP4:
                _launch_nvfp4(sources, multipliers, parts, rows)
            else:
                _launch_fp8(sources, multipliers, parts, rows, kv_cache_dtype, device)
    for out, target in zip(outs, targets, strict=True):
        if target is not out:
            _copy(target, out)
    return tuple(
        QuantizedKV(out.data, out.block_scales, scale, kv_cache_dtype)
        for out, scale in zip(outs, scales, strict=True)
    )


def dequantize(quantized: QuantizedKV, dtype: torch.dtype) -> torch.Tensor:
    """The values of the codes, rounded once to ``dtype``."""
    is_nvfp4 = quantized.kv_cache_dtype == _NVFP4
    *lead, length = quantized.data.shape
    head_dim = 2 * length if is_nvfp4 else length
    values = torch.empty((*lead, head_dim), dtype=dtype, device=quantized.data.device)
    count = values.numel()
    if not count:
        return values
    parts = [_readable(part) for part in _byte_views(quantized)]
    scale = quantized.scale.resolve_neg().contiguous()
    rows = _rows(*parts)
    if rows.dims > _MOST_DIMS:
        parts = [part.contiguous() for part in parts]
        rows = _rows(*parts)
    common = {
        "HEAD_DIM": head_dim,
        "INTERPRETED": INTERPRETED,
        "WIDE": _is_wide(values, *parts),
        **_OPTIONS,
    }
    dims = 0 if all(part.is_contiguous() for part in parts) else rows.dims
    with _on(values.device):
        if is_nvfp4:
            triton_kernels.dequantize_nvfp4[_grid(count, _NVFP4_BLOCK)](
                *(*parts, scale, values, count, *(part.numel() for part in parts)),
                *(rows.middle, rows.inner, *rows.strides[0], *rows.strides[1]),
                DIMS=dims,
                BLOCK=_NVFP4_BLOCK,
                **common,
            )
        else:
            form = _FP8[quantized.kv_cache_dtype]
            triton_kernels.dequantize_fp8[_grid(count, _FP8_BLOCK)](
                *(parts[0], scale, values, count),
                *(rows.middle, rows.inner, *rows.strides[0]),
                HEADS=scale.numel(),
                DIMS=dims,
                MANTISSA=form.mantissa,
                BIAS=form.bias,
                FNUZ=form.fnuz,
                BLOCK=_FP8_BLOCK,
                **common,
            )
    return values


def _launch_fp8(
    sources: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    parts: Sequence[Sequence[torch.Tensor]],
    rows: _Rows,
    kv_cache_dtype: str,
    device: Device,
) -> None:
    form = _FP8[kv_cache_dtype]
    source, (codes,) = sources[0], parts[0]
    count = source.numel()
    key, value = ((sources[i], scales[i], *parts[i]) for i in (0, -1))
    triton_kernels.quantize_fp8[_grid(count, _FP8_BLOCK, len(sources))](
        *(*key, *value, count, rows.middle, rows.inner, *rows.strides[0], *rows.strides[1]),
        PAIR=len(sources) > 1,
        HEAD_DIM=source.shape[-1],
        HEADS=scales[0].numel(),
        DIMS=0 if source.is_contiguous() else rows.dims,
        CODE_DIMS=0 if codes.is_contiguous() else rows.dims,
        MANTISSA=form.mantissa,
        BIAS=form.bias,
        LARGEST=torch.finfo(form.dtype).max,
        FNUZ=form.fnuz,
        NATIVE=has_cast(device, kv_cache_dtype) and not INTERPRETED,
        WIDE=_is_wide(source, codes),
        BLOCK=_FP8_BLOCK,
        **_OPTIONS,
    )


def _launch_nvfp4(
    sources: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    parts: Sequence[Sequence[torch.Tensor]],
    rows: _Rows,
) -> None:
    source, (codes, block_scales) = sources[0], parts[0]
    count = source.numel()
    packed = codes.is_contiguous() and block_scales.is_contiguous()
    key, value = ((sources[i], scales[i], *parts[i]) for i in (0, -1))
    triton_kernels.quantize_nvfp4[_grid(count, _NVFP4_BLOCK, len(sources))](
        *(*key, *value, count, codes.numel(), block_scales.numel(), rows.middle, rows.inner),
        *(*rows.strides[0], *rows.strides[1], *rows.strides[2]),
        PAIR=len(sources) > 1,
        HEAD_DIM=source.shape[-1],
        DIMS=0 if source.is_contiguous() else rows.dims,
        CODE_DIMS=0 if packed else rows.dims,
        WIDE=_is_wide(source, codes, block_scales),
        BLOCK=_NVFP4_BLOCK,
        **_OPTIONS,
    )


# Tensors as the kernels take them.


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with neighbours along the last dimension side by side: no copy, mostly."""
    if tensor.requires_grad or tensor.is_neg():
        tensor = tensor.detach().resolve_neg()
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _writable(out: OutBuffers) -> OutBuffers:
    """The buffers themselves where the kernels can address them, else others for a while."""
    parts = [part for part in out if part is not None]
    if all(part.stride(-1) == 1 for part in parts) and _rows(*parts).dims <= _MOST_DIMS:
        return out
    block_scales = None if out.block_scales is None else _packed_like(out.block_scales)
    return OutBuffers(_packed_like(out.data), block_scales)


def _packed_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _copy(source: OutBuffers, target: OutBuffers) -> None:
    target.data.copy_(source.data)
    if target.block_scales is not None and source.block_scales is not None:
        target.block_scales.copy_(source.block_scales)


def _new_buffers(shape: torch.Size, kv_cache_dtype: str, device: torch.device) -> OutBuffers:
    if kv_cache_dtype != _NVFP4:
        return OutBuffers(torch.empty(shape, dtype=_FP8[kv_cache_dtype].dtype, device=device))
    *lead, head_dim = shape
    blocks = (*lead, head_dim // _VALUES_PER_SCALE)
    return OutBuffers(
        torch.empty((*lead, head_dim // 2), dtype=torch.uint8, device=device),
        torch.empty(blocks, dtype=torch.float8_e4m3fn, device=device),
    )


def _byte_views(buffers: OutBuffers | QuantizedKV) -> list[torch.Tensor]:
    """Data, and block scales where there are any, as bytes: the kernels know no FP8 types."""
    parts = (buffers.data, buffers.block_scales)
    return [part.view(torch.uint8) for part in parts if part is not None]


def _alike(*sides: Sequence[torch.Tensor]) -> bool:
    """Whether the tensors of K and those of V differ in nothing but where they are."""
    first, *others = (
        [(tensor.dtype, tensor.shape, tensor.stride()) for tensor in side] for side in sides
    )
    return all(other == first for other in others)


def _rows(*tensors: torch.Tensor) -> _Rows:
    """Merge leading dimensions that follow one another without a gap in each of the tensors."""
    if all(tensor.is_contiguous() for tensor in tensors):
        count = math.prod(tensors[0].shape[:-1])
        if count > 1:
            return _Rows(1, 1, count, tuple((0, 0, tensor.shape[-1]) for tensor in tensors))
    lengths: list[int] = []
    strides: list[tuple[int, ...]] = []
    for dim, length in enumerate(tensors[0].shape[:-1]):
        if length == 1:
            continue
        here = tuple(tensor.stride(dim) for tensor in tensors)
        if lengths and strides[-1] == tuple(length * stride for stride in here):
            lengths[-1] *= length
            strides[-1] = here
        else:
            lengths.append(length)
            strides.append(here)
    none = (0,) * len(tensors)
    outer_to_inner = [none, none, none, *strides][-_MOST_DIMS:]
    middle, inner = [1, 1, *lengths][-2:]
    return _Rows(len(lengths), middle, inner, tuple(zip(*outer_to_inner, strict=True)))


def _is_wide(*tensors: torch.Tensor) -> bool:
    """Whether an element's number, or its place in memory, does not fit into 32 bits."""
    return any(_reach(tensor) > _INT32_MAX - _NVFP4_BLOCK for tensor in tensors)


def _reach(tensor: torch.Tensor) -> int:
    if tensor.is_contiguous():
        return tensor.numel()
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return max(last, tensor.numel())


def _grid(count: int, block: int, sides: int = 1) -> tuple[int, int]:
    return triton.cdiv(count, block), sides


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current GPU, which may be another one."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)
