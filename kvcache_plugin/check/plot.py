"""``--plot``: a picture of K and V scales by layer. matplotlib is imported when one is drawn."""

from __future__ import annotations

import io
import math
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from kvcache_plugin.check.layer_names import shorten
from kvcache_plugin.check.rows import is_scale, rows_of
from kvcache_plugin.errors import KVCacheError, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvcache_plugin.check.rows import Row
    from kvcache_plugin.checkpoint.report import CheckpointReport, Values

#: matplotlib's objects, as it makes them.
Axes: TypeAlias = Any

SUFFIXES: Final = (".png", ".svg")
#: Blue and orange, which most people with colour blindness tell apart, and marks that differ too.
_SIDES: Final = {"k": ("#0072b2", "o"), "v": ("#d55e00", "s")}
_PROBLEM: Final = "#cc3311"
_SETTINGS: Final[dict[Any, Any]] = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "kvcache_plugin",  # the same picture is the same file
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
#: The order of what lies over each other: between bands (1) and lines (2).
_BEHIND: Final = 1.5
_MOST_LABELS: Final = 12
#: Words at single layers, which lie over each other where there are more.
_MOST_WORDS: Final = 8
#: Layers of which each has the room for a word.
_WIDE_BANDS: Final = 30
#: Numbers beyond it are shown at the edge, as infinity is. float32 ends at 3.4e38.
_LARGEST: Final = 1e50


class Plot:
    """A picture that is going to be drawn.

    :param file: where; its suffix says what it is.
    :raises KVCacheError: for another suffix, or without matplotlib.
    """

    def __init__(self, file: str) -> None:
        self._file = Path(file)
        self._format = self._file.suffix.lower()
        if self._format not in SUFFIXES:
            raise KVCacheError(
                f"--plot {shown(file)}: a picture is a file that ends with {' or '.join(SUFFIXES)}",
                name="picture-suffix",
            )
        try:
            import matplotlib  # noqa: F401
        except ImportError as error:
            raise KVCacheError(
                f"--plot {shown(file)}: a picture needs matplotlib, which is not installed here "
                f'({shown(str(error))}). Install it: pip install "kvcache-plugin[plot]", or pip '
                "install matplotlib",
                name="matplotlib-missing",
            ) from error

    def draw(self, report: CheckpointReport, other: CheckpointReport | None = None) -> None:
        """Draw a report, and the scales of another one behind it.

        :raises KVCacheError: when the file cannot be written.
        """
        import matplotlib as mpl
        from matplotlib.figure import Figure

        data = io.BytesIO()
        with mpl.rc_context(_SETTINGS), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a name that the font has no letters for
            # A figure by itself draws with Agg or as SVG, and needs no display.
            figure = Figure(figsize=(10, 4.6), layout="constrained")
            _draw(figure, report, other)
            metadata = {"Date": None} if self._format == ".svg" else None
            figure.savefig(data, format=self._format[1:], dpi=150, metadata=metadata)
        try:
            self._file.write_bytes(data.getvalue())
        except OSError as error:
            raise KVCacheError(
                f"--plot {shown(os.fspath(self._file))}: it cannot be written: {error.strerror}",
                name="picture-not-written",
            ) from error


def _draw(figure: Any, report: CheckpointReport, other: CheckpointReport | None) -> None:
    rows = rows_of(report)
    axes = figure.add_subplot()
    axes.set_yscale("log")
    axes.grid(axis="y", alpha=0.25)
    places = _places(rows)
    for side in _SIDES:
        _draw_side(axes, rows, places, side)
    if other is not None:
        _draw_other(axes, rows, places, other, _other_name(report.path, other.path))
    _draw_problems(axes, rows, places)
    _leave_room(axes, rows)
    for side in _SIDES:
        _draw_edges(axes, rows, places, side)
    if any(_corrupt(rows, places, side) for side in _SIDES):
        style = {"color": "white", "markeredgecolor": _PROBLEM, "marker": "^", "linestyle": ""}
        axes.plot([], [], label="has no place on the axis", **style)
    _name_layers(axes, rows)
    axes.set_ylabel("stored scale")
    name = shown(_base(report.path), most=80)
    figure.suptitle(name, x=0.01, ha="left", fontweight="bold", parse_math=False)
    axes.set_title(report.summary, loc="left", fontsize=9, color="#555555", parse_math=False)
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside lower left", ncols=5, frameon=False, fontsize=9)
    else:
        axes.text(0.5, 0.5, "no K/V scales", transform=axes.transAxes, ha="center")


def _base(path: str) -> str:
    return os.path.basename(os.path.abspath(path))


def _other_name(path: str, other: str) -> str:
    """The other checkpoint's name; its path as it was named where both have the same."""
    name = other if _base(other) == _base(path) else _base(other)
    # matplotlib takes what stands between two of them for a formula.
    return shown(name, most=40).replace("$", r"\$")


def _places(rows: Sequence[Row]) -> list[int]:
    """Where each layer stands: at its number, or, where two have the same, in a row."""
    numbers = [row.number for row in rows]
    if None in numbers or len(set(numbers)) < len(numbers):
        return list(range(len(rows)))
    return [number for number in numbers if number is not None]


def _draw_side(axes: Axes, rows: Sequence[Row], places: Sequence[int], side: str) -> None:
    colour, marker = _SIDES[side]
    stored = [row.values(side) for row in rows]
    highs = [_if_drawn(max, values) for values in stored]
    lows = [_if_drawn(min, values) for values in stored]
    if all(map(math.isnan, highs)):
        return
    per_head = any(low < high for low, high in zip(lows, highs, strict=True))
    label = f"{side.upper()} scale" + (", largest of the KV heads" if per_head else "")
    size = 5 if len(rows) <= 100 else 3
    style = {"color": colour, "marker": marker, "markersize": size, "linewidth": 1.2}
    axes.plot(places, highs, label=label, gid=f"{side}-scales", **style)
    if per_head:
        axes.vlines(places, lows, highs, color=colour, alpha=0.5, linewidth=2)


