"""Installs this checkout's plugin into a folder that is put on an engine's path."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.engine.serving import install

__all__ = ["install_plugin"]

_ROOT = Path(__file__).resolve().parents[2]


def install_plugin(scratch: Path) -> Path:
    """A folder in ``scratch`` with the plugin, and the pluggy that it needs, installed."""
    # Built from a copy: setuptools writes into the tree that it builds, and would also pick up
    # what an earlier build left there.
    source = scratch / "source"
    unneeded = shutil.ignore_patterns(".*", "*.egg-info", "__pycache__", "build", "dist", "shared")
    shutil.copytree(_ROOT, source, ignore=unneeded)
    return install(scratch / "site", source, "pluggy")
