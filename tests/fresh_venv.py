"""A venv that has the project, as if somebody had just made it, and downloads nothing.

Torch is large, so the venv borrows it, with what else is needed, from the interpreter that runs the
tests. It does not see the rest of that interpreter's packages: a plugin installed there would take
part. Packages are built without isolation, with the borrowed setuptools; only where it is missing
or old pip fetches it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path, PurePosixPath

_ROOT = Path(__file__).resolve().parents[1]
NOT_SOURCE = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")


def fresh_venv(folder: Path, *borrowed: str) -> Path:
    """Make ``folder/venv``, and return its interpreter.

    :param borrowed: distributions that it has beside those that the project needs.
    """
    python = folder / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True, timeout=120)
    lent = folder / "borrowed"
    _borrow(lent, "torch", "pluggy", "safetensors", "setuptools", *borrowed)
    # On PYTHONPATH the borrowed setuptools comes before the old one that a venv may bring.
    _pip(python, {"PYTHONPATH": str(lent)}, "setuptools>=77")
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    (site / "borrowed.pth").write_text(f"{lent}\n")
    return python


def pip_install(python: Path, *arguments: str) -> None:
    """Install packages from their sources; what they need is there."""
    lent = python.parents[2] / "borrowed"
    _pip(python, {"PYTHONPATH": str(lent)}, "--no-build-isolation", *arguments)


def environment() -> dict[str, str]:
    """The environment without what would reach into the venv from outside."""
    foreign = ("KVCACHE_PLUGIN_", "PYTHON", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if not name.startswith(foreign)}


def _pip(python: Path, variables: dict[str, str], *arguments: str) -> None:
    done = subprocess.run(
        [python, "-m", "pip", "install", "--no-deps", "--disable-pip-version-check", *arguments],
        env=environment() | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def copy_of_project(folder: Path) -> Path:
    """A copy to build from: a build leaves its files beside the sources."""
    folder.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if (_ROOT / name).exists():
            shutil.copy(_ROOT / name, folder)
    shutil.copytree(_ROOT / "kvcache_plugin", folder / "kvcache_plugin", ignore=NOT_SOURCE)
    return folder


def _borrow(folder: Path, *names: str) -> None:
    """Link installed distributions, and those that they require, into a folder."""
    folder.mkdir()
    waiting, seen = list(names), set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            found = distribution(name)
        except PackageNotFoundError:  # an optional requirement, or one of another platform
            continue
        _link(found, folder)
        needed = (line for line in found.requires or () if "extra ==" not in line)
        requirements = (re.match(r"[\w.-]+", line) for line in needed)
        waiting.extend(match.group() for match in requirements if match)


def _link(found: Distribution, folder: Path) -> None:
    tops = {PurePosixPath(file).parts[0] for file in found.files or ()}
    for top in tops - {"..", "__pycache__"}:
        link = folder / top
        if not link.exists():
            link.symlink_to(Path(str(found.locate_file(top))))
