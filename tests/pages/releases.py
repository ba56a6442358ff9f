"""The releases of the engines that were run, and what held in each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.pages import markdown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache_plugin.hosts.releases import Release

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
    """A line for each release."""
    return markdown.table(_COLUMNS, map(_row, releases))


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
