"""What serves one device and format: the functions of each hook, called in pluggy's order."""

from __future__ import annotations

import inspect
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcache_plugin import hookspecs
from kvcache_plugin.plugins import PAIR, call_order, raised_by, wraps

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import pluggy

    from kvcache_plugin.device import Device
    from kvcache_plugin.formats import KVFormat
    from kvcache_plugin.plugins import HookName


class HookCall:
    """A hook whose first result counts, with its arguments in the order of its specification.

    Where nobody wraps the hook its functions are called from here: pluggy would do the same, and
    take longer. Functions with defaults are left to pluggy, whose releases differ about them.
    ``None`` comes back when each function has passed.

    :param note: is told of an exception, and which plugin it came out of.
    """

    def __init__(
        self, hook: HookName, plugins: pluggy.PluginManager, note: Callable[[Exception, str], None]
    ) -> None:
        self._names = tuple(inspect.signature(getattr(hookspecs, hook)).parameters)
        self._caller: pluggy.HookCaller = getattr(plugins.hook, hook)
        self._note = note
        impls = call_order(plugins, hook)
        self._is_left_to_pluggy = any(wraps(impl) or impl.kwargnames for impl in impls)
        self._steps = [
            (impl.plugin_name, impl.function, _picker(self._names, impl.argnames)) for impl in impls
        ]

    def __call__(self, *arguments: Any) -> Any:
        if self._is_left_to_pluggy:
            return self._call_pluggy(arguments)
        for name, function, pick in self._steps:
            try:
                result = function(*pick(arguments))
            except Exception as error:
                self._note(error, name)
                raise
            if result is not None:
                return result
        return None

    def _call_pluggy(self, arguments: tuple[Any, ...]) -> Any:
        try:
            return self._caller(**dict(zip(self._names, arguments, strict=True)))
        except Exception as error:
            self._note(error, raised_by(error, self._caller))
            raise


class Refusal(NamedTuple):
    """Why a plugin does not serve a device and format.

    :param is_broken: whether its ``supports_kv`` failed to say, and did not say no.
    """

    reason: str
    is_broken: bool = False


@dataclass(frozen=True)
class Serving:
    """The plugins that serve one device and format, and why the others do not.

    :param pair: ``None`` where K and V are quantized one by one.
    """

    device: Device
    kv_format: KVFormat
    plugins: pluggy.PluginManager
    unsupported: Mapping[str, Refusal]
    validate: HookCall
    quantize: HookCall
    pair: HookCall | None
    dequantize: HookCall

    def callables(self, hook: str) -> list[str]:
        """Names of the plugins that answer a hook, the first that is called first."""
        return [impl.plugin_name for impl in call_order(self.plugins, hook) if not wraps(impl)]

    def wrappers(self, hook: str) -> list[str]:
        """Names of the plugins that wrap a hook, the outermost first."""
        return [impl.plugin_name for impl in call_order(self.plugins, hook) if wraps(impl)]

    def why_no_pairs(self, name: str) -> str:
        """Why a plugin's pair is not called; empty where its ``quantize_kv`` is not either."""
        names, wrappers = self.callables("quantize_kv"), self.wrappers("quantize_kv")
        if name not in names:
            return (
                f"its {PAIR} would be called where it comes first for quantize_kv, which it lacks"
            )
        if name != names[0]:
            return ""
        return f"its {PAIR} is not called, since {wrappers[0]} wraps quantize_kv"


def _picker(
    names: Sequence[str], taken: Sequence[str]
) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """A function that picks from all arguments of a hook those that one of its functions takes."""
    places = [names.index(name) for name in taken]
    if places == list(range(len(names))):
        return tuple  # of a tuple: itself
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda arguments: tuple(arguments[place] for place in places)
