"""What the codes and values must be, worked out without this project's code and without torch.

Three independent ways: ml_dtypes (for the finite values within a format's range; the rest is
spelled out here, from ``docs/numerics.md``), the nearest entry of a table of all codes, and the
CUDA toolkit's own host conversions, compiled with the host's C++ compiler.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

Array: TypeAlias = np.ndarray[Any, Any]

FLOAT32_MAX = np.float32(np.finfo(np.float32).max)
BLOCK_SIZE = 16
E2M1_SIGN = 0x8


@dataclass(frozen=True)
class Minifloat:
    """A small float as its specification gives it: ``(-1)^S · 2^(E - bias) · 1.M``.

    :param largest: the largest finite magnitude.
    :param nan_code: the code of NaN, ``None`` where there is none.
    :param negative_zero: the code of -0, and of what rounds to it.
    """

    name: str
    dtype: Any
    exponent_bits: int
    mantissa_bits: int
    bias: int
    largest: float
    nan_code: int | None
    negative_zero: int

    @property
    def sign(self) -> int:
        return 1 << (self.exponent_bits + self.mantissa_bits)

    @property
    def smallest(self) -> float:
        """The smallest positive value, a subnormal one; also the step from one to the next."""
        return 2.0 ** (1 - self.bias - self.mantissa_bits)

    @functools.cached_property
    def magnitudes(self) -> Array:
        """The finite magnitudes in the order of their codes, in float64: exact."""
        codes = np.arange(self.sign)
        exponent, mantissa = codes >> self.mantissa_bits, codes & ((1 << self.mantissa_bits) - 1)
        leading = (exponent > 0).astype(np.float64)
        fraction = leading + mantissa / 2.0**self.mantissa_bits
        values: Array = fraction * 2.0 ** (np.maximum(exponent, 1) - self.bias)
        return values[values <= self.largest]

    @property
    def finite_codes(self) -> Array:
        """Every code of a finite value, -0 left out where the format has none."""
        positive = np.arange(len(self.magnitudes), dtype=np.uint8)
        codes: Array = np.concatenate([positive, positive | np.uint8(self.sign)])
        return codes if self.negative_zero else codes[codes != self.sign]


# OCP 8-bit floating point specification 1.0, AMD's FNUZ variant of it, OCP Microscaling 1.0.
E4M3 = Minifloat("fp8_e4m3", ml_dtypes.float8_e4m3fn, 4, 3, 7, 448.0, 0x7F, 0x80)
E5M2 = Minifloat("fp8_e5m2", ml_dtypes.float8_e5m2, 5, 2, 15, 57344.0, 0x7F, 0x80)
E4M3FNUZ = Minifloat("fp8_e4m3fnuz", ml_dtypes.float8_e4m3fnuz, 4, 3, 8, 240.0, 0x80, 0x00)
E2M1 = Minifloat("e2m1", ml_dtypes.float4_e2m1fn, 2, 1, 1, 6.0, None, E2M1_SIGN)
FP8 = (E4M3, E5M2, E4M3FNUZ)


def rounded(x: Array, form: Minifloat) -> Array:
    """Codes of float32 ``x``: saturated and rounded to nearest, ties to even; e2m1 has NaN as 0."""
    is_nan = np.isnan(x)
    magnitude = np.minimum(np.abs(np.where(is_nan, np.float32(0), x)), np.float32(form.largest))
    codes: Array = magnitude.astype(form.dtype).view(np.uint8)
    return _signed(codes, x, form, is_nan)


def nearest(x: Array, form: Minifloat) -> Array:
    """The same by looking for the nearest entry among all codes, in float64."""
    is_nan = np.isnan(x)
    magnitude = np.abs(np.where(is_nan, np.float32(0), x)).astype(np.float64)
    table = form.magnitudes
    above = np.searchsorted(table, magnitude).clip(1, len(table) - 1)
    below = above - 1
    up, down = table[above] - magnitude, magnitude - table[below]
    take_above = (up < down) | ((up == down) & (above % 2 == 0))
    codes = np.where(take_above, above, below).astype(np.uint8)
    return _signed(codes, x, form, is_nan)


def _signed(magnitude_codes: Array, x: Array, form: Minifloat, is_nan: Array) -> Array:
    negative = np.where(magnitude_codes == 0, form.negative_zero, magnitude_codes | form.sign)
    codes = np.where(np.signbit(x), negative, magnitude_codes).astype(np.uint8)
    if form.nan_code is not None:
        codes[is_nan] = form.nan_code
    return codes


def decoded(codes: Array, form: Minifloat) -> Array:
    """The float32 values of codes."""
    values: Array = codes.astype(np.uint8).view(form.dtype).astype(np.float32)
    return values


def is_nan_code(codes: Array, form: Minifloat) -> Array:
    nan: Array = np.isnan(decoded(codes, form))
    if form is E4M3FNUZ:
        nan = codes == form.nan_code
    return nan


def fp8_codes(x: Array, scale: Array | np.float32, form: Minifloat) -> Array:
    """``R(clamp(fp32(x) / s))``."""
    assert x.dtype == np.float32 == np.asarray(scale).dtype
    with np.errstate(all="ignore"):
        return rounded(x / scale, form)


def fp8_values(codes: Array, scale: Array | np.float32, form: Minifloat, dtype: Any) -> Array:
    """``R_dtype(fp32(code) · s)``."""
    with np.errstate(all="ignore"):
        values: Array = (decoded(codes, form) * scale).astype(np.float32).astype(dtype)
    return values


def nvfp4_codes(x: Array, g: np.float32) -> tuple[Array, Array, Array]:
    """e2m1 codes one by one, packed codes and e4m3 block-scale codes of float32 ``x``."""
    assert x.dtype == np.float32 == g.dtype
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // BLOCK_SIZE, BLOCK_SIZE)
    magnitude = np.abs(blocks)
    m = np.where(np.isnan(magnitude), np.float32(0), magnitude).max(axis=-1, initial=0)
    with np.errstate(all="ignore"):
        ideal = np.minimum(m / (np.float32(6) * g), np.float32(E4M3.largest))
        ideal = np.where(np.isinf(m), np.float32(E4M3.largest), ideal)
        block_codes = rounded(ideal.astype(np.float32), E4M3)
        sf = decoded(block_codes, E4M3)
        r = np.where(sf == 0, np.float32(0), np.minimum(np.float32(1) / (sf * g), FLOAT32_MAX))
        scaled = blocks * r[..., np.newaxis].astype(np.float32)
    # NaN, also that of inf · 0, is 0 with the sign of x.
    scaled = np.where(np.isnan(scaled), np.float32(0), scaled)
    codes = rounded(np.copysign(scaled, blocks), E2M1).reshape(x.shape)
    return codes, packed(codes), block_codes


def packed(codes: Array) -> Array:
    """Two codes to a byte, the even element in the low nibble."""
    both: Array = codes[..., 0::2] + codes[..., 1::2] * np.uint8(16)
    return both


def unpacked(data: Array) -> Array:
    codes = np.empty((*data.shape[:-1], data.shape[-1] * 2), np.uint8)
    codes[..., 0::2], codes[..., 1::2] = data % 16, data // 16
    return codes


def nvfp4_values(data: Array, block_codes: Array, g: np.float32, dtype: Any) -> Array:
    """``R_dtype((lut[code] · sf) · g)``."""
    sf = np.repeat(decoded(block_codes, E4M3), BLOCK_SIZE, axis=-1)
    with np.errstate(all="ignore"):
        values: Array = (decoded(unpacked(data), E2M1) * sf * g).astype(np.float32).astype(dtype)
    return values


# The vendor's own conversions. cuda_fp8.h and cuda_fp4.h run on the host; the headers that they
# include come in three wheels.
_VENDOR_HEADERS = {
    "nvidia-cuda-runtime": "cuda_fp8.h",
    "nvidia-cuda-crt": "crt/host_defines.h",
    "nvidia-cuda-cccl": "nv/target",
}
_VENDOR_SOURCE = """
#include <cuda_fp4.h>
#include <cuda_fp8.h>

