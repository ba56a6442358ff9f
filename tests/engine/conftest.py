"""Fixtures for the tests that start real engines.

The engines live in environments of their own (venvs.py), which are never changed: the plugin is
installed into a folder beside them that is put on the path of the runs that want it.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.engine import venvs
from tests.engine.checkout import install_plugin
from tests.engine.serving import Runner, install


@pytest.fixture(scope="session")
def plugin_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with this checkout's plugin, and the pluggy that it needs, installed."""
    return install_plugin(tmp_path_factory.mktemp("plugin"))


@pytest.fixture(scope="session")
def recorder_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plugin of SGLang's that records what goes into its pool."""
    recorder = Path(__file__).with_name("recorder")
    source = shutil.copytree(recorder, tmp_path_factory.mktemp("source") / "recorder")
    return install(tmp_path_factory.mktemp("recorder_site"), source)


@pytest.fixture(scope="session", params=venvs.ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    """The engine's name; each test that asks for it runs on both."""
    return str(request.param)


@pytest.fixture(scope="session")
def run(engine: str, plugin_site: Path, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """Runs the engine on a checkpoint; equal runs of a session happen once."""
    return Runner(engine, tmp_path_factory.mktemp(f"{engine}-checkpoints"), plugin_site)
