"""The pages for those who serve models have every line of the log, and every line of doctor."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

import pytest

from kvcache_plugin import cli, doctor, settings
from kvcache_plugin.hosts import releases
from kvcache_plugin.hosts.engines import ENGINES, Engine
from kvcache_plugin.hosts.seams import SEAMS
from tests.messages import messages
from tests.pages.markdown import DOCS

if TYPE_CHECKING:
    from pathlib import Path

    from kvcache_plugin.doctor import Examination
    from tests.messages import Message

#: Said by doctor alone, and at DEBUG alone.
_NOT_IN_A_LOG = {"releases-unreadable", "import-failed"}
_OF_ONE_ENGINE = {"vllm.md": re.compile(r"vllm"), "sglang.md": re.compile(r"sglang")}


def rows(page: str, heading: str) -> list[list[str]]:
    section = (DOCS / page).read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2]
    lines = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def names_on(page: str) -> set[str]:
    return {
        name
        for row in rows(page, "What the log says")
        for name in re.findall(r"\(errors\.md#([a-z0-9-]+)\)", row[2])
    }


@pytest.mark.parametrize("page", _OF_ONE_ENGINE)
def test_every_line_of_the_log_is_on_the_page_of_its_engine(page: str) -> None:
    (other,) = (pattern for name, pattern in _OF_ONE_ENGINE.items() if name != page)
    known, _ = messages()
    said = {
        message.name
        for message in known
        if (message.is_logged or message.where.startswith("hosts/"))
        and not other.search(message.where)
    }
    assert said - {""} - _NOT_IN_A_LOG <= names_on(page)
    assert names_on(page) <= {message.name for message in known}


@pytest.mark.parametrize("page", _OF_ONE_ENGINE)
def test_what_a_row_quotes_are_the_words_of_its_message(page: str) -> None:
    known, _ = messages()
    for quoted, _, meaning in rows(page, "What the log says"):
        names = re.findall(r"errors\.md#([a-z0-9-]+)", meaning)
        texts = [words_of(message) for message in known if message.name in names]
        parts = [part.strip() for part in re.split(r"vLLM|SGLang|, ", quoted)]
        assert any(parts)
        for words in parts:
            assert any(words in text for text in texts), f"{words!r} is not in {names}"


def words_of(message: Message) -> str:
    return re.sub(r"\\(.)", r"\1", message.pattern.replace(".*", "…"))


# doctor


def line_is_explained(line: str, heading: str) -> bool:
    for cell, *_ in rows("doctor.md", heading):
        for quoted in re.findall(r"`([^`]+)`", cell):
            if re.search(".*".join(map(re.escape, quoted.split("…"))), line):
                return True
    return False


@pytest.fixture
def both_are_here(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"vLLM": "0.30.0", "SGLang": "0.5.23"}
    monkeypatch.setattr(Engine, "version", property(lambda self: versions[self.title]))


def problems_of(monkeypatch: pytest.MonkeyPatch, **switches: str) -> tuple[str, ...]:
    for name, value in switches.items():
        monkeypatch.setenv(name, value)
    return doctor.examine().problems


@pytest.mark.usefixtures("both_are_here")
def test_problems_of_engines_are_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Their sources are not here, so that all seams are missing."""
    failed = [
        dataclasses.replace(release, sound_failure="no line")
        for release in releases.read_releases()
    ]
    monkeypatch.setattr(doctor, "read_releases", lambda: tuple(failed))
    found = problems_of(
        monkeypatch,
        VLLM_PLUGINS="other",
        SGLANG_PLUGINS="other",
        KVCACHE_PLUGIN_BLOCK="cuda_sm9",
        KVCACHE_PLUGIN_MODE="stirct",
        KVCACHE_PLUGIN_MOED="warn",
    )
    assert len(found) >= 7
    for line in found:
        assert line_is_explained(line, "Problems"), line
    monkeypatch.setattr(releases, "RECORD", tmp_path / "releases.json")
    monkeypatch.setattr(doctor, "read_releases", releases.read_releases)
    (unread,) = [line for line in problems_of(monkeypatch) if "record" in line]
    assert line_is_explained(unread, "Problems")


def test_notes_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "version", None)
    monkeypatch.setenv("KVCACHE_PLUGIN_MODE", "off")
    notes = list(doctor.examine().notes)
    status = doctor.SeamStatus("a.b", "checks", "a.b is missing", "it has none")
    engine = doctor.EngineStatus("vLLM", "0.30.0", None, "", (status,))
    notes += doctor._notes(settings.read_settings(), (engine,))
    assert len(notes) == 4
    for line in notes:
        assert line_is_explained(line, "Notes"), line


def test_the_lines_of_an_engine_are_those_of_the_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (DOCS / "doctor.md").read_text(encoding="utf-8")
    shown = re.findall(r"`(vLLM 0\.32\.0.*?)…?`", page)
    assert len(shown) == 2
    monkeypatch.setattr(Engine, "version", "0.32.0")
    monkeypatch.setattr(Engine, "why_not_loaded", lambda self: "")
    cli.main(["doctor"])
    printed = capsys.readouterr().out
    assert all(line in printed for line in shown)


def test_a_line_that_is_not_on_the_page_is_found() -> None:
    assert not line_is_explained("vLLM: something else is wrong", "Problems")
    assert not line_is_explained("something else", "Notes")


@pytest.mark.usefixtures("both_are_here")
def test_every_field_of_the_json_is_told() -> None:
    told = " ".join(cell for row in rows("doctor.md", "JSON") for cell in row)
    found: Examination = doctor.examine()
    engine = found.engines[0]
    assert engine.release
    assert len(engine.seams) == sum(seam.engine == ENGINES[0].package for seam in SEAMS)
    shown: list[Any] = [engine, engine.release, engine.seams[0], engine.writes[0]]
    names = [field.name for each in shown for field in dataclasses.fields(each)]
    for name in ["version", "switches", "implementations", "problems", "notes", *names]:
        assert re.search(rf"`\.?{name}(\[\])?`|engines\[\]\.{name}`", told), name
