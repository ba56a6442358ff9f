"""Starts an engine on a checkpoint, in a process of its own, and reports what came of it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tests.engine import venvs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.engine.checkpoints import Checkpoint

__all__ = [
    "EngineTimeoutError",
    "Run",
    "Runner",
    "environment",
    "install",
    "run_python",
    "serve",
]

TIMEOUT = 300.0
"""Seconds for one run. Two idle cores need about 15; the same two under load took over 180."""

_HERE = Path(__file__).resolve().parent
_STAND_INS: Mapping[str, tuple[Path, ...]] = {"vllm": (), "sglang": (_HERE / "stand_in",)}
_NOT_INHERITED = re.compile(
    r"KVCACHE_PLUGIN_.*|VLLM_PLUGINS|SGLANG_PLUGINS|PYTHON(PATH|HOME)|TRITON_INTERPRET"
)
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
}
_ACTIVE = re.compile(r"kvcache_plugin .* is active")
# "kvcache-plugin" is also in the names of folders, which the engines' tracebacks are full of.
_OURS = re.compile(r"kvcache_plugin|kvcache-plugin(?!-tests)|KV cache scale")
_INFORMATION = re.compile(r"\b(INFO|DEBUG)\b")
_LAYER = re.compile(r"model\.layers\.(\d+)\.self_attn\.attn\b")
_TOKENS = re.compile(r"^TOKENS \[([\d, ]*)\]$", re.MULTILINE)


class EngineTimeoutError(RuntimeError):
    """The engine neither served nor ended in time; the message ends with its log."""


@dataclass(frozen=True)
class Run:
    """What one engine did with one checkpoint."""

    returncode: int
    tokens: tuple[int, ...] | None
    """The greedy tokens, or ``None`` when nothing was served."""
    log: str
    """Stdout and stderr of all its processes, as they came."""

    @property
    def served(self) -> bool:
        """Whether it came to its tokens and a clean end."""
        return self.returncode == 0 and self.tokens is not None

    @property
    def outcome(self) -> tuple[bool, tuple[int, ...] | None]:
        """What a client would see; how a process dies may vary from run to run."""
        return (self.returncode == 0, self.tokens)

    @property
    def active(self) -> list[str]:
        """The lines in which the plugin says that it has checked a model."""
        return [line for line in self.log.splitlines() if _ACTIVE.search(line)]

    @property
    def alarms(self) -> list[str]:
        """Anybody's lines that are not plain information.

        SGLang's processes load their plugins before they set their logging up; what is logged
        then at WARNING or worse comes out bare, and what is less is lost. So a line counts
        unless it says that it is INFO or DEBUG.
        """
        return [line for line in self.log.splitlines() if not _INFORMATION.search(line)]

    @property
    def complaints(self) -> list[str]:
        """The plugin's own among the alarms: its logger's or its package's name is in them."""
        return [line for line in self.alarms if _OURS.search(line)]

    @property
    def named_layers(self) -> set[int]:
        """The numbers of the attention layers that the log names."""
        return {int(number) for number in _LAYER.findall(self.log)}


@dataclass(frozen=True)
class Runner:
    """Runs one engine on checkpoints, each combination once."""

    engine: str
    folder: Path
    plugin_site: Path
    _runs: dict[object, Run] = field(default_factory=dict)

    def __call__(
        self,
        checkpoint: Checkpoint,
        *,
        plugin: bool = True,
        mode: str | None = None,
        kv_cache_dtype: str | None = None,
        own_logging: bool = False,
        site: Sequence[Path] = (),
        env: Mapping[str, str] | None = None,
    ) -> Run:
        """Serves ``checkpoint``, or hands on what came of it the last time.

        :param plugin: whether the plugin is on the engine's path.
        :param mode: ``KVCACHE_PLUGIN_MODE``, not set if left out.
        :param kv_cache_dtype: the engine's own name for it; FP8 e4m3 if left out.
        :param own_logging: whether the engine logs in its own format, which may not name levels.
        :param site: further folders of installed packages.
        :param env: further switches.
        """
        paths = ((self.plugin_site,) if plugin else ()) + tuple(site)
        env = dict(env or {}) | ({} if mode is None else {"KVCACHE_PLUGIN_MODE": mode})
        further = tuple(sorted(env.items()))
        key = (checkpoint.name, paths, further, kv_cache_dtype, own_logging)
        if own_logging:
            env |= {"VLLM_LOGGING_CONFIG_PATH": "", "SGLANG_LOGGING_CONFIG_PATH": ""}
        if key not in self._runs:
            self._runs[key] = serve(
                self.engine,
                checkpoint.write(self.folder),
                site=paths,
                env=env,
                kv_cache_dtype=kv_cache_dtype,
            )
        return self._runs[key]


