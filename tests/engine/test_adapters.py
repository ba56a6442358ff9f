"""Tests that need the engines' own code, run by pytest inside each engine's environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.serving import install, run_python

pytestmark = pytest.mark.engine

_HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="session")
def pytest_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the running pytest, which the engines do not bring."""
    packages = (f"pytest=={pytest.__version__}", "iniconfig", "packaging", "pygments")
    return install(tmp_path_factory.mktemp("pytest_site"), *packages)


@pytest.mark.parametrize("name", ["inside_{engine}.py", "inside_renames.py"])
def test_adapter(engine: str, name: str, plugin_site: Path, pytest_site: Path) -> None:
    tests = _HERE / name.format(engine=engine)
    # Not the mode that would put the checkout on the path, in front of what is installed.
    options = ["-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--import-mode=importlib"]
    arguments = ["-m", "pytest", *options, str(tests)]
    returncode, log = run_python(engine, arguments, site=[plugin_site, pytest_site])
    assert returncode == 0, log
    assert " passed" in log, log
