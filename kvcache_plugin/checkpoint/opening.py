"""Opens a checkpoint's files, which are data of strangers: what is wrong with one is one line."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, Final

from kvcache_plugin.errors import CheckpointError, shown

_MOST_DIGITS: Final = 100


class _WrongJsonError(ValueError):
    """What the hooks of ``json.loads`` refuse; its text becomes part of a ``CheckpointError``."""


def behind_links(path: str, where: str | None = None) -> Path:
    """The path itself, behind all links.

    :param where: what messages call it, the path by default.
    :raises CheckpointError: for a link that leads nowhere or back to itself.
    """
    try:
        return Path(os.path.realpath(path, strict=True))
    except (OSError, ValueError) as error:
        raise unreadable(error, path if where is None else where) from error


def check_ordinary(path: Path, where: str) -> None:
    """See that a path is a file with contents: opening a pipe or a device may never end.

    :raises CheckpointError: for anything else.
    """
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise unreadable(error, where) from error
    if not stat.S_ISREG(mode):
        raise CheckpointError(
            f"it is {_kind(mode)} and no ordinary file", file=where, name="file-unreadable"
        )


def read_bytes(path: Path, where: str, most: int) -> bytes:
    """All of a file.

    :raises CheckpointError: for one that has more than ``most`` bytes, or cannot be read.
    """
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise unreadable(error, where) from error
    if len(data) > most:
        raise CheckpointError(
            f"it has more than {most:,} bytes, too many for it", file=where, name="file-too-large"
        )
    return data


def read_json(path: Path, where: str, most: int, *, unique: bool = False) -> dict[str, Any]:
    """A JSON object from a file.

    :param unique: whether a key may not be there twice.
    :raises CheckpointError: for a file that holds something else, or more than ``most`` bytes.
    """
    data = read_bytes(path, where, most)
    try:
        found = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=unique_keys if unique else None,
            parse_int=_whole_number,
        )
    except RecursionError as error:
        raise CheckpointError(
            "its JSON is nested too deeply", file=where, name="json-invalid"
        ) from error
    except UnicodeDecodeError as error:
        raise CheckpointError(
            "it is no JSON: it is no UTF-8", file=where, name="json-invalid"
        ) from error
    except ValueError as error:
        raise CheckpointError(
            f"it is no JSON: {shown(str(error))}", file=where, name="json-invalid"
        ) from error
    if not isinstance(found, dict):
        kind = type(found).__name__
        raise CheckpointError(
            f"its JSON is no object, but a {kind}", file=where, name="json-invalid"
        )
    return found


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, for ``json.loads``.

    :raises ValueError: for a key that is there twice; a ``CheckpointError`` has its text.
    """
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in found if keys.count(key) > 1)
        raise _WrongJsonError(f"{shown(twice)} is in it twice")
    return found


def unreadable(error: Exception, where: str) -> CheckpointError:
    """The error for a file that the system does not let us read."""
    if isinstance(error, FileNotFoundError):
        problem = "it is not there, or is a link that leads nowhere"
    elif isinstance(error, OSError) and error.errno == errno.ELOOP:
        problem = "it is a link that leads back to itself"
    else:
        reason = error.strerror if isinstance(error, OSError) else None
        problem = f"it cannot be read: {shown(reason or str(error))}"
    return CheckpointError(problem, file=where, name="file-unreadable")


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a named pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    return kinds.get(stat.S_IFMT(mode), "something else")


def _whole_number(digits: str) -> int:
    # int() takes time with the square of the digits, without a limit before Python 3.10.7.
    if len(digits) > _MOST_DIGITS:
        raise _WrongJsonError(f"a number of {len(digits)} digits")
    return int(digits)
