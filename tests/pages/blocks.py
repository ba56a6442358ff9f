"""The fenced blocks of the pages, and what is around them."""

from __future__ import annotations

import re
import shlex
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from tests.pages.markdown import pages

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_FENCED = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)(?P<title> title=\S+)?\n(?P<code>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    """A fenced block.

    :param title: the file that it is, where it is one.
    """

    page: str
    line: int
    language: str
    title: str
    code: str


@cache
def blocks() -> tuple[Block, ...]:
    """Those of all pages."""
    return tuple(block for page in pages() for block in blocks_of(page))


def blocks_of(page: Path) -> Iterator[Block]:
    """Those of one page."""
    text = page.read_text(encoding="utf-8")
    found = list(_FENCED.finditer(text))
    fences = re.findall(r"^ *```", text, re.MULTILINE)
    assert len(fences) == 2 * len(found), f"{page.name} has a block that is not understood"
    for block in found:
        yield Block(
            page.name,
            text.count("\n", 0, block.start()) + 2,
            block["language"],
            (block["title"] or "").removeprefix(" title=").strip('"'),
            re.sub(f"^{block['indent']}", "", block["code"], flags=re.MULTILINE),
        )


def prose(page: Path) -> str:
    """A page without its blocks."""
    return _FENCED.sub("", page.read_text(encoding="utf-8"))


def shell_commands(code: str) -> list[list[str]]:
    """The words of each command, without the variables that are set for it."""
    found = []
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.match(r"[A-Z_]+=", words[0]):
            del words[0]
        if words:
            found.append(words)
    return found
