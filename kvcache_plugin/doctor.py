"""Gathers what decides whether the plugin works here: engines, seams, implementations, switches.

No engine is imported and no GPU is touched.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcache_plugin.hosts import fitting, seams
from kvcache_plugin.hosts.engines import ENGINES, Engine
from kvcache_plugin.hosts.releases import KNOWN_NOT_TO_WORK, Verdict, read_releases, verdict
from kvcache_plugin.hosts.written import WritePath, write_paths
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
    """One engine symbol that we touch.

    :param problem: what does not fit, empty when it fits.
    :param harmless: why that does no harm in this release, empty where it is not known to.
    """

    path: str
    purpose: str
    problem: str
    harmless: str


@dataclass(frozen=True)
class EngineStatus:
    """One engine.

    :param version: ``None`` when it is not installed.
    :param release: what is known of that version, ``None`` without one.
    :param not_loaded: why the engine would not load the plugin, empty when it would.
    :param writes: who writes its caches.
    """

    title: str
    version: str | None
    release: Verdict | None
    not_loaded: str
    seams: tuple[SeamStatus, ...]
    writes: tuple[WritePath, ...] = ()


@dataclass(frozen=True)
class Examination:
    """All of it, what is wrong, and what is no fault and yet worth knowing."""

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
    for engine in engines:
        for seam in engine.seams:
            if seam.harmless:
                yield f"{engine.title}: {seam.problem}, which does no harm: {seam.harmless}"


def _examine_engine(engine: Engine) -> EngineStatus:
    version = engine.version
    if version is None:
        return EngineStatus(engine.title, None, None, "", ())
    releases = read_releases()
    harmless = {
        left_out.seam: left_out.reason
        for release in releases
        if (release.engine, release.release) == (engine.title, version)
        for left_out in release.left_out
    }
    return EngineStatus(
        engine.title,
        version,
        verdict(releases, engine.title, version),
        engine.why_not_loaded(),
        tuple(
            SeamStatus(
                seam.path, seam.purpose, problem, harmless.get(seam.path, "") * bool(problem)
            )
            for seam in seams.SEAMS
            if seam.engine == engine.package
            for problem in [fitting.check_source(seam)]
        ),
        write_paths(engine.title),
    )


def _problems(engine: EngineStatus) -> list[str]:
    not_loaded = [f"{engine.title} does not load the plugin: {engine.not_loaded}"]
    does_not_work = engine.release is not None and engine.release.word == KNOWN_NOT_TO_WORK
    return [
        *(not_loaded if engine.not_loaded else []),
        *([f"{engine.title} {engine.version}: {engine.release}"] if does_not_work else []),
        *(
            f"{engine.title}: {seam.problem}"
            for seam in engine.seams
            if seam.problem and not seam.harmless
        ),
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
