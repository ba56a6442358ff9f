"""The benchmarks run, and docs/performance.md has the rows that they print. No time is judged."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from kvcache_plugin import manager
from kvcache_plugin.bench import inputs, run
from kvcache_plugin.bench.as_json import as_json
from tests.benchmarks import beside, checks, cpu, loaded, overhead

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
#: Of what ``checks.py`` prints.
SECONDS = [0.001, 0.002, 0.003, 0.004]
PAGE = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")


@pytest.fixture
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A manager and a number of threads that other tests do not see."""
    monkeypatch.setattr(manager, "_manager", None)
    monkeypatch.setattr(manager, "_begun", None)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("_alone")
def test_the_page_has_the_rows_of_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded, "_run_here", lambda *args, **kwargs: SECONDS)
    monkeypatch.setattr(loaded, "run_python", lambda *args, **kwargs: (0, "SECONDS 0.004\n"))
    monkeypatch.setattr(overhead, "ROUNDS", 4)
    rows = [*loaded._started(ROOT), *loaded._checked(ROOT), *loaded._called()]
    section = PAGE.partition("\n## Cost of being loaded\n")[2].partition("\n## ")[0]
    shown = re.findall(r"^\| ([^|]+) \| ([^|]+) \| [^|]+ \|$", section, re.MULTILINE)
    assert shown[0] == ("what", "when")
    assert shown[1:] == [row[:2] for row in rows]
    takes = {what: takes for what, _, takes in rows}
    assert takes["`register()` in vLLM"] == "4.0 ms (4.0 to 4.0)"
    assert takes["finding the implementations"] == "1.0 ms (1.0 to 1.0)"
    both = "registering 10 / 100 more implementations"
    assert takes[both] == "2.0 ms (2.0 to 2.0) / 2.0 ms (2.0 to 2.0)"
    assert takes["loading them"] == "3.0 ms (3.0 to 3.0)"
    assert takes["checking 1 / 32 / 128 layers"].count("4.0 ms (") == 3


def test_layers_are_checked_in_a_process_of_their_own() -> None:
    script = str(Path(checks.__file__).resolve())
    times = loaded._run_here([script, "2", "3"], ROOT)
    assert len(times) == len(SECONDS)
    assert all(seconds > 0 for seconds in times)


@pytest.mark.usefixtures("_alone")
def test_a_table_has_all_who_quantize_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "_MOST_BYTES", 64 << 10)
    monkeypatch.setattr(run, "_ROUND_SECONDS", 1e-5)
    here = torch.device("cpu")
    found = as_json(run.time_contests(beside.to_do(here), here, tokens=[16]))
    machine, *table = [
        line for line in cpu.lines(found) if line.startswith("|") or "torch " in line
    ]
    assert f"torch {torch.__version__}" in machine
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table]
    assert cells[0] == [*cpu.COLUMNS]
    timed = {tuple(row[:2]): row[2:] for row in cells[2:]}
    assert all(float(row[0]) > 0 for row in timed.values())
    others = {"bare cast", "torch.compile of plain_torch", "cpu_fast, one thread"}
    assert {who for what, who in timed if what == "fp8_e4m3, quantize"} > others | {"copy"}
    assert timed["nvfp4, quantize", "copy"][1] == "100.0%"
    assert timed["nvfp4, dequantize", "cpu_fast"][2] == "1.00"
    rows = re.findall(r"^\| (\w+, \w+) \| ([^|]+) \| [\d.]+ \|", PAGE, re.MULTILINE)
    assert set(timed) <= set(rows)


def test_the_page_names_commands_that_are_there() -> None:
    commands = re.findall(r"python -m (tests\.benchmarks\.\w+)", PAGE)
    assert "tests.benchmarks.loaded" in commands
    for module in commands:
        assert (ROOT / Path(*module.split("."))).with_suffix(".py").exists(), module
