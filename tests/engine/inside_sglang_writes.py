"""Run by pytest inside SGLang's environment: what stands in SGLang's own pools after a write.

The pools and the hook registry are SGLang's, the tensors are on the CPU. What the codes must be
comes from ``tests/oracles.py``, which knows nothing of the plugin.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import CPUFP8KVCacheMethod
from sglang.srt.layers.quantization.kvfp4_tensor import NVFP4KVQuantizeUtil
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.plugins.hook_registry import HookRegistry

import kvcache_plugin as kv
from kvcache_plugin import Device
from kvcache_plugin.errors import NoImplementationError
from kvcache_plugin.hosts import seams, sglang, sglang_writes
from kvcache_plugin.hosts.engine_log import EngineLog
from kvcache_plugin.hosts.gate import LoadGate
from kvcache_plugin.manager import Manager
from kvcache_plugin.settings import read_settings

if TYPE_CHECKING:
    from collections.abc import Callable

sglang.register()
HookRegistry.apply_hooks()


def _load_oracles() -> Any:
    """By its path: the checkout must not be in front of the plugin that is installed."""
    path = Path(__file__).resolve().parents[1] / "oracles.py"
    spec = importlib.util.spec_from_file_location("oracles", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


oracles = _load_oracles()
FORMS = {
    torch.float8_e4m3fn: oracles.E4M3,
    torch.float8_e5m2: oracles.E5M2,
    torch.float8_e4m3fnuz: oracles.E4M3FNUZ,
}
FP8 = pytest.mark.parametrize("dtype", FORMS, ids=lambda dtype: str(dtype)[6:])
TOKENS, HEADS, HEAD_DIM = 6, 2, 16
SLOTS = torch.tensor([9, 1, 4, 12, 7, 2])


def new_pool(dtype: torch.dtype, quant_method: Any = None) -> MHATokenToKVPool:
    return MHATokenToKVPool(
        size=16,
        page_size=1,
        dtype=dtype,
        head_num=HEADS,
        head_dim=HEAD_DIM,
        layer_num=2,
        device="cpu",
        enable_memory_saver=False,
        quant_method=quant_method,
    )


def values(seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """K or V: ordinary values, ties, and what overflows every format."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(TOKENS, HEADS, HEAD_DIM, generator=generator) * 20
    special = [1e6, -1e6, float("inf"), float("-inf"), 0.0, -0.0, float("nan"), 252.0]
    x[0, 0, : len(special)] = torch.tensor(special)
    return x.to(dtype)


