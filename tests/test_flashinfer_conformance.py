"""SM100 and SM120 conform in NVFP4, with FlashInfer's stand-in and without FlashInfer.

Their FP8 is Triton's, and the same as that of SM90, which ``test_conformance.py`` is about.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import kvcache_plugin as kv
from kvcache_plugin.hardware import cuda_sm100, cuda_sm120
from kvcache_plugin.testing import ConformanceSuite
from tests.flashinfer_stand_in import StandIn, forget, install

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """These tensors are small: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in Triton's interpreter
class Nvfp4(ConformanceSuite):
    formats = ("nvfp4",)
    has_flashinfer = True

    @pytest.fixture(autouse=True)
    def _installed(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        stand_in = StandIn() if self.has_flashinfer else None
        install(monkeypatch, stand_in)
        forget()
        yield
        forget()


class TestSm100(Nvfp4):
    implementation = cuda_sm100
    device = kv.Device.parse("sm_100")


class TestSm103(Nvfp4):
    implementation = cuda_sm100
    device = kv.Device.parse("sm_103")


class TestSm120(Nvfp4):
    implementation = cuda_sm120
    device = kv.Device.parse("sm_120")


class TestSm121(Nvfp4):
    implementation = cuda_sm120
    device = kv.Device.parse("sm_121")


class TestSm100WithoutFlashInfer(TestSm100):
    has_flashinfer = False


class TestSm103WithoutFlashInfer(TestSm103):
    has_flashinfer = False


class TestSm120WithoutFlashInfer(TestSm120):
    has_flashinfer = False


class TestSm121WithoutFlashInfer(TestSm121):
    has_flashinfer = False
