"""Gathers what decides whether the plugin works here: engines, seams, implementations, switches.

No engine is imported and no GPU is touched.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcache_plugin.errors import KVCacheError
from kvcache_plugin.hosts import fitting, seams
from kvcache_plugin.hosts.engines import ENGINES, Engine
from kvcache_plugin.hosts.releases import (
    KNOWN_NOT_TO_WORK,
    Release,
    Verdict,
    read_releases,
    verdict,
)
from kvcache_plugin.hosts.write_paths import WritePath, write_paths
from kvcache_plugin.manager import Manager
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

    from kvcache_plugin.explaining import Implementation
    from kvcache_plugin.hosts.seams import Seam


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
    releases, unread = _read_record()
    engines = tuple(_examine_engine(engine, releases, settings) for engine in ENGINES)
    return Examination(
        settings,
        engines,
        manager.implementations,
        (
            *settings.problems,
            *filter(None, [manager.block_problem, unread]),
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


def _read_record() -> tuple[tuple[Release, ...], str]:
    """The releases that were run, and why they are not known; what is beside them is told still."""
    try:
        return read_releases(), ""
    except KVCacheError as error:
        return (), str(error)


def _examine_engine(
    engine: Engine, releases: tuple[Release, ...], settings: Settings
) -> EngineStatus:
    version = engine.version
    if version is None:
        return EngineStatus(engine.title, None, None, "", ())
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
            _examine_seam(seam, harmless.get(seam.path, ""))
            for seam in seams.SEAMS
            if seam.engine == engine.package
        ),
        write_paths(engine.title, vllm_writes=settings.vllm_writes),
    )


def _examine_seam(seam: Seam, harmless: str) -> SeamStatus:
    """:param harmless: why it does no harm if the seam does not fit, empty where it would."""
    problem = fitting.check_source(seam)
    return SeamStatus(seam.path, seam.purpose, problem, harmless if problem else "")


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