def expected(x: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    scale = np.float32(scale)
    codes = oracles.fp8_codes(x.float().numpy(), scale, FORMS[dtype])
    return torch.from_numpy(np.ascontiguousarray(codes))


def stored(pool: MHATokenToKVPool, layer: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes at the slots; of NaN, which has two codes in OCP formats, the positive one."""
    k, v = (buffers[layer].view(torch.uint8)[SLOTS] for buffers in (pool.k_buffer, pool.v_buffer))
    if pool.dtype in FORMS:
        form = FORMS[pool.dtype]
        for codes in (k, v):
            codes[torch.from_numpy(oracles.is_nan_code(codes.numpy(), form))] = form.nan_code
    return k, v


def layer_of(k: Any, v: Any) -> SimpleNamespace:
    return SimpleNamespace(layer_id=1, k_scale=k, v_scale=v)


def parameter(scale: float) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor(scale), requires_grad=False)


SCALES = {
    "none": lambda scale: None,
    "number": lambda scale: scale,
    "parameter": parameter,
    "one element": lambda scale: torch.tensor([scale]),
}


@FP8
@pytest.mark.parametrize("values_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", SCALES)
def test_a_pool_holds_the_codes_and_the_values_stay(
    dtype: torch.dtype, values_dtype: torch.dtype, kind: str
) -> None:
    pool, k, v = new_pool(dtype), values(1, values_dtype), values(2, values_dtype)
    k_before, v_before = k.clone(), v.clone()
    k_scale, v_scale = SCALES[kind](0.3), SCALES[kind](0.7)
    pool.set_kv_buffer(layer_of(k_scale, v_scale), SLOTS, k, v, k_scale, v_scale)
    served = (1.0, 1.0) if kind == "none" else (0.3, 0.7)
    for codes, x, scale in zip(stored(pool), (k, v), served, strict=True):
        assert torch.equal(codes, expected(x, scale, dtype))
    assert torch.equal(k.view(torch.uint8), k_before.view(torch.uint8))
    assert torch.equal(v.view(torch.uint8), v_before.view(torch.uint8))


def test_what_sglang_would_store_is_something_else() -> None:
    """Else equal bytes would say nothing."""
    original = MHATokenToKVPool.set_kv_buffer.__wrapped__
    for dtype in FORMS:
        pool, k, v = new_pool(dtype), values(1), values(2)
        original(pool, layer_of(None, None), SLOTS, k.clone(), v.clone(), 0.3, 0.7)
        assert not torch.equal(stored(pool)[0], expected(k, 0.3, dtype))


def test_each_side_has_a_scale_of_its_own() -> None:
    pool, k, v = new_pool(torch.float8_e4m3fn), values(1), values(2)
    pool.set_kv_buffer(layer_of(None, None), SLOTS, k, v, None, 0.7)
    assert torch.equal(stored(pool)[0], expected(k, 1.0, pool.dtype))
    assert torch.equal(stored(pool)[1], expected(v, 0.7, pool.dtype))


def test_strided_values_are_written_as_packed_ones() -> None:
    """K and V of a fused projection are views of one tensor."""
    fused = torch.cat([values(1), values(2)], dim=1)
    k, v = fused[:, :HEADS], fused[:, HEADS:]
    pool = new_pool(torch.float8_e4m3fn)
    pool.set_kv_buffer(layer_of(None, None), SLOTS, k, v, 0.3, 0.7)
    assert torch.equal(stored(pool)[0], expected(k, 0.3, pool.dtype))
    assert torch.equal(stored(pool)[1], expected(v, 0.7, pool.dtype))


def test_the_layer_may_be_named_apart() -> None:
    pool, k, v = new_pool(torch.float8_e4m3fn), values(1), values(2)
    pool.set_kv_buffer(None, SLOTS, k, v, layer_id_override=0)
    assert torch.equal(stored(pool, 0)[0], expected(k, 1.0, pool.dtype))
    assert not stored(pool, 1)[0].any()


def test_what_comes_in_fp8_passes_through() -> None:
    pool = new_pool(torch.float8_e4m3fn)
    codes = torch.arange(TOKENS * HEADS * HEAD_DIM).to(torch.uint8).reshape(TOKENS, HEADS, HEAD_DIM)
    k = codes.view(torch.float8_e4m3fn)
    pool.set_kv_buffer(layer_of(None, None), SLOTS, k, k)
    assert torch.equal(stored(pool)[0], codes)


def test_a_pool_that_is_not_quantized_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_hooks(monkeypatch)
    pool, k, v = new_pool(torch.bfloat16), values(1), values(2)
    pool.set_kv_buffer(layer_of(None, None), SLOTS, k, v)
    assert torch.equal(pool.k_buffer[1][SLOTS].view(torch.uint8), k.view(torch.uint8))


@FP8
def test_the_tokens_that_count_of_a_prefix_are_written(dtype: torch.dtype) -> None:
    pool, k, v = new_pool(dtype), values(1), values(2)
    pool.set_kv_buffer_prefix_valid(
        layer_of(None, None), SLOTS.reshape(2, 3), torch.tensor([3, 1]), k, v, 0.3, 0.7
    )
    k_codes, v_codes = stored(pool)
    assert torch.equal(k_codes[:4], expected(k, 0.3, dtype)[:4])
    assert torch.equal(v_codes[:4], expected(v, 0.7, dtype)[:4])
    assert not k_codes[4:].any()
    assert not v_codes[4:].any()


class OnGPU:
    """A tensor's stand-in for what looks at the device alone."""

    device = torch.device("cuda", 0)
    dtype = torch.bfloat16


@pytest.mark.parametrize(
    ("dtype", "k_scale", "third_party", "is_ours"),
    [
        (torch.float8_e4m3fn, 0.3, "", False),
        (torch.float8_e4m3fn, torch.tensor(0.3), "", False),
        (torch.float8_e4m3fn, None, "", True),
        (torch.float8_e4m3fn, torch.tensor([0.3]), "", True),
        (torch.float8_e5m2, 0.3, "", True),
        (torch.float8_e4m3fn, 0.3, "'other' (other 1.0)", True),
        (torch.bfloat16, 0.3, "", False),
    ],
)
def test_on_a_gpu_the_fused_write_of_a_prefix_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    k_scale: Any,
    third_party: str,
    is_ours: bool,
) -> None:
    quantized = (SimpleNamespace(data=torch.zeros(1, dtype=dtype)),) * 2
    monkeypatch.setattr(sglang_writes, "_third_party_writer", lambda *device: third_party)
    monkeypatch.setattr(sglang_writes, "quantize_kv_pair", lambda *arguments: quantized)
    handed: list[Any] = []
    pool = SimpleNamespace(dtype=dtype)
    writes = sglang_writes._Writes(EngineLog("SGLang"))
    writes.write_prefix(
        lambda *arguments: handed.extend(arguments),
        *(pool, layer_of(k_scale, 0.7), None, None, OnGPU(), OnGPU(), k_scale, 0.7),
    )
    *_, k, v, handed_k_scale, handed_v_scale = handed
    if is_ours:
        assert k is quantized[0].data
        assert v is quantized[1].data
        assert (handed_k_scale, handed_v_scale) == (None, None)
    else:
        assert isinstance(k, OnGPU)
        assert isinstance(v, OnGPU)
        assert handed_k_scale is k_scale
        assert handed_v_scale == 0.7


@pytest.mark.parametrize("kind", SCALES)
def test_cpu_fp8_e4m3_is_written_by_the_hook(kind: str) -> None:
    pool = new_pool(torch.float8_e4m3fn, CPUFP8KVCacheMethod())
    assert pool.is_quantized_kv_cache
    k, v = values(1), values(2)
    k_scale, v_scale = SCALES[kind](0.3), SCALES[kind](0.7)
    pool.set_kv_buffer(layer_of(None, None), SLOTS, k, v, k_scale, v_scale)
    served = (1.0, 1.0) if kind == "none" else (0.3, 0.7)
    for codes, x, scale in zip(stored(pool), (k, v), served, strict=True):
        assert torch.equal(codes, expected(x, scale, torch.float8_e4m3fn))


# NVFP4


@pytest.mark.parametrize("values_dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["number", "parameter", "one element"])
def test_nvfp4_has_the_codes_and_the_scale_as_sglang_returns_it(
    kind: str, values_dtype: torch.dtype
) -> None:
    x, given = values(3, values_dtype)[1:], SCALES[kind](0.01)
    data, block_scales, scale = NVFP4KVQuantizeUtil.quantize(x, given)
    _, packed, scales = oracles.nvfp4_codes(x.float().numpy(), np.float32(0.01))
    assert (data.dtype, block_scales.dtype) == (torch.uint8, torch.float8_e4m3fn)
    assert torch.equal(data, torch.from_numpy(packed))
    assert torch.equal(block_scales.view(torch.uint8), torch.from_numpy(scales))
    assert scale.shape == (1,)
    assert scale.dtype == torch.float32
    assert scale.item() == np.float32(0.01)
    if kind == "one element":
        assert scale is given


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_nvfp4_is_read_from_views_of_any_one_byte_dtype(dtype: torch.dtype) -> None:
    data, block_scales, scale = NVFP4KVQuantizeUtil.quantize(values(3)[1:], 0.01)
    quantized = kv.QuantizedKV(data, block_scales, scale, "nvfp4")
    wanted = kv.dequantize_kv(quantized, dtype=dtype)
    read = NVFP4KVQuantizeUtil.dequantize
    raw = block_scales.view(torch.uint8)
    strided = torch.stack([data, data], dim=1)[:, 1]
    flat = block_scales.reshape(len(data), -1)
    for codes, scales, given in (
        (data, block_scales, scale),
        (data, raw, 0.01),
        (data, flat, torch.tensor(0.01)),
        (strided, raw, scale),
        (data.view(torch.float8_e4m3fn), block_scales, scale),
    ):
        assert torch.equal(read(codes, scales, given, dtype), wanted)


def test_a_global_scale_elsewhere_is_refused_in_sglangs_words() -> None:
    sentence = "NVFP4 global scale tensor must already be on the KV tensor device."
    for scale in (torch.ones((), device="meta"), torch.ones(1, device="meta")):
        with pytest.raises(ValueError, match=sentence):
            NVFP4KVQuantizeUtil.quantize(values(3), scale)
        data, block_scales, _ = NVFP4KVQuantizeUtil.quantize(values(3), 0.01)
        with pytest.raises(ValueError, match=sentence):
            NVFP4KVQuantizeUtil.dequantize(data, block_scales, scale)


# What is left to SGLang


def forbid_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> Any:
        pytest.fail("nothing is to be quantized here")

    for name in ("quantize_kv", "quantize_kv_pair"):
        monkeypatch.setattr(sglang_writes, name, fail)


@pytest.fixture
def unserved(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """No implementation for anything; what was asked for."""
    asked: list[str] = []

    def refuse(*arguments: Any, **options: Any) -> Any:
        asked.append("")
        raise NoImplementationError("no implementation, all of them are blocked")

    for name in ("quantize_kv", "quantize_kv_pair", "dequantize_kv"):
        monkeypatch.setattr(sglang_writes, name, refuse)
    return asked


def twice(write: Callable[[], Any]) -> None:
    write()
    write()


def test_without_an_implementation_sglang_writes_its_pool(
    unserved: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    writes, calls = sglang_writes._Writes(EngineLog("SGLang")), []
    pool = SimpleNamespace(dtype=torch.float8_e4m3fn)
    k, v = values(1), values(2)
    twice(lambda: writes.write_pool(lambda *given: calls.append(given), pool, 0, 0, k, v, 0.3, 0.7))
    assert calls == [(pool, 0, 0, k, v, 0.3, 0.7)] * 2
    assert len(unserved) == 1  # found out once
    (record,) = caplog.records
    assert "all of them are blocked" in record.getMessage()


def test_without_an_implementation_sglang_quantizes_nvfp4(
    unserved: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    writes, calls = sglang_writes._Writes(EngineLog("SGLang")), []
    x, codes = values(1), torch.zeros(1, 1, 8, dtype=torch.uint8)
    scales = torch.zeros(1, 1, 1, dtype=torch.float8_e4m3fn)
    original = lambda *given: calls.append(given)  # noqa: E731
    twice(lambda: writes.quantize_nvfp4(original, x, 0.01))
    twice(lambda: writes.dequantize_nvfp4(original, codes, scales, 0.01))
    assert calls == [(x, 0.01)] * 2 + [(codes, scales, 0.01, torch.bfloat16)] * 2
    assert len(unserved) == 1
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    "kind", [RuntimeError, kv.KVQuantizeError, kv.NoImplementationError, ValueError]
)
def test_what_an_implementation_raises_goes_up_with_its_name(kind: type[Exception]) -> None:
    class Broken:
        @kv.hookimpl
        def supports_kv(self, device: Device, kv_cache_dtype: str) -> bool:
            return kv_cache_dtype == "fp8_e4m3"

        @kv.hookimpl
        def quantize_kv(self, tensor: torch.Tensor) -> None:
            raise kind("out of codes")

    broken = Broken()
    kv.register(broken, "broken_one")
    try:
        with pytest.raises(kind, match="out of codes") as raised:
            new_pool(torch.float8_e4m3fn).set_kv_buffer(
                layer_of(None, None), SLOTS, values(1), values(2)
            )
    finally:
        kv.unregister(broken)
    assert "broken_one" in "".join(raised.value.__notes__)


@pytest.mark.parametrize(
    "scale",
    [
        *(0.0, -1.0, float("nan"), float("inf"), 1e-50, 1e39),
        *(torch.tensor([[0.3], [0.7]]), torch.full((HEAD_DIM,), 0.3), torch.tensor(2), True),
    ],
    ids=lambda scale: f"{scale.dtype}{list(scale.shape)}" if torch.is_tensor(scale) else str(scale),
)
@pytest.mark.parametrize("side", [0, 1])
def test_a_scale_that_the_hook_does_not_take_is_sglangs(
    scale: Any, side: int, caplog: pytest.LogCaptureFixture
) -> None:
    """``KVCACHE_PLUGIN_MODE=warn`` serves corrupt ones, and SGLang divides by other shapes."""
    writes = sglang_writes._Writes(EngineLog("SGLang"))
    pools = new_pool(torch.float8_e4m3fn), new_pool(torch.float8_e4m3fn)
    k, v = values(1), values(2)
    scales = (scale, 0.7) if side == 0 else (0.3, scale)
    original = MHATokenToKVPool.set_kv_buffer.__wrapped__
    ours, alone = functools.partial(writes.write_pool, original), original
    for _ in range(2):
        for write, pool in zip((ours, alone), pools, strict=True):
            write(pool, layer_of(None, None), SLOTS, k.clone(), v.clone(), *scales)
    for codes, others in zip(*map(stored, pools), strict=True):
        assert torch.equal(codes, others)
    (record,) = caplog.records
    assert "with such scales as it does by itself" in record.getMessage()


def unwrapped(pool: MHATokenToKVPool) -> Callable[..., Any]:
    function: Callable[..., Any] = MHATokenToKVPool.set_kv_buffer.__wrapped__
    return function.__get__(pool)


def test_a_pool_of_ocp_codes_on_fnuz_hardware_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SGLang has FNUZ pools there; the device is faked where the plugin asks for it."""
    manager = Manager(frozenset({"rocm_fnuz", "triton_gpu"}))
    manager.discover()
    monkeypatch.setattr("kvcache_plugin.api.get_manager", lambda: manager)
    monkeypatch.setattr("kvcache_plugin.api.of_existing", lambda device: Device("rocm", "gfx942"))
    k, v = values(1), values(2)
    fnuz, ocp = new_pool(torch.float8_e4m3fnuz), new_pool(torch.float8_e4m3fn)
    for pool in (fnuz, ocp):
        pool.set_kv_buffer(layer_of(None, None), SLOTS, k.clone(), v.clone(), 0.3, 0.7)
    assert torch.equal(stored(fnuz)[0], expected(k, 0.3, fnuz.dtype))
    own = new_pool(torch.float8_e4m3fn)
    unwrapped(own)(layer_of(None, None), SLOTS, k.clone(), v.clone(), 0.3, 0.7)
    assert torch.equal(stored(ocp)[0], stored(own)[0])


# torch.compile


@FP8
def test_a_write_is_compiled_whole(dtype: torch.dtype) -> None:
    pool, k, v = new_pool(dtype), values(1), values(2)
    layer = layer_of(parameter(0.3), parameter(0.7))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def write(k: torch.Tensor, v: torch.Tensor, loc: torch.Tensor) -> torch.Tensor:
        pool.set_kv_buffer(layer, loc, k * 1, v * 1, layer.k_scale, layer.v_scale)
        return k + 1

    write(k, v, SLOTS)
    assert torch.equal(stored(pool)[0], expected(k, 0.3, dtype))
    assert torch.equal(stored(pool)[1], expected(v, 0.7, dtype))


# Seams

WRITES = [seam for seam, _ in sglang_writes.wrappers(EngineLog("SGLang"))]


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    targets: list[str] = []

    def register(cls: type, target: str, hook: Any, hook_type: Any) -> None:
        targets.append(target)

    monkeypatch.setattr(HookRegistry, "register", classmethod(register))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    return targets


@pytest.mark.parametrize("seam", WRITES, ids=lambda seam: seam.qualname)
@pytest.mark.parametrize("is_missing", [False, True])
def test_a_seam_that_does_not_fit_is_left_out(
    seam: seams.Seam,
    is_missing: bool,
    registered: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    owner: Any = importlib.import_module(seam.module)
    *classes, function = seam.qualname.split(".")
    for name in classes:
        owner = getattr(owner, name)
    if is_missing:
        monkeypatch.delattr(owner, function)
    else:
        monkeypatch.setattr(owner, function, lambda other, names: None)
    with caplog.at_level(logging.WARNING):
        sglang._hook(LoadGate("SGLang", "strict"), read_settings({}))
    assert seam.path not in registered
    assert {other.path for other in WRITES if other is not seam} <= set(registered)
    (record,) = caplog.records
    assert seam.path in record.getMessage()
    assert seam.purpose in record.getMessage()
