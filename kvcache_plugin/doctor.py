"""Gathers what decides whether the plugin works here: engines, seams, implementations, switches.

No engine is imported and no GPU is touched.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcache_plugin.hosts import seams
from kvcache_plugin.hosts.engines import ENGINES, Engine
from kvcache_plugin.manager import Implementation, Manager
from kvcache_plugin.settings import BLOCK, MODE, Settings, read_settings


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
    """All of it, and the sentences about what is wrong."""

    settings: Settings
    engines: tuple[EngineStatus, ...]
    implementations: tuple[Implementation, ...]
    problems: tuple[str, ...]


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
    )


def _examine_engine(engine: Engine) -> EngineStatus:
    version = engine.version
    if version is None:
        return EngineStatus(engine.title, None, "", ())
    return EngineStatus(
        engine.title,
        version,
        engine.why_not_loaded(),
        tuple(
            SeamStatus(seam.path, seam.purpose, seams.check_source(seam))
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
    return {MODE.name: settings.mode, BLOCK.name: ",".join(sorted(settings.block))}