extern "C" {
void e4m3(const float* x, unsigned char* codes, long n) {
  for (long i = 0; i < n; ++i) codes[i] = __nv_cvt_float_to_fp8(x[i], __NV_SATFINITE, __NV_E4M3);
}
void e5m2(const float* x, unsigned char* codes, long n) {
  for (long i = 0; i < n; ++i) codes[i] = __nv_cvt_float_to_fp8(x[i], __NV_SATFINITE, __NV_E5M2);
}
void e2m1(const float* x, unsigned char* codes, long n) {
  for (long i = 0; i < n; ++i) codes[i] = __nv_cvt_float_to_fp4(x[i], __NV_E2M1, cudaRoundNearest);
}
}
"""
_VENDOR_FUNCTIONS = {E4M3.name: "e4m3", E5M2.name: "e5m2", E2M1.name: "e2m1"}


def _include_folder(distribution: str, header: str) -> Path:
    for file in importlib.metadata.files(distribution) or ():
        path = file.as_posix()
        if path.endswith(f"/include/{header}") and "/cccl/" not in path:
            return Path(str(file.locate())).resolve().parents[header.count("/")]
    raise FileNotFoundError(f"{distribution} has no include/{header}; install the test extra")


class Vendor:
    """The CUDA toolkit's host-side conversions to E4M3, E5M2 (saturating) and E2M1.

    :param folder: where to compile.
    """

    def __init__(self, folder: Path) -> None:
        source, library = folder / "vendor.cpp", folder / "vendor.so"
        source.write_text(_VENDOR_SOURCE)
        compiler = os.environ.get("CXX") or shutil.which("g++") or "c++"
        includes = [f"-I{_include_folder(*wheel)}" for wheel in _VENDOR_HEADERS.items()]
        command = [compiler, "-O2", "-shared", "-fPIC", *includes, str(source), "-o", str(library)]
        subprocess.run(command, check=True)
        self._library = ctypes.CDLL(str(library))

    def rounded(self, x: Array, form: Minifloat) -> Array:
        x = np.ascontiguousarray(x, np.float32)
        codes = np.empty(x.shape, np.uint8)
        convert = getattr(self._library, _VENDOR_FUNCTIONS[form.name])
        convert.restype = None
        convert(ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(codes.ctypes.data),
                ctypes.c_long(x.size))  # fmt: skip
        return codes
