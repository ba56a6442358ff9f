"""SM100 and SM120 run whole on a CPU: FlashInfer by a stand-in, Triton by its interpreter."""

from __future__ import annotations

import inspect
import logging
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kvcache_plugin as kv
from kvcache_plugin import calls
from kvcache_plugin.hardware import (
    cuda_sm90,
    cuda_sm100,
    cuda_sm120,
    flashinfer_nvfp4,
    flashinfer_package,
)
from kvcache_plugin.manager import get_manager
from tests import flashinfer_facts, oracles
from tests.flashinfer_stand_in import StandIn, declaring, forget, install, nvfp4, reciprocal

if TYPE_CHECKING:
    import types
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
SM_100, SM_103, SM_107, SM_110, SM_120, SM_121 = (
    kv.Device.parse(f"sm_{number}") for number in (100, 103, 107, 110, 120, 121)
)
MODULES = {SM_100: cuda_sm100, SM_103: cuda_sm100, SM_120: cuda_sm120, SM_121: cuda_sm120}
FP8 = ("fp8_e4m3", "fp8_e5m2")
HALVES = (torch.float16, torch.bfloat16)
NUMPY = {torch.float16: np.float16, torch.bfloat16: ml_dtypes.bfloat16, torch.float32: np.float32}
G = 0.003
NOT_INSTALLED = 'Triton kernels; FlashInfer is not installed: pip install "kvcache-plugin[cuda]"'

every_device = pytest.mark.parametrize("device", MODULES, ids=str)
every_half = pytest.mark.parametrize("dtype", HALVES, ids=str)


@pytest.fixture(autouse=True)
def _decided_anew() -> Iterator[None]:
    """What is installed is asked once for each process, or here for each test."""
    forget()
    yield
    forget()


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    install(monkeypatch, stand_in)
    return stand_in


@pytest.fixture
def no_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, None)


