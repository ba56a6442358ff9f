"""What the engines' adapters share, on layers that no engine made."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kvcache_plugin import KVScaleError
from kvcache_plugin.errors import add_note
from kvcache_plugin.hosts import gate as gate_module
from kvcache_plugin.hosts import verdicts
from kvcache_plugin.hosts.gate import LoadGate
from kvcache_plugin.hosts.loaded import LoadedScales, present, unless_marked

if TYPE_CHECKING:
    from kvcache_plugin.settings import Settings

NAN = float("nan")
CPU = torch.device("cpu")


def found(i: int, k: float | None = 0.05, v: float | None = 0.06) -> LoadedScales:
    return LoadedScales(f"model.layers.{i}.attn", k, v, "fp8_e4m3", CPU)


def layers(count: int, *corrupt: int) -> list[tuple[torch.nn.Module, LoadedScales]]:
    return [(torch.nn.Module(), found(i, NAN if i in corrupt else 0.05)) for i in range(count)]


def test_sound_layers_get_their_scales_inside_the_pass() -> None:
    gate, loaded = LoadGate("Engine", "strict"), layers(3)
    with gate.model(loaded):
        for module, scales in loaded:
            served = gate.layer(module, scales)
            assert served is not None
            assert (served.k, served.v) == (0.05, 0.06)


def test_every_corrupt_layer_is_in_the_error_and_nothing_is_processed() -> None:
    with (
        pytest.raises(KVScaleError) as refused,
        LoadGate("Engine", "strict").model(layers(5, 1, 3)),
    ):
        pytest.fail("the engine must not get to process a layer")
    message = str(refused.value)
    assert "corrupt K/V scales in 2 of 5 layers" in message
    assert message.count("must be finite, got k_scale=nan v_scale=0.06") == 2
    assert "model.layers.1.attn:" in message
    assert "model.layers.3.attn:" in message
    assert "model.layers.2.attn" not in message
    assert "Calibrate" in message
    assert "KVCACHE_PLUGIN_MODE=warn" in message


def test_a_refusal_and_each_of_its_layers_have_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, layer: str, **kwargs: Any) -> None:
        error = KVScaleError("no scale", layer=layer, remedy="Export", name="scale-not-finite")
        add_note(error, "says a vendor")
        raise error

    monkeypatch.setattr(verdicts, "validate_kv_scales", refuse)
    with (
        pytest.raises(KVScaleError) as refused,
        LoadGate("Engine", "strict").model(layers(2)),
    ):
        pytest.fail("not reached")
    assert refused.value.name == "checkpoint-refused"
    assert str(refused.value) == (
        "kvcache_plugin refuses this checkpoint: corrupt K/V scales in 2 of 2 layers\n"
        "  model.layers.0.attn: no scale; says a vendor [errors#scale-not-finite]\n"
        "  model.layers.1.attn: no scale; says a vendor [errors#scale-not-finite]. Export. "
        "KVCACHE_PLUGIN_MODE=warn loads the checkpoint as it is [errors#checkpoint-refused]"
    )


def test_both_things_that_are_wrong_with_a_layer_have_their_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(name: str) -> Any:
        def check(*args: Any, **kwargs: Any) -> None:
            raise KVScaleError(f"bad {name}", layer="attn", name=name)

        return check

    monkeypatch.setattr(verdicts, "validate_kv_scales", refuse("first"))
    monkeypatch.setattr(verdicts, "_check_attention", refuse("second"))
    error = verdicts.judge(found(0))
    assert str(error) == "attn: bad first [errors#first]; bad second [errors#second]"


def test_an_error_of_the_engine_does_not_hide_corrupt_layers_that_belong_together() -> None:
    gate = LoadGate("Engine", "strict")

    def reload() -> None:
        with gate.one_by_one():
            for module, scales in layers(3, 1, 2):
                with contextlib.suppress(KVScaleError):
                    gate.layer(module, scales)
            raise RuntimeError("the engine's own")

    with pytest.raises(RuntimeError, match="the engine's own") as raised:
        reload()
    notes = "\n".join(raised.value.__notes__)
    assert "model.layers.1.attn" in notes
    assert "model.layers.2.attn" in notes
    assert "model.layers.0.attn" not in notes
    assert not gate.is_collecting


@pytest.mark.parametrize(
    ("corrupt", "more"), [(20, None), (21, "  and 1 more layer"), (40, "  and 20 more layers")]
)
def test_twenty_layers_are_listed(corrupt: int, more: str | None) -> None:
    with (
        pytest.raises(KVScaleError) as refused,
        LoadGate("Engine", "strict").model(layers(50, *range(corrupt))),
    ):
        pytest.fail("not reached")
    message = str(refused.value)
    assert message.count("model.layers.") == 20
    after = message.splitlines()[21:]
    assert [line.partition(". ")[0] for line in after] == ([more] if more else [])


def test_warn_says_it_once_and_leaves_the_layer_to_the_engine(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate, loaded = LoadGate("Engine", "warn"), layers(2, 1)
    with gate.model(loaded):
        assert gate.layer(*loaded[0]) is not None
        assert gate.layer(*loaded[1]) is None
    (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    message = record.getMessage()
    assert "KVCACHE_PLUGIN_MODE=warn, so Engine goes on as it would without the plugin" in message
    assert "model.layers.1.attn: fp8 KV cache scales must be finite" in message
    assert "refuses" not in message


def test_verdicts_do_not_outlive_the_pass() -> None:
    """The same layer comes back with other scales in a reload."""
    gate, module = LoadGate("Engine", "strict"), torch.nn.Module()
    with gate.model([(module, found(0))]):
        pass
    with pytest.raises(KVScaleError):
        gate.layer(module, found(0, NAN))


def test_the_active_line_is_said_once_and_counts_what_was_checked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    gate = LoadGate("Engine", "strict")
    for _ in range(2):
        with gate.model(layers(3)):
            pass
    (line,) = [r.getMessage() for r in caplog.records if "is active" in r.getMessage()]
    assert line.endswith(
        "is active in Engine, mode strict: checked the K/V scales of 3 layers (fp8_e4m3 on cpu, "
        "cpu_fast): 3 from the checkpoint, 0 duplicated, 0 default; K 0.05, V 0.06 [errors#active]"
    )


def test_a_model_without_scales_is_told_and_the_next_one_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    gate = LoadGate("Engine", "strict")
    for count in (0, 1):
        with gate.model(layers(count)):
            pass
    first, second = [r.getMessage() for r in caplog.records if "is active" in r.getMessage()]
    assert "found no layer with K/V scales for a quantized KV cache" in first
    assert "checked the K/V scales of 1 layer (" in second


def test_what_failed_was_not_checked_and_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("a fault of a plugin")

    monkeypatch.setattr(verdicts, "validate_kv_scales", fail)
    caplog.set_level(logging.INFO)
    gate, loaded = LoadGate("Engine", "strict"), layers(3)
    with gate.model(loaded):
        assert gate.layer(*loaded[0]) is None
    assert any("checked the K/V scales of 0 layers" in r.getMessage() for r in caplog.records)
    (failure,) = [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert "Engine goes on as it would without the plugin" in failure.getMessage()
    assert failure.exc_info
    assert "a fault of a plugin" in str(failure.exc_info[1])


def test_a_remedy_that_is_missing_leaves_no_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise KVScaleError("the vendor says no", layer="attn")

    monkeypatch.setattr(verdicts, "validate_kv_scales", refuse)
    with (
        pytest.raises(KVScaleError, match=r"attn: the vendor says no\. KVCACHE_PLUGIN_MODE=warn"),
        LoadGate("Engine", "strict").model(layers(1)),
    ):
        pytest.fail("not reached")


@pytest.mark.parametrize(
    ("raw", "seen"),
    [
        ((0.05, 0.06), (0.05, 0.06)),
        ((0.05, None), (0.05, 0.05)),
        ((None, 0.05), (0.05, 0.05)),
        ((0.0, 0.0), (-1.0, -1.0)),
        ((None, None), (-1.0, -1.0)),
    ],
)
def test_the_engine_sees_a_whole_pair_or_none(
    raw: tuple[float | None, float | None], seen: tuple[float, float]
) -> None:
    layer = SimpleNamespace(
        k_scale=torch.nn.Parameter(torch.tensor(-1.0)),
        v_scale=torch.nn.Parameter(torch.tensor(-1.0)),
    )
    loaded = found(0, *raw)
    scales = LoadGate("Engine", "strict").layer(torch.nn.Module(), loaded)
    assert scales is not None
    present(layer, loaded, scales)
    assert (layer.k_scale.item(), layer.v_scale.item()) == pytest.approx(seen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_only_exactly_minus_one_is_a_marker(dtype: torch.dtype) -> None:
    assert unless_marked(torch.tensor(-1.0, dtype=dtype)) is None
    assert unless_marked(torch.tensor([-1.0, -1.0], dtype=dtype)) is None
    for loaded in ([-1.0, 0.5], [-0.5], [NAN], []):
        assert unless_marked(torch.tensor(loaded, dtype=dtype)) is not None


@pytest.mark.parametrize(
    ("variables", "hooked", "said"),
    [
        ({}, True, ""),
        ({"KVCACHE_PLUGIN_MODE": "off"}, False, ""),
        ({"KVCACHE_PLUGIN_MODE": "of"}, True, "'of' is not one of strict, warn, off"),
        ({"KVCACHE_PLUGIN_WRITES": "1"}, True, "KVCACHE_PLUGIN_WRITES is no switch"),
    ],
)
def test_start_reads_the_switches_once(variables: dict[str, str], hooked: bool, said: str) -> None:
    code = (
        "from kvcache_plugin.hosts.gate import start\n"
        "for _ in range(2): start('Engine', lambda gate, _: print('hooked', gate.log.engine))\n"
    )
    clean = {k: v for k, v in os.environ.items() if not k.startswith("KVCACHE_PLUGIN_")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**clean, **variables},
    )
    assert done.stdout.splitlines() == ["hooked Engine"] * hooked
    assert said in done.stderr
    assert bool(done.stderr) == bool(said)


def test_start_never_raises(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(gate: LoadGate, settings: Settings) -> None:
        raise RuntimeError("a fault of the plugin")

    monkeypatch.setattr(gate_module, "_started", set())
    gate_module.start("Engine", fail)
    (record,) = caplog.records
    assert "cannot hook Engine, which goes on without it" in record.getMessage()


def test_the_gate_comes_without_the_scanner() -> None:
    """Every process of an engine has the gate, and most of them load no model."""
    code = (
        "import sys, kvcache_plugin.hosts.vllm, kvcache_plugin.hosts.sglang\n"
        "print(*sorted(name for name in sys.modules if name.startswith(\n"
        "    ('kvcache_plugin.checkpoint', 'safetensors'))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
