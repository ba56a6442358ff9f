"""``kvcache-plugin doctor``: whether the plugin works with the engines that are installed."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from kvcache_plugin import __version__
from kvcache_plugin.commands.common import FINE, WRONG, output_aside, print_json
from kvcache_plugin.doctor import examine, switches
from kvcache_plugin.terminal import print_table

if TYPE_CHECKING:
    import argparse

    from kvcache_plugin.doctor import EngineStatus, Examination


def run(arguments: argparse.Namespace) -> int:
    with output_aside():
        found = examine()
    if arguments.json:
        print_json(_as_json(found))
    else:
        _print(found)
    return WRONG if found.problems else FINE


def _as_json(found: Examination) -> object:
    return {
        "version": __version__,
        "switches": switches(found.settings),
        "engines": [asdict(engine) for engine in found.engines],
        "implementations": [asdict(i) for i in found.implementations],
        "problems": found.problems,
        "notes": found.notes,
    }


def _print(found: Examination) -> None:
    print(f"kvcache-plugin {__version__}\n")
    print_table(("switch", "value"), list(switches(found.settings).items()))
    for engine in found.engines:
        _print_engine(engine)
    print()
    print_table(
        ("implementation", "distribution", "state"),
        [(i.name, i.distribution, i.left_out or "loaded") for i in found.implementations],
    )
    print()
    for note in found.notes:
        print(f"note: {note}")
    for problem in found.problems:
        print(f"problem: {problem}")
    if not found.problems:
        is_here = any(engine.version for engine in found.engines)
        print("no problem found" + (", and no engine either" if not is_here else ""))


def _print_engine(engine: EngineStatus) -> None:
    print(f"\n{_engine_line(engine)}")
    if engine.release:
        print(f"{engine.title} {engine.version}: {engine.release}")
    if engine.seams:
        print_table(
            ("seam", "state", "what we do there"),
            [(s.path, s.problem or "fits", s.purpose) for s in engine.seams],
        )
        print()
        print_table(
            ("write", "format", "codes by", "why"),
            [(w.what, w.family, w.writer, w.why) for w in engine.writes],
        )


def _engine_line(engine: EngineStatus) -> str:
    if engine.version is None:
        return f"{engine.title} is not installed here"
    loads = f"does not load us: {engine.not_loaded}" if engine.not_loaded else "loads us"
    return f"{engine.title} {engine.version} {loads}"
