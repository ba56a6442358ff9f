"""SGLang: K and V are written to FP8 caches as the hook rounds them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcache_plugin.hosts.seams import Seam


def wrappers() -> tuple[tuple[Seam, Callable[..., Any]], ...]:
    return ()
