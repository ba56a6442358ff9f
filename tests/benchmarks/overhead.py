"""What the way through the hooks costs: ``python -m tests.benchmarks.overhead``.

Times each public call beside a direct call of the function that it chooses, with the arguments that
the function gets, and prints the difference and the ratio. The implementation ``nothing`` returns a
result that is made before, so that only the way is seen; beside it is the CPU reference, with one
token of 8 heads × 128. The calls are timed in turns, since a machine's speed varies.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import kvcache_plugin as kv
from kvcache_plugin.hardware import cpu_reference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROUNDS = 1000
CALLS = 20
SHAPE = (1, 8, 128)
CPU = kv.Device("cpu")


class Nothing:
    """Answers with results that were made before."""

    def __init__(self) -> None:
        self.quantized: Any = None
        self.pair: Any = None
        self.values: Any = None

    @kv.hookimpl
    def quantize_kv(
        self,
        tensor: torch.Tensor,
        scale: torch.Tensor,
        kv_cache_dtype: str,
        device: kv.Device,
        out: kv.OutBuffers | None,
    ) -> Any:
        return self.quantized

    @kv.hookimpl
    def quantize_kv_pair(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        k_scale: torch.Tensor,
        v_scale: torch.Tensor,
        kv_cache_dtype: str,
        device: kv.Device,
        out: tuple[kv.OutBuffers, kv.OutBuffers] | None,
    ) -> Any:
        return self.pair

    @kv.hookimpl
    def dequantize_kv(
        self, quantized: kv.QuantizedKV, dtype: torch.dtype, device: kv.Device
    ) -> Any:
        return self.values


class Row(NamedTuple):
    what: str
    public: Callable[[], object]
    direct: Callable[[], object]


def main() -> None:
    torch.set_num_threads(1)
    os.environ["KVCACHE_PLUGIN_BLOCK"] = "cpu_fast"  # so that the reference is what is chosen
    print(
        f"microseconds a call, the smallest and the median of {ROUNDS} rounds of {CALLS} calls\n"
        f"{'':44}{'directly':>16}{'through the hooks':>20}{'more':>16}{'ratio':>9}"
    )
    for row in _rows():
        direct, public = (
            [min(times), statistics.median(times)] for times in zip(*rounds(row), strict=True)
        )
        more = [after - before for before, after in zip(direct, public, strict=True)]
        print(
            f"{row.what:44}{_two(direct):>16}{_two(public):>20}{_two(more):>16}"
            f"{public[1] / direct[1]:9.2f}"
        )


def _rows() -> Iterator[Row]:
    nothing = Nothing()
    kv.register(nothing, "nothing")
    # The scale of a prepared result is the caller's, which a number is not.
    for name in ("fp8_e4m3", "nvfp4"):
        yield from rows_of("nothing", nothing, name)
    kv.unregister(nothing)
    for name in ("fp8_e4m3", "nvfp4"):
        yield from rows_of("CPU reference", cpu_reference, name)
        yield _number_row(name)


def rows_of(who: str, plugin: Any, name: str, shape: tuple[int, ...] = SHAPE) -> Iterator[Row]:
    """The calls of a plugin. ``Nothing`` is given what it answers, anew for the last of them."""
    key = torch.randn(shape).to(torch.bfloat16)
    value, scale = key.clone(), torch.tensor([0.05])
    quantized = cpu_reference.quantize_kv(key, scale, name, CPU, None)
    out = cpu_reference.quantize_kv(key, scale, name, CPU, None)
    buffers = kv.OutBuffers(out.data, out.block_scales)
    if isinstance(plugin, Nothing):
        plugin.quantized, plugin.pair = quantized, (quantized, quantized)
        plugin.values = cpu_reference.dequantize_kv(quantized, torch.bfloat16, CPU)
    yield Row(
        f"{who}: quantize_kv, {name}",
        lambda: kv.quantize_kv(key, scale, name),
        lambda: plugin.quantize_kv(key, scale, name, CPU, None),
    )
    yield Row(
        f"{who}: dequantize_kv, {name}",
        lambda: kv.dequantize_kv(quantized),
        lambda: plugin.dequantize_kv(quantized, torch.bfloat16, CPU),
    )
    yield _pair_row(who, plugin, name, key, value, scale)
    if isinstance(plugin, Nothing):
        plugin.quantized = out
    yield Row(
        f"{who}: quantize_kv, {name}, out",
        lambda: kv.quantize_kv(key, scale, name, out=out),
        lambda: plugin.quantize_kv(key, scale, name, CPU, buffers),
    )


def _pair_row(
    who: str,
    plugin: Any,
    name: str,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: torch.Tensor,
) -> Row:
    def one_by_one() -> None:
        plugin.quantize_kv(key, scale, name, CPU, None)
        plugin.quantize_kv(value, scale, name, CPU, None)

    def together() -> None:
        plugin.quantize_kv_pair(key, value, scale, scale, name, CPU, None)

    return Row(
        f"{who}: quantize_kv_pair, {name}",
        lambda: kv.quantize_kv_pair(key, value, scale, scale, name),
        together if hasattr(plugin, "quantize_kv_pair") else one_by_one,
    )


def _number_row(name: str) -> Row:
    key, scale = torch.randn(SHAPE).to(torch.bfloat16), torch.tensor([0.05])
    return Row(
        f"CPU reference: quantize_kv, {name}, a number",
        lambda: kv.quantize_kv(key, 0.05, name),
        lambda: cpu_reference.quantize_kv(key, scale, name, CPU, None),
    )


def rounds(row: Row) -> Iterator[tuple[float, float]]:
    """Microseconds of a direct call and of a public one, in turns."""
    for _ in range(ROUNDS):
        yield _once(row.direct), _once(row.public)


def _once(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - started) / CALLS * 1e6


def _two(times: list[float]) -> str:
    return f"{times[0]:.1f} {times[1]:.1f}"


if __name__ == "__main__":
    main()
