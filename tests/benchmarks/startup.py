"""What being loaded costs: ``python -m tests.benchmarks.startup``.

Prints the time that ``import kvcache_plugin`` adds to torch's own import, and the time that each
engine's ``register()`` adds to the imports that the engine makes before it, each as the median of
several fresh processes. The engines run in the environments of the engine tests.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.engine.checkout import install_plugin
from tests.engine.serving import run_python

RUNS = 5
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
    ("register() in vLLM", "vllm", "import vllm.engine.arg_utils", _VLLM),
    (
        "register() in SGLang's detokenizer",
        "sglang",
        "import sglang.srt.managers.detokenizer_manager",
        _SGLANG,
    ),
    (
        "SGLang applying our hooks, which looks through all modules for each",
        "sglang",
        f"import sglang.srt.managers.scheduler\n{_SGLANG}",
        _APPLY,
    ),
]


def main() -> None:
    print(f"milliseconds, median of {RUNS} processes (smallest to largest)")
    with tempfile.TemporaryDirectory() as folder:
        site = install_plugin(Path(folder))
        _print(
            "import kvcache_plugin, after torch", [_run_here(_IMPORT, site) for _ in range(RUNS)]
        )
        _print(
            "import of every public name, after torch",
            [_run_here(_EVERYTHING, site) for _ in range(RUNS)],
        )
        for what, engine, before, timed in _ENGINES:
            code = _TIMED.format(before=before, timed=timed)
            runs = (run_python(engine, ["-c", code], site=[site]) for _ in range(RUNS))
            _print(f"{what}, after the engine's own imports", [_seconds(log) for _, log in runs])


def _run_here(code: str, site: Path) -> float:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=site,
    )
    return _seconds(done.stdout)


def _seconds(output: str) -> float:
    (line,) = (line for line in output.splitlines() if line.startswith("SECONDS "))
    return float(line.split()[1])


def _print(what: str, seconds: list[float]) -> None:
    milliseconds = [1000 * second for second in seconds]
    print(
        f"{statistics.median(milliseconds):8.1f} ({min(milliseconds):.1f} to "
        f"{max(milliseconds):.1f})  {what}"
    )


if __name__ == "__main__":
    main()
