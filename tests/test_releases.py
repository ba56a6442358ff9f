"""The record of the releases that were run, what doctor says of one, and the page about them."""

from __future__ import annotations

import importlib.metadata
import json
from dataclasses import replace
from typing import Any

import pytest

from kvcache_plugin import cli, doctor
from kvcache_plugin.checkpoint.engine_rules import RELEASES as DESCRIBED
from kvcache_plugin.errors import KVCacheError
from kvcache_plugin.hosts.engines import ENGINES
from kvcache_plugin.hosts.releases import (
    KNOWN_NOT_TO_WORK,
    PROVEN,
    UNKNOWN,
    LeftOut,
    Release,
    order,
    read_releases,
    verdict,
)
from kvcache_plugin.hosts.seams import VLLM_RANK
from tests.engine import venvs
from tests.pages.releases import table

OLDEST = Release("vLLM", "0.30.0", "2026-11-30", "0.1.0", {"torch": "2.13.0"}, 7, ())
BROKEN = replace(OLDEST, release="0.31.0", sound_failure="a sound checkpoint was not served")
NEWEST = replace(OLDEST, release="0.32.0")
RUN = (NEWEST, BROKEN, OLDEST)


@pytest.mark.parametrize(
    ("version", "word", "said"),
    [
        ("0.32.0", PROVEN, "on a CPU on 2026-11-30, with kvcache-plugin 0.1.0"),
        ("0.31.0", KNOWN_NOT_TO_WORK, "not served (on a CPU on 2026-11-30"),
        ("0.31.0", KNOWN_NOT_TO_WORK, "; proven are 0.30.0, 0.32.0"),
        ("0.33.0", UNKNOWN, "newer than the newest proven, 0.32.0; the seams below say"),
        ("0.100", UNKNOWN, "newer than the newest proven, 0.32.0"),
        ("0.32.0.post1", UNKNOWN, "newer than the newest proven, 0.32.0"),
        ("0.9.1", UNKNOWN, "older than the oldest proven, 0.30.0"),
        ("0.31.1", UNKNOWN, "not run; proven are 0.30.0, 0.32.0"),
        ("0.32.1.dev3+gabc", UNKNOWN, "not a release by its version"),
        ("0.32.0+cpu", UNKNOWN, "not a release by its version"),
        ("0.33.0rc1", UNKNOWN, "not a release by its version"),
        ("of unknown version", UNKNOWN, "not a release by its version"),
        ("", UNKNOWN, "not a release by its version"),
    ],
)
def test_what_is_known_of_a_version(version: str, word: str, said: str) -> None:
    found = verdict(RUN, "vLLM", version)
    assert found.word == word
    assert said in found.detail
    assert str(found) == f"{word}: {found.detail}"


def test_another_engines_releases_say_nothing() -> None:
    assert verdict(RUN, "SGLang", "0.32.0").detail.startswith("no release of it is proven")


def test_a_release_without_a_seam_is_proven_and_says_so() -> None:
    without = replace(NEWEST, left_out=(LeftOut("vllm.a.b", "vllm.a.b is missing"),))
    assert without.verdict.word == PROVEN
    assert without.verdict.detail.endswith(", without 1 seam of 7")


@pytest.mark.parametrize("failure", ["register_failure", "sound_failure", "corrupt_failure"])
def test_any_failure_counts(failure: str) -> None:
    fields: dict[str, Any] = {failure: "it did not hold"}
    found = replace(NEWEST, **fields).verdict
    assert found.word == KNOWN_NOT_TO_WORK
    assert found.detail.startswith("it did not hold (")


@pytest.mark.parametrize("fields", [{"release": "0.33.0.dev1"}, {"date": "yesterday"}])
def test_what_is_no_release_or_date_is_not_recorded(fields: dict[str, Any]) -> None:
    with pytest.raises(KVCacheError, match=r"is no (release|date)"):
        replace(NEWEST, **fields)


def test_the_record_has_every_release_that_the_matrix_runs() -> None:
    expected = [
        (title, release)
        for title, package in ((engine.title, engine.package) for engine in ENGINES)
        for release in (venvs.newest(package), *venvs.OLDER[package])
    ]
    assert [(found.engine, found.release) for found in read_releases()] == expected
    for package in venvs.ENGINES:
        releases = [venvs.newest(package), *venvs.OLDER[package]]
        assert releases == sorted(releases, key=order, reverse=True)


@pytest.mark.parametrize("title", DESCRIBED)
def test_the_newest_release_is_proven_and_is_what_the_rules_for_names_describe(title: str) -> None:
    newest = next(found for found in read_releases() if found.engine == title)
    assert newest.verdict.word == PROVEN
    assert newest.release == DESCRIBED[title]


