"""One plugin at a time: where it comes from, whether it is sound, which hooks it implements."""

from __future__ import annotations

import inspect
import logging
import traceback
from functools import partial
from importlib.metadata import Distribution, EntryPoint, distributions, entry_points
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import pluggy

from kvcache_plugin import hookspecs
from kvcache_plugin.errors import anchored, without_place
from kvcache_plugin.formats import KVFormat

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP: Final = hookspecs.PROJECT_NAME

HookName: TypeAlias = Literal[
    "validate_kv_scales", "quantize_kv", "quantize_kv_pair", "dequantize_kv"
]
SELECTED_HOOKS: Final[tuple[HookName, ...]] = (
    "quantize_kv",
    "quantize_kv_pair",
    "dequantize_kv",
    "validate_kv_scales",
)
SUPPORTS: Final = "supports_kv"
PAIR: Final = "quantize_kv_pair"
DESCRIBE: Final = "describe_kv"
FORMATS: Final = "kv_formats"
KNOWN_HOOKS: Final = (SUPPORTS, *SELECTED_HOOKS, DESCRIBE, FORMATS)


class BrokenPluginError(Exception):
    """Why a plugin cannot take part."""


def new_plugin_manager() -> pluggy.PluginManager:
    plugins = pluggy.PluginManager(hookspecs.PROJECT_NAME)
    plugins.add_hookspecs(hookspecs)
    return plugins


def subset(
    plugins: pluggy.PluginManager, takes_part: Callable[[str, str, bool], bool]
) -> pluggy.PluginManager:
    """Some of the hook functions of some plugins, in the same order.

    pluggy's own subset_hook_caller filters anew at each call, and before 1.7 by the name of the
    function and not of the hook.

    :param takes_part: is given the plugin's name, the hook's, and whether the function wraps it.
    """
    chosen = _Subset(hookspecs.PROJECT_NAME)
    chosen.add_hookspecs(hookspecs)
    # To register one takes a look at each of its attributes: that is left to those that take part.
    names = {
        impl.plugin_name
        for hook in KNOWN_HOOKS
        for impl in call_order(plugins, hook)
        if takes_part(impl.plugin_name, hook, wraps(impl))
    }
    for name, plugin in plugins.list_name_plugin():
        if plugin is not None and name in names:
            chosen.takes_part = partial(takes_part, name)
            chosen.register(plugin, name)
    return chosen


class _Subset(pluggy.PluginManager):
    takes_part: Callable[[str, bool], bool]

    def parse_hookimpl_opts(self, plugin: object, name: str) -> pluggy.HookimplOpts | None:
        options = super().parse_hookimpl_opts(plugin, name)
        if options is None:
            return None
        is_wrapper = bool(options.get("wrapper") or options.get("hookwrapper"))
        return options if self.takes_part(options.get("specname") or name, is_wrapper) else None


def check_plugin(plugin: object, name: object) -> tuple[tuple[str, ...], str, tuple[KVFormat, ...]]:
    """Try a plugin on a manager of its own, where a broken one can do no harm.

    :returns: the hooks that it implements, its summary, and the formats that it adds.
    :raises BrokenPluginError: with the reason why it cannot take part.
    """
    if not isinstance(name, str):
        raise BrokenPluginError(f"its name must be a string, got {name!r}")
    if not name:
        raise BrokenPluginError("its name is empty; give it one")
    if isinstance(plugin, type):
        raise BrokenPluginError(f"{plugin.__name__} is a class; give a module or an instance")
    trial = new_plugin_manager()
    try:
        hash(plugin)
        trial.register(plugin, name)
        trial.check_pending()
        hooks = tuple(hook for hook in KNOWN_HOOKS if call_order(trial, hook))
        for hook in hooks:
            _check_called_by_position(trial, hook)
        summary, new_formats = _summary_of(plugin), _formats_of(trial)
    except (KeyboardInterrupt, BrokenPluginError):
        raise
    except BaseException as error:
        raise BrokenPluginError(one_line(error)) from error
    if not hooks:
        raise BrokenPluginError(
            "it implements no hook; mark its functions with kvcache_plugin.hookimpl"
        )
    return hooks, summary, new_formats


