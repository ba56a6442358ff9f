"""Run by pytest inside SGLang's environment: the adapter on SGLang's own KV-cache methods.

The layers are bare, the classes and the hook registry around them are SGLang's. No GPU is here:
FNUZ hardware is put in place of the CPU where the plugin, and where SGLang, asks for it.
"""

from __future__ import annotations

import importlib
import json
import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.layers.quantization import kv_cache
from sglang.srt.layers.quantization.kv_cache import BaseKVCacheMethod
from sglang.srt.model_executor.model_runner_components import load_model_utils
from sglang.srt.model_loader import loader as loader_module
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.plugins.hook_registry import HookRegistry

from kvcache_plugin import Device, KVScaleError
from kvcache_plugin.hosts import fitting, seams, sglang
from kvcache_plugin.hosts.gate import LoadGate
from kvcache_plugin.settings import read_settings

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

sglang.register()
sglang.register()
HookRegistry.apply_hooks()

LAYER = 3
NAME = f"model.layers.{LAYER}.self_attn.attn"
UNSET = -1.0
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def config(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What SGLang publishes of its arguments before it loads a model."""
    config = SimpleNamespace(
        kv_cache_dtype="fp8_e4m3", load_format="auto", quantization_param_path=None
    )
    monkeypatch.setattr("sglang.srt.runtime_context.get_model", lambda: config)
    return config


@pytest.fixture
def fnuz(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "of", classmethod(lambda cls, x: cls("rocm", "gfx942")))
    monkeypatch.setattr(kv_cache, "is_fp8_fnuz", lambda: True)


def new_layer(quant_config: Any = None) -> Any:
    layer: Any = torch.nn.Module()
    layer.layer_id = LAYER
    layer.quant_method = BaseKVCacheMethod(quant_config or SimpleNamespace())
    layer.quant_method.create_weights(layer)
    return layer


def bring(layer: Any, k: float | None, v: float | None) -> None:
    """Copy in what a checkpoint has, as SGLang's loaders do."""
    for parameter, scale in ((layer.k_scale, k), (layer.v_scale, v)):
        if scale is not None:
            parameter.data.copy_(torch.tensor(scale))


def process(layer: Any) -> None:
    layer.quant_method.process_weights_after_loading(layer)


def load(layer: Any, k: float | None, v: float | None) -> None:
    bring(layer, k, v)
    process(layer)


def assert_scales(layer: Any, k: float, v: float) -> None:
    assert (layer.k_scale.item(), layer.k_scale_float) == pytest.approx((k, k), rel=1e-6)
    assert (layer.v_scale.item(), layer.v_scale_float) == pytest.approx((v, v), rel=1e-6)


def model_of(scales: Mapping[str, tuple[float | None, float | None]]) -> torch.nn.Module:
    """A model whose attention layers have these names and raw scales."""
    model = torch.nn.Module()
    for path, (k, v) in scales.items():
        parent = model
        *names, last = path.split(".")
        for name in names:
            if not hasattr(parent, name):
                parent.add_module(name, torch.nn.Module())
            parent = getattr(parent, name)
        layer = new_layer()
        bring(layer, k, v)
        parent.add_module(last, layer)
    return model


CASES = [
    (0.05, 0.06, (0.05, 0.06)),
    (None, None, (1.0, 1.0)),
    (0.05, None, (0.05, 0.05)),
    (None, 0.05, (0.05, 0.05)),
    (0.0, 0.0, (1.0, 1.0)),
    (-0.5, -2.0, (1.0, 1.0)),
    (1.0, 1.0, (1.0, 1.0)),
]


@pytest.mark.parametrize(("k", "v", "served"), CASES)
def test_every_copy_has_what_the_rules_say_however_often_it_is_processed(
    k: float | None, v: float | None, served: tuple[float, float]
) -> None:
    layer = new_layer()
    bring(layer, k, v)
    for _ in range(3):
        process(layer)
        assert_scales(layer, *served)


@pytest.mark.usefixtures("fnuz")
@pytest.mark.parametrize(
    ("k", "v", "served"),
    [
        (0.05, 0.06, (0.1, 0.12)),
        (0.05, None, (0.1, 0.1)),
        (None, 0.05, (0.1, 0.1)),
        (None, None, (1.0, 1.0)),
        (1e38, 1.0, (2e38, 2.0)),
    ],
)
def test_fnuz_doubles_once_however_often_a_layer_is_processed(
    k: float | None, v: float | None, served: tuple[float, float]
) -> None:
    """SGLang by itself doubles each time: 0.05, 0.1, 0.2, 0.4."""
    layer = new_layer()
    bring(layer, k, v)
    for _ in range(3):
        process(layer)
        assert_scales(layer, *served)


@pytest.mark.usefixtures("fnuz")
def test_fnuz_doubles_what_a_reload_brings() -> None:
    layer = new_layer()
    load(layer, 0.05, 0.06)
    load(layer, 0.07, 0.06)
    assert_scales(layer, 0.14, 0.12)
    load(layer, 0.05, 0.08)
    assert_scales(layer, 0.1, 0.16)


@pytest.mark.usefixtures("fnuz")
def test_fnuz_doubles_what_a_reload_brings_even_if_it_is_what_stands_there() -> None:
    """SGLang announces a reload, and the raw scales are put back for it."""
    model = model_of({"attn": (0.05, None)})
    layer: Any = model.attn
    process(layer)
    assert_scales(layer, 0.1, 0.1)
    DefaultModelLoader.restore_weights_before_loading(model, CPU)
    load(layer, 0.1, None)
    assert_scales(layer, 0.2, 0.2)


@pytest.mark.parametrize(("k", "v"), [(0.05, None), (None, None), (0.05, 0.06)])
def test_a_reload_without_scales_keeps_them(k: float | None, v: float | None) -> None:
    model = model_of({"attn": (k, v)})
    layer: Any = model.attn
    process(layer)
    before = (layer.k_scale_float, layer.v_scale_float)
    DefaultModelLoader.restore_weights_before_loading(model, CPU)
    process(layer)
    assert_scales(layer, *before)


def test_a_corrupt_side_beside_one_that_stood_there_before_is_refused() -> None:
    model = model_of({"attn": (None, None)})
    layer: Any = model.attn
    process(layer)
    DefaultModelLoader.restore_weights_before_loading(model, CPU)
    with pytest.raises(KVScaleError, match=r"v_scale=-0\.3"):
        load(layer, 1.0, -0.3)


def test_a_new_side_beside_one_that_was_duplicated_before_is_served() -> None:
    model = model_of({"attn": (0.05, None)})
    layer: Any = model.attn
    process(layer)
    DefaultModelLoader.restore_weights_before_loading(model, CPU)
    load(layer, 0.07, 0.05)
    assert_scales(layer, 0.07, 0.05)


@pytest.mark.usefixtures("fnuz")
def test_an_update_in_place_of_a_single_scale_reaches_both_sides() -> None:
    """Also where SGLang does not announce it."""
    layer = new_layer()
    load(layer, 0.5, None)
    load(layer, 0.75, None)
    assert_scales(layer, 1.5, 1.5)


@pytest.mark.usefixtures("fnuz")
def test_fnuz_refuses_what_overflows_when_doubled() -> None:
    with pytest.raises(KVScaleError, match=r"fit in torch\.float32, got k_scale=6\.0000\d*e\+38"):
        load(new_layer(), 3e38, 1.0)


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
def test_a_layer_that_comes_alone_is_refused(k: float, v: float, side: str) -> None:
    with pytest.raises(KVScaleError) as refused:
        load(new_layer(), k, v)
    assert f"layer {LAYER}" in str(refused.value)
    assert side in str(refused.value)


def test_a_reload_with_a_corrupt_scale_is_refused_and_can_be_rolled_back() -> None:
    layer = new_layer()
    load(layer, 0.05, 0.06)
    with pytest.raises(KVScaleError):
        load(layer, float("nan"), 0.06)
    load(layer, 0.05, 0.06)
    assert_scales(layer, 0.05, 0.06)


def test_all_corrupt_layers_of_a_model_are_in_one_error() -> None:
    scales: dict[str, tuple[float | None, float | None]] = {
        f"model.layers.{i}.self_attn.attn": (0.05, 0.06) for i in range(30)
    }
    corrupt = [f"model.layers.{i}.self_attn.attn" for i in range(3, 26)]
    scales.update((name, (0.05, float("inf"))) for name in corrupt)
    with pytest.raises(KVScaleError) as refused:
        DefaultModelLoader.postprocess_weights(model_of(scales), CPU)
    message = str(refused.value)
    assert "in 23 of 30 layers" in message
    assert [name for name in scales if f"{name}:" in message] == corrupt[:20]
    assert "and 3 more layers" in message


def test_a_sound_model_is_processed_under_its_names() -> None:
    model = model_of({"model.layers.0.self_attn.attn": (0.05, 0.06)})
    DefaultModelLoader.postprocess_weights(model, CPU)
    layer: Any = model.get_submodule("model.layers.0.self_attn.attn")
    assert_scales(layer, 0.05, 0.06)
    with pytest.raises(KVScaleError, match=r"model\.layers\.0\.self_attn\.attn"):
        load(layer, float("nan"), 0.06)


@pytest.mark.parametrize(
    ("kv_cache_dtype", "declared", "is_checked"),
    [
        ("auto", None, False),
        ("auto", "FP8", True),
        ("auto", "auto", False),
        ("bf16", "FP8", False),
        ("bfloat16", None, False),
        ("fp4_mx_block16", None, False),
        ("fp8_e5m2", None, True),
        ("nvfp4", None, True),
    ],
)
def test_only_quantized_caches_are_checked(
    config: SimpleNamespace, kv_cache_dtype: str, declared: str | None, is_checked: bool
) -> None:
    config.kv_cache_dtype = kv_cache_dtype
    layer = new_layer(SimpleNamespace(kv_cache_quant_algo=declared))
    if is_checked:
        with pytest.raises(KVScaleError):
            load(layer, float("inf"), 0.05)
    else:
        load(layer, float("inf"), 0.05)  # as SGLang does by itself
        assert layer.k_scale_float == float("inf")


def model_with_a_file(
    monkeypatch: pytest.MonkeyPatch, config: SimpleNamespace, scale: float
) -> Any:
    """A model whose one layer gets its scale from ``--quantization-param-path``."""
    config.quantization_param_path = "scales.json"
    monkeypatch.setattr(load_model_utils, "get_model", lambda: config)
    model: Any = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.ones(1))
    model.attn = torch.nn.Module()

    def bring_scales(path: str) -> None:
        model.attn.k_scale = model.attn.v_scale = scale

    model.load_kv_cache_scales = bring_scales
    return model


