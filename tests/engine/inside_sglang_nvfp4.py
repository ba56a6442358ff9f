"""Run by pytest inside SGLang's environment: NVFP4 caches that are read as plain K and V.

The arguments, the gates, the pool and the kernels are SGLang's. Triton's run in its interpreter.
"""

from __future__ import annotations

import json
import logging
import os
import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch
from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd
from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd
from sglang.kernels.ops.kvcache.cache_move import copy_all_layer_kv_cache_tiled
from sglang.srt.arg_groups.kv_cache_hook import (
    handle_kv4_compatibility,
    handle_nvfp4_prefill_kv_dequant_dtype,
)
from sglang.srt.arg_groups.model_override_base import model_config_of, resolving_view
from sglang.srt.layers.attention.torch_flex_backend import TorchFlexAttnBackend
from sglang.srt.layers.quantization import fp4_kv_cache_quant_method as methods
from sglang.srt.layers.quantization.kv_cache import BaseKVCacheMethod
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.common import is_float4_e2m1fn_x2

from kvcache_plugin import dequantize_kv, quantize_kv
from kvcache_plugin.hosts import seams, sglang, sglang_nvfp4, writes
from kvcache_plugin.hosts.engine_log import EngineLog

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

sglang.register()
HookRegistry.apply_hooks()

FP4 = torch.float4_e2m1fn_x2
CPU = torch.device("cpu")
BACKENDS = ("triton", "torch_native", "flex_attention")
OWN_REFUSAL = "backend .* provides neither"


# The arguments


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's configuration: the arguments are settled without its weights."""
    write_config(tmp_path)
    return tmp_path


def write_config(folder: Path, **more: Any) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 1024,
        "max_position_embeddings": 256,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config | more))


def arguments(folder: Path, **more: Any) -> ServerArgs:
    """What a user gives, not settled yet."""
    given: dict[str, Any] = {
        "device": "cpu",
        "kv_cache_dtype": "nvfp4",
        "attention_backend": "torch_native",
    }
    return ServerArgs(model_path=str(folder), skip_tokenizer_init=True, **(given | more))


