"""The CPU reference, bit for bit, against oracles that know neither this project nor torch."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvcache_plugin as kv
from kvcache_plugin.conformance import tables
from tests import oracles
from tests.oracles import E2M1, E4M3, E4M3FNUZ, E5M2, FP8, Minifloat, Vendor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from tests.oracles import Array

NUMPY_DTYPES: dict[torch.dtype, Any] = {
    torch.float32: np.float32,
    torch.bfloat16: ml_dtypes.bfloat16,
    torch.float16: np.float16,
}
VALUE_DTYPES = tuple(NUMPY_DTYPES)
HALF_DTYPES = (torch.bfloat16, torch.float16)
TORCH_FP8 = {
    E4M3.name: torch.float8_e4m3fn,
    E5M2.name: torch.float8_e5m2,
    E4M3FNUZ.name: torch.float8_e4m3fnuz,
}
NVFP4 = "nvfp4"
FORMAT_NAMES = (*TORCH_FP8, NVFP4)
BY_NAME = {form.name: form for form in FP8}

INF = float("inf")
NAN = float("nan")
SMALLEST_NORMAL_E4M3 = 2.0**-6
SMALLEST_FLOAT32 = 2.0**-149  # subnormal
SMALLEST_NORMAL_FLOAT32 = 2.0**-126
LARGEST_FLOAT32 = float(oracles.FLOAT32_MAX)
#: As calibration gives them, powers of two, and such that codes become subnormal or saturate.
SCALES = (
    *(1.0, 0.05, 0.0123, 2.0**-7, 2.0**5, 3.0, 1234.5),
    *(1e-30, 1e30, SMALLEST_NORMAL_FLOAT32, SMALLEST_FLOAT32, LARGEST_FLOAT32),
)
#: Such that 448·g and 6·g overflow, and such that sf·g underflows.
GLOBAL_SCALES = (
    *(1.0, 0.05, 0.00123, 2.0**-10, 77.7, 1e-30, 1e-38, 1e-41, 3 * SMALLEST_FLOAT32),
    *(SMALLEST_FLOAT32, 1e30, 1e36, 1e38, LARGEST_FLOAT32),
)

pytestmark = pytest.mark.usefixtures("reference_serves")
both_halves = pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
every_value_dtype = pytest.mark.parametrize("dtype", VALUE_DTYPES, ids=str)
every_fp8 = pytest.mark.parametrize("form", FP8, ids=lambda form: form.name)
every_format = pytest.mark.parametrize("name", FORMAT_NAMES)
hypothesis_settings = settings(deadline=None, max_examples=60)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """These tensors are small: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def vendor(tmp_path_factory: pytest.TempPathFactory) -> Vendor:
    return Vendor(tmp_path_factory.mktemp("vendor"))


# Between torch and numpy, by bits: no conversion of torch's takes part.


def to_numpy(tensor: torch.Tensor) -> Array:
    """The values as float32; widening is exact."""
    values: Array = bits(tensor).view(NUMPY_DTYPES[tensor.dtype]).astype(np.float32)
    return values


def to_torch(values: Array, dtype: torch.dtype) -> torch.Tensor:
    with np.errstate(all="ignore"):
        stored = values.astype(NUMPY_DTYPES[dtype])
    return from_bits(stored.view(_unsigned(stored.itemsize)), dtype)


def bits(tensor: torch.Tensor) -> Array:
    size = tensor.element_size()
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[size]
    plain = tensor.detach().resolve_neg().contiguous().view(integer)
    patterns: Array = plain.numpy().view(_unsigned(size)).copy()
    return patterns


def from_bits(patterns: Array, dtype: torch.dtype) -> torch.Tensor:
    integer = {1: np.uint8, 2: np.int16, 4: np.int32}[patterns.itemsize]
    return torch.from_numpy(patterns.view(integer).copy()).view(dtype)


def _unsigned(size: int) -> Any:
    return {1: np.uint8, 2: np.uint16, 4: np.uint32}[size]


def every_pattern(dtype: torch.dtype) -> torch.Tensor:
    return from_bits(np.arange(1 << 16, dtype=np.uint16), dtype)


def random_patterns(count: int, seed: int) -> torch.Tensor:
    """float32 of any exponent, infinities and NaN among them."""
    patterns = np.random.default_rng(seed).integers(0, 1 << 32, count, dtype=np.uint32)
    return from_bits(patterns, torch.float32)


def assert_same_codes(actual: Array, expected: Array, form: Minifloat) -> None:
    """Equal bits; any NaN code stands for NaN where the format has several."""
    assert actual.shape == expected.shape
    nan = oracles.is_nan_code(expected, form)
    wrong = np.where(nan, ~oracles.is_nan_code(actual, form), actual != expected)
    assert not wrong.any(), (
        f"{np.count_nonzero(wrong)} of {wrong.size} codes differ; the first are "
        f"{actual[wrong][:4]} instead of {expected[wrong][:4]}"
    )


def assert_same_values(actual: torch.Tensor, expected: Array) -> None:
    """Equal bits, signs of zeros too; any NaN is as good as another."""
    assert tuple(actual.shape) == expected.shape
    assert NUMPY_DTYPES[actual.dtype] == expected.dtype.type
    nan = np.isnan(expected)
    assert np.array_equal(np.isnan(to_numpy(actual)), nan)
    expected_bits = np.ascontiguousarray(expected).view(_unsigned(expected.itemsize))
    assert np.array_equal(bits(actual)[~nan], expected_bits[~nan])


