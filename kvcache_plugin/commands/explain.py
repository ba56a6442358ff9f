"""``kvcache-plugin explain``: who serves a device and format, and who writes the caches then."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from kvcache_plugin import api
from kvcache_plugin.commands.common import FINE, MISUSED, WRONG, output_aside, print_json, say
from kvcache_plugin.errors import KVCacheError
from kvcache_plugin.hosts.write_paths import summaries
from kvcache_plugin.hosts.writes import third_party_among
from kvcache_plugin.settings import read_settings
from kvcache_plugin.terminal import print_table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from kvcache_plugin.explaining import Explanation


def run(arguments: argparse.Namespace) -> int:
    try:
        with output_aside():
            rows = api.explain(arguments.device, arguments.kv_cache_dtype)
    except KVCacheError as error:  # a device or a format that nobody knows
        return say(error, MISUSED)
    is_served = any(row.chosen for row in rows)
    writes = _writes(arguments.kv_cache_dtype, rows) if is_served else []
    if arguments.json:
        print_json([_as_json(row, writes) for row in rows])
    else:
        print_table(
            ("name", "distribution", "chosen for", "reason"),
            [
                (row.name, row.distribution, ", ".join(row.chosen_for) or "-", row.reason)
                for row in rows
            ],
        )
        if not is_served:
            print(f"\nnothing quantizes {arguments.kv_cache_dtype} on {arguments.device}")
        elif writes:
            print("", *writes, sep="\n")
    return FINE if is_served else WRONG


def _writes(kv_cache_dtype: str, rows: Sequence[Explanation]) -> list[str]:
    """A line for each engine: who writes its caches with what is chosen."""
    return list(
        summaries(
            kv_cache_dtype,
            vllm_writes=read_settings().vllm_writes,
            third_party=third_party_among(rows),
        )
    )


def _as_json(row: Explanation, writes: list[str]) -> object:
    return {**asdict(row), "chosen": row.chosen, "writes": writes if row.chosen else []}
