"""The scales in the files beside what the layers hold: before the weights are read, and after."""

from __future__ import annotations

import json
import logging
import os
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kvcache_plugin import KVScaleError
from kvcache_plugin.hosts import gate as gate_module
from kvcache_plugin.hosts.coverage import StoredLayer, assign
from kvcache_plugin.hosts.gate import LoadGate
from kvcache_plugin.hosts.load import Load
from kvcache_plugin.hosts.loaded import LoadedScales
from kvcache_plugin.settings import read_settings
from tests.engine.checkpoints import write_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from tests.engine.checkpoints import Scale

NAN = float("nan")
CPU = torch.device("cpu")
NAME = "model.layers.{}.self_attn.attn"
ENGINE = "SGLang"
ACTIVE = " [errors#active]"
DROPPED = "model.layers.{layer}.self_attn.qkv_proj.{side}_scale"


def layer(i: int, k: Scale = None, v: Scale = None, **more: Any) -> LoadedScales:
    return LoadedScales(NAME.format(i), k, v, "fp8_e4m3", CPU, **more)


def before(
    gate: LoadGate, folder: Path, layers: list[LoadedScales], load: Load | None = None
) -> Load:
    """The step before the weights are read, for a folder with one file."""
    load = load or Load(str(folder))
    gate.before_weights(load, layers, (str(folder), [str(folder / "model.safetensors")], True))
    return load


def load_model(
    folder: Path, *held: LoadedScales, gate: LoadGate | None = None, bare: bool = False
) -> None:
    """Both steps, on layers that hold what is given."""
    gate = gate or LoadGate(ENGINE, "strict")
    load = before(gate, folder, list(held))
    with_place = [] if bare else [(torch.nn.Module(), found) for found in held]
    with gate.model(with_place, bare=held if bare else (), load=load):
        pass


def messages(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == level]


@pytest.fixture(autouse=True)
def at_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


