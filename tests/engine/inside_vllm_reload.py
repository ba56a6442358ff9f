"""Run by pytest inside vLLM's environment: scales through its own reload, and those of queries.

The model, its attention, the quantization methods and the reload are vLLM's. No GPU is here: FNUZ
hardware is put in place of the CPU where the plugin, and where vLLM, asks what the device is.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from vllm.config import CacheConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsKVCacheMethod,
)
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.worker.gpu_worker import Worker

from kvcache_plugin import Device, KVScaleError
from kvcache_plugin.hosts import seams, vllm, vllm_layer

if TYPE_CHECKING:
    import logging
    from collections.abc import Mapping

NAN, INF = float("nan"), float("inf")
NAME = "model.layers.{}.self_attn.attn"
HEADS = 2
MODEL_CONFIG = SimpleNamespace(
    dtype=torch.bfloat16,
    is_mm_prefix_lm=False,
    model="model",
    quantization=None,
    word_embeddings_untied_by_checkpoint=False,
)

vllm.register()


@pytest.fixture
def fnuz(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "of", classmethod(lambda cls, x: cls("rocm", "gfx942")))
    monkeypatch.setattr(type(current_platform), "is_fp8_fnuz", classmethod(lambda cls: True))


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM's loader of per-head scales asks for: the heads of which rank it shall take."""
    module = CompressedTensorsKVCacheMethod.__module__
    monkeypatch.setattr(f"{module}.get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(f"{module}.get_tensor_model_parallel_world_size", lambda: 1)


class QuantConfig(QuantizationConfig):
    """Says which method a layer has."""

    def __init__(self, method: type, strategy: str) -> None:
        super().__init__()
        scheme = {"type": "float", "num_bits": 8, "strategy": strategy, "symmetric": True}
        self.kv_cache_scheme = scheme if method is CompressedTensorsKVCacheMethod else None
        self.total_num_heads, self.total_num_kv_heads = 2 * HEADS, HEADS
        self._method = method

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        return self._method(self)

    def get_name(self) -> Any:
        return "of the tests"

    def get_supported_act_dtypes(self) -> Any:
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: Any) -> Any:
        raise NotImplementedError


class Model(torch.nn.Module):
    """Two attention layers of vLLM's, and a loader of its own, as vLLM's models have."""

    def __init__(self, method: type, kv_cache_dtype: str = "fp8", strategy: str = "tensor") -> None:
        super().__init__()
        self.config = VllmConfig(cache_config=CacheConfig(cache_dtype=kv_cache_dtype))  # type: ignore[arg-type]
        self.config.model_config = MODEL_CONFIG  # type: ignore[assignment]
        quant_config = QuantConfig(method, strategy)
        with set_current_vllm_config(self.config):
            self.attention = torch.nn.ModuleList(
                Attention(
                    num_heads=2 * HEADS,
                    head_size=64,
                    scale=0.125,
                    num_kv_heads=HEADS,
                    cache_config=self.config.cache_config,
                    quant_config=quant_config,
                    prefix=NAME.format(number),
                    attn_backend=cpu_attn.CPUAttentionBackend,
                )
                for number in range(2)
            )
        record_metadata_for_reloading(self)

    def load_weights(self, weights: Mapping[str, Any]) -> None:
        """``{"0.k": 0.05}`` is the K scale of the first layer."""
        for name, value in weights.items():
            number, side = name.split(".")
            parameter = getattr(self.attention[int(number)], f"{side}_scale")
            loader = getattr(parameter, "weight_loader", default_weight_loader)
            loader(parameter, torch.as_tensor(value, dtype=torch.float32).reshape(-1))

    def load(self, weights: Mapping[str, Any]) -> Model:
        """As vLLM loads a checkpoint for the first time."""
        utils = importlib.import_module(seams.VLLM_MODEL.module)
        with set_current_vllm_config(self.config):
            self.load_weights(weights)
            with set_default_torch_dtype(MODEL_CONFIG.dtype):
                utils.process_weights_after_loading(self, MODEL_CONFIG, torch.device("cpu"))
        return self

    def reload(self, weights: Mapping[str, Any]) -> Model:
        """As vLLM loads another one into a model that is being served."""
        with set_current_vllm_config(self.config), torch.device("cpu"):
            initialize_layerwise_reload(self)
            self.load_weights(weights)
            finalize_layerwise_reload(self, MODEL_CONFIG)
        return self

    def scales(self, side: str) -> list[Any]:
        """What each layer serves; asserts that all of vLLM's copies have it."""
        served = []
        for layer in self.attention:
            buffer = getattr(layer, f"_{side}_scale")
            assert not hasattr(layer, f"{side}_scale")
            assert getattr(layer, f"_{side}_scale_float") == buffer.max().item()
            if side != "q":
                assert getattr(layer, f"_{side}_scale_cpu").item() == buffer.max().item()
            assert f"_{side}_scale" in dict(layer.named_buffers())
            served.append(buffer.tolist() if buffer.numel() > 1 else buffer.item())
        return served


