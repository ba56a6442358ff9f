"""``kvcache-plugin plugins``: the implementations that are installed."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from kvcache_plugin.commands.common import FINE, WRONG, output_aside, print_json
from kvcache_plugin.manager import get_manager
from kvcache_plugin.terminal import print_table

if TYPE_CHECKING:
    import argparse

    from kvcache_plugin.explaining import Implementation


def run(arguments: argparse.Namespace) -> int:
    with output_aside():
        found = get_manager().implementations
    if arguments.json:
        print_json([asdict(implementation) for implementation in found])
    else:
        print_table(
            ("name", "distribution", "hooks", "what it is"),
            [(f.name, f.distribution, ", ".join(f.hooks) or "-", _state(f)) for f in found],
        )
    return WRONG if any(implementation.is_broken for implementation in found) else FINE


def _state(implementation: Implementation) -> str:
    left_out = implementation.left_out
    return f"left out: {left_out}" if left_out else implementation.summary
