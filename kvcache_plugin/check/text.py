"""What a check found, for people."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Final

from kvcache_plugin.check.layer_names import shorten
from kvcache_plugin.checkpoint.engine_rules import RELEASES
from kvcache_plugin.errors import shown

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvcache_plugin.check.comparison import Comparison, PairComparison
    from kvcache_plugin.check.rows import Row
    from kvcache_plugin.checkpoint.report import (
        CheckpointReport,
        Finding,
        LayerScales,
        StoredScale,
        Values,
    )

#: The title of the last column.
PROBLEM: Final = "problem"
#: Columns of names, which are read, searched and copied whole.
WHOLE: Final = ("layer", PROBLEM)

#: Of findings that differ in their layer alone.
_MOST_ALIKE: Final = 10


def finding_lines(findings: Sequence[Finding]) -> Iterator[str]:
    """Each finding: its kind, where and what, and what to do; those alike under one heading.

    What to do is said once, and later named after the kind that it stands under.
    """
    said: dict[str, str] = {}
    for (severity, kind, remedy), alike in groupby(
        findings, key=lambda finding: (finding.severity, finding.kind, finding.remedy)
    ):
        found = list(alike)
        yield f"{severity} {kind}"
        for finding in found[:_MOST_ALIKE]:
            about = _about(finding)
            yield f"  {about}: {finding.message}" if about else f"  {finding.message}"
        if len(found) > _MOST_ALIKE:
            yield f"  and {len(found) - _MOST_ALIKE} more like it, which the table has"
        if remedy:
            yield f"  what to do: {f'as for {said[remedy]}' if remedy in said else remedy}"
            said.setdefault(remedy, kind)
        yield ""


def table(report: CheckpointReport, rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """The columns and rows of all layers.

    What would be served has columns of its own where it is not what is stored.
    """
    converted = any(map(_is_converted, report.layers))
    columns = ["layer", "K scale", "V scale"]
    if converted:
        columns += [f"K on {report.device}", f"V on {report.device}"]
    columns += ["source", *(f"{engine} {release}" for engine, release in RELEASES.items()), PROBLEM]
    return columns, [_cells(row, converted) for row in rows]


#: The columns of a comparison.
COMPARISON: Final = ("layer", "K here", "K there", "K ratio", "V here", "V there", "V ratio")


def comparison_rows(comparison: Comparison) -> list[list[str]]:
    """The layers that are not equal."""
    return [
        [shown(layer.layer), *_compared(layer.k), *_compared(layer.v)]
        for layer in comparison.layers
        if not layer.is_equal
    ]


def number(value: float) -> str:
    return f"{value:.4g}"


def numbers(values: Values) -> str:
    """One number, or the smallest and largest of one for each KV head."""
    if len(values) < 2:
        return "".join(map(number, values)) or "-"
    corrupt = [value for value in values if not value > 0]
    low, high = (corrupt[0], max(values)) if corrupt else (min(values), max(values))
    return f"{number(low)} to {number(high)} ({len(values)})"


def declaration_line(report: CheckpointReport) -> str:
    """What the checkpoint says of its KV cache, and who wrote it."""
    declaration = report.declaration
    scheme, producer = declaration.scheme, str(declaration.producer)
    if scheme is None:
        said = "no quantized KV cache"
    else:
        said = f"{scheme.kv_cache_dtype} in {scheme.where} = {scheme.written}"
    by = f", by {shown(producer)}" if producer else ""
    left_out = f", {len(declaration.ignore)} ignore entries" if declaration.ignore else ""
    return f"declared: {said}{by}{left_out}"


def _compared(pair: PairComparison) -> list[str]:
    ratio = numbers(pair.ratio) if pair.ratio else pair.relation
    return [numbers(pair.here), numbers(pair.there), ratio]


def _about(finding: Finding) -> str:
    parts = [shorten(finding.layers)] if finding.layers else []
    parts += [finding.side.upper()] if finding.side else []
    # A number without a side is in the message.
    parts += [number(finding.value)] if finding.side and finding.value is not None else []
    return ", ".join(parts)


def _cells(row: Row, converted: bool) -> list[str]:
    layer = row.layer
    served: list[str] = []
    if converted:
        served = [numbers(layer.k_scale), numbers(layer.v_scale)] if layer else ["1", "1"]
    return [
        shown(row.name),
        *(_stored(row.stored(side)) for side in "kv"),
        *served,
        _source(layer),
        *(_engine(layer, position) for position in range(len(RELEASES))),
        ", ".join([*row.problems, *(f"({kind})" for kind in row.remarks)]) or "-",
    ]


def _stored(scale: StoredScale | None) -> str:
    if scale is None:
        return "-"
    return numbers(scale.values) if scale.values else f"{scale.dtype} {list(scale.shape)}"


def _source(layer: LayerScales | None) -> str:
    if layer is None:
        return "default 1.0"
    if layer.refusal:
        return "refused"
    if layer.k_source == layer.v_source:
        return "default 1.0" if layer.k_source == "default" else layer.k_source
    return f"K {layer.k_source}, V {layer.v_source}"


def _engine(layer: LayerScales | None, position: int) -> str:
    """What an engine makes of the names, of both sides together where it is the same."""
    if layer is None:
        return "-"
    fates = {
        scale.side: "yes" if verdict.finds else verdict.outcome
        for scale in layer.stored
        for verdict in scale.engines[position : position + 1]
    }
    if len(set(fates.values())) < 2:
        return next(iter(fates.values()), "-")
    return ", ".join(f"{side.upper()} {fate}" for side, fate in fates.items())


def _is_converted(layer: LayerScales) -> bool:
    return any(
        stored is not None and source == "checkpoint" and served != stored.values
        for stored, source, served in (
            (layer.stored_k, layer.k_source, layer.k_scale),
            (layer.stored_v, layer.v_source, layer.v_scale),
        )
    )