def assert_same_result(actual: kv.QuantizedKV, expected: kv.QuantizedKV) -> None:
    assert actual.kv_cache_dtype == expected.kv_cache_dtype
    assert actual.data.dtype == expected.data.dtype
    assert np.array_equal(bits(actual.data), bits(expected.data))
    assert np.array_equal(bits(actual.scale), bits(expected.scale))
    assert (actual.block_scales is None) == (expected.block_scales is None)
    if actual.block_scales is not None and expected.block_scales is not None:
        assert np.array_equal(bits(actual.block_scales), bits(expected.block_scales))


def assert_nvfp4(result: kv.QuantizedKV, x: Array, g: float) -> None:
    _, data, block_codes = oracles.nvfp4_codes(x, np.float32(g))
    assert result.block_scales is not None
    assert result.data.dtype == torch.uint8
    assert result.block_scales.dtype == torch.float8_e4m3fn
    assert np.array_equal(bits(result.block_scales), block_codes)
    assert np.array_equal(bits(result.data), data)
    assert result.scale.dtype == torch.float32
    assert result.scale.tolist() == [float(np.float32(g))]
    assert result.kv_cache_dtype == NVFP4


def assert_oracle(result: kv.QuantizedKV, x: Array, scale: float, name: str) -> None:
    if name == NVFP4:
        assert_nvfp4(result, x, scale)
        return
    expected = oracles.fp8_codes(x, np.float32(scale), BY_NAME[name])
    assert result.data.dtype == TORCH_FP8[name]
    assert result.block_scales is None
    assert result.kv_cache_dtype == name
    assert_same_codes(bits(result.data), expected, BY_NAME[name])


def sample(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 7) -> torch.Tensor:
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return to_torch(values, dtype)


# The oracles agree with each other.


@pytest.mark.parametrize("form", [*FP8, E2M1], ids=lambda form: form.name)
def test_ml_dtypes_and_the_table_of_all_codes_agree(form: Minifloat) -> None:
    x = to_numpy(random_patterns(200_000, seed=1))
    for halves in HALF_DTYPES:
        x = np.concatenate([x, to_numpy(every_pattern(halves))])
    assert np.array_equal(oracles.rounded(x, form), oracles.nearest(x, form))
    assert np.array_equal(
        oracles.decoded(np.arange(len(form.magnitudes)), form), form.magnitudes.astype(np.float32)
    )


@pytest.mark.parametrize("form", [E4M3, E5M2, E2M1], ids=lambda form: form.name)
def test_ml_dtypes_and_the_vendor_agree(form: Minifloat, vendor: Vendor) -> None:
    x = to_numpy(random_patterns(200_000, seed=2))
    for halves in HALF_DTYPES:
        x = np.concatenate([x, to_numpy(every_pattern(halves))])
    x = x[~np.isnan(x)]
    assert np.array_equal(oracles.rounded(x, form), vendor.rounded(x, form))


# FP8: every half-precision pattern.


@every_fp8
@both_halves
@pytest.mark.parametrize("scale", SCALES)
def test_every_half_pattern_as_fp8(form: Minifloat, dtype: torch.dtype, scale: float) -> None:
    x = every_pattern(dtype)
    result = kv.quantize_kv(x, scale, form.name)
    assert_oracle(result, to_numpy(x), scale, form.name)


@pytest.mark.parametrize("form", [E4M3, E5M2], ids=lambda form: form.name)
@both_halves
@pytest.mark.parametrize("scale", SCALES)
def test_every_half_pattern_as_the_vendor_converts_it(
    form: Minifloat, dtype: torch.dtype, scale: float, vendor: Vendor
) -> None:
    x = every_pattern(dtype)
    with np.errstate(all="ignore"):
        quotient = to_numpy(x) / np.float32(scale)
    expected = vendor.rounded(quotient, form)
    assert_same_codes(bits(kv.quantize_kv(x, scale, form.name).data), expected, form)


@every_fp8
@pytest.mark.parametrize("scale", SCALES)
def test_random_float32_patterns_as_fp8(form: Minifloat, scale: float) -> None:
    x = random_patterns(20_000, seed=3)
    assert_oracle(kv.quantize_kv(x, scale, form.name), to_numpy(x), scale, form.name)


def test_fp8_is_fp8_e4m3() -> None:
    x = every_pattern(torch.bfloat16)
    assert_oracle(kv.quantize_kv(x, 0.05, "fp8"), to_numpy(x), 0.05, "fp8_e4m3")


# The known answers of the conformance kit. They are held against the oracles here.

FP8_ROWS = [
    (name, *row)
    for name, sections in tables.FP8.items()
    for table in sections.values()
    for row in table
]
E2M1_ROWS = [row for table in tables.E2M1.values() for row in table]
BLOCK_SCALE_ROWS = [row for table in tables.BLOCK_SCALES.values() for row in table]
#: fp32(1/448) · 448 rounds to 1.
UNIT_GLOBAL_SCALE = float(np.float32(1) / np.float32(E4M3.largest))


@pytest.mark.parametrize(("name", "value", "code"), FP8_ROWS)
def test_fp8_table(name: str, value: float, code: str) -> None:
    x = np.array([value], np.float32)
    expected = np.array([tables.code(code)], np.uint8)
    assert_same_codes(oracles.rounded(x, BY_NAME[name]), expected, BY_NAME[name])
    result = kv.quantize_kv(to_torch(x, torch.float32), 1.0, name)
    assert_same_codes(bits(result.data), expected, BY_NAME[name])


@pytest.mark.parametrize("form", [E4M3, E5M2], ids=lambda form: form.name)
@pytest.mark.parametrize("value", [NAN, -NAN])
@every_value_dtype
def test_nan_stays_nan(form: Minifloat, value: float, dtype: torch.dtype) -> None:
    x = to_torch(np.array([value, 1.0], np.float32), dtype)
    codes = bits(kv.quantize_kv(x, 0.5, form.name).data)
    assert oracles.is_nan_code(codes, form).tolist() == [True, False]


