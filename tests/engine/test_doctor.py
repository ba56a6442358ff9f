"""What doctor says of the released engines, in their environments; it starts none of them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.engine import venvs
from tests.engine.serving import run_python

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.engine


def test_the_newest_release_is_proven_and_every_seam_fits(engine: str, plugin_site: Path) -> None:
    arguments = ["-m", "kvcache_plugin", "doctor", "--json"]
    _, log = run_python(engine, arguments, site=[plugin_site])
    found = json.loads(log[log.index("{") :])
    # Beside SGLang there is a stand-in for a module of vLLM, in which no seam fits.
    (one,) = [each for each in found["engines"] if each["title"].lower() == engine]
    assert one["version"] == venvs.newest(engine)
    assert one["release"]["word"] == "proven"
    assert one["not_loaded"] == ""
    assert one["seams"]
    assert [seam["problem"] for seam in one["seams"] if seam["problem"]] == []
