"""Real vLLM on a CPU: every byte that lies in its KV cache after a request, and whose it is.

Engines take long to start, so each of the three runs shows several things.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.engine.checkpoints import Checkpoint
from tests.engine.serving import install, run_python

pytestmark = pytest.mark.engine

_HERE = Path(__file__).resolve().parent
SOUND = Checkpoint("sound", {0: (0.05, 0.06), 1: (0.04, 0.07)})
OTHER = Checkpoint("other", {0: (0.002, 0.002), 1: (0.003, 0.003)})
CORRUPT = Checkpoint("corrupt", {0: (0.05, 0.06), 1: (math.nan, 0.07)})
LAYERS = [f"model.layers.{layer}.self_attn.attn" for layer in (0, 1)]
#: Of K and V together; a token has 2 heads of 64 elements.
BYTES_OF_A_TOKEN = 2 * 2 * 64
#: The prompt and the generated tokens, but for the last one.
TOKENS = 8 + 8 - 1


@dataclass(frozen=True)
class Written:
    """What ``write_vllm.py`` found."""

    found: list[dict[str, Any]]
    log: str

    @property
    def ours(self) -> list[str]:
        """The plugin's lines; those of a traceback are vLLM's."""
        return [line for line in self.log.splitlines() if re.search(r"\w kvcache_plugin\.", line)]

    def caches(self, checkpoint: int = 0) -> list[dict[str, Any]]:
        """The caches of all layers of all ranks, with the checkpoint of that number."""
        return [layer for rank in self.found[checkpoint]["ranks"] for layer in rank]


def write(
    folder: Path,
    plugin_site: Path,
    *arguments: Any,
    env: dict[str, str],
    site: tuple[Path, ...] = (),
) -> Written:
    paths = [str(one.write(folder)) if isinstance(one, Checkpoint) else one for one in arguments]
    env = {
        # The cores of a small machine are not divided among the ranks.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "KVCACHE_PLUGIN_REPORT": str(folder / "report.json"),
    } | env
    script = str(_HERE / "write_vllm.py")
    returncode, log = run_python("vllm", [script, *paths], site=[plugin_site, *site], env=env)
    assert returncode == 0, log
    found = re.search(r"^FOUND (.*)$", log, re.MULTILINE)
    assert found is not None, log
    return Written(json.loads(found[1]), log)


@pytest.fixture(scope="session")
def by_hook(plugin_site: Path, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """The hook writes; another checkpoint is loaded into the running engine, then a corrupt one."""
    arguments = (SOUND, "--reload", OTHER, "--reload", CORRUPT)
    env = {"KVCACHE_PLUGIN_VLLM_WRITES": "hook"}
    return write(tmp_path_factory.mktemp("by_hook"), plugin_site, *arguments, env=env)


@pytest.fixture(scope="session")
def folder_of_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("by_ranks")


@pytest.fixture(scope="session")
def by_ranks(plugin_site: Path, folder_of_ranks: Path) -> Written:
    """Nothing is asked for; two ranks, each a process that was spawned."""
    arguments = (SOUND, "--ranks", "2", "--reload", CORRUPT)
    env = {"VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn"}
    return write(folder_of_ranks, plugin_site, *arguments, env=env)


@pytest.fixture(scope="session")
def by_third_party(plugin_site: Path, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Another package quantizes FP8 on the CPU; two ranks that were forked, in the mode warn."""
    folder = tmp_path_factory.mktemp("by_third_party")
    package = _HERE.parent / "third_party" / "example_writer"
    site = install(folder / "site", shutil.copytree(package, folder / "source"))
    env = {"VLLM_WORKER_MULTIPROCESSING_METHOD": "fork", "KVCACHE_PLUGIN_MODE": "warn"}
    return write(folder, plugin_site, SOUND, "--ranks", "2", env=env, site=(site,))


def test_every_byte_is_the_code_of_the_reference(by_hook: Written) -> None:
    for cache in by_hook.caches():
        assert (cache["tokens"], cache["bytes"]) == (TOKENS, TOKENS * BYTES_OF_A_TOKEN)
        assert cache["differ"] == cache["differ_from_reference"] == 0
    assert [cache["layer"] for cache in by_hook.caches()] == LAYERS


def test_one_line_says_who_writes(by_hook: Written) -> None:
    (active, writes) = by_hook.ours[:2]
    assert "is active in vLLM" in active
    assert "INFO" in writes
    assert re.search(
        r"kvcache_plugin \S+ writes the KV caches of 2 layers in vLLM by its hook "
        r"\(fp8_e4m3 on cpu, cpu_fast\) \[errors#hook-writes\]$",
        writes,
    )


def test_a_reload_is_served_with_its_scales_and_written_by_the_hook(by_hook: Written) -> None:
    before, after = by_hook.found[:2]
    assert after["tokens"] != before["tokens"]
    assert [cache["k_scale_float"] for cache in by_hook.caches(1)] == pytest.approx([0.002, 0.003])
    for cache in by_hook.caches(1):
        assert cache["k_scale"] == cache["k_scale_float"]
        assert cache["bytes"] == TOKENS * BYTES_OF_A_TOKEN
        assert cache["differ"] == cache["differ_from_reference"] == 0


def test_a_corrupt_reload_is_refused(by_hook: Written) -> None:
    refused = by_hook.found[2]["refused"]
    assert "kvcache_plugin refuses this checkpoint" in refused
    assert f"{LAYERS[1]}: fp8 KV cache scales must be finite, got k_scale=nan" in refused


def test_by_default_the_bytes_are_those_of_the_engine(by_ranks: Written) -> None:
    """Its kernel truncates: about half of them are not those of round to nearest."""
    caches = by_ranks.caches()
    assert sum(cache["bytes"] for cache in caches) == 2 * TOKENS * BYTES_OF_A_TOKEN
    differ = sum(cache["differ"] for cache in caches) / sum(cache["bytes"] for cache in caches)
    print(f"{differ:.1%} of the bytes are not those of round to nearest")
    assert 0.4 < differ < 0.55


def test_each_rank_checks_its_own_and_one_speaks(by_ranks: Written, folder_of_ranks: Path) -> None:
    said = by_ranks.ours
    assert len([line for line in said if "is active in vLLM" in line]) == 1, said
    assert not any(" writes the KV caches " in line for line in said)
    reports = [json.loads(file.read_text()) for file in folder_of_ranks.glob("report.*.json")]
    assert len({report["pid"] for report in reports}) == 2
    for report in reports:
        (load,) = report["loads"]
        assert (load["checked"], load["from_checkpoint"]) == (2, 2)
    for rank in by_ranks.found[0]["ranks"]:
        assert [cache["layer"] for cache in rank] == LAYERS
        assert [cache["k_scale"] for cache in rank] == pytest.approx([0.05, 0.04])
        assert [cache["bytes"] for cache in rank] == [TOKENS * BYTES_OF_A_TOKEN // 2] * 2


def test_ranks_refuse_what_is_corrupt(by_ranks: Written) -> None:
    assert f"{LAYERS[1]}: fp8 KV cache scales must be finite" in by_ranks.found[1]["refused"]


def test_what_a_third_party_quantizes_lies_in_the_cache(by_third_party: Written) -> None:
    for cache in by_third_party.caches():
        assert cache["codes"] == [0x35, 0xB5]
    assert len(by_third_party.caches()) == 4
    (writes,) = [line for line in by_third_party.ours if " by its hook " in line]
    assert "'example_writer' (kvcache-plugin-example-writer 1.0)" in writes
