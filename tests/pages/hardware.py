"""Who serves which device and format, how, and why the others do not: what ``explain`` says.

It says the same on every machine with Triton and a C compiler, and without FlashInfer.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from typing import TYPE_CHECKING, Final

from kvcache_plugin import explain
from kvcache_plugin.formats import BUILT_IN
from tests.pages.markdown import code, codes, table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvcache_plugin import Explanation

FORMATS: Final = tuple(each.name for each in BUILT_IN)
DEVICES: Final = (
    *("cpu", "sm_80", "sm_89", "sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121"),
    *("gfx90a", "gfx942", "gfx950"),
)
#: Stands for the device in a reason.
_ANY: Final = "…"


@cache
def _explained() -> Mapping[tuple[str, str], Sequence[Explanation]]:
    return {(device, name): explain(device, name) for device in DEVICES for name in FORMATS}


def _chosen(device: str, name: str) -> Explanation:
    (found,) = (row for row in _explained()[device, name] if row.chosen)
    return found


def who() -> str:
    return table(
        ("device", *FORMATS),
        [
            (code(device), *(code(_chosen(device, name).name) for name in FORMATS))
            for device in DEVICES
        ],
    )


def who_in_short() -> str:
    """A line for the devices where the same implementations serve the same formats."""
    devices_of: dict[tuple[tuple[str, str], ...], list[str]] = defaultdict(list)
    for device in DEVICES:
        formats_of: dict[str, list[str]] = defaultdict(list)
        for name in FORMATS:
            formats_of[_chosen(device, name).name].append(name)
        served = tuple((chosen, ", ".join(names)) for chosen, names in formats_of.items())
        devices_of[served].append(device)
    return table(
        ("device", "formats", "implementation"),
        [
            (codes(devices), names, code(chosen))
            for served, devices in devices_of.items()
            for chosen, names in served
        ],
    )


def how() -> str:
    """A line for each answer, and formats with the same devices in one."""
    devices_of: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for device, name in _explained():
        devices_of[_chosen(device, name).reason][name].append(device)
    rows = []
    for answer, by_format in devices_of.items():
        formats_of: dict[str, list[str]] = defaultdict(list)
        for name, devices in by_format.items():
            formats_of[codes(devices)].append(name)
        for shown, names in formats_of.items():
            rows.append((shown, "all" if tuple(names) == FORMATS else ", ".join(names), answer))
    return table(("device", "format", "how"), rows)


def why_not() -> str:
    """The reason of each implementation, and of it on one device where that has its own."""
    reasons: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for implementation, device, reason in dict.fromkeys(_unfit()):
        reasons[implementation][reason].append(device)
    rows = []
    for implementation, found in reasons.items():
        usual = max(found, key=lambda reason: len(found[reason]))
        rows.append((code(implementation), usual))
        rows += [
            (f"{code(implementation)} on {codes(devices)}", reason)
            for reason, devices in found.items()
            if reason != usual
        ]
    return table(("implementation", "reason"), rows)


def _unfit() -> Iterator[tuple[str, str, str]]:
    """What does not serve a device: its name, the device, and the reason."""
    for (device, _), rows in _explained().items():
        for row in rows:
            if not row.chosen and not row.reason.endswith(" comes before it"):
                yield row.name, device, row.reason.replace(device, _ANY)
