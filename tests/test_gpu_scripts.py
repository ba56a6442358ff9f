"""The scripts for a GPU can at least be imported where there is none, and name what exists."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import kvcache_plugin as kv

FOLDER = Path(__file__).parent / "gpu"


@pytest.mark.parametrize("module", ["bandwidth", "behaviour"])
def test_imports_and_knows_the_formats(module: str) -> None:
    loaded = importlib.import_module(f"tests.gpu.{module}")
    for kv_cache_dtype in loaded.FORMATS:
        assert kv.explain("sm_90", kv_cache_dtype)


def test_run_sh_calls_modules_that_are_there() -> None:
    script = (FOLDER / "run.sh").read_text(encoding="utf-8")
    for path in FOLDER.glob("*.py"):
        if path.name != "__init__.py":
            assert f"tests.gpu.{path.stem}" in script
