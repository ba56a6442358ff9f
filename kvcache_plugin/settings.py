"""The switches: every ``KVCACHE_PLUGIN_*`` environment variable, in one table."""

from __future__ import annotations

import difflib
import logging
import os
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

logger = logging.getLogger(__name__)

PREFIX: Final = "KVCACHE_PLUGIN_"


@dataclass(frozen=True)
class Switch:
    """One environment variable.

    :param values: the values that it takes, ``None`` for a free text.
    :param default: what holds when it is not set.
    """

    name: str
    meaning: str
    default: str
    values: tuple[str, ...] | None = None


MODE: Final = Switch(
    "KVCACHE_PLUGIN_MODE",
    "What a corrupt scale does to a load: strict stops it, warn logs it and lets the engine go on "
    "as it would without the plugin, off hooks nothing at all.",
    "strict",
    ("strict", "warn", "off"),
)
BLOCK: Final = Switch(
    "KVCACHE_PLUGIN_BLOCK",
    "Names of implementations to leave out, separated by commas. A blocked one is not imported.",
    "",
)
SWITCHES: Final = (MODE, BLOCK)


@dataclass(frozen=True)
class Settings:
    """The switches as they are set.

    :param problems: a sentence for each unknown name or value; the default holds in its place.
    """

    mode: str
    block: frozenset[str]
    problems: tuple[str, ...] = ()


def read_settings(environ: Mapping[str, str] = os.environ) -> Settings:
    """Read every switch; what is not understood is a problem in the result, never an exception."""
    problems = [
        f"{name} is no switch of kvcache_plugin{_meant(name)}; the switches are "
        f"{', '.join(switch.name for switch in SWITCHES)}"
        for name in sorted(environ)
        if name.startswith(PREFIX) and name not in {switch.name for switch in SWITCHES}
    ]
    mode = environ.get(MODE.name, "").strip().lower() or MODE.default
    if MODE.values and mode not in MODE.values:
        problems.append(
            f"{MODE.name}={environ[MODE.name]!r} is not one of {', '.join(MODE.values)}; "
            f"{MODE.default} holds"
        )
        mode = MODE.default
    names = (name.strip() for name in environ.get(BLOCK.name, "").split(","))
    return Settings(mode, frozenset(filter(None, names)), tuple(problems))


def report_problems(settings: Settings) -> None:
    """Log each problem, once in a process."""
    for problem in settings.problems:
        _report(problem)


@cache
def _report(problem: str) -> None:
    logger.warning("%s", problem)


def _meant(name: str) -> str:
    close = difflib.get_close_matches(name, [switch.name for switch in SWITCHES], n=1)
    return f" (is {close[0]} meant?)" if close else ""
