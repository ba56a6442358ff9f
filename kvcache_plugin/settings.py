"""The switches: every ``KVCACHE_PLUGIN_*`` environment variable, in one table."""

from __future__ import annotations

import difflib
import logging
import os
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Final

from kvcache_plugin.errors import anchored

if TYPE_CHECKING:
    from collections.abc import Mapping

logger = logging.getLogger(__name__)

PREFIX: Final = "KVCACHE_PLUGIN_"


@dataclass(frozen=True)
class Switch:
    """One environment variable.

    :param meaning: what it does, in Markdown: ``docs/switches.md`` shows it.
    :param default: what holds when it is not set.
    :param values: the values that it takes, ``None`` for a free text.
    :param takes: what the free text is.
    """

    name: str
    meaning: str
    default: str
    values: tuple[str, ...] | None = None
    takes: str = ""


MODE: Final = Switch(
    "KVCACHE_PLUGIN_MODE",
    "What a corrupt scale does to a load. `strict`: it stops the load. `warn`: it is logged, and "
    "the engine goes on as it would without the plugin. `off`: nothing is hooked.",
    "strict",
    ("strict", "warn", "off"),
)
BLOCK: Final = Switch(
    "KVCACHE_PLUGIN_BLOCK",
    "Implementations to leave out, by the names of their entry points, which "
    "`kvcache-plugin plugins` lists. A blocked one is not imported. With nothing left for a device "
    "its scales are not converted: the engine's load goes on, and an error in its log says so.",
    "",
    takes="names, separated by commas",
)
COVERAGE: Final = Switch(
    "KVCACHE_PLUGIN_COVERAGE",
    "What a scale that is in the files and does not reach its layer does to a load. `warn`: it is "
    "logged, with the layers, its names and the reason where it is known. `error`: it stops the "
    "load, also where `KVCACHE_PLUGIN_MODE` is `warn`.",
    "warn",
    ("warn", "error"),
)
REPORT: Final = Switch(
    "KVCACHE_PLUGIN_REPORT",
    "What came of each load, as JSON. Each process that loads a model writes a file of its own, "
    "with its number before the ending: `report.json` becomes `report.4711.json`.",
    "",
    takes="a file",
)
VLLM_WRITES: Final = Switch(
    "KVCACHE_PLUGIN_VLLM_WRITES",
    "What writes an FP8 KV cache of vLLM. `auto`: vLLM's own kernel, unless an implementation that "
    "is not built in quantizes for the device and format. `hook`: K and V are rounded by "
    "`quantize_kv` first wherever the attention backend lets them be; where it does not, a warning "
    "says so.",
    "auto",
    ("auto", "hook"),
)
SWITCHES: Final = (MODE, BLOCK, COVERAGE, REPORT, VLLM_WRITES)


@dataclass(frozen=True)
class Settings:
    """The switches as they are set.

    :param problems: a sentence for each unknown name or value; the default holds in its place.
    """

    mode: str
    block: frozenset[str]
    problems: tuple[str, ...] = ()
    coverage: str = COVERAGE.default
    report: str = REPORT.default
    vllm_writes: str = VLLM_WRITES.default


def read_settings(environ: Mapping[str, str] = os.environ) -> Settings:
    """Read every switch; what is not understood is a problem in the result, never an exception."""
    problems = [
        anchored(
            f"{name} is no switch of kvcache_plugin{_meant(name)}; the switches are "
            f"{', '.join(switch.name for switch in SWITCHES)}",
            "switch-unknown",
        )
        for name in sorted(environ)
        if name.startswith(PREFIX) and name not in {switch.name for switch in SWITCHES}
    ]
    mode = _one_of(MODE, environ, problems)
    coverage = _one_of(COVERAGE, environ, problems)
    names = (name.strip() for name in environ.get(BLOCK.name, "").split(","))
    block = frozenset(filter(None, names))
    report = environ.get(REPORT.name, "").strip() or REPORT.default
    vllm_writes = _one_of(VLLM_WRITES, environ, problems)
    return Settings(mode, block, tuple(problems), coverage, report, vllm_writes)


def _one_of(switch: Switch, environ: Mapping[str, str], problems: list[str]) -> str:
    """The value of a switch that takes a few; another one is a problem, and the default holds."""
    value = environ.get(switch.name, "").strip().lower() or switch.default
    known = switch.values or ()
    if value in known:
        return value
    problems.append(
        anchored(
            f"{switch.name}={environ[switch.name]!r} is not one of {', '.join(known)}; "
            f"{switch.default} holds",
            "switch-value-unknown",
        )
    )
    return switch.default


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
