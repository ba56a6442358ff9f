"""The released FlashInfer beside a CPU torch: what ``tests/flashinfer_stand_in.py`` stands for.

Without a GPU its kernels cannot run; how they are called, and for which GPUs, can be asked.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine import venvs
from tests.flashinfer_facts import DEVICES, EXPECTED
from tests.flashinfer_stand_in import VERSION

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What ``tests.flashinfer_facts`` prints with the package on the path."""
    workspace = tmp_path_factory.mktemp("flashinfer")
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("FLASHINFER_")},
        "PYTHONPATH": str(venvs.ensure_site("flashinfer")),
        "FLASHINFER_WORKSPACE_BASE": str(workspace),  # it writes into the home folder otherwise
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.flashinfer_facts"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_it_is_what_the_stand_in_stands_for(said: Any) -> None:
    assert said["facts"] == EXPECTED


def test_it_is_used_where_the_modules_say_so(said: Any) -> None:
    how = f"FlashInfer {VERSION} nvfp4_kv_quantize; float32 input by Triton kernels"
    assert said["why_not"] == dict.fromkeys(DEVICES, "")
    assert said["how"] == dict.fromkeys(DEVICES, how)


def test_it_is_imported_when_it_is_used(said: Any) -> None:
    assert said["served"] == [True, False, True, False, False, True, False, True]
    assert said["imported before it was used"] is False


def test_it_refuses_cpu_tensors(said: Any) -> None:
    assert said["on a CPU"] == ["ValueError: device must be a cuda device"] * 2