METHODS = pytest.mark.parametrize("method", [BaseKVCacheMethod, CompressedTensorsKVCacheMethod])
FIRST = {"0.k": 0.05, "0.v": 0.06, "1.k": 0.04, "1.v": 0.07}
SECOND = {"0.k": 0.15, "0.v": 0.16, "1.k": 0.14, "1.v": 0.17}


def near(*values: Any) -> Any:
    return [pytest.approx(value, rel=1e-6) for value in values]


@METHODS
def test_a_reload_serves_the_new_scales_in_the_old_memory(method: type) -> None:
    """CUDA graphs hold the addresses of the buffers."""
    model = Model(method).load(FIRST)
    kept = [layer._k_scale.data_ptr() for layer in model.attention]
    assert model.scales("k") == near(0.05, 0.04)
    for _ in range(2):
        model.reload(SECOND)
        assert model.scales("k") == near(0.15, 0.14)
        assert model.scales("v") == near(0.16, 0.17)
    assert [layer._k_scale.data_ptr() for layer in model.attention] == kept


@METHODS
@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"1.k": NAN}, "k_scale=nan"),
        ({"1.v": -INF}, "v_scale=-inf"),
        ({"1.v": 0.0}, "v_scale=0.0"),
        ({"1.q": INF}, "q_scale=inf"),
    ],
)
def test_a_reload_with_a_corrupt_scale_is_refused(
    method: type, changed: dict[str, float], says: str
) -> None:
    model = Model(method).load(FIRST)
    with pytest.raises(KVScaleError) as refused:
        model.reload(SECOND | changed)
    assert NAME.format(1) in str(refused.value)
    assert says in str(refused.value)


@METHODS
def test_a_refused_reload_lists_every_layer_and_keeps_what_was_served(method: type) -> None:
    """vLLM cannot go back any more, so it ends the reload before the refusal is raised."""
    model = Model(method).load(FIRST | {"1.q": 0.2})
    with pytest.raises(KVScaleError, match="in 2 of 2 layers") as refused:
        model.reload(SECOND | {"0.k": NAN, "1.q": INF})
    assert "k_scale=nan" in str(refused.value)
    assert "q_scale=inf" in str(refused.value)
    assert model.scales("k") == near(0.05, 0.04)
    assert model.scales("v") == near(0.06, 0.07)
    assert model.scales("q") == near(1.0, 0.2)


@METHODS
def test_a_sound_reload_after_a_refused_one_is_served(method: type) -> None:
    model = Model(method).load(FIRST)
    for _ in range(2):
        with pytest.raises(KVScaleError, match="in 1 of 2 layers"):
            model.reload(SECOND | {"0.k": NAN})
    assert model.scales("k") == near(0.05, 0.14)
    model.reload(SECOND)
    assert model.scales("k") == near(0.15, 0.14)
    assert model.scales("v") == near(0.16, 0.17)


