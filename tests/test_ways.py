"""The pictures of docs/ways.md show modules that are there, and calls that can be made."""

from __future__ import annotations

import importlib
import re
from typing import TYPE_CHECKING, Final, NamedTuple

import pytest

from tests.pages.markdown import DOCS
from tests.test_house import PACKAGE, imports_of, name_of

if TYPE_CHECKING:
    from pathlib import Path

_PICTURE: Final = re.compile(r"^## (\w+)\n\n```mermaid\nflowchart TD\n(.*?)^```$", re.M | re.S)
_MODULE: Final = re.compile(r'(\w+)\["([\w/]+\.py)"\]')
_OTHER: Final = re.compile(r'(\w+)\(\["[^"\]]+"\]\)')
_ARROW: Final = re.compile(r"(\w+) (-->|-\.->)(?:\|([^|]+)\|)? (\w+)")


class Arrow(NamedTuple):
    start: str
    by_hook: bool
    label: str
    end: str


class Picture(NamedTuple):
    """One of them.

    :param modules: ours, by their names in the picture.
    :param others: what is not ours.
    """

    name: str
    modules: dict[str, Path]
    others: set[str]
    arrows: list[Arrow]


def picture(name: str, drawn: str) -> Picture:
    found = Picture(name, {}, set(), [])
    for line in filter(None, map(str.strip, drawn.splitlines())):
        if module := _MODULE.fullmatch(line):
            assert module[1] not in found.modules
            found.modules[module[1]] = PACKAGE / module[2]
        elif other := _OTHER.fullmatch(line):
            found.others.add(other[1])
        else:
            arrow = _ARROW.fullmatch(line)
            assert arrow, f"not understood: {line}"
            found.arrows.append(Arrow(arrow[1], arrow[2] == "-.->", arrow[3] or "", arrow[4]))
    return found


PICTURES: Final = [
    picture(*found.groups())
    for found in _PICTURE.finditer((DOCS / "ways.md").read_text(encoding="utf-8"))
]


def wrong(shown: Picture) -> list[str]:
    """The arrows between two modules of ours that are neither an import nor a hook."""
    found = []
    for arrow in shown.arrows:
        if {arrow.start, arrow.end} & shown.others:
            continue
        start, end = name_of(shown.modules[arrow.start]), name_of(shown.modules[arrow.end])
        if arrow.by_hook:
            hook = getattr(importlib.import_module(end), arrow.label, None)
            is_there = start.endswith(".serving") and hasattr(hook, "kvcache_plugin_impl")
        else:
            is_there = end in imports_of(shown.modules[arrow.start])
        if not is_there:
            found.append(f"{start} -> {end}")
    return found


def test_there_is_one_for_each_way() -> None:
    assert [shown.name for shown in PICTURES] == ["Load", "Write", "Scan"]
    blocks = (DOCS / "ways.md").read_text(encoding="utf-8").count("```mermaid")
    assert blocks == len(PICTURES)


@pytest.mark.parametrize("shown", PICTURES, ids=lambda shown: shown.name)
def test_modules_are_there_and_each_has_an_arrow(shown: Picture) -> None:
    for module in shown.modules.values():
        assert module.is_file(), module
    ends = {end for arrow in shown.arrows for end in (arrow.start, arrow.end)}
    assert ends == shown.modules.keys() | shown.others


@pytest.mark.parametrize("shown", PICTURES, ids=lambda shown: shown.name)
def test_arrows_are_imports_or_hooks(shown: Picture) -> None:
    assert any(arrow.start in shown.modules for arrow in shown.arrows)
    assert not wrong(shown)


@pytest.mark.parametrize("shown", PICTURES, ids=lambda shown: shown.name)
def test_what_is_ours_is_reached_from_outside(shown: Picture) -> None:
    reached = {start for start, *_ in shown.arrows} & shown.others
    while more := {a.end for a in shown.arrows if a.start in reached} - reached:
        reached |= more
    assert shown.modules.keys() <= reached


@pytest.mark.parametrize(
    "drawn",
    [
        'a["scales.py"]\nb["manager.py"]\na --> b',
        'a["serving.py"]\nb["hardware/cpu_fast.py"]\na --> b',
        'a["serving.py"]\nb["hardware/cpu_fast.py"]\na -.->|no_such_hook| b',
        'a["calls.py"]\nb["hardware/cpu_fast.py"]\na -.->|quantize_kv| b',
    ],
)
def test_an_arrow_that_is_not_there_is_found(drawn: str) -> None:
    assert len(wrong(picture("Drawn", drawn))) == 1
