"""Times contests: all contestants in turns, as many numbers of tokens as the time allows."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import torch

from kvcache_plugin.bench.contestants import COPY, Contest, Contestant, contests
from kvcache_plugin.bench.inputs import Inputs, last_cache_bytes
from kvcache_plugin.bench.timing import Clock, Sample, Spread, Stopwatch
from kvcache_plugin.hosts.peers import AbsentPeerError
from kvcache_plugin.machine import Machine, describe_machine
from kvcache_plugin.plugins import one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache_plugin.hosts.peers import Call

Outcome: TypeAlias = Literal["timed", "raised", "given up", "absent"]
Progress: TypeAlias = Callable[[int, int], None]

TOKENS: Final = (1, 16, 256, 4096, 65_536)
FORMATS: Final = ("fp8", "nvfp4")

#: Seconds of all contests together, without what makes calls ready, and first calls.
_SECONDS: Final = 40.0
#: Of a contest's seconds, for one contestant: the slowest leaves something for the others.
_MOST_FOR_ONE: Final = 0.75
_ROUNDS: Final = 11
#: Fewer say nothing of the spread.
_FEWEST_ROUNDS: Final = 3
#: Calls of a round take this long together, if one does not.
_ROUND_SECONDS: Final = 0.004
_MOST_CALLS: Final = 1000
#: A first call that takes so many times what is expected has done something else, too.
_UNUSUAL: Final = 2


@dataclass(frozen=True)
class Timing:
    """One contestant with one number of tokens. Times are those of K or V alone.

    :param reason: why it was not timed, empty where it was.
    :param inputs: how many inputs were taken in turns.
    :param calls: how many calls there were in a round.
    :param first_us: the first call, by the clock.
    :param us: on the device, for a call.
    :param wall_us: by the clock; on the CPU the same.
    :param gb_per_s: bytes read of the input, 10⁹ of them in a second.
    :param of_copy: the copy's time over this one.
    """

    tokens: int
    outcome: Outcome
    reason: str = ""
    inputs: int = 0
    calls: int = 0
    rounds: int = 0
    first_us: float | None = None
    us: Spread | None = None
    wall_us: Spread | None = None
    gb_per_s: float | None = None
    of_copy: float | None = None


@dataclass(frozen=True)
class Row:
    """One contestant with all numbers of tokens."""

    contestant: Contestant
    timings: tuple[Timing, ...]


@dataclass(frozen=True)
class ContestResult:
    contest: Contest
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Bench:
    """What a run gives.

    :param threads: those that torch uses on the CPU.
    :param load: the system's load average when it began: processes that were running or waited to,
        this one among them, in the mean of a minute.
    :param cache_bytes: the size of the device's last cache.
    """

    machine: Machine
    threads: int
    load: float
    cache_bytes: int
    tokens: tuple[int, ...]
    contests: tuple[ContestResult, ...]
    seconds: float

    @property
    def succeeded(self) -> bool:
        """Whether an implementation was timed, and none of them raised."""
        outcomes = [
            timing.outcome
            for result in self.contests
            for row in result.rows
            if row.contestant.kind == "implementation"
            for timing in row.timings
        ]
        is_broken = any(
            absent.is_broken for result in self.contests for absent in result.contest.absent
        )
        return "timed" in outcomes and "raised" not in outcomes and not is_broken


def run(
    device: torch.device,
    *,
    kv_cache_dtypes: Sequence[str] = FORMATS,
    tokens: Sequence[int] = TOKENS,
    with_peers: bool = False,
    progress: Progress | None = None,
    clock: Clock = time.perf_counter,
) -> Bench:
    """Time every implementation that serves the device.

    :param tokens: how many tokens K has, one or more numbers.
    :param with_peers: whether other projects' quantizers are put beside them.
    :param progress: is told how many rounds of how many are done.
    :raises KVCacheError: for a format that nobody brings.
    """
    to_do = contests(device, kv_cache_dtypes, with_peers=with_peers)
    return time_contests(to_do, device, tokens=tokens, progress=progress, clock=clock)


def time_contests(
    to_do: Sequence[Contest],
    device: torch.device,
    *,
    tokens: Sequence[int],
    progress: Progress | None = None,
    clock: Clock = time.perf_counter,
) -> Bench:
    """Time the contestants of contests; the arguments of ``run``."""
    stopwatch = Stopwatch(device, clock)
    begun = stopwatch.now()
    load = os.getloadavg()[0]
    sizes = sorted(set(tokens))
    rounds = _Rounds(len(to_do) * len(sizes) * _ROUNDS, progress)
    results = []
    for contest in to_do:
        budget = _Budget(_SECONDS / len(to_do))
        rows = [_Racer(contestant, contest, budget) for contestant in contest.contestants]
        for size in sizes:
            _race(rows, Inputs.of(size, device), stopwatch, rounds)
        results.append(ContestResult(contest, _with_ratios(rows)))
    return Bench(
        describe_machine(device),
        torch.get_num_threads(),
        round(load, 2),
        last_cache_bytes(device),
        tuple(sizes),
        tuple(results),
        round(stopwatch.now() - begun, 1),
    )


@dataclass
class _Rounds:
    """Tells how many are done."""

    total: int
    progress: Progress | None
    done: int = 0

    def advance(self) -> None:
        self.done += 1
        if self.progress is not None:
            self.progress(self.done, self.total)


@dataclass
class _Budget:
    """The seconds that the contestants of a contest share."""

    seconds: float
    spent: float = 0.0


@dataclass
class _Racer:
    """A contestant while it is timed.

    :param ended: why larger numbers are not tried.
    :param took: numbers of tokens, and seconds of a call with so many.
    """

    contestant: Contestant
    contest: Contest
    budget: _Budget
    spent: float = 0.0
    ended: tuple[Outcome, str] | None = None
    took: list[tuple[int, float]] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)

    @property
    def left(self) -> float:
        own = _MOST_FOR_ONE * self.budget.seconds - self.spent
        return max(0.0, min(own, self.budget.seconds - self.budget.spent))

    def spend(self, seconds: float) -> None:
        self.spent += seconds
        self.budget.spent += seconds

    def expected(self, tokens: int) -> float:
        """Seconds of a call, on the line through the last two numbers; 0 before there are two."""
        if len(self.took) < 2:
            return 0.0
        (fewer, before), (last, took) = self.took[-2:]
        per_token = max(0.0, took - before) / (last - fewer)
        return took + per_token * (tokens - last)

    def give_up(self, call: float) -> None:
        needed = f"a call takes {call:.1f} s, {_FEWEST_ROUNDS} rounds are needed"
        self.end("given up", f"{needed}, and {self.left:.1f} s are left")

    def end(self, outcome: Outcome, reason: str) -> None:
        self.ended = outcome, reason


@dataclass
class _Heat:
    """A contestant with one number of tokens, while it is timed.

    :param expected: seconds of a call.
    """

    racer: _Racer
    call: Call
    inputs: Inputs
    first: float
    expected: float
    samples: list[Sample] = field(default_factory=list)
    next_input: int = 0

    @property
    def calls(self) -> int:
        wanted = math.ceil(_ROUND_SECONDS / self.expected) if self.expected > 0 else _MOST_CALLS
        return max(1, min(_MOST_CALLS, wanted))

    @property
    def is_over(self) -> bool:
        """Whether it was timed often enough to be given up for want of time."""
        if self.racer.ended is not None:
            return True
        enough = len(self.samples) >= _FEWEST_ROUNDS
        return enough and self.expected * self.calls > self.racer.left

    def time(self, stopwatch: Stopwatch) -> None:
        numbers = [(self.next_input + i) % self.inputs.count for i in range(self.calls)]
        self.next_input += self.calls
        sample = stopwatch.time(self.call, numbers)
        self.racer.spend(sample.wall * self.calls)
        self.samples.append(sample)

    def timing(self) -> Timing:
        sides = self.racer.contestant.sides
        us = Spread.of([sample.device / sides for sample in self.samples])
        read = self.racer.contest.bytes_read * self.inputs.tokens
        return Timing(
            self.inputs.tokens,
            "timed",
            inputs=self.inputs.count,
            calls=self.calls,
            rounds=len(self.samples),
            first_us=1e6 * self.first / sides,
            us=us,
            wall_us=Spread.of([sample.wall / sides for sample in self.samples]),
            gb_per_s=read / us.median / 1000 if us.median else None,
        )


def _race(racers: Sequence[_Racer], inputs: Inputs, stopwatch: Stopwatch, rounds: _Rounds) -> None:
    """Time all contestants with one number of tokens, in turns."""
    heats = [heat for racer in racers if (heat := _started(racer, inputs, stopwatch)) is not None]
    for number in range(_ROUNDS):
        # Who goes first takes turns too.
        first = number % len(heats) if heats else 0
        for heat in (*heats[first:], *heats[:first]):
            if not heat.is_over:
                _guarded(heat.racer, heat.time, stopwatch)
        rounds.advance()
    for heat in heats:
        if heat.racer.ended is None:
            timing = heat.timing()
            heat.racer.timings.append(timing)
            heat.racer.took.append((inputs.tokens, _median_wall(heat)))
    for racer in racers:
        if racer.ended is not None:
            racer.timings.append(Timing(inputs.tokens, *racer.ended))


def _started(racer: _Racer, inputs: Inputs, stopwatch: Stopwatch) -> _Heat | None:
    """Make a contestant ready and call it, unless its time is used up."""
    if racer.ended is not None:
        return None
    expected = racer.expected(inputs.tokens)
    if (1 + _FEWEST_ROUNDS) * expected > racer.left:
        racer.give_up(expected)
        return None
    return _guarded(racer, _warm, racer, inputs, expected, stopwatch)


def _warm(racer: _Racer, inputs: Inputs, expected: float, stopwatch: Stopwatch) -> _Heat | None:
    call = racer.contestant.prepare(inputs)
    first = took = stopwatch.time(call, [0]).wall
    if took > _UNUSUAL * expected:
        # It may have compiled something, which is not done again: its time is charged to nobody.
        took = stopwatch.time(call, [1]).wall
    racer.spend(took)
    if _FEWEST_ROUNDS * took > racer.left:
        racer.give_up(took)
        return None
    return _Heat(racer, call, inputs, first, took)


def _guarded(racer: _Racer, step: Callable[..., _Heat | None], *arguments: object) -> _Heat | None:
    """Take a step of a contestant. One that raises is not called again, and the others go on."""
    try:
        return step(*arguments)
    except KeyboardInterrupt:
        raise
    except AbsentPeerError as error:
        racer.end("absent", str(error))
    except BaseException as error:
        racer.end("raised", one_line(error))
    return None


def _median_wall(heat: _Heat) -> float:
    return Spread.of([sample.wall for sample in heat.samples]).median / 1e6


def _with_ratios(racers: Sequence[_Racer]) -> tuple[Row, ...]:
    """The rows, each beside the copy."""
    copies = {
        timing.tokens: timing.us.median
        for racer in racers
        if racer.contestant.name == COPY
        for timing in racer.timings
        if timing.us is not None
    }
    return tuple(
        Row(
            racer.contestant,
            tuple(
                replace(timing, of_copy=copies[timing.tokens] / timing.us.median)
                if timing.us is not None and timing.us.median and timing.tokens in copies
                else timing
                for timing in racer.timings
            ),
        )
        for racer in racers
    )
