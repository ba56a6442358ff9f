"""Run by pytest inside vLLM's environment: the adapter on vLLM's own KV-cache methods.

The layers are bare, the classes and functions around them are vLLM's. No GPU is here: FNUZ
hardware is put in place of the CPU where the plugin, and where vLLM, asks what the device is.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file
from vllm.config.load import LoadConfig
from vllm.model_executor.layers.attention.attention import set_default_quant_scales
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsKVCacheMethod,
)
from vllm.model_executor.layers.quantization.fp8 import Fp8KVCacheMethod
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.utils import _weights_pre_processed
from vllm.platforms import current_platform

from kvcache_plugin import Device, KVScaleError
from kvcache_plugin.hosts import fitting, seams, vllm
from kvcache_plugin.hosts.gate import LoadGate
from kvcache_plugin.settings import read_settings

if TYPE_CHECKING:
    from pathlib import Path

NAME = "model.layers.3.self_attn.attn"
HEADS = 2

vllm.register()


@pytest.fixture
def fnuz(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "of", classmethod(lambda cls, x: cls("rocm", "gfx942")))
    monkeypatch.setattr(type(current_platform), "is_fp8_fnuz", classmethod(lambda cls: True))


def base_method() -> Any:
    return BaseKVCacheMethod(SimpleNamespace())


def compressed_tensors(strategy: str = "tensor") -> Any:
    scheme = {"type": "float", "num_bits": 8, "strategy": strategy, "symmetric": True}
    config = SimpleNamespace(kv_cache_scheme=scheme)
    return CompressedTensorsKVCacheMethod(config)


METHODS = [
    pytest.param(base_method, id="base"),
    pytest.param(compressed_tensors, id="compressed-tensors"),
]


def new_layer(kv_cache_dtype: str = "fp8") -> Any:
    layer: Any = torch.nn.Module()
    layer.kv_cache_dtype = kv_cache_dtype
    layer.layer_name = NAME
    layer.num_kv_heads = HEADS
    set_default_quant_scales(layer, register_buffer=True)
    return layer


def load(method: Any, layer: Any, k: Any, v: Any) -> None:
    """As vLLM's loaders do: make the parameters, copy in what the checkpoint has, process."""
    method.create_weights(layer)
    for parameter, scale in ((layer.k_scale, k), (layer.v_scale, v)):
        if scale is not None:
            parameter.data.copy_(torch.as_tensor(scale))
    method.process_weights_after_loading(layer)


def copies(layer: Any, side: str) -> tuple[float, float, float]:
    """The three places that vLLM's attention backends read a scale from."""
    return (
        getattr(layer, f"_{side}_scale").item(),
        getattr(layer, f"_{side}_scale_float"),
        getattr(layer, f"_{side}_scale_cpu").item(),
    )


def assert_scales(layer: Any, k: float, v: float) -> None:
    assert copies(layer, "k") == pytest.approx((k, k, k), rel=1e-6)
    assert copies(layer, "v") == pytest.approx((v, v, v), rel=1e-6)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("k", "v", "served"),
    [
        (0.05, 0.06, (0.05, 0.06)),
        (None, None, (1.0, 1.0)),
        (0.05, None, (0.05, 0.05)),
        (None, 0.05, (0.05, 0.05)),
        (0.0, 0.0, (1.0, 1.0)),
        (-0.5, -2.0, (1.0, 1.0)),
        (1.0, 1.0, (1.0, 1.0)),
    ],
)
def test_every_copy_has_what_the_rules_say(
    method: Any, k: float | None, v: float | None, served: tuple[float, float]
) -> None:
    layer = new_layer()
    load(method(), layer, k, v)
    assert_scales(layer, *served)
    assert not hasattr(layer, "k_scale")


@pytest.mark.usefixtures("fnuz")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("k", "v", "served"),
    [
        (0.05, 0.06, (0.1, 0.12)),
        (0.05, None, (0.1, 0.1)),
        (None, None, (1.0, 1.0)),
        (1e38, 1.0, (2e38, 2.0)),
    ],
)
def test_fnuz_doubles_once_however_often_a_layer_is_loaded(
    method: Any, k: float | None, v: float | None, served: tuple[float, float]
) -> None:
    layer = new_layer()
    for _ in range(3):
        load(method(), layer, k, v)
        assert_scales(layer, *served)


