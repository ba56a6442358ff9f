"""The errors that stop a load: the layers that they list, and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvcache_plugin.errors import KVScaleError, anchored, counted, sentences, shown
from kvcache_plugin.hosts.verdicts import with_notes
from kvcache_plugin.settings import COVERAGE, MODE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache_plugin.hosts.coverage import LostScale

_MOST_LAYERS_LISTED: Final = 20


def corrupt(errors: Sequence[KVScaleError], of: int) -> tuple[str, str]:
    """The problem and the remedy of all corrupt layers, each with its own problem.

    :param of: how many layers were checked.
    """
    of_all = f" in {len(errors)} of {of} layers" if of > 1 else ""
    remedies = dict.fromkeys(error.remedy for error in errors)
    return f"corrupt K/V scales{of_all}{_listed([*map(line, errors)])}", sentences(*remedies)


def line(error: KVScaleError) -> str:
    """What is wrong with one layer, in one line."""
    return f"{error.layer}: {anchored(with_notes(error), error.name)}"


def refusal(errors: Sequence[KVScaleError], of: int, note: str = "") -> KVScaleError:
    """The error for them that stops a load.

    :param note: how far the load has come.
    """
    problem, remedy = corrupt(errors, of)
    why = f" ({note})" if note else ""
    way_around = f"{MODE.name}=warn loads the checkpoint as it is"
    return KVScaleError(
        f"kvcache_plugin refuses this checkpoint{why}: {problem}",
        remedy=sentences(remedy, way_around),
        name="checkpoint-refused",
    )


def lost_error(scales: Sequence[LostScale], model: str) -> KVScaleError:
    """What did not arrive, where that does not stop a load.

    :param model: the path that the engine loads.
    """
    lines = [
        f"{one.layer}: {', '.join(one.names)}{f' ({one.reason})' if one.reason else ''}"
        for one in scales
    ]
    number = counted(len(scales), "layer")
    return KVScaleError(
        f"K/V scales in the files did not arrive on {number}{_listed(lines)}",
        remedy="A scale that does not arrive counts as absent. kvcache-plugin check "
        f"{shown(model)} says what each engine makes of its scales, and what to do",
        name="scales-lost",
    )


def lost_refusal(error: KVScaleError) -> KVScaleError:
    """The same where it stops the load."""
    way_around = f"{COVERAGE.name}=warn loads it as it is"
    return KVScaleError(
        f"kvcache_plugin refuses this checkpoint: {error.problem}",
        remedy=sentences(error.remedy, way_around),
        name=error.name,
    )


def _listed(lines: Sequence[str]) -> str:
    """A line for each layer, below what it is a list of; the first twenty by name."""
    first = [f"\n  {line}" for line in lines[:_MOST_LAYERS_LISTED]]
    others = len(lines) - len(first)
    more = [f"\n  and {counted(others, 'more layer')}"] if others else []
    return "".join([*first, *more])
