"""What can go wrong: one class for each kind, all of them a ``KVCacheError``.

Every message says what is wrong, where, with which value, and what to do about it.
"""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger(__name__)


class KVCacheError(Exception):
    """Base of every error that this package raises on purpose."""


class KVScaleError(KVCacheError, ValueError):
    """A K/V scale of a checkpoint is corrupt, or is no scale at all.

    The message is ``"{layer}: {problem}. {remedy}"``. The parts stay readable, so that a host can
    put the problems of many layers into one error.

    :param problem: what is wrong, with the values of both sides.
    :param layer: the layer's name in the model, empty when the caller gave none.
    :param remedy: what the person who serves the model can do.
    """

    # Also of a subclass that forgets to call __init__.
    problem: str = ""
    layer: str = ""
    remedy: str = ""

    def __init__(self, problem: str, *, layer: str = "", remedy: str = "") -> None:
        where = f"{layer}: " if layer else ""
        way_out = f". {remedy}" if remedy else ""
        super().__init__(f"{where}{problem}{way_out}")
        self.problem = problem
        self.layer = layer
        self.remedy = remedy


class KVQuantizeError(KVCacheError, ValueError):
    """K or V cannot be quantized or dequantized as asked: tensor, scale, format or buffer."""


class NoImplementationError(KVCacheError, RuntimeError):
    """No implementation serves this device and format; the message lists each with its reason."""


class CheckpointError(KVCacheError, ValueError):
    """A checkpoint on disk cannot be read, or is not to be trusted.

    The message is one line, ``"{file}: {problem}. {remedy}"``. The parts stay readable.

    :param problem: what is wrong.
    :param file: the file or folder that it is wrong with.
    :param remedy: what the person who has the checkpoint can do.
    """

    def __init__(self, problem: str, *, file: str = "", remedy: str = "") -> None:
        self.file = shown(file, most=1000)
        self.problem = problem
        self.remedy = remedy
        where = f"{self.file}: " if file else ""
        super().__init__(f"{where}{problem}{f'. {remedy}' if remedy else ''}")


def shown(text: str, *, most: int = 200) -> str:
    """A text from a file, for a message: in one line, without control characters, not too long."""
    short = text if len(text) <= most else f"{text[: most - 3]}..."
    if short.isprintable():
        return short
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in short)


def add_note(error: BaseException, note: str) -> None:
    """Say more about an exception that goes up as it is: shown below it, or logged before 3.11."""
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        logger.error("%s: %s", type(error).__name__, note)
