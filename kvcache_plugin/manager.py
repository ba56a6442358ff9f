"""Finds the implementations, selects them for a device and format, and says why.

Built-in implementations and those of other distributions come in by the same road: each is tried
by itself, and one that is broken is left out with a warning that names its distribution.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import threading
import traceback
from dataclasses import dataclass
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import pluggy

from kvcache_plugin import __version__, formats, hookspecs
from kvcache_plugin.errors import KVCacheError, NoImplementationError, add_note
from kvcache_plugin.formats import KVFormat
from kvcache_plugin.settings import BLOCK, read_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from kvcache_plugin.device import Device

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP: Final = hookspecs.PROJECT_NAME
OWN_DISTRIBUTION: Final = f"kvcache-plugin {__version__}"
#: Modules of ``kvcache_plugin.hardware``. pluggy calls the last one first; a plugin of another
#: distribution is registered later, and so comes before all of these.
BUILT_IN: Final = ("cpu_reference", "rocm_fnuz")

HookName: TypeAlias = Literal["validate_kv_scales", "quantize_kv", "dequantize_kv"]
SELECTED_HOOKS: Final[tuple[HookName, ...]] = (
    "quantize_kv",
    "dequantize_kv",
    "validate_kv_scales",
)
_SUPPORTS: Final = "supports_kv"
_BLOCKED: Final = f"blocked by {BLOCK.name}"
_KNOWN_HOOKS: Final = (_SUPPORTS, *SELECTED_HOOKS, "kv_formats")


@dataclass(frozen=True)
class Implementation:
    """A plugin that was found, whether or not it takes part.

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

    @property
    def is_blocked(self) -> bool:
        """Whether the user left it out."""
        return self.left_out == _BLOCKED

    @property
    def is_broken(self) -> bool:
        """Whether it is left out because it does not work."""
        return bool(self.left_out) and not self.is_blocked


@dataclass(frozen=True)
class Explanation:
    """What one implementation does for a device and format.

    :param chosen_for: the hooks that it is called for first.
    :param reason: why it is chosen, comes later, or does not take part.
    """

    name: str
    distribution: str
    chosen_for: tuple[str, ...]
    reason: str

    @property
    def chosen(self) -> bool:
        """Whether this is the implementation that quantizes."""
        return "quantize_kv" in self.chosen_for


@dataclass(frozen=True)
class _Selection:
    """The callers for one device and format, and why plugins are missing from them."""

    callers: Mapping[str, pluggy.HookCaller]
    unsupported: Mapping[str, str]


