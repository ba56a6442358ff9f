"""The C kernels of the CPU as a library: compiled once, and kept in the user's cache.

A library is in a folder for its source, its compiler and the machine's instructions, under a name
that is the hash of its bytes: what was damaged is not loaded, and what several processes write at
once is whole. It gets there when its codes have been compared with the reference's.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)

SOURCE: Final = Path(__file__).with_name("cpu_kernels.c")
#: Loads a library and runs every kernel of it. A signal may end this program, and a handler of the
#: engine's may take its exit status: what counts is the line that it prints, which is not in it.
_PROBE: Final = """
import ctypes, sys
tiny = float("5e-324")
try:
    library = ctypes.CDLL(sys.argv[1])
except OSError as error:
    sys.exit(str(error))
if not tiny * 1.0:
    sys.exit("when it is loaded, subnormal numbers become 0 in the whole process")
print("kernels that ran:", library.kvcache_probe())
"""
_PROBED: Final = "kernels that ran: 24"

#: Loops become vector instructions; all values are those of IEEE arithmetic, step by step. Without
#: traps an operation may be computed for values that then do not need it, which no result shows.
_FLAGS: Final = (
    *("-std=c11", "-D_GNU_SOURCE", "-O2", "-ftree-vectorize", "-fPIC", "-shared", "-pthread"),
    *("-ffp-contract=off", "-fno-fast-math", "-fno-unsafe-math-optimizations"),
    *("-fno-math-errno", "-fno-trapping-math"),
)
#: What not every compiler knows, or not for every machine: left out where it is refused, the
#: instructions of the machine last.
_NATIVE: Final = ("-march=native",)
_TUNING: Final = (*_NATIVE, "-fvect-cost-model=dynamic")
_TUNING_X86: Final = ("-mprefer-vector-width=512",)
_LIBRARIES: Final = ("-lm",)
_COMPILERS: Final = ("cc", "gcc", "clang")
#: Compiling takes a second. Longer than this there is something wrong.
_PATIENCE: Final = 30.0
#: Characters of a compiler's complaint that a reason shows.
_MOST_SHOWN: Final = 300
_OTHERS_MAY_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


class UnavailableError(Exception):
    """There is no library, and the reason why, with the remedy."""

    def __init__(self, reason: str, *, is_fault: bool = True) -> None:
        super().__init__(reason)
        self.is_fault = is_fault


@dataclass(frozen=True)
class Library:
    """The functions of the library. A job is packed.

    :param run: keeps the interpreter's lock: for jobs that take some microseconds.
    :param run_long: lets other threads of Python run meanwhile.
    :param usual_arithmetic: undoes what the calling thread has set: its rounding, and whether
        subnormal numbers are zero.
    """

    run: Callable[[bytes], None]
    run_long: Callable[[bytes], None]
    usual_arithmetic: Callable[[], None]

    @classmethod
    def at(cls, path: Path) -> Library:
        """:raises OSError: for a file that cannot be loaded."""
        keeps_lock, releases_lock = ctypes.PyDLL(str(path)), ctypes.CDLL(str(path))
        for run in (keeps_lock.kvcache_run, releases_lock.kvcache_run):
            run.argtypes, run.restype = [ctypes.c_char_p], None
        return cls(
            keeps_lock.kvcache_run,
            releases_lock.kvcache_run,
            releases_lock.kvcache_usual_arithmetic,
        )


@dataclass(frozen=True)
class Compiler:
    """A C compiler that was found.

    :param command: its name, and arguments that the user gives it in ``CC``.
    :param version: what it says of itself.
    """

    command: tuple[str, ...]
    version: str

    def __str__(self) -> str:
        return shlex.join(self.command)


def load(check: Callable[[Library], str]) -> Library:
    """The library, which is compiled when this user has none for this machine.

    :param check: says what is wrong with a library that is new; empty when nothing is.
    :raises UnavailableError: when there is none.
    """
    try:
        source = SOURCE.read_bytes()
    except OSError as error:
        raise UnavailableError(
            f"its source cannot be read ({_what(error)}): install kvcache-plugin again"
        ) from error
    compiler = _find_compiler()
    folder = _folder(_key(source, compiler))
    try:
        return _kept(folder) or _build(compiler, folder, check)
    except OSError as error:
        raise UnavailableError(
            f"{folder} cannot be used ({_what(error)}): set XDG_CACHE_HOME to a folder that can be "
            "written, and that programs may be loaded from"
        ) from error


# The compiler


def _find_compiler() -> Compiler:
    wanted = os.environ.get("CC", "")
    try:
        candidates = [shlex.split(wanted)] if wanted.strip() else [[name] for name in _COMPILERS]
    except ValueError as error:
        raise UnavailableError(f"CC={wanted!r} is no command ({error}): mend it") from error
    for command in candidates:
        if shutil.which(command[0]):
            return Compiler(tuple(command), _output_of([*command, "--version"]))
    if wanted.strip():
        raise UnavailableError(f"CC={wanted!r} is not there: unset it, or name a C compiler")
    raise UnavailableError(
        "needs a C compiler, and there is no cc, gcc or clang: install gcc or clang",
        is_fault=False,
    )


def _compile(compiler: Compiler, target: Path) -> None:
    tuning = (*_TUNING, *(_TUNING_X86 if platform.machine() in ("x86_64", "AMD64") else ()))
    for extra in (tuning, _NATIVE, ()):
        flags = [*_FLAGS, *extra]
        done = _run([*compiler.command, *flags, "-o", str(target), str(SOURCE), *_LIBRARIES])
        if done.returncode == 0 and target.exists():
            return
    raise UnavailableError(
        f"{compiler} failed to compile it ({_complaint(done)}): mend what it says, or name another "
        "C compiler in CC"
    )


def _output_of(command: Sequence[str]) -> str:
    return _run(command).stdout


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a program; when it does not end by itself, end it, and what it has started.

    :raises UnavailableError: when it cannot be run, or hangs, or there is no room for what it says.
    """
    # A file, not a pipe: what outlives the program would hold a pipe open.
    with _temporary_file() as output:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise UnavailableError(
                f"{command[0]} cannot be run ({_what(error)}): mend it"
            ) from error
        try:
            status = process.wait(timeout=_PATIENCE)
        except subprocess.TimeoutExpired as error:
            raise UnavailableError(
                f"{command[0]} did not end within {_PATIENCE:g} s, and was stopped: mend it"
            ) from error
        finally:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        text = output.read().decode(errors="replace")
    return subprocess.CompletedProcess(command, status, text)


