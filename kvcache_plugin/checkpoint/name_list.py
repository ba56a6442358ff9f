"""Names and patterns of modules, as ``ignore`` lists in a checkpoint's configuration have them."""

from __future__ import annotations

import fnmatch
import re
import time
import warnings
from functools import lru_cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

_MOST_LENGTH: Final = 200
_MOST_REPEATS: Final = 3
_MOST_SECONDS: Final = 2.0


class NameList:
    """Whether a module, or one that it is in, is named by any of some entries.

    An entry is a name, a glob, or ``re:`` and a regular expression. They come from strangers, so
    one that could take forever names nothing, and so do all once two seconds are spent.
    """

    def __init__(self, entries: Iterable[str]) -> None:
        entries = tuple(entries)
        self._names = frozenset(entries)
        self._patterns = [
            entry
            for entry in entries
            if len(entry) <= _MOST_LENGTH and (entry.startswith("re:") or "*" in entry)
        ]
        self._seconds_left = _MOST_SECONDS

    def __contains__(self, module: str) -> bool:
        if len(module) > _MOST_LENGTH:
            return module in self._names
        names = [module]
        while "." in names[-1]:
            names.append(names[-1].rpartition(".")[0])
        return any(name in self._names or self._fits_a_pattern(name) for name in names)

    def _fits_a_pattern(self, name: str) -> bool:
        started = time.monotonic()
        for pattern in self._patterns:
            if time.monotonic() - started > self._seconds_left:
                break
            if _fits(name, pattern):
                return True
        self._seconds_left -= time.monotonic() - started
        return False


def _fits(name: str, pattern: str) -> bool:
    if not pattern.startswith("re:"):
        return fnmatch.fnmatchcase(name, pattern)
    regex = _harmless(pattern[3:])
    return regex is not None and regex.match(name) is not None


@lru_cache(maxsize=1024)
def _harmless(text: str) -> re.Pattern[str] | None:
    """A stranger's regular expression, unless it could take forever on some name.

    Time grows with the name's length to the power of the number of repeats, and exponentially
    where a group is repeated.
    """
    repeats = len(re.findall(r"(?<!\\)[*+{]", text))
    repeats_group = re.search(r"\)[*+{]", text)
    looks_around_or_back = re.search(r"\\[1-9]|\(\?(?!:)", text)
    if repeats > _MOST_REPEATS or repeats_group or looks_around_or_back:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return re.compile(text)
    except (re.error, OverflowError, RecursionError):
        return None
