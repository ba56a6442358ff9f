"""What a run gave, for programs. The schema is in docs/performance.md."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from kvcache_plugin import __version__
from kvcache_plugin.bench.inputs import DTYPE, HEAD_DIM, HEADS

if TYPE_CHECKING:
    from kvcache_plugin.bench.run import Bench, ContestResult, Row

#: Of the schema. A field that is added does not change it; one that is removed or means something
#: else does.
SCHEMA: Final = 1


def as_json(bench: Bench) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "version": __version__,
        "machine": asdict(bench.machine),
        "threads": bench.threads,
        "load": bench.load,
        "cache_bytes": bench.cache_bytes,
        "heads": HEADS,
        "head_dim": HEAD_DIM,
        "dtype": str(DTYPE).removeprefix("torch."),
        "tokens": bench.tokens,
        "contests": [_contest(result) for result in bench.contests],
        "seconds": bench.seconds,
        "succeeded": bench.succeeded,
    }


def _contest(result: ContestResult) -> dict[str, Any]:
    contest = result.contest
    return {
        "kv_cache_dtype": contest.kv_cache_dtype,
        "direction": contest.direction,
        "bytes_read": contest.bytes_read,
        "bytes_written": contest.bytes_written,
        "contestants": [_row(row) for row in result.rows],
        "absent": [asdict(absent) for absent in contest.absent],
    }


def _row(row: Row) -> dict[str, Any]:
    one = row.contestant
    return {
        "name": one.name,
        "kind": one.kind,
        "distribution": one.distribution,
        "how": one.how,
        "sides": one.sides,
        "timings": [asdict(timing) for timing in row.timings],
    }