class TestBeforeTheWeights:
    def test_corrupt_scales_are_refused_with_the_engines_names(self, tmp_path: Path) -> None:
        write_checkpoint(tmp_path, {0: (0.05, 0.06), 1: (torch.tensor([1.0, 2.0]), 0.06)})
        with pytest.raises(KVScaleError) as refused:
            before(LoadGate(ENGINE, "strict"), tmp_path, [layer(0), layer(1)])
        message = str(refused.value)
        assert "no weight has been read yet" in message
        assert "corrupt K/V scales in 1 of 2 layers" in message
        assert f"{NAME.format(1)}: Only support per-tensor scaling factor" in message
        assert NAME.format(0) not in message
        assert "KVCACHE_PLUGIN_MODE=warn" in message

    @pytest.mark.parametrize(
        "scales",
        [
            (0.05, 0.06),
            (0.05, None),
            (None, 0.06),
            (0.0, 0.0),
            (-1.0, 0.06),
            (None, None),
            (1.0, 1.0),
            (torch.tensor(3, dtype=torch.int32), 0.06),
        ],
    )
    def test_what_the_check_after_loading_accepts_is_not_refused(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, scales: tuple[Scale, Scale]
    ) -> None:
        write_checkpoint(tmp_path, {0: scales, 1: (0.05, 0.06)})
        before(LoadGate(ENGINE, "strict"), tmp_path, [layer(0), layer(1)])
        assert caplog.records == []  # what is worth a warning is said after loading

    def test_scales_of_layers_that_the_model_does_not_hold_are_not_refused(
        self, tmp_path: Path
    ) -> None:
        """Another rank holds them, or nobody does."""
        write_checkpoint(tmp_path, {0: (0.05, 0.06), 1: (NAN, 0.06)})
        before(LoadGate(ENGINE, "strict"), tmp_path, [layer(0)])

    def test_scales_that_the_engine_drops_are_not_refused(self, tmp_path: Path) -> None:
        write_checkpoint(tmp_path, {0: (NAN, 0.06), 1: (NAN, 0.06)}, scale_name=DROPPED)
        before(LoadGate(ENGINE, "strict"), tmp_path, [layer(0), layer(1)])
        with pytest.raises(KVScaleError):
            before(LoadGate("vLLM", "strict"), tmp_path, [layer(0), layer(1)])

    def test_scales_are_what_the_engine_makes_of_them(self, tmp_path: Path) -> None:
        """A number that its dtype cannot hold becomes 0 or infinite when it is loaded."""
        write_checkpoint(tmp_path, {0: (1e-42, 1e-42), 1: (0.05, 0.06)})
        half = [layer(i, dtype=torch.float16) for i in (0, 1)]
        before(LoadGate(ENGINE, "strict"), tmp_path, half)
        with pytest.raises(KVScaleError, match="reciprocal"):
            before(LoadGate(ENGINE, "strict"), tmp_path, [layer(0), layer(1)])

    @pytest.mark.parametrize("ranks", [1, 2])
    def test_scales_by_head_of_all_ranks(self, tmp_path: Path, ranks: int) -> None:
        heads = torch.tensor([0.02, 0.03]).reshape(2, 1, 1)
        write_checkpoint(tmp_path, {0: (heads, heads)}, strategy="attn_head")
        by_head: dict[str, Any] = {"granularity": "head", "num_kv_heads": 2 // ranks}
        before(LoadGate("vLLM", "strict"), tmp_path, [layer(0, **by_head)])
        write_checkpoint(tmp_path, {0: (heads, heads * NAN)}, strategy="attn_head")
        with pytest.raises(KVScaleError, match="v_scale of heads 0, 1"):
            before(LoadGate("vLLM", "strict"), tmp_path, [layer(0, **by_head)])

    def test_warn_says_it_once_for_both_checks(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        write_checkpoint(tmp_path, {0: (NAN, 0.06)})
        load_model(tmp_path, layer(0, torch.tensor(NAN), 0.06), gate=LoadGate(ENGINE, "warn"))
        (message,) = messages(caplog, logging.ERROR)
        assert "KVCACHE_PLUGIN_MODE=warn" in message
        assert "k_scale=nan" in message

    def test_files_that_cannot_be_read_are_told_in_one_line(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "model.safetensors").write_bytes(b"nothing")
        load_model(tmp_path, layer(0, 0.05, 0.06))
        (warning,) = messages(caplog, logging.WARNING)
        assert "is no sound safetensors file" in warning
        (line,) = messages(caplog, logging.INFO)
        assert line.endswith(f"not compared with them: the files could not be read{ACTIVE}")

    def test_twenty_layers_are_listed_in_the_models_order(self, tmp_path: Path) -> None:
        scales: dict[int, tuple[Scale, Scale]] = dict.fromkeys(range(24), (NAN, 0.06))
        write_checkpoint(tmp_path, scales, num_hidden_layers=24, hidden_size=32)
        with pytest.raises(KVScaleError, match="and 4 more layers") as refused:
            before(LoadGate(ENGINE, "strict"), tmp_path, [layer(i) for i in range(24)])
        named = re.findall(r"layers\.(\d+)\.self_attn\.attn:", str(refused.value))
        assert named == [str(i) for i in range(20)]

    def test_a_fault_of_ours_stops_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fail(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError("a fault of the plugin")

        monkeypatch.setattr(gate_module, "read_stored", fail)
        load_model(tmp_path, layer(0, 0.05, 0.06))
        (message,) = messages(caplog, logging.ERROR)
        assert "goes on as it would without the plugin" in message

    def test_a_loader_that_prepares_something_else_stops_nothing(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        LoadGate(ENGINE, "strict").before_weights(Load("model"), [layer(0)], ("folder",))
        (message,) = messages(caplog, logging.ERROR)
        assert "goes on as it would without the plugin" in message

    def test_other_files_than_safetensors_are_not_read(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        gate, load = LoadGate(ENGINE, "strict"), Load("model")
        held = layer(0, 0.05, 0.06)
        gate.before_weights(load, [held], (str(tmp_path), ["model.bin"], False))
        with gate.model([(torch.nn.Module(), held)], load=load):
            pass
        (line,) = messages(caplog, logging.INFO)
        assert line.endswith(
            f"not compared with them: the weights are no safetensors files{ACTIVE}"
        )

    def test_without_a_quantized_cache_nothing_is_read(self, tmp_path: Path) -> None:
        before(LoadGate(ENGINE, "strict"), tmp_path / "nowhere", [])


class TestCoverage:
    def test_a_sound_checkpoint_says_so_in_its_one_line(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        write_checkpoint(tmp_path, {0: (0.05, 0.06), 1: (0.04, 0.07)})
        load_model(tmp_path, layer(0, 0.05, 0.06), layer(1, 0.04, 0.07))
        (record,) = caplog.records
        assert record.getMessage().endswith(
            "checked the K/V scales of 2 layers (fp8_e4m3 on cpu, cpu_fast): 2 from the "
            "checkpoint, 0 duplicated, 0 default; K 0.04 to 0.05, V 0.06 to 0.07; every scale in "
            f"the files arrived{ACTIVE}"
        )

    def test_scales_that_did_not_arrive_are_listed_with_the_reason(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        write_checkpoint(tmp_path, {0: (0.05, 0.06), 1: (0.04, 0.07)}, scale_name=DROPPED)
        load_model(tmp_path, layer(0), layer(1))
        (warning,) = messages(caplog, logging.WARNING)
        assert "did not arrive on 2 layers" in warning
        assert (
            f"{NAME.format(1)}: model.layers.1.self_attn.qkv_proj.k_scale, "
            "model.layers.1.self_attn.qkv_proj.v_scale (SGLang 0.5.23: its rename puts"
        ) in warning
        (line,) = messages(caplog, logging.INFO)
        assert "0 from the checkpoint, 0 duplicated, 2 default" in line
        assert line.endswith(f"scales in the files did not arrive on 2 layers{ACTIVE}")

    def test_one_side_that_did_not_arrive(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        write_checkpoint(tmp_path, {0: (0.05, 0.06)})
        load_model(tmp_path, layer(0, 0.05, None))
        (warning,) = messages(caplog, logging.WARNING)
        assert "self_attn.v_scale" in warning
        assert "self_attn.k_scale," not in warning

    def test_twenty_layers_are_listed(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        scales: dict[int, tuple[Scale, Scale]] = dict.fromkeys(range(24), (0.05, 0.06))
        write_checkpoint(tmp_path, scales, num_hidden_layers=24, hidden_size=32)
        load_model(tmp_path, *(layer(i) for i in range(24)))
        (warning,) = messages(caplog, logging.WARNING)
        named = re.findall(r"layers\.(\d+)\.self_attn\.attn:", warning)
        assert named == [str(i) for i in range(20)]  # the model's order, which is not the files'
        assert "and 4 more layers" in warning

    @pytest.mark.parametrize("mode", ["strict", "warn"])
    def test_error_stops_the_load(self, tmp_path: Path, mode: str) -> None:
        write_checkpoint(tmp_path, {0: (0.05, 0.06)}, scale_name=DROPPED)
        with pytest.raises(KVScaleError, match="did not arrive") as refused:
            load_model(tmp_path, layer(0), gate=LoadGate(ENGINE, mode, "error"))
        assert "KVCACHE_PLUGIN_COVERAGE=warn" in str(refused.value)

    def test_layers_without_scales_among_others_are_not_named(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        write_checkpoint(tmp_path, {0: (0.05, 0.06)})
        load_model(tmp_path, layer(0, 0.05, 0.06), layer(1))
        (line,) = [record.getMessage() for record in caplog.records]
        assert "1 from the checkpoint, 0 duplicated, 1 default" in line

    def test_what_another_rank_holds_is_not_named(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        write_checkpoint(tmp_path, {0: (0.05, 0.06), 1: (0.05, 0.06)})
        load_model(tmp_path, layer(1, 0.05, 0.06))
        assert messages(caplog, logging.WARNING) == []

    def test_a_marker_in_the_files_is_no_scale(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        write_checkpoint(tmp_path, {0: (0.05, -1.0)})
        load_model(tmp_path, layer(0, 0.05, None))
        assert messages(caplog, logging.WARNING) == []

    def test_no_scale_at_all(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        write_checkpoint(tmp_path)
        load_model(tmp_path, layer(0), layer(1))
        (line,) = [record.getMessage() for record in caplog.records]
        assert line.endswith(f"the files hold no K/V scale, and every layer runs with 1.0{ACTIVE}")

    def test_layers_without_a_place_for_scales(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        write_checkpoint(tmp_path, {0: (0.05, 0.06)}, quantized=False)
        load_model(tmp_path, layer(0, has_place=False), bare=True)
        (line,) = messages(caplog, logging.INFO)
        assert "found no layer with K/V scales for a quantized KV cache" in line
        (warning,) = messages(caplog, logging.WARNING)
        assert "without a quantization_config it has no place for it" in warning

    def test_a_process_that_does_not_speak_says_nothing(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        write_checkpoint(tmp_path, {0: (0.05, 0.06)}, scale_name=DROPPED)
        gate = LoadGate(ENGINE, "strict")
        gate.log.speaks = lambda: False
        load_model(tmp_path, layer(0), gate=gate)
        assert caplog.records == []

    def test_the_engine_loads_other_files(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Mistral's own format beside the usual one, say."""
        write_checkpoint(tmp_path, {0: (NAN, 0.06)})
        gate, load, held = LoadGate(ENGINE, "strict"), Load(str(tmp_path)), layer(0, 0.05, 0.06)
        gate.before_weights(load, [held], (str(tmp_path), ["consolidated.safetensors"], True))
        with gate.model([(torch.nn.Module(), held)], load=load):
            pass
        (line,) = messages(caplog, logging.INFO)
        assert line.endswith(
            f"not compared with them: consolidated.safetensors was not read{ACTIVE}"
        )


@pytest.mark.parametrize(
    ("modules", "names", "expected"),
    [
        (["model.layers.0.self_attn"], ["model.layers.0.self_attn.attn"], [0]),
        (
            ["model.language_model.layers.1.self_attn"],
            ["language_model.model.layers.1.self_attn.attn"],
            [0],
        ),
        (["layers.1.attention"], ["model.layers.1.self_attn.attn"], [0]),
        (
            ["vision.layers.0.self_attn", "model.layers.0.self_attn"],
            ["model.layers.0.self_attn.attn"],
            [1],
        ),
        (["a.layers.0.self_attn", "b.layers.0.self_attn"], ["c.layers.0.self_attn.attn"], []),
        (
            ["model.layers.0.self_attn"],
            ["model.layers.0.self_attn.attn_mha", "model.layers.0.self_attn.attn_mqa"],
            [0],
        ),
        (["model.layers.1.self_attn"], ["model.layers.11.self_attn.attn"], []),
        (["attn"], ["model.layers.1.self_attn.attn"], []),
    ],
)
def test_modules_are_found_under_other_names(
    modules: list[str], names: list[str], expected: list[int]
) -> None:
    stored = [StoredLayer(module, False, (), ()) for module in modules]
    held = [LoadedScales(name, None, None, "fp8_e4m3", CPU) for name in names]
    assert list(assign(stored, held, is_draft=False)) == [stored[i] for i in expected]


def test_draft_layers_are_those_of_draft_models() -> None:
    stored = [
        StoredLayer(name, is_draft, (), ())
        for name, is_draft in (("model.layers.0.self_attn", False), ("mtp.layers.0.attn", True))
    ]
    held = [LoadedScales("x.layers.0.self_attn.attn", None, None, "fp8_e4m3", CPU)]
    assert list(assign(stored, held, is_draft=False)) == [stored[0]]
    assert list(assign(stored, held, is_draft=True)) == [stored[1]]


class TestReport:
    @staticmethod
    def read(folder: Path) -> dict[str, Any]:
        (file,) = folder.glob("report*")
        assert file.name == f"report.{os.getpid()}.json"
        found = json.loads(file.read_text(encoding="utf-8"))
        assert isinstance(found, dict)
        return found

    def test_each_load_is_in_it(self, tmp_path: Path) -> None:
        checkpoint = write_checkpoint(tmp_path / "model", {0: (0.05, 0.06), 1: (0.04, None)})
        gate = LoadGate(ENGINE, "strict", "warn", str(tmp_path / "report.json"))
        for _ in range(2):
            load_model(checkpoint, layer(0, 0.05, 0.06), layer(1, 0.04), gate=gate)
        report = self.read(tmp_path)
        assert report["engine"] == ENGINE
        assert report["pid"] == os.getpid()
        assert (report["mode"], report["coverage"]) == ("strict", "warn")
        first, second = report["loads"]
        assert first == second
        assert first["model"] == str(checkpoint)
        assert (first["kv_cache_dtype"], first["device"]) == ("fp8_e4m3", "cpu")
        assert first["validated_by"] == first["quantized_by"] == "cpu_fast"
        counts = ("checked", "from_checkpoint", "duplicated", "default")
        assert [first[count] for count in counts] == [2, 1, 1, 0]
        assert first["k_scale"] == [0.04, 0.05]
        assert first["v_scale"] == [0.04, 0.06]
        assert (first["lost"], first["problems"], first["refused"]) == ([], [], "")

    def test_a_refusal_before_the_weights_is_in_it(self, tmp_path: Path) -> None:
        checkpoint = write_checkpoint(tmp_path / "model", {0: (NAN, 0.06)})
        gate = LoadGate(ENGINE, "strict", "warn", str(tmp_path / "report.json"))
        with pytest.raises(KVScaleError) as refused:
            load_model(checkpoint, layer(0, 0.05, 0.06), gate=gate)
        (load,) = self.read(tmp_path)["loads"]
        assert load["refused"] == str(refused.value)
        (problem,) = load["problems"]
        assert problem.startswith(f"{NAME.format(0)}: fp8 KV cache scales must be finite")

    @pytest.mark.parametrize("coverage", ["warn", "error"])
    def test_what_did_not_arrive_is_in_it(self, tmp_path: Path, coverage: str) -> None:
        checkpoint = write_checkpoint(tmp_path / "model", {0: (0.05, 0.06)}, scale_name=DROPPED)
        gate = LoadGate(ENGINE, "strict", coverage, str(tmp_path / "report.json"))
        if coverage == "error":
            with pytest.raises(KVScaleError):
                load_model(checkpoint, layer(0), gate=gate)
        else:
            load_model(checkpoint, layer(0), gate=gate)
        (load,) = self.read(tmp_path)["loads"]
        (lost,) = load["lost"]
        assert lost["layer"] == NAME.format(0)
        assert lost["names"] == [DROPPED.format(layer=0, side=side) for side in "kv"]
        assert "SGLang 0.5.23" in lost["reason"]
        assert bool(load["refused"]) == (coverage == "error")

    def test_a_file_that_cannot_be_written_is_one_warning(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        write_checkpoint(tmp_path, {0: (0.05, 0.06)})
        gate = LoadGate(ENGINE, "strict", "warn", str(tmp_path / "nowhere" / "report.json"))
        gate.log.speaks = lambda: False  # each process has a file of its own
        for _ in range(2):
            load_model(tmp_path, layer(0, 0.05, 0.06), gate=gate)
        (warning,) = messages(caplog, logging.WARNING)
        assert "KVCACHE_PLUGIN_REPORT=" in warning
        assert "cannot be written" in warning

    def test_a_write_that_fails_leaves_what_was_there(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        checkpoint = write_checkpoint(tmp_path / "model", {0: (0.05, 0.06)})
        gate = LoadGate(ENGINE, "strict", "warn", str(tmp_path / "report.json"))
        load_model(checkpoint, layer(0, 0.05, 0.06), gate=gate)
        before_it = self.read(tmp_path)

        def fail(self: Path, target: Path) -> None:
            raise OSError("no space left")

        monkeypatch.setattr("pathlib.Path.replace", fail)
        load_model(checkpoint, layer(0, 0.05, 0.06), gate=gate)
        assert self.read(tmp_path) == before_it
        assert list(tmp_path.glob(".report*")) == []


@pytest.mark.parametrize(
    ("value", "holds", "problems"), [("error", "error", 0), ("WARN ", "warn", 0), ("no", "warn", 1)]
)
def test_the_switch(value: str, holds: str, problems: int) -> None:
    settings = read_settings({"KVCACHE_PLUGIN_COVERAGE": value, "KVCACHE_PLUGIN_REPORT": "a.json"})
    assert (settings.coverage, settings.report) == (holds, "a.json")
    assert len(settings.problems) == problems