def _temporary_file() -> IO[bytes]:
    try:
        return tempfile.TemporaryFile()
    except OSError as error:
        raise UnavailableError(
            f"no temporary file can be made ({_what(error)}): make room for it, or set TMPDIR to a "
            "folder that can be written"
        ) from error


def _complaint(done: subprocess.CompletedProcess[str]) -> str:
    """What a program says is wrong, in a line."""
    said = "; ".join(line.strip() for line in done.stdout.splitlines() if line.strip())
    if len(said) > _MOST_SHOWN:
        said = f"{said[:_MOST_SHOWN]} ..."
    return said or f"exit status {done.returncode}"


# The cache


def _key(source: bytes, compiler: Compiler) -> str:
    """Of all that a library depends on."""
    parts = (
        source.decode("utf-8"),
        str(compiler),
        compiler.version,
        " ".join((*_FLAGS, *_TUNING, *_TUNING_X86, *_LIBRARIES)),
        platform.machine(),
        " ".join(platform.libc_ver()),
        _instructions(),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _instructions() -> str:
    """What the CPU can do, as Linux says it: one home may be that of several machines."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    told = ("flags", "features", "model name", "cpu part", "isa")
    lines = (line for line in text.splitlines() if line.partition(":")[0].strip().lower() in told)
    return "\n".join(sorted(set(lines)))


def _folder(key: str) -> Path:
    """A folder that nobody else can write to."""
    base = _caches()
    ours = base / "kvcache-plugin"
    try:
        _make_private(base)
        _check_parents(base)
        with suppress(FileExistsError):
            ours.mkdir(mode=0o700)
        status = ours.lstat()
        _check_is_ours(ours, status)
        folder = ours / f"cpu-{key}"
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        _check_is_ours(folder, folder.lstat())
    except OSError as error:
        raise UnavailableError(
            f"{ours} cannot be made ({_what(error)}): set XDG_CACHE_HOME to a folder that can be "
            "written"
        ) from error
    return folder


def _caches() -> Path:
    """The folder that programs are to use for what they can make again."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if given.is_absolute():
        return given
    try:
        home = Path.home()
    except RuntimeError as error:
        raise UnavailableError(f"there is no home ({error}): set XDG_CACHE_HOME") from error
    if not home.is_absolute():
        raise UnavailableError(f"HOME={str(home)!r} is no absolute path: set XDG_CACHE_HOME")
    return home / ".cache"


def _make_private(folder: Path) -> None:
    """Make a folder and those above it, each for this user alone whatever the umask is."""
    if not folder.is_dir():
        _make_private(folder.parent)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)


