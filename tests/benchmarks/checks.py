"""Runs in a fresh process: what the checks of a load take, ``python checks.py LAYERS MORE``.

So many layers of an engine's model are checked with so many more implementations than there are.
It prints ``SECONDS find register kernels check``: finding what is installed, registering the
others, having the CPU's C kernels, which the first question about a CPU compiles or loads, and the
first check of the process.
"""

from __future__ import annotations

import sys
import time
from itertools import pairwise

import torch

import kvcache_plugin as kv
from kvcache_plugin.hardware import cpu_fast
from kvcache_plugin.hosts.gate import LoadGate
from kvcache_plugin.hosts.loaded import LoadedScales
from kvcache_plugin.manager import get_manager


class Elsewhere:
    """Serves hardware that is not here, as most that are installed do."""

    @kv.hookimpl
    def supports_kv(self, device: kv.Device, kv_cache_dtype: str) -> bool | str:
        return f"serves an accelerator, and this is {device}"

    @kv.hookimpl
    def validate_kv_scales(self, scales: kv.KVScales) -> kv.KVScales:
        return scales

    @kv.hookimpl
    def quantize_kv(self, tensor: torch.Tensor, scale: torch.Tensor) -> None:
        return None

    @kv.hookimpl
    def dequantize_kv(self, quantized: kv.QuantizedKV) -> None:
        return None


def main() -> None:
    count, more = map(int, sys.argv[1:])
    cpu = torch.device("cpu")
    layers = [
        (
            torch.nn.Module(),
            LoadedScales(
                f"model.layers.{i}.self_attn.attn",
                torch.tensor(0.05),
                torch.tensor(0.06),
                "fp8_e4m3",
                cpu,
            ),
        )
        for i in range(count)
    ]
    gate = LoadGate("Engine", "strict")
    times = [time.perf_counter()]
    get_manager()
    times.append(time.perf_counter())
    for i in range(more):
        kv.register(Elsewhere(), f"elsewhere_{i}")
    times.append(time.perf_counter())
    cpu_fast.supports_kv(kv.Device("cpu"), "fp8_e4m3")
    times.append(time.perf_counter())
    with gate.model(layers):
        for module, found in layers:
            gate.layer(module, found)
    times.append(time.perf_counter())
    print("SECONDS", *(after - before for before, after in pairwise(times)))


if __name__ == "__main__":
    main()
