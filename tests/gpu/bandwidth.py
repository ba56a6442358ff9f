"""Prints what each kernel achieves on a GPU, beside a copy of as many bytes and plain torch.

Run it with ``python -m tests.gpu.bandwidth``. Times are the GPU's, between two events around a CUDA
graph of many calls, so that the launch from Python is not in them. Inputs are rotated: large ones
through more memory than a GPU's cache has, small ones cannot be. A GB/s counts what a kernel must
read and write.
"""

from __future__ import annotations

import datetime
import statistics
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
import triton

import kvcache_plugin as kv

if TYPE_CHECKING:
    from collections.abc import Callable

TOKENS: Final = (1, 16, 256, 4096, 65_536)
HEADS, HEAD_DIM = 8, 128
FORMATS: Final = ("fp8_e4m3", "fp8_e5m2", "nvfp4")
ROTATED_BYTES: Final = 512 << 20
MOST_INPUTS: Final = 64
REPEATS: Final = 7
SCALE: Final = 0.05


class Contender(NamedTuple):
    """One way to do it: what to call with an input's number, and the bytes that it moves."""

    name: str
    call: Callable[[int], object]
    bytes_moved: int


def microseconds(call: Callable[[int], object], count: int) -> list[float]:
    """The time of one call, several times over."""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            call(i)
    graph.replay()
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / count)
    return times


def contenders(tokens: int, kv_cache_dtype: str) -> tuple[list[Contender], int]:
    """All that is compared for K of so many tokens, and how many inputs are rotated."""
    shape = (tokens, HEADS, HEAD_DIM)
    elements = tokens * HEADS * HEAD_DIM
    count = max(2, min(MOST_INPUTS, ROTATED_BYTES // (2 * elements)))
    device = torch.device("cuda", torch.cuda.current_device())
    keys = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(count)]
    values = [torch.randn_like(key) for key in keys]
    scale = torch.full((1,), SCALE, device=device)
    results = [kv.quantize_kv(key, scale, kv_cache_dtype) for key in keys]
    pairs = [
        (result, kv.quantize_kv(value, scale, kv_cache_dtype))
        for result, value in zip(results, values, strict=True)
    ]
    parts = (results[0].data, results[0].block_scales)
    stored = sum(part.nbytes for part in parts if part is not None)
    moved = keys[0].nbytes + stored
    # A copy reads and writes the same number of bytes.
    copied = [torch.empty(moved // 2, dtype=torch.uint8, device=device) for _ in range(count)]
    copies = [torch.empty_like(source) for source in copied]
    rows = [
        Contender("copy", lambda i: copies[i].copy_(copied[i]), moved),
        Contender(
            "quantize_kv",
            lambda i: kv.quantize_kv(keys[i], scale, kv_cache_dtype, out=results[i]),
            moved,
        ),
        Contender(
            "quantize_kv_pair",
            lambda i: kv.quantize_kv_pair(
                keys[i], values[i], scale, scale, kv_cache_dtype, out=pairs[i]
            ),
            2 * moved,
        ),
        Contender("dequantize_kv", lambda i: kv.dequantize_kv(results[i]), moved),
    ]
    if kv_cache_dtype != "nvfp4":
        dtype = results[0].data.dtype
        largest = torch.finfo(dtype).max
        rows.append(
            Contender(
                "plain torch",
                lambda i: (keys[i] / scale).clamp(-largest, largest).to(dtype),
                moved,
            )
        )
    return rows, count


def main() -> None:
    name = torch.cuda.get_device_name()
    print(
        f"{datetime.datetime.now(tz=datetime.timezone.utc).date()}, {name}, torch "
        f"{torch.__version__}, triton {triton.__version__}; K of [tokens, {HEADS}, {HEAD_DIM}] in "
        f"bfloat16; median of {REPEATS}\n"
    )
    print("| format | tokens | what | µs | spread | GB/s | of the copy |")
    print("|---|---|---|---|---|---|---|")
    for kv_cache_dtype in FORMATS:
        for tokens in TOKENS:
            rows, count = contenders(tokens, kv_cache_dtype)
            copy_rate = 0.0
            for row in rows:
                times = microseconds(partial(row.call), count)
                median = statistics.median(times)
                rate = row.bytes_moved / median / 1000
                copy_rate = copy_rate or rate
                print(
                    f"| {kv_cache_dtype} | {tokens} | {row.name} | {median:.2f} | "
                    f"{min(times):.2f}–{max(times):.2f} | {rate:.0f} | {rate / copy_rate:.2f} |"
                )


if __name__ == "__main__":
    main()
