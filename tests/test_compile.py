"""torch.compile(fullgraph=True) over the public calls: same bits, same errors, values read late."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import kvcache_plugin as kv
from kvcache_plugin import compiled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.conftest import Register

KEY = torch.linspace(-2, 2, 3 * 4 * 32, dtype=torch.bfloat16).reshape(3, 4, 32)
VALUE = torch.linspace(-3, 3, 5 * 4 * 16).reshape(5, 4, 16)
NAMES = ("fp8_e4m3", "fp8_e5m2", "fp8_e4m3fnuz", "nvfp4")
SCALES: dict[str, Any] = {
    "number": 0.01,
    "whole number": 1,
    "(1,)": torch.tensor([0.01]),
    "0-d": torch.tensor(0.01),
    "float64": torch.tensor([0.01], dtype=torch.float64),
    "per head": torch.tensor([0.01, 0.02, 0.03, 0.04]),
}

every_format = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Counting:
    """Compiles with a backend, and counts how often."""

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        self.compilations = 0
        self.call = torch.compile(function, fullgraph=True, backend=self._backend, **options)

    def _backend(self, graph: Any, inputs: Any) -> Any:
        self.compilations += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


def everything(key: torch.Tensor, value: torch.Tensor, scale: Any, name: str) -> Any:
    one = kv.quantize_kv(key, scale, name)
    k, v = kv.quantize_kv_pair(key, value, scale, scale, name)
    return one, k, v, kv.dequantize_kv(one), kv.dequantize_kv(v, dtype=torch.float32)


def into_buffers(key: torch.Tensor, value: torch.Tensor, scale: Any, out: Any) -> Any:
    name = out[0].kv_cache_dtype
    one = kv.quantize_kv(key, scale, name, out=out[0])
    return one, kv.quantize_kv_pair(key, value, scale, scale, name, out=out[1:])


# Same bits


@every_format
@pytest.mark.parametrize("kind", SCALES)
def test_results_are_those_of_an_eager_call(name: str, kind: str) -> None:
    scale = SCALES[kind]
    if kind == "per head" and name == "nvfp4":
        pytest.skip("NVFP4 has one scale")
    call = torch.compile(everything, fullgraph=True, backend="aot_eager")
    _same(call(KEY, VALUE, scale, name), everything(KEY, VALUE, scale, name))


@every_format
def test_buffers_are_filled_and_handed_back(name: str) -> None:
    scale = torch.tensor([0.01])
    expected = everything(KEY, VALUE, scale, name)[:3]
    out = everything(KEY * 0, VALUE * 0, scale, name)[:3]
    call = torch.compile(into_buffers, fullgraph=True, backend="aot_eager")
    one, (k, v) = call(KEY, VALUE, scale, out)
    _same((one, k, v), expected)
    _same(out, expected)
    for result, buffers in zip((one, k, v), out, strict=True):
        assert result.data is buffers.data
        assert result.block_scales is buffers.block_scales


@pytest.mark.parametrize("name", ["fp8_e4m3", "nvfp4"])
def test_the_default_backend(name: str) -> None:
    """Its input is not contiguous, and its buffers are the halves of one cache."""
    scale = torch.tensor([0.01])
    key = KEY.transpose(0, 1)
    half = kv.quantize_kv(key, scale, name)
    cache = torch.stack([half.data.view(torch.uint8)] * 2).view(half.data.dtype)

    def call(key: torch.Tensor, scale: torch.Tensor, cache: torch.Tensor, blocks: Any) -> Any:
        k_out, v_out = cache[0], cache[1]
        if blocks is not None:
            k_out, v_out = (k_out, blocks[0]), (v_out, blocks[1])
        kv.quantize_kv_pair(key * 2, key, scale, scale, name, out=(k_out, v_out))
        return everything(key, key[:1], scale, name)

    blocks = None
    if half.block_scales is not None:
        blocks = torch.stack([half.block_scales.view(torch.uint8)] * 2).view(torch.float8_e4m3fn)
    cache_2, blocks_2 = cache.clone(), None if blocks is None else blocks.clone()
    _same(
        torch.compile(call, fullgraph=True)(key, scale, cache, blocks),
        call(key, scale, cache_2, blocks_2),
    )
    _same((cache, blocks), (cache_2, blocks_2))


def test_a_result_does_not_require_grad() -> None:
    key, scale = KEY.clone().requires_grad_(), torch.tensor([0.01], requires_grad=True)
    call = torch.compile(everything, fullgraph=True, backend="aot_eager")
    results = call(key, VALUE, scale, "fp8")
    assert not any(tensor.requires_grad for tensor in _tensors(results))
    _same(results, everything(key, VALUE, scale, "fp8"))


# Compiled once


@pytest.mark.parametrize("name", ["fp8_e4m3", "nvfp4"])
def test_dynamic_shapes(name: str) -> None:
    counting = Counting(everything, dynamic=True)
    for tokens in (2, 3, 7):
        key = KEY[:1].expand(tokens, -1, -1)
        scale = torch.tensor([0.01])
        _same(counting.call(key, VALUE, scale, name), everything(key, VALUE, scale, name))
    assert counting.compilations == 1


@pytest.mark.parametrize("name", ["fp8_e4m3", "nvfp4"])
def test_a_changed_scale_is_used_without_compiling_again(name: str) -> None:
    counting = Counting(everything)
    scale = torch.tensor([0.01])
    for value in (0.01, 0.02, 0.5):
        scale.fill_(value)
        _same(counting.call(KEY, VALUE, scale, name), everything(KEY, VALUE, scale, name))
    assert counting.compilations == 1


def test_a_changed_number_is_used_and_not_compiled_for() -> None:
    """More of them than dynamo compiles one function for: a model has a scale for each layer."""
    counting = Counting(everything)
    for scale in (0.01 * (1 + i) for i in range(torch._dynamo.config.recompile_limit + 4)):
        _same(counting.call(KEY, VALUE, scale, "fp8"), everything(KEY, VALUE, scale, "fp8"))
    assert counting.compilations <= 2


# Any implementation


class Thirds:
    """Its results share memory with each other and, back, with what it is given."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    @kv.hookimpl
    def kv_formats(self) -> list[kv.KVFormat]:
        return [kv.KVFormat("bf16_thirds", "thirds", "bfloat16", 1.0, 1, 4, "bfloat16")]

    @kv.hookimpl
    def supports_kv(self, kv_cache_dtype: str) -> bool | str:
        return kv_cache_dtype == "bf16_thirds" or "serves bf16_thirds"

    @kv.hookimpl
    def quantize_kv(
        self, tensor: torch.Tensor, scale: torch.Tensor, out: kv.OutBuffers | None
    ) -> kv.QuantizedKV:
        self.seen.append("quantize_kv")
        memory = (tensor / scale).to(torch.bfloat16)
        data, block_scales = memory, memory[..., ::4]
        if out is not None and out.block_scales is not None:
            data, block_scales = out.data.copy_(data), out.block_scales.copy_(block_scales)
        return kv.QuantizedKV(data, block_scales, scale, "bf16_thirds")

    @kv.hookimpl
    def quantize_kv_pair(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        k_scale: torch.Tensor,
        v_scale: torch.Tensor,
        out: Any,
    ) -> Any:
        self.seen.append("quantize_kv_pair")
        k_out, v_out = out or (None, None)
        return self.quantize_kv(key, k_scale, k_out), self.quantize_kv(value, v_scale, v_out)

    @kv.hookimpl
    def dequantize_kv(self, quantized: kv.QuantizedKV, dtype: torch.dtype) -> torch.Tensor:
        self.seen.append("dequantize_kv")
        return quantized.data.to(dtype)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_an_implementation_and_a_format_of_somebody_else(register: Register, backend: str) -> None:
    plugin = register(Thirds())
    scale = torch.tensor([0.01])
    expected = everything(KEY, VALUE, scale, "bf16_thirds")
    seen, plugin.seen = plugin.seen, []
    call = torch.compile(everything, fullgraph=True, backend=backend)
    _same(call(KEY, VALUE, scale, "bf16_thirds"), expected)
    assert sorted(plugin.seen) == sorted(seen)


