"""Names of layers: their numbers, and many of them in few words."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from kvcache_plugin.checkpoint.report import some

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_NUMBERED: Final = re.compile(r"(?P<before>.*)\.(?P<number>0|[1-9][0-9]{0,8})(?P<after>(?:\..*)?)")


def split(name: str) -> tuple[str, int | None, str]:
    """What stands before the last number, the number, and what stands after it."""
    found = _NUMBERED.fullmatch(name)
    if found is None:
        return name, None, ""
    return found["before"], int(found["number"]), found["after"]


def shorten(names: Iterable[str], most: int = 4) -> str:
    """``"model.layers.{0-3,7}.self_attn"``, names that differ in more than a number one by one."""
    groups: dict[tuple[str, str], list[int]] = {}
    for name in names:
        before, number, after = split(name)
        groups.setdefault((before, after), []).extend([] if number is None else [number])
    texts = [
        f"{before}.{_ranges(sorted(set(numbers)))}{after}" if numbers else before
        for (before, after), numbers in groups.items()
    ]
    return some(texts, most)


def _ranges(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    # Two in a row are no shorter as a range.
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs]
    return f"{{{','.join(parts)}}}"