def _draw_other(
    axes: Axes, rows: Sequence[Row], places: Sequence[int], other: CheckpointReport, name: str
) -> None:
    """The other checkpoint's scales, behind, in the layers of the same names, else numbers."""
    by_name = {row.name: row for row in rows_of(other)}
    by_number = {row.number: row for row in by_name.values()}
    named = any(row.name in by_name for row in rows)
    for side, (colour, marker) in _SIDES.items():
        found = [by_name.get(row.name) if named else by_number.get(row.number) for row in rows]
        heights = [_if_drawn(max, row.values(side) if row else ()) for row in found]
        if not all(map(math.isnan, heights)):
            label = f"{side.upper()} scale of {name}"
            style = {"color": colour, "marker": marker, "markersize": 4, "linestyle": ":"}
            style |= {"alpha": 0.45, "zorder": _BEHIND}
            axes.plot(places, heights, label=label, gid=f"{side}-other", **style)


def _draw_problems(axes: Axes, rows: Sequence[Row], places: Sequence[int]) -> None:
    kinds = dict.fromkeys(kind for row in rows for kind in row.problems)
    label = f"problem: {', '.join(kinds)}"
    few = sum(bool(row.problems) for row in rows) <= _MOST_WORDS and len(rows) <= _WIDE_BANDS
    for row, place in zip(rows, places, strict=True):
        if row.problems:
            style = {"color": _PROBLEM, "alpha": 0.14, "linewidth": 0}
            axes.axvspan(place - 0.5, place + 0.5, label=label, gid=f"problem-{place}", **style)
            label = ""
            if few and len(kinds) > 1:
                _write_kinds(axes, row, place)


def _write_kinds(axes: Axes, row: Row, place: int) -> None:
    """Along the left edge of the band, where no scale is drawn."""
    axes.annotate(
        ", ".join(row.problems),
        (place - 0.5, 0.1),
        xycoords=axes.get_xaxis_transform(),
        xytext=(3, 0),
        textcoords="offset points",
        rotation=90,
        ha="left",
        va="bottom",
        fontsize=8,
        color=_PROBLEM,
    )


def _draw_edges(axes: Axes, rows: Sequence[Row], places: Sequence[int], side: str) -> None:
    """Numbers without a place on the axis: NaN and infinity above it, the others below."""
    colour, _ = _SIDES[side]
    # Both sides of one layer stand beside each other.
    shift = {"k": -0.16, "v": 0.16}[side]
    corrupt = _corrupt(rows, places, side)
    for place, value in corrupt:
        above = math.isnan(value) or value > 1
        axes.plot(
            [place + shift],
            [0.97 if above else 0.03],
            transform=axes.get_xaxis_transform(),
            color=colour,
            marker="^" if above else "v",
            markersize=8,
            linestyle="",
            markeredgecolor=_PROBLEM,
            gid=f"{side}-corrupt-{place}",
        )
        if len(corrupt) > _MOST_WORDS:
            continue
        axes.annotate(
            f"{side.upper()} {value:.3g}",
            (place + shift, 0.97 if above else 0.03),
            xycoords=axes.get_xaxis_transform(),
            xytext=(6 if side == "v" else -6, 0),
            textcoords="offset points",
            ha="left" if side == "v" else "right",
            va="center",
            fontsize=8,
            color=_PROBLEM,
        )


def _leave_room(axes: Axes, rows: Sequence[Row]) -> None:
    """Above and below the scales, for numbers that have no place on the axis."""
    values = [v for row in rows for side in _SIDES for v in row.values(side) if _has_place(v)]
    low, high = axes.get_ylim() if values else (0.01, 1.0)
    room = max(1.0, math.log10(high / low)) * 0.12
    axes.set_ylim(low / 10**room, high * 10**room)
    axes.margins(x=0.02)


def _name_layers(axes: Axes, rows: Sequence[Row]) -> None:
    from matplotlib.ticker import MaxNLocator

    stacks = dict.fromkeys(row.name for row in rows)
    places = _places(rows)
    if places and places == [row.number for row in rows]:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=16, min_n_ticks=1))
        label = shorten(stacks, most=3)
    else:
        step = max(1, math.ceil(len(rows) / _MOST_LABELS))
        axes.set_xticks(
            places[::step],
            [shown(row.name, most=40) for row in rows[::step]],
            rotation=30,
            ha="right",
            fontsize=8,
            parse_math=False,
        )
        label = "layer"
    axes.set_xlabel(label, fontsize=9, parse_math=False)
    if places:
        axes.set_xlim(min(places) - 0.7, max(places) + 0.7)


def _corrupt(rows: Sequence[Row], places: Sequence[int], side: str) -> list[tuple[int, float]]:
    """The first number of each layer that has no place on the axis, and where the layer stands."""
    found = [
        (place, next((value for value in row.values(side) if not _has_place(value)), None))
        for row, place in zip(rows, places, strict=True)
    ]
    return [(place, value) for place, value in found if value is not None]


def _has_place(value: float) -> bool:
    """Whether a number is a scale that the axis reaches."""
    return is_scale(value) and 1 / _LARGEST <= value <= _LARGEST


def _if_drawn(choose: Callable[[Values], float], values: Values) -> float:
    """The number that stands for a layer; NaN, which is not drawn, unless all have a place."""
    return choose(values) if values and all(map(_has_place, values)) else math.nan
