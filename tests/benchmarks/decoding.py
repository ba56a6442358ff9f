"""What the plugin costs while serving: ``python -m tests.benchmarks.decoding [vllm] [sglang]``.

Two processes of the same engine, one with the plugin and one without, are started on the same
checkpoint and decode in turns; the one that waits is stopped, for SGLang is busy while it waits. A
process can be some percent faster than its twin for as long as it lives, so several pairs are
started, with the plugin first in every other one. Printed is the speed with the plugin over that
without: the mean of the pairs, and the pairs, each the median of the ratios of neighbouring turns,
which a machine that is slow for a minute slows alike. The engines run in the environments of the
engine tests.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests.engine import venvs
from tests.engine.checkout import install_plugin
from tests.engine.checkpoints import Checkpoint
from tests.engine.serving import environment

if TYPE_CHECKING:
    from collections.abc import Iterator

PAIRS = 4
TURNS = 8
TOKENS = 24
BATCHES = (1, 8)
_LAYERS = 4
#: Some 60 million weights a layer, as in a model of a billion.
_HIDDEN_SIZE = 3072
_MODEL = Checkpoint(
    "decoding",
    dict.fromkeys(range(_LAYERS), (0.05, 0.06)),
    num_hidden_layers=_LAYERS,
    hidden_size=_HIDDEN_SIZE,
)


def main() -> None:
    engines = sys.argv[1:] or list(venvs.ENGINES)
    print(
        f"{_LAYERS} layers of {_HIDDEN_SIZE}, FP8 KV cache on the CPU, {PAIRS} pairs of processes, "
        f"{TURNS} turns of {TOKENS} tokens: speed with the plugin over that without"
    )
    with tempfile.TemporaryDirectory() as folder:
        site = install_plugin(Path(folder))
        checkpoint = _MODEL.write(Path(folder))
        for engine in engines:
            pairs = [
                _compare(engine, checkpoint, site, Path(folder), first=pair % 2)
                for pair in range(PAIRS)
            ]
            for batch in BATCHES:
                ratios = [pair[batch] for pair in pairs]
                each = ", ".join(f"{ratio:.3f}" for ratio in ratios)
                mean = statistics.geometric_mean(ratios)
                print(f"{engine:7} {batch} requests at once: {mean:.3f} ({each})", flush=True)


def _compare(
    engine: str, checkpoint: Path, site: Path, folder: Path, *, first: int
) -> dict[int, float]:
    """The ratio of one pair of processes, for each number of requests.

    :param first: 1 to start the process with the plugin before that without, which is 0.
    """
    sites: tuple[list[Path], list[Path]] = ([], [site])
    with ExitStack() as stack:
        started = {
            i: stack.enter_context(
                _engine(engine, checkpoint, sites[i], folder / f"{engine}-{i}.log")
            )
            for i in (first, 1 - first)
        }
        return {batch: _ratio(started, batch) for batch in BATCHES}


def _ratio(started: dict[int, subprocess.Popen[str]], batch: int) -> float:
    ratios = []
    for turn in range(TURNS + 1):
        # Who goes first takes turns too.
        order = (0, 1) if turn % 2 else (1, 0)
        took = {i: _decode(started[i], batch) for i in order}
        if turn:  # the first one warms up
            ratios.append(took[0] / took[1])
    return statistics.median(ratios)


def _decode(process: subprocess.Popen[str], batch: int) -> float:
    assert process.stdin is not None
    os.killpg(process.pid, signal.SIGCONT)
    print(batch, TOKENS, file=process.stdin, flush=True)
    seconds = float(_answer(process, "SECONDS"))
    os.killpg(process.pid, signal.SIGSTOP)
    return seconds


def _answer(process: subprocess.Popen[str], word: str) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(word):
            return line.removeprefix(word)
    raise RuntimeError(f"the engine ended before it said {word}")


@contextmanager
def _engine(
    engine: str, checkpoint: Path, site: list[Path], log: Path
) -> Iterator[subprocess.Popen[str]]:
    """An engine that waits for what to decode; its log is printed if it does not come to that."""
    script = Path(__file__).with_name("decode.py")
    with log.open("w") as errors:
        process = subprocess.Popen(
            [str(venvs.ensure(engine)), str(script), engine, str(checkpoint)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment(engine, site),
            cwd=log.parent,
            start_new_session=True,
        )
        try:
            _answer(process, "READY")
            os.killpg(process.pid, signal.SIGSTOP)
            yield process
        except RuntimeError:
            print(log.read_text(errors="replace"), file=sys.stderr)
            raise
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


if __name__ == "__main__":
    main()
