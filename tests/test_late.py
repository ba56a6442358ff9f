"""A seam is fitted when its module is imported, however that comes about."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import itertools
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from kvcache_plugin.hosts.late import when_imported

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

_numbers = itertools.count()


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that nobody has imported: ``package.module`` with ``value = 1``."""
    package = f"kv_test_late_{next(_numbers)}"
    folder = tmp_path / package
    folder.mkdir()
    (folder / "__init__.py").write_text("", encoding="utf-8")
    (folder / "module.py").write_text("value = 1\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    return f"{package}.module"


def file_of(tmp_path: Path, name: str) -> Path:
    return tmp_path.joinpath(*name.split(".")).with_suffix(".py")


def double(module: ModuleType) -> None:
    module.value *= 2  # type: ignore[attr-defined]


def test_it_acts_after_the_module_has_run(name: str) -> None:
    when_imported(name, double)
    assert name not in sys.modules
    assert importlib.import_module(name).value == 2


def test_it_acts_at_once_on_a_module_that_is_there(name: str) -> None:
    importlib.import_module(name)
    when_imported(name, double)
    assert sys.modules[name].value == 2  # type: ignore[attr-defined]


def test_who_imports_a_name_from_the_module_gets_the_new_one(name: str, tmp_path: Path) -> None:
    when_imported(name, double)
    other = tmp_path / "kv_test_late_other.py"
    other.write_text(f"from {name} import value\n", encoding="utf-8")
    assert importlib.import_module("kv_test_late_other").value == 2
    del sys.modules["kv_test_late_other"]


def test_several_may_wait_for_one_module(name: str) -> None:
    when_imported(name, double)
    when_imported(name, double)
    assert importlib.import_module(name).value == 4


def test_looking_a_module_up_does_not_disarm_it(name: str) -> None:
    when_imported(name, double)
    assert importlib.util.find_spec(name) is not None
    assert importlib.import_module(name).value == 2


def test_an_import_that_fails_may_be_tried_again(name: str, tmp_path: Path) -> None:
    file = file_of(tmp_path, name)
    file.write_text("raise OSError('not yet')\n", encoding="utf-8")
    when_imported(name, double)
    with pytest.raises(OSError, match="not yet"):
        importlib.import_module(name)
    file.write_text("value = 1  # this time it works\n", encoding="utf-8")
    importlib.invalidate_caches()
    assert importlib.import_module(name).value == 2


def test_a_module_that_does_not_exist_is_still_an_import_error(name: str) -> None:
    missing = f"{name}_missing"
    when_imported(missing, double)
    with pytest.raises(ModuleNotFoundError, match=missing):
        importlib.import_module(missing)


def test_the_module_looks_as_if_it_had_been_loaded_without_us(name: str, tmp_path: Path) -> None:
    when_imported(name, double)
    module = importlib.import_module(name)
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    assert module.__spec__ is not None
    assert module.__spec__.loader is module.__loader__
    assert inspect.getsource(module) == file_of(tmp_path, name).read_text(encoding="utf-8")
    assert importlib.reload(module).value == 1


def test_threads_that_import_at_once_see_it_done_once(name: str, tmp_path: Path) -> None:
    file_of(tmp_path, name).write_text(
        "import time; time.sleep(0.2); value = 1\n", encoding="utf-8"
    )
    when_imported(name, double)
    seen: list[int] = []
    threads = [
        threading.Thread(target=lambda: seen.append(importlib.import_module(name).value))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [2] * 8
