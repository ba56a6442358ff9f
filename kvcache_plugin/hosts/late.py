"""Acts on a module once it has run, so that registering imports nothing by itself."""

from __future__ import annotations

import importlib.util
import logging
import sys
import threading
from importlib.abc import Loader, MetaPathFinder
from typing import TYPE_CHECKING, Any

from kvcache_plugin.errors import anchored

if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from types import ModuleType

logger = logging.getLogger(__name__)


def when_imported(name: str, then: Callable[[ModuleType], None]) -> None:
    """Call ``then(module)`` right after the module has run, or now when it is there already.

    ``then`` must not raise: it would look like a fault of the module.
    """
    module = sys.modules.get(name)
    if module is not None:
        then(module)
        return
    if _watcher not in sys.meta_path:
        sys.meta_path.insert(0, _watcher)
    _watcher.waiting.setdefault(name, []).append(then)


class _Watcher(MetaPathFinder):
    """Finds nothing by itself: it lets the other finders find, and adds a last step to loading.

    It stays where it is, so that a name may be looked up without being imported, and an import
    that fails may be tried again.
    """

    def __init__(self) -> None:
        self.waiting: dict[str, list[Callable[[ModuleType], None]]] = {}
        self._asking = threading.local()

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname not in self.waiting or getattr(self._asking, "others", False):
            return None
        self._asking.others = True
        try:
            spec = importlib.util.find_spec(fullname)
        except Exception as error:
            # The search goes on with the next finder, which meets the same fault and reports it.
            logger.debug(anchored("looking for %s failed: %r", "import-failed"), fullname, error)
            return None
        finally:
            self._asking.others = False
        if spec is not None and spec.loader is not None:
            spec.loader = _LastStep(spec.loader, self.waiting)
        return spec


class _LastStep(Loader):
    """Another loader, and what waits for its module."""

    def __init__(self, loader: Any, waiting: dict[str, list[Callable[[ModuleType], None]]]) -> None:
        self._loader = loader
        self._waiting = waiting

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        # From here on the module looks as if it had been loaded without us.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        for then in self._waiting.pop(module.__name__, ()):
            then(module)


_watcher = _Watcher()
