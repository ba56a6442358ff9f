"""What being loaded costs an engine: ``python -m tests.benchmarks.loaded``.

Prints the table of ``docs/performance.md``: what import and ``register()`` add to each engine's own
start, what the checks of a load take, and what a call takes more than the implementation that it
chooses; and how that grows with layers, tokens and implementations. What happens once in a process
is the median of several fresh ones, with the smallest and the largest; calls are the median of
many rounds, with the quartiles. The engines run in the environments of the engine tests.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import kvcache_plugin as kv
from tests.benchmarks import checks, overhead
from tests.engine.checkout import install_plugin
from tests.engine.serving import run_python

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

RUNS = 7
LAYERS = (1, 32, 128)
TOKENS = (1, 256, 4096)
MORE = (10, 100)
_TIMED = """
import time
{before}
started = time.perf_counter()
{timed}
print("SECONDS", time.perf_counter() - started)
"""
_IMPORT = _TIMED.format(before="import torch", timed="import kvcache_plugin")
_EVERYTHING = _TIMED.format(
    before="import torch",
    timed="import kvcache_plugin as kv; kv.quantize_kv, kv.validate_kv_scales, kv.explain",
)
_VLLM = "from kvcache_plugin.hosts.vllm import register; register()"
_SGLANG = "from kvcache_plugin.hosts.sglang import register; register()"
_APPLY = "from sglang.srt.plugins.hook_registry import HookRegistry; HookRegistry.apply_hooks()"
# What is timed, the engine, what it has imported by itself by then, and the code. SGLang's
# detokenizer is the process that needs least of what our seams are in.
_ENGINES = [
    ("`register()` in vLLM", "vllm", "import vllm.engine.arg_utils", _VLLM),
    (
        "`register()` in SGLang's detokenizer",
        "sglang",
        "import sglang.srt.managers.detokenizer_manager",
        _SGLANG,
    ),
    (
        "SGLang applies our hooks: it looks through all modules for each",
        "sglang",
        f"import sglang.srt.managers.scheduler\n{_SGLANG}",
        _APPLY,
    ),
]
_PROCESS = "each process"
_CALLS = ("quantize_kv", "quantize_kv_pair", "dequantize_kv")


def main() -> None:
    print("| what | when | takes |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        site = install_plugin(Path(folder))
        for what, when, takes in (*_started(site), *_checked(site), *_called()):
            print(f"| {what} | {when} | {takes} |", flush=True)


def _started(site: Path) -> Iterator[tuple[str, str, str]]:
    """What happens before a model is loaded, after the engine's own imports."""
    for what, code in (
        ("`import kvcache_plugin`, after torch", _IMPORT),
        ("the import of every public name, after torch", _EVERYTHING),
    ):
        yield what, _PROCESS, _milliseconds([_run_here(["-c", code], site)[0] for _ in range(RUNS)])
    for what, engine, before, timed in _ENGINES:
        code = _TIMED.format(before=before, timed=timed)
        logs = (run_python(engine, ["-c", code], site=[site])[1] for _ in range(RUNS))
        yield what, _PROCESS, _milliseconds([_seconds(log)[0] for log in logs])


def _checked(site: Path) -> Iterator[tuple[str, str, str]]:
    """What the first load of a process takes, or its first call."""
    script = str(Path(checks.__file__).resolve())

    def run(layers: int, more: int, **variables: str) -> list[float]:
        return _run_here([script, str(layers), str(more)], site, **variables)

    def runs(layers: int, more: int) -> list[tuple[float, ...]]:
        return list(zip(*(run(layers, more) for _ in range(RUNS)), strict=True))

    homes = [str(site.parent / f"cache_{i}") for i in range(RUNS)]
    compiled = [run(1, 0, XDG_CACHE_HOME=home)[2] for home in homes]
    found, loaded, with_layers = [], [], []
    for layers in LAYERS:
        find, _, kernels, check = runs(layers, 0)
        found += find
        loaded += kernels
        with_layers.append(_milliseconds(check))
    registered, with_more = [], []
    for more in MORE:
        _, register, _, check = runs(LAYERS[-1], more)
        registered.append(_milliseconds(register))
        with_more.append(_milliseconds(check))
    yield "finding the implementations", "the first load or call", _milliseconds(found)
    once = "once, for a user and a compiler"
    yield "compiling the C kernels for a CPU", once, _milliseconds(compiled)
    yield "loading them", "the first load or call on a CPU", _milliseconds(loaded)
    yield f"checking {_either(LAYERS)} layers", "each load", _either(with_layers)
    more = f"{_either(MORE)} more implementations"
    yield f"checking {LAYERS[-1]} layers with {more}", "each load", _either(with_more)
    yield f"registering {more}", "the first load or call", _either(registered)


def _called() -> Iterator[tuple[str, str, str]]:
    """What a call takes more than that of the implementation, which here answers at once."""
    torch.set_num_threads(1)
    nothing = overhead.Nothing()
    kv.register(nothing, "nothing")
    for name in _CALLS:
        takes = [_more(_call(nothing, name, tokens)) for tokens in TOKENS]
        yield f"`{name}` of {_either(TOKENS)} tokens", "each call", _either(takes)
    takes = []
    for more in MORE:
        others = [checks.Elsewhere() for _ in range(more)]
        for i, other in enumerate(others):
            kv.register(other, f"elsewhere_{i}")
        takes.append(_more(_call(nothing, _CALLS[0], TOKENS[0])))
        for other in others:
            kv.unregister(other)
    what = f"`{_CALLS[0]}` of 1 token with {_either(MORE)} more implementations"
    yield what, "each call", _either(takes)
    kv.unregister(nothing)


def _call(nothing: overhead.Nothing, name: str, tokens: int) -> overhead.Row:
    rows = overhead.rows_of("nothing", nothing, "fp8_e4m3", (tokens, *overhead.SHAPE[1:]))
    return next(row for row in rows if row.what == f"nothing: {name}, fp8_e4m3")


def _more(row: overhead.Row) -> str:
    more = [public - direct for direct, public in overhead.rounds(row)]
    low, median, high = statistics.quantiles(more, n=4)
    return f"{median:.1f} µs ({low:.1f} to {high:.1f})"


def _either(parts: Sequence[object]) -> str:
    return " / ".join(f"{part:,}" if isinstance(part, int) else str(part) for part in parts)


def _run_here(arguments: Sequence[str], site: Path, **variables: str) -> list[float]:
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=True,
        cwd=site,
        env={**os.environ, "PYTHONPATH": str(site), **variables},
    )
    return _seconds(done.stdout)


def _seconds(output: str) -> list[float]:
    (line,) = (line for line in output.splitlines() if line.startswith("SECONDS "))
    return [float(number) for number in line.split()[1:]]


def _milliseconds(seconds: Sequence[float]) -> str:
    times = [1000 * second for second in seconds]
    low, median, high = min(times), statistics.median(times), max(times)
    return f"{median:.1f} ms ({low:.1f} to {high:.1f})"


if __name__ == "__main__":
    main()