class Manager:
    """The implementations of one process.

    :param block: names that are left out, and not imported.
    """

    def __init__(self, block: frozenset[str] = frozenset()) -> None:
        self._block = block
        self._lock = threading.RLock()
        self._plugins = _new_plugin_manager()
        self._found: list[Implementation] = []
        self._formats: dict[str, KVFormat] = {f.name: f for f in formats.BUILT_IN}
        self._added_formats: dict[str, tuple[KVFormat, ...]] = {}
        self._selections: dict[tuple[Device, str], _Selection] = {}

    # Finding

    def discover(self) -> None:
        """Load the built-in implementations, then those of the entry-point group."""
        with self._lock:
            for name in BUILT_IN:
                load = partial(importlib.import_module, f"{__package__}.hardware.{name}")
                self._try(name, OWN_DISTRIBUTION, load)
            for entry_point in _sorted_entry_points():
                self._try(entry_point.name, _distribution(entry_point), entry_point.load)
            unknown = self._block - {found.name for found in self._found}
            if unknown:
                logger.warning(
                    "%s names no implementation: %s. The implementations are %s",
                    BLOCK.name,
                    ", ".join(sorted(unknown)),
                    ", ".join(found.name for found in self._found),
                )

    def register(self, plugin: object, name: str | None = None) -> None:
        """Add an implementation at run time.

        :raises KVCacheError: for a plugin that is broken, or a name that is taken.
        """
        name = name or self._plugins.get_canonical_name(plugin)
        with self._lock:
            try:
                self._admit(plugin, name, "registered at run time")
            except _BrokenPluginError as broken:
                raise KVCacheError(f"plugin {name!r} cannot be registered: {broken}") from broken

    def unregister(self, plugin: object) -> None:
        """Take an implementation out again.

        :raises KVCacheError: for a plugin that is not registered.
        """
        with self._lock:
            name = self._plugins.get_name(plugin)
            if name is None:
                raise KVCacheError(
                    f"{plugin!r} is not registered; the implementations are "
                    f"{', '.join(name for name, _ in self._plugins.list_name_plugin())}"
                )
            self._plugins.unregister(plugin)
            for kv_format in self._added_formats.pop(name):
                del self._formats[kv_format.name]
            self._found = [found for found in self._found if found.name != name]
            self._selections.clear()

    @property
    def implementations(self) -> tuple[Implementation, ...]:
        """Every plugin that was found, in call order, those that are left out last."""
        with self._lock:
            order = {name: i for i, name in enumerate(self._call_order())}
            return tuple(sorted(self._found, key=lambda f: order.get(f.name, len(order))))

    def _try(self, name: str, distribution: str, load: Callable[[], object]) -> None:
        """Load and admit one plugin; whatever is wrong with it is logged once."""
        if name in self._block:
            self._found.append(Implementation(name, distribution, left_out=_BLOCKED))
            return
        try:
            try:
                plugin = load()
            except (Exception, SystemExit) as error:
                raise _BrokenPluginError(f"it cannot be imported: {_one_line(error)}") from error
            self._admit(plugin, name, distribution)
        except _BrokenPluginError as broken:
            logger.warning("implementation %r of %s is left out: %s", name, distribution, broken)
            self._found.append(Implementation(name, distribution, left_out=str(broken)))

    def _admit(self, plugin: object, name: str, distribution: str) -> None:
        new_formats = self._check(plugin, name)
        self._plugins.register(plugin, name)
        self._formats.update((kv_format.name, kv_format) for kv_format in new_formats)
        self._added_formats[name] = new_formats
        hooks = tuple(hook for hook in _KNOWN_HOOKS if name in _implementers(self._plugins, hook))
        self._found.append(Implementation(name, distribution, hooks, _summary(plugin)))
        self._selections.clear()

    def _check(self, plugin: object, name: str) -> tuple[KVFormat, ...]:
        """Try a plugin on a manager of its own, where a broken one can do no harm."""
        if isinstance(plugin, type):
            raise _BrokenPluginError(f"{plugin.__name__} is a class; give a module or an instance")
        taken = next((f for f in self._found if f.name == name and not f.left_out), None)
        if taken is not None:
            raise _BrokenPluginError(f"the name is taken by {taken.distribution}; choose another")
        trial = _new_plugin_manager()
        try:
            hash(plugin)
            trial.register(plugin, name)
            trial.check_pending()
            if self._plugins.is_registered(plugin):
                raise _BrokenPluginError(
                    f"it is registered already, as {self._plugins.get_name(plugin)!r}"
                )
            new_formats = _formats_of(plugin)
        except _BrokenPluginError:
            raise
        except Exception as error:
            raise _BrokenPluginError(_one_line(error)) from error
        if not any(name in _implementers(trial, hook) for hook in _KNOWN_HOOKS):
            raise _BrokenPluginError(
                "it implements no hook; mark its functions with kvcache_plugin.hookimpl"
            )
        for kv_format in new_formats:
            if kv_format.name in self._formats or kv_format.name in formats.ALIASES:
                raise _BrokenPluginError(f"its format {kv_format.name!r} has a name that is taken")
        return new_formats

    # Formats

    def kv_format(self, kv_cache_dtype: str) -> KVFormat | None:
        """The format of this name, ``None`` for a name that nobody has brought."""
        return self._formats.get(formats.canonical(kv_cache_dtype))

    @property
    def format_names(self) -> tuple[str, ...]:
        """Every name that ``kv_cache_dtype`` takes."""
        return (*formats.ALIASES, *self._formats)

    # Selecting

    def call(self, hook: HookName, device: Device, kv_cache_dtype: str, /, **arguments: Any) -> Any:
        """Call the implementations of a hook that serve the device and format, in order.

        An exception goes up as it is, with a note that names the implementation.

        :raises NoImplementationError: when there is none, or each of them passes.
        """
        key = (device, kv_cache_dtype)
        selection = self._selections.get(key) or self._select(key)
        caller = selection.callers.get(hook)
        if caller is None:
            raise self._none(hook, device, kv_cache_dtype, "no implementation serves this")
        try:
            result = caller(**arguments)
        except Exception as error:
            name = _raised_by(error, caller)
            if name:
                add_note(
                    error,
                    f"{hook} for {kv_cache_dtype} on {device} was called in implementation "
                    f"{name!r} of {self._distribution_of(name)}",
                )
            raise
        if result is None:
            raise self._none(hook, device, kv_cache_dtype, "every implementation passed")
        return result

    def explain(self, device: Device, kv_cache_dtype: str) -> tuple[Explanation, ...]:
        """Every implementation in call order: what it is chosen for, and why or why not."""
        selection = self._select((device, kv_cache_dtype))
        first = {
            hook: names[0]
            for hook, caller in selection.callers.items()
            if (names := _callable_names(caller))
        }
        return tuple(self._explain_one(found, selection, first) for found in self.implementations)

    def _explain_one(
        self, found: Implementation, selection: _Selection, first: Mapping[str, str]
    ) -> Explanation:
        chosen_for = tuple(hook for hook in SELECTED_HOOKS if first.get(hook) == found.name)
        later = [
            f"{first[hook]} comes before it for {hook}"
            for hook in SELECTED_HOOKS
            if hook in found.hooks and hook in first and first[hook] != found.name
        ]
        if found.left_out:
            reason = found.left_out
        elif found.name in selection.unsupported:
            reason = selection.unsupported[found.name]
        elif chosen_for:
            reason = "; ".join(filter(None, [found.summary, *later]))
        else:
            reason = "; ".join(later) or "implements none of the hooks that are selected by device"
        return Explanation(found.name, found.distribution, chosen_for, reason)

    def _select(self, key: tuple[Device, str]) -> _Selection:
        with self._lock:
            if key not in self._selections:
                self._selections[key] = self._new_selection(*key)
            return self._selections[key]

    def _new_selection(self, device: Device, kv_cache_dtype: str) -> _Selection:
        unsupported = {}
        for name in _implementers(self._plugins, _SUPPORTS):
            reason = self._why_not(name, device, kv_cache_dtype)
            if reason:
                unsupported[name] = reason
        leave_out = [self._plugins.get_plugin(name) for name in unsupported]
        callers: dict[str, pluggy.HookCaller] = {}
        for hook in SELECTED_HOOKS:
            caller = self._plugins.subset_hook_caller(hook, leave_out)
            if _callable_names(caller):
                callers[hook] = caller
        return _Selection(callers, unsupported)

    def _why_not(self, name: str, device: Device, kv_cache_dtype: str) -> str:
        """Why an implementation does not serve the device and format; empty when it does."""
        others = [plugin for other, plugin in self._plugins.list_name_plugin() if other != name]
        caller = self._plugins.subset_hook_caller(_SUPPORTS, others)
        try:
            answers = caller(device=device, kv_cache_dtype=kv_cache_dtype)
        except Exception as error:
            logger.warning(
                "implementation %r of %s is left out for %s on %s: its supports_kv raised %s",
                name,
                self._distribution_of(name),
                kv_cache_dtype,
                device,
                _one_line(error),
                exc_info=error,
            )
            return f"its supports_kv raised {_one_line(error)}"
        answer = answers[0] if answers else None
        if answer is True:
            return ""
        if isinstance(answer, str) and answer:
            return answer
        return f"its supports_kv answered {answer!r} instead of True or the reason why not"

    def _none(
        self, hook: str, device: Device, kv_cache_dtype: str, what: str
    ) -> NoImplementationError:
        reasons = "; ".join(
            f"{row.name} ({row.distribution}): {row.reason}"
            for row in self.explain(device, kv_cache_dtype)
        )
        return NoImplementationError(
            f"{hook} of {kv_cache_dtype} on {device}: {what}. Install or unblock an implementation "
            f"for it. What there is: {reasons or 'nothing'}"
        )

    def _distribution_of(self, name: str) -> str:
        return next((f.distribution for f in self._found if f.name == name), "an unknown package")

    def _call_order(self) -> list[str]:
        names: dict[str, None] = {}
        for hook in (*SELECTED_HOOKS, _SUPPORTS, "kv_formats"):
            for impl in reversed(getattr(self._plugins.hook, hook).get_hookimpls()):
                names.setdefault(impl.plugin_name)
        return list(names)


