"""The tutorial makes the package that the other tests install, and shows what it prints."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from tests.fresh_venv import copy_of_project, environment, fresh_venv, pip_install
from tests.pages.blocks import Block, blocks
from tests.test_docs import is_excerpt

PACKAGE = Path(__file__).parent / "third_party" / "example_npu"
BLOCKS = [block for block in blocks() if block.page == "tutorial.md"]
#: What the fixture does in their place, with nothing to download.
_MADE_BEFORE: Final = ("export ", "cd ", "python3 -m venv ", "source ", "pip install torch ")


class Command(NamedTuple):
    line: str
    shown: str


def commands_of(block: Block) -> list[Command]:
    """The commands of a console, each with what is shown below it."""
    assert block.code.startswith("$ ")
    parts = re.split(r"^\$ ", block.code, flags=re.MULTILINE)[1:]
    return [Command(*part.split("\n", 1)) for part in parts]


def numbered(language: str) -> list[Any]:
    found = [(i, block) for i, block in enumerate(BLOCKS) if block.language == language]
    return [
        pytest.param((i, j), command.shown, id=f"{block.line}: {command.line[:50]}")
        for i, block in found
        for j, command in enumerate(commands_of(block))
    ]


def test_its_files_are_those_of_the_package() -> None:
    """The last block of a name is the file; what comes before is a step to it."""
    shown = {block.title: block.code for block in BLOCKS if block.title}
    files = [path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".toml", ".typed")]
    sources = [path for path in files if "build" not in path.relative_to(PACKAGE).parts]
    assert shown | {"kvcache_plugin_example/py.typed": ""} == {
        path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in sources
    }


def test_every_block_is_a_file_or_is_run() -> None:
    for block in BLOCKS:
        assert bool(block.title) == (block.language in ("python", "toml")), block
        assert block.title or block.language in ("bash", "console"), block


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], str]:
    """What each command of a console prints to somebody who follows the page."""
    folder = tmp_path_factory.mktemp("tutorial")
    python = fresh_venv(folder, "numpy", "pytest")
    project = copy_of_project(folder / "project")
    variables = environment() | {
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        "COLUMNS": "80",
        "PYTHONDONTWRITEBYTECODE": "1",  # files change within a second here
    }

    def shell(line: str, where: Path) -> str:
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=where,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )
        return done.stdout

    def prepare(line: str) -> None:
        if line == "pip install -e .":
            pip_install(python, "--editable", str(package))
        elif line == 'pip install "$PLUGIN_CLONE" pytest':
            pip_install(python, str(project))
        elif line.startswith("mkdir "):
            assert shell(line, folder) == ""
        elif not line.startswith(_MADE_BEFORE):
            assert line.startswith("touch ")
            assert shell(line, package) == ""

    package = folder / "kvcache-plugin-example"
    found = {}
    for i, block in enumerate(BLOCKS):
        if block.title:
            (package / block.title).write_text(block.code, encoding="utf-8")
        elif block.language == "bash":
            for line in block.code.splitlines():
                prepare(line)
        else:
            for j, command in enumerate(commands_of(block)):
                found[i, j] = shell(command.line, package)
    return found


@pytest.mark.venv
@pytest.mark.parametrize(("place", "shown"), numbered("console"))
def test_commands_print_what_it_shows(
    printed: dict[tuple[int, int], str], place: tuple[int, int], shown: str
) -> None:
    assert is_excerpt(shown, printed[place]), printed[place]