@pytest.mark.usefixtures("fnuz")
@pytest.mark.parametrize("method", METHODS)
def test_fnuz_refuses_what_overflows_when_doubled(method: Any) -> None:
    with pytest.raises(KVScaleError, match=r"fit in torch\.float32, got k_scale=6\.0000\d*e\+38"):
        load(method(), new_layer(), 3e38, 1.0)


@pytest.mark.usefixtures("fnuz")
def test_query_scale_follows_the_raw_k_scale() -> None:
    """vLLM takes k for q where q is unset, and doubles it itself: it must not start from 2 k."""
    layer = new_layer()
    load(base_method(), layer, 0.05, None)
    assert layer._q_scale.item() == 1.0  # vLLM 0.32 overwrites it with 1.0 in the end
    assert_scales(layer, 0.1, 0.1)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("k", "v", "side"),
    [
        (float("nan"), 1.0, "k_scale=nan"),
        (1.0, float("-inf"), "v_scale=-inf"),
        (0.05, 0.0, "v_scale=0.0"),
        (-0.3, 0.05, "k_scale=-0.3"),
        (1e-42, 0.05, "k_scale, whose reciprocal is not finite in torch.float32"),
    ],
)
def test_a_layer_that_comes_alone_is_refused(method: Any, k: float, v: float, side: str) -> None:
    """As in a reload, which processes layer by layer."""
    with pytest.raises(KVScaleError) as refused:
        load(method(), new_layer(), k, v)
    assert NAME in str(refused.value)
    assert side in str(refused.value)


def test_per_head_scales_are_served_and_their_largest_is_on_the_host() -> None:
    layer = new_layer()
    method = compressed_tensors("attn_head")
    load(method, layer, torch.tensor([0.02, 0.03]), torch.tensor([0.01, 0.04]))
    assert layer._k_scale.tolist() == pytest.approx([0.02, 0.03])
    assert layer._v_scale.tolist() == pytest.approx([0.01, 0.04])
    assert layer._k_scale_float == layer._k_scale_cpu.item() == layer._k_scale.max().item()
    assert layer._v_scale_float == layer._v_scale_cpu.item() == layer._v_scale.max().item()


@pytest.mark.usefixtures("fnuz")
def test_per_head_scales_are_doubled_on_fnuz() -> None:
    layer = new_layer()
    load(compressed_tensors("attn_head"), layer, torch.tensor([0.02, 0.03]), None)
    assert layer._k_scale.tolist() == pytest.approx([0.04, 0.06])
    assert layer._v_scale.tolist() == pytest.approx([0.04, 0.06])


def test_per_head_scales_with_a_corrupt_head_are_refused() -> None:
    with pytest.raises(KVScaleError, match="k_scale of head 1"):
        load(
            compressed_tensors("attn_head"),
            new_layer(),
            torch.tensor([0.02, float("nan")]),
            torch.tensor([0.01, 0.04]),
        )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "bfloat16", "fp8_ds_mla"])
def test_other_caches_are_left_alone(method: Any, kv_cache_dtype: str) -> None:
    """Unquantized ones, and those with scales of their own; no marker of ours stays behind."""
    layer = new_layer(kv_cache_dtype)
    if method is compressed_tensors:
        load(method(), layer, None, float("inf"))
        assert layer._k_scale.item() == 1.0
        assert layer._v_scale.item() == float("inf")
    elif kv_cache_dtype != "fp8_ds_mla":
        load(method(), layer, float("nan"), float("inf"))
        assert_scales(layer, 1.0, 1.0)


