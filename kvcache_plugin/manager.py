"""Finds the implementations, selects them for a device and format, and says why.

Built-in implementations and those of other distributions come in by the same road: each is tried
by itself, and one that is broken is left out with a warning that names its distribution.
"""

from __future__ import annotations

import importlib
import logging
import threading
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from kvcache_plugin import __version__, formats
from kvcache_plugin.description import KVDescription
from kvcache_plugin.errors import KVCacheError, NoImplementationError, add_note, anchored
from kvcache_plugin.explaining import BLOCKED, Implementation, explain
from kvcache_plugin.plugins import (
    DESCRIBE,
    FORMATS,
    PAIR,
    SELECTED_HOOKS,
    SUPPORTS,
    BrokenPluginError,
    call_order,
    check_plugin,
    find_entry_points,
    new_plugin_manager,
    one_line,
    raised_by,
    subset,
    unmarked_hooks,
    wraps,
)
from kvcache_plugin.serving import HookCall, Refusal, Serving
from kvcache_plugin.settings import BLOCK, read_settings, report_problems

if TYPE_CHECKING:
    from collections.abc import Callable

    import pluggy

    from kvcache_plugin.device import Device
    from kvcache_plugin.explaining import Explanation
    from kvcache_plugin.formats import KVFormat
    from kvcache_plugin.plugins import HookName

logger = logging.getLogger(__name__)

OWN_DISTRIBUTION: Final = f"kvcache-plugin {__version__}"
#: Modules of ``kvcache_plugin.hardware``. pluggy calls the last one first; a plugin of another
#: distribution is registered later, and so comes before all of these.
BUILT_IN: Final = (
    "cpu_reference",
    "cpu_fast",
    "triton_gpu",
    "rocm_fnuz",
    "cuda_sm120",
    "cuda_sm100",
    "cuda_sm90",
)