def unmarked_hooks(plugin: object, hooks: tuple[str, ...]) -> tuple[str, ...]:
    """What a plugin has a function of its own for that is called like a hook, and is not marked.

    :param hooks: those that it implements.
    """

    def is_own(name: str) -> bool:
        found = inspect.getattr_static(plugin, name, None)
        if not inspect.isfunction(found):
            return False
        # A module may import ours, which are called like the hooks.
        return not inspect.ismodule(plugin) or found.__module__ == plugin.__name__

    return tuple(hook for hook in KNOWN_HOOKS if hook not in hooks and is_own(hook))


def find_entry_points() -> list[tuple[str, EntryPoint]]:
    """The group's entry points, each with its distribution, in the order of those names.

    A distribution whose metadata cannot be read is left out with a warning.
    """
    try:
        found = list(entry_points(group=ENTRY_POINT_GROUP))
    except Exception:  # one of all that are installed: look at each by itself
        found = [entry_point for dist in distributions() for entry_point in _entry_points_of(dist)]
    labelled = [(_label(entry_point), entry_point) for entry_point in found]
    return sorted(labelled, key=lambda pair: (pair[0], pair[1].name))


def _entry_points_of(dist: Distribution) -> list[EntryPoint]:
    try:
        return [point for point in dist.entry_points if point.group == ENTRY_POINT_GROUP]
    except Exception as error:
        logger.warning(
            anchored("the entry points of %s cannot be read: %s", "metadata-unreadable"),
            dist,
            one_line(error),
        )
        return []


def _label(entry_point: EntryPoint) -> str:
    """Name and version of the distribution, or what else is known of where it comes from."""
    try:
        dist = entry_point.dist
        name, version = (dist.name, dist.version) if dist else (None, None)
    except Exception:  # metadata that cannot be read
        name, version = None, None
    return f"{name} {version}" if name else f"the module {entry_point.value}"


def call_order(plugins: pluggy.PluginManager, hook: str) -> list[pluggy.HookImpl]:
    """The hook's functions, the first that is called first."""
    caller: pluggy.HookCaller = getattr(plugins.hook, hook)
    return caller.get_hookimpls()[::-1]


def wraps(impl: pluggy.HookImpl) -> bool:
    return impl.wrapper or impl.hookwrapper


def _check_called_by_position(plugins: pluggy.PluginManager, hook: str) -> None:
    for impl in call_order(plugins, hook):
        try:
            # What a decorator wraps may get its keywords from the decorator.
            signature = inspect.signature(impl.function, follow_wrapped=False)
        except (TypeError, ValueError):  # a function that does not say
            continue
        missing = [
            name
            for name, parameter in signature.parameters.items()
            if parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty
        ]
        if missing:
            raise BrokenPluginError(
                f"its {hook} takes {', '.join(missing)} by keyword alone, and arguments are given "
                "by position; take the * out of its parameters"
            )


def _formats_of(plugins: pluggy.PluginManager) -> tuple[KVFormat, ...]:
    found = tuple(kv_format for answer in plugins.hook.kv_formats() for kv_format in answer)
    for kv_format in found:
        if not isinstance(kv_format, KVFormat):
            raise BrokenPluginError(f"its kv_formats gave {kv_format!r} instead of a KVFormat")
        kv_format.check_dtypes()
    return found


def raised_by(error: BaseException, caller: pluggy.HookCaller) -> str:
    """The plugin whose function the exception came out of, empty when it was none."""
    name = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        for impl in caller.get_hookimpls():
            code = getattr(inspect.unwrap(impl.function), "__code__", None)
            # Two objects of one class share the code of their methods, and differ in their self.
            owner = getattr(impl.function, "__self__", None)
            if frame.f_code is code and (owner is None or frame.f_locals.get("self") is owner):
                name = impl.plugin_name
    return name


def _summary_of(plugin: object) -> str:
    doc = inspect.getdoc(plugin) or ""
    return doc.splitlines()[0].rstrip(".") if doc else ""


def one_line(error: BaseException) -> str:
    """An exception's kind and text, to be put into a message."""
    text = without_place(" ".join(str(error).split()))
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
