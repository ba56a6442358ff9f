"""What is told of an implementation: where it comes from, what it is chosen for, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvcache_plugin.plugins import SELECTED_HOOKS
from kvcache_plugin.serving import Refusal
from kvcache_plugin.settings import BLOCK

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcache_plugin.serving import Serving

BLOCKED: Final = f"blocked by {BLOCK.name}"


@dataclass(frozen=True)
class Implementation:
    """A plugin that was found, whether or not it takes part.

    :param name: that of its entry point, or the one that it was registered with.
    :param distribution: name and version of the package that brings it.
    :param hooks: the hooks that it implements, empty when it was not loaded.
    :param summary: the first line of its docstring.
    :param left_out: why it takes no part, empty when it does.
    """

    name: str
    distribution: str
    hooks: tuple[str, ...] = ()
    summary: str = ""
    left_out: str = ""

    def __str__(self) -> str:
        return f"{self.name!r} ({self.distribution})"

    @property
    def is_broken(self) -> bool:
        """Whether it is left out because it does not work, and not because the user blocked it."""
        return self.left_out not in ("", BLOCKED)


@dataclass(frozen=True)
class Explanation:
    """What one implementation does for a device and format.

    :param name: the implementation's.
    :param distribution: name and version of the package that brings it.
    :param chosen_for: the hooks that it is called for first.
    :param reason: why it is chosen, comes later, or does not take part.
    :param is_broken: whether it takes no part because it, or its ``supports_kv``, does not work.
    """

    name: str
    distribution: str
    chosen_for: tuple[str, ...]
    reason: str
    is_broken: bool = False

    @property
    def chosen(self) -> bool:
        """Whether this is the implementation that quantizes."""
        return "quantize_kv" in self.chosen_for


def explain(found: Implementation, serving: Serving, describe: Callable[[str], str]) -> Explanation:
    """What an implementation does for the device and format that are served.

    :param describe: how the implementation of a name works, in its own words.
    """
    refusal = serving.unsupported.get(found.name)
    if found.left_out:  # its name may be that of one that takes part
        refusal = Refusal(found.left_out, found.is_broken)
    if refusal is not None:
        return Explanation(found.name, found.distribution, (), *refusal)
    chosen_for, reasons = [], []
    before: dict[str, list[str]] = {}  # what comes before it, and for which hooks
    for hook in SELECTED_HOOKS:
        names = serving.callables(hook)
        if found.name in names[:1]:
            chosen_for.append(hook)
        elif found.name in names:
            before.setdefault(names[0], []).append(hook)
        elif found.name in serving.wrappers(hook):
            reasons.append(f"wraps {hook}")
        elif hook in found.hooks:
            reasons.append(serving.why_no_pairs(found.name))
    for name, hooks in before.items():
        everywhere = not chosen_for and len(before) == 1
        reasons.append(
            f"{name} comes before it" + ("" if everywhere else f" for {' and '.join(hooks)}")
        )
    if chosen_for:
        reasons.insert(0, describe(found.name) or "says that it serves this")
    reason = "; ".join(filter(None, reasons))
    reason = reason or "implements none of the hooks that are selected by device"
    return Explanation(found.name, found.distribution, tuple(chosen_for), reason)