@pytest.mark.parametrize("method", METHODS)
def test_random_weights_are_no_checkpoint(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's dummy loader fills scales with random numbers of either sign."""
    config = SimpleNamespace(load_config=SimpleNamespace(load_format="dummy"))
    current = "vllm.config.vllm._current_vllm_config"
    monkeypatch.setattr(current, config)
    layer = new_layer()
    load(method(), layer, 0.0005, -0.0007)
    assert layer._k_scale_float == pytest.approx(0.0005)


@pytest.mark.parametrize("method", METHODS)
def test_what_follows_a_dummy_load_is_checked(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reinforcement learning begins with dummy weights, and loads real ones over them."""
    config = SimpleNamespace(load_config=SimpleNamespace(load_format="dummy"))
    monkeypatch.setattr("vllm.config.vllm._current_vllm_config", config)
    layer = new_layer()
    load(method(), layer, 0.0005, 0.0007)
    with pytest.raises(KVScaleError):
        load(method(), layer, float("nan"), 0.05)


def test_a_class_that_comes_later_is_checked_once() -> None:
    calls = []

    class Late(Fp8KVCacheMethod):
        def process_weights_after_loading(self, layer: Any) -> None:
            calls.append(layer.k_scale.item())
            super().process_weights_after_loading(layer)

    layer = new_layer()
    load(Late(SimpleNamespace()), layer, None, 0.05)
    assert calls == pytest.approx([0.05])
    assert_scales(layer, 0.05, 0.05)
    with pytest.raises(KVScaleError):
        load(Late(SimpleNamespace()), new_layer(), 0.05, float("nan"))


def test_a_failure_of_ours_does_not_stop_the_engine(
    monkeypatch: pytest.MonkeyPatch, records: list[logging.LogRecord]
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("a fault of the plugin")

    monkeypatch.setattr("kvcache_plugin.hosts.verdicts.validate_kv_scales", fail)
    layer = new_layer()
    load(base_method(), layer, 0.05, 0.06)
    assert_scales(layer, 0.05, 0.06)
    (record,) = [r for r in records if r.levelno >= logging.ERROR]
    assert record.exc_info is not None
    assert NAME in logging.Formatter().formatException(record.exc_info)


class Model(torch.nn.Module):
    """One attention layer, and a loader of its own, as vLLM's models have."""

    def __init__(self, method: Any) -> None:
        super().__init__()
        self.attn = new_layer()
        self.attn.quant_method = method
        method.create_weights(self.attn)
        self.loaded: list[str] = []

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            self.loaded.append(name)
            side = name[-len("k_scale")]
            if name.endswith(f"self_attn.{side}_scale"):
                parameter = getattr(self.attn, f"{side}_scale")
                parameter.data.copy_(tensor.reshape(parameter.shape))


def write_files(folder: Path, k: torch.Tensor, name: str = "{}_scale") -> Path:
    """A checkpoint with the scales of one layer."""
    scheme = {"type": "float", "num_bits": 8, "strategy": "tensor", "symmetric": True}
    config = {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    module = NAME.removesuffix(".attn")
    scales = {"k": k, "v": torch.tensor([0.06])}
    tensors = {f"{module}.{name.format(side)}": scale for side, scale in scales.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def load_files(
    folder: Path, method: Any, monkeypatch: pytest.MonkeyPatch, load_format: str = "auto"
) -> Model:
    """As vLLM's default loader loads a folder."""
    parallel = SimpleNamespace(enable_expert_parallel=False)
    load_config = LoadConfig(load_format=load_format, use_tqdm_on_load=False)
    config = SimpleNamespace(load_config=load_config, parallel_config=parallel)
    monkeypatch.setattr("vllm.config.vllm._current_vllm_config", config)
    model_config = SimpleNamespace(
        model=str(folder),
        revision=None,
        quantization="compressed-tensors",
        multimodal_config=None,
        is_moe=False,
        word_embeddings_untied_by_checkpoint=False,
        dtype=torch.bfloat16,
    )
    model = Model(method)
    DefaultModelLoader(load_config).load_weights(model, model_config)
    utils = importlib.import_module(seams.VLLM_MODEL.module)
    utils.process_weights_after_loading(model, model_config, torch.device("cpu"))
    return model


@pytest.mark.parametrize("method", METHODS)
def test_a_folder_with_a_corrupt_scale_is_refused_before_it_is_read(
    method: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*args: Any, **kwargs: Any) -> Any:
        pytest.fail("no weight may be read")

    loader = "vllm.model_executor.model_loader.default_loader.safetensors_weights_iterator"
    monkeypatch.setattr(loader, read)
    write_files(tmp_path, torch.tensor([1.0, 2.0]))
    with pytest.raises(KVScaleError, match=f"{NAME}: Only support per-tensor scaling factor"):
        load_files(tmp_path, method(), monkeypatch)


@pytest.mark.parametrize("method", METHODS)
def test_a_sound_folder_is_served_without_a_word(
    method: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    records: list[logging.LogRecord],
) -> None:
    write_files(tmp_path, torch.tensor([0.05]))
    model = load_files(tmp_path, method(), monkeypatch)
    assert len(model.loaded) == 2
    assert_scales(model.attn, 0.05, 0.06)
    assert records == []


@pytest.mark.parametrize("method", METHODS)
def test_what_does_not_arrive_is_told(
    method: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    records: list[logging.LogRecord],
) -> None:
    """Also where vLLM starts from 1.0."""
    write_files(tmp_path, torch.tensor([0.05]), "attn_mqa.{}_scale")
    model = load_files(tmp_path, method(), monkeypatch)
    assert_scales(model.attn, 1.0, 1.0)
    (record,) = records
    assert f"{NAME}: model.layers.3.self_attn.attn_mqa.k_scale" in record.getMessage()


@pytest.mark.parametrize("seam", [s for s in seams.SEAMS if s.engine == "vllm"])
def test_a_seam_with_another_signature_is_left_out(
    seam: seams.Seam, records: list[logging.LogRecord]
) -> None:
    module = ModuleType(seam.module)
    owner: Any = module
    *classes, function = seam.qualname.split(".")
    for name in classes:
        setattr(owner, name, type(name, (), {}))
        owner = getattr(owner, name)
    setattr(owner, function, lambda other, names: None)
    fitted: list[ModuleType] = []
    vllm._fit_if_it_fits(LoadGate("vLLM", "strict"), seam, fitted.append, module)
    assert fitted == []
    (record,) = records
    assert f"{seam.path} has another signature: (other, names)" in record.getMessage()
    assert seam.purpose in record.getMessage()


def test_a_seam_whose_module_is_gone_is_left_out(
    monkeypatch: pytest.MonkeyPatch, records: list[logging.LogRecord]
) -> None:
    waited: list[str] = []
    monkeypatch.setattr(vllm, "when_imported", lambda name, then: waited.append(name))
    gone = dataclasses.replace(seams.VLLM_MARKER, module="vllm.no.such.module")
    # Those of the writes are looked at where a layer is taken over.
    of_writes = (seams.VLLM_WRITE, *seams.VLLM_FUSED_WRITES, seams.VLLM_SHUFFLED)
    others = (seams.VLLM_MARKER, *of_writes)
    known = [s for s in seams.SEAMS if s.engine == "vllm" and s not in others]
    monkeypatch.setattr(seams, "VLLM_MARKER", gone)
    vllm._hook(LoadGate("vLLM", "strict"), read_settings({}))
    assert sorted(waited) == sorted(seam.module for seam in known)
    (record,) = records
    assert "there is no module vllm.no.such.module" in record.getMessage()


def test_no_marker_where_another_plugin_has_replaced_the_method(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody would turn it into vLLM's 1.0 again."""
    seen: list[float] = []

    def process(method: Any, layer: Any) -> None:
        seen.append(layer.k_scale.item())

    monkeypatch.setattr(CompressedTensorsKVCacheMethod, "process_weights_after_loading", process)
    load(compressed_tensors(), new_layer(), None, None)
    assert seen == [1.0]


def test_weights_that_come_processed_are_left_alone(records: list[logging.LogRecord]) -> None:
    """vLLM's IPC loader leaves the parameters on the meta device."""
    layer, method = new_layer(), base_method()
    with torch.device("meta"):
        method.create_weights(layer)
    layer._k_scale.fill_(0.25)
    token = _weights_pre_processed.set(True)
    try:
        method.process_weights_after_loading(layer)
    finally:
        _weights_pre_processed.reset(token)
    assert_scales(layer, 0.25, 1.0)
    assert records == []


def test_processing_again_changes_nothing() -> None:
    layer, method = new_layer(), base_method()
    load(method, layer, 0.05, 0.06)
    method.process_weights_after_loading(layer)
    assert_scales(layer, 0.05, 0.06)


def test_registering_again_changes_nothing() -> None:
    before = vars(BaseKVCacheMethod)["process_weights_after_loading"]
    vllm.register()
    assert vars(BaseKVCacheMethod)["process_weights_after_loading"] is before


def test_the_whole_model_seam_is_what_the_loader_calls() -> None:
    utils = importlib.import_module(seams.VLLM_MODEL.module)
    loader = sys.modules["vllm.model_executor.model_loader.base_loader"]
    ours = utils.process_weights_after_loading
    assert ours.__wrapped__ is not ours
    assert loader.process_weights_after_loading is ours  # type: ignore[attr-defined]


def test_every_seam_fits_in_the_source_and_in_the_module() -> None:
    for seam in seams.SEAMS:
        if seam.engine == "vllm":
            assert fitting.check_source(seam) == ""
            assert fitting.check_module(seam, importlib.import_module(seam.module)) == ""
