"""The documentation says what the code does: every block is run, or held against it."""

from __future__ import annotations

import doctest
import importlib.util
import inspect
import re
import shlex
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch

from kvcache_plugin import cli, hookspecs
from kvcache_plugin.errors import KVScaleError
from kvcache_plugin.hosts.gate import LoadGate
from kvcache_plugin.hosts.load import Load
from kvcache_plugin.hosts.loaded import LoadedScales
from kvcache_plugin.plugins import ENTRY_POINT_GROUP
from kvcache_plugin.settings import SWITCHES
from tests.engine.checkpoints import write_checkpoint
from tests.example_checkpoints import write_examples
from tests.messages import Message, is_shown, messages
from tests.pages.blocks import Block, blocks, prose, shell_commands
from tests.pages.commands import commands
from tests.pages.markdown import DOCS, ROOT, pages

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it

if TYPE_CHECKING:
    from pathlib import Path

    from kvcache_plugin.settings import Switch

HOOKS = {
    name: tuple(inspect.signature(function).parameters)
    for name, function in vars(hookspecs).items()
    if hasattr(function, "kvcache_plugin_spec")
}
#: What stands in a page for what is left out of an output.
_LEFT_OUT: Final = "…"


#: Of its blocks the package is made that tests/test_tutorial.py installs.
TUTORIAL = "tutorial.md"


def written_in(*languages: str, besides: str = "") -> list[Any]:
    return [
        pytest.param(block, id=f"{block.page}:{block.line}")
        for block in blocks()
        if block.language in languages and block.page != besides
    ]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 120


def test_there_are_seven_hooks() -> None:
    assert len(HOOKS) == 7


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_documented_with_its_arguments(hook: str) -> None:
    page = (DOCS / "hooks.md").read_text(encoding="utf-8")
    assert f"### `{hook}({', '.join(HOOKS[hook])})`" in page


