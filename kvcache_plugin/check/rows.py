"""The layers of a report, those without scales among them, each with what was found in it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcache_plugin.check import layer_names

if TYPE_CHECKING:
    from kvcache_plugin.checkpoint.report import CheckpointReport, LayerScales, StoredScale, Values


@dataclass(frozen=True)
class Row:
    """One layer.

    :param number: its number, ``None`` where its name has none.
    :param layer: its scales, ``None`` when it should have some and has none.
    :param problems: kinds of the problems that name it.
    :param remarks: kinds of the remarks that name it.
    """

    name: str
    number: int | None
    layer: LayerScales | None
    problems: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    def stored(self, side: str) -> StoredScale | None:
        """The tensor that a side is taken from, for V also one scale for both."""
        if self.layer is None:
            return None
        return self.layer.stored_k if side == "k" else self.layer.stored_v

    def values(self, side: str) -> Values:
        """The stored numbers of a side, empty when there are none."""
        stored = self.stored(side)
        return stored.values if stored is not None else ()


def rows_of(report: CheckpointReport) -> tuple[Row, ...]:
    """Every layer that has scales or lacks them, in order."""
    problems: dict[str, dict[str, None]] = {}
    remarks: dict[str, dict[str, None]] = {}
    for finding in report.findings:
        kinds = problems if finding.severity == "problem" else remarks
        for name in finding.layers:
            kinds.setdefault(name, {})[finding.kind] = None
    placed = [(layer.place, layer) for layer in report.layers]
    have = {layer.layer for layer in report.layers}
    lacking = [
        ((False, before, number or 0, name), None)
        for name, kinds in problems.items()
        if "missing-layers" in kinds and name not in have
        for before, number, _ in [layer_names.split(name)]
    ]
    return tuple(
        Row(
            name,
            layer.index if layer is not None else layer_names.split(name)[1],
            layer,
            tuple(problems.get(name, ())),
            tuple(remarks.get(name, ())),
        )
        for (*_, name), layer in sorted([*placed, *lacking], key=lambda pair: pair[0])
    )


def is_scale(value: float) -> bool:
    """Whether a number has a place on a logarithmic axis."""
    return math.isfinite(value) and value > 0
