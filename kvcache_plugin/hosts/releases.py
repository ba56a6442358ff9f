"""The releases of the engines that the plugin was run in, and what that says of one.

The record, ``releases.json``, is written by ``python -m tests.engine.matrix``, which runs them.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from kvcache_plugin.errors import KVCacheError, counted, shown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

RECORD: Final = Path(__file__).with_name("releases.json")

Word: TypeAlias = Literal["proven", "known not to work", "unknown"]

PROVEN: Final = "proven"
KNOWN_NOT_TO_WORK: Final = "known not to work"
UNKNOWN: Final = "unknown"
_LOOK: Final = "the seams below say whether it fits"
#: 0.32.0 or 0.5.15.post1; anything more is somebody's build, or comes before a release.
_RELEASE: Final = re.compile(r"(\d+(?:\.\d+)*)(?:\.post(\d+))?")


@dataclass(frozen=True)
class Verdict:
    """What is known of a version of an engine."""

    word: Word
    detail: str

    def __str__(self) -> str:
        return f"{self.word}: {self.detail}"


@dataclass(frozen=True)
class LeftOut:
    """A seam that a release does not have as we rely on it.

    :param problem: what is wrong with it.
    :param reason: why that does no harm there, empty where nobody has looked into it.
    """

    seam: str
    problem: str
    reason: str = ""


@dataclass(frozen=True)
class Release:
    """A release of an engine, and what held when it ran on a CPU with the plugin and without.

    :param engine: the engine's title.
    :param date: when it ran, ``2026-11-30``.
    :param plugin: the version of the plugin that it ran with.
    :param packages: versions of what else decides, by name.
    :param seams: how many symbols of this engine we touch.
    :param left_out: those that do not fit this release; the plugin works without them.
    :param register_failure: what ``register()`` did wrong, empty if nothing.
    :param sound_failure: what was wrong with the sound checkpoint's serving, empty if nothing.
    :param corrupt_failure: what was wrong with a corrupt one's refusal, empty if nothing.
    :raises KVCacheError: the release or the date is no such thing.
    """

    engine: str
    release: str
    date: str
    plugin: str
    packages: Mapping[str, str]
    seams: int
    left_out: tuple[LeftOut, ...]
    register_failure: str = ""
    sound_failure: str = ""
    corrupt_failure: str = ""

    def __post_init__(self) -> None:
        order(self.release)
        if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", self.date):
            raise KVCacheError(
                f"{self.engine} {self.release}: {self.date!r} is no date",
                name="releases-unreadable",
            )

    @property
    def verdict(self) -> Verdict:
        """Proven where all of it held."""
        failures = (self.register_failure, self.sound_failure, self.corrupt_failure)
        ran = f"on a CPU on {self.date}, with kvcache-plugin {self.plugin}"
        if any(failures):
            return Verdict(KNOWN_NOT_TO_WORK, f"{'; '.join(filter(None, failures))} ({ran})")
        number = len(self.left_out)
        without = f", without {counted(number, 'seam')} of {self.seams}" if number else ""
        return Verdict(PROVEN, ran + without)


def order(release: str) -> tuple[tuple[int, ...], int]:
    """By what releases are sorted.

    :raises KVCacheError: the version is none of a release.
    """
    found = _RELEASE.fullmatch(release)
    if found is None:
        raise KVCacheError(f"{release!r} is no release", name="releases-unreadable")
    return tuple(map(int, found[1].split("."))), int(found[2] or -1)


def read_releases() -> tuple[Release, ...]:
    """The record: every release that was run, the newest of each engine first.

    :raises KVCacheError: it is not there, or is none.
    """
    try:
        return tuple(_release(each) for each in json.loads(RECORD.read_text(encoding="utf-8")))
    except (KVCacheError, OSError, ValueError, TypeError, LookupError) as error:
        why = error.problem if isinstance(error, KVCacheError) else repr(error)
        raise KVCacheError(
            f"the record of releases, {shown(str(RECORD))}, cannot be read: {why}. Install "
            "kvcache-plugin again",
            name="releases-unreadable",
        ) from error


def _release(fields: dict[str, Any]) -> Release:
    left_out = tuple(LeftOut(**each) for each in fields["left_out"])
    return Release(**{**fields, "left_out": left_out})


def verdict(releases: Sequence[Release], engine: str, version: str) -> Verdict:
    """What is known of an engine's version.

    :param engine: the engine's title.
    :param version: the version of the distribution; one that is no release's is unknown.
    """
    own = {each.release: each.verdict for each in releases if each.engine == engine}
    proven = sorted((r for r, found in own.items() if found.word == PROVEN), key=order)
    if version in own:
        found = own[version]
        if found.word == PROVEN:
            return found
        return Verdict(found.word, f"{found.detail}; proven are {', '.join(proven) or 'none'}")
    if _RELEASE.fullmatch(version) is None:
        return Verdict(UNKNOWN, f"not a release by its version; {_LOOK}")
    if not proven:
        return Verdict(UNKNOWN, f"no release of it is proven; {_LOOK}")
    oldest, newest = proven[0], proven[-1]
    if order(version) > order(newest):
        return Verdict(UNKNOWN, f"newer than the newest proven, {newest}; {_LOOK}")
    if order(version) < order(oldest):
        return Verdict(UNKNOWN, f"older than the oldest proven, {oldest}; {_LOOK}")
    return Verdict(UNKNOWN, f"not run; proven are {', '.join(proven)}; {_LOOK}")
