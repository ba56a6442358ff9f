"""What several test modules use."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

import kvcache_plugin as kv
from kvcache_plugin import manager

if TYPE_CHECKING:
    from collections.abc import Iterator

# Before anything imports Triton: its kernels run on the CPU.
os.environ.setdefault("TRITON_INTERPRET", "1")

#: Packages, with tests of their own: ``test_tutorial.py`` runs those.
collect_ignore = ["third_party"]

Register: TypeAlias = Callable[..., Any]

#: What ``install`` says brings an implementation.
THEIRS = "their-package 2.0"


@pytest.fixture
def register() -> Iterator[Register]:
    """``kv.register``, undone after the test."""
    registered = []

    def add(plugin: Any, name: str | None = None) -> Any:
        kv.register(plugin, name)
        registered.append(plugin)
        return plugin

    yield add
    for plugin in reversed(registered):
        with suppress(kv.KVCacheError):
            kv.unregister(plugin)


@pytest.fixture(scope="module")
def reference_serves() -> Iterator[None]:
    """The CPU is left to the reference, in all tests of a module."""
    found = manager.Manager(frozenset({"cpu_fast"}))
    found.discover()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manager, "_manager", found)
        yield


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes implementations look as if packages had brought them, by their names."""

    def found(**plugins: Any) -> None:
        def entry_point(name: str, plugin: Any) -> Any:
            def load() -> Any:
                if isinstance(plugin, Exception):
                    raise plugin
                return plugin

            return SimpleNamespace(name=name, load=load)

        points = [(THEIRS, entry_point(name, plugin)) for name, plugin in plugins.items()]
        monkeypatch.setattr(manager, "find_entry_points", lambda: points)

    found()
    return found