@pytest.mark.parametrize("switch", SWITCHES, ids=lambda switch: switch.name)
def test_every_switch_is_documented_with_its_values(switch: Switch) -> None:
    page = (DOCS / "switches.md").read_text(encoding="utf-8")
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| `")]
    row = next(row for row in rows if row[1].strip() == f"`{switch.name}`")
    for value in switch.values or ():
        assert f"`{value}`" in row[2]
        assert f"`{value}`" in row[4]
    assert switch.default in row[3]


def test_no_switch_is_documented_that_does_not_exist() -> None:
    known = {switch.name for switch in SWITCHES}
    for page in pages():
        said = page.read_text(encoding="utf-8")
        for block in blocks():
            if block.page == page.name and "is no switch" in block.code:
                said = said.replace(block.code, "")
        assert set(re.findall(r"KVCACHE_PLUGIN_[A-Z_]*[A-Z]", said)) <= known


# Blocks, by their language


def test_every_block_is_in_a_language_that_is_tested() -> None:
    """``mermaid`` is in ``test_ways.py``; what is a file is in ``test_tutorial.py``."""
    tested = {"python", "pycon", "console", "bash", "toml", "text", "mermaid"}
    assert {block.language for block in blocks()} == tested
    assert {block.page for block in blocks() if block.title} <= {TUTORIAL}
    assert {block.page for block in blocks() if block.language == "mermaid"} <= {"ways.md"}


@pytest.mark.parametrize("block", written_in("python", besides=TUTORIAL))
def test_python_blocks_run(block: Block) -> None:
    exec(compile(block.code, f"{block.page}:{block.line}", "exec"), {"__name__": "docs"})


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_sessions_print_what_the_page_shows(page: Path) -> None:
    """All ``>>>`` sessions of a page, in their order and in one namespace."""
    sessions = [b.code for b in blocks() if b.page == page.name and b.language == "pycon"]
    parsed = doctest.DocTestParser().get_doctest("\n".join(sessions), {}, page.name, None, 0)
    runner = doctest.DocTestRunner(verbose=False)
    said: list[str] = []
    runner.run(parsed, out=said.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(said)


def is_excerpt(shown: str, printed: str) -> bool:
    pattern = ".*".join(map(re.escape, shown.split(_LEFT_OUT)))
    return re.fullmatch(pattern, printed, re.DOTALL) is not None


def test_an_excerpt_leaves_out_what_it_says() -> None:
    assert is_excerpt("1 a\n…\n3 c\n", "1 a\n2 b\n3 c\n")
    assert is_excerpt("1 …\n2 b\n", "1 a\n2 b\n")
    assert not is_excerpt("1 a\n3 c\n", "1 a\n2 b\n3 c\n")
    assert not is_excerpt("1 a\n…\n", "1 a, b\n2 b\n")


@pytest.mark.parametrize("block", written_in("console", besides=TUTORIAL))
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
        assert is_excerpt(shown, printed), printed


@pytest.mark.parametrize("block", written_in("toml"))
def test_toml_is_an_entry_point_of_ours(block: Block) -> None:
    groups = tomllib.loads(block.code)["project"]["entry-points"]
    assert set(groups) == {ENTRY_POINT_GROUP}


@pytest.mark.parametrize("block", written_in("text", besides=TUTORIAL))
def test_text_is_a_message(block: Block) -> None:
    """It ends with its name, or each line is a reason that becomes part of a message."""
    names = re.findall(r"\[errors#([a-z0-9-]+)\]", block.code)
    known, _ = messages()
    if names:
        assert block.code.endswith(f"[errors#{names[-1]}]\n")
        for name in set(names):
            assert any(is_in(block.code, message) for message in known if message.name == name)
    else:
        spoken = [message for message in known if message.pattern.strip(".*")]
        for line in block.code.splitlines():
            assert any(is_in(line, message) for message in spoken), line


def is_in(text: str, message: Message) -> bool:
    return is_shown(message, f"```text\n{text.rstrip()}\n```")


@pytest.mark.parametrize("page", ["README.md", "index.md"])
def test_the_refusal_of_a_first_page_is_a_real_one(page: str, tmp_path: Path) -> None:
    corrupt = {17: (float("inf"), 0.06)}
    write_checkpoint(
        tmp_path, {i: corrupt.get(i, (0.05, 0.06)) for i in range(32)}, num_hidden_layers=32
    )
    layers = [
        LoadedScales(f"model.layers.{i}.self_attn.attn", None, None, "fp8", torch.device("cpu"))
        for i in range(32)
    ]
    prepared = (str(tmp_path), [str(tmp_path / "model.safetensors")], True)
    with pytest.raises(KVScaleError) as refused:
        LoadGate("vLLM", "strict").before_weights(Load(str(tmp_path)), layers, prepared)
    said = f"kvcache_plugin.errors.KVScaleError: {refused.value}".split()
    shown = [b.code.split() for b in blocks() if b.page == page and b.language == "text"]
    assert said in shown, refused.value


# What somebody types into a shell

#: Programs of others, with which nothing of ours can be wrong.
_OTHERS: Final = ("cd", "rm", "export", "source", "git", "curl")


def check_make(arguments: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^([\w-]+):", makefile, re.MULTILINE)
    assert {a for a in arguments if not a.startswith("-") and "=" not in a} <= set(targets)


def check_ours(arguments: list[str]) -> None:
    cli.parser().parse_args(arguments)  # exits where it does not understand them


def check_pip(arguments: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert arguments[0] in ("install", "uninstall")
    for argument in arguments[1:]:
        found = re.fullmatch(r"(\.|kvcache-plugin|kvcache_plugin)\[(.+)\]", argument)
        if found:
            assert set(found[2].split(",")) <= set(project["optional-dependencies"])
        elif argument.startswith("kv"):
            assert argument == project["name"]


def check_python(arguments: list[str]) -> None:
    if arguments[0] == "-m":
        package, *_ = arguments[1].split(".")
        if package in ENGINES:
            assert len(arguments) > 2
        else:
            assert importlib.util.find_spec(arguments[1]), arguments[1]
    elif arguments[0] != "-c":
        assert (ROOT / arguments[0]).is_file(), arguments[0]


ENGINES: Final = ("vllm", "sglang")


def check_options(arguments: list[str]) -> None:
    """Of a command that leaves out what it must be given."""
    known = {"": cli.parser(), **commands()}
    name = "" if arguments[0].startswith("-") else arguments[0]
    options = {a.partition("=")[0] for a in arguments if a.startswith("-")}
    assert options <= set(known[name]._option_string_actions), options


def check_command(words: list[str]) -> None:
    program, arguments = words[0].rpartition("/")[2], words[1:]
    if program == "make":
        check_make(arguments)
    elif program == "kvcache-plugin":
        check_ours(arguments)
    elif program == "pip":
        check_pip(arguments)
    elif program in ("python", "python3"):
        check_python(arguments)
    elif (ROOT / words[0]).is_file():
        pass
    else:
        assert program in (*_OTHERS, *ENGINES), program


@pytest.mark.parametrize("block", written_in("bash", besides=TUTORIAL))
def test_what_a_shell_is_given_is_understood(block: Block) -> None:
    subprocess.run(["bash", "-n"], input=block.code, text=True, check=True)
    for words in shell_commands(block.code):
        check_command(words)


@pytest.mark.parametrize(
    "line",
    [
        "make tset",
        "kvcache-plugin chekc PATH",
        "kvcache-plugin check PATH --jsno",
        'pip install ".[clli]"',
        "pip install kvcache-plugn",
        "python -m kvcache_plugin.nothing",
        "python no_such_script.py",
        "kvcache_plugin doctor",
    ],
)
def test_a_command_that_does_not_exist_is_found(line: str) -> None:
    (words,) = shell_commands(line)
    with pytest.raises((AssertionError, SystemExit)):
        check_command(words)


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_commands_within_a_sentence_exist(page: Path) -> None:
    checks = {"kvcache-plugin": check_options, "make": check_make, "python": check_python}
    for command in re.findall(r"`([^`]+)`", prose(page)):
        program, *arguments = command.split()
        if program in checks and arguments:
            checks[program](arguments)
