"""``kvcache-plugin selftest``: every implementation that serves this machine, bit by bit."""

from __future__ import annotations

import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

from kvcache_plugin import selftest
from kvcache_plugin.commands.common import FINE, MISUSED, WRONG, output_aside, print_json, say
from kvcache_plugin.errors import KVCacheError
from kvcache_plugin.machine import find_device
from kvcache_plugin.terminal import print_table, progress_line

if TYPE_CHECKING:
    import argparse

    from kvcache_plugin.selftest import CaseReport, ImplementationReport, Result, Selftest

_OUTCOMES: Final[tuple[Result, ...]] = ("passed", "failed", "raised", "skipped")


def run(arguments: argparse.Namespace) -> int:
    try:
        with output_aside():
            device = find_device(arguments.device)
    except KVCacheError as error:
        return say(error, MISUSED)
    with output_aside(), progress_line() as progress:
        result = selftest.run(device, progress)
    if arguments.json:
        print_json(_as_json(result))
    else:
        _print(result)
    return FINE if result.succeeded else WRONG


def _as_json(result: Selftest) -> object:
    implementations = [
        {
            **asdict(each),
            "descriptions": {name: asdict(described) for name, described in each.descriptions},
        }
        for each in result.implementations
    ]
    return {**asdict(result), "implementations": implementations, "succeeded": result.succeeded}


def _print(result: Selftest) -> None:
    print(*result.machine.lines, "", sep="\n")
    rows = [
        (
            each.name,
            name,
            *(str(each.count(name, outcome)) for outcome in _OUTCOMES),
            described.how,
        )
        for each in result.implementations
        for name, described in each.descriptions
    ]
    print_table(("implementation", "format", *_OUTCOMES, "how"), rows)
    for each in result.implementations:
        if each.not_run:
            print(f"\nnot run: {each.name} ({each.distribution}): {each.not_run}")
        for case in each.findings:
            _print_finding(each, case)
    examined = [case for each in result.implementations for case in each.cases]
    findings = [case for case in examined if case.is_finding]
    print(
        f"\n{len(findings)} of {len(examined)} checks found something, in {result.seconds:.0f} s"
        if examined
        else f"\nno implementation serves {result.machine.arch}"
    )


def _print_finding(each: ImplementationReport, case: CaseReport) -> None:
    where = "-".join(filter(None, (case.check, case.kv_cache_dtype, case.dtype)))
    print(f"\n{case.result}: {each.name} ({each.distribution}): {where}")
    for line in (case.reason, *map(str, case.problems), *case.frames):
        if line:
            print(textwrap.indent(line, "  "))
