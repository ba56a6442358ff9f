"""Runs the plugin in several releases of each engine: ``python -m tests.engine.matrix``.

What came of it goes into the record that doctor reads, and into the table of docs/releases.md.
The newest release of each engine runs in its environment (venvs.py), an older one there too, with
a folder of its own in front. Some two minutes for each release.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcache_plugin.hosts.engines import ENGINES
from kvcache_plugin.hosts.releases import PROVEN, RECORD, LeftOut, Release, order, read_releases
from tests.engine import venvs
from tests.engine.checkout import install_plugin
from tests.engine.checkpoints import Checkpoint
from tests.engine.serving import run_python, serve
from tests.pages.parts import write_pages

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.engine.serving import Run

_EXAMINED = "EXAMINED "
# So small that K and V are cut off: lost scales would show in the tokens, on any CPU.
_SOUND = Checkpoint("sound", {0: (0.005, 0.003), 1: (0.004, 0.002)})
_CORRUPT = Checkpoint("corrupt", {0: (0.05, 0.06), 1: (math.nan, 1.0)})
_VALUE = "k_scale=nan"
_REASONS = {
    (
        "vllm",
        "0.30.0",
        "vllm.v1.attention.backend.AttentionImpl.fused_qk_norm_mrope_kvcache_supported",
    ): "it has no such fusion, so none passes the hook by",
}
"""Why a seam that a release does not have does no harm there: found by reading, not by running."""

_TITLES = {engine.package: engine.title for engine in ENGINES}


class NothingLearntError(RuntimeError):
    """A release does not run here, whether with the plugin or without; the message has its log."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", choices=venvs.ENGINES)
    parser.add_argument("--release", help="0.31.0 ...; default: all that the record is about")
    arguments = parser.parse_args()
    asked = [
        (engine, release)
        for engine, release in _everything()
        if arguments.engine in (None, engine) and arguments.release in (None, release)
    ]
    if not asked:
        known = ", ".join(f"{engine} {release}" for engine, release in _everything())
        parser.error(f"no such release; the known ones are {known}")
    all_proven = True
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        plugin = install_plugin(scratch)
        for engine, release in asked:
            try:
                ran = _run(engine, release, plugin, scratch)
            except NothingLearntError as error:
                print(error, file=sys.stderr)
                all_proven = False
                continue
            _record(ran)
            print(f"{ran.engine} {release}: {ran.verdict}", flush=True)
            all_proven &= ran.verdict.word == PROVEN
    return 0 if all_proven else 1


def _everything() -> list[tuple[str, str]]:
    """Every release that can be run, the newest of each engine first."""
    return [
        (engine, release)
        for engine in venvs.ENGINES
        for release in (venvs.newest(engine), *venvs.OLDER[engine])
    ]


def _run(engine: str, release: str, plugin: Path, scratch: Path) -> Release:
    """Examines a release and serves three times: sound without and with the plugin, and corrupt.

    :raises NothingLearntError: what is wrong is not the plugin's doing.
    """
    older = release != venvs.newest(engine)
    site = [venvs.ensure_site(f"{engine}-{release}")] if older else []
    examined = _examine(engine, [*site, plugin])
    versions = {examined["version"], examined["imported"]}
    if versions != {release}:
        raise NothingLearntError(f"{engine} {release} was to run, and {versions} did")
    sound, corrupt = _SOUND.write(scratch), _CORRUPT.write(scratch)
    alone = serve(engine, sound, site=site)
    if not alone.served or alone.tokens is None:
        raise NothingLearntError(f"{engine} {release} serves nothing by itself:\n{alone.log}")
    seams = examined["seams"]
    return Release(
        engine=_TITLES[engine],
        release=release,
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        plugin=examined["plugin"],
        packages=examined["packages"],
        seams=len(seams),
        left_out=tuple(
            LeftOut(path, problem, _REASONS.get((engine, release, path), ""))
            for path, problem in seams.items()
            if problem
        ),
        register_failure=register_failure(examined),
        sound_failure=sound_failure(alone, serve(engine, sound, site=[*site, plugin]), seams),
        corrupt_failure=corrupt_failure(serve(engine, corrupt, site=[*site, plugin])),
    )


def _examine(engine: str, site: Sequence[Path]) -> dict[str, Any]:
    script = Path(__file__).with_name("examine_release.py")
    returncode, log = run_python(engine, [str(script), engine], site=site)
    lines = [line for line in log.splitlines() if line.startswith(_EXAMINED)]
    if returncode or len(lines) != 1:
        raise NothingLearntError(f"{engine} could not be examined:\n{log}")
    examined: dict[str, Any] = json.loads(lines[0].removeprefix(_EXAMINED))
    return examined


def register_failure(examined: dict[str, Any]) -> str:
    """What ``register()`` did wrong, empty if nothing."""
    if examined["raised"]:
        return f"register() raised {examined['raised']}"
    said = _unexpected(examined["warnings"], examined["seams"])
    return f"register() warned: {said[0]}" if said else ""


def _unexpected(lines: Sequence[str], seams: Mapping[str, str]) -> list[str]:
    """Warnings of ours, without those of seams that do not fit and are left out."""
    problems = [problem for problem in seams.values() if problem]
    return [
        line
        for line in lines
        if "leaves out a seam" not in line or not any(problem in line for problem in problems)
    ]


def sound_failure(alone: Run, run: Run, seams: Mapping[str, str]) -> str:
    """What the plugin changed in how a sound checkpoint is served, empty if nothing."""
    if not run.served:
        return f"a sound checkpoint was not served, exit status {run.returncode}"
    if run.tokens != alone.tokens:
        return f"a sound checkpoint gave {run.tokens}, and without the plugin {alone.tokens}"
    number = len(run.active)
    if number != 1:
        return f"{number} lines said that the plugin is active"
    said = _unexpected(run.complaints, seams)
    return f"with a sound checkpoint the plugin warned: {said[0]}" if said else ""


def corrupt_failure(run: Run) -> str:
    """What was wrong with the refusal of the corrupt checkpoint, empty if nothing."""
    if run.returncode == 0 or run.tokens is not None:
        return "a NaN in layer 1 did not stop the load"
    if run.named_layers != {1} or _VALUE not in run.log:
        return "the end of the load with a NaN in layer 1 did not name the layer and the value"
    return ""


def _record(ran: Release) -> None:
    """Puts one release into the record and the page; those that cannot be run any more go."""
    known = {(_TITLES[engine], release) for engine, release in _everything()}
    kept = [each for each in read_releases() if (each.engine, each.release) in known]
    releases = [ran, *(e for e in kept if (e.engine, e.release) != (ran.engine, ran.release))]
    titles = list(_TITLES.values())
    releases.sort(key=lambda each: order(each.release), reverse=True)
    releases.sort(key=lambda each: titles.index(each.engine))
    written = json.dumps([dataclasses.asdict(each) for each in releases], indent=1)
    RECORD.write_text(written + "\n", encoding="utf-8")
    write_pages()


if __name__ == "__main__":
    sys.exit(main())
