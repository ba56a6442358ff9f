"""``kvcache-plugin bench``: how long every implementation that serves a device takes."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from kvcache_plugin.bench import run as timing
from kvcache_plugin.bench import text
from kvcache_plugin.bench.as_json import as_json
from kvcache_plugin.commands.common import FINE, MISUSED, WRONG, output_aside, print_json, say
from kvcache_plugin.errors import KVCacheError
from kvcache_plugin.machine import find_device
from kvcache_plugin.terminal import print_line, print_table, progress_bar

if TYPE_CHECKING:
    import argparse

    from kvcache_plugin.bench.run import Bench


def run(arguments: argparse.Namespace) -> int:
    bar = progress_bar("timing", redraws_itself=False)
    try:
        with output_aside(), contextlib.nullcontext() if arguments.json else bar as progress:
            result = timing.run(
                find_device(arguments.device),
                kv_cache_dtypes=arguments.kv_cache_dtype or timing.FORMATS,
                tokens=arguments.tokens or timing.TOKENS,
                with_peers=arguments.peers,
                progress=progress,
            )
    except KVCacheError as error:
        return say(error, MISUSED)
    if arguments.json:
        print_json(as_json(result))
    else:
        _print(result)
    return FINE if result.succeeded else WRONG


def _print(result: Bench) -> None:
    for line in text.head_lines(result):
        print(line)
    for each in result.contests:
        print()
        print_line(text.title(each.contest), "bold")
        print_table(text.columns(result), text.lines(each, result))
        for remark in text.remarks(each):
            print(remark)
    print()
    print_table(text.CONTESTANTS, text.contestants(result))
    print(f"\n{text.last_line(result)}")
