"""Real vLLM and SGLang, on a CPU, with the plugin and without it.

What an engine does by itself is always asked of the engine, in a run without the plugin, and
never assumed: a release that changes it must not make these tests lie.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.checkpoints import Checkpoint
from tests.engine.serving import Run, Runner, install

pytestmark = pytest.mark.engine

INF = math.inf
THIRD_PARTY = Path(__file__).resolve().parents[1] / "third_party"

# So small that K and V are cut off at the largest FP8 value, and other tokens come than with 1.0 on
# any CPU. Where scales change the rounding alone they may be the same.
SOUND = Checkpoint("sound", {0: (0.005, 0.003), 1: (0.004, 0.002)})
K_INF = Checkpoint("k-inf", {0: (0.05, 0.06), 1: (INF, 1.0)})
K_NAN = Checkpoint("k-nan", {0: (0.05, 0.06), 1: (math.nan, 1.0)})
V_MINUS_INF = Checkpoint("v-minus-inf", {0: (0.05, 0.06), 1: (0.05, -INF)})
ZEROS = Checkpoint("zeros", {0: (0.0, 0.0), 1: (0.0, 0.0)})
UNSET = Checkpoint("unset")
# Likewise: V with the scale 1.0 gives other tokens.
SINGLE = Checkpoint("single", {0: (0.002, None), 1: (0.003, None)})
DOUBLE = Checkpoint("double", {0: (0.002, 0.002), 1: (0.003, 0.003)})
UNQUANTIZED = Checkpoint("unquantized", quantized=False)
VECTOR = Checkpoint("vector", {0: (0.05, 0.06), 1: (torch.tensor([1.0, 2.0]), 0.06)})
LINKED = Checkpoint("linked", {0: (0.05, 0.06), 1: (INF, 1.0)}, linked=True)
# Scales that never reach their layers: vLLM takes those of fused projections, and has no place
# for any where another method than its own ones quantizes.
AWQ = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 32,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": ["self_attn", "mlp", "lm_head"],
}
LOST = {
    "vllm": Checkpoint("lost", SOUND.scales, declared=AWQ),
    "sglang": Checkpoint(
        "lost", SOUND.scales, scale_name="model.layers.{layer}.self_attn.qkv_proj.{side}_scale"
    ),
}
WHY_LOST = {
    "vllm": "self_attn.v_scale (vLLM 0.32.0: for quant_method awq it has no place for it)",
    "sglang": "self_attn.qkv_proj.v_scale (SGLang 0.5.23: its rename puts attn. before the last",
}
# What the engines show once they read the weights.
READS_WEIGHTS = re.compile(r"Loading safetensors checkpoint shards:|thread loading shards:")


def deep(name: str, *corrupt: int) -> Checkpoint:
    """Twenty-four small layers, of which ``corrupt`` have an infinite k scale."""
    scales = {layer: (INF if layer in corrupt else 0.05, 0.06) for layer in range(24)}
    return Checkpoint(name, scales, num_hidden_layers=24, hidden_size=64)


ONE_OF_24 = deep("one-of-24", 17)
ALL_BUT_ONE_OF_24 = deep("all-but-one-of-24", *range(1, 24))

# SGLang's torch_native attention, the only one that runs on any CPU, casts K and V to FP8 and back
# without their scales. There the tokens cannot tell what was served; test_adapters.py can.
WHERE_TOKENS_TELL = pytest.mark.parametrize("engine", ["vllm"], indirect=True, scope="session")


def assert_served(run: Run) -> None:
    assert run.served, run.log


def assert_refused(run: Run, *parts: str, layers: set[int]) -> None:
    """Asserts that nothing was served and that the log names ``layers``, no other, and why."""
    assert run.returncode != 0, run.log
    assert run.tokens is None, run.log
    for part in parts:
        assert part in run.log, f"{part!r} is not in:\n{run.log}"
    assert run.named_layers == layers, run.log


def with_report(run: Runner, checkpoint: Checkpoint, **more: Any) -> tuple[Run, dict[str, Any]]:
    """A run, and the report of the one process of it that loads a model."""
    file = run.folder / f"{checkpoint.name}-report.json"
    done = run(checkpoint, env={"KVCACHE_PLUGIN_REPORT": str(file)}, **more)
    (written,) = run.folder.glob(f"{checkpoint.name}-report.*.json")
    report = json.loads(written.read_text(encoding="utf-8"))
    assert report["engine"].lower() == run.engine
    (load,) = report["loads"]
    assert load["model"] == str(run.folder / checkpoint.name)
    return done, load


def test_sound_scales_change_nothing(run: Runner) -> None:
    alone = run(SOUND, plugin=False)
    with_plugin, load = with_report(run, SOUND, own_logging=True)
    assert_served(alone)
    assert_served(with_plugin)
    assert with_plugin.tokens == alone.tokens
    # One line, and nothing else of ours, in the log as the engine itself makes it.
    (line,) = [line for line in with_plugin.log.splitlines() if "kvcache_plugin" in line]
    assert re.search(
        r"kvcache_plugin \S+ is active.*, mode strict: checked the K/V scales of 2 layers "
        r"\(fp8_e4m3 on cpu, cpu_fast\): 2 from the checkpoint, 0 duplicated, 0 default; "
        r"K 0\.004 to 0\.005, V 0\.002 to 0\.003; every scale in the files arrived",
        line,
    )
    assert READS_WEIGHTS.search(with_plugin.log)
    assert (load["checked"], load["from_checkpoint"], load["refused"]) == (2, 2, "")
    assert load["k_scale"] == pytest.approx([0.004, 0.005])


def test_a_scale_of_several_elements_is_refused_before_any_weight_is_read(run: Runner) -> None:
    refused, load = with_report(run, VECTOR)
    sentence = "Only support per-tensor scaling factor for fp8 KV cache, got k_scale shape=(2,)"
    assert_refused(refused, sentence, layers={1})
    assert not READS_WEIGHTS.search(refused.log)
    assert sentence in load["refused"]


def test_what_cannot_be_read_before_is_checked_after_loading(run: Runner) -> None:
    linked = run(LINKED)
    assert_refused(linked, "in 1 of 2 layers", "k_scale=inf", layers={1})
    assert READS_WEIGHTS.search(linked.log)
    assert any("it is a link that leads out of the checkpoint" in x for x in linked.complaints)


def test_scales_that_do_not_arrive_are_told_with_their_layers(run: Runner, engine: str) -> None:
    lost, load = with_report(run, LOST[engine])
    assert_served(lost)
    assert "K/V scales in the files did not arrive on 2 layers" in lost.log
    assert WHY_LOST[engine] in lost.log
    assert lost.named_layers == {0, 1}
    assert [one["layer"] for one in load["lost"]] == [
        f"model.layers.{layer}.self_attn.attn" for layer in (0, 1)
    ]


def test_coverage_can_stop_the_load(run: Runner, engine: str) -> None:
    refused = run(LOST[engine], env={"KVCACHE_PLUGIN_COVERAGE": "error"})
    assert_refused(refused, "did not arrive on 2 layers", WHY_LOST[engine], layers={0, 1})


@WHERE_TOKENS_TELL
def test_the_scales_reach_the_cache(run: Runner) -> None:
    """Else equal tokens would say nothing in the other tests."""
    assert run(SOUND, plugin=False).tokens != run(UNSET).tokens
    assert run(DOUBLE).tokens != run(UNSET).tokens


@pytest.mark.parametrize(
    ("checkpoint", "value"),
    [(K_INF, "k_scale=inf"), (K_NAN, "k_scale=nan"), (V_MINUS_INF, "v_scale=-inf")],
    ids=["k-inf", "k-nan", "v-minus-inf"],
)
def test_non_finite_scales_are_refused(run: Runner, checkpoint: Checkpoint, value: str) -> None:
    assert_refused(run(checkpoint), "KV cache scales must be finite", value, layers={1})


def test_one_bad_layer_of_many_is_the_one_that_is_named(run: Runner) -> None:
    assert_refused(run(ONE_OF_24), "k_scale=inf", layers={17})


def test_many_bad_layers_are_listed_up_to_twenty(run: Runner) -> None:
    assert_refused(run(ALL_BUT_ONE_OF_24), "3 more", layers=set(range(1, 21)))


@WHERE_TOKENS_TELL
def test_a_single_k_scale_serves_both_sides(run: Runner) -> None:
    single, double = run(SINGLE), run(DOUBLE)
    assert_served(double)
    assert_served(single)
    assert single.tokens == double.tokens


@WHERE_TOKENS_TELL
def test_two_zeros_are_no_scales_and_warned_about(run: Runner) -> None:
    zeros, unset = run(ZEROS), run(UNSET)
    assert_served(unset)
    assert_served(zeros)
    assert zeros.tokens == unset.tokens
    for layer in (0, 1):
        name = f"model.layers.{layer}.self_attn.attn"
        assert any(
            name in line and "k_scale=0.0" in line and "v_scale=0.0" in line
            for line in zeros.complaints
        ), zeros.log


def test_off_leaves_the_engine_as_it_is(run: Runner) -> None:
    off = run(K_INF, mode="off")
    assert off.outcome == run(K_INF, plugin=False).outcome
    assert off.active == []


def test_warn_says_it_and_leaves_the_engine_as_it_is(run: Runner) -> None:
    warned = run(K_INF, mode="warn")
    assert warned.outcome == run(K_INF, plugin=False).outcome
    assert warned.complaints, warned.log
    assert "KV cache scales must be finite" in warned.log
    assert "k_scale=inf" in warned.log
    assert warned.named_layers == {1}


def test_scales_of_a_cache_that_is_not_quantized_are_left_alone(run: Runner) -> None:
    # The way out that the refusal names: "auto" would follow the checkpoint, see below.
    assert "kv_cache_dtype=bfloat16" in run(K_INF).log
    corrupt = run(K_INF, kv_cache_dtype="bfloat16")
    assert_served(corrupt)
    assert corrupt.complaints == []


def test_auto_follows_the_checkpoint_to_a_cache_whose_scales_count(run: Runner) -> None:
    assert_refused(run(K_INF, kv_cache_dtype="auto"), "k_scale=inf", layers={1})


def test_a_checkpoint_that_is_not_quantized_is_served(run: Runner) -> None:
    unquantized = run(UNQUANTIZED)
    assert_served(unquantized)
    assert unquantized.complaints == []
    assert "no layer with K/V scales for a quantized KV cache" in unquantized.active[0]
    assert "2 layers with fp8_e4m3 caches, which run with 1.0" in unquantized.active[0]


@pytest.fixture(scope="session")
def broken_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every broken third-party package installed."""
    packages = sorted(THIRD_PARTY.glob("broken_*"))
    assert packages, f"no broken_* packages in {THIRD_PARTY}"
    # From copies, so that the builds leave nothing behind in the checkout.
    source = tmp_path_factory.mktemp("broken_source")
    copies = [shutil.copytree(package, source / package.name) for package in packages]
    return install(tmp_path_factory.mktemp("broken_site"), *copies)


def test_broken_third_party_packages_are_left_out(run: Runner, broken_site: Path) -> None:
    with_broken = run(SOUND, site=[broken_site])
    assert_served(with_broken)
    assert with_broken.tokens == run(SOUND, plugin=False).tokens
    names = {found.name for found in importlib.metadata.distributions(path=[str(broken_site)])}
    for name in names:
        assert_warned_once(with_broken, name)


def assert_warned_once(run: Run, distribution: str) -> None:
    """Asserts one warning that names ``distribution``, from each process that gave it at all.

    Every process of an engine loads the plugins, so each may say it.
    """
    naming = re.compile(rf"(?<![\w-]){re.escape(distribution)}(?![\w-])")
    lines = [line for line in run.alarms if naming.search(line)]
    assert lines, f"no warning names {distribution}:\n{run.log}"
    processes = [found[0] for line in lines if (found := re.search(r"pid=\d+", line))]
    assert len(processes) == len(set(processes)), lines
