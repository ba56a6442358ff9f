"""One run of ``kvcache-plugin check``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from kvcache_plugin.check.comparison import Comparison, compare
from kvcache_plugin.check.plot import Plot
from kvcache_plugin.checkpoint.scan import scan_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcache_plugin.checkpoint.report import CheckpointReport


@dataclass(frozen=True)
class Check:
    """What a run gives.

    :param device_from: ``"asked"``, or ``"here"`` for the hardware of this machine.
    :param comparison: with another checkpoint, where one was named.
    :param picture: the file of the picture, where one was asked for.
    """

    report: CheckpointReport
    device_from: Literal["asked", "here"]
    comparison: Comparison | None = None
    picture: str | None = None


def run(
    path: str,
    *,
    kv_cache_dtype: str | None = None,
    device: str | None = None,
    against: str | None = None,
    plot: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Check:
    """Scan a checkpoint, compare it with another one, and draw it.

    :param device: the GPU of this machine by default, the CPU where it has none.
    :param against: another checkpoint.
    :param plot: the file of a picture.
    :raises KVCacheError: for what cannot be read, written or understood.
    """
    picture = None if plot is None else Plot(plot)  # that it can be drawn is known before the scan
    hardware = device or ("cuda" if torch.cuda.is_available() else "cpu")
    report, other = (
        None
        if each is None
        else scan_checkpoint(
            each, kv_cache_dtype=kv_cache_dtype, device=hardware, progress=progress
        )
        for each in (path, against)
    )
    assert report is not None
    if picture is not None:
        picture.draw(report, other)
    return Check(
        report,
        "asked" if device else "here",
        None if other is None else compare(report, other),
        plot,
    )
