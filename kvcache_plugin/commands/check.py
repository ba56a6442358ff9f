"""``kvcache-plugin check``: what is wrong with a checkpoint's K/V scales."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from kvcache_plugin.check import run as checking
from kvcache_plugin.check import text
from kvcache_plugin.check.as_json import as_json
from kvcache_plugin.check.rows import rows_of
from kvcache_plugin.check.sparkline import characters_for, spark_lines
from kvcache_plugin.commands.common import FINE, MISUSED, WRONG, output_aside, print_json, say
from kvcache_plugin.errors import KVCacheError, shown
from kvcache_plugin.terminal import print_line, print_table, progress_bar

if TYPE_CHECKING:
    import argparse

    from kvcache_plugin.check.comparison import Comparison
    from kvcache_plugin.check.run import Check

#: How the heading of a finding is shown.
_STYLES: Final = {"problem": "bold red", "remark": "bold yellow"}


def run(arguments: argparse.Namespace) -> int:
    try:
        with output_aside(), progress_bar("reading headers") as progress:
            result = checking.run(
                arguments.path,
                kv_cache_dtype=arguments.kv_cache_dtype,
                device=arguments.device,
                against=arguments.against,
                plot=arguments.plot,
                progress=progress,
            )
    except KVCacheError as error:
        return say(error, MISUSED)
    if arguments.json:
        print_json(as_json(result))
        if result.picture is not None:
            print(f"picture: {shown(result.picture)}", file=sys.stderr)
    else:
        _print(result)
    return FINE if result.report.is_sound else WRONG


def _print(result: Check) -> None:
    report = result.report
    for line in text.finding_lines(report.findings):
        print_line(line, _STYLES.get(line.partition(" ")[0], ""))
    rows = rows_of(report)
    if rows:
        print_table(*text.table(report, rows), whole=text.WHOLE)
        print()
        for line in spark_lines(rows, characters_for(sys.stdout.encoding)):
            print(line)
        print()
    if result.comparison is not None:
        _print_comparison(result.comparison)
    if result.picture is not None:
        print(f"picture: {shown(result.picture)}")
    print(text.declaration_line(report))
    if result.device_from == "here":
        print(f"device: {report.device}, as this machine has it; --device takes another one")
    print_line(report.summary, "bold green" if report.is_sound else "bold red")


def _print_comparison(comparison: Comparison) -> None:
    print(f"against {shown(comparison.path)}, layers by {comparison.matched_by}:")
    if rows := text.comparison_rows(comparison):
        print_table(text.COMPARISON, rows, whole=text.WHOLE)
    for side in (comparison.k, comparison.v):
        print(side)
    print()
