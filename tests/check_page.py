"""The tables of ``docs/check.md`` that are the code's own data: ``python -m tests.check_page``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcache_plugin.checkpoint.conventions import CONVENTIONS
from kvcache_plugin.checkpoint.engine_rules import RELEASES
from kvcache_plugin.checkpoint.report import KINDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache_plugin.checkpoint.conventions import Convention, Rename

_NUMBERS = {"multiplier": "multiplier", "reciprocal": "reciprocal", "unknown": "not told"}


def kinds_table() -> str:
    return _table(("kind", "what"), [(f"`{kind}`", what) for kind, what in KINDS.items()])


def conventions_table() -> str:
    releases = [f"{engine} {release}" for engine, release in RELEASES.items()]
    return _table(
        ("key", "producer", "name", "stored", "what it is", *releases),
        [
            (
                f"`{row.key}`",
                row.producer,
                _name(row),
                row.stored,
                _meaning(row),
                _engine(row.vllm),
                _engine(row.sglang),
            )
            for row in CONVENTIONS
        ],
    )


def _name(row: Convention) -> str:
    sides = ",".join(row.sides)
    side = f"{{{sides}}}" if len(row.sides) > 1 else sides
    return f"`{row.example.replace('{side}', side)}`"


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


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, *rows]
    header, *body = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([header, "|---" * len(columns) + "|", *body])


if __name__ == "__main__":
    print(kinds_table())
    print()
    print(conventions_table())
