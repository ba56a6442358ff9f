"""What is known of checkpoints: the kinds of findings, and how producers name and store scales."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcache_plugin.checkpoint.conventions import CONVENTIONS
from kvcache_plugin.checkpoint.engine_rules import RELEASES
from kvcache_plugin.checkpoint.report import KINDS
from tests.pages.markdown import code, table

if TYPE_CHECKING:
    from kvcache_plugin.checkpoint.conventions import Convention, Rename

_NUMBERS = {"multiplier": "multiplier", "reciprocal": "reciprocal", "unknown": "not told"}


def kinds() -> str:
    return table(("kind", "what"), [(code(kind), what) for kind, what in KINDS.items()])


def conventions() -> str:
    """What producers write."""
    return table(
        ("key", "producer", "name", "stored", "what it is"),
        [
            (code(row.key), row.producer, code(_name(row)), row.stored, _meaning(row))
            for row in CONVENTIONS
        ],
    )


def convention_verdicts() -> str:
    """What the engines do with it."""
    releases = [f"{engine} {release}" for engine, release in RELEASES.items()]
    return table(
        ("key", *releases),
        [(code(row.key), _engine(row.vllm), _engine(row.sglang)) for row in CONVENTIONS],
    )


def _name(row: Convention) -> str:
    sides = ",".join(row.sides)
    return row.example.replace("{side}", f"{{{sides}}}" if len(row.sides) > 1 else sides)


def _meaning(row: Convention) -> str:
    if row.role not in ("scale", "global scale"):
        return row.role
    by_producer = "".join(f"{meaning} from {name}, " for name, meaning in row.by_producer)
    return f"{row.role}: {by_producer}{'else ' if by_producer else ''}{_NUMBERS[row.meaning]}"


def _engine(rename: Rename) -> str:
    models = ["ordinary"] * rename.found + ["MLA"] * rename.found_mla
    found = {"ordinary": "yes", "MLA": "MLA alone", "ordinary MLA": "yes, MLA too"}
    said = found.get(" ".join(models), "no")
    return f"{said}: {rename.reason}" if rename.reason else said
