"""What the parts of pages are written with, and where pages are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def pages() -> tuple[Path, ...]:
    """All of them, those beside ``docs/`` too."""
    return (*sorted(ROOT.glob("*.md")), *sorted(DOCS.glob("*.md")))


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    header, *body = (f"| {' | '.join(cells)} |" for cells in (columns, *rows))
    return "\n".join([header, "|---" * len(columns) + "|", *body])


def code(text: object) -> str:
    return f"`{text}`"


def codes(texts: Iterable[object]) -> str:
    return ", ".join(map(code, texts))


def power_of_two(number: float) -> str:
    """``2⁻⁹`` for a number that is one."""
    mantissa, exponent = number.hex().split("p")
    if mantissa != "0x1.0000000000000":
        raise ValueError(f"{number!r} is no power of two")
    return f"2{str(int(exponent)).translate(_SUPERSCRIPT)}"