class _BrokenPluginError(Exception):
    """Why a plugin cannot take part."""


def _new_plugin_manager() -> pluggy.PluginManager:
    plugins = pluggy.PluginManager(hookspecs.PROJECT_NAME)
    plugins.add_hookspecs(hookspecs)
    return plugins


def _sorted_entry_points() -> list[EntryPoint]:
    """The group's entry points in an order that does not depend on ``sys.path``."""
    found = entry_points(group=ENTRY_POINT_GROUP)
    return sorted(found, key=lambda entry_point: (_distribution(entry_point), entry_point.name))


def _distribution(entry_point: EntryPoint) -> str:
    dist = entry_point.dist
    return f"{dist.name} {dist.version}" if dist else f"the module {entry_point.value}"


def _implementers(plugins: pluggy.PluginManager, hook: str) -> list[str]:
    return [impl.plugin_name for impl in getattr(plugins.hook, hook).get_hookimpls()]


def _callable_names(caller: pluggy.HookCaller) -> list[str]:
    """Names of the plugins that a call reaches, first one first; wrappers answer nothing."""
    return [
        impl.plugin_name
        for impl in reversed(caller.get_hookimpls())
        if not (impl.wrapper or impl.hookwrapper)
    ]


def _formats_of(plugin: object) -> tuple[KVFormat, ...]:
    kv_formats = getattr(plugin, "kv_formats", None)
    if kv_formats is None:
        return ()
    found = tuple(kv_formats())
    for kv_format in found:
        if not isinstance(kv_format, KVFormat):
            raise TypeError(f"kv_formats gives KVFormat objects, got {kv_format!r}")
    return found


def _raised_by(error: BaseException, caller: pluggy.HookCaller) -> str:
    """The plugin whose function the exception came out of, empty when it was none."""
    names: dict[object, str] = {}
    for impl in caller.get_hookimpls():
        code = getattr(inspect.unwrap(impl.function), "__code__", None)
        if code is not None:
            names[code] = impl.plugin_name
    frames: Iterable[Any] = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    found = [names[frame.f_code] for frame in frames if frame.f_code in names]
    return found[-1] if found else ""


def _summary(plugin: object) -> str:
    doc = inspect.getdoc(plugin) or ""
    return doc.splitlines()[0].rstrip(".") if doc else ""


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


_loading = threading.RLock()
_begun: Manager | None = None
_manager: Manager | None = None


def get_manager() -> Manager:
    """The process's manager; the first call finds the implementations."""
    global _begun, _manager
    if _manager is not None:
        return _manager
    with _loading:
        # A plugin that calls us while it is imported sees what has been found so far.
        if _begun is None:
            _begun = Manager(read_settings().block)
            _begun.discover()
            _manager = _begun
        return _begun
