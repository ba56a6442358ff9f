"""Run by pytest inside SGLang's environment: scales through updates, copies and a memory saver.

The updaters, loaders and KV-cache methods are SGLang's, around layers that have nothing but scales.
"""

from __future__ import annotations

import copy
import importlib
import json
import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file
from sglang.srt.layers.quantization import kv_cache
from sglang.srt.layers.quantization.kv_cache import BaseKVCacheMethod
from sglang.srt.managers.io_struct import EndWeightUpdateReqInput
from sglang.srt.managers.scheduler_components import weight_updater as of_scheduler
from sglang.srt.model_executor.model_runner_components import weight_updater as of_runner
from sglang.srt.model_loader import loader as loader_module
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.plugins.hook_registry import HookRegistry

from kvcache_plugin import Device
from kvcache_plugin.hosts import seams, sglang
from kvcache_plugin.hosts.gate import LoadGate
from kvcache_plugin.settings import read_settings

if TYPE_CHECKING:
    from pathlib import Path

sglang.register()
HookRegistry.apply_hooks()

CPU = torch.device("cpu")
LAYERS = (0, 1)
Pair = tuple[float | None, float | None]
SOUND: dict[int, Pair] = {0: (0.05, 0.06), 1: (0.04, 0.07)}
NEW: dict[int, Pair] = {0: (0.5, 0.6), 1: (0.4, 0.7)}
CORRUPT: dict[int, Pair] = {0: (0.5, 0.6), 1: (float("nan"), 0.7)}


def name_of(layer: int) -> str:
    return f"model.layers.{layer}.self_attn.attn"