def test_who_is_registered_later_is_called(register: Register) -> None:
    class Zero:
        @kv.hookimpl
        def quantize_kv(
            self, tensor: torch.Tensor, scale: torch.Tensor, kv_cache_dtype: str
        ) -> kv.QuantizedKV:
            codes = torch.zeros_like(tensor).to(torch.float8_e4m3fn)
            return kv.QuantizedKV(codes, None, scale, kv_cache_dtype)

    def call(key: torch.Tensor) -> torch.Tensor:
        return kv.quantize_kv(key, 0.01, "fp8").data

    counting = Counting(call)
    assert counting.call(KEY).float().any()
    register(Zero())
    assert not counting.call(KEY).float().any()
    assert counting.compilations == 1


def test_an_implementation_that_raises_is_named(
    register: Register, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing:
        @kv.hookimpl
        def quantize_kv(self) -> None:
            raise OSError("no driver")

    register(Failing(), "failing")
    call = torch.compile(kv.quantize_kv, fullgraph=True, backend="aot_eager")
    with pytest.raises(OSError, match="no driver") as caught:
        call(KEY, 0.01, "fp8")
    assert "'failing'" in "".join(getattr(caught.value, "__notes__", ())) + caplog.text


# Same errors


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((KEY.long(), 1.0, "fp8"), "K or V must be float32, bfloat16 or float16"),
        (([1.0], 1.0, "fp8"), "K or V must be a tensor, got list"),
        ((KEY[..., :8], 1.0, "nvfp4"), "nvfp4 needs a head_dim that is a multiple of 16"),
        ((KEY, 1.0, "fp4"), "unknown kv_cache_dtype 'fp4'"),
        ((KEY, 1.0, None), "unknown kv_cache_dtype None"),
        ((KEY, -1.0, "fp8"), "the scale must be finite and > 0"),
        ((KEY, "1", "fp8"), "the scale must be a number or a floating-point tensor"),
        ((KEY, torch.ones(2), "fp8"), "FP8 scale tensor must have one element, or shape [H]"),
        ((KEY, torch.ones(4), "nvfp4"), "NVFP4 global scale tensor must have one element"),
        ((KEY, torch.ones(1, dtype=torch.int32), "fp8"), "must have a floating-point dtype"),
        (
            (KEY, torch.ones(1, device="meta"), "nvfp4"),
            "NVFP4 global scale tensor must already be on the KV tensor device.",
        ),
        ((KEY, 1.0, "fp8", 3), "out is a tensor for data, a tuple"),
        ((KEY, 1.0, "fp8", KEY), "out: data must be torch.float8_e4m3fn with shape (3, 4, 32)"),
        ((KEY, 1.0, "fp8", (None,)), "got NoneType"),
        ((KEY, 1.0, "nvfp4", (KEY[..., :16].byte(), 1)), "got int"),
        ((KEY, 1.0, "nvfp4", KEY[..., :16].byte()), "out: block_scales must be a tensor"),
    ],
)
def test_a_wrong_argument_is_refused_with_our_message(arguments: Any, sentence: str) -> None:
    def call(tensor: Any, scale: Any, name: Any, out: Any = None) -> kv.QuantizedKV:
        return kv.quantize_kv(tensor, scale, name, out=out)

    with pytest.raises(kv.KVQuantizeError) as caught:
        call(*arguments)
    assert sentence in str(caught.value)
    _refused(call, arguments, sentence)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((KEY, VALUE.to("meta"), 1.0, 1.0, "fp8"), "K is on cpu, V is on meta"),
        ((KEY, VALUE.long(), 1.0, 1.0, "fp8"), "V: K or V must be float32"),
        ((KEY, VALUE, 1.0, 0.0, "fp8"), "the scale must be finite and > 0"),
        ((KEY, VALUE, 1.0, 1.0, "fp8", KEY), "out is a pair of what quantize_kv takes"),
        (
            (KEY, VALUE, 1.0, 1.0, "fp8", (KEY.to(torch.float8_e4m3fn), VALUE)),
            "V: out: data must be torch.float8_e4m3fn",
        ),
    ],
)
def test_a_wrong_pair_is_refused_with_our_message(arguments: Any, sentence: str) -> None:
    def call(*given: Any) -> Any:
        return kv.quantize_kv_pair(*given[:5], out=given[5] if len(given) > 5 else None)

    _refused(call, arguments, sentence)


