"""What vLLM's write is handed: every code is a number of the dtype that K and V have."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from kvcache_plugin.hosts.vllm_writes import _numbers

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP8 = {
    torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn,
    torch.float8_e5m2: ml_dtypes.float8_e5m2,
    torch.float8_e4m3fnuz: ml_dtypes.float8_e4m3fnuz,
}
CODES = np.arange(256, dtype=np.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fp8", FP8, ids=str)
def test_each_code_is_exactly_a_number(fp8: torch.dtype, dtype: torch.dtype) -> None:
    numbers = _numbers(torch.from_numpy(CODES).view(fp8), dtype)
    assert numbers.dtype == dtype
    values = CODES.view(FP8[fp8]).astype(np.float64)
    is_minus_zero = (values == 0) & np.signbit(values)
    expected = np.where(is_minus_zero, -(2.0**-24), values)
    np.testing.assert_array_equal(numbers.double().numpy(), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fp8", FP8, ids=str)
def test_to_round_a_number_gives_its_code(fp8: torch.dtype, dtype: torch.dtype) -> None:
    """Also of what stands for -0, which is too small for any other code."""
    numbers = _numbers(torch.from_numpy(CODES).view(fp8), dtype)
    with np.errstate(invalid="ignore"):  # NaN
        again = numbers.float().numpy().astype(FP8[fp8])
    is_nan = np.isnan(CODES.view(FP8[fp8]).astype(np.float32))
    assert is_nan.sum() == {torch.float8_e4m3fn: 2, torch.float8_e5m2: 6}.get(fp8, 1)
    np.testing.assert_array_equal(again.view(np.uint8)[~is_nan], CODES[~is_nan])
