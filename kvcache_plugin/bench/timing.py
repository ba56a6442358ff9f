"""How long calls take: by events on a GPU, by the clock elsewhere."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache_plugin.hosts.peers import Call

#: Seconds since whenever.
Clock: TypeAlias = Callable[[], float]


class Sample(NamedTuple):
    """Seconds that one call took, in the mean of several.

    :param device: on the device; on the CPU the same as ``wall``.
    :param wall: for whoever waits for the result.
    """

    device: float
    wall: float


@dataclass(frozen=True)
class Spread:
    """The middle of several samples, in microseconds."""

    low_quartile: float
    median: float
    high_quartile: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        """:param seconds: at least one."""
        if len(seconds) == 1:
            return cls(*(3 * [1e6 * seconds[0]]))
        return cls(*(1e6 * cut for cut in statistics.quantiles(seconds, n=4, method="inclusive")))


class Stopwatch:
    """Times calls on one device.

    :param clock: for tests.
    """

    def __init__(self, device: torch.device, clock: Clock = time.perf_counter) -> None:
        self._device = device
        self.now = clock

    def time(self, call: Call, numbers: Sequence[int]) -> Sample:
        """Call once for each number, without waiting in between."""
        if self._device.type == "cuda":
            return self._time_on_gpu(call, numbers)
        self._wait()
        started = self.now()
        for number in numbers:
            call(number)
        self._wait()
        wall = (self.now() - started) / len(numbers)
        return Sample(wall, wall)

    def _time_on_gpu(self, call: Call, numbers: Sequence[int]) -> Sample:
        with torch.cuda.device(self._device):
            begin, end = (_event() for _ in range(2))
            self._wait()
            started = self.now()
            begin.record()
            for number in numbers:
                call(number)
            end.record()
            self._wait()
            wall = self.now() - started
            on_device = begin.elapsed_time(end) / 1000
        return Sample(on_device / len(numbers), wall / len(numbers))

    def _wait(self) -> None:
        """Until the device has done all that it was given."""
        if self._device.type != "cpu":
            torch.get_device_module(self._device).synchronize(self._device)


def _event() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return event