def values(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def quantize(
    tensor: torch.Tensor, device: kv.Device = SM_100, scale: Any = G, out: Any = None
) -> kv.QuantizedKV:
    return calls.quantize(get_manager(), device, tensor, scale, "nvfp4", out)


def dequantize(
    quantized: kv.QuantizedKV, dtype: torch.dtype, device: kv.Device = SM_100
) -> torch.Tensor:
    return calls.dequantize(get_manager(), device, quantized, dtype)


def reason(device: kv.Device, kv_cache_dtype: str = "nvfp4") -> str:
    """What ``explain`` says of the implementation that quantizes."""
    return next(row.reason for row in kv.explain(device, kv_cache_dtype) if row.chosen)


def as_numpy(quantized: kv.QuantizedKV) -> tuple[oracles.Array, oracles.Array]:
    """Codes one by one, and block-scale codes."""
    assert quantized.block_scales is not None
    return (
        oracles.unpacked(quantized.data.numpy()),
        quantized.block_scales.view(torch.uint8).numpy(),
    )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def assert_exact(quantized: kv.QuantizedKV, x: torch.Tensor, g: float = G) -> None:
    codes, block_codes = as_numpy(quantized)
    expected, _, expected_blocks = oracles.nvfp4_codes(x.float().numpy(), np.float32(g))
    assert (codes == expected).all()
    assert (block_codes == expected_blocks).all()


def off(quantized: kv.QuantizedKV, x: torch.Tensor, g: float) -> tuple[float, float]:
    """Fractions of codes and of block scales that are one step off; none is further off.

    A code is compared with what its block scale, as it is, makes of the value.
    """
    codes, block_codes = as_numpy(quantized)
    _, _, expected_blocks = oracles.nvfp4_codes(x.float().numpy(), np.float32(g))
    sf = oracles.decoded(block_codes, oracles.E4M3)
    with np.errstate(divide="ignore"):
        r = np.where(sf == 0, np.float32(0), np.float32(1) / (sf * np.float32(g)))
    scaled = x.float().numpy() * np.repeat(r, oracles.BLOCK_SIZE, axis=-1)
    expected = oracles.rounded(scaled.astype(np.float32), oracles.E2M1)
    steps = np.abs((codes & 7).astype(int) - (expected & 7))
    block_steps = np.abs(block_codes.astype(int) - expected_blocks)
    assert (codes & 8 == expected & 8).all()
    assert steps.max() <= 1 >= block_steps.max()
    return float(steps.mean()), float(block_steps.mean())


# Who serves.


@every_device
def test_flashinfer_serves_where_it_is_installed(device: kv.Device, flashinfer: StandIn) -> None:
    chosen = next(row for row in kv.explain(device, "nvfp4") if row.chosen)
    assert chosen.name == MODULES[device].__name__.rpartition(".")[2]
    assert chosen.reason == "FlashInfer 0.7.4 nvfp4_kv_quantize; float32 input by Triton kernels"
    quantized = quantize(values(4, 2, 64), device)
    dequantize(quantized, torch.bfloat16, device)
    assert [name for name, _ in flashinfer.calls] == ["nvfp4_kv_quantize", "nvfp4_kv_dequantize"]


@every_device
@pytest.mark.usefixtures("no_flashinfer")
def test_triton_serves_without_it(device: kv.Device, caplog: pytest.LogCaptureFixture) -> None:
    x = values(4, 2, 64)
    quantized = quantize(x, device)
    assert_exact(quantized, x)
    assert reason(device) == NOT_INSTALLED
    assert MODULES[device].describe_kv(device, "nvfp4").tolerance == kv.KVTolerance()
    assert not caplog.records


@every_device
@pytest.mark.parametrize("name", FP8)
def test_fp8_is_tritons(device: kv.Device, name: str, flashinfer: StandIn) -> None:
    x = values(3, 64)
    quantized = calls.quantize(get_manager(), device, x, 0.02, name)
    form = next(form for form in oracles.FP8 if form.name == name)
    expected = oracles.fp8_codes(x.float().numpy(), np.float32(0.02), form)
    assert (bits(quantized.data).numpy() == expected).all()
    assert reason(device, name) == "Triton kernels"
    assert MODULES[device].describe_kv(device, name).tolerance == kv.KVTolerance()
    assert not flashinfer.calls


def test_neither_serves_other_hardware() -> None:
    assert cuda_sm100.supports_kv(SM_120, "nvfp4") == "serves CUDA 10.x, and this is sm_120"
    assert cuda_sm120.supports_kv(SM_100, "nvfp4") == "serves CUDA 12.x, and this is sm_100"
    for module in (cuda_sm100, cuda_sm120):
        for name in ("cpu", "sm_90", "sm_110", "gfx942"):
            refused = module.supports_kv(kv.Device.parse(name), "nvfp4")
            assert isinstance(refused, str)
            assert refused.endswith(f"and this is {name}")
    refused = cuda_sm100.supports_kv(SM_100, "int4")
    assert refused == "serves fp8_e4m3, fp8_e5m2, fp8_e4m3fnuz, nvfp4, and this is int4"


def test_sm90_never_asks_for_it(flashinfer: StandIn) -> None:
    device = kv.Device.parse("sm_90")
    x = values(2, 64)
    assert_exact(quantize(x, device), x)
    assert cuda_sm90.describe_kv(device, "nvfp4").tolerance == kv.KVTolerance()
    assert not flashinfer.calls


@pytest.mark.parametrize(
    ("quantizes", "dequantizes", "name"),
    [
        ((100, 120), (100, 103, 120), "nvfp4_kv_quantize for sm_100, sm_120"),
        ((100, 103, 120), (100, 120), "nvfp4_kv_dequantize for sm_100, sm_120"),
        ((), (100,), "nvfp4_kv_quantize for no GPU"),
    ],
)
def test_triton_serves_a_gpu_that_it_does_not_declare(
    quantizes: tuple[int, ...],
    dequantizes: tuple[int, ...],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in = StandIn(quantizes, dequantizes)
    install(monkeypatch, stand_in)
    x = values(2, 64)
    assert_exact(quantize(x, SM_103), x)
    assert not stand_in.calls
    assert reason(SM_103) == f"Triton kernels; FlashInfer 0.7.4 declares {name}, and not sm_103"
    assert reason(SM_107).endswith("and not sm_107")


def broken(change: str) -> types.ModuleType:
    """A FlashInfer that differs from the one that is known."""
    stand_in: Any = StandIn()

    def taking(*names: str) -> Any:
        def function() -> None: ...

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter(name, kind) for name in names]
        changed: Any = function
        changed.__signature__ = inspect.Signature(parameters)
        return declaring((100,), changed)

    if change == "missing":
        del stand_in.nvfp4_kv_dequantize
    elif change == "undeclared":
        del stand_in.nvfp4_kv_quantize.is_compute_capability_supported
    elif change == "renamed":
        stand_in.nvfp4_kv_quantize = taking("values", "global_scale")
    elif change == "swapped":
        stand_in.nvfp4_kv_dequantize = taking(
            "block_scales", "fp4_data", "global_scale", "output_dtype"
        )
    elif change == "one more":
        stand_in.nvfp4_kv_quantize = taking("input", "global_scale", "layout")
    else:
        raise ValueError(change)
    module: types.ModuleType = stand_in
    return module


BROKEN = {
    "missing": "it has no nvfp4_kv_dequantize",
    "undeclared": "nvfp4_kv_quantize does not declare its compute capabilities",
    "renamed": "nvfp4_kv_quantize takes (values, global_scale) instead of (input, global_scale)",
    "swapped": "nvfp4_kv_dequantize takes (block_scales, fp4_data, global_scale, output_dtype)"
    " instead of (fp4_data, block_scales, global_scale, output_dtype)",
    "one more": "nvfp4_kv_quantize takes (input, global_scale, layout) instead of"
    " (input, global_scale)",
}


def assert_logged(problem: str, caplog: pytest.LogCaptureFixture) -> None:
    (record,) = caplog.records
    assert record.getMessage() == f"NVFP4 is Triton's: {problem} [errors#flashinfer-left-out]"


@pytest.mark.parametrize("change", BROKEN)
def test_triton_serves_beside_another_flashinfer(
    change: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, broken(change))
    x = values(2, 64)
    for device in (SM_100, SM_103):
        assert_exact(quantize(x, device), x)
        said = reason(device)
    problem = (
        f"FlashInfer 0.7.4 is left out: {BROKEN[change]}; pip install --upgrade flashinfer-python"
    )
    assert said == f"Triton kernels; {problem}"
    assert_logged(problem, caplog)


@pytest.mark.parametrize("error", [OSError("no libcuda.so.1"), ImportError("no tvm_ffi")])
def test_triton_serves_where_it_cannot_be_imported(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Finder:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "flashinfer":
                raise error

    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    x = values(2, 64)
    assert_exact(quantize(x), x)
    assert reason(SM_100) == (
        f"Triton kernels; FlashInfer cannot be imported ({type(error).__name__}: {error}): "
        "pip install --force-reinstall flashinfer-python"
    )
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_triton_serves_where_its_import_exits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "flashinfer.py").write_text("raise SystemExit('no GPU')")
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    x = values(2, 64)
    assert_exact(quantize(x), x)
    assert "cannot be imported (SystemExit: no GPU)" in reason(SM_100)


def test_an_interrupt_of_its_import_goes_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "flashinfer.py").write_text("raise KeyboardInterrupt")
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        quantize(values(2, 64))


