"""The table of who writes K and V, where it is told."""

from __future__ import annotations

import json
from dataclasses import astuple
from pathlib import Path

import pytest

from kvcache_plugin import cli, doctor, formats
from kvcache_plugin.explaining import Explanation
from kvcache_plugin.hosts.engines import ENGINES
from kvcache_plugin.hosts.write_paths import WRITE_PATHS, summaries, write_paths

PAGE = Path(__file__).resolve().parents[1] / "docs" / "writes.md"


def test_the_page_has_the_table() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    start = lines.index("| engine | format | which write | codes by | why |") + 2
    rows = [tuple(line.strip("| ").split(" | ")) for line in lines[start:]]
    assert rows[: len(WRITE_PATHS)] == [astuple(path) for path in WRITE_PATHS]
    assert len(rows[len(WRITE_PATHS)]) == 1  # the table is over


def test_engines_and_families_are_known_and_all_there() -> None:
    families = {kv_format.family for kv_format in formats.BUILT_IN}
    found = {(path.engine, path.family) for path in WRITE_PATHS}
    assert found == {(engine.title, family) for engine in ENGINES for family in families}


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e5m2", "fp8_e4m3fnuz", "nvfp4"])
def test_explain_ends_with_a_line_for_each_engine(
    kv_cache_dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["explain", "--device", "cpu", "--kv-cache-dtype", kv_cache_dtype])
    lines = capsys.readouterr().out.splitlines()
    last = lines[-len(ENGINES) :]
    assert last == list(summaries(kv_cache_dtype))
    for engine, line in zip(ENGINES, last, strict=True):
        assert line.startswith(f"{engine.title}'s caches are written by ")
    assert lines[-len(ENGINES) - 1] == ""


def test_a_line_names_each_write_with_its_writer() -> None:
    _, sglang = summaries("fp8")
    hook, third_party, engine = sglang.split("; ")
    assert "by the hook: set_kv_buffer of the pool, cpu_fp8_e4m3" in hook
    assert third_party.startswith("by SGLang, or a third party: set_kv_buffer_prefix_valid")
    assert engine.startswith("by SGLang: fused CUDA writes")


@pytest.mark.parametrize(
    ("vllm_writes", "third_party", "by_vllm", "by_sglang"),
    [
        ("auto", "", False, False),
        ("hook", "", True, False),
        ("auto", "'mine' (mine 1.0)", True, True),
        ("hook", "'mine' (mine 1.0)", True, True),
    ],
)
def test_the_hook_is_named_where_it_writes_as_things_are(
    vllm_writes: str, third_party: str, by_vllm: bool, by_sglang: bool
) -> None:
    told = list(summaries("fp8", vllm_writes=vllm_writes, third_party=third_party))
    for line, by_hook in zip(told, (by_vllm, by_sglang), strict=True):
        assert ("or a third party" not in line) is by_hook
    for engine, by_hook in (("vLLM", by_vllm), ("SGLang", by_sglang)):
        paths = write_paths(engine, vllm_writes=vllm_writes, third_party=third_party)
        before = write_paths(engine)
        changed = [path for path, was in zip(paths, before, strict=True) if path != was]
        assert len(changed) == by_hook
        for path in changed:
            assert path.writer == "the hook"
            assert path.why in ("KVCACHE_PLUGIN_VLLM_WRITES=hook", "'mine' (mine 1.0) quantizes")


def test_explain_and_doctor_look_at_the_switch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVCACHE_PLUGIN_VLLM_WRITES", "hook")
    monkeypatch.setattr(doctor.Engine, "version", property(lambda self: "0.32.0"))
    cli.main(["explain", "--device", "cpu", "--kv-cache-dtype", "fp8"])
    assert "vLLM's caches are written by the hook: do_kv_cache" in capsys.readouterr().out
    cli.main(["doctor", "--json"])
    vllm, _ = json.loads(capsys.readouterr().out)["engines"]
    assert vllm["writes"][0]["writer"] == "the hook"


def test_of_a_format_that_a_plugin_adds_nothing_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert list(summaries("int4_of_mine")) == []
    row = Explanation("mine", "mine 1.0", ("quantize_kv",), "it is mine")
    monkeypatch.setattr("kvcache_plugin.api.explain", lambda device, name: (row,))
    assert cli.main(["explain", "--device", "cpu", "--kv-cache-dtype", "int4_of_mine"]) == cli.FINE
    assert capsys.readouterr().out.splitlines()[-1].startswith("mine ")


def test_doctor_lists_the_writes_of_an_engine_that_is_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    versions = {"vLLM": "0.32.0", "SGLang": None}
    monkeypatch.setattr(doctor.Engine, "version", property(lambda self: versions[self.title]))
    cli.main(["doctor", "--json"])
    vllm, sglang = json.loads(capsys.readouterr().out)["engines"]
    assert [write["what"] for write in vllm["writes"]] == [w.what for w in write_paths("vLLM")]
    assert sglang["writes"] == []
    cli.main(["doctor"])
    text = capsys.readouterr().out
    assert all(path.what in text for path in write_paths("vLLM"))
