"""The environment variables."""

from __future__ import annotations

from kvcache_plugin.settings import SWITCHES
from tests.pages.markdown import code, codes, table


def switches() -> str:
    return table(
        ("variable", "values", "default", "what it does"),
        [
            (
                code(switch.name),
                codes(switch.values) if switch.values else switch.takes,
                code(switch.default) if switch.default else "none",
                switch.meaning,
            )
            for switch in SWITCHES
        ],
    )
