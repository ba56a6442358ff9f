"""A pytest plugin for the tests inside an engine: what our loggers say."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def records(request: pytest.FixtureRequest) -> Iterator[list[logging.LogRecord]]:
    """From WARNING on, or from the ``LEVEL`` of the tests' module, without the line of each load.

    In vLLM pytest's own fixture hears nothing: it listens on the root logger, which is not ours.
    """
    level = getattr(request.module, "LEVEL", logging.WARNING)
    found: list[logging.LogRecord] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "is active in" not in record.getMessage():
                found.append(record)

    handler = Handler(level)
    logger = logging.getLogger("kvcache_plugin")
    before = logger.level
    logger.setLevel(level)
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)
    logger.setLevel(before)