def install(target: Path, *requirements: str | Path) -> Path:
    """Installs packages, without what they depend on, into the folder ``target``.

    With the pip of the running interpreter; a path is a project to build. Their entry points are
    found by whoever has ``target`` on its path.

    :raises RuntimeError: pip failed; the message ends with its output.
    """
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-deps"]
    command += ["--target", str(target), *map(str, requirements)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command)}` exited with {done.returncode}:\n{done.stdout}")
    return target


def serve(
    engine: str,
    checkpoint: Path,
    *,
    site: Sequence[Path] = (),
    env: Mapping[str, str] | None = None,
    kv_cache_dtype: str | None = None,
    tp_size: int = 1,
    timeout: float = TIMEOUT,
) -> Run:
    """Lets ``engine`` generate a few greedy tokens from ``checkpoint``.

    The engine gets a session of its own, and whatever is left of that when it ends is killed.
    Plugin switches of the calling environment do not reach it.

    :param engine: ``"vllm"`` or ``"sglang"``.
    :param site: folders to put on its ``PYTHONPATH``; entry points are found there.
    :param env: environment variables on top.
    :param kv_cache_dtype: the engine's own name for it; FP8 e4m3 if left out.
    :param tp_size: how many processes share each layer (SGLang).
    :raises EngineTimeoutError: it took longer than ``timeout`` seconds.
    """
    arguments = [str(_HERE / f"serve_{engine}.py"), str(checkpoint)]
    if kv_cache_dtype is not None:
        arguments.append(f"--kv-cache-dtype={kv_cache_dtype}")
    if tp_size > 1:
        arguments.append(f"--tp-size={tp_size}")
    returncode, log = run_python(engine, arguments, site=site, env=env, timeout=timeout)
    found = _TOKENS.search(log)
    tokens = tuple(map(int, found[1].split(","))) if found else None
    return Run(returncode, tokens, log)


def run_python(
    engine: str,
    arguments: Sequence[str],
    *,
    site: Sequence[Path] = (),
    env: Mapping[str, str] | None = None,
    timeout: float = TIMEOUT,
) -> tuple[int, str]:
    """Runs Python with ``arguments`` in the engine's environment: its exit status and output.

    :param site: folders to put on its ``PYTHONPATH``.
    :param env: environment variables on top.
    :raises EngineTimeoutError: it took longer than ``timeout`` seconds.
    """
    interpreter = venvs.ensure(engine)
    # A file, not a pipe: a worker that outlives its parent would hold a pipe open.
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch, "log")
        with log.open("wb") as output:
            process = subprocess.Popen(
                [str(interpreter), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment(engine, site, env),
                cwd=scratch,
                start_new_session=True,
            )
            ended = _wait_and_kill_group(process, timeout)
        text = log.read_text(errors="replace")
    if not ended:
        raise EngineTimeoutError(f"{engine} did not end within {timeout:.0f} s:\n{text}")
    return process.returncode, text


def environment(
    engine: str, site: Sequence[Path] = (), env: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The environment variables for a process of ``engine``; the arguments of ``run_python``."""
    interpreter = venvs.ensure(engine)
    variables = {k: v for k, v in os.environ.items() if not _NOT_INHERITED.fullmatch(k)}
    variables |= _ENVIRONMENT
    variables["PATH"] = os.pathsep.join([str(interpreter.parent), os.environ.get("PATH", "")])
    variables["PYTHONPATH"] = os.pathsep.join(map(str, [*site, *_STAND_INS[engine]]))
    return variables | dict(env or {})


def _wait_and_kill_group(process: subprocess.Popen[bytes], timeout: float) -> bool:
    """Waits for the leader, then kills what is left of its group; says whether it ended itself.

    The leader is only reaped after that: until then nobody else can be given its id.
    """
    deadline = time.monotonic() + timeout
    ended = False
    try:
        while not ended and time.monotonic() < deadline:
            state = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            ended = state is not None
            if not ended:
                time.sleep(0.1)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return ended