@pytest.mark.parametrize(("scale", "served"), [(0.05, 0.05), (0.0, 1.0)])
def test_scales_of_a_file_are_checked_and_written(
    monkeypatch: pytest.MonkeyPatch, config: SimpleNamespace, scale: float, served: float
) -> None:
    model = model_with_a_file(monkeypatch, config, scale)
    load_model_utils.load_kv_cache_scales(model=model, kv_cache_dtype="fp8_e4m3")
    assert (model.attn.k_scale, model.attn.v_scale) == (served, served)


def test_a_corrupt_scale_of_a_file_is_refused(
    monkeypatch: pytest.MonkeyPatch, config: SimpleNamespace
) -> None:
    model = model_with_a_file(monkeypatch, config, float("nan"))
    with pytest.raises(KVScaleError, match="attn: fp8 KV cache scales must be finite"):
        load_model_utils.load_kv_cache_scales(model=model, kv_cache_dtype="fp8_e4m3")


def test_random_weights_are_no_checkpoint(config: SimpleNamespace) -> None:
    """SGLang's dummy loader fills scales with random numbers of either sign."""
    config.load_format = "dummy"
    layer = new_layer()
    load(layer, 0.0005, -0.0007)
    assert layer.k_scale_float == pytest.approx(0.0005)