class Manager:
    """The implementations of one process.

    :param block: names that are left out, and not imported.
    """

    def __init__(self, block: frozenset[str] = frozenset()) -> None:
        self._block = block
        self._lock = threading.RLock()
        self._plugins = new_plugin_manager()
        self._found: list[Implementation] = []
        self._formats: dict[str, KVFormat] = {f.name: f for f in formats.BUILT_IN}
        self._added_formats: dict[str, tuple[KVFormat, ...]] = {}
        self._selections: dict[tuple[Device, str], Serving] = {}
        #: The same ones by the names that they were asked for with.
        self._for_quantizing: dict[tuple[Device, object], Serving] = {}

    # Finding

    def discover(self) -> None:
        """Load the built-in implementations, then those of the entry-point group."""
        with self._lock:
            for name in BUILT_IN:
                load = partial(importlib.import_module, f"{__package__}.hardware.{name}")
                self._try(name, OWN_DISTRIBUTION, load)
            for distribution, entry_point in find_entry_points():
                self._try(entry_point.name, distribution, entry_point.load)
            if self.block_problem:
                logger.warning("%s", self.block_problem)

    @property
    def block_problem(self) -> str:
        """Names to leave out that nobody has; empty when there is none."""
        unknown = self._block - {found.name for found in self._found}
        if not unknown:
            return ""
        return anchored(
            f"{BLOCK.name} names no implementation: {', '.join(sorted(unknown))}. The "
            f"implementations are {', '.join(found.name for found in self._found)}",
            "blocked-name-unknown",
        )

    def register(self, plugin: object, name: str | None = None) -> None:
        """Add an implementation at run time.

        :raises KVCacheError: for a plugin that is broken, or a name that is taken.
        """
        name = self._plugins.get_canonical_name(plugin) if name is None else name
        with self._lock:
            try:
                self._admit(plugin, name, "registered at run time")
            except BrokenPluginError as broken:
                raise KVCacheError(
                    f"plugin {name!r} cannot be registered: {broken}", name="plugin-left-out"
                ) from broken

    def unregister(self, plugin: object) -> None:
        """Take an implementation out again.

        :raises KVCacheError: for a plugin that is not registered.
        """
        with self._lock:
            name = self._name_of(plugin)
            if name is None:
                raise KVCacheError(
                    f"{plugin!r} is not registered; the implementations are "
                    f"{', '.join(name for name, _ in self._plugins.list_name_plugin())}",
                    name="plugin-not-registered",
                )
            self._found.remove(self._loaded(name))
            self._plugins.unregister(name=name)
            for kv_format in self._added_formats.pop(name):
                del self._formats[kv_format.name]
            self._forget()

    def _forget(self) -> None:
        """What was selected is selected again when it is next asked for."""
        self._for_quantizing.clear()
        self._selections.clear()

    @property
    def implementations(self) -> tuple[Implementation, ...]:
        """Every plugin that was found, in call order, those that are left out last."""
        with self._lock:
            hooks = (*SELECTED_HOOKS, SUPPORTS, DESCRIBE, FORMATS)
            impls = (impl for hook in hooks for impl in call_order(self._plugins, hook))
            names = dict.fromkeys(impl.plugin_name for impl in impls)
            left_out = [found for found in self._found if found.left_out]
            return (*(self._loaded(name) for name in names), *left_out)

    def _try(self, name: str, distribution: str, load: Callable[[], object]) -> None:
        """Load and admit one plugin; whatever is wrong with it is logged once."""
        if name in self._block:
            self._found.append(Implementation(name, distribution, left_out=BLOCKED))
            return
        try:
            try:
                plugin = load()
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                raise BrokenPluginError(f"it cannot be imported: {one_line(error)}") from error
            self._admit(plugin, name, distribution)
        except BrokenPluginError as broken:
            found = Implementation(name, distribution, left_out=str(broken))
            logger.warning(
                anchored("implementation %s is left out: %s", "plugin-left-out"), found, broken
            )
            self._found.append(found)

    def _admit(self, plugin: object, name: str, distribution: str) -> None:
        hooks, summary, new_formats = check_plugin(plugin, name)
        if self._plugins.has_plugin(name):
            taken = self._loaded(name).distribution
            raise BrokenPluginError(f"the name is taken by {taken}; choose another")
        known_as = self._name_of(plugin)
        if known_as is not None:
            raise BrokenPluginError(f"it is registered already, as {known_as!r}")
        names = [*self._formats, *formats.ALIASES, *(f.name for f in new_formats)]
        for kv_format in new_formats:
            if names.count(kv_format.name) > 1:
                raise BrokenPluginError(f"its format {kv_format.name!r} has a name that is taken")
        try:
            self._plugins.register(plugin, name)
        except ValueError as error:  # it equals another plugin
            raise BrokenPluginError(one_line(error)) from error
        self._formats.update((kv_format.name, kv_format) for kv_format in new_formats)
        self._added_formats[name] = new_formats
        admitted = Implementation(name, distribution, hooks, summary)
        self._found.append(admitted)
        self._forget()
        for hook in unmarked_hooks(plugin, hooks):
            logger.warning(
                anchored(
                    "implementation %s has a function %s that is never called, since it is not "
                    "marked; put kvcache_plugin.hookimpl above it, or give it another name",
                    "hook-not-marked",
                ),
                admitted,
                hook,
            )

    def _name_of(self, plugin: object) -> str | None:
        """The name of this very object; an object that equals it is another plugin."""
        return next((name for name, p in self._plugins.list_name_plugin() if p is plugin), None)

    def _loaded(self, name: str) -> Implementation:
        """The record of a plugin that takes part; one that is left out may have the same name."""
        loaded = (found for found in self._found if found.name == name and not found.left_out)
        return next(loaded, Implementation(name, "not registered any more"))

    # Formats

    def kv_format(self, kv_cache_dtype: object, device: Device | None = None) -> KVFormat | None:
        """The format of this name, ``None`` for a name that nobody has brought.

        :param device: where it is stored, if that is to be looked at.
        """
        if not isinstance(kv_cache_dtype, str):
            return None
        name = kv_cache_dtype if device is None else formats.on_device(kv_cache_dtype, device)
        return self._formats.get(formats.canonical(name))

    @property
    def format_names(self) -> tuple[str, ...]:
        """Every name that ``kv_cache_dtype`` takes."""
        return (*formats.ALIASES, *self._formats)

    # Selecting

    def for_quantizing(self, device: Device, kv_cache_dtype: object) -> Serving | None:
        """What quantizes to the format of this name, as the device stores it.

        ``None`` for a name that nobody has brought.
        """
        try:
            return self._for_quantizing[device, kv_cache_dtype]
        except (KeyError, TypeError):  # asked for the first time, or no name
            return self._new_for_quantizing(device, kv_cache_dtype)

    def for_dequantizing(self, device: Device, kv_cache_dtype: object) -> Serving | None:
        """What dequantizes codes of the format of this name, ``None`` for an unknown one.

        The codes say what they are: ``fp8_e4m3`` codes stay that, also on FNUZ hardware.
        """
        try:
            return self._selections[device, kv_cache_dtype]  # type: ignore[index]
        except (KeyError, TypeError):
            with self._lock:  # another thread may take the format out
                kv_format = self.kv_format(kv_cache_dtype)
                return None if kv_format is None else self._select((device, kv_format.name))

    def no_implementation(self, hook: HookName, serving: Serving) -> NoImplementationError:
        """The error for a hook that gave no result."""
        device, kv_cache_dtype = serving.device, serving.kv_format.name
        what = (
            "each implementation passed, or a wrapper kept its result"
            if serving.callables(hook)
            else "no implementation serves this"
        )
        reasons = "; ".join(
            f"{row.name} ({row.distribution}): {row.reason}" for row in self._explain(serving)
        )
        return NoImplementationError(
            f"{hook} of {kv_cache_dtype} on {device}: {what}. Install or unblock an implementation "
            f"for it. What there is: {reasons or 'nothing'}",
            name="no-implementation",
        )

    def who_answers(self, hook: HookName, serving: Serving) -> str:
        """The plugins that a result of the hook can come from, wrappers too, for a message."""
        names = [impl.plugin_name for impl in call_order(serving.plugins, hook)]
        return ", or if that passed ".join(str(self._loaded(name)) for name in names)

    def explain(self, device: Device, kv_cache_dtype: str) -> tuple[Explanation, ...]:
        """Every implementation in call order: what it is chosen for, and why or why not.

        :raises KVCacheError: for a format that was taken out.
        """
        with self._lock:
            if kv_cache_dtype not in self._formats:
                raise KVCacheError(
                    f"no implementation brings {kv_cache_dtype!r} any more", name="format-unknown"
                )
            serving = self._select((device, kv_cache_dtype))
        return self._explain(serving)

    def _explain(self, serving: Serving) -> tuple[Explanation, ...]:
        def describe(name: str) -> str:
            return self.describe(name, serving.device, serving.kv_format.name).how

        return tuple(explain(found, serving, describe) for found in self.implementations)

    def describe(self, name: str, device: Device, kv_cache_dtype: str) -> KVDescription:
        """What an implementation says of itself; its docstring stands in for a broken answer."""
        description, problem = self._description(name, device, kv_cache_dtype)
        how = description.how.strip().rstrip(".") or self._loaded(name).summary
        return replace(description, how="; ".join(filter(None, (how, problem))))

    def description_problem(self, name: str, device: Device, kv_cache_dtype: str) -> str:
        """What is wrong with the answer of its ``describe_kv``; empty where nothing is."""
        return self._description(name, device, kv_cache_dtype)[1]

    def _description(
        self, name: str, device: Device, kv_cache_dtype: str
    ) -> tuple[KVDescription, str]:
        """The answer of its ``describe_kv``, and what is wrong with it."""
        try:
            answer = self._ask(DESCRIBE, name, device, kv_cache_dtype)
            if isinstance(answer, KVDescription):
                return answer, ""
            problem = f"its describe_kv answered {answer!r} instead of a KVDescription"
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            return KVDescription(), f"{self._whose(DESCRIBE, name, error)} raised {one_line(error)}"
        return KVDescription(), "" if answer is None else problem

    def _new_for_quantizing(self, device: Device, kv_cache_dtype: object) -> Serving | None:
        with self._lock:  # another thread may take the format out
            kv_format = self.kv_format(kv_cache_dtype, device)
            if kv_format is None:
                return None
            serving = self._select((device, kv_format.name))
            self._for_quantizing[device, kv_cache_dtype] = serving
            return serving

    def _select(self, key: tuple[Device, str]) -> Serving:
        with self._lock:
            if key not in self._selections:
                self._selections[key] = self._new_selection(*key)
            return self._selections[key]

    def _new_selection(self, device: Device, kv_cache_dtype: str) -> Serving:
        unsupported = {}
        for impl in self._plugins.hook.supports_kv.get_hookimpls():
            if wraps(impl):
                continue
            refusal = self._why_not(impl.plugin_name, device, kv_cache_dtype)
            if refusal is not None:
                unsupported[impl.plugin_name] = refusal
        # Whoever comes first for quantize_kv decides how K and V are written, and so does a wrapper
        # of it: the quantize_kv_pair of another plugin would pass them by.
        writers = [
            impl
            for impl in call_order(self._plugins, "quantize_kv")
            if impl.plugin_name not in unsupported
        ]
        first = writers[0].plugin_name if writers and not any(map(wraps, writers)) else None
        plugins = subset(
            self._plugins,
            lambda name, hook, is_wrapper: (
                name not in unsupported and (hook != PAIR or is_wrapper or name == first)
            ),
        )
        in_pairs = any(not wraps(impl) for impl in call_order(plugins, PAIR))
        call = partial(self._hook_call, plugins, device, kv_cache_dtype)
        return Serving(
            device,
            self._formats[kv_cache_dtype],
            plugins,
            unsupported,
            validate=call("validate_kv_scales"),
            quantize=call("quantize_kv"),
            pair=call(PAIR) if in_pairs else None,
            dequantize=call("dequantize_kv"),
        )

    def _hook_call(
        self, plugins: pluggy.PluginManager, device: Device, kv_cache_dtype: str, hook: HookName
    ) -> HookCall:
        def note(error: Exception, name: str) -> None:
            if name:
                what = f"{hook} for {kv_cache_dtype} on {device} was called in implementation"
                add_note(error, f"{what} {self._loaded(name)}")

        return HookCall(hook, plugins, note)

    def _why_not(self, name: str, device: Device, kv_cache_dtype: str) -> Refusal | None:
        """Why an implementation does not serve the device and format; ``None`` when it does."""
        try:
            answer = self._ask(SUPPORTS, name, device, kv_cache_dtype)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            problem = f"{self._whose(SUPPORTS, name, error)} raised {one_line(error)}"
            logger.warning(
                anchored("implementation %s is left out for %s on %s: %s", "supports-kv-failed"),
                self._loaded(name),
                kv_cache_dtype,
                device,
                problem,
                exc_info=error,
            )
            return Refusal(problem, is_broken=True)
        if answer is True:
            return None
        if isinstance(answer, str) and answer:
            return Refusal(answer)
        problem = f"its supports_kv answered {answer!r} instead of True or the reason why not"
        return Refusal(problem, is_broken=True)

    def _whose(self, hook: str, name: str, error: BaseException) -> str:
        """The function that raised when a plugin was asked: its own, or one that wraps it."""
        raiser = raised_by(error, getattr(self._plugins.hook, hook))
        if raiser in ("", name):
            return f"its {hook}"
        return f"the {hook} of {self._loaded(raiser)}, which wraps its own,"

    def _ask(self, hook: str, name: str, device: Device, kv_cache_dtype: str) -> object:
        """What one plugin answers to a hook that collects answers; ``None`` for nothing."""
        asked = subset(self._plugins, lambda other, _, is_wrapper: is_wrapper or other == name)
        answers = getattr(asked.hook, hook)(device=device, kv_cache_dtype=kv_cache_dtype)
        # A list of one, unless a wrapper has made something else of it.
        return answers[0] if isinstance(answers, list) and answers else (answers or None)


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
            settings = read_settings()
            report_problems(settings)
            _begun = Manager(settings.block)
            try:
                _begun.discover()
            except BaseException:  # an interrupt: the next call begins again
                _begun = None
                raise
            _manager = _begun
        return _begun