@pytest.mark.parametrize("backend", BACKENDS)
def test_arguments_pass_that_the_engine_refuses_by_itself(
    folder: Path, backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match=OWN_REFUSAL):
        handle_nvfp4_prefill_kv_dequant_dtype.__wrapped__(
            arguments(folder, attention_backend=backend)
        )
    with pytest.raises(RuntimeError, match="not tested on non-CUDA"):
        handle_kv4_compatibility.__wrapped__(arguments(folder, attention_backend=backend))
    arguments(folder, attention_backend=backend).resolve_once()
    arguments(
        folder,
        attention_backend=None,
        prefill_attention_backend=backend,
        decode_attention_backend=backend,
    ).resolve_once()
    assert [r for r in caplog.records if "kvcache_plugin" in r.getMessage()] == []


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"attention_backend": None, "prefill_attention_backend": "triton"}, "decode .* not named"),
        ({"decode_attention_backend": "trtllm_mha"}, "decode attention backend is trtllm_mha"),
        ({"decode_attention_backend": "triton"}, "triton multiplies"),
        ({"enable_hierarchical_cache": True}, "enable_hierarchical_cache=True"),
        ({"disaggregation_mode": "prefill"}, "disaggregation_mode='prefill'"),
        ({"speculative_algorithm": "NGRAM"}, "speculative_algorithm='NGRAM'"),
        ({"enable_unified_memory": True}, "enable_unified_memory=True"),
        ({"enable_page_major_kv_layout": True}, "enable_page_major_kv_layout=True"),
        ({"dcp_size": 2}, "dcp_size=2"),
        ({"radix_cache_backend": "flexkv"}, "radix_cache_backend='flexkv'"),
        ({"enable_unified_cache_external_linker": True}, "external_linker=True"),
    ],
)
def test_what_is_in_the_way_is_told_once_and_the_engine_refuses(
    folder: Path, given: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    asked = arguments(folder, **given)
    for _ in range(2):
        with pytest.raises(ValueError, match=OWN_REFUSAL):
            handle_nvfp4_prefill_kv_dequant_dtype(asked)
    assert_told(caplog, why)


def assert_told(caplog: pytest.LogCaptureFixture, why: str) -> None:
    (record,) = [r for r in caplog.records if "kvcache_plugin" in r.getMessage()]
    assert record.levelno == logging.WARNING
    assert re.search(why, record.getMessage()), record.getMessage()


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"head_dim": 72}, "head_dim is 72"),
        ({"architectures": ["Llama4ForConditionalGeneration"]}, "window"),
        ({"architectures": ["MiniMaxM3SparseForCausalLM"]}, "sparse"),
        ({"num_kv_shared_layers": 1}, "read K and V back"),
    ],
)
def test_models_with_another_cache_are_left_to_the_engine(
    folder: Path, config: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    write_config(folder, **config)
    with pytest.raises(ValueError, match=OWN_REFUSAL):
        handle_nvfp4_prefill_kv_dequant_dtype(arguments(folder, attention_backend="triton"))
    assert_told(caplog, why)


@pytest.mark.parametrize(
    "config",
    [
        {"num_kv_shared_layers": 1},
        {"architectures": ["WhisperForConditionalGeneration"]},
        {"architectures": ["MllamaForConditionalGeneration"]},
        {"architectures": ["IQuestLoopCoderForCausalLM"]},
    ],
)
def test_k_and_v_that_triton_reads_back_would_lack_their_scales(
    folder: Path, config: dict[str, Any]
) -> None:
    write_config(folder, **config)
    model = model_config_of(arguments(folder))
    assert "read K and V back" in sglang_nvfp4._model_problem(model, scales_later=True)
    assert sglang_nvfp4._model_problem(model, scales_later=False) == ""


@pytest.mark.parametrize("name", sglang_nvfp4._NOT_SERVED)
def test_every_argument_that_is_not_served_is_one(folder: Path, name: str) -> None:
    """A name that moved would let pass what it is there to stop."""
    off = sglang_nvfp4._NOT_SERVED[name]
    assert getattr(resolving_view(arguments(folder)), name) in (off, None)


def test_without_an_implementation_the_engine_refuses(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = SimpleNamespace(name="cpu_reference", chosen=False, reason="it is blocked")
    for asking in (sglang_nvfp4, writes):
        monkeypatch.setattr(asking, "explain", lambda device, kv_format: (blocked,))
    with pytest.raises(ValueError, match=OWN_REFUSAL):
        handle_nvfp4_prefill_kv_dequant_dtype(arguments(folder))
    assert_told(caplog, "no implementation quantizes nvfp4 on cpu .cpu_reference: it is blocked")


def test_another_layout_is_left_to_the_engine(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    with pytest.raises(ValueError, match=OWN_REFUSAL):
        handle_nvfp4_prefill_kv_dequant_dtype(arguments(folder))
    assert_told(caplog, "SGLANG_USE_HND_KVCACHE")


def test_what_changes_between_the_gates_is_refused_at_the_second(folder: Path) -> None:
    asked = arguments(folder)
    handle_nvfp4_prefill_kv_dequant_dtype(asked)
    asked.enable_lmcache = True
    with pytest.raises(ValueError, match=OWN_REFUSAL):
        handle_kv4_compatibility(asked)


@pytest.mark.parametrize(
    "given",
    [
        {"attention_backend": None},
        {"attention_backend": "flashinfer"},
        {"attention_backend": "trtllm_mha"},
        {"prefill_kv_cache_dequant_dtype": "fp8_e4m3"},
        {"kv_cache_dtype": "fp4_mx_block16"},
        {"kv_cache_dtype": "auto"},
    ],
)
def test_the_engines_own_ways_are_its_own(
    folder: Path,
    given: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = arguments(folder, **given)

    def outcome(gate: Any) -> str:
        try:
            gate(asked)
        except Exception as error:
            return repr(error)
        return repr(getattr(asked, "_resolved_overrides", None))

    for gate in (handle_nvfp4_prefill_kv_dequant_dtype, handle_kv4_compatibility):
        alone = outcome(gate.__wrapped__)
        asked = arguments(folder, **given)
        assert outcome(gate) == alone
        asked = arguments(folder, **given)
    serve_with(monkeypatch, asked)
    assert not is_float4_e2m1fn_x2(FP4)
    method = methods.get_kv_cache_quant_method("nvfp4", num_layers=2, device="cpu", page_size=16)
    assert type(method) is methods.NVFP4KVCacheMethod
    assert [r for r in caplog.records if "kvcache_plugin" in r.getMessage()] == []


def test_rocms_fused_writes_keep_off_such_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would write into the copy that a plain read gives them."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    around = dict(sglang_nvfp4.wrappers(EngineLog("SGLang"), lambda seam: ""))
    allows = around[seams.SGLANG_FUSED_WRITE]
    assert allows(lambda batch: True, None)
    assert not allows(lambda batch: False, None)
    serve_with(monkeypatch, settled("triton", torch.bfloat16))
    around[seams.SGLANG_KV_METHOD](None, "nvfp4", num_layers=1, device="cpu", page_size=1)
    assert not allows(lambda batch: True, None)


def test_all_gates_are_used_or_none(caplog: pytest.LogCaptureFixture) -> None:
    def problem_of(seam: seams.Seam) -> str:
        return "it is gone" if seam is seams.SGLANG_FP4_DTYPE else ""

    log = EngineLog("SGLang")
    assert len(sglang_nvfp4.wrappers(log, lambda seam: "")) == 4
    assert sglang_nvfp4.wrappers(log, problem_of) == ()
    assert_told(caplog, "no NVFP4 cache on triton and .*: it is gone")


def test_another_base_class_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sglang_nvfp4._method_class.cache_clear()
    monkeypatch.delattr(methods, "KVCacheBackendMatcher")
    try:
        assert sglang_nvfp4.wrappers(EngineLog("SGLang"), lambda seam: "") == ()
    finally:
        sglang_nvfp4._method_class.cache_clear()
    assert_told(caplog, "made in another way: ImportError")


# The pool


def serve_with(monkeypatch: pytest.MonkeyPatch, server_args: Any) -> None:
    monkeypatch.setattr("sglang.srt.runtime_context.get_server_args", lambda: server_args)


def settled(backend: str, dtype: torch.dtype) -> Any:
    """What is asked of a server's arguments once they are settled."""
    return SimpleNamespace(
        kv_cache_dtype="nvfp4",
        prefill_kv_cache_dequant_dtype="auto",
        attention_backend=backend,
        prefill_attention_backend=None,
        decode_attention_backend=None,
        _model_config=SimpleNamespace(dtype=dtype),
    )


def attention(layer_id: int, k: float | None, v: float | None, heads: int, head_dim: int) -> Any:
    """SGLang's attention layer, with the scales of a checkpoint or without."""
    layer = RadixAttention(2 * heads, head_dim, 1.0, heads, layer_id)
    if k is not None and v is not None:
        method = BaseKVCacheMethod(SimpleNamespace())
        method.create_weights(layer)
        set_scales(layer, k, v)
    return layer


def set_scales(layer: Any, k: float, v: float) -> None:
    for name, scale in (("k_scale", k), ("v_scale", v)):
        getattr(layer, name).data.fill_(scale)
        setattr(layer, f"{name}_float", scale)


class Cache:
    """One of SGLang's pools, made as SGLang makes it, and a model's layers."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        backend: str = "torch_native",
        dtype: torch.dtype = torch.bfloat16,
        scales: Sequence[tuple[float | None, float | None]] = ((0.01, 0.02), (0.005, 0.03)),
        heads: int = 2,
        head_dim: int = 64,
        page_size: int = 1,
        start_layer: int = 0,
    ) -> None:
        server_args = settled(backend, dtype)
        serve_with(monkeypatch, server_args)
        assert is_float4_e2m1fn_x2(FP4)
        assert not is_float4_e2m1fn_x2(torch.uint8)
        self.layers = [
            attention(start_layer + i, *pair, heads, head_dim) for i, pair in enumerate(scales)
        ]
        self.method = methods.get_kv_cache_quant_method(
            "nvfp4", num_layers=len(scales), device="cpu", page_size=page_size
        )
        self.method.configure_attention_backends_from_server_args(server_args)
        self.method.load_scales_from_model(torch.nn.ModuleList(self.layers))
        self.size, self.page_size, self.dtype = 64, page_size, dtype
        self.heads, self.head_dim = heads, head_dim
        self.pool = MHATokenToKVPool(
            self.size,
            page_size,
            FP4,
            heads,
            head_dim,
            len(scales),
            "cpu",
            False,
            start_layer=start_layer,
            end_layer=start_layer + len(scales) - 1,
            quant_method=self.method,
        )

    def fill(self, loc: torch.Tensor, *, with_scales: bool = False) -> list[Any]:
        """Write random K and V to all layers, and hand them on."""
        written = []
        for layer in self.layers:
            k, v = (
                torch.randn(len(loc), self.heads, self.head_dim).mul(3).to(self.dtype) for _ in "kv"
            )
            before = k.clone(), v.clone()
            scales = (layer.k_scale, layer.v_scale) if with_scales else ()
            self.pool.set_kv_buffer(layer, loc, k, v, *scales)
            assert torch.equal(k, before[0])
            assert torch.equal(v, before[1])
            written.append((layer, k, v))
        return written

    def assert_holds(self, loc: torch.Tensor, written: list[Any]) -> None:
        """Bytes and plain reads of those places are the reference's."""
        for index, (layer, *sides) in enumerate(written):
            raw = (self.pool.k_buffer[index], self.pool.v_buffer[index])
            read = self.pool.get_kv_buffer(layer.layer_id)
            for x, rows, plain, scale in zip(
                sides, raw, read, (layer.k_scale, layer.v_scale), strict=True
            ):
                expected = quantize_kv(x, 1.0 if scale is None else scale.detach(), "nvfp4")
                packed = torch.cat([expected.data, expected.block_scales.view(torch.uint8)], -1)
                assert torch.equal(rows[loc], packed)
                assert plain.dtype == self.dtype
                assert plain.shape == (self.size + self.page_size, self.heads, self.head_dim)
                assert torch.equal(plain[loc], dequantize_kv(expected, dtype=self.dtype))


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("start_layer", [0, 5])
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 16), (2, 64), (8, 128)])
def test_what_is_written_is_read(
    monkeypatch: pytest.MonkeyPatch, page_size: int, start_layer: int, heads: int, head_dim: int
) -> None:
    cache = Cache(
        monkeypatch, page_size=page_size, start_layer=start_layer, heads=heads, head_dim=head_dim
    )
    loc = torch.randperm(cache.size)[:20] + page_size
    cache.assert_holds(loc, cache.fill(loc))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scales", [((None, None),), ((0.5, 0.25), (None, None))])
def test_layers_without_scales_and_other_dtypes(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, scales: Any
) -> None:
    cache = Cache(monkeypatch, dtype=dtype, scales=scales)
    loc = torch.arange(10, 30)
    cache.assert_holds(loc, cache.fill(loc))
    cache.assert_holds(
        loc, cache.fill(loc, with_scales=scales[0][0] is not None and len(scales) == 1)
    )


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_round_trip_through_the_host_keeps_codes_and_block_scales_together(
    monkeypatch: pytest.MonkeyPatch, page_size: int
) -> None:
    cache = Cache(monkeypatch, page_size=page_size)
    cache.pool.cpu_offloading_chunk_size = 6
    here, there = torch.arange(16, 32), torch.arange(40, 56).flip(0)
    written = cache.fill(here)
    on_host = cache.pool.get_cpu_copy(here)
    cache.fill(here)
    cache.pool.load_cpu_copy(on_host, there)
    cache.assert_holds(there, written)


@pytest.mark.parametrize("start_layer", [0, 5])
def test_rows_move_with_their_block_scales(
    monkeypatch: pytest.MonkeyPatch, start_layer: int
) -> None:
    """Also where what is moved lies where something else is moved to."""
    cache = Cache(monkeypatch, start_layer=start_layer)
    cache.pool.use_native_move_kv_cache = True
    source, target = torch.tensor([11, 12, 13, 40]), torch.tensor([10, 11, 12, 3])
    written = cache.fill(source)
    cache.pool.move_kv_cache(target, source)
    cache.assert_holds(target, written)


def test_the_tiled_move_takes_whole_rows_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's kernel, with the pointers and steps that the pool has for it."""
    cache = Cache(monkeypatch)
    source, target = torch.tensor([11, 12, 13, 40]), torch.tensor([10, 11, 12, 3])
    written = cache.fill(source)
    tile = 128
    tiles = -(-int(cache.pool.data_strides.max()) // tile)
    copy_all_layer_kv_cache_tiled[(len(cache.pool.data_ptrs), tiles)](
        cache.pool.data_ptrs, cache.pool.data_strides, target, source, 4, 4, tile
    )
    cache.assert_holds(target, written)


def test_a_token_costs_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(monkeypatch)
    cost = cache.method.compute_cell_size(cache.heads, cache.head_dim, len(cache.layers), 1)
    rows = cache.size + cache.page_size
    in_pool = sum(cache.pool.get_kv_size_bytes())
    assert in_pool == rows * 2 * len(cache.layers) * cache.heads * (64 // 2 + 64 // 16)
    of_a_read = sum(x.nbytes for x in cache.pool.get_kv_buffer(0))
    assert cost * rows == in_pool + of_a_read


def test_a_reload_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place, and by other parameters."""
    cache = Cache(monkeypatch)
    loc = torch.arange(5, 15)
    set_scales(cache.layers[0], 0.3, 0.4)
    cache.layers[1].k_scale = torch.nn.Parameter(torch.tensor(0.125), requires_grad=False)
    cache.assert_holds(loc, cache.fill(loc))


def test_triton_multiplies_what_it_reads_and_the_others_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = Cache(monkeypatch, backend="triton", scales=((0.0123, 0.0456), (None, None)))
    loc = torch.arange(5, 37)
    scaled, plain = cache.fill(loc, with_scales=True)
    for (layer, *sides), factors in (
        (scaled, (scaled[0].k_scale_float, scaled[0].v_scale_float)),
        (plain, (1.0, 1.0)),
    ):
        for x, read, factor in zip(
            sides, cache.pool.get_kv_buffer(layer.layer_id), factors, strict=True
        ):
            expected = dequantize_kv(quantize_kv(x, factor, "nvfp4"), dtype=torch.float32)
            assert torch.equal(read[loc].float() * torch.tensor(factor), expected)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Plain attention of the last tokens over all: ``[tokens, 2 * heads, head_dim]``."""
    k, v = (x.repeat_interleave(2, dim=1).float() for x in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q.float(), k)
    mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
    weights = logits.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


@pytest.mark.parametrize("scales", [(0.0123, 0.0456), (None, None)])
def test_tritons_kernels_read_what_was_written(
    monkeypatch: pytest.MonkeyPatch, scales: tuple[float | None, float | None]
) -> None:
    """Decoding, and extending a prefix: only the prefix is read from the cache."""
    cache = Cache(monkeypatch, backend="triton", dtype=torch.float32, scales=(scales,))
    loc = torch.randperm(cache.size)[:24] + 1
    ((_, k, v),) = cache.fill(loc, with_scales=scales[0] is not None)
    factors = [scale or 1.0 for scale in scales]
    k_stored, v_stored = (
        dequantize_kv(quantize_kv(x, factor, "nvfp4"), dtype=torch.float32)
        for x, factor in zip((k, v), factors, strict=True)
    )
    k_buffer, v_buffer = cache.pool.get_kv_buffer(0)

    q = torch.randn(1, 4, 64) / 8
    out = torch.empty_like(q)
    decode_attention_fwd(
        q,
        k_buffer,
        v_buffer,
        out,
        torch.tensor([0, 24], dtype=torch.int32),
        loc,
        torch.empty(1, 4, 2, 64),
        torch.empty(1, 4, 2),
        torch.tensor([2], dtype=torch.int32),
        2,
        1.0,
        *factors,
    )
    torch.testing.assert_close(out, attend(q, k_stored, v_stored), rtol=1e-3, atol=1e-3)

    q, k_new, v_new = torch.randn(5, 4, 64) / 8, torch.randn(5, 2, 64), torch.randn(5, 2, 64)
    out = torch.empty_like(q)
    extend_attention_fwd(
        q,
        k_new,
        v_new,
        out,
        k_buffer,
        v_buffer,
        torch.tensor([0, 5], dtype=torch.int32),
        torch.tensor([0, 24], dtype=torch.int32),
        loc,
        None,
        True,
        None,
        5,
        *factors,
        sm_scale=1.0,
    )
    expected = attend(q, torch.cat([k_stored, k_new]), torch.cat([v_stored, v_new]))
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_flex_attention_reads_what_was_written(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """A request with a prefix in the cache, and a further token; flex_attention is not compiled."""
    monkeypatch.setattr(torch, "compile", lambda function, **kwargs: function)
    cache = Cache(monkeypatch, backend="flex_attention", dtype=dtype)
    tokens = torch.randperm(cache.size)[:30] + 1
    backend = TorchFlexAttnBackend(
        SimpleNamespace(
            device="cpu",
            req_to_token_pool=SimpleNamespace(req_to_token=tokens[None]),
            token_to_kv_pool=cache.pool,
        )
    )
    layer = cache.layers[1]
    layer.scaling = 0.125
    stored = [torch.empty(0, 2, 64)] * 2
    for start, end in ((0, 20), (20, 29), (29, 30)):
        q = torch.randn(end - start, 4, 64).to(dtype)
        k, v = (torch.randn(end - start, 2, 64).to(dtype) for _ in "kv")
        batch = SimpleNamespace(
            forward_mode=ForwardMode.DECODE if start == 29 else ForwardMode.EXTEND,
            seq_lens=torch.tensor([end]),
            extend_prefix_lens=torch.tensor([start]),
            extend_seq_lens=torch.tensor([end - start]),
            req_pool_indices=torch.tensor([0]),
            out_cache_loc=tokens[start:end],
        )
        backend.init_forward_metadata(batch)
        forward = backend.forward_decode if start == 29 else backend.forward_extend
        out = forward(q.flatten(1), k, v, layer, batch).view(-1, 4, 64)
        for side, (x, scale) in enumerate(((k, layer.k_scale), (v, layer.v_scale))):
            new = dequantize_kv(quantize_kv(x, scale.detach(), "nvfp4"), dtype=dtype)
            stored[side] = torch.cat([stored[side], new.float()])
        expected = attend(q.float() * layer.scaling, *stored)
        torch.testing.assert_close(out.float(), expected, rtol=0.02, atol=0.02)
