"""Gathers what decides whether the plugin works here: engines, seams, implementations, switches.

No engine is imported and no GPU is touched.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcache_plugin.hosts import fitting, seams
from kvcache_plugin.hosts.engines import ENGINES, Engine
from kvcache_plugin.manager import Implementation, Manager
from kvcache_plugin.settings import (
    BLOCK,
    COVERAGE,
    MODE,
    REPORT,
    VLLM_WRITES,
    Settings,
    read_settings,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class SeamStatus:
    """One engine symbol that we touch. ``problem`` is empty when it fits."""

    path: str
    purpose: str
    problem: str


@dataclass(frozen=True)
class EngineStatus:
    """One engine.

    :param version: ``None`` when it is not installed.
    :param not_loaded: why the engine would not load the plugin, empty when it would.
    """

    title: str
    version: str | None
    not_loaded: str
    seams: tuple[SeamStatus, ...]


@dataclass(frozen=True)
class Examination:
    """All of it, what is wrong, and what is no fault and yet means that nothing is checked."""

    settings: Settings
    engines: tuple[EngineStatus, ...]
    implementations: tuple[Implementation, ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...]


def examine() -> Examination:
    settings = read_settings()
    manager = Manager(settings.block)
    manager.discover()
    engines = tuple(_examine_engine(engine) for engine in ENGINES)
    return Examination(
        settings,
        engines,
        manager.implementations,
        (
            *settings.problems,
            *filter(None, [manager.block_problem]),
            *(problem for engine in engines for problem in _problems(engine)),
            *(
                f"implementation {found} is left out: {found.left_out}"
                for found in manager.implementations
                if found.is_broken
            ),
        ),
        tuple(_notes(settings, engines)),
    )


def _notes(settings: Settings, engines: tuple[EngineStatus, ...]) -> Iterator[str]:
    if all(engine.version is None for engine in engines):
        yield (
            f"no engine is installed in {sys.prefix}, so no checkpoint is checked; install "
            "kvcache-plugin with the pip of the engine's environment"
        )
    if settings.mode == "off":
        yield f"{MODE.name}=off, so no checkpoint is checked"


def _examine_engine(engine: Engine) -> EngineStatus:
    version = engine.version
    if version is None:
        return EngineStatus(engine.title, None, "", ())
    return EngineStatus(
        engine.title,
        version,
        engine.why_not_loaded(),
        tuple(
            SeamStatus(seam.path, seam.purpose, fitting.check_source(seam))
            for seam in seams.SEAMS
            if seam.engine == engine.package
        ),
    )


def _problems(engine: EngineStatus) -> list[str]:
    not_loaded = [f"{engine.title} does not load the plugin: {engine.not_loaded}"]
    return [
        *(not_loaded if engine.not_loaded else []),
        *(f"{engine.title}: {seam.problem}" for seam in engine.seams if seam.problem),
    ]


def switches(settings: Settings) -> dict[str, str]:
    """The switches by name, with the values that hold."""
    return {
        MODE.name: settings.mode,
        BLOCK.name: ",".join(sorted(settings.block)),
        COVERAGE.name: settings.coverage,
        REPORT.name: settings.report,
        VLLM_WRITES.name: settings.vllm_writes,
    }
