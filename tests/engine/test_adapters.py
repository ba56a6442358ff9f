"""Tests that need the engines' own code, run by pytest inside each engine's environment."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import pytest

from tests.engine import venvs
from tests.engine.serving import install, run_python

pytestmark = pytest.mark.engine

_HERE = Path(__file__).resolve().parent
#: ``inside_ENGINE*.py`` is of one engine, the others are of each.
_RUNS = [
    (engine, path.name)
    for engine in venvs.ENGINES
    for path in sorted(_HERE.glob("inside_*.py"))
    if not path.name.startswith(tuple(f"inside_{x}" for x in venvs.ENGINES if x != engine))
]


@pytest.fixture(scope="session")
def pytest_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the running pytest, and what oracles need, which the engines do not bring."""
    packages = (f"pytest=={pytest.__version__}", "iniconfig", "packaging", "pygments")
    packages += (f"ml_dtypes=={ml_dtypes.__version__}",)
    return install(tmp_path_factory.mktemp("pytest_site"), *packages)


@pytest.mark.parametrize(("engine", "name"), _RUNS, indirect=["engine"], scope="session")
def test_adapter(engine: str, name: str, plugin_site: Path, pytest_site: Path) -> None:
    # Not the mode that would put the checkout on the path, in front of what is installed.
    options = ["-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--import-mode=importlib"]
    options += ["-p", "our_records"]
    arguments = ["-m", "pytest", *options, str(_HERE / name)]
    returncode, log = run_python(
        engine, arguments, site=[plugin_site, pytest_site, _HERE / "inside_fixtures"]
    )
    assert returncode == 0, log
    assert " passed" in log, log