@pytest.fixture(autouse=True)
def config(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What SGLang publishes of its arguments."""
    config = SimpleNamespace(
        kv_cache_dtype="fp8_e4m3",
        load_format="auto",
        quantization_param_path=None,
        weight_cache_mode="off",
        weight_loader_prefetch_num_threads=1,
        **dict.fromkeys(
            (
                "weight_loader_disable_mmap",
                "weight_loader_prefetch_checkpoints",
                "weight_loader_drop_cache_after_load",
            ),
            False,
        ),
    )
    monkeypatch.setattr("sglang.srt.runtime_context.get_model", lambda: config)
    monkeypatch.setattr(loader_module, "get_model", lambda: config)
    monkeypatch.setattr(of_runner, "get_model", lambda: config)
    monkeypatch.setattr(loader_module, "get_server_args", lambda: None)
    monkeypatch.setattr(of_runner, "get_pp_stage_load_group", lambda: None)
    return config


@pytest.fixture
def fnuz(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "of", classmethod(lambda cls, x: cls("rocm", "gfx942")))
    monkeypatch.setattr(kv_cache, "is_fp8_fnuz", lambda: True)


class Model(torch.nn.Module):
    """Attention layers under their usual names, and a loader of its own, as SGLang's models."""

    def __init__(self) -> None:
        super().__init__()
        for layer in LAYERS:
            attention: Any = torch.nn.Module()
            attention.layer_id = layer
            attention.quant_method = BaseKVCacheMethod(SimpleNamespace())
            attention.quant_method.create_weights(attention)
            attention.register_buffer("table", torch.arange(3.0))
            parent: torch.nn.Module = self
            *names, last = name_of(layer).split(".")
            for name in names:
                if not hasattr(parent, name):
                    parent.add_module(name, torch.nn.Module())
                parent = getattr(parent, name)
            parent.add_module(last, attention)

    def load_weights(self, weights: Any) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            module, _, side = name.rpartition(".")
            parameters[f"{module}.attn.{side}"].data.copy_(tensor.reshape(()))

    def attention(self, layer: int) -> Any:
        return self.get_submodule(name_of(layer))


def tensors_of(scales: dict[int, Pair]) -> dict[str, torch.Tensor]:
    return {
        f"model.layers.{layer}.self_attn.{side}_scale": torch.tensor([scale])
        for layer, pair in scales.items()
        for side, scale in zip("kv", pair, strict=True)
        if scale is not None
    }


def loaded(scales: dict[int, Pair]) -> Model:
    model = Model()
    DefaultModelLoader.load_weights_and_postprocess(model, tensors_of(scales).items(), CPU)
    return model


def assert_served(model: Model, scales: dict[int, Pair], factor: float = 1.0) -> None:
    """Every copy that the engine keeps has the scale of the checkpoint, times a factor."""
    for layer, pair in scales.items():
        attention = model.attention(layer)
        for side, scale in zip("kv", pair, strict=True):
            assert scale is not None
            number = getattr(attention, f"{side}_scale_float")
            assert number == pytest.approx(scale * factor, rel=1e-6)
            assert getattr(attention, f"{side}_scale").item() == pytest.approx(number, rel=1e-6)


def new_updater(model: Model, path: str = "") -> Any:
    config = SimpleNamespace(
        model_path=path,
        revision=None,
        hf_config=SimpleNamespace(),
        dtype=torch.bfloat16,
        quantization=None,
    )
    return of_runner.WeightUpdater(
        tp_rank=0,
        device="cpu",
        gpu_id=0,
        model_config=config,
        custom_weight_loaders={},
        get_model=lambda: model,
        update_model_fields=lambda *args, **kwargs: None,
        recapture_cuda_graph=lambda: None,
        get_model_runner=lambda: None,
    )


@pytest.fixture
def manager_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's part of a scheduler that answers updates, of one process."""
    monkeypatch.setattr(torch.distributed, "barrier", lambda *args, **kwargs: None)
    group = SimpleNamespace(tp_group=SimpleNamespace(cpu_group=None))
    monkeypatch.setattr(of_scheduler, "get_parallel", lambda: group)

    def make(updater: Any) -> Any:
        runner = SimpleNamespace(weight_updater=updater)
        worker = SimpleNamespace(weight_update_runners=lambda: [("target", runner)])
        return of_scheduler.SchedulerWeightUpdaterManager(
            tp_worker=worker,
            draft_worker=None,
            memory_saver_adapter=None,
            flush_cache=lambda **kwargs: True,
            is_fully_idle=lambda **kwargs: True,
        )

    return make


# Copies


@pytest.mark.usefixtures("fnuz")
def test_a_copy_of_a_processed_layer_is_not_doubled_again() -> None:
    model = copy.deepcopy(loaded(SOUND))
    DefaultModelLoader.postprocess_weights(model, CPU)
    assert_served(model, SOUND, 2.0)
    DefaultModelLoader.restore_weights_before_loading(model, CPU)
    again = copy.deepcopy(model)
    DefaultModelLoader.postprocess_weights(again, CPU)
    assert_served(again, SOUND, 2.0)
    again.load_weights(tensors_of(NEW).items())
    DefaultModelLoader.postprocess_weights(again, CPU)
    assert_served(again, NEW, 2.0)


# The memory saver


def lose_memory(model: Model, content: float) -> None:
    """What SGLang does when weights are released and resumed, around memory that is not kept."""
    kept = of_scheduler._export_static_state(model)
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(content)
    of_scheduler._import_static_state(model, kept)


@pytest.mark.usefixtures("fnuz")
@pytest.mark.parametrize("content", [0.0, float("nan"), -7.0])
@pytest.mark.parametrize("is_announced", [True, False])
def test_scales_survive_memory_that_is_released(content: float, is_announced: bool) -> None:
    model = loaded(SOUND)
    lose_memory(model, content)
    assert_served(model, SOUND, 2.0)
    if is_announced:
        DefaultModelLoader.restore_weights_before_loading(model, CPU)
    DefaultModelLoader.postprocess_weights(model, CPU)  # an update that brings no scales
    assert_served(model, SOUND, 2.0)


@pytest.mark.usefixtures("fnuz")
def test_scales_survive_memory_that_is_released_within_an_update() -> None:
    model = loaded(SOUND)
    DefaultModelLoader.restore_weights_before_loading(model, CPU)
    lose_memory(model, 0.0)
    DefaultModelLoader.postprocess_weights(model, CPU)
    assert_served(model, SOUND, 2.0)


def test_scales_that_are_new_after_that_are_taken() -> None:
    model = loaded(SOUND)
    lose_memory(model, 0.0)
    DefaultModelLoader.restore_weights_before_loading(model, CPU)
    DefaultModelLoader.load_weights_and_postprocess(model, tensors_of(NEW).items(), CPU)
    assert_served(model, NEW)


def test_zeros_that_a_checkpoint_brings_after_that_are_none_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = loaded(SOUND)
    lose_memory(model, 0.0)
    DefaultModelLoader.restore_weights_before_loading(model, CPU)
    zeros: dict[int, Pair] = dict.fromkeys(LAYERS, (0.0, 0.0))
    DefaultModelLoader.load_weights_and_postprocess(model, tensors_of(zeros).items(), CPU)
    assert_served(model, dict.fromkeys(LAYERS, (1.0, 1.0)))
    assert sum("k_scale=0.0" in record.getMessage() for record in caplog.records) == len(LAYERS)


# Updates between begin and end


@pytest.mark.usefixtures("fnuz")
@pytest.mark.parametrize("brought", [NEW, {}, {1: (0.4, 0.7)}])
def test_an_update_is_processed_once(manager_of: Any, brought: dict[int, Pair]) -> None:
    model = loaded(SOUND)
    updater = new_updater(model)
    updater.begin_weight_update()
    manager = manager_of(updater)
    manager._session = of_scheduler._WeightUpdateSession(selector="all", loaded_weights=True)
    assert updater.load_weights_from_distributed(list(tensors_of(brought).items()))[0]
    answer = manager.end_weight_update(EndWeightUpdateReqInput())
    assert answer.success
    assert_served(model, {**SOUND, **brought}, 2.0)


def test_a_corrupt_update_is_answered_and_the_scales_before_it_stay(
    manager_of: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = loaded(SOUND)
    updater = new_updater(model)
    updater.begin_weight_update()
    manager = manager_of(updater)
    manager._session = of_scheduler._WeightUpdateSession(selector="all", loaded_weights=True)
    updater.load_weights_from_distributed(list(tensors_of(CORRUPT).items()))
    answer = manager.end_weight_update(EndWeightUpdateReqInput())
    assert not answer.success
    assert f"{name_of(1)}: fp8 KV cache scales must be finite, got k_scale=nan" in answer.message
    assert "the scales from before it stay" in answer.message
    assert_served(model, SOUND)
    assert any(answer.message == record.getMessage() for record in caplog.records)
    # The next one is none the worse.
    updater.begin_weight_update()
    manager._session = of_scheduler._WeightUpdateSession(selector="all", loaded_weights=True)
    updater.load_weights_from_distributed(list(tensors_of(NEW).items()))
    assert manager.end_weight_update(EndWeightUpdateReqInput()).success
    assert_served(model, NEW)


# Updates from disk


def write_files(folder: Path, scales: dict[int, Pair]) -> str:
    folder.mkdir()
    scheme = {"type": "float", "num_bits": 8, "strategy": "tensor", "symmetric": True}
    quantization = {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    save_file(tensors_of(scales), folder / "model.safetensors")
    return str(folder)


@pytest.fixture
def old(tmp_path: Path) -> tuple[Model, Any, str]:
    """A model that is served from a folder, its updater, and the folder."""
    folder = write_files(tmp_path / "old", SOUND)
    model = loaded(SOUND)
    return model, new_updater(model, folder), folder


def test_a_sound_update_from_disk_is_taken(tmp_path: Path, old: tuple[Model, Any, str]) -> None:
    model, updater, _ = old
    new = write_files(tmp_path / "new", NEW)
    assert updater.update_weights_from_disk(new, "auto")[0]
    assert_served(model, NEW)
    assert updater.model_config.model_path == new


def test_a_corrupt_update_from_disk_is_answered_before_it_is_read(
    tmp_path: Path, old: tuple[Model, Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, updater, folder = old
    monkeypatch.setattr(Model, "load_weights", lambda *args: pytest.fail("no weight may be read"))
    corrupt = write_files(tmp_path / "corrupt", CORRUPT)
    success, message = updater.update_weights_from_disk(corrupt, "auto")
    assert not success
    assert "no weight has been read yet" in message
    assert f"{name_of(1)}: fp8 KV cache scales must be finite, got k_scale=nan" in message
    assert_served(model, SOUND)
    assert updater.model_config.model_path == folder


def test_what_is_refused_after_it_was_read_is_rolled_back(
    tmp_path: Path, old: tuple[Model, Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang alone would read the corrupt files again to go back, and die of them."""
    model, updater, folder = old
    monkeypatch.setattr(LoadGate, "before_weights", lambda *args: None)
    corrupt = write_files(tmp_path / "corrupt", CORRUPT)
    success, message = updater.update_weights_from_disk(corrupt, "auto")
    assert not success
    assert "got k_scale=nan" in message
    assert "Rolling back to original weights" in message
    assert_served(model, SOUND)
    assert updater.model_config.model_path == folder


# Updates over IPC


@pytest.mark.parametrize(("scales", "is_refused"), [(NEW, False), (CORRUPT, True)])
def test_a_refusal_that_sglang_only_logs_is_the_answer(
    scales: dict[int, Pair], is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded(SOUND)

    class Worker:
        """As checkpoint-engine's: it loads, processes, and swallows what that raises."""

        def __init__(self, runner: Any) -> None: ...

        def update_weights_from_ipc(self, handles: Any) -> None:
            model.load_weights(tensors_of(scales).items())
            try:
                for module in model.modules():
                    if hasattr(module, "quant_method"):
                        module.quant_method.process_weights_after_loading(module)
            except Exception as error:
                logging.getLogger("sglang").warning("Post-hook processing failed: %s", error)

    name = "sglang.srt.checkpoint_engine.checkpoint_engine_worker"
    module: Any = ModuleType(name)
    module.SGLangCheckpointEngineWorkerExtensionImpl = Worker
    monkeypatch.setitem(sys.modules, name, module)
    answer = new_updater(model).update_weights_from_ipc(SimpleNamespace(zmq_handles={}))
    assert answer[0] is not is_refused
    if is_refused:
        assert "k_scale=nan" in answer[1]
    for layer in LAYERS:
        attention = model.attention(layer)
        assert attention.k_scale.item() == pytest.approx(attention.k_scale_float)
        assert attention.k_scale_float > 0


# Seams

UPDATES = [
    seams.SGLANG_DISK_UPDATE,
    seams.SGLANG_IPC_UPDATE,
    seams.SGLANG_END_UPDATE,
    seams.SGLANG_END_ANSWER,
    seams.SGLANG_RESUME,
]


@pytest.mark.parametrize("seam", UPDATES, ids=lambda seam: seam.qualname)
def test_a_seam_that_does_not_fit_is_left_out(
    seam: seams.Seam, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    targets: list[str] = []

    def register(cls: type, target: str, hook: Any, hook_type: Any) -> None:
        targets.append(target)

    monkeypatch.setattr(HookRegistry, "register", classmethod(register))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    owner: Any = importlib.import_module(seam.module)
    *classes, function = seam.qualname.split(".")
    for name in classes:
        owner = getattr(owner, name)
    monkeypatch.setattr(owner, function, lambda other, names: None)
    sglang._hook(LoadGate("SGLang", "strict"), read_settings({}))
    # A refusal that nobody would hear of is not caught.
    without = {seam, seams.SGLANG_END_UPDATE} if seam is seams.SGLANG_END_ANSWER else {seam}
    for other in UPDATES:
        assert (other.path in targets) is (other not in without)
    (record,) = caplog.records
    assert seam.path in record.getMessage()
