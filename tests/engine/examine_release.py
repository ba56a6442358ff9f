"""Runs inside an engine's environment: does ``register()`` run there, and which seams fit?

``python examine_release.py vllm|sglang`` prints ``EXAMINED {...}``, and fails where the plugin
cannot even be imported.
"""

from __future__ import annotations

import importlib
import json
import logging
import platform
import sys
from importlib.metadata import entry_points, version

from kvcache_plugin import __version__
from kvcache_plugin.hosts import fitting
from kvcache_plugin.hosts.engines import ENGINES, ENTRY_POINT_NAME
from kvcache_plugin.hosts.seams import SEAMS, Seam


class Warnings(logging.Handler):
    """Keeps what the plugin says at WARNING or worse."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def main() -> int:
    """Looks at the sources before anything of the engine is imported, then registers."""
    (engine,) = [engine for engine in ENGINES if engine.package == sys.argv[1]]
    seams = [seam for seam in SEAMS if seam.engine == engine.package]
    in_source = {seam.path: fitting.check_source(seam) for seam in seams}
    warnings = Warnings()
    logging.getLogger("kvcache_plugin").addHandler(warnings)
    raised = register(engine.group)
    imported = {seam.path: check_imported(seam) for seam in seams}
    examined = {
        "title": engine.title,
        "version": engine.version,
        "imported": importlib.import_module(engine.package).__version__,
        "plugin": __version__,
        "packages": {
            "Python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers")},
        },
        "raised": raised,
        "warnings": warnings.said,
        "seams": {path: imported[path] or in_source[path] for path in in_source},
    }
    print(f"EXAMINED {json.dumps(examined)}", flush=True)
    return 0


def register(group: str) -> str:
    """Does what the engine does with our entry point; what it raised, or nothing."""
    (entry_point,) = entry_points(group=group, name=ENTRY_POINT_NAME)
    try:
        entry_point.load()()
    except Exception as error:
        return repr(error)
    return ""


def check_imported(seam: Seam) -> str:
    """What does not fit in the module itself. A wrapper of ours has the signature of its own."""
    try:
        return fitting.check_module(seam, importlib.import_module(seam.module))
    except Exception as error:
        return f"{seam.module} cannot be imported: {error!r}"


if __name__ == "__main__":
    sys.exit(main())