def _check_parents(base: Path) -> None:
    """Anybody who may rename what is in a folder could put another one in its place.

    A group is trusted: with a umask of 002 that of a user, often of this user alone, may write to
    whatever the user makes. In the folders of our own it is not.
    """
    for folder in (base, *base.parents):
        mode = folder.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise UnavailableError(
                f"{folder} can be written by anybody, so nothing is loaded from it: "
                f"chmod o-w {shlex.quote(str(folder))}, or set XDG_CACHE_HOME"
            )


def _check_is_ours(folder: Path, status: os.stat_result) -> None:
    if not stat.S_ISDIR(status.st_mode):
        problem, remedy = "is no folder", "remove it"
    elif status.st_uid != os.geteuid():
        problem, remedy = f"belongs to user {status.st_uid}", "set XDG_CACHE_HOME to another folder"
    elif status.st_mode & _OTHERS_MAY_WRITE:
        problem, remedy = "can be written by others", f"chmod go-w {shlex.quote(str(folder))}"
    else:
        return
    raise UnavailableError(f"{folder} {problem}, so nothing is loaded from it: {remedy}")


def _kept(folder: Path) -> Library | None:
    """The library that is in the folder; one that cannot be used is removed."""
    for path in filter(Path.is_file, sorted(folder.glob("*.so"))):
        with suppress(FileNotFoundError):  # another process may be removing it too
            problem = "is damaged"
            if path.stem == _hash(path):
                try:
                    return Library.at(path)
                except OSError as error:
                    problem = f"cannot be loaded ({str(error).removeprefix(f'{path}: ')})"
            path.unlink()
            logger.warning(
                "%s %s, and is compiled anew [errors#cpu-kernels-damaged]", path, problem
            )
    return None


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _build(compiler: Compiler, folder: Path, check: Callable[[Library], str]) -> Library:
    with tempfile.TemporaryDirectory(prefix="build-", dir=folder) as scratch:
        target = Path(scratch) / "kernels.so"
        _compile(compiler, target)
        _probe(compiler, target)
        library = Library.at(target)
        try:
            problem = check(library)
        except RuntimeError as error:
            raise UnavailableError(f"it cannot be compared with the reference ({error})") from error
        if problem:
            raise UnavailableError(
                f"what {compiler} made of it is wrong ({problem}): name another C compiler in CC"
            )
        target.replace(folder / f"{_hash(target)}.so")
    return library


def _probe(compiler: Compiler, target: Path) -> None:
    """Run each kernel in another process: a wrong instruction must not end this one."""
    if not sys.executable:
        raise UnavailableError(
            "it is tried in another process first, and sys.executable does not say how to start one"
        )
    done = _run([sys.executable, "-I", "-S", "-c", _PROBE, str(target)])
    if _PROBED not in done.stdout.splitlines():
        raise UnavailableError(
            f"what {compiler} made of it does not run here ({_complaint(done)}): name another C "
            "compiler in CC, or, if programs may not be loaded from there, another folder in "
            "XDG_CACHE_HOME"
        )


def _what(error: OSError) -> str:
    return error.strerror or str(error)
