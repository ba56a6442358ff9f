"""What we log in one process of an engine, and what of ours must not stop it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, TypeVar

from kvcache_plugin import __version__
from kvcache_plugin.errors import anchored

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcache_plugin.hosts.seams import Seam

logger = logging.getLogger(__name__)

T = TypeVar("T")


class EngineLog:
    """Says things once in a process, and in one of the processes that would all say the same.

    :param engine: the engine's title.
    """

    def __init__(self, engine: str) -> None:
        self.engine = engine
        #: Whether this process says what others with the same layers would say too.
        self.speaks: Callable[[], bool] = lambda: True
        #: Whether a step of ours has failed.
        self.has_failed = False
        self._told: set[str] = set()

    def say(self, level: int, message: str, *arguments: object) -> None:
        """Log what others with the same layers would say too: only one of them is heard."""
        if self.guarded("asking for the rank of this process", self.speaks) is False:
            level = logging.DEBUG
        logger.log(level, message, *arguments)

    def say_once(self, topic: str, level: int, message: str, *arguments: object) -> None:
        """The same, for what is not said again in this process.

        :param topic: what it is about; of several messages about one thing the first is said.
        """
        if self._is_new(topic):
            self.say(level, message, *arguments)

    def warn_once(self, topic: str, message: str, *arguments: object) -> None:
        """Warn once of what is wrong in this process alone, whether or not it speaks for others."""
        if self._is_new(topic):
            logger.warning(message, *arguments)

    def leave_out(self, seam: Seam, problem: str) -> None:
        """Warn that a seam is not used; those beside it stay."""
        logger.warning(
            anchored("kvcache_plugin leaves out a seam of %s, which %s: %s", "seam-left-out"),
            self.engine,
            seam.purpose,
            problem,
        )

    def guarded(self, doing: str, step: Callable[..., T], *arguments: Any) -> T | None:
        """Take a step of ours that must not stop the engine: what it raises is logged, once."""
        try:
            return step(*arguments)
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException:  # also a plugin that calls sys.exit()
            self.has_failed = True
            if self._is_new(doing):
                logger.exception(
                    anchored(
                        "kvcache_plugin %s failed while %s. %s goes on as it would without the "
                        "plugin, and K/V scales may be unchecked",
                        "plugin-failed",
                    ),
                    __version__,
                    doing,
                    self.engine,
                )
            return None

    def _is_new(self, topic: str) -> bool:
        is_new = topic not in self._told
        self._told.add(topic)
        return is_new