@METHODS
def test_a_refused_reload_ends_also_where_a_layer_lacks_a_scale(
    method: type, monkeypatch: pytest.MonkeyPatch, records: list[logging.LogRecord]
) -> None:
    """As another release may have it; what is told is the corrupt scale alone."""
    monkeypatch.setattr(vllm_layer, "_BUFFERS", ("k", "v", "q", "prob", "of_another_release"))
    model = Model(method).load(FIRST)
    with pytest.raises(KVScaleError, match="in 1 of 2 layers"):
        model.reload(SECOND | {"0.k": NAN})
    assert model.scales("k") == near(0.05, 0.14)
    assert records == []


def test_a_failure_to_keep_scales_does_not_end_a_reload_half_way(
    monkeypatch: pytest.MonkeyPatch, records: list[logging.LogRecord]
) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("a fault of the plugin")

    for method in (BaseKVCacheMethod, CompressedTensorsKVCacheMethod):
        model = Model(method).load(FIRST)
        with monkeypatch.context() as patch:
            patch.setattr(vllm_layer, "take_away", fail)
            with pytest.raises(KVScaleError, match="in 1 of 2 layers"):
                model.reload(SECOND | {"0.q": INF})
        model.reload(SECOND)
        assert model.scales("k") == near(0.15, 0.14)
    (record,) = records  # it is told once
    assert "failed while keeping the K/V scales of a layer" in record.getMessage()


@METHODS
@pytest.mark.usefixtures("fnuz")
def test_fnuz_doubles_once_however_often_it_is_reloaded(method: type) -> None:
    model = Model(method).load(FIRST)
    for _ in range(3):
        assert model.scales("k") == near(0.1, 0.08)
        model.reload(FIRST)
    assert model.scales("v") == near(0.12, 0.14)
    model.reload({})
    assert model.scales("k") == near(0.1, 0.08)


@METHODS
def test_a_reload_without_scales_keeps_them(method: type) -> None:
    model = Model(method).load(FIRST).reload({})
    assert model.scales("k") == near(0.05, 0.04)
    assert model.scales("v") == near(0.06, 0.07)


@METHODS
def test_a_reload_with_k_alone_serves_it_on_both_sides(method: type) -> None:
    """As a load does; a layer that is not in it keeps its scales."""
    model = Model(method).load(FIRST).reload({"0.k": 0.15})
    assert model.scales("k") == near(0.15, 0.04)
    assert model.scales("v") == near(0.15, 0.07)


@METHODS
def test_sleep_brings_back_what_was_served(method: type) -> None:
    """Level 2 throws weights away and keeps buffers, which is where the result must be."""
    model = Model(method).load(FIRST | {"0.q": 0.2, "1.q": 0.3})
    saved = {name: buffer.cpu().clone() for name, buffer in model.named_buffers()}
    for buffer in model.buffers():
        buffer.zero_()
    worker: Any = SimpleNamespace(
        sleep_mode_backend=SimpleNamespace(resume=lambda tags: None),
        vllm_config=SimpleNamespace(model_config=SimpleNamespace(enable_nccl_comm_suspend=False)),
        model_runner=SimpleNamespace(model=model),
        _sleep_saved_parameters={},
        _sleep_saved_buffers=saved,
        _sleep_saved_draft_buffers={},
        synchronize_device=lambda: None,
    )
    Worker.wake_up(worker)
    assert model.scales("k") == near(0.05, 0.04)
    assert model.scales("v") == near(0.06, 0.07)
    assert model.scales("q") == near(0.2, 0.3)
    model.reload(SECOND)
    assert model.scales("k") == near(0.15, 0.14)


# Queries and probabilities


@METHODS
def test_the_scale_of_a_query_is_served(method: type, records: list[logging.LogRecord]) -> None:
    model = Model(method).load(FIRST | {"0.q": 0.2})
    assert model.scales("q") == near(0.2, 1.0)
    assert records == []


@METHODS
@pytest.mark.usefixtures("fnuz")
def test_fnuz_doubles_that_of_a_query_and_not_the_one_by_default(method: type) -> None:
    model = Model(method).load(FIRST | {"0.q": 0.2})
    assert model.scales("q") == near(0.4, 1.0)


