"""What can go wrong: one class for each kind, all of them a ``KVCacheError``.

Every message says what is wrong, where, with which value, and what to do about it. It ends with the
place in the documentation that tells more: ``[errors#scale-not-finite]`` is the heading
``scale-not-finite`` of ``docs/errors.md``. That is its name, and stays when its words change.
"""

from __future__ import annotations

import logging
import re
import sys

logger = logging.getLogger(__name__)

_PLACE = re.compile(r" \[errors#[a-z0-9-]+\]$")


def anchored(message: str, name: str) -> str:
    """A message with its place in the documentation; as it is where it has no name there."""
    return f"{message} [errors#{name}]" if name else message


def without_place(message: str) -> str:
    """A message to be put into another one, which has a place of its own."""
    return _PLACE.sub("", message)


class KVCacheError(Exception):
    """Base of every error that this package raises on purpose.

    :param problem: what is wrong, where, with which value, and what to do.
    :param details: further ``args``, as any exception takes them; none of ours has any.
    :param name: the name under which the documentation lists the error, at the message's end too;
        empty for the errors of other packages.
    """

    # Also of a subclass that forgets to call __init__.
    problem: str = ""
    name: str = ""

    def __init__(self, problem: str = "", *details: object, name: str = "") -> None:
        # Not by super().__init__, which torch.compile cannot look into: it would hide the message.
        self.args = (anchored(problem, name), *details)
        self.problem = problem
        self.name = name


class KVScaleError(KVCacheError, ValueError):
    """A K/V scale of a checkpoint is corrupt, or is no scale at all.

    The message is ``"{layer}: {problem}. {remedy} [errors#{name}]"``. The parts stay readable, so
    that a host can put the problems of many layers into one error.

    :param problem: what is wrong, with the values of both sides.
    :param layer: the layer's name in the model, empty when the caller gave none.
    :param remedy: what the person who serves the model can do.
    :param name: as in ``KVCacheError``.
    """

    layer: str = ""
    remedy: str = ""

    def __init__(self, problem: str, *, layer: str = "", remedy: str = "", name: str = "") -> None:
        super().__init__(_located(layer, sentences(problem, remedy)), name=name)
        self.problem = problem
        self.layer = layer
        self.remedy = remedy


class KVQuantizeError(KVCacheError, ValueError):
    """K or V cannot be quantized or dequantized as asked: tensor, scale, format or buffer."""


class NoImplementationError(KVCacheError, RuntimeError):
    """No implementation serves this device and format; the message lists each with its reason."""


class CheckpointError(KVCacheError, ValueError):
    """A checkpoint on disk cannot be read, or is not to be trusted.

    The message is one line, ``"{file}: {problem}. {remedy} [errors#{name}]"``. The parts stay
    readable.

    :param problem: what is wrong.
    :param file: the file or folder that it is wrong with.
    :param remedy: what the person who has the checkpoint can do.
    :param name: as in ``KVCacheError``.
    """

    def __init__(self, problem: str, *, file: str = "", remedy: str = "", name: str = "") -> None:
        self.file = shown(file, most=1000)
        super().__init__(_located(self.file, sentences(problem, remedy)), name=name)
        self.problem = problem
        self.remedy = remedy


def sentences(*parts: str) -> str:
    """Those that say something, one after the other."""
    return ". ".join(filter(None, parts))


def _located(where: str, message: str) -> str:
    return f"{where}: {message}" if where else message


def shown(text: str, *, most: int = 200) -> str:
    """A text from a file, for a message: in one line, without control characters, not too long."""
    short = text if len(text) <= most else f"{text[: most - 3]}..."
    if short.isprintable():
        return short
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in short)


def counted(number: int, noun: str) -> str:
    """``1 layer``, ``2 layers``"""
    return f"{number} {noun}{'s' * (number != 1)}"


def add_note(error: BaseException, note: str) -> None:
    """Say more about an exception that goes up as it is: shown below it, or logged before 3.11."""
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        logger.error("%s", f"{type(error).__name__}: {note}")
