"""The table of docs/releases.md, made from the record of the releases that were run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache_plugin.hosts.releases import Release

__all__ = ["PAGE", "table", "write_table"]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "releases.md"
_TABLE = re.compile(r"^\| engine \|.*?(?=^$)", re.MULTILINE | re.DOTALL)
_COLUMNS = (
    "engine",
    "verdict",
    "`register()` runs",
    "seams that fit",
    "sound checkpoint: same tokens, one line",
    "NaN refused with layer and value",
    "ran with",
    "date, plugin",
)


def table(releases: Sequence[Release]) -> str:
    """The table, with a line for each release and the end of the last line."""
    lines = [_line(_COLUMNS), "|---" * len(_COLUMNS) + "|", *(_line(_row(r)) for r in releases)]
    return "".join(f"{line}\n" for line in lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _row(release: Release) -> tuple[str, ...]:
    fitting = f"{release.seams - len(release.left_out)} of {release.seams}"
    problems = "".join(
        f"; {each.problem}{f' ({each.reason})' if each.reason else ''}" for each in release.left_out
    )
    return (
        f"{release.engine} {release.release}",
        release.verdict.word,
        _outcome(release.register_failure),
        fitting + problems,
        _outcome(release.sound_failure),
        _outcome(release.corrupt_failure),
        ", ".join(f"{name} {version}" for name, version in release.packages.items()),
        f"{release.date}, {release.plugin}",
    )


def _outcome(failure: str) -> str:
    return f"no: {failure}" if failure else "yes"


def write_table(releases: Sequence[Release]) -> None:
    """Puts the table into the page, in the place of the one that is there.

    :raises ValueError: the page has no table to replace.
    """
    page = PAGE.read_text(encoding="utf-8")
    if not _TABLE.search(page):
        raise ValueError(f"{PAGE} has no table that begins with '| engine |'")
    PAGE.write_text(_TABLE.sub(lambda _: table(releases), page, count=1), encoding="utf-8")
