"""What all commands do alike: their exit status, their JSON, and what becomes of an error."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvcache_plugin.errors import KVCacheError

#: The exit statuses.
FINE: Final = 0
WRONG: Final = 1
MISUSED: Final = 2


def output_aside() -> contextlib.AbstractContextManager[object]:
    """What other packages print while they are imported must not mix with ours."""
    return contextlib.redirect_stdout(sys.stderr)


def say(error: KVCacheError, status: int) -> int:
    """Tell of an error in one line on stderr.

    :returns: the status.
    """
    print(f"kvcache-plugin: {error}", file=sys.stderr)
    return status


def print_json(value: object) -> None:
    """Print it on stdout. A number that JSON does not have is a fault of ours.

    :raises ValueError: for NaN and infinity.
    """
    print(json.dumps(value, indent=2, allow_nan=False))
