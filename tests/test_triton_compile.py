"""The Triton kernels as machine code, for GPUs that are not there.

Each kernel is compiled as the launch code launches it, in two processes side by side: in this one
Triton is its interpreter.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.targets.code import Code, faults
from tests.targets.variants import E4M3, E5M2, FAULTY, FNUZ, NVFP4, OTHER_TARGETS, TARGETS

if sys.platform != "linux":  # where the test extra brings it
    pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[1]
ALL_TARGETS = (*TARGETS, *OTHER_TARGETS)
#: Where float32 is cast to FP8 in one step.
CASTING = ("sm_90", "sm_100", "sm_120")
PROCESSES = 2
SECONDS = 600
every_target = pytest.mark.parametrize("target", ALL_TARGETS)
thorough_targets = pytest.mark.parametrize("target", FAULTY)


@dataclass(frozen=True)
class Compiled:
    """What ``tests.targets.compile`` answers for a target."""

    codes: tuple[Code, ...]
    faulty: dict[str, Code]
    steps: dict[str, int]


def compile_in_process(file: Path, targets: tuple[str, ...]) -> dict[str, Compiled]:
    """Triton's own cache is left alone, so that what is looked at was compiled now."""
    environment = {**os.environ, "TRITON_CACHE_DIR": f"{file}.cache"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.targets.compile", str(file), *targets]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers = json.loads(file.read_text(encoding="utf-8"))
    return {
        target: Compiled(
            tuple(Code(**code) for code in answer["codes"]),
            {name: Code(**code) for name, code in answer["faulty"].items()},
            answer["steps"],
        )
        for target, answer in answers.items()
    }


@pytest.fixture(scope="module")
def compiled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Compiled]:
    """What the kernels are on each target that a test of this run asks for."""
    wanted = {
        item.callspec.params["target"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.module is request.module
    }
    targets = tuple(target for target in ALL_TARGETS if target in wanted)
    shares = [targets[first::PROCESSES] for first in range(PROCESSES)]
    folder = tmp_path_factory.mktemp("kernels")
    files = [folder / f"{number}.json" for number in range(PROCESSES)]
    with ThreadPoolExecutor(PROCESSES) as pool:
        first, second = pool.map(compile_in_process, files, shares)
    return first | second


@every_target
def test_kernels_move_16_bytes_at_once_and_spill_and_fuse_nothing(
    compiled: dict[str, Compiled], target: str
) -> None:
    codes = compiled[target].codes
    assert len({code.kernel for code in codes}) == 4
    assert {code.form for code in codes} == {E4M3, E5M2, FNUZ, NVFP4}
    assert [fault for code in codes for fault in faults(code)] == []


@every_target
def test_machine_code_of_each_kernel_is_looked_at(
    compiled: dict[str, Compiled], target: str
) -> None:
    loads = {
        code.kernel: len(re.findall(r"\bLDG\.E\.128\b", code.machine))
        for code in compiled[target].codes
        if code.machine
    }
    assert len(loads) == (4 if target.startswith("sm_") else 0)
    assert all(loads.values())


@every_target
def test_casts_are_the_gpus_own_where_it_has_them(
    compiled: dict[str, Compiled], target: str
) -> None:
    names = {E4M3: "e4m3x2", E5M2: "e5m2x2"} if target in CASTING else {}
    for code in compiled[target].codes:
        if code.kernel != "quantize_fp8":
            continue
        casts = code.count(rf"\bcvt\.rn\.satfinite\.{names.get(code.form)}\.f32")
        assert casts == code.count(r"\bcvt\.\S*e[45]m[23]")
        assert bool(casts) == (code.form in names)
        assert casts % (code.elements // 2) == 0
        # Saturation before the cast leaves NaN what it is.
        assert code.count(r"\bmin\.NaN\.f32") == code.count(r"\bmax\.NaN\.f32") == 2 * casts


@thorough_targets
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("narrow", "bytes at once, instead of"),
        ("spilled", "local memory"),
        ("fused", "fma|fused operations"),
    ],
)
def test_faulty_code_is_told(
    compiled: dict[str, Compiled], target: str, name: str, words: str
) -> None:
    found = faults(compiled[target].faulty[name])
    assert any(re.search(words, fault) for fault in found), found


@thorough_targets
def test_another_number_of_tokens_compiles_nothing(
    compiled: dict[str, Compiled], target: str
) -> None:
    assert set(compiled[target].steps.values()) == {1}
