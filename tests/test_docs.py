"""The documentation says what the code does: every example runs, every hook and switch is there."""

from __future__ import annotations

import doctest
import inspect
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from kvcache_plugin import cli, hookspecs
from kvcache_plugin.settings import SWITCHES
from tests.example_checkpoints import write_examples

if TYPE_CHECKING:
    from kvcache_plugin.settings import Switch

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
HOOKS = {
    name: tuple(inspect.signature(function).parameters)
    for name, function in vars(hookspecs).items()
    if hasattr(function, "kvcache_plugin_spec")
}
_FENCED = re.compile(r"^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    page: str
    line: int
    language: str
    code: str


def blocks() -> list[Block]:
    return [
        Block(page.name, text.count("\n", 0, found.start()) + 2, found["language"], found["code"])
        for page in PAGES
        for text in [page.read_text(encoding="utf-8")]
        for found in _FENCED.finditer(text)
    ]


def named(language: str) -> list[Any]:
    return [
        pytest.param(block, id=f"{block.page}:{block.line}")
        for block in blocks()
        if block.language == language
    ]


def test_there_are_seven_hooks() -> None:
    assert len(HOOKS) == 7


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_documented_with_its_arguments(hook: str) -> None:
    page = (ROOT / "docs" / "hooks.md").read_text(encoding="utf-8")
    assert f"### `{hook}({', '.join(HOOKS[hook])})`" in page


@pytest.mark.parametrize("switch", SWITCHES, ids=lambda switch: switch.name)
def test_every_switch_is_documented_with_its_values(switch: Switch) -> None:
    page = (ROOT / "docs" / "switches.md").read_text(encoding="utf-8")
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| `")]
    row = next(row for row in rows if row[1].strip() == f"`{switch.name}`")
    for value in switch.values or ():
        assert f"`{value}`" in row[2]
        assert f"`{value}`" in row[4]
    assert switch.default in row[3]


def test_no_switch_is_documented_that_does_not_exist() -> None:
    known = {switch.name for switch in SWITCHES}
    for page in PAGES:
        found = re.findall(r"KVCACHE_PLUGIN_[A-Z_]*[A-Z]", page.read_text(encoding="utf-8"))
        assert set(found) <= known


@pytest.mark.parametrize("block", named("python"))
def test_python_blocks_run(block: Block) -> None:
    exec(compile(block.code, f"{block.page}:{block.line}", "exec"), {"__name__": "docs"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_sessions_print_what_the_page_shows(page: Path) -> None:
    """All ``>>>`` sessions of a page, in their order and in one namespace."""
    sessions = [b.code for b in blocks() if b.page == page.name and b.language == "pycon"]
    parsed = doctest.DocTestParser().get_doctest("\n".join(sessions), {}, page.name, None, 0)
    runner = doctest.DocTestRunner(verbose=False)
    said: list[str] = []
    runner.run(parsed, out=said.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(said)


def test_there_are_sessions_and_commands_to_run() -> None:
    languages = {block.language for block in blocks()}
    assert {"python", "pycon", "console"} <= languages


@pytest.mark.parametrize("block", named("console"))
def test_commands_print_what_the_page_shows(
    block: Block,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """A command that is shown without its output is only run.

    Checkpoints that it names are those of ``example_checkpoints.py``. Its exit status is 0 where
    the page does not ask for it.
    """
    write_examples(tmp_path)
    monkeypatch.chdir(tmp_path)
    code, _, status = block.code.partition("$ echo $?\n")
    command, _, shown = code.partition("\n")
    program, *arguments = shlex.split(command.removeprefix("$ "))
    assert program == "kvcache-plugin"
    assert cli.main(arguments) == int(status or cli.FINE)
    printed = capsys.readouterr().out
    if shown:
        assert printed == shown


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target.partition("#")[0]).exists(), f"{page.name}: {target}"
