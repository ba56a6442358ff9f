"""Real SGLang on a CPU: the bytes in its pool, updates while it serves, and two ranks."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests import oracles
from tests.engine.checkpoints import Checkpoint
from tests.engine.serve_sglang import NUM_TOKENS, PROMPT
from tests.engine.serving import Run, Runner, install, run_python, serve

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("engine")]
pytestmark += [pytest.mark.parametrize("engine", ["sglang"], indirect=True, scope="session")]

_HERE = Path(__file__).resolve().parent
LAYERS = (0, 1)
SOUND = Checkpoint("sound", {0: (0.05, 0.06), 1: (0.04, 0.07)})
NEW = Checkpoint("new", {0: (0.5, 0.6), 1: (0.4, 0.7)})
K_NAN = Checkpoint("k-nan", {0: (0.5, 0.6), 1: (math.nan, 0.7)})
#: The codes that the example package writes, whatever comes in.
MARKS = {0x35, 0xB5}


@pytest.fixture(scope="session")
def writer_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A third party's package that quantizes FP8 on the CPU."""
    package = _HERE.parent / "third_party" / "example_writer"
    source = shutil.copytree(package, tmp_path_factory.mktemp("source") / package.name)
    return install(tmp_path_factory.mktemp("writer_site"), source)


def recorded(run: Runner, file: Path, *site: Path) -> dict[str, torch.Tensor]:
    """What the recorder saw of a request."""
    done = run(SOUND, site=site, env={"RECORD_POOL": str(file)})
    assert done.served, done.log
    return load_file(file)


def test_the_pool_holds_the_codes_of_all_that_went_in(
    run: Runner, recorder_site: Path, tmp_path: Path
) -> None:
    pool = recorded(run, tmp_path / "pool.safetensors", recorder_site)
    for layer in LAYERS:
        for side in "kv":
            values = pool[f"{layer}.{side}"]
            # The last token that is generated is not written any more.
            assert values.shape == (len(PROMPT) + NUM_TOKENS - 1, 2, 64)
            assert values.unique().numel() > 100
            # torch_native attention hands no scales on.
            codes = oracles.fp8_codes(values.float().numpy(), np.float32(1), oracles.E4M3)
            assert np.array_equal(pool[f"{layer}.{side}_bytes"].numpy(), codes)


def test_a_third_party_writes_the_pool(
    run: Runner, recorder_site: Path, writer_site: Path, tmp_path: Path
) -> None:
    pool = recorded(run, tmp_path / "pool.safetensors", recorder_site, writer_site)
    for layer in LAYERS:
        for side in "kv":
            stored = pool[f"{layer}.{side}_bytes"]
            assert set(stored.unique().tolist()) == MARKS
            assert torch.equal(stored >= 0x80, pool[f"{layer}.{side}"] < 0)


STEP = re.compile(r"^STEP (.*)$", re.MULTILINE)


def test_updates_are_checked_while_the_model_is_served(
    engine: str, plugin_site: Path, recorder_site: Path, tmp_path: Path
) -> None:
    folders = [str(checkpoint.write(tmp_path)) for checkpoint in (SOUND, K_NAN, NEW)]
    returncode, log = run_python(
        engine,
        [str(_HERE / "update_sglang.py"), *folders],
        site=[plugin_site, recorder_site],
        env={"RECORD_POOL": str(tmp_path / "pool.safetensors")},
    )
    assert returncode == 0, log
    steps = {name: rest for name, *rest in map(json.loads, STEP.findall(log))}
    assert list(steps) == [
        "start",
        "corrupt from disk",
        "new from disk",
        "corrupt tensors",
        "sound tensors",
    ]
    served = {name: scales for name, (_, _, scales) in steps.items()}
    assert_scales(served["start"], SOUND.scales)
    assert_scales(served["corrupt from disk"], SOUND.scales)
    assert_scales(served["new from disk"], NEW.scales)
    assert_scales(served["corrupt tensors"], NEW.scales)
    assert_scales(served["sound tensors"], {**NEW.scales, 1: (0.25, 0.125)})
    for name, (answer, tokens, _) in steps.items():
        assert tokens == steps["start"][1]  # the weights are the same, and served
        if name.startswith("corrupt"):
            assert answer[0] is False
            assert "model.layers.1.self_attn.attn: fp8 KV cache scales must be finite" in answer[1]
            assert "k_scale=nan" in answer[1]
        elif answer is not None:
            assert answer[0] is True, answer


def assert_scales(scales: dict[str, list[float]], expected: Any) -> None:
    """The tensor and the host's float of K and then of V, for each layer."""
    for layer in LAYERS:
        k, k_float, v, v_float = scales[str(layer)]
        assert (k, v) == (k_float, v_float)
        assert (k, v) == pytest.approx(expected[layer], rel=1e-6)


def two_ranks(checkpoint: Checkpoint, plugin_site: Path, folder: Path) -> tuple[Run, list[Any]]:
    """What came of a checkpoint on two ranks, and the report of each."""
    cores = sorted(os.sched_getaffinity(0))
    env = {
        "KVCACHE_PLUGIN_REPORT": str(folder / "report.json"),
        "SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}",
        # It would use NCCL on a CPU where that is installed.
        "SGLANG_NCCL_SO_PATH": os.devnull,
    }
    run = serve("sglang", checkpoint.write(folder), site=[plugin_site], env=env, tp_size=2)
    return run, [json.loads(file.read_text()) for file in folder.glob("report.*.json")]


def test_of_two_ranks_each_checks_and_one_speaks(plugin_site: Path, tmp_path: Path) -> None:
    sound, reports = two_ranks(SOUND, plugin_site, tmp_path)
    assert sound.served, sound.log
    assert [load["checked"] for report in reports for load in report["loads"]] == [2, 2]
    assert len(sound.active) == 1, sound.log
    assert sound.complaints == []


def test_of_two_ranks_none_serves_a_corrupt_scale(plugin_site: Path, tmp_path: Path) -> None:
    # One that refuses ends the other, perhaps before that has told its reason.
    refused, reports = two_ranks(K_NAN, plugin_site, tmp_path)
    assert refused.returncode != 0, refused.log
    assert refused.tokens is None
    assert "k_scale=nan" in refused.log
    assert refused.named_layers == {1}
    assert all("k_scale=nan" in load["refused"] for report in reports for load in report["loads"])