@pytest.mark.parametrize(
    ("change", "dtype", "sentence"),
    [
        (lambda q: 3, torch.float32, "expected a QuantizedKV, got int"),
        (lambda q: q, torch.int8, "values come as float32, bfloat16 or float16, got dtype="),
        (
            lambda q: kv.QuantizedKV(q.data, None, q.scale, "nvfp4"),
            torch.float32,
            "data must be torch.uint8",
        ),
        (
            lambda q: kv.QuantizedKV(q.data, None, q.scale.double(), "fp8"),
            torch.float32,
            "the scale of quantized K or V must be torch.float32",
        ),
    ],
    ids=["number", "dtype", "format", "scale"],
)
def test_wrong_codes_are_refused_with_our_message(
    change: Callable[[Any], Any], dtype: Any, sentence: str
) -> None:
    quantized = change(kv.quantize_kv(KEY, 0.01, "fp8"))
    _refused(lambda quantized: kv.dequantize_kv(quantized, dtype=dtype), (quantized,), sentence)


# The ops


@pytest.mark.parametrize("name", ["fp8_e4m3", "nvfp4", "bf16_thirds"])
def test_the_ops_are_what_torch_expects(register: Register, name: str) -> None:
    register(Thirds())
    # Its look at the schema compares inputs, which torch cannot do with 8-bit floats.
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    if name == "bf16_thirds":
        checks = ("test_schema", *checks)
    scale = torch.tensor([0.01])
    value = VALUE.transpose(0, 1)
    k, v = (
        (q.data.clone(), q.block_scales if q.block_scales is None else q.block_scales.clone())
        for q in kv.quantize_kv_pair(KEY, value, scale, scale, name)
    )
    for op, arguments in (
        (compiled._quantize, (KEY, scale, name)),
        (compiled._quantize_out, (KEY, scale, name, *k)),
        (compiled._quantize_pair, (KEY, value, scale, scale, name)),
        (compiled._quantize_pair_out, (KEY, value, scale, scale, name, *k, *v)),
        (compiled._dequantize, (*v, scale, name, torch.float16)),
    ):
        torch.library.opcheck(op, arguments, test_utils=checks)


# Helpers


def _refused(call: Callable[..., Any], arguments: Any, sentence: str) -> None:
    """Compiling fails, and what is shown has our sentence."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - dynamo's class is its own affair
        torch.compile(call, fullgraph=True, backend="aot_eager")(*arguments)
    assert sentence in str(caught.value)


def _tensors(results: Any) -> list[torch.Tensor]:
    if isinstance(results, torch.Tensor):
        return [results]
    if isinstance(results, kv.QuantizedKV):
        results = (results.data, results.block_scales, results.scale)
    return [tensor for result in results or () for tensor in _tensors(result)]


def _same(results: Any, expected: Any) -> None:
    pairs = list(zip(_tensors(results), _tensors(expected), strict=True))
    assert pairs
    for result, other in pairs:
        assert (result.dtype, result.shape) == (other.dtype, other.shape)
        bits = (tensor.contiguous().view(torch.uint8) for tensor in (result, other))
        assert torch.equal(*bits)