@pytest.mark.parametrize(("value", "code"), E2M1_ROWS)
def test_e2m1_table(value: float, code: str) -> None:
    x = np.array([value] * 15 + [INF], np.float32)
    result = kv.quantize_kv(to_torch(x, torch.float32), UNIT_GLOBAL_SCALE, NVFP4)
    assert result.block_scales is not None
    assert result.block_scales.float().tolist() == [E4M3.largest]
    codes = oracles.unpacked(bits(result.data))
    assert codes.tolist() == [tables.code(code)] * 15 + [0b0_11_1]


@pytest.mark.parametrize(("value", "block_scale", "code"), BLOCK_SCALE_ROWS)
def test_block_scale_table(value: float, block_scale: str, code: str) -> None:
    x = np.array([value] + [0] * 15, np.float32)
    codes, _, block_codes = oracles.nvfp4_codes(x, np.float32(1))
    assert block_codes.tolist() == [tables.code(block_scale)]
    assert codes.tolist() == [tables.code(code)] + [0] * 15
    assert_nvfp4(kv.quantize_kv(to_torch(x, torch.float32), 1.0, NVFP4), x, 1.0)


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [(name, *row) for name, table in tables.FP8_VALUES.items() for row in table],
)
def test_fp8_values_table(name: str, value: float, code: str) -> None:
    expected = np.array([value], np.float32)
    codes = np.array([tables.code(code)], np.uint8)
    values = oracles.decoded(codes, BY_NAME[name])
    assert np.array_equal(values, expected, equal_nan=True)
    assert np.array_equal(np.signbit(values), np.signbit(expected)) or np.isnan(value)
    quantized = kv.QuantizedKV(from_bits(codes, TORCH_FP8[name]), None, torch.ones(1), name)
    assert_same_values(kv.dequantize_kv(quantized, dtype=torch.float32), expected)


@every_fp8
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("scale", [1.0, 2.0**-10, 4.0])
def test_beyond_the_largest_value_is_the_largest(
    form: Minifloat, sign: float, scale: float
) -> None:
    just_above = np.nextafter(np.float32(form.largest), np.float32(INF))
    factors = np.array([1.0011, 1.03, 1.04, 1.07, 1.5, 2.0, 1e10, 1e32], np.float32)
    x = np.concatenate([[just_above], np.float32(form.largest) * factors, [np.float32(INF)]])
    tensor = to_torch((x * np.float32(sign * scale)).astype(np.float32), torch.float32)
    values = kv.quantize_kv(tensor, scale, form.name).data.float()
    assert values.tolist() == [sign * form.largest] * len(x)


# NVFP4: every half-precision pattern, and blocks of every kind.


