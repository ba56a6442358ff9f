"""``--against``: the stored scales of two checkpoints, layer by layer."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from kvcache_plugin.check.rows import is_scale

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from kvcache_plugin.checkpoint.report import CheckpointReport, LayerScales, StoredScale, Values

Relation: TypeAlias = Literal[
    "equal", "different", "only here", "only there", "not comparable", "in neither"
]

#: What bfloat16 can move two numbers apart, and a little more.
_TOLERANCE: Final = 0.01

#: Factors between two ways to store the same scale, and what they say. The larger numbers are
#: those of {large}.
_FACTORS: Final[tuple[tuple[float, str], ...]] = (
    (1.0, "they are the same scales, rounded differently"),
    (2.0, "{large} has them for FNUZ codes (gfx942), {small} for OCP's"),
    (448 / 240, "{large} has amax/240, for e4m3fnuz, {small} amax/448"),
    (6.0, "{large} has amax/448, {small} amax/2688: both are in use for NVFP4"),
    (57344 / 448, "{large} has amax/448, for e4m3, {small} amax/57344, for e5m2"),
    (240.0, "{large} has amax, {small} amax/240"),
    (448.0, "{large} has amax, {small} amax/448"),
    (2688.0, "{large} has amax, {small} amax/2688"),
)
#: Likewise products, of numbers and reciprocals.
_PRODUCTS: Final[tuple[tuple[float, str], ...]] = (
    (1.0, "one of the two has reciprocals, which engines do not take"),
    (6.0, "one of the two has 2688/amax, the other amax/448"),
    (1 / 6, "one of the two has 448/amax, the other amax/2688"),
    (448.0, "one of the two has 448/amax, the other amax"),
    (2688.0, "one of the two has 2688/amax, the other amax"),
)


@dataclass(frozen=True)
class PairComparison:
    """One side of one layer.

    :param here: the stored numbers of the checkpoint that is checked.
    :param there: those of the other one.
    :param ratio: here over there, for each number; empty unless both are scales of one shape.
    """

    relation: Relation
    here: Values = ()
    there: Values = ()
    ratio: Values = ()


@dataclass(frozen=True)
class LayerComparison:
    """One layer.

    :param layer: its name in the checkpoint that is checked, else in the other.
    """

    layer: str
    k: PairComparison
    v: PairComparison

    @property
    def is_equal(self) -> bool:
        return {self.k.relation, self.v.relation} <= {"equal", "in neither"}


@dataclass(frozen=True)
class SideComparison:
    """One side of all layers.

    :param smallest_ratio: of all layers, here over there; ``None`` when no two are comparable.
    :param largest_ratio: likewise.
    :param ratio: the ratio where it is the same in all layers within 1 %, else ``None``.
    :param product: here times there, likewise.
    :param looks_like: what a constant ratio or product says, empty when it says nothing.
    """

    side: Literal["k", "v"]
    equal: int
    different: int
    only_here: int
    only_there: int
    not_comparable: int
    smallest_ratio: float | None = None
    largest_ratio: float | None = None
    ratio: float | None = None
    product: float | None = None
    looks_like: str = ""

    def __str__(self) -> str:
        counts = {
            "equal": self.equal,
            "different": self.different,
            "only here": self.only_here,
            "only there": self.only_there,
            "not comparable": self.not_comparable,
        }
        said = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
        line = f"{self.side.upper()}: {said or 'in neither'}"
        if not self.different or self.smallest_ratio is None:
            return line
        if self.ratio is not None:
            line += f", all {self.ratio:.4g} × the other's"
        elif self.product is not None:
            line += f", all {self.product:.4g} / the other's"
        else:
            line += f", {self.smallest_ratio:.4g} to {self.largest_ratio:.4g} × the other's"
        return f"{line}: {self.looks_like}" if self.looks_like else line


@dataclass(frozen=True)
class Comparison:
    """Two checkpoints.

    :param path: the other checkpoint.
    :param matched_by: ``"name"``, or ``"number"`` where the two share no layer's name.
    """

    path: str
    matched_by: Literal["name", "number"]
    k: SideComparison
    v: SideComparison
    layers: tuple[LayerComparison, ...]

    @property
    def is_equal(self) -> bool:
        """Whether both have the same scales in the same layers."""
        return all(layer.is_equal for layer in self.layers)


def compare(report: CheckpointReport, other: CheckpointReport) -> Comparison:
    """Compare the numbers as they are stored, before any conversion."""
    here: Mapping[object, LayerScales] = {layer.layer: layer for layer in report.layers}
    there: Mapping[object, LayerScales] = {layer.layer: layer for layer in other.layers}
    by_number = _by_number(report), _by_number(other)
    matched_by: Literal["name", "number"] = "name"
    if not here.keys() & there.keys() and by_number[0].keys() & by_number[1].keys():
        here, there = by_number
        matched_by = "number"
    pairs = [(here.get(key), there.get(key)) for key in dict.fromkeys([*here, *there])]
    layers = tuple(_layer(*pair) for pair in sorted(pairs, key=lambda pair: _named(*pair).place))
    return Comparison(
        other.path,
        matched_by,
        _side("k", [layer.k for layer in layers]),
        _side("v", [layer.v for layer in layers]),
        layers,
    )


def _by_number(report: CheckpointReport) -> dict[object, LayerScales]:
    """Layers by their numbers; by their names where two have the same."""
    numbers = [(layer.is_draft, layer.index) for layer in report.layers]
    return {
        layer.layer if index is None or numbers.count((draft, index)) > 1 else (draft, index): layer
        for layer, (draft, index) in zip(report.layers, numbers, strict=True)
    }


def _named(here: LayerScales | None, there: LayerScales | None) -> LayerScales:
    named = here or there
    assert named is not None
    return named


def _layer(here: LayerScales | None, there: LayerScales | None) -> LayerComparison:
    return LayerComparison(
        _named(here, there).layer,
        _pair(here.stored_k if here else None, there.stored_k if there else None),
        _pair(here.stored_v if here else None, there.stored_v if there else None),
    )


def _pair(here: StoredScale | None, there: StoredScale | None) -> PairComparison:
    if here is None or there is None:
        if here is not None:
            return PairComparison("only here", here=here.values)
        if there is not None:
            return PairComparison("only there", there=there.values)
        return PairComparison("in neither")
    one, other = here.values, there.values
    if len(one) != len(other) or not one:
        return PairComparison("not comparable", one, other)
    if all(map(_same, one, other)):
        return PairComparison("equal", one, other, (1.0,) * len(one))
    if not all(map(is_scale, (*one, *other))):
        return PairComparison("not comparable", one, other)
    ratio = tuple(a / b for a, b in zip(one, other, strict=True))
    return PairComparison("different", one, other, ratio)


def _same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


def _side(side: Literal["k", "v"], pairs: Iterable[PairComparison]) -> SideComparison:
    pairs = list(pairs)
    relations = [pair.relation for pair in pairs]
    comparable = [pair for pair in pairs if pair.ratio and all(map(is_scale, pair.here))]
    ratios = [ratio for pair in comparable for ratio in pair.ratio]
    products = [a * b for pair in comparable for a, b in zip(pair.here, pair.there, strict=True)]
    ratio, product = _constant(ratios), _constant(products)
    looks_like = _factor(ratio) or _product(product)
    if product is not None and ratio is not None:
        # Of scales that are all alike both are constant, and the one that says something counts.
        if _factor(ratio) or not looks_like:
            product = None
        else:
            ratio = None
    return SideComparison(
        side,
        relations.count("equal"),
        relations.count("different"),
        relations.count("only here"),
        relations.count("only there"),
        relations.count("not comparable"),
        min(ratios, default=None),
        max(ratios, default=None),
        ratio,
        product,
        looks_like if "different" in relations else "",
    )


def _constant(numbers: list[float]) -> float | None:
    """The median, when all are near it."""
    if not numbers:
        return None
    median = statistics.median(numbers)
    near = all(math.isclose(each, median, rel_tol=_TOLERANCE) for each in numbers)
    return median if near and is_scale(median) else None


def _factor(ratio: float | None) -> str:
    if ratio is None:
        return ""
    large, small = "this checkpoint", "the other"
    if ratio < 1:
        ratio, large, small = 1 / ratio, small, large
    return next(_said(ratio, _FACTORS), "").format(large=large, small=small)


def _product(product: float | None) -> str:
    return "" if product is None else next(_said(product, _PRODUCTS), "")


def _said(number: float, known: tuple[tuple[float, str], ...]) -> Iterator[str]:
    return (said for value, said in known if math.isclose(number, value, rel_tol=_TOLERANCE))
