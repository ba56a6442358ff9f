"""How fast ``cpu_fast`` is beside others on a CPU: ``python -m tests.benchmarks.cpu``.

Prints a table of ``docs/performance.md`` for each engine's environment, where that engine's own
quantizer is at hand, with torchao beside it. What each is timed against is in one process, in
turns: ``beside.py`` says how.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcache_plugin.bench.text import number
from tests.benchmarks import beside
from tests.engine.checkout import install_plugin
from tests.engine.serving import install, run_python

if TYPE_CHECKING:
    from collections.abc import Iterator

ENGINES = ("vllm", "sglang")
TORCHAO = "torchao==0.18.0"
COLUMNS = ("", "who", "GB/s", "of the copy", "times as fast is `cpu_fast`")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        site = install_plugin(Path(folder))
        torchao = install(Path(folder, "torchao"), TORCHAO)
        for engine in ENGINES:
            status, output = run_python(engine, [beside.__file__], site=[site, torchao])
            if status:
                raise SystemExit(
                    f"{beside.__file__} ended with {status} beside {engine}:\n{output}"
                )
            for line in lines(json.loads(output.splitlines()[-1])):
                print(line, flush=True)


def lines(found: dict[str, Any]) -> Iterator[str]:
    """The table of one environment, as Markdown.

    :param found: what ``beside.py`` prints: ``bench --json``'s object.
    """
    machine = found["machine"]
    versions = ", ".join(f"{name} {value}" for name, value in machine["versions"].items())
    yield f"\n{machine['name']}, {found['threads']} threads, {versions}, load {found['load']}\n"
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|---|---|---|---|---|"
    for contest in found["contests"]:
        timed = {
            one["name"]: one["timings"][0]
            for one in contest["contestants"]
            if one["timings"][0]["outcome"] == "timed"
        }
        what = f"{contest['kv_cache_dtype']}, {contest['direction']}"
        for name, timing in sorted(timed.items(), key=lambda item: -item[1]["us"]["median"]):
            ratio = timing["us"]["median"] / timed["cpu_fast"]["us"]["median"]
            cells = (number(timing["gb_per_s"]), f"{timing['of_copy']:.1%}", number(ratio))
            yield f"| {what} | {name} | {' | '.join(cells)} |"
    yield ""
    for contest in found["contests"]:
        for one in contest["contestants"]:
            if one["timings"][0]["outcome"] != "timed":
                yield f"Not timed: {one['name']}, {one['timings'][0]['reason']}"


if __name__ == "__main__":
    main()
