"""Runs inside an engine's environment: its quantizers, as ``bench --peers`` calls them."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest
import torch

from kvcache_plugin import formats
from kvcache_plugin.bench import run
from kvcache_plugin.bench.inputs import Inputs
from kvcache_plugin.hosts import fitting, seams
from kvcache_plugin.hosts.peers import Peer, engine_peers

# Beside SGLang there is a stand-in for a module of vLLM.
ENGINE = "vllm" if importlib.util.find_spec("sglang") is None else "sglang"
CPU = torch.device("cpu")
TOKENS = 32
PEERS = {peer.name: peer for peer in engine_peers()}
OURS = [seam for seam in (*seams.PEERS, seams.SGLANG_CPU_WRITE) if seam.engine == ENGINE]
ON_CPU = {
    name: peer
    for name, peer in PEERS.items()
    if peer.project.lower() == ENGINE and "cpu" in peer.kinds
}


@pytest.mark.parametrize("seam", OURS, ids=lambda seam: seam.qualname)
def test_a_function_that_is_called_is_there(seam: seams.Seam) -> None:
    assert fitting.check_source(seam) == ""
    assert fitting.check_module(seam, importlib.import_module(seam.module)) == ""


def test_every_peer_of_the_engine_is_timed() -> None:
    bench = run.run(CPU, tokens=(TOKENS,), with_peers=True)
    expected = {
        (kv_format, direction, name): "timed"
        for name, peer in ON_CPU.items()
        for kv_format in ("fp8_e4m3", "nvfp4")
        if kv_format in peer.formats
        for direction in ("quantize", "dequantize")
        if getattr(peer, direction) is not None
    }
    outcomes = {
        (result.contest.kv_cache_dtype, result.contest.direction, row.contestant.name): (
            row.timings[0].outcome
        )
        for result in bench.contests
        for row in result.rows
        if row.contestant.kind == "peer"
    }
    # The stand-in looks like a vLLM, and has nothing that could be called.
    stand_in = {("fp8_e4m3", "quantize", "vllm_cpu"): "absent"} if ENGINE == "sglang" else {}
    assert outcomes == {**expected, **stand_in}
    assert expected
    absent = {(one.name, one.reason) for each in bench.contests for one in each.contest.absent}
    assert ("torchao", "not installed") in absent


def written(peer: Peer, name: str) -> tuple[Inputs, Any, torch.Tensor]:
    few = Inputs(TOKENS, 2, CPU)
    kv_format = next(each for each in formats.BUILT_IN if each.name == name)
    scale = few.scale(kv_format)
    assert peer.quantize is not None
    call = peer.quantize(few.keys, scale, name)
    call(0)
    return few, call(1), scale


@pytest.mark.parametrize(
    ("name", "kv_format"),
    [(name, f) for name, peer in ON_CPU.items() for f in peer.formats if peer.sides == 2],
)
def test_a_write_puts_codes_of_k_and_v_into_a_cache(name: str, kv_format: str) -> None:
    few, caches, scale = written(ON_CPU[name], kv_format)
    dtype = {f.name: f.torch_dtype for f in formats.BUILT_IN}[kv_format]
    # A layout of its own is the engine's business: the same values are there, in some order.
    expected = torch.cat([key.flatten() for key in few.keys]).float().sort().values
    step = {"fp8_e4m3": 2.0**-3, "fp8_e5m2": 2.0**-2}[kv_format]
    for cache in caches:
        found = (cache.reshape(-1).view(dtype).float() * scale).sort().values
        assert found.shape == expected.shape
        wrong = (found - expected).abs() > step * expected.abs() + 1e-2
        assert not wrong.any(), (found[wrong][:5], expected[wrong][:5])
        assert found.std() > 0.9


@pytest.mark.skipif(ENGINE != "sglang", reason="about SGLang")
def test_fp4_comes_back_as_it_went() -> None:
    few = Inputs(TOKENS, 2, CPU)
    dequantize = ON_CPU["sglang_fp4"].dequantize
    assert dequantize is not None
    values: Any = dequantize(few.keys, few.scale(formats.NVFP4), "nvfp4")(1)
    assert (values.shape, values.dtype) == (few.keys[0].shape, torch.bfloat16)
    error = (values.float() - few.keys[0].float()).abs()
    assert error.mean() < 0.15