def test_every_seam_that_is_left_out_is_listed_with_its_reason() -> None:
    for release in read_releases():
        for left_out in release.left_out:
            assert left_out.reason, f"{release.engine} {release.release}: {left_out.problem}"


def test_the_table_says_what_did_not_hold() -> None:
    left_out = LeftOut("vllm.a.b", "vllm.a.b is missing", "it has no b")
    (line,) = table([replace(BROKEN, left_out=(left_out,))]).splitlines()[2:]
    assert line.startswith("| vLLM 0.31.0 | known not to work | yes | 6 of 7; vllm.a.b is missing ")
    assert "(it has no b) |" in line
    assert "| no: a sound checkpoint was not served | yes | torch 2.13.0 |" in line


class TestDoctor:
    @pytest.fixture(autouse=True)
    def vllm(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
        """An installed vLLM with no seam, of which the record knows three releases."""
        (tmp_path / "vllm").mkdir()
        (tmp_path / "vllm" / "__init__.py").write_text("", encoding="utf-8")
        self.folder = tmp_path
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(doctor, "read_releases", lambda: RUN)
        monkeypatch.setattr(doctor.seams, "SEAMS", ())

    def install(self, version: str) -> None:
        information = self.folder / f"vllm-{version}.dist-info"
        information.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
        (information / "METADATA").write_text(metadata, encoding="utf-8")
        assert importlib.metadata.version("vllm") == version

    @pytest.mark.parametrize("version", ["0.32.0", "0.33.0", "0.32.1.dev3+gabc"])
    def test_proven_and_unknown_are_no_problem(
        self, version: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.install(version)
        assert cli.main(["doctor"]) == cli.FINE
        shown = f"vLLM {version}: {verdict(RUN, 'vLLM', version)}"
        assert shown in capsys.readouterr().out.splitlines()

    def test_known_not_to_work_is_a_problem(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.install("0.31.0")
        assert cli.main(["doctor", "--json"]) == cli.WRONG
        found = json.loads(capsys.readouterr().out)
        (problem,) = found["problems"]
        assert problem.startswith(
            "vLLM 0.31.0: known not to work: a sound checkpoint was not served"
        )
        release = verdict(RUN, "vLLM", "0.31.0")
        assert found["engines"][0]["release"] == {"word": release.word, "detail": release.detail}

    @pytest.mark.parametrize(
        ("version", "reason", "status"),
        [
            ("0.30.0", "it has no such fusion", cli.FINE),
            ("0.30.0", "", cli.WRONG),
            ("0.33.0", "it has no such fusion", cli.WRONG),
        ],
    )
    def test_a_seam_that_a_release_lacks_with_a_reason_is_no_problem_there(
        self,
        version: str,
        reason: str,
        status: int,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        self.install(version)
        seam = VLLM_RANK
        left_out = LeftOut(seam.path, f"{seam.path} is missing", reason)
        without = replace(OLDEST, left_out=(left_out,))
        monkeypatch.setattr(doctor, "read_releases", lambda: (NEWEST, without))
        monkeypatch.setattr(doctor.seams, "SEAMS", (seam,))
        assert cli.main(["doctor"]) == status
        printed = capsys.readouterr().out
        assert ("problem: " in printed) == (status == cli.WRONG)
        note = f"is missing: there is no module {seam.module}, which does no harm: {reason}\n"
        assert (note in printed) == (status == cli.FINE)

    @pytest.mark.parametrize(
        "record", [None, "", "{", "null", "[1]", '[{"left_out": []}]', '{"a": "b"}', b"\xff"]
    )
    def test_a_record_that_is_none_is_a_problem_and_the_rest_is_told(
        self,
        record: str | bytes | None,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        path = self.folder / "releases.json"
        if record is not None:
            path.write_bytes(record if isinstance(record, bytes) else record.encode())
        monkeypatch.setattr("kvcache_plugin.hosts.releases.RECORD", path)
        monkeypatch.setattr(doctor, "read_releases", read_releases)
        self.install("0.32.0")
        assert cli.main(["doctor"]) == cli.WRONG
        printed = capsys.readouterr().out
        assert "vLLM 0.32.0: unknown: no release of it is proven" in printed
        assert f"problem: the record of releases, {path}, cannot be read: " in printed
        assert "cpu_reference" in printed

    def test_an_engine_of_unknown_version(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["doctor"]) == cli.FINE
        printed = capsys.readouterr().out
        assert "vLLM of unknown version: unknown: not a release by its version" in printed
        assert "SGLang is not installed here\n" in printed