class Lazy(StandIn):
    """Makes its quantizer when it is asked for it, and fails."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error
        del self.nvfp4_kv_quantize

    def __getattr__(self, name: str) -> Any:
        if name == "nvfp4_kv_quantize":
            raise self.error
        raise AttributeError(name)


@pytest.mark.parametrize("error", [ImportError("no tvm_ffi"), SystemExit("no nvcc")], ids=repr)
def test_triton_serves_where_its_functions_cannot_be_had(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, Lazy(error))
    x = values(2, 64)
    for _ in range(2):
        assert_exact(quantize(x), x)
    problem = (
        "FlashInfer 0.7.4 is left out: its functions cannot be examined "
        f"({type(error).__name__}: {error}); pip install --upgrade flashinfer-python"
    )
    assert reason(SM_100) == f"Triton kernels; {problem}"
    assert_logged(problem, caplog)


def test_an_interrupt_of_its_functions_goes_up(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Lazy(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        quantize(values(2, 64))


def test_triton_serves_where_a_signature_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = StandIn()
    stand_in.nvfp4_kv_dequantize.__signature__ = "none"
    install(monkeypatch, stand_in)
    x = values(2, 64)
    assert_exact(quantize(x), x)
    assert "its functions cannot be examined (TypeError: " in reason(SM_100)
    assert not stand_in.calls


def test_triton_serves_where_it_cannot_say_what_it_serves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def ask(capability: int) -> bool:
        raise RuntimeError("no CUDA runtime")

    stand_in = StandIn()
    stand_in.nvfp4_kv_dequantize.is_compute_capability_supported = ask
    install(monkeypatch, stand_in)
    x = values(2, 64)
    for _ in range(2):
        assert_exact(quantize(x), x)
    problem = (
        "nvfp4_kv_dequantize of FlashInfer 0.7.4 does not say whether it serves sm_100 "
        "(RuntimeError: no CUDA runtime): pip install --upgrade flashinfer-python"
    )
    assert reason(SM_100) == f"Triton kernels; {problem}"
    assert not stand_in.calls
    assert_logged(problem, caplog)


def test_facts_of_the_stand_in_are_the_expected_ones() -> None:
    """The same that ``tests/engine/test_flashinfer.py`` asks the real package for."""
    assert flashinfer_facts.facts(StandIn()) == flashinfer_facts.EXPECTED


@pytest.mark.parametrize("change", BROKEN)
def test_facts_tell_another_flashinfer(change: str) -> None:
    changed = broken(change)
    if change == "undeclared":
        assert list(flashinfer_package.problems(changed))
    else:
        assert flashinfer_facts.facts(changed) != flashinfer_facts.EXPECTED


def test_facts_tell_a_dropped_architecture() -> None:
    dropped = StandIn(quantizes=(100, 103, 110, 120, 121))
    assert flashinfer_facts.facts(dropped) != flashinfer_facts.EXPECTED


def test_it_is_imported_at_first_use() -> None:
    program = """
        import sys

        import torch

        import kvcache_plugin as kv
        from kvcache_plugin import calls
        from kvcache_plugin.manager import get_manager

        class Finder:
            asked = 0

            def find_spec(self, name, *rest):
                Finder.asked += name == "flashinfer"

        sys.meta_path.insert(0, Finder())
        device, manager, x = kv.Device.parse("sm_100"), get_manager(), torch.ones(1, 32)
        assert manager.implementations
        kv.explain(device, "fp8")
        calls.quantize(manager, device, x, 1.0, "fp8")
        calls.quantize_pair(manager, device, x, x, 1.0, 1.0, "nvfp4")
        assert not Finder.asked, "for FP8, or float32"
        calls.quantize(manager, device, x.half(), 1.0, "nvfp4")
        assert Finder.asked == 1
        calls.quantize(manager, device, x.half(), 1.0, "nvfp4")
        assert Finder.asked == 1
    """
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], cwd=ROOT, env=environment, check=True
    )


# What FlashInfer gives.


@every_half
@pytest.mark.parametrize("g", [G, 2**-8, 1 / 6 / 128, 4.5 / 2688, 4.5 / 448, 0.05, 1.0])
def test_codes_are_within_the_tolerance(dtype: torch.dtype, g: float, flashinfer: StandIn) -> None:
    x = values(2048, 8, 32, dtype=dtype)
    codes, block_scales = off(quantize(x, scale=g), x, g)
    tolerance = cuda_sm100.describe_kv(SM_100, "nvfp4").tolerance
    assert codes <= tolerance.codes
    assert block_scales <= tolerance.block_scales
    assert flashinfer.calls


def test_the_tolerance_is_needed(flashinfer: StandIn) -> None:
    seen = [off(quantize(x, scale=g), x, g) for x in [values(2048, 8, 32)] for g in (2**-8, 1 / 6)]
    codes, block_scales = (max(each) for each in zip(*seen, strict=True))
    assert codes > 0.001
    assert block_scales > 0.001
    assert flashinfer.calls


def test_reciprocals_are_one_ulp_off_and_no_more() -> None:
    x = values(4096, dtype=torch.float32).numpy()
    got, exact = reciprocal(x), 1 / x.astype(np.float64)
    nearest = exact.astype(np.float32)
    assert (np.abs(got - exact) < np.spacing(np.abs(nearest))).all()
    assert 0.4 < (got != nearest).mean() < 0.6
    assert (
        reciprocal(np.array([0.0, 1e-39, np.inf, 3e38], np.float32)) == [np.inf, np.inf, 0, 0]
    ).all()


@every_half
def test_dequantizing_is_exact(dtype: torch.dtype, flashinfer: StandIn) -> None:
    every_byte = torch.arange(256, dtype=torch.uint8).reshape(1, 32, 8).expand(128, 32, 8)
    block_scales = torch.arange(128, dtype=torch.uint8).reshape(128, 1, 1).expand(128, 32, 1)
    quantized = kv.QuantizedKV(
        every_byte, block_scales.view(torch.float8_e4m3fn), torch.tensor([0.37]), "nvfp4"
    )
    got = dequantize(quantized, dtype)
    expected = oracles.nvfp4_values(
        every_byte.numpy(), block_scales.numpy(), np.float32(0.37), NUMPY[dtype]
    )
    nan = np.isnan(expected)
    assert (got.isnan().numpy() == nan).all()
    assert (bits(got).numpy().view(np.uint16)[~nan] == expected.view(np.uint16)[~nan]).all()
    assert flashinfer.calls


def test_float32_is_tritons_and_exact(flashinfer: StandIn) -> None:
    x = values(64, 2, 64, dtype=torch.float32)
    quantized = quantize(x)
    assert_exact(quantized, x)
    got = dequantize(quantized, torch.float32)
    data, block_codes = quantized.data.numpy(), as_numpy(quantized)[1]
    assert (got.numpy() == oracles.nvfp4_values(data, block_codes, np.float32(G), np.float32)).all()
    assert not flashinfer.calls


def test_nan_and_infinity(flashinfer: StandIn) -> None:
    x = values(6, 16)
    x[0, 3] = x[1, 8] = x[2] = torch.nan
    x[3, 5], x[4, 0] = torch.inf, -torch.inf
    codes, block_codes = as_numpy(quantize(x))
    expected, _, expected_blocks = oracles.nvfp4_codes(x.float().numpy(), np.float32(G))
    assert (codes[3:] == expected[3:]).all()
    assert (block_codes[3:] == expected_blocks[3:]).all()
    assert codes[0, 3] == codes[1, 8] == 7
    assert (codes[2] == 7).all()
    assert block_codes[2] == 0x7F
    assert cuda_sm100.describe_kv(SM_100, "nvfp4").tolerance.nan
    assert flashinfer.calls


def test_blocks_too_small_for_a_scale_are_zero(flashinfer: StandIn) -> None:
    x = values(4, 32) * 1e-6
    codes, block_codes = as_numpy(quantize(x, scale=1.0))
    assert not block_codes.any()
    assert not (codes & 7).any()
    assert flashinfer.calls


def test_a_nan_hides_what_came_before_it_in_bfloat16() -> None:
    x = np.full((1, 16), 3, np.float32)
    x[0, 0], x[0, 2] = 6, np.nan
    one = np.ones(1, np.float32)
    assert nvfp4(x, one, torch.bfloat16)[1] == oracles.rounded(
        np.array([0.5], np.float32), oracles.E4M3
    )
    assert nvfp4(x, one, torch.float16)[1] == oracles.rounded(
        np.array([1.0], np.float32), oracles.E4M3
    )


# How FlashInfer is called; the stand-in raises where the kernel could not serve.


@every_half
@pytest.mark.parametrize(
    "shape", [(32,), (3, 16), (5, 2, 48), (2, 3, 4, 64), (7, 1, 80), (1, 1, 1, 2, 576)]
)
def test_any_shape(shape: tuple[int, ...], dtype: torch.dtype, flashinfer: StandIn) -> None:
    x = values(*shape, dtype=dtype)
    quantized = quantize(x)
    whole, _ = nvfp4(x.float().numpy().reshape(1, -1), np.array([G], np.float32), dtype)
    assert (quantized.data.numpy().reshape(-1) == whole.reshape(-1)).all()
    assert quantized.data.shape == (*shape[:-1], shape[-1] // 2)
    assert quantized.block_scales is not None
    assert quantized.block_scales.shape == (*shape[:-1], shape[-1] // 16)
    assert dequantize(quantized, dtype).shape == shape
    assert len(flashinfer.calls) == 2


@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim", "quantized", "dequantized"),
    [
        (64, 8, 128, 1024, 2048),
        (1, 8, 128, 1024, 1024),
        (3, 1, 128, 384, 384),  # no whole number of warps
        (4, 1, 128, 512, 512),
        (5, 6, 128, 768, 1280),
        (4, 1, 576, 768, 768),
        (1, 1, 16, 16, 16),
        (3, 1, 80, 240, 240),
    ],
)
def test_rows_keep_the_threads_busy(
    tokens: int, heads: int, head_dim: int, quantized: int, dequantized: int
) -> None:
    count = tokens * heads * head_dim
    assert flashinfer_nvfp4.row_length(count, 1024) == quantized
    assert flashinfer_nvfp4.row_length(count, 2048) == dequantized


def test_rows_divide_any_count() -> None:
    for count in range(16, 1 << 15, 16):
        length = flashinfer_nvfp4.row_length.__wrapped__(count, 1024)
        assert count % length == length % 16 == 0
        assert length % 256 == 0 or count % 256


def test_many_values_go_in_parts(flashinfer: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    x = values(9, 8, 128)
    whole, values_of_whole = quantize(x), dequantize(quantize(x), torch.float16)
    flashinfer.calls.clear()
    monkeypatch.setattr(flashinfer_nvfp4, "MOST_VALUES", 4 * 1024 + 5)
    parts = quantize(x)
    got = dequantize(parts, torch.float16)
    rows = [("nvfp4_kv_quantize", (n, 1024)) for n in (4, 4, 1)]
    rows += [("nvfp4_kv_dequantize", (n, 768)) for n in (2, 2, 2)]
    assert flashinfer.calls == rows
    assert torch.equal(parts.data, whole.data)
    assert parts.block_scales is not None
    assert whole.block_scales is not None
    assert torch.equal(bits(parts.block_scales), bits(whole.block_scales))
    assert torch.equal(got, values_of_whole)


def test_the_limit_is_where_its_index_ends() -> None:
    assert flashinfer_nvfp4.MOST_VALUES == 2**31 - 1


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, ::2],
        lambda x: x.transpose(0, 1),
        lambda x: x[..., 32:],
        lambda x: x[:1].expand(4, -1, -1),
        lambda x: x.flip(-1),
        lambda x: x.flatten()[1:97].reshape(2, 3, 16),  # at an odd address
        lambda x: torch._neg_view(x),
        lambda x: x.clone().requires_grad_(),
    ],
    ids=["step", "transposed", "column", "expanded", "flipped", "odd", "negated", "grad"],
)
def test_any_layout(view: Any, flashinfer: StandIn) -> None:
    x = view(values(6, 4, 64))
    before = x.detach().clone()
    quantized, packed = quantize(x), quantize(before.resolve_neg().contiguous())
    assert torch.equal(quantized.data, packed.data)
    assert torch.equal(x.detach(), before)
    assert len(flashinfer.calls) == 2


def test_codes_of_any_layout(flashinfer: StandIn) -> None:
    quantized = quantize(values(6, 4, 64))
    assert quantized.block_scales is not None
    at_odd_address = torch.empty(6 * 4 * 32 + 1, dtype=torch.uint8)[1:].view(6, 4, 32)
    strided = kv.QuantizedKV(
        at_odd_address.copy_(quantized.data),
        quantized.block_scales.transpose(0, 1).contiguous().transpose(0, 1),
        quantized.scale,
        "nvfp4",
    )
    assert strided.data.data_ptr() % 2
    assert torch.equal(dequantize(strided, torch.float16), dequantize(quantized, torch.float16))
    assert flashinfer.calls


@pytest.mark.parametrize("shape", [(0, 8, 128), (4, 0, 16), (0, 16)])
def test_no_tokens_no_launch(shape: tuple[int, ...], flashinfer: StandIn) -> None:
    quantized = quantize(values(*shape))
    assert quantized.data.shape == (*shape[:-1], shape[-1] // 2)
    assert quantized.block_scales is not None
    assert quantized.block_scales.dtype == torch.float8_e4m3fn
    assert dequantize(quantized, torch.bfloat16).shape == shape
    assert not flashinfer.calls


def test_buffers_of_the_caller_are_filled(flashinfer: StandIn) -> None:
    x = values(6, 4, 64)
    plain = quantize(x)
    cache = torch.zeros(9, 4, 40, dtype=torch.uint8)
    data, block_scales = cache[1:7, :, :32], cache[1:7, :, 32:36].view(torch.float8_e4m3fn)
    filled = quantize(x, out=(data, block_scales))
    assert filled.data is data
    assert filled.block_scales is block_scales
    assert torch.equal(data, plain.data)
    assert plain.block_scales is not None
    assert torch.equal(bits(block_scales), bits(plain.block_scales))
    assert not cache[[0, 7, 8]].any()
    assert not cache[..., 36:].any()
    assert len(flashinfer.calls) == 2


def test_the_scale_stays_the_callers(flashinfer: StandIn) -> None:
    scale = torch.tensor([G], requires_grad=True)
    quantized = cuda_sm100.quantize_kv(values(2, 32), scale, "nvfp4", SM_100, None)
    assert quantized.scale is scale
    dequantize(quantized, torch.bfloat16)
    assert len(flashinfer.calls) == 2


def test_a_scale_that_is_negated_later(flashinfer: StandIn) -> None:
    scale = torch.tensor([1 - 0.5j]).conj().imag
    assert scale.is_neg()
    x = values(2, 32)
    quantized = cuda_sm100.quantize_kv(x, scale, "nvfp4", SM_100, None)
    assert torch.equal(quantized.data, quantize(x, scale=0.5).data)
    assert dequantize(quantized, torch.bfloat16).shape == x.shape
    assert len(flashinfer.calls) == 3


# K and V.


@pytest.mark.parametrize("k_dtype", NUMPY, ids=str)
@pytest.mark.parametrize("v_dtype", NUMPY, ids=str)
def test_pairs(k_dtype: torch.dtype, v_dtype: torch.dtype, flashinfer: StandIn) -> None:
    key, value = values(4, 2, 32, dtype=k_dtype), values(4, 2, 32, dtype=v_dtype, seed=1)
    k, v = calls.quantize_pair(get_manager(), SM_100, key, value, G, 0.002, "nvfp4")
    assert len(flashinfer.calls) == (k_dtype in HALVES) + (v_dtype in HALVES)
    assert torch.equal(k.data, quantize(key).data)
    assert torch.equal(v.data, quantize(value, scale=0.002).data)


def test_pairs_fill_buffers(flashinfer: StandIn) -> None:
    key, value = values(4, 2, 32), values(4, 2, 32, seed=1)
    both = calls.quantize_pair(get_manager(), SM_100, key, value, G, G, "nvfp4")
    again = calls.quantize_pair(
        get_manager(), SM_100, value, key, G, G, "nvfp4", (both[0], both[1])
    )
    for filled, buffer, x in zip(again, both, (value, key), strict=True):
        assert filled.data is buffer.data
        assert torch.equal(filled.data, quantize(x).data)
    assert flashinfer.calls


@pytest.mark.usefixtures("no_flashinfer")
def test_pairs_are_tritons_without_it() -> None:
    key, value = values(4, 2, 32), values(4, 2, 32, seed=1)
    both = cuda_sm120.quantize_kv_pair(
        key, value, torch.tensor([G]), torch.tensor([G]), "nvfp4", SM_120, None
    )
    assert both is not None
    for quantized, x in zip(both, (key, value), strict=True):
        assert_exact(quantized, x)


# What goes wrong.


def failing(error: Exception, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    serve = stand_in.nvfp4_kv_quantize

    def nvfp4_kv_quantize(input: Any, global_scale: Any) -> Any:
        if stand_in.calls:
            raise error
        return serve(input, global_scale)

    stand_in.nvfp4_kv_quantize = declaring((100,), nvfp4_kv_quantize)
    stand_in.nvfp4_kv_dequantize.is_compute_capability_supported = lambda cc: cc == 100
    install(monkeypatch, stand_in)
    return stand_in


def test_a_first_call_that_fails_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    no_nvcc = RuntimeError("Ninja build failed. Ninja output:\nnvcc: not found")
    stand_in = failing(no_nvcc, monkeypatch)
    stand_in.calls.append(("", ()))
    with pytest.raises(kv.KVCacheError) as raised:
        quantize(values(2, 32))
    assert str(raised.value) == (
        "the first nvfp4_kv_quantize of FlashInfer 0.7.4 on sm_100 failed with RuntimeError: Ninja "
        "build failed. Ninja output. Unless its kernels are installed compiled, it compiles them "
        "at the first call: install nvcc, ninja and a C++ compiler for that, or the kernels by "
        "`flashinfer install-jit-cache-wheel`. Triton serves without FlashInfer: pip uninstall "
        "flashinfer-python, or set KVCACHE_PLUGIN_BLOCK=cuda_sm100 [errors#flashinfer-first-call]"
    )
    assert raised.value.__cause__ is no_nvcc


def test_a_later_failure_goes_up_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("an illegal memory access")
    failing(error, monkeypatch)
    quantize(values(2, 32))
    with pytest.raises(RuntimeError) as raised:
        quantize(values(2, 32))
    assert raised.value is error


def test_want_of_memory_goes_up_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = failing(torch.OutOfMemoryError("CUDA out of memory"), monkeypatch)
    stand_in.calls.append(("", ()))
    with pytest.raises(torch.OutOfMemoryError):
        quantize(values(2, 32))


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what torch is asked to do."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **kwargs or {})


@every_half
def test_nothing_is_read_or_brought_from_the_host(dtype: torch.dtype, flashinfer: StandIn) -> None:
    """Views, copies on the device and new buffers: all that a CUDA graph can hold."""
    x, g = values(6, 4, 64, dtype=dtype)[:, ::2], torch.tensor([G])
    out = (torch.empty(6, 2, 32, dtype=torch.uint8), torch.empty(6, 2, 4).to(torch.float8_e4m3fn))
    quantize(x, scale=g)
    with Operations() as seen:
        dequantize(quantize(x, scale=g, out=out), dtype)
    assert seen.names <= {"detach", "view", "split", "clone", "copy_", "alias", "empty"}, seen.names
    assert len(flashinfer.calls) == 3