@METHODS
@pytest.mark.parametrize("value", [0.0, -0.5])
def test_one_that_is_not_positive_is_served_as_1(
    method: type, value: float, records: list[logging.LogRecord]
) -> None:
    model = Model(method).load(FIRST | {"1.q": value})
    assert model.scales("q") == [1.0, 1.0]
    (record,) = records
    assert f"{NAME.format(1)}: fp8 attention scales that are not positive" in record.getMessage()


@METHODS
@pytest.mark.parametrize(
    ("value", "says"),
    [(NAN, "q_scale=nan"), (-INF, "q_scale=-inf"), (1e-42, "whose reciprocal is not finite")],
)
def test_a_corrupt_one_is_refused(method: type, value: float, says: str) -> None:
    with pytest.raises(KVScaleError) as refused:
        Model(method).load(FIRST | {"1.q": value})
    assert "in 1 of 2 layers" in str(refused.value)
    assert NAME.format(1) in str(refused.value)
    assert says in str(refused.value)


def test_a_failure_to_mark_scales_does_not_stop_a_model(
    monkeypatch: pytest.MonkeyPatch, records: list[logging.LogRecord]
) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("a fault of the plugin")

    monkeypatch.setattr(vllm_layer, "mark", fail)
    model = Model(CompressedTensorsKVCacheMethod).load(FIRST)
    assert model.scales("k") == near(0.05, 0.04)
    (record,) = records  # of two layers
    assert "failed while marking K/V scales" in record.getMessage()


def test_a_place_that_a_release_does_not_have_is_not_marked() -> None:
    layer = SimpleNamespace(
        k_scale=torch.nn.Parameter(torch.ones(1)), v_scale=torch.nn.Parameter(torch.ones(1))
    )
    vllm_layer.mark(layer)
    assert layer.k_scale.item() == layer.v_scale.item() == -1.0
    layer.k_zero_point = layer.v_zero_point = torch.zeros(1)
    vllm_layer.prepare(layer, None, None)
    assert layer.k_scale.item() == layer.v_scale.item() == 1.0


@pytest.mark.usefixtures("fnuz")
@METHODS
def test_fnuz_refuses_a_query_scale_that_overflows_when_doubled(method: type) -> None:
    with pytest.raises(KVScaleError, match=r"got q_scale=6\.0000\d*e\+38"):
        Model(method).load(FIRST | {"0.q": 3e38})


def test_the_scale_of_probabilities_is_checked_where_vllm_copies_it() -> None:
    model = Model(BaseKVCacheMethod).load(FIRST | {"0.prob": 0.25})
    assert [layer._prob_scale.item() for layer in model.attention] == [0.25, 1.0]
    with pytest.raises(KVScaleError, match="prob_scale=nan"):
        Model(BaseKVCacheMethod).load(FIRST | {"0.prob": NAN})


@pytest.mark.usefixtures("one_rank")
def test_a_query_scale_for_each_head_is_that_of_its_group() -> None:
    """vLLM takes the largest of the query heads that share a K and V head."""
    heads = {name: torch.tensor([value, value]) for name, value in FIRST.items()}
    model = Model(CompressedTensorsKVCacheMethod, strategy="attn_head")
    model.load(heads | {"0.q": torch.tensor([0.1, 0.2, 0.4, 0.3])})
    assert model.scales("q") == near([0.2, 0.4], [1.0, 1.0])
    corrupt = {"0.q": torch.tensor([0.1, 0.2, 0.4, NAN])}
    with pytest.raises(KVScaleError, match="q_scale of head 1"):
        Model(CompressedTensorsKVCacheMethod, strategy="attn_head").load(heads | corrupt)


@METHODS
def test_that_of_a_cache_that_is_not_quantized_is_left_alone(method: type) -> None:
    model = Model(method, "bfloat16")
    model.load({"0.q": NAN, "1.q": INF})


def test_a_failure_to_check_it_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, records: list[logging.LogRecord]
) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("a fault of the plugin")

    monkeypatch.setattr("kvcache_plugin.hosts.verdicts.check_attention_scales", fail)
    model = Model(BaseKVCacheMethod).load(FIRST | {"0.q": 0.2})
    assert model.scales("k") == near(0.05, 0.04)
    (record,) = records
    assert record.exc_info is not None
