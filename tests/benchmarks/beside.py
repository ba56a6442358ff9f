"""Runs in an engine's environment: the quantizers of ``bench --peers``, and some that are no
project's, with 8.4 M values of bfloat16. It ends with ``bench --json``'s object in one line.

The others are what somebody would write in place of ``cpu_fast``: a bare cast, which neither
divides nor clamps; plain torch, and the reference, compiled; about the same arithmetic in numba;
and ``cpu_fast`` itself on one thread, or into new memory as plain torch and torchao do.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from kvcache_plugin.bench import run
from kvcache_plugin.bench.as_json import as_json
from kvcache_plugin.bench.contestants import Contest, Contestant, contests
from kvcache_plugin.formats import FP8_E4M3, NVFP4
from kvcache_plugin.hardware import cpu_fast, cpu_reference

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvcache_plugin.bench.inputs import Inputs
    from kvcache_plugin.formats import KVFormat
    from kvcache_plugin.hosts.peers import Call

TOKENS = 8192


def main() -> None:
    cpu = torch.device("cpu")
    print(json.dumps(as_json(run.time_contests(to_do(cpu), cpu, tokens=[TOKENS]))))


def to_do(device: torch.device) -> list[Contest]:
    return [
        replace(contest, contestants=(*contest.contestants, *_others(contest)))
        for contest in contests(device, run.FORMATS, with_peers=True)
    ]


def _others(contest: Contest) -> Iterator[Contestant]:
    if contest.direction == "dequantize":
        return
    kv_format = FP8_E4M3 if contest.kv_cache_dtype == FP8_E4M3.name else NVFP4
    yield Contestant("cpu_fast, one thread", "torch", "", "", _one_thread(kv_format))
    yield Contestant("cpu_fast, new memory", "torch", "", "", _new_memory(kv_format))
    if kv_format == FP8_E4M3:
        yield Contestant("bare cast", "torch", "", "", _cast)
        yield Contestant("torch.compile of plain_torch", "torch", "", "", _compiled_fp8)
    else:
        yield Contestant("torch.compile of cpu_reference", "torch", "", "", _compiled_nvfp4)
        yield Contestant("numba", "torch", "", "", _numba)


def _one_thread(kv_format: KVFormat) -> Any:
    def prepare(inputs: Inputs) -> Call:
        keys, scale, out = inputs.keys, inputs.scale(kv_format), inputs.empty(kv_format)

        def call(i: int) -> None:
            before = torch.get_num_threads()
            torch.set_num_threads(1)
            cpu_fast.quantize_kv(keys[i], scale, kv_format.name, out[i])
            torch.set_num_threads(before)

        return call

    return prepare


def _new_memory(kv_format: KVFormat) -> Any:
    def prepare(inputs: Inputs) -> Call:
        keys, scale = inputs.keys, inputs.scale(kv_format)
        return lambda i: cpu_fast.quantize_kv(keys[i], scale, kv_format.name, None)

    return prepare


def _cast(inputs: Inputs) -> Call:
    return lambda i: inputs.keys[i].to(torch.float8_e4m3fn)


def _compiled_fp8(inputs: Inputs) -> Call:
    def divided(key: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (key.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)

    compiled, keys, scale = torch.compile(divided), inputs.keys, inputs.scale(FP8_E4M3)
    return lambda i: compiled(keys[i], scale)


def _compiled_nvfp4(inputs: Inputs) -> Call:
    """The reference's arithmetic. K is made float32 before it, outside of what is compiled."""
    compiled: Any = torch.compile(cpu_reference._nvfp4_codes)
    keys, scale = inputs.keys, inputs.scale(NVFP4)
    return lambda i: compiled(keys[i].float(), scale)


def _numba(inputs: Inputs) -> Call:
    """About the same arithmetic, block by block, on as many threads; from float32, as numpy has it.

    It is less than what is defined: block scales stay float32, and NaN, infinities and -0 get no
    care.
    """
    import numba
    import numpy as np

    blocks = [key.float().view(-1, 16).numpy() for key in inputs.keys]
    data = np.empty((len(blocks[0]), 8), np.uint8)
    block_scales = np.empty(len(blocks[0]), np.float32)
    numba.set_num_threads(torch.get_num_threads())

    @numba.njit(parallel=True, boundscheck=False)  # type: ignore[untyped-decorator]
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

    scale = np.float32(inputs.scale(NVFP4).item())
    return lambda i: quantize(blocks[i], data, block_scales, scale)


if __name__ == "__main__":
    main()
