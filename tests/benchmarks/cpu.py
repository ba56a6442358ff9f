"""What the CPU's C kernels do per second: ``python -m tests.benchmarks.cpu``.

Quantizes and dequantizes 8.4 M bfloat16 by ``cpu_fast``, by plain torch, and by other quantizers
for the CPU where they are installed (torchao, numba, SGLang's block-16 FP4), in turns, since a
machine's speed varies. Prints GB of bfloat16 per second, the ratio to the first row of each table,
and for ``cpu_fast`` the fraction of what copying the same bytes in and out would allow. Then the
microseconds of a call for a few tokens, through the public functions, beside the reference, and
what the first call costs.
"""

from __future__ import annotations

import importlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import kvcache_plugin as kv
from kvcache_plugin.hardware import cpu_fast, cpu_reference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROUNDS = 15
TOKENS, HEADS, HEAD_DIM = 8192, 8, 128
CPU = kv.Device("cpu")
SCALE = torch.tensor([0.01])
FIRST = """
import time, torch
import kvcache_plugin as kv
from kvcache_plugin.hardware import cpu_fast
key, scale = torch.ones(1, 8, 128), torch.ones(1)
started = time.perf_counter()
kv.quantize_kv(key, scale, "nvfp4")
print(time.perf_counter() - started)
"""


class Row(NamedTuple):
    """:param bytes_per_value: read and written, for a row whose distance from a copy is shown."""

    what: str
    call: Callable[[], object]
    bytes_per_value: float = 0.0


def main() -> None:
    key = torch.randn(TOKENS, HEADS, HEAD_DIM).to(torch.bfloat16)
    processor = next((line for line in _cpuinfo() if line.startswith("model name")), "")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; {processor}")
    for title, rows in (
        ("FP8, quantize", list(_fp8(key))),
        ("FP8, dequantize", list(_values(key, "fp8_e4m3"))),
        ("NVFP4, quantize", list(_nvfp4(key))),
        ("NVFP4, dequantize", list(_values(key, "nvfp4"))),
    ):
        _print_rates(title, key, rows)
    _print_calls()
    _print_first()


def _fp8(key: torch.Tensor) -> Iterator[Row]:
    yield Row("torch: bare cast", lambda: key.to(torch.float8_e4m3fn))
    yield Row("torch: div, clamp, cast", lambda: _divided(key))
    yield Row("torch.compile of that", partial(torch.compile(_divided), key))
    yield from _ours(key, "fp8_e4m3", 2 + 1)


def _nvfp4(key: torch.Tensor) -> Iterator[Row]:
    yield Row("plain torch", partial(cpu_reference.quantize_kv, key, SCALE, "nvfp4", CPU, None))
    yield from _peers(key)
    yield from _ours(key, "nvfp4", 2 + 9 / 16)


def _values(key: torch.Tensor, name: str) -> Iterator[Row]:
    quantized = kv.quantize_kv(key, SCALE, name)
    plain = partial(cpu_reference.dequantize_kv, quantized, torch.bfloat16, CPU)
    yield Row("plain torch", plain)
    moved = 2 + (1 if name == "fp8_e4m3" else 9 / 16)
    yield Row("cpu_fast", partial(cpu_fast.dequantize_kv, quantized, torch.bfloat16), moved)


def _ours(key: torch.Tensor, name: str, moved: float) -> Iterator[Row]:
    made = kv.quantize_kv(key, SCALE, name)
    out = kv.OutBuffers(made.data, made.block_scales)
    yield Row("cpu_fast", partial(cpu_fast.quantize_kv, key, SCALE, name, None), moved)
    yield Row("cpu_fast, out", partial(cpu_fast.quantize_kv, key, SCALE, name, out), moved)
    one_thread = partial(_on_one_thread, cpu_fast.quantize_kv, key, SCALE, name, out)
    yield Row("cpu_fast, out, one thread", one_thread)


def _peers(key: torch.Tensor) -> Iterator[Row]:
    compiled: Any = torch.compile(cpu_reference._nvfp4_codes)
    yield Row("torch.compile of that", lambda: compiled(key.float(), SCALE))
    torchao = _installed("torchao.prototype.mx_formats.nvfp4_tensor")
    if torchao is not None:
        rows = key.view(-1, HEAD_DIM)
        yield Row("torchao", lambda: torchao.nvfp4_quantize(rows, per_tensor_scale=SCALE))
    sglang = _installed("sglang.srt.layers.quantization.kvfp4_tensor")
    if sglang is not None:
        quantize = sglang.FP4MXBlock16KVQuantizeUtil.batched_quantize
        yield Row("SGLang, block-16 FP4, compiled", lambda: quantize(key))
    numba = _installed("numba")
    if numba is not None:
        yield Row("numba", _numba(numba, key))


