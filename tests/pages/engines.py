"""The functions of the engines that we touch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcache_plugin.hosts import seams
from kvcache_plugin.hosts.releases import read_releases
from tests.pages.markdown import code, table

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvcache_plugin.hosts.releases import Release
    from kvcache_plugin.hosts.seams import Seam

_COLUMNS = ("module", "function, with the parameters that we rely on", "what we do there")


def engine_seams(title: str) -> str:
    """The table of one engine, by its title, with the releases that were run."""
    releases = [release for release in read_releases() if release.engine == title]
    return table(
        (*_COLUMNS, "fits in"),
        [
            (*_row(seam), _releases(seam, releases))
            for seam in seams.SEAMS
            if seam.engine == title.lower()
        ],
    )


def backend_seams() -> str:
    """Those of an attention backend of vLLM, whichever is in use."""

    def stand_in(name: str) -> type:
        return type(name, (), {"__module__": "that of the backend"})

    found = (
        seams.vllm_backend_write(stand_in("AttentionImpl")),
        seams.vllm_backend_per_head(stand_in("AttentionBackend")),
    )
    rows = ((seam.module, *rest) for seam in found for _, *rest in [_row(seam)])
    return table(_COLUMNS, rows)


def peer_seams() -> str:
    return table(_COLUMNS, map(_row, (*seams.PEERS, seams.SGLANG_CPU_WRITE)))


def _row(seam: Seam) -> tuple[str, str, str]:
    call = f"{seam.qualname}({', '.join(seam.parameters)})"
    return code(seam.module), code(call), seam.purpose


def _releases(seam: Seam, releases: Sequence[Release]) -> str:
    without = {
        release.release: left_out.reason or left_out.problem
        for release in releases
        for left_out in release.left_out
        if left_out.seam == seam.path
    }
    fitting = ", ".join(r.release for r in releases if r.release not in without) or "none"
    return "; ".join([fitting, *_without(without.items())])


def _without(found: Iterable[tuple[str, str]]) -> list[str]:
    return [f"not in {release}: {reason}" for release, reason in found]
