"""Fixtures for the tests that start real engines.

The engines live in environments of their own (venvs.py), which are never changed: the plugin is
installed into a folder beside them that is put on the path of the runs that want it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.engine import venvs
from tests.engine.checkout import install_plugin
from tests.engine.serving import Runner

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def plugin_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with this checkout's plugin, and the pluggy that it needs, installed."""
    return install_plugin(tmp_path_factory.mktemp("plugin"))


@pytest.fixture(scope="session", params=venvs.ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    """The engine's name; each test that asks for it runs on both."""
    return str(request.param)


@pytest.fixture(scope="session")
def run(engine: str, plugin_site: Path, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """Runs the engine on a checkpoint; equal runs of a session happen once."""
    return Runner(engine, tmp_path_factory.mktemp(f"{engine}-checkpoints"), plugin_site)
