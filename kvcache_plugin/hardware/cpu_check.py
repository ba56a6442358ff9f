"""Compares what a new library computes with the reference, before anybody relies on it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

import torch

from kvcache_plugin import Device
from kvcache_plugin.hardware import cpu_launch, cpu_reference

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvcache_plugin import QuantizedKV
    from kvcache_plugin.hardware.cpu_library import Library

_CPU: Final = Device("cpu")
_SCALES: Final = (0.0123, 1.0)
#: Odd, so that its multiples modulo 2^32 are scattered over all bit patterns.
_SCATTER: Final = 0x9E3779B1


def what_is_wrong(library: Library) -> str:
    """The first format and dtype that differ from the reference; empty when none does.

    It is asked in the middle of whatever needs the first K quantized: in a thread of its own none
    of torch's modes is on, nobody traces, and arithmetic can be what it usually is.

    :raises RuntimeError: when no thread can be started.
    """
    found: list[str | BaseException] = []

    def compare() -> None:
        try:
            library.usual_arithmetic()
            found.append(_first_difference(library))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=compare, name="kvcache_plugin checks its C kernels")
    thread.start()
    thread.join()
    (answer,) = found
    if isinstance(answer, BaseException):
        raise answer
    return answer


def _first_difference(library: Library) -> str:
    for x in _inputs():
        for name in cpu_launch.FORMATS:
            for number in _SCALES:
                scale = torch.full((1,), number, dtype=torch.float32, device="cpu")
                expected = cpu_reference.quantize_kv(x, scale, name, _CPU, None)
                codes = cpu_launch.quantize(library, x, scale, name, None)
                if codes is None or not _are_same_codes(codes, expected):
                    return f"codes of {name} from {x.dtype}"
                right = cpu_reference.dequantize_kv(expected, x.dtype, _CPU)
                values = cpu_launch.dequantize(library, expected, x.dtype)
                if values is None or not _are_same_values(values, right):
                    return f"{x.dtype} from codes of {name}"
    return ""


def _inputs() -> Iterator[torch.Tensor]:
    """Every bfloat16 and float16, and as many float32, some blocks of them with one exponent."""
    counted = torch.arange(1 << 16, dtype=torch.int64, device="cpu")
    for dtype in (torch.bfloat16, torch.float16):
        yield counted.to(torch.int16).view(dtype).view(-1, 128)
    scattered = (counted * _SCATTER).to(torch.int32)
    near_one = scattered & 0x007FFFFF | 0x3F000000
    yield torch.cat([scattered, near_one]).view(torch.float32).view(-1, 128)


def _are_same_codes(ours: QuantizedKV, right: QuantizedKV) -> bool:
    if ours.block_scales is None or right.block_scales is None:
        return _are_same_values(ours.data, right.data)
    same_scales = _are_same_values(ours.block_scales, right.block_scales)
    return same_scales and torch.equal(ours.data, right.data)


def _are_same_values(ours: torch.Tensor, right: torch.Tensor) -> bool:
    """Bit by bit, but that any NaN is as good as another."""
    is_nan = right.float().isnan()
    integer = torch.int32 if right.dtype == torch.float32 else torch.int16
    integer = torch.uint8 if right.element_size() == 1 else integer
    differs = ours.view(integer) != right.view(integer)
    return torch.equal(ours.float().isnan(), is_nan) and not bool((differs & ~is_nan).any())
