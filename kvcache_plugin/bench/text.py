"""What a run gave, for people."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Final

from kvcache_plugin.bench.inputs import DTYPE, HEAD_DIM, HEADS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvcache_plugin.bench.contestants import Contest
    from kvcache_plugin.bench.run import Bench, ContestResult, Row, Timing

#: Who is who.
CONTESTANTS: Final = ("name", "from", "what is called")


def head_lines(bench: Bench) -> Iterator[str]:
    """Where it ran, and what all tables have in common."""
    yield from bench.machine.lines
    yield (
        f"K or V of [tokens, {HEADS}, {HEAD_DIM}] in {str(DTYPE).removeprefix('torch.')}; "
        f"{bench.threads} threads on the CPU; the last cache has {bench.cache_bytes >> 20} MiB; "
        f"load average {bench.load:.1f}, this command included"
    )


def title(contest: Contest) -> str:
    return (
        f"{contest.direction} {contest.kv_cache_dtype}: for a token {contest.bytes_read} bytes are "
        f"read and {contest.bytes_written} written"
    )


def columns(bench: Bench) -> list[str]:
    """The columns of a contest. On the CPU the clock's time is the device's."""
    found = ["tokens", "name", "µs a call", "quartiles", "GB/s", "of the copy"]
    return [*found, "µs by the clock"] if _has_clock(bench) else found


def lines(result: ContestResult, bench: Bench) -> list[list[str]]:
    """What was timed: a line for each number of tokens and contestant."""
    return [
        _cells(row, timing, has_clock=_has_clock(bench))
        for position in range(len(bench.tokens))
        for row in result.rows
        for timing in row.timings[position : position + 1]
        if timing.outcome == "timed"
    ]


def remarks(result: ContestResult) -> Iterator[str]:
    """What was not timed, and why; implementations for other hardware are left out."""
    for row in result.rows:
        for (outcome, reason), same in groupby(
            row.timings, key=lambda timing: (timing.outcome, timing.reason)
        ):
            if outcome != "timed":
                tokens = ", ".join(f"{timing.tokens:,}" for timing in same)
                what = "not here" if outcome == "absent" else f"{outcome} at {tokens} tokens"
                yield f"{row.contestant.name}: {what}: {reason}"
    for absent in result.contest.absent:
        if absent.kind == "peer" or absent.is_broken:
            yield f"{absent.name}: {absent.reason}"


def contestants(bench: Bench) -> list[list[str]]:
    """Everybody who was called."""
    found: dict[tuple[str, str, str], None] = {}
    for result in bench.contests:
        for row in result.rows:
            one = row.contestant
            found[one.name, one.distribution, one.how] = None
    return [[name, distribution or "-", how] for name, distribution, how in found]


def last_line(bench: Bench) -> str:
    return f"timed in {bench.seconds:.0f} s"


def _has_clock(bench: Bench) -> bool:
    return bench.machine.arch != "cpu"


def _cells(row: Row, timing: Timing, *, has_clock: bool) -> list[str]:
    assert timing.us is not None
    assert timing.wall_us is not None
    us = timing.us
    return [
        f"{timing.tokens:,}",
        row.contestant.name,
        number(us.median),
        f"{number(us.low_quartile)} to {number(us.high_quartile)}",
        "-" if timing.gb_per_s is None else number(timing.gb_per_s),
        "-" if timing.of_copy is None else f"{timing.of_copy:.2g}",
        *([number(timing.wall_us.median)] if has_clock else []),
    ]


def number(value: float) -> str:
    """Three digits, and all of those before the point."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"