def test_what_follows_a_dummy_load_is_checked(config: SimpleNamespace) -> None:
    """Reinforcement learning begins with dummy weights, and loads real ones over them."""
    config.load_format = "dummy"
    layer = new_layer()
    load(layer, 0.0005, 0.0007)
    with pytest.raises(KVScaleError):
        load(layer, float("nan"), 0.05)


def test_a_failure_of_ours_does_not_stop_the_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("a fault of the plugin")

    monkeypatch.setattr("kvcache_plugin.hosts.verdicts.validate_kv_scales", fail)
    layer = new_layer()
    load(layer, 0.05, 0.06)
    assert_scales(layer, 0.05, 0.06)
    (record,) = [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert record.exc_info is not None
    assert f"layer {LAYER}" in logging.Formatter().formatException(record.exc_info)


class Model(torch.nn.Module):
    """One attention layer under its usual name, and a loader of its own, as SGLang's models."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = model_of({NAME: (None, None)})
        self.loaded: list[str] = []

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.named_modules(*args, **kwargs)

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            self.loaded.append(name)
            module, _, side = name.rpartition(".")
            if f"{module}.attn" == NAME:
                getattr(self.inner.get_submodule(NAME), side).data.copy_(tensor.squeeze())


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


@pytest.fixture
def load_files(monkeypatch: pytest.MonkeyPatch, config: SimpleNamespace) -> Any:
    """Loads a folder as SGLang's default loader does."""
    monkeypatch.setattr(loader_module, "get_server_args", lambda: None)
    monkeypatch.setattr(loader_module, "get_model", lambda: config)
    for name in ("disable_mmap", "prefetch_checkpoints", "drop_cache_after_load"):
        setattr(config, f"weight_loader_{name}", False)
    config.weight_loader_prefetch_num_threads = 1

    def load(folder: Path) -> Model:
        model = Model()
        model_config = SimpleNamespace(
            model_path=str(folder), revision=None, hf_config=SimpleNamespace()
        )
        loader = DefaultModelLoader(LoadConfig())
        weights = loader._get_all_weights(model_config, model)
        DefaultModelLoader.load_weights_and_postprocess(model, weights, CPU)
        return model

    return load


def test_a_folder_with_a_corrupt_scale_is_refused_before_it_is_read(
    tmp_path: Path, load_files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*args: Any, **kwargs: Any) -> Any:
        pytest.fail("no weight may be read")

    monkeypatch.setattr(loader_module, "buffered_multi_thread_safetensors_weights_iterator", read)
    write_files(tmp_path, torch.tensor([1.0, 2.0]))
    with pytest.raises(KVScaleError, match=f"{NAME}: Only support per-tensor scaling factor"):
        load_files(tmp_path)


def test_a_sound_folder_is_served_without_a_word(
    tmp_path: Path, load_files: Any, caplog: pytest.LogCaptureFixture
) -> None:
    write_files(tmp_path, torch.tensor([0.05]))
    model = load_files(tmp_path)
    assert len(model.loaded) == 2
    assert_scales(model.inner.get_submodule(NAME), 0.05, 0.06)
    assert [r for r in caplog.records if r.name.startswith("kvcache_plugin")] == []


def test_what_does_not_arrive_is_told(
    tmp_path: Path, load_files: Any, caplog: pytest.LogCaptureFixture
) -> None:
    write_files(tmp_path, torch.tensor([0.05]), "qkv_proj.{}_scale")
    model = load_files(tmp_path)
    assert_scales(model.inner.get_submodule(NAME), 1.0, 1.0)
    (record,) = [r for r in caplog.records if r.name.startswith("kvcache_plugin")]
    assert f"{NAME}: model.layers.3.self_attn.qkv_proj.k_scale" in record.getMessage()


def test_other_loaders_are_left_alone_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(2):
        loader_module.get_model_loader(LoadConfig(load_format="dummy"), None)
    lines = [r.getMessage() for r in caplog.records if "is active" in r.getMessage()]
    assert len(lines) == 1
    assert lines[0].endswith("leaves alone what DummyModelLoader loads [errors#active]")


#: The seams of the checks at load; those of updates and of writes have tests of their own.
WRAPPED = [
    seams.SGLANG_LAYER,
    seams.SGLANG_MODEL,
    seams.SGLANG_RESTORE,
    seams.SGLANG_FILE,
    seams.SGLANG_LOADER,
    seams.SGLANG_LOAD,
    seams.SGLANG_FILES,
]
NEEDED = [seams.SGLANG_HOOKS, seams.SGLANG_CONFIG]


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The targets among ``WRAPPED`` that a registry without any hook gets from us."""
    targets: list[str] = []

    def register(cls: type, target: str, hook: Any, hook_type: Any) -> None:
        if target in {seam.path for seam in WRAPPED}:
            targets.append(target)

    monkeypatch.setattr(HookRegistry, "register", classmethod(register))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    return targets


def test_every_seam_is_wrapped(registered: list[str], caplog: pytest.LogCaptureFixture) -> None:
    sglang._hook(LoadGate("SGLang", "strict"), read_settings({}))
    assert registered == [seam.path for seam in WRAPPED]
    assert caplog.records == []


@pytest.mark.parametrize("seam", [*WRAPPED, *NEEDED], ids=lambda seam: seam.qualname)
def test_a_seam_with_another_signature_is_left_out(
    seam: seams.Seam,
    registered: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The others stay, unless they have nothing to stand on without it."""
    owner: Any = importlib.import_module(seam.module)
    *classes, function = seam.qualname.split(".")
    for name in classes:
        owner = getattr(owner, name)
    monkeypatch.setattr(owner, function, lambda other, names: None)
    sglang._hook(LoadGate("SGLang", "strict"), read_settings({}))
    kept = [] if seam in NEEDED else [other.path for other in WRAPPED if other is not seam]
    assert registered == kept
    (record,) = caplog.records
    assert f"{seam.path} has another signature: (other, names)" in record.getMessage()
    assert seam.purpose in record.getMessage()


def test_a_target_that_is_patched_already_is_left_out(
    registered: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang would ignore our hook on it without a word."""
    monkeypatch.setattr(HookRegistry, "_patched", {seams.SGLANG_LAYER.path})
    sglang._hook(LoadGate("SGLang", "strict"), read_settings({}))
    assert seams.SGLANG_LAYER.path not in registered
    (record,) = caplog.records
    assert seams.SGLANG_LAYER.path in record.getMessage()


def test_every_seam_fits_in_the_source_and_in_the_module() -> None:
    for seam in seams.SEAMS:
        if seam.engine == "sglang" and seam is not seams.SGLANG_CONFIG:  # replaced here
            assert fitting.check_source(seam) == ""
            assert fitting.check_module(seam, importlib.import_module(seam.module)) == ""