def _numba(numba: Any, key: torch.Tensor) -> Callable[[], object]:
    """The same arithmetic, block by block, on as many threads."""
    import numpy as np

    blocks = key.float().view(-1, 16).numpy()
    data = np.empty((len(blocks), 8), np.uint8)
    block_scales = np.empty(len(blocks), np.float32)
    numba.set_num_threads(torch.get_num_threads())

    @numba.njit(parallel=True, boundscheck=False)
    def quantize(blocks: Any, data: Any, block_scales: Any, g: Any) -> None:
        for b in numba.prange(len(blocks)):
            largest = np.float32(0)
            for i in range(16):
                largest = max(largest, abs(blocks[b, i]))
            ideal = min(largest / (np.float32(6) * g), np.float32(448))
            step = np.float32(2.0) ** (np.floor(np.log2(max(ideal, np.float32(2**-6)))) - 3)
            served = np.rint(ideal / step) * step
            block_scales[b] = served
            reciprocal = np.float32(1) / (served * g) if served > 0 else np.float32(0)
            for i in range(8):
                byte = np.uint8(0)
                for half in range(2):
                    x = blocks[b, 2 * i + half]
                    y = min(abs(x) * reciprocal, np.float32(6))
                    code = min(np.rint(2 * y), np.rint(y) + 2, np.rint(y / 2) + 4)
                    byte |= (np.uint8(code) | np.uint8(8 * (x < 0))) << (4 * half)
                data[b, i] = byte

    return partial(quantize, blocks, data, block_scales, np.float32(SCALE.item()))


def _divided(key: torch.Tensor) -> torch.Tensor:
    return (key.float() / SCALE).clamp(-448, 448).to(torch.float8_e4m3fn)


def _on_one_thread(call: Callable[..., object], *arguments: object) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    call(*arguments)
    torch.set_num_threads(before)


def _installed(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        return None


def _print_rates(title: str, key: torch.Tensor, rows: list[Row]) -> None:
    target = torch.empty_like(key)
    copy = Row("copy of the same bfloat16", lambda: target.copy_(key))
    all_rows = [*rows, copy]
    seconds = _timed([row.call for row in all_rows], ROUNDS)
    size = key.numel() * key.element_size()
    rates = [size / statistics.median(times) / 1e9 for times in seconds]
    print(f"\n{title}: GB of bfloat16 per second, ratio to the first, fraction of the copy's bytes")
    for row, rate in zip(all_rows, rates, strict=True):
        # The copy reads and writes two bytes for each value.
        fraction = rate * row.bytes_per_value / 4 / rates[-1]
        reached = f"{fraction:8.0%}" if fraction else ""
        print(f"  {row.what:32}{rate:8.2f}{rate / rates[0]:8.1f}{reached}")


def _print_calls() -> None:
    print(
        "\nMicroseconds a call, bfloat16: cpu_reference, cpu_fast, through kv.quantize_kv, K and V"
    )
    for shape in ((1, 8, 128), (2, 64), (64, 8, 128)):
        for name in ("fp8_e4m3", "nvfp4"):
            key = torch.randn(shape).to(torch.bfloat16)
            calls: list[Callable[[], object]] = [
                partial(cpu_reference.quantize_kv, key, SCALE, name, CPU, None),
                partial(cpu_fast.quantize_kv, key, SCALE, name, None),
                partial(kv.quantize_kv, key, SCALE, name),
                partial(kv.quantize_kv_pair, key, key.clone(), SCALE, SCALE, name),
            ]
            medians = [1e6 * statistics.median(times) for times in _timed(calls, 2000)]
            print(f"  {shape!s:16}{name:10}" + "".join(f"{median:10.1f}" for median in medians))


def _print_first() -> None:
    print("\nSeconds of the first call: on a machine, and in later processes")
    with tempfile.TemporaryDirectory() as cache:
        runs = [_first(cache) for _ in range(6)]
    print(f"  {runs[0]:.2f}{statistics.median(runs[1:]):8.3f}")


def _first(cache: str) -> float:
    done = subprocess.run(
        [sys.executable, "-c", FIRST],
        env={**os.environ, "XDG_CACHE_HOME": cache},
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout)


def _timed(calls: list[Callable[[], object]], rounds: int) -> list[list[float]]:
    seconds: list[list[float]] = [[] for _ in calls]
    for call in calls:  # what is compiled is compiled now
        call()
    for _ in range(rounds):
        for call, times in zip(calls, seconds, strict=True):
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
    return seconds


def _cpuinfo() -> list[str]:
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        return lines.read().splitlines()


if __name__ == "__main__":
    main()
