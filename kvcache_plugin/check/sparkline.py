"""Numbers as a line of characters, one for each layer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvcache_plugin.check.rows import is_scale

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache_plugin.check.rows import Row

#: Layers in a line.
_WIDTH: Final = 64


@dataclass(frozen=True)
class Characters:
    """What a line is drawn with.

    :param levels: from the lowest to the highest.
    :param corrupt: for a number that is no scale: zero, negative, infinite, NaN.
    :param absent: for no number.
    """

    levels: str
    corrupt: str
    absent: str


BLOCKS: Final = Characters("▁▂▃▄▅▆▇█", "×", "·")
ASCII: Final = Characters("12345678", "x", ".")
PROBLEM: Final = "!"


def characters_for(encoding: str | None) -> Characters:
    """Blocks where the output can show them, else digits."""
    try:
        f"{BLOCKS.levels}{BLOCKS.corrupt}{BLOCKS.absent}".encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return BLOCKS


def sparkline(values: Sequence[float | None], characters: Characters) -> str:
    """The logarithms of numbers; their smallest is the lowest level, their largest the highest."""
    logs = [math.log2(value) for value in values if value is not None and is_scale(value)]
    low, high = min(logs, default=0.0), max(logs, default=0.0)
    top = len(characters.levels) - 1

    def character(value: float | None) -> str:
        if value is None:
            return characters.absent
        if not is_scale(value):
            return characters.corrupt
        share = (math.log2(value) - low) / (high - low) if high > low else 0.5
        return characters.levels[int(share * top + 0.5)]

    return "".join(map(character, values))


def spark_lines(rows: Sequence[Row], characters: Characters) -> list[str]:
    """Both sides, with the number of each line's first layer, and a mark under problem layers."""
    sides = {side: [_one(row.values(side)) for row in rows] for side in "kv"}
    drawn = {side: sparkline(values, characters) for side, values in sides.items()}
    marks = "".join(PROBLEM if row.problems else " " for row in rows)
    if not rows:
        return []
    lines = [_legend("".join([*drawn.values(), marks]), characters)]
    for begin in range(0, len(rows), _WIDTH):
        number = rows[begin].number
        first = f"{begin if number is None else number:>5}"
        part = slice(begin, begin + _WIDTH)
        for side, line in drawn.items():
            reach = f"  {_reach(sides[side])}" if begin == 0 else ""
            lines.append(f"{side.upper()} {first} {line[part]}{reach}")
        if marks[part].strip():
            lines.append(f"{' ' * (len(first) + 3)}{marks[part]}".rstrip())
    return lines


def _one(values: tuple[float, ...]) -> float | None:
    """The number that stands for a layer: one that is no scale, else the largest."""
    corrupt = next((value for value in values if not is_scale(value)), None)
    return max(values, default=None) if corrupt is None else corrupt


def _reach(values: Sequence[float | None]) -> str:
    sound = [value for value in values if value is not None and is_scale(value)]
    if not sound:
        return ""
    low, high = f"{min(sound):.4g}", f"{max(sound):.4g}"
    return low if low == high else f"{low} to {high}"


def _legend(drawn: str, characters: Characters) -> str:
    meanings = {
        characters.corrupt: "no scale",
        characters.absent: "not stored",
        PROBLEM: "has a problem",
    }
    used = [f"{sign} {meaning}" for sign, meaning in meanings.items() if sign in drawn]
    return ", ".join(["stored scales by layer, log2", *used])
