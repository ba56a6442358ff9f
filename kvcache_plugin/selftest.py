"""Runs the conformance checks of every implementation that serves the hardware at hand.

What comes out is what a report from another machine needs to be judged by.
"""

from __future__ import annotations

import time
import traceback
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import torch

from kvcache_plugin.conformance.candidate import Candidate
from kvcache_plugin.conformance.cases import cases
from kvcache_plugin.machine import Machine, describe_machine
from kvcache_plugin.manager import Manager
from kvcache_plugin.plugins import one_line
from kvcache_plugin.settings import read_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvcache_plugin.conformance.cases import Case
    from kvcache_plugin.conformance.comparing import Problem
    from kvcache_plugin.description import KVDescription
    from kvcache_plugin.explaining import Implementation

Result: TypeAlias = Literal["passed", "failed", "raised", "skipped"]
Progress: TypeAlias = "Callable[[str], None]"

_MOST_FRAMES: Final = 6


@dataclass(frozen=True)
class CaseReport:
    """One check with one format and dtype.

    :param reason: the exception, or why nothing was looked at.
    :param frames: where an exception was raised, innermost last.
    :param compared: how many codes, block scales and values were compared.
    """

    check: str
    kv_cache_dtype: str
    dtype: str
    result: Result
    seconds: float
    compared: int = 0
    problems: tuple[Problem, ...] = ()
    reason: str = ""
    frames: tuple[str, ...] = ()

    @property
    def is_finding(self) -> bool:
        return self.result in ("failed", "raised")


@dataclass(frozen=True)
class ImplementationReport:
    """One implementation.

    :param not_run: why it was not examined, empty where it was.
    :param is_broken: whether that is a fault of its own.
    :param descriptions: what it says of itself, for each format that it serves.
    """

    name: str
    distribution: str
    hooks: tuple[str, ...] = ()
    not_run: str = ""
    is_broken: bool = False
    descriptions: tuple[tuple[str, KVDescription], ...] = ()
    cases: tuple[CaseReport, ...] = ()

    @property
    def findings(self) -> tuple[CaseReport, ...]:
        return tuple(case for case in self.cases if case.is_finding)

    def count(self, kv_cache_dtype: str, result: Result) -> int:
        return sum(
            (case.kv_cache_dtype, case.result) == (kv_cache_dtype, result) for case in self.cases
        )


@dataclass(frozen=True)
class Selftest:
    machine: Machine
    implementations: tuple[ImplementationReport, ...]
    seconds: float

    @property
    def succeeded(self) -> bool:
        """Whether something was examined, and nothing was found."""
        examined = any(implementation.cases for implementation in self.implementations)
        return examined and not any(
            implementation.findings or implementation.is_broken
            for implementation in self.implementations
        )


def run(device: torch.device, progress: Progress = lambda line: None) -> Selftest:
    """Examine every implementation that is installed.

    :param progress: is told in a line what is going on.
    """
    begun = time.perf_counter()
    manager = Manager(read_settings().block)
    manager.discover()
    found = manager.implementations
    names = frozenset(implementation.name for implementation in found)
    with _one_thread():
        reports = tuple(_examine(each, names - {each.name}, device, progress) for each in found)
    return Selftest(describe_machine(device), reports, round(time.perf_counter() - begun, 1))


@contextmanager
def _one_thread() -> Iterator[None]:
    """The tensors are small: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _examine(
    found: Implementation, others: frozenset[str], device: torch.device, progress: Progress
) -> ImplementationReport:
    name, distribution, hooks = found.name, found.distribution, found.hooks
    if found.left_out:
        return ImplementationReport(
            name, distribution, hooks, found.left_out, is_broken=found.is_broken
        )
    candidate = Candidate.installed(name, others, device)
    unclear = [why for each in candidate.all_formats if (why := candidate.unclear(each))]
    if unclear:
        return ImplementationReport(name, distribution, hooks, unclear[0], is_broken=True)
    if not candidate.served:
        why = candidate.why_not(candidate.all_formats[0])
        return ImplementationReport(name, distribution, hooks, why)
    planned = cases(candidate)
    reports = []
    for number, case in enumerate(planned, start=1):
        progress(f"{name} {number}/{len(planned)} {case}")
        reports.append(_run(case, candidate))
    descriptions = tuple((each.name, candidate.describe(each)) for each in candidate.served)
    return ImplementationReport(
        name, distribution, hooks, descriptions=descriptions, cases=tuple(reports)
    )


def _run(case: Case, candidate: Candidate) -> CaseReport:
    begun = time.perf_counter()

    def report(result: Result, **more: Any) -> CaseReport:
        seconds = round(time.perf_counter() - begun, 4)
        return CaseReport(
            case.check.name, case.kv_cache_dtype, case.dtype_name, result, seconds, **more
        )

    try:
        verdict = case.run(candidate)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return report("raised", reason=_told(error), frames=tuple(_frames(error)))
    if verdict.problems:
        return report("failed", compared=verdict.compared, problems=verdict.problems)
    if verdict.skipped:
        return report("skipped", reason=verdict.skipped)
    return report("passed", compared=verdict.compared)


def _told(error: BaseException) -> str:
    """An exception with its notes, which name the input, in a line."""
    notes = [" ".join(note.split()) for note in getattr(error, "__notes__", ())]
    return "; ".join([one_line(error), *notes])


def _frames(error: BaseException) -> Iterator[str]:
    """Where it was raised. The folders are nobody's business."""
    for frame in traceback.extract_tb(error.__traceback__)[-_MOST_FRAMES:]:
        yield f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}"