def forced_blocks(values: torch.Tensor) -> torch.Tensor:
    """15 values and one infinity to a block, so that the block scale is 448."""
    fifteen = oracles.BLOCK_SIZE - 1
    count = -(-values.numel() // fifteen)
    filled = torch.zeros(count * fifteen, dtype=values.dtype)
    filled[: values.numel()] = values
    infinity = torch.full((count, 1), INF, dtype=values.dtype)
    return torch.cat([filled.view(count, fifteen), infinity], dim=1)


@both_halves
def test_every_half_pattern_as_e2m1(dtype: torch.dtype, vendor: Vendor) -> None:
    x = forced_blocks(every_pattern(dtype))
    result = kv.quantize_kv(x, UNIT_GLOBAL_SCALE, NVFP4)
    codes = oracles.unpacked(bits(result.data))
    values = to_numpy(x)
    nan = np.isnan(values)
    assert result.block_scales is not None
    assert (result.block_scales.float() == E4M3.largest).all()
    assert np.array_equal(codes[~nan], vendor.rounded(values[~nan], E2M1))
    # The vendor makes NaN the largest value, the definition makes it 0 with its sign.
    assert np.array_equal(codes[nan], np.signbit(values[nan]) * np.uint8(oracles.E2M1_SIGN))


@both_halves
@pytest.mark.parametrize("g", GLOBAL_SCALES)
def test_every_half_pattern_in_blocks_of_neighbours(dtype: torch.dtype, g: float) -> None:
    x = every_pattern(dtype).view(-1, 64)
    assert_nvfp4(kv.quantize_kv(x, g, NVFP4), to_numpy(x), g)


@both_halves
@pytest.mark.parametrize("g", GLOBAL_SCALES)
def test_every_half_pattern_in_shuffled_blocks(dtype: torch.dtype, g: float) -> None:
    order = np.random.default_rng(5).permutation(1 << 16)
    x = every_pattern(dtype)[torch.from_numpy(order)].view(-1, 128)
    assert_nvfp4(kv.quantize_kv(x, g, NVFP4), to_numpy(x), g)


def _blocks(kind: str) -> Array:
    rng = np.random.default_rng(11)
    normal = rng.standard_normal((32, 64))
    lone_nan, lone_inf, mixed = normal.copy(), normal.copy(), normal.copy()
    lone_nan[:, ::16] = NAN
    lone_inf[:, 3::16] = -INF
    mixed[::2, 5::16], mixed[:, 7::16], mixed[:, 8::16] = INF, NAN, -0.0
    signs = np.where(normal < 0, -1.0, 1.0)
    blocks: Array = {
        "random": normal,
        "heavy-tailed": rng.standard_t(1.2, (32, 64)) * 10,
        "log-uniform": signs * 10.0 ** rng.uniform(-44, 38, (32, 64)),
        "tiny": normal * 1e-38,
        "subnormal": normal * 1e-43,
        "huge": signs * rng.uniform(0.5, 1.0, (32, 64)) * 3e38,
        "zeros": signs * 0.0,
        "halfway": rng.integers(-24, 25, (32, 64)) / 4,
        "infinities": signs * INF,
        "nan alone": np.copysign(NAN, signs),
        "nan in each block": lone_nan,
        "infinity in each block": lone_inf,
        "infinity, nan and -0": mixed,
    }[kind].astype(np.float32)
    return blocks


BLOCK_KINDS = (
    *("random", "heavy-tailed", "log-uniform", "tiny", "subnormal", "huge", "zeros", "halfway"),
    *("infinities", "nan alone", "nan in each block", "infinity in each block"),
    "infinity, nan and -0",
)


@pytest.mark.parametrize("kind", BLOCK_KINDS)
@pytest.mark.parametrize("g", GLOBAL_SCALES)
def test_nvfp4_blocks(kind: str, g: float) -> None:
    for dtype in VALUE_DTYPES:
        x = to_torch(_blocks(kind), dtype)
        assert_nvfp4(kv.quantize_kv(x, g, NVFP4), to_numpy(x), g)


@pytest.mark.parametrize("g", GLOBAL_SCALES)
def test_nvfp4_random_float32_patterns(g: float) -> None:
    x = random_patterns(1 << 15, seed=13).view(-1, 16)
    # Random exponents put one value of a block far above the others: keep some blocks narrow.
    x[::2] *= 2.0**-100
    assert_nvfp4(kv.quantize_kv(x, g, NVFP4), to_numpy(x), g)


def test_nvfp4_worked_example() -> None:
    """Worked by hand, in the tables."""
    row, codes, values = zip(*tables.WORKED_BLOCK, strict=True)
    result = kv.quantize_kv(torch.tensor([row]), tables.WORKED_GLOBAL_SCALE, NVFP4)
    assert oracles.unpacked(bits(result.data)).tolist() == [list(map(tables.code, codes))]
    assert result.block_scales is not None
    assert bits(result.block_scales).tolist() == [[tables.code(tables.WORKED_BLOCK_SCALE)]]
    expected = np.array([values], np.float32)
    assert_same_values(kv.dequantize_kv(result, dtype=torch.float32), expected)


def test_nvfp4_block_whose_scale_rounds_to_zero_is_signed_zeros() -> None:
    x = torch.tensor([[1e-6, -1e-6] * 8])
    result = kv.quantize_kv(x, 1.0, NVFP4)
    assert result.block_scales is not None
    assert bits(result.block_scales).tolist() == [[0]]
    assert bits(result.data).tolist() == [[0x80] * 8]


# Dequantizing.


@every_fp8
@every_value_dtype
@pytest.mark.parametrize("scale", SCALES)
def test_every_fp8_code_dequantized(form: Minifloat, dtype: torch.dtype, scale: float) -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(4, 64)
    quantized = kv.QuantizedKV(
        from_bits(codes, TORCH_FP8[form.name]), None, torch.tensor([scale]), form.name
    )
    expected = oracles.fp8_values(codes, np.float32(scale), form, NUMPY_DTYPES[dtype])
    assert_same_values(kv.dequantize_kv(quantized, dtype=dtype), expected)


@every_value_dtype
@pytest.mark.parametrize("g", GLOBAL_SCALES)
def test_every_nvfp4_code_and_block_scale_dequantized(dtype: torch.dtype, g: float) -> None:
    # Each row has the 256 bytes beside one of the 256 block scales.
    data = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    block_codes = np.repeat(np.arange(256, dtype=np.uint8)[:, np.newaxis], 32, axis=1)
    quantized = kv.QuantizedKV(
        from_bits(data, torch.uint8),
        from_bits(block_codes, torch.float8_e4m3fn),
        torch.tensor([g]),
        NVFP4,
    )
    expected = oracles.nvfp4_values(data, block_codes, np.float32(g), NUMPY_DTYPES[dtype])
    assert_same_values(kv.dequantize_kv(quantized, dtype=dtype), expected)


def test_dequantize_gives_bfloat16_unless_told() -> None:
    assert kv.dequantize_kv(kv.quantize_kv(sample(2, 16), 0.1, "fp8")).dtype == torch.bfloat16


@every_format
def test_dequantize_takes_any_strides(name: str) -> None:
    result = kv.quantize_kv(sample(6, 4, 32), 0.03, name)
    spread = kv.QuantizedKV(
        _spread(result.data),
        None if result.block_scales is None else _spread(result.block_scales),
        result.scale,
        name,
    )
    assert not spread.data.is_contiguous()
    plain, strided = (kv.dequantize_kv(q, dtype=torch.float32) for q in (result, spread))
    assert np.array_equal(bits(plain), bits(strided))


def _spread(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with gaps between them, in another order of dimensions."""
    room = torch.zeros(*reversed(tensor.shape), 2, dtype=torch.uint8).view(tensor.dtype)
    view = room[..., 1].permute(*reversed(range(tensor.dim())))
    view.copy_(tensor)
    return view


@every_fp8
@every_value_dtype
def test_dequantize_per_head(form: Minifloat, dtype: torch.dtype) -> None:
    scales = np.array([0.05, 3.0, 1e-30, 1e30], np.float32)
    codes = np.arange(256, dtype=np.uint8).reshape(2, 4, 32)
    quantized = kv.QuantizedKV(
        from_bits(codes, TORCH_FP8[form.name]), None, torch.from_numpy(scales), form.name
    )
    expected = oracles.fp8_values(codes, scales[:, np.newaxis], form, NUMPY_DTYPES[dtype])
    assert_same_values(kv.dequantize_kv(quantized, dtype=dtype), expected)


@every_format
def test_dequantize_changes_nothing_that_it_is_given(name: str) -> None:
    result = kv.quantize_kv(sample(3, 2, 32), 0.03, name)
    tensors = [t for t in (result.data, result.block_scales, result.scale) if t is not None]
    before = [(bits(tensor), tensor._version) for tensor in tensors]
    values = kv.dequantize_kv(result, dtype=torch.float32)
    values.fill_(0)
    for tensor, (old_bits, old_version) in zip(tensors, before, strict=True):
        assert np.array_equal(bits(tensor), old_bits)
        assert tensor._version == old_version


# Shapes and strides.


def _complex(x: torch.Tensor) -> torch.Tensor:
    return torch.complex(torch.zeros_like(x, dtype=torch.float32), x.float())


STRIDED_INPUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed tokens and heads": lambda x: x.transpose(0, 1),
    "head_dim first in memory": lambda x: x.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    "expanded heads": lambda x: x[:, :1].expand(-1, 5, -1),
    "expanded head_dim": lambda x: x[..., :1].expand(-1, -1, 32),
    "expanded scalar": lambda x: x[0, 0, 0].expand(3, 2, 16),
    "every second token": lambda x: x[1::2],
    "every second element": lambda x: x[..., 1::2],
    "offset slice": lambda x: x[2:5, 1:, 16:],
    "counted from the end": lambda x: x[-3:, -2:, -16:],
    "overlapping windows": lambda x: x.reshape(-1).unfold(0, 32, 3),
    "K of a fused KV": lambda x: torch.stack([x, x + 1], dim=1)[:, 0],
    "lazily negated": lambda x: _complex(x).conj().imag,
    "as_strided with offset": lambda x: torch.as_strided(x, (3, 2, 16), (7, 64, 2), 5),
    "flipped": lambda x: x.flip(0, 2),
}


@pytest.mark.parametrize("kind", STRIDED_INPUTS)
@every_format
@every_value_dtype
def test_strided_inputs(kind: str, name: str, dtype: torch.dtype) -> None:
    x = STRIDED_INPUTS[kind](sample(8, 4, 64, dtype=dtype))
    assert kind != "lazily negated" or x.is_neg()
    result = kv.quantize_kv(x, 0.02, name)
    assert_oracle(result, to_numpy(x), 0.02, name)
    shape = tuple(x.shape)
    assert tuple(kv.dequantize_kv(result).shape) == shape


@pytest.mark.parametrize(
    "shape", [(0, 4, 32), (2, 0, 16), (2, 3, 0), (0,), (0, 0, 0), (5, 0, 3, 48), (0, 16)]
)
@every_format
@every_value_dtype
def test_empty_inputs(shape: tuple[int, ...], name: str, dtype: torch.dtype) -> None:
    x = torch.empty(shape, dtype=dtype)
    result = kv.quantize_kv(x, 0.5, name)
    assert_oracle(result, to_numpy(x), 0.5, name)
    back = kv.dequantize_kv(result, dtype=dtype)
    assert (tuple(back.shape), back.dtype) == (shape, dtype)


@pytest.mark.parametrize("shape", [(16,), (32,), (1, 16), (3, 48), (2, 3, 4, 5, 16), (1, 1, 1, 80)])
@every_format
def test_any_number_of_dimensions(shape: tuple[int, ...], name: str) -> None:
    x = sample(*shape)
    result = kv.quantize_kv(x, 0.02, name)
    assert_oracle(result, to_numpy(x), 0.02, name)
    assert tuple(kv.dequantize_kv(result).shape) == shape


@pytest.mark.parametrize("head_dim", [1, 3, 7, 65])
@every_fp8
def test_fp8_takes_any_head_dim(head_dim: int, form: Minifloat) -> None:
    x = sample(5, head_dim)
    assert_oracle(kv.quantize_kv(x, 0.02, form.name), to_numpy(x), 0.02, form.name)


# Scales.


@pytest.mark.parametrize("shape", [(5, 4, 16), (4, 16), (2, 3, 4, 8), (0, 4, 16)])
@every_fp8
@every_value_dtype
def test_one_scale_per_head(shape: tuple[int, ...], form: Minifloat, dtype: torch.dtype) -> None:
    scales = np.array([0.05, 3.0, 1e-3, 1e30], np.float32)
    x = sample(*shape, dtype=dtype)
    result = kv.quantize_kv(x, torch.from_numpy(scales), form.name)
    expected = oracles.fp8_codes(to_numpy(x), scales[:, np.newaxis], form)
    assert_same_codes(bits(result.data), expected, form)
    assert result.scale.tolist() == scales.tolist()


@every_fp8
def test_per_head_with_as_many_heads_as_elements(form: Minifloat) -> None:
    """H == head_dim == tokens: the scale goes along the heads alone."""
    scales = np.array([0.05, 3.0, 1e-3, 0.4], np.float32)
    x = sample(4, 4, 4)
    result = kv.quantize_kv(x, torch.from_numpy(scales), form.name)
    expected = oracles.fp8_codes(to_numpy(x), scales[np.newaxis, :, np.newaxis], form)
    assert_same_codes(bits(result.data), expected, form)


@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_per_head_scales_in_other_dtypes(scale_dtype: torch.dtype) -> None:
    scales = torch.tensor([0.5, 0.125], dtype=scale_dtype)
    x = sample(3, 2, 8)
    result = kv.quantize_kv(x, scales, "fp8")
    assert result.scale.dtype == torch.float32
    expected = oracles.fp8_codes(to_numpy(x), np.array([[0.5], [0.125]], np.float32), E4M3)
    assert_same_codes(bits(result.data), expected, E4M3)


@every_format
@pytest.mark.parametrize("number", [1.0, 0.05, 0.0123, 1e-40, 1e38, 3, np.float32(0.05)])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1)])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float64])
def test_a_number_and_a_tensor_give_the_same(
    name: str, number: float, shape: tuple[int, ...], scale_dtype: torch.dtype
) -> None:
    x = sample(4, 3, 32)
    tensor = torch.full(shape, float(number), dtype=scale_dtype)
    expected = kv.quantize_kv(x, number, name)
    assert tuple(expected.scale.shape) == (1,)
    assert expected.scale.tolist() == [float(np.float32(number))]
    assert_same_result(kv.quantize_kv(x, tensor, name), expected)


@every_format
@pytest.mark.parametrize(
    "scale_dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_a_narrow_scale_tensor_is_its_value(name: str, scale_dtype: torch.dtype) -> None:
    x = sample(4, 3, 32)
    result = kv.quantize_kv(x, torch.tensor([0.375]).to(scale_dtype), name)
    assert_same_result(result, kv.quantize_kv(x, 0.375, name))


# out=


def make_buffers(
    shape: tuple[int, ...], name: str, layout: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Buffers full of 0xA5, plain or as a view of every second place of a larger one."""
    lead, head_dim = shape[:-1], shape[-1]
    if name != NVFP4:
        return _buffer(shape, TORCH_FP8[name], layout), None
    return (
        _buffer((*lead, head_dim // 2), torch.uint8, layout),
        _buffer((*lead, head_dim // 16), torch.float8_e4m3fn, layout),
    )


def _buffer(shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> torch.Tensor:
    if layout == "plain":
        return torch.full(shape, 0xA5, dtype=torch.uint8).view(dtype)
    if layout == "transposed":
        room = torch.full((*shape[1:], shape[0]), 0xA5, dtype=torch.uint8).view(dtype)
        return room.permute(-1, *range(len(shape) - 1))
    room = torch.full((*(2 * n for n in shape),), 0xA5, dtype=torch.uint8).view(dtype)
    return room[tuple(slice(1, None, 2) for _ in shape)]


@every_format
@pytest.mark.parametrize("layout", ["plain", "transposed", "every second"])
@pytest.mark.parametrize("kind", ["tuple", "QuantizedKV", "the smallest that fits"])
@every_value_dtype
def test_out_buffers_are_filled(name: str, layout: str, kind: str, dtype: torch.dtype) -> None:
    x = sample(6, 3, 32, dtype=dtype)
    data, block_scales = make_buffers((6, 3, 32), name, layout)
    out: Any = {
        "tuple": (data, block_scales),
        "QuantizedKV": kv.QuantizedKV(data, block_scales, torch.tensor([9.0]), name),
        "the smallest that fits": data if name != NVFP4 else (data, block_scales),
    }[kind]
    result = kv.quantize_kv(x, 0.02, name, out=out)
    assert _same_place(result.data, data)
    assert (result.block_scales is None) == (block_scales is None)
    if result.block_scales is not None and block_scales is not None:
        assert _same_place(result.block_scales, block_scales)
    assert_oracle(result, to_numpy(x), 0.02, name)
    expected = kv.quantize_kv(x, 0.02, name)
    assert_same_result(result, expected)
    # The buffers themselves, and not only what is handed back.
    assert np.array_equal(bits(data), bits(expected.data))


def _same_place(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.data_ptr(), a.stride(), a.shape) == (b.data_ptr(), b.stride(), b.shape)


@every_format
def test_what_lies_beside_a_strided_buffer_stays(name: str) -> None:
    buffers = make_buffers((6, 3, 32), name, "every second")
    kv.quantize_kv(sample(6, 3, 32), 0.02, name, out=buffers)
    for view in buffers:
        if view is not None:
            room = torch.empty(0, dtype=torch.uint8).set_(view.untyped_storage())
            room = room.view([2 * n for n in view.shape])
            room[tuple(slice(1, None, 2) for _ in view.shape)] = 0xA5
            assert (room == 0xA5).all()


@every_format
def test_an_earlier_result_is_written_over(name: str) -> None:
    first = kv.quantize_kv(sample(6, 3, 32, seed=1), 0.5, name)
    x = sample(6, 3, 32, seed=2)
    second = kv.quantize_kv(x, 0.02, name, out=first)
    assert second.data.data_ptr() == first.data.data_ptr()
    assert second.scale.tolist() == [float(np.float32(0.02))]
    assert first.scale.tolist() == [0.5]
    assert_oracle(second, to_numpy(x), 0.02, name)


@every_format
def test_empty_out_buffers(name: str) -> None:
    buffers = make_buffers((0, 3, 32), name, "plain")
    result = kv.quantize_kv(sample(0, 3, 32), 0.02, name, out=buffers)
    assert _same_place(result.data, buffers[0])


@every_fp8
def test_out_with_one_scale_per_head(form: Minifloat) -> None:
    scales = np.array([0.05, 3.0, 1e-3], np.float32)
    x = sample(6, 3, 32)
    data, _ = make_buffers((6, 3, 32), form.name, "every second")
    kv.quantize_kv(x, torch.from_numpy(scales), form.name, out=data)
    expected = oracles.fp8_codes(to_numpy(x), scales[:, np.newaxis], form)
    assert_same_codes(bits(data), expected, form)


# What is given stays as it is; nothing around the call matters.


@every_format
@every_value_dtype
@pytest.mark.parametrize("number", [True, False], ids=["number", "tensor"])
@pytest.mark.parametrize("buffers", [True, False], ids=["out", "new"])
def test_the_input_is_never_changed(
    name: str, dtype: torch.dtype, number: bool, buffers: bool
) -> None:
    x = sample(6, 3, 32, dtype=dtype)
    x[0, 0, :4] = torch.tensor([NAN, INF, -INF, -0.0], dtype=dtype)
    scale = torch.tensor([0.02])
    before = [(bits(t), t._version, t.data_ptr(), t.stride()) for t in (x, scale)]
    out = make_buffers((6, 3, 32), name, "plain") if buffers else None
    result = kv.quantize_kv(x, 0.02 if number else scale, name, out=out)
    kv.dequantize_kv(result, dtype=dtype).fill_(1)
    after = [(bits(t), t._version, t.data_ptr(), t.stride()) for t in (x, scale)]
    for (old_bits, *old), (new_bits, *new) in zip(before, after, strict=True):
        assert np.array_equal(old_bits, new_bits)
        assert old == new


@every_format
def test_requires_grad_changes_nothing(name: str) -> None:
    x = sample(6, 3, 32, dtype=torch.float32)
    expected = kv.quantize_kv(x, 0.02, name)
    leaf = x.clone().requires_grad_()
    scale = torch.nn.Parameter(torch.tensor([0.02]))
    for tensor in (leaf, leaf * 1.0):
        for out in (None, make_buffers((6, 3, 32), name, "plain")):
            result = kv.quantize_kv(tensor, scale, name, out=out)
            assert_same_result(result, expected)
            assert not result.data.requires_grad
            assert not result.scale.requires_grad
            assert not kv.dequantize_kv(result).requires_grad
    assert leaf.grad is None


@every_format
def test_inference_mode_changes_nothing(name: str) -> None:
    x = sample(6, 3, 32)
    expected = kv.quantize_kv(x, 0.02, name)
    values = kv.dequantize_kv(expected)
    with torch.inference_mode():
        result = kv.quantize_kv(x, 0.02, name)
        assert np.array_equal(bits(kv.dequantize_kv(result)), bits(values))
    assert_same_result(result, expected)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "default dtype bfloat16": lambda: default_dtype(torch.bfloat16),
    "default dtype float16": lambda: default_dtype(torch.float16),
    "default dtype float64": lambda: default_dtype(torch.float64),
    "default device meta": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@every_format
@pytest.mark.parametrize("surroundings", SURROUNDINGS)
@pytest.mark.parametrize("number", [True, False], ids=["number", "tensor"])
def test_surroundings_change_nothing(name: str, surroundings: str, number: bool) -> None:
    x = sample(6, 3, 32)
    scale: float | torch.Tensor = 0.02 if number else torch.tensor([0.02])
    expected = kv.quantize_kv(x, scale, name)
    values = kv.dequantize_kv(expected, dtype=torch.float32)
    with SURROUNDINGS[surroundings]():
        result = kv.quantize_kv(x, scale, name)
        again = kv.dequantize_kv(result, dtype=torch.float32)
    assert result.data.device.type == result.scale.device.type == "cpu"
    assert_same_result(result, expected)
    assert np.array_equal(bits(again), bits(values))


@every_format
@every_value_dtype
@pytest.mark.parametrize("shape", [(5, 3, 32), (16,), (0, 2, 16)])
def test_meta_tensors_give_shapes(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = torch.empty(shape, dtype=dtype, device="meta")
    concrete = kv.quantize_kv(torch.zeros(shape, dtype=dtype), 0.02, name)
    scales: list[float | torch.Tensor] = [0.02, torch.empty(1, device="meta")]
    for scale in scales:
        result = kv.quantize_kv(x, scale, name)
        for ours, real in (
            (result.data, concrete.data),
            (result.block_scales, concrete.block_scales),
            (result.scale, concrete.scale),
        ):
            assert (ours is None) == (real is None)
            if ours is not None and real is not None:
                assert ours.is_meta
                assert (ours.shape, ours.dtype) == (real.shape, real.dtype)
        values = kv.dequantize_kv(result, dtype=dtype)
        assert values.is_meta
        assert (tuple(values.shape), values.dtype) == (shape, dtype)


# Properties.

finite_float32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
any_float32 = st.floats(width=32)
positive_scales = st.floats(2.0**-149, LARGEST_FLOAT32, width=32, exclude_min=False)
moderate_scales = st.floats(2.0**-60, 2.0**60, width=32)
forms = st.sampled_from(FP8)


@st.composite
def strided_tensors(draw: st.DrawFn) -> torch.Tensor:
    """Tensors whose last dimension is a multiple of 16, of any order in memory, with gaps."""
    lead = draw(st.lists(st.integers(0, 4), max_size=3))
    shape = [*lead, 16 * draw(st.integers(0, 3))]
    steps = [draw(st.integers(1, 3)) for _ in shape]
    starts = [draw(st.integers(0, 2)) for _ in shape]
    order = draw(st.permutations(range(len(shape))))
    room_shape = [start + n * step for n, step, start in zip(shape, steps, starts, strict=True)]
    dtype = draw(st.sampled_from(VALUE_DTYPES))
    seed = draw(st.integers(0, 2**16))
    room = sample(*(room_shape[i] for i in order), dtype=dtype, seed=seed)
    view = room.permute(*(order.index(i) for i in range(len(shape))))
    for dim, (n, step, start) in enumerate(zip(shape, steps, starts, strict=True)):
        index = [slice(None)] * view.dim()
        index[dim] = slice(start, start + n * step, step)
        view = view[tuple(index)]
    assert list(view.shape) == shape
    return view


@given(strided_tensors(), st.sampled_from(FORMAT_NAMES), moderate_scales)
@hypothesis_settings
def test_shapes_and_strides(x: torch.Tensor, name: str, scale: float) -> None:
    result = kv.quantize_kv(x, scale, name)
    assert_oracle(result, to_numpy(x), scale, name)
    assert kv.dequantize_kv(result).shape == x.shape


@given(st.lists(any_float32, min_size=1, max_size=40), positive_scales, forms)
@hypothesis_settings
def test_any_floats_with_any_scale(values: list[float], scale: float, form: Minifloat) -> None:
    x = np.array(values, np.float32)
    result = kv.quantize_kv(to_torch(x, torch.float32), scale, form.name)
    assert_oracle(result, x, scale, form.name)


@given(st.lists(any_float32, min_size=16, max_size=16), positive_scales)
@hypothesis_settings
def test_any_block_with_any_global_scale(values: list[float], g: float) -> None:
    x = np.array(values, np.float32)
    assert_nvfp4(kv.quantize_kv(to_torch(x, torch.float32), g, NVFP4), x, g)


@given(st.lists(finite_float32, min_size=1, max_size=40), positive_scales, forms)
@hypothesis_settings
def test_fp8_error_is_at_most_half_a_step(
    values: list[float], scale: float, form: Minifloat
) -> None:
    x = np.array(values, np.float32)
    with np.errstate(all="ignore"):
        quotient = (x / np.float32(scale)).astype(np.float64)
    result = kv.quantize_kv(to_torch(x, torch.float32), scale, form.name)
    code_values = oracles.decoded(bits(result.data), form).astype(np.float64)
    inside = np.clip(quotient, -form.largest, form.largest)
    half_step = np.maximum(np.abs(inside) * 2.0 ** -(form.mantissa_bits + 1), form.smallest / 2)
    assert (np.abs(code_values - inside) <= half_step).all()


@given(st.integers(0, 2**16), st.floats(-20, 20), st.floats(-4, 4))
@hypothesis_settings
def test_nvfp4_error_is_at_most_half_the_widest_gap(
    seed: int, log_size: float, log_room: float
) -> None:
    """4 and 6 are 2 steps apart, so that no value is off by more than one step, sf·g.

    The global scale leaves block scales normal and below 448, else a block may saturate.
    """
    x = np.random.default_rng(seed).standard_normal((4, 16)).astype(np.float32)
    x *= np.float32(2.0**log_size)
    largest = np.abs(x).max(axis=-1)
    g = np.float32(largest.max() / E2M1.largest * 2.0**log_room)
    result = kv.quantize_kv(to_torch(x, torch.float32), float(g), NVFP4)
    values = to_numpy(kv.dequantize_kv(result, dtype=torch.float32)).astype(np.float64)
    assert result.block_scales is not None
    sf = oracles.decoded(bits(result.block_scales), E4M3).astype(np.float64)
    rounding = 1 + 2.0**-20  # of the reciprocal and of the products, in float32
    step = sf * np.float64(g) * rounding
    normal = (sf >= SMALLEST_NORMAL_E4M3)[:, 0]
    assert normal.any()
    assert (np.abs(values - x) <= step)[normal].all()


@given(st.lists(finite_float32, min_size=2, max_size=60), positive_scales, forms)
@hypothesis_settings
def test_fp8_codes_are_monotonic(values: list[float], scale: float, form: Minifloat) -> None:
    x = np.sort(np.array(values, np.float32))
    result = kv.quantize_kv(to_torch(x, torch.float32), scale, form.name)
    assert (np.diff(oracles.decoded(bits(result.data), form)) >= 0).all()


@given(st.lists(finite_float32, min_size=16, max_size=16), positive_scales)
@hypothesis_settings
def test_nvfp4_codes_are_monotonic_in_a_block(values: list[float], g: float) -> None:
    x = np.sort(np.array(values, np.float32))
    result = kv.quantize_kv(to_torch(x, torch.float32), g, NVFP4)
    assert (np.diff(oracles.decoded(oracles.unpacked(bits(result.data)), E2M1)) >= 0).all()


@given(st.lists(finite_float32, min_size=1, max_size=40), positive_scales, forms)
@hypothesis_settings
def test_fp8_is_symmetric(values: list[float], scale: float, form: Minifloat) -> None:
    x = to_torch(np.array(values, np.float32), torch.float32)
    plus, minus = (kv.quantize_kv(t, scale, form.name).data for t in (x, -x))
    assert (plus.float() == -minus.float()).all()


@given(st.lists(any_float32, min_size=16, max_size=16), positive_scales)
@hypothesis_settings
def test_nvfp4_is_symmetric(values: list[float], g: float) -> None:
    x = to_torch(np.array(values, np.float32), torch.float32)
    plus, minus = (kv.quantize_kv(t, g, NVFP4) for t in (x, -x))
    assert plus.block_scales is not None
    assert minus.block_scales is not None
    assert np.array_equal(bits(plus.block_scales), bits(minus.block_scales))
    assert np.array_equal(bits(plus.data) ^ 0x88, bits(minus.data))


@every_fp8
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@given(scale=moderate_scales)
@hypothesis_settings
def test_every_fp8_code_survives_a_round_trip(
    form: Minifloat, dtype: torch.dtype, scale: float
) -> None:
    """Rounding to bfloat16 moves a value by 2^-9 of it, half a step of these codes is 2^-5."""
    codes = form.finite_codes
    first = kv.QuantizedKV(
        from_bits(codes, TORCH_FP8[form.name]), None, torch.tensor([scale]), form.name
    )
    again = kv.quantize_kv(kv.dequantize_kv(first, dtype=dtype), scale, form.name)
    assert np.array_equal(bits(again.data), codes)


@given(st.integers(0, 2**16), st.integers(-40, 40), st.sampled_from(FORMAT_NAMES))
@hypothesis_settings
def test_a_power_of_two_in_values_and_scale_cancels(seed: int, exponent: int, name: str) -> None:
    x = sample(2, 32, dtype=torch.float32, seed=seed)
    power = 2.0**exponent
    plain, moved = (kv.quantize_kv(x * f, 0.05 * f, name) for f in (1.0, power))
    assert np.array_equal(bits(plain.data), bits(moved.data))
