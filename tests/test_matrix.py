"""What the matrix of releases takes for a failure; no engine is started."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine import matrix
from tests.engine.serving import Run

LINE = "INFO kvcache_plugin 0.1.0 is active in vLLM, mode strict: checked the K/V scales\n"
LAYER = "model.layers.1.self_attn.attn: fp8 KV cache scales must be finite, got k_scale=nan"
SEAMS = {"a.a": "", "a.b": "a.b is missing"}
ALONE = Run(0, (1, 2), "")


@pytest.mark.parametrize(
    ("run", "failure"),
    [
        (Run(0, (1, 2), LINE), ""),
        (Run(1, None, LINE), "was not served, exit status 1"),
        (Run(1, (1, 2), LINE), "was not served, exit status 1"),
        (Run(0, (1, 3), LINE), "gave (1, 3), and without the plugin (1, 2)"),
        (Run(0, (1, 2), ""), "0 lines said"),
        (Run(0, (1, 2), LINE * 2), "2 lines said"),
        (
            Run(0, (1, 2), f"{LINE}ERROR kvcache_plugin failed while writing"),
            "failed while writing",
        ),
        (Run(0, (1, 2), f"{LINE}WARNING kvcache_plugin leaves out a seam: a.b is missing"), ""),
    ],
)
def test_sound(run: Run, failure: str) -> None:
    assert_says(matrix.sound_failure(ALONE, run, SEAMS), failure)


@pytest.mark.parametrize(
    ("run", "failure"),
    [
        (Run(1, None, LAYER), ""),
        (Run(0, (1, 2), LAYER), "did not stop the load"),
        (Run(0, None, LAYER), "did not stop the load"),
        (Run(1, (1, 2), LAYER), "did not stop the load"),
        (Run(1, None, ""), "did not name the layer and the value"),
        (Run(1, None, LAYER.replace("nan", "1.0")), "did not name the layer and the value"),
        (Run(1, None, LAYER.replace("layers.1", "layers.0")), "did not name the layer"),
    ],
)
def test_corrupt(run: Run, failure: str) -> None:
    assert_says(matrix.corrupt_failure(run), failure)


@pytest.mark.parametrize(
    ("examined", "failure"),
    [
        ({}, ""),
        ({"raised": "KeyError('x')"}, "register() raised KeyError('x')"),
        ({"warnings": ["cannot hook vLLM"]}, "register() warned: cannot hook vLLM"),
        ({"warnings": ["leaves out a seam: a.b is missing"]}, ""),
        ({"warnings": ["leaves out a seam: a.c is missing"]}, "register() warned: leaves out"),
    ],
)
def test_register(examined: dict[str, Any], failure: str) -> None:
    quiet = {"raised": "", "warnings": [], "seams": SEAMS}
    assert_says(matrix.register_failure({**quiet, **examined}), failure)


def assert_says(found: str, expected: str) -> None:
    assert expected in found
    assert bool(found) == bool(expected)
