"""Run by pytest inside vLLM's environment: the hook writes what vLLM's own kernels store.

The layers, their backends and the kernel are vLLM's; what is expected is torch's own cast.
"""

from __future__ import annotations

import importlib
import logging
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from vllm.config import CacheConfig, VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention.attention import (
    Attention,
    set_default_quant_scales,
    unified_kv_cache_update,
)
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

import kvcache_plugin as kv
from kvcache_plugin.hosts import seams, vllm
from kvcache_plugin.hosts.engine_log import EngineLog
from kvcache_plugin.hosts.vllm_writes import HookWrites

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HEADS, HEAD_DIM, BLOCKS, BLOCK_SIZE = 2, 64, 4, 32
#: From where on ``records`` hears what is said.
LEVEL = logging.INFO
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FORMATS = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
K_SCALE, V_SCALE = 0.0371, 0.0613
SLOTS = torch.tensor([5, 0, 127, 64, 33, 32, 31])

#: A script of its own, and not on the path here.
WATCH = runpy.run_path(str(Path(__file__).with_name("watch_vllm.py")))

vllm.register()


class Model(torch.nn.Module):
    """Two attention layers of vLLM's, with their caches."""

    def __init__(self, kv_cache_dtype: str = "fp8", dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.config = VllmConfig(cache_config=CacheConfig(cache_dtype=kv_cache_dtype))  # type: ignore[arg-type]
        self.config.model_config = SimpleNamespace(dtype=dtype, is_mm_prefix_lm=False)  # type: ignore[assignment]
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with set_current_vllm_config(self.config):
                self.layers = torch.nn.ModuleList(map(self._attention, range(2)))
        finally:
            torch.set_default_dtype(default)

    def _attention(self, number: int) -> Attention:
        layer = Attention(
            num_heads=4,
            head_size=HEAD_DIM,
            scale=0.125,
            num_kv_heads=HEADS,
            cache_config=self.config.cache_config,
            prefix=f"model.layers.{number}.self_attn.attn",
            attn_backend=cpu_attn.CPUAttentionBackend,
        )
        layer.isa = cpu_attn._get_attn_isa(layer.dtype, BLOCK_SIZE, HEAD_DIM)
        layer.kv_cache = torch.zeros(BLOCKS, HEADS, BLOCK_SIZE, 2 * HEAD_DIM, dtype=torch.uint8)
        return layer

    def scaled(self, k: Any = K_SCALE, v: Any = V_SCALE) -> Model:
        for layer in self.layers:
            for side, scale in (("k", torch.as_tensor(k)), ("v", torch.as_tensor(v))):
                layer.register_buffer(f"_{side}_scale", scale.float())
                setattr(layer, f"_{side}_scale_float", scale.max().item())
        return self

    def write(self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor = SLOTS) -> Any:
        """As a forward does: through the op that vLLM's attention calls, for the first layer."""
        layer = self.layers[0]
        mapping = {one.layer_name: slots for one in self.layers}
        with (
            set_current_vllm_config(self.config),
            set_forward_context(None, self.config, slot_mapping=mapping),
        ):
            unified_kv_cache_update(key, value, layer.layer_name)
        return layer


def hooked(model: Model, which: str = "hook") -> Model:
    HookWrites(EngineLog("vLLM"), which, vllm._FORMATS).fit(model)
    return model


def is_hooked(layer: Any) -> bool:
    return "do_kv_cache_update" in vars(layer.impl)


def some(tokens: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """K or V of which some values are beyond the largest code."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(tokens, HEADS, HEAD_DIM, generator=generator)
    drawn[0, 0, :4] = torch.tensor([1e4, -1e4, 0.0, -0.0])
    return (drawn * 3).to(dtype)


def rounded(tensor: torch.Tensor, scale: Any, kv_cache_dtype: str = "fp8") -> torch.Tensor:
    codes: torch.Tensor = WATCH["rounded"](tensor, torch.as_tensor(scale), kv_cache_dtype)
    return codes


def written(layer: Any, dtype: torch.dtype, slots: torch.Tensor = SLOTS) -> Any:
    """The bytes of K and of V in a layer's cache."""
    return WATCH["stored"](layer, torch.Size([len(slots), HEADS, HEAD_DIM]), dtype, slots)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kv_cache_dtype", FORMATS)
def test_every_byte_is_the_code(kv_cache_dtype: str, dtype: torch.dtype) -> None:
    model = hooked(Model(kv_cache_dtype, dtype).scaled())
    key, value = some(7, dtype, 1), some(7, dtype, 2)
    given = key.clone(), value.clone()
    layer = model.write(key, value)
    k, v = written(layer, dtype)
    assert torch.equal(k, rounded(key, K_SCALE, kv_cache_dtype))
    assert torch.equal(v, rounded(value, V_SCALE, kv_cache_dtype))
    assert torch.equal(key, given[0])
    assert torch.equal(value, given[1])
    assert layer._k_scale.item() == pytest.approx(K_SCALE)
    assert layer._k_scale_float == pytest.approx(K_SCALE)


def test_else_vllm_truncates() -> None:
    """Why the hook's codes are not what is there anyway."""
    dtype = torch.bfloat16
    key, value = some(7, dtype, 1), some(7, dtype, 2)
    layer = hooked(Model().scaled(), "auto").write(key, value)
    assert not is_hooked(layer)
    k, _ = written(layer, dtype)
    differs = (k != rounded(key, K_SCALE)).float().mean().item()
    assert 0.4 < differs < 0.55


class Chosen:
    """Quantizes to the codes that a test has chosen."""

    def __init__(self, codes: torch.Tensor) -> None:
        self.codes = codes

    @kv.hookimpl
    def quantize_kv(self, scale: torch.Tensor, kv_cache_dtype: str) -> Any:
        return kv.QuantizedKV(self.codes, None, scale, kv_cache_dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e5m2"])
def test_each_code_comes_through_the_kernel(
    kv_cache_dtype: str, dtype: torch.dtype, registered: Callable[[Any], None]
) -> None:
    """All of them but NaN and infinity, of which the kernel makes the largest number."""
    fp8, slots = FORMATS[kv_cache_dtype], SLOTS[:2]
    codes = torch.arange(256, dtype=torch.uint8).reshape(2, HEADS, HEAD_DIM)
    registered(Chosen(codes.view(fp8)))
    layer = hooked(Model(kv_cache_dtype, dtype)).write(
        torch.zeros(codes.shape, dtype=dtype), torch.zeros(codes.shape, dtype=dtype), slots
    )
    for side in written(layer, dtype, slots):
        lost = codes[side != codes].view(fp8).float()
        assert lost.numel() == {"fp8": 2, "fp8_e5m2": 8}[kv_cache_dtype]
        assert not lost.isfinite().any()


@pytest.fixture
def reads_per_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """As FlashAttention does; vLLM's attention for CPUs reads all heads with one scale."""
    question = "supports_per_head_quant_scales"
    monkeypatch.setattr(cpu_attn.CPUAttentionBackend, question, classmethod(lambda cls: True))


@pytest.mark.usefixtures("reads_per_head")
@pytest.mark.parametrize("scale", [torch.tensor(K_SCALE), torch.tensor([0.02, 0.07])])
def test_scales_are_those_of_the_layer_when_it_writes(scale: torch.Tensor) -> None:
    """Also one for each head, and what a reload has copied over the old ones."""
    model = hooked(Model().scaled(torch.ones_like(scale), torch.ones_like(scale)))
    layer: Any = model.layers[0]
    layer._k_scale.copy_(scale)
    layer._v_scale.copy_(2 * scale)
    key, value = some(7, torch.bfloat16, 1), some(7, torch.bfloat16, 2)
    k, v = written(model.write(key, value), torch.bfloat16)
    assert torch.equal(k, rounded(key, scale))
    assert torch.equal(v, rounded(value, 2 * scale))


def test_a_cache_that_is_read_with_one_scale_is_not_written_with_one_per_head(
    records: list[logging.LogRecord],
) -> None:
    """vLLM's attention for CPUs takes the largest, for K and V that it writes as for those read."""
    heads = torch.tensor([0.02, 0.07])
    assert not any(is_hooked(layer) for layer in hooked(Model().scaled(heads, heads)).layers)
    (record,) = records
    assert "reads the cache with one scale, and the layer has one per head" in record.getMessage()


def test_where_a_backend_cannot_be_asked_how_it_reads_the_engine_writes(
    monkeypatch: pytest.MonkeyPatch, records: list[logging.LogRecord]
) -> None:
    monkeypatch.delattr("vllm.v1.attention.backend.AttentionBackend.supports_per_head_quant_scales")
    heads = torch.tensor([0.02, 0.07])
    assert not any(is_hooked(layer) for layer in hooked(Model().scaled(heads, heads)).layers)
    (record,) = records
    assert "supports_per_head_quant_scales is missing" in record.getMessage()
    assert all(is_hooked(layer) for layer in hooked(Model().scaled()).layers)


def test_what_a_backend_takes_beside_goes_on_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A further argument has a default, and yet may be given."""
    model, handed = Model(), []
    layer: Any = model.layers[0]

    def write(
        self: Any,
        layer: Any,
        key: Any,
        value: Any,
        kv_cache: Any,
        slot_mapping: Any,
        first: int = 0,
        *,
        last: int = 0,
    ) -> None:
        handed.append((first, last))

    monkeypatch.setattr(type(layer.impl), "do_kv_cache_update", write)
    hooked(model)
    given = some(7, torch.bfloat16)
    layer.impl.do_kv_cache_update(layer, given, given, layer.kv_cache, SLOTS, 1, last=2)
    assert handed == [(1, 2)]


class Marker:
    """A write of a third party: one code for whatever comes."""

    def __init__(self, kv_format: str = "fp8_e4m3") -> None:
        self.kv_format = kv_format

    @kv.hookimpl
    def supports_kv(self, kv_cache_dtype: str) -> Any:
        return True if kv_cache_dtype == self.kv_format else "another format"

    @kv.hookimpl
    def quantize_kv(self, tensor: torch.Tensor, scale: torch.Tensor, kv_cache_dtype: str) -> Any:
        data = torch.full(tensor.shape, 0x35, dtype=torch.uint8).view(torch.float8_e4m3fn)
        return kv.QuantizedKV(data, None, scale, kv_cache_dtype)


@pytest.fixture
def registered() -> Iterator[Callable[[Any], None]]:
    plugins: list[Any] = []

    def add(plugin: Any) -> None:
        kv.register(plugin, "marker")
        plugins.append(plugin)

    yield add
    for plugin in plugins:
        kv.unregister(plugin)


def processed(model: Model) -> Model:
    """As vLLM's loaders do once the weights are there."""
    utils = importlib.import_module(seams.VLLM_MODEL.module)
    config = SimpleNamespace(
        dtype=torch.bfloat16,
        model="model",
        quantization=None,
        word_embeddings_untied_by_checkpoint=False,
    )
    with set_current_vllm_config(model.config):
        utils.process_weights_after_loading(model, config, torch.device("cpu"))
    return model


def test_a_third_party_writes_without_any_switch(
    registered: Callable[[Any], None], records: list[logging.LogRecord]
) -> None:
    registered(Marker())
    model = processed(Model())
    layer = model.write(some(7, torch.bfloat16), some(7, torch.bfloat16))
    for side in written(layer, torch.bfloat16):
        assert (side == 0x35).all()
    (line,) = [r.getMessage() for r in records if "by its hook" in r.getMessage()]
    assert "2 layers in vLLM" in line
    assert "'marker'" in line


def test_by_default_nothing_is_put_on_a_layer(records: list[logging.LogRecord]) -> None:
    model = processed(Model())
    assert not any(is_hooked(layer) for layer in model.layers)
    assert not any("by its hook" in r.getMessage() for r in records)


def test_a_third_party_for_another_format_changes_nothing(
    registered: Callable[[Any], None],
) -> None:
    registered(Marker("fp8_e5m2"))
    assert not any(is_hooked(layer) for layer in processed(Model()).layers)


def test_a_third_party_that_only_converts_scales_writes_nothing(
    registered: Callable[[Any], None],
) -> None:
    class Policy:
        @kv.hookimpl
        def validate_kv_scales(self, scales: Any) -> Any:
            return scales

    registered(Policy())
    assert not any(is_hooked(layer) for layer in processed(Model()).layers)


def test_a_layer_is_taken_over_once_and_told_once(records: list[logging.LogRecord]) -> None:
    model = Model()
    writes = HookWrites(EngineLog("vLLM"), "hook", vllm._FORMATS)
    writes.fit(model)
    first = model.layers[0].impl.do_kv_cache_update
    model.layers[1].impl = model.layers[0].impl  # a backend that is shared is not wrapped twice
    writes.fit(model)
    HookWrites(EngineLog("vLLM"), "hook", vllm._FORMATS).fit(model)
    assert model.layers[0].impl.do_kv_cache_update is first
    lines = [r.getMessage() for r in records if "by its hook" in r.getMessage()]
    assert len(lines) == 2
    assert lines[0].endswith("(fp8_e4m3 on cpu, cpu_fast) [errors#hook-writes]")


def test_compilation_may_not_fuse_the_write_of_a_layer_that_is_taken_over() -> None:
    questions = [seam.qualname.rpartition(".")[2] for seam in seams.VLLM_FUSED_WRITES]
    model = Model()
    for layer in model.layers:
        for question in questions:
            setattr(layer.impl, question, lambda: True)
    hooked(model)
    for layer in model.layers:
        assert [getattr(layer.impl, question)() for question in questions] == [False] * 3


def test_a_backend_of_two_is_taken_over_where_it_writes() -> None:
    """As vLLM's composite has it: one of the two writes for both."""
    model = Model()
    for layer in model.layers:
        layer.impl = SimpleNamespace(
            general_impl=layer.impl, do_kv_cache_update=layer.impl.do_kv_cache_update
        )
    hooked(model)
    assert all(is_hooked(SimpleNamespace(impl=one.impl.general_impl)) for one in model.layers)


def test_layers_that_write_no_quantized_cache_are_passed_by(
    records: list[logging.LogRecord],
) -> None:
    unquantized, model = Model("auto"), Model()
    model.layers[0].kv_sharing_target_layer_name = "model.layers.1.self_attn.attn"
    model.layers[1].attn_type = "encoder_only"
    for one in (unquantized, model):
        assert not any(is_hooked(layer) for layer in hooked(one).layers)
    assert records == []


def other_format(layer: Any) -> None:
    layer.kv_cache_dtype = "nvfp4"


def per_token_head(layer: Any) -> None:
    layer.kv_cache_dtype = "fp8_per_token_head"


def mla(layer: Any) -> None:
    impl_cls = CPUMLABackend.get_impl_cls()
    layer.impl = impl_cls.__new__(impl_cls)


def in_forward(layer: Any) -> None:
    layer.attn_backend = type("Whole", (), {"forward_includes_kv_cache_update": True})


def compiled(layer: Any) -> None:
    layer.use_direct_call = True


class OwnForward(Attention):
    """As vLLM's attention with sinks has it, which writes them by another kernel."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def own_forward(layer: Any) -> None:
    layer.__class__ = OwnForward


def no_write(layer: Any) -> None:
    layer.impl = SimpleNamespace()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (other_format, "(nvfp4, CPUAttentionBackendImpl)"),
        (other_format, "no codes as they are but those of fp8, fp8_e4m3, fp8_e5m2"),
        (per_token_head, "(fp8_per_token_head, CPUAttentionBackendImpl)"),
        (mla, "(self, kv_c_normed, k_pe, kv_cache, slot_mapping"),
        (in_forward, "writes the cache while it computes attention"),
        (own_forward, "OwnForward has a forward of its own"),
        (compiled, "torch.compile looks into attention"),
        (no_write, "do_kv_cache_update is missing"),
    ],
)
def test_others_are_refused_by_name_in_one_line(
    change: Callable[[Any], None], said: str, records: list[logging.LogRecord]
) -> None:
    model = Model()
    for layer in model.layers:
        change(layer)
    hooked(model)
    assert not any(is_hooked(layer) for layer in model.layers)
    (record,) = records
    assert record.levelno == logging.WARNING
    assert "leaves the KV caches of 2 layers" in record.getMessage()
    assert type(model.layers[0].impl).__name__ in record.getMessage()
    assert said in record.getMessage()


def test_where_nobody_serves_vllm_writes(
    monkeypatch: pytest.MonkeyPatch, records: list[logging.LogRecord]
) -> None:
    monkeypatch.setattr("kvcache_plugin.hosts.writes.explain", lambda device, name: [])
    hooked(Model())
    (record,) = records
    assert "no implementation quantizes fp8_e4m3 on cpu" in record.getMessage()


def test_a_failure_of_ours_leaves_the_write_to_vllm(
    monkeypatch: pytest.MonkeyPatch, records: list[logging.LogRecord]
) -> None:
    def fail(*args: Any) -> Any:
        raise RuntimeError("a fault of the plugin")

    monkeypatch.setattr("kvcache_plugin.hosts.writes.explain", fail)
    layer = hooked(Model()).write(some(7, torch.bfloat16), some(7, torch.bfloat16))
    assert not is_hooked(layer)
    assert layer.kv_cache.any()
    (record,) = records
    assert record.exc_info is not None


def test_a_seam_that_has_moved_leaves_every_write_to_vllm(
    monkeypatch: pytest.MonkeyPatch, records: list[logging.LogRecord]
) -> None:
    monkeypatch.setattr(
        "vllm.model_executor.layers.attention.attention.unified_kv_cache_update",
        lambda key, value, kv_cache: None,
    )
    assert not any(is_hooked(layer) for layer in hooked(Model()).layers)
    (record,) = records
    assert "has another signature: (key, value, kv_cache)" in record.getMessage()


def test_a_question_that_is_gone_is_told_and_the_hook_writes(
    monkeypatch: pytest.MonkeyPatch, records: list[logging.LogRecord]
) -> None:
    monkeypatch.delattr("vllm.v1.attention.backend.AttentionImpl.fused_rope_kvcache_supported")
    assert all(is_hooked(layer) for layer in hooked(Model()).layers)
    (warning, _) = records
    assert "fused_rope_kvcache_supported is missing" in warning.getMessage()


def test_a_failure_while_serving_is_raised(registered: Callable[[Any], None]) -> None:
    class Broken(Marker):
        @kv.hookimpl
        def quantize_kv(self, tensor: torch.Tensor) -> Any:
            raise RuntimeError("the accelerator has gone")

    registered(Broken())
    model = processed(Model())
    with pytest.raises(RuntimeError, match="the accelerator has gone"):
        model.write(some(7, torch.bfloat16), some(7, torch.bfloat16))
    assert not model.layers[0].kv_cache.any()


def test_on_fnuz_the_codes_are_those_of_fnuz(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel for it is not here: what is handed to it are numbers that FNUZ can store."""
    monkeypatch.setattr(kv.Device, "of", classmethod(lambda cls, x: cls("rocm", "gfx942")))
    monkeypatch.setattr("kvcache_plugin.api.of_existing", kv.Device.of)
    model = Model().scaled(2 * K_SCALE, 2 * V_SCALE)
    handed: list[Any] = []
    layer: Any = model.layers[0]
    monkeypatch.setattr(
        type(layer.impl),
        "do_kv_cache_update",
        lambda self, layer, key, value, kv_cache, slot_mapping: handed.append((layer, key, value)),
    )
    hooked(model)
    key, value = some(7, torch.bfloat16, 1), some(7, torch.bfloat16, 2)
    layer.impl.do_kv_cache_update(layer, key, value, layer.kv_cache, SLOTS)
    ((shown, k, v),) = handed
    assert (shown._k_scale.item(), shown._v_scale_float, shown.num_kv_heads) == (1.0, 1.0, HEADS)
    for given, scale, codes in ((key, K_SCALE, k), (value, V_SCALE, v)):
        scaled = given.float() / torch.tensor(2 * scale)
        expected = scaled.clamp(-240, 240).to(torch.float8_e4m3fnuz)
        assert torch.equal(codes, expected.to(torch.bfloat16))
    assert k.abs().max() == 240


def test_a_layout_without_scales_is_left_to_vllm(
    monkeypatch: pytest.MonkeyPatch, records: list[logging.LogRecord]
) -> None:
    """AITER's shuffled one: what is written as K / scale would be read as K."""
    enabled = f"{seams.VLLM_SHUFFLED.module}.{seams.VLLM_SHUFFLED.qualname}"
    monkeypatch.setattr(enabled, classmethod(lambda cls: True))
    assert all(is_hooked(layer) for layer in hooked(Model()).layers)  # no ROCm, no such layout
    records.clear()
    monkeypatch.setattr(kv.Device, "of", classmethod(lambda cls, x: cls("rocm", "gfx950")))
    assert not any(is_hooked(layer) for layer in hooked(Model()).layers)
    monkeypatch.delattr(enabled)
    assert not any(is_hooked(layer) for layer in hooked(Model()).layers)
    shuffled, missing = (record.getMessage() for record in records)
    assert "written and read without their scales" in shuffled
    assert "is_shuffle_kv_cache_enabled is missing" in missing


def test_what_a_write_leaves_on_the_layer_stays_there() -> None:
    from kvcache_plugin.hosts.vllm_writes import _Unscaled

    layer: Any = torch.nn.Module()
    set_default_quant_scales(layer, register_buffer=True)
    shown = _Unscaled(layer)
    shown.workspace = 3
    assert layer.workspace == 3
