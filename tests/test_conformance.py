"""Our implementations and the example package conform; each kind of wrong one is caught.

Under Triton's interpreter the kernels are the same for every GPU: one suite goes through all of it,
the others through the formats that they do not share.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import pytest
import torch

import kvcache_plugin as kv
from kvcache_plugin.conformance import comparing
from kvcache_plugin.conformance.cases import CHECKS
from kvcache_plugin.hardware import cpu_reference, cuda_sm90, rocm_fnuz, triton_gpu
from kvcache_plugin.testing import Candidate, ConformanceSuite, cases

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "tests" / "third_party" / "example_npu"
NAMES = ("fp8_e4m3", "fp8_e5m2", "fp8_e4m3fnuz", "nvfp4")

sys.path.insert(0, str(EXAMPLE))
from kvcache_plugin_example import cpu_nvfp4, npu  # noqa: E402

sys.path.remove(str(EXAMPLE))


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """These tensors are small: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# What conforms


class TestCpuReference(ConformanceSuite):
    implementation = cpu_reference


class TestCpuReferenceOnGpu(ConformanceSuite):
    """As the last resort on a GPU, where it may not ask the host."""

    implementation = cpu_reference
    device = kv.Device.parse("sm_90")


class TestExampleNvfp4(ConformanceSuite):
    implementation = cpu_nvfp4


class TestExampleNpu(ConformanceSuite):
    implementation = npu
    device = kv.Device("npu", "npu_v2")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in Triton's interpreter
class Interpreted(ConformanceSuite):
    pass


class TestSm90(Interpreted):
    implementation = cuda_sm90
    device = kv.Device.parse("sm_90")


class TestSm80(Interpreted):
    implementation = cuda_sm90
    device = kv.Device.parse("sm_80")
    formats = ("fp8_e4m3",)


class TestGfx942(Interpreted):
    implementation = rocm_fnuz
    device = kv.Device.parse("gfx942")
    formats = ("fp8_e4m3fnuz", "fp8_e4m3")


class TestGfx950(Interpreted):
    implementation = triton_gpu
    device = kv.Device.parse("gfx950")
    formats = ("fp8_e5m2",)


class TestGfx90a(Interpreted):
    implementation = triton_gpu
    device = kv.Device.parse("gfx90a")
    formats = ("nvfp4",)


# What does not


class Right:
    """What the reference computes, with every hook."""

    names: tuple[str, ...] = NAMES
    tolerance = kv.KVTolerance()

    @kv.hookimpl
    def supports_kv(self, kv_cache_dtype: str) -> bool | str:
        return kv_cache_dtype in self.names or f"serves {self.names}"

    @kv.hookimpl
    def validate_kv_scales(self, scales: kv.KVScales, kv_cache_dtype: str) -> Any:
        return self.convert(scales, kv_cache_dtype)

    @kv.hookimpl
    @torch.no_grad()
    def quantize_kv(
        self, tensor: torch.Tensor, scale: torch.Tensor, kv_cache_dtype: str, out: Any
    ) -> Any:
        return self.quantize(tensor, scale, kv_cache_dtype, out)

    @kv.hookimpl
    def quantize_kv_pair(
        self, key: Any, value: Any, k_scale: Any, v_scale: Any, kv_cache_dtype: str, out: Any
    ) -> Any:
        k_out, v_out = out or (None, None)
        return (
            self.quantize(key, k_scale, kv_cache_dtype, k_out),
            self.quantize(value, v_scale, kv_cache_dtype, v_out),
        )

    @kv.hookimpl
    def dequantize_kv(self, quantized: kv.QuantizedKV, dtype: torch.dtype) -> Any:
        return self.dequantize(quantized, dtype)

    @kv.hookimpl
    def describe_kv(self) -> kv.KVDescription:
        return kv.KVDescription("As the reference", self.tolerance)

    # What the wrong ones do in another way

    def convert(self, scales: kv.KVScales, name: str) -> Any:
        return cpu_reference.validate_kv_scales(scales, name)

    def quantize(self, x: torch.Tensor, scale: torch.Tensor, name: str, out: Any) -> Any:
        return self.stored(x, scale, name, self.codes(x, scale, name), out)

    def codes(self, x: torch.Tensor, scale: torch.Tensor, name: str) -> kv.QuantizedKV:
        return cpu_reference.quantize_kv(x, scale, name, kv.Device("cpu"), None)

    def stored(
        self, x: torch.Tensor, scale: torch.Tensor, name: str, made: kv.QuantizedKV, out: Any
    ) -> Any:
        if out is not None:
            out.data.copy_(made.data)
            if made.block_scales is not None:
                out.block_scales.copy_(made.block_scales)
            return kv.QuantizedKV(out.data, out.block_scales, scale, name)
        return kv.QuantizedKV(made.data, made.block_scales, scale, name)

    def dequantize(self, quantized: kv.QuantizedKV, dtype: torch.dtype) -> Any:
        return cpu_reference.dequantize_kv(quantized, dtype, kv.Device("cpu"))


def test_right_is_right() -> None:
    assert findings(Right()) == {}


def fp8(x: torch.Tensor, scale: torch.Tensor, quotient: torch.Tensor, name: str) -> kv.QuantizedKV:
    """Codes of a quotient that may be another one than the right one."""
    dtype = {f"fp8_{kind}": getattr(torch, f"float8_{kind}") for kind in ("e5m2", "e4m3fnuz")}
    dtype["fp8_e4m3"] = torch.float8_e4m3fn
    largest = torch.finfo(dtype[name]).max
    data = quotient.float().clamp(-largest, largest).to(dtype[name])
    return kv.QuantizedKV(data.view(x.shape), None, scale, name)


def heads(scale: torch.Tensor) -> torch.Tensor:
    return scale if scale.numel() == 1 else scale.unsqueeze(-1)


class DoubleRounding(Right):
    def codes(self, x: torch.Tensor, scale: torch.Tensor, name: str) -> kv.QuantizedKV:
        return fp8(x, scale, (x / heads(scale)).to(x.dtype), name)


class ReciprocalInstead(Right):
    def codes(self, x: torch.Tensor, scale: torch.Tensor, name: str) -> kv.QuantizedKV:
        return fp8(x, scale, x.float() * (1 / heads(scale)), name)


class TiesUp(Right):
    def codes(self, x: torch.Tensor, scale: torch.Tensor, name: str) -> kv.QuantizedKV:
        return fp8(x, scale, x.float() / heads(scale) * (1 + 2.0**-20), name)


class TowardZero(Right):
    def codes(self, x: torch.Tensor, scale: torch.Tensor, name: str) -> kv.QuantizedKV:
        quotient = (x.float() / heads(scale)).contiguous()
        cut = (quotient.view(torch.int32) & ~0xFFFFF).view(torch.float32)
        return fp8(x, scale, torch.where(quotient.isnan(), quotient, cut), name)


class NoSaturation(Right):
    def codes(self, x: torch.Tensor, scale: torch.Tensor, name: str) -> kv.QuantizedKV:
        data = (x.float() / heads(scale)).to(torch.float8_e5m2)
        return kv.QuantizedKV(data, None, scale, name)


class ChangedCodes(Right):
    """Right but for codes that are replaced, byte by byte."""

    def codes(self, x: torch.Tensor, scale: torch.Tensor, name: str) -> kv.QuantizedKV:
        made = super().codes(x, scale, name)
        data = self.changed(x, made.data.view(torch.uint8)).view(made.data.dtype)
        return kv.QuantizedKV(data, made.block_scales, scale, name)

    def changed(self, x: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class NoNegativeZero(ChangedCodes):
    def changed(self, x: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
        return data.masked_fill(data == 0x80, 0)


class NanForNegativeZero(ChangedCodes):
    def changed(self, x: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
        return data.masked_fill((data == 0) & x.signbit(), 0x80)


class NanForInfinity(ChangedCodes):
    def changed(self, x: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
        return data.masked_fill(x.isinf(), 0x7F)


class LargestForNan(ChangedCodes):
    def changed(self, x: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
        return data.masked_fill(x.isnan(), 0x7E)


class FlushedSubnormals(ChangedCodes):
    def changed(self, x: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
        return torch.where((data & 0x7F) < 8, data & 0x80, data)


class NarrowsToBfloat16(Right):
    """Has a kernel for bfloat16 alone."""

    def codes(self, x: torch.Tensor, scale: torch.Tensor, name: str) -> kv.QuantizedKV:
        return super().codes(x.bfloat16(), scale, name)


class WholePrograms(ChangedCodes):
    """Launches so many programs of 2048 codes as are full, or one."""

    def changed(self, x: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
        data = data.clone()
        data.flatten()[max(1, data.numel() // 2048) * 2048 :] = 0
        return data


class RowsOfAPowerOfTwo(ChangedCodes):
    """Loads no more of a row than the largest power of two that fits in it."""

    def changed(self, x: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
        data = data.clone()
        data[..., power_of_two(data.shape[-1]) :] = 0
        return data


def power_of_two(length: int) -> int:
    return 1 << (length.bit_length() - 1) if length else 0


class SwappedNibbles(ChangedCodes):
    def changed(self, x: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
        return data << 4 | data >> 4


class BlockScaleIsNotRounded(Right):
    """Divides by the block scale as it was before it was stored."""

    def codes(self, x: torch.Tensor, scale: torch.Tensor, name: str) -> kv.QuantizedKV:
        made = super().codes(x, scale, name)
        blocks = x.float().reshape(*x.shape[:-1], -1, 16) if x.numel() else x.new_empty(0, 16)
        ideal = (blocks.abs().nan_to_num(0.0, torch.inf).amax(-1) / (6 * scale)).clamp(max=448)
        codes = comparing.e2m1_codes(blocks.float(), ideal, scale)
        data = comparing.packed(codes.reshape(x.shape))
        return kv.QuantizedKV(data, made.block_scales, scale, name)


class BlocksOfThirtyTwo(Right):
    """Block scales over twice as many values."""

    def codes(self, x: torch.Tensor, scale: torch.Tensor, name: str) -> kv.QuantizedKV:
        made = super().codes(x, scale, name)
        assert made.block_scales is not None
        if made.block_scales.shape[-1] % 2 or not x.numel():
            return made
        pairs = made.block_scales.float().unflatten(-1, (-1, 2))
        largest = pairs.amax(-1, keepdim=True).expand(pairs.shape).flatten(-2)
        codes = comparing.e2m1_codes(x.float().unflatten(-1, (-1, 16)), largest, scale)
        return kv.QuantizedKV(
            comparing.packed(codes.flatten(-2)), largest.to(torch.float8_e4m3fn), scale, name
        )


class FirstHeadsScale(Right):
    def codes(self, x: torch.Tensor, scale: torch.Tensor, name: str) -> kv.QuantizedKV:
        return super().codes(x, scale[:1], name)


class ScaleAlongHeadDim(Right):
    def codes(self, x: torch.Tensor, scale: torch.Tensor, name: str) -> kv.QuantizedKV:
        if scale.numel() != x.shape[-1]:
            return super().codes(x, scale, name)
        return fp8(x, scale, x.float() / scale, name)


class IgnoresStridesOfTheScale(Right):
    def codes(self, x: torch.Tensor, scale: torch.Tensor, name: str) -> kv.QuantizedKV:
        short = scale.untyped_storage().nbytes() < 4 * scale.numel()
        return super().codes(x, scale if short else scale.as_strided(scale.shape, (1,)), name)


class IgnoresStrides(Right):
    def codes(self, x: torch.Tensor, scale: torch.Tensor, name: str) -> kv.QuantizedKV:
        return super().codes(self.packed(x), scale, name)

    @staticmethod
    def packed(x: torch.Tensor) -> torch.Tensor:
        """The elements that follow the first one in memory, as many as there are."""
        strides = torch.empty(x.shape, device="meta").stride()
        room = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
        return x if room < x.numel() else x.as_strided(x.shape, strides)


class OffsetsOf31Bits(Right):
    def codes(self, x: torch.Tensor, scale: torch.Tensor, name: str) -> kv.QuantizedKV:
        strides = [stride & 0x7FFFFFFF for stride in x.stride()]
        return super().codes(x.as_strided(x.shape, strides), scale, name)


class RaisesWithoutTokens(Right):
    def codes(self, x: torch.Tensor, scale: torch.Tensor, name: str) -> kv.QuantizedKV:
        x.abs().max()
        return super().codes(x, scale, name)


class ChangesTheTensor(Right):
    def quantize(self, x: torch.Tensor, scale: torch.Tensor, name: str, out: Any) -> Any:
        made = super().quantize(x, scale, name, out)
        x.div_(scale) if scale.numel() == 1 and x.is_contiguous() else None
        return made


class ChangesTheScale(Right):
    def quantize(self, x: torch.Tensor, scale: torch.Tensor, name: str, out: Any) -> Any:
        made = super().quantize(x, scale, name, out)
        scale.reciprocal_()
        return made


class IgnoresOut(Right):
    def stored(self, x: Any, scale: Any, name: str, made: kv.QuantizedKV, out: Any) -> Any:
        return super().stored(x, scale, name, made, None)


class LeavesOutAsItIs(Right):
    def stored(self, x: Any, scale: Any, name: str, made: kv.QuantizedKV, out: Any) -> Any:
        return kv.QuantizedKV(out.data, out.block_scales, scale, name) if out else made


class WritesBeyondTheBuffer(Right):
    def stored(self, x: Any, scale: Any, name: str, made: kv.QuantizedKV, out: Any) -> Any:
        if out is not None:
            room = torch.empty(0, dtype=torch.uint8).set_(out.data.untyped_storage())
            room[-64:] = 0
        return super().stored(x, scale, name, made, out)


class WritesRowsAsIfPacked(Right):
    """Forgets the strides of the buffers, but not where they begin."""

    def stored(self, x: Any, scale: Any, name: str, made: kv.QuantizedKV, out: Any) -> Any:
        if out is not None and out.data.numel():
            flat = torch.as_strided(out.data, made.data.shape, made.data.stride())
            flat.copy_(made.data)
            return kv.QuantizedKV(out.data, out.block_scales, scale, name)
        return made


class OneWorkspace(Right):
    """Gives the same memory for each result of a shape."""

    def __init__(self) -> None:
        self.workspaces: dict[Any, torch.Tensor] = {}

    def stored(self, x: Any, scale: Any, name: str, made: kv.QuantizedKV, out: Any) -> Any:
        if out is not None:
            return super().stored(x, scale, name, made, out)
        key = (tuple(made.data.shape), name)
        data = self.workspaces.setdefault(key, torch.empty_like(made.data)).copy_(made.data)
        return kv.QuantizedKV(data, made.block_scales, scale, name)


class AnotherScale(Right):
    def quantize(self, x: torch.Tensor, scale: torch.Tensor, name: str, out: Any) -> Any:
        made = super().quantize(x, scale, name, out)
        return kv.QuantizedKV(made.data, made.block_scales, scale.reciprocal(), name)


class ReadsTheScale(Right):
    def codes(self, x: torch.Tensor, scale: torch.Tensor, name: str) -> kv.QuantizedKV:
        if scale.numel() == 1:
            assert scale.item() > 0
        return super().codes(x, scale, name)


class TakesTheScaleToTheHost(Right):
    """By a way that does nothing to a tensor of the CPU."""

    def __init__(self, way: Callable[[torch.Tensor], object]) -> None:
        self._way = way

    def codes(self, x: torch.Tensor, scale: torch.Tensor, name: str) -> kv.QuantizedKV:
        self._way(scale)
        return super().codes(x, scale, name)


class ReadsWhetherThereIsNan(Right):
    def codes(self, x: torch.Tensor, scale: torch.Tensor, name: str) -> kv.QuantizedKV:
        if x.isnan().any():
            return super().codes(x, scale, name)
        return super().codes(x, scale, name)


class CopiesFromTheHost(Right):
    def codes(self, x: torch.Tensor, scale: torch.Tensor, name: str) -> kv.QuantizedKV:
        return super().codes(x, scale * torch.tensor([1.0]), name)


class DefaultDtype(Right):
    def codes(self, x: torch.Tensor, scale: torch.Tensor, name: str) -> kv.QuantizedKV:
        values = x.to(torch.get_default_dtype())
        return fp8(x, scale, values / heads(scale).to(values.dtype), name)


class AlwaysPasses(Right):
    def quantize(self, x: torch.Tensor, scale: torch.Tensor, name: str, out: Any) -> Any:
        return None


class PairAlwaysPasses(Right):
    @kv.hookimpl
    def quantize_kv_pair(self) -> Any:
        return None


class SwapsThePair(Right):
    @kv.hookimpl
    def quantize_kv_pair(
        self, key: Any, value: Any, k_scale: Any, v_scale: Any, kv_cache_dtype: str, out: Any
    ) -> Any:
        if key.shape != value.shape or out is not None:
            return None
        return super().quantize_kv_pair(value, key, k_scale, v_scale, kv_cache_dtype, out)


class OneScaleForThePair(Right):
    @kv.hookimpl
    def quantize_kv_pair(
        self, key: Any, value: Any, k_scale: Any, v_scale: Any, kv_cache_dtype: str, out: Any
    ) -> Any:
        k, v = super().quantize_kv_pair(key, value, k_scale, k_scale, kv_cache_dtype, out)
        return k, kv.QuantizedKV(v.data, v.block_scales, v_scale, kv_cache_dtype)


class PairWithoutNan(Right):
    @kv.hookimpl
    def quantize_kv_pair(
        self, key: Any, value: Any, k_scale: Any, v_scale: Any, kv_cache_dtype: str, out: Any
    ) -> Any:
        key, value = (x.nan_to_num(0.0, 0.0, 0.0) for x in (key, value))
        return super().quantize_kv_pair(key, value, k_scale, v_scale, kv_cache_dtype, out)


class PairWithoutNegativeZeroOfV(Right):
    @kv.hookimpl
    def quantize_kv_pair(
        self, key: Any, value: Any, k_scale: Any, v_scale: Any, kv_cache_dtype: str, out: Any
    ) -> Any:
        return super().quantize_kv_pair(key, value + 0.0, k_scale, v_scale, kv_cache_dtype, out)


class OneWorkspaceForThePair(Right):
    """Has one for K and one for V, where there are no buffers."""

    def __init__(self) -> None:
        self.workspaces: dict[Any, torch.Tensor] = {}

    @kv.hookimpl
    def quantize_kv_pair(
        self, key: Any, value: Any, k_scale: Any, v_scale: Any, kv_cache_dtype: str, out: Any
    ) -> Any:
        both = super().quantize_kv_pair(key, value, k_scale, v_scale, kv_cache_dtype, out)
        return both if out else tuple(map(self.kept, "KV", both))

    def kept(self, side: str, made: kv.QuantizedKV) -> kv.QuantizedKV:
        key = (side, tuple(made.data.shape), made.kv_cache_dtype)
        data = self.workspaces.setdefault(key, torch.empty_like(made.data)).copy_(made.data)
        return replace(made, data=data)


class KeepsTheScale(Right):
    """Reads the value of a scale tensor once."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def value(self, scale: torch.Tensor) -> torch.Tensor:
        return self.kept.setdefault(id(scale), (scale, scale.clone()))[1]

    def codes(self, x: torch.Tensor, scale: torch.Tensor, name: str) -> kv.QuantizedKV:
        return super().codes(x, self.value(scale), name)

    def dequantize(self, quantized: kv.QuantizedKV, dtype: torch.dtype) -> Any:
        return super().dequantize(replace(quantized, scale=self.value(quantized.scale)), dtype)


class ReadsWhereTheScalesMemoryBegins(KeepsTheScale):
    def value(self, scale: torch.Tensor) -> torch.Tensor:
        return scale.as_strided(scale.shape, scale.stride(), 0)


class BlockScalesLieAsData(Right):
    """Takes block scales for packed where the data is."""

    @staticmethod
    def packed(data: torch.Tensor, block_scales: torch.Tensor) -> torch.Tensor:
        if not data.is_contiguous():
            return block_scales
        strides = torch.empty(block_scales.shape, device="meta").stride()
        return block_scales.as_strided(block_scales.shape, strides)

    def stored(self, x: Any, scale: Any, name: str, made: kv.QuantizedKV, out: Any) -> Any:
        if out is None or not made.data.numel():
            return made
        assert made.block_scales is not None
        out.data.copy_(made.data)
        self.packed(out.data, out.block_scales).copy_(made.block_scales)
        return kv.QuantizedKV(out.data, out.block_scales, scale, name)

    def dequantize(self, quantized: kv.QuantizedKV, dtype: torch.dtype) -> Any:
        assert quantized.block_scales is not None
        read = self.packed(quantized.data, quantized.block_scales)
        return super().dequantize(replace(quantized, block_scales=read), dtype)


class OneWorkspaceForValues(Right):
    def __init__(self) -> None:
        self.workspaces: dict[Any, torch.Tensor] = {}

    def dequantize(self, quantized: kv.QuantizedKV, dtype: torch.dtype) -> Any:
        values = super().dequantize(quantized, dtype)
        key = (tuple(values.shape), dtype)
        return self.workspaces.setdefault(key, torch.empty_like(values)).copy_(values)


class DoublesTwice(Right):
    def convert(self, scales: kv.KVScales, name: str) -> Any:
        return scales.for_fnuz().for_fnuz()


class DoublesTheDefault(Right):
    def convert(self, scales: kv.KVScales, name: str) -> Any:
        return kv.KVScales(scales.k * 2, scales.v * 2, scales.k_source, scales.v_source)


class DoublesNothing(Right):
    def convert(self, scales: kv.KVScales, name: str) -> Any:
        return scales


class DoublesEachTimeMore(Right):
    """Starts from what it gave before, as an engine that writes its result over the scale."""

    factor = 1.0

    def convert(self, scales: kv.KVScales, name: str) -> Any:
        self.factor *= 2
        return scales.converted(self.factor)


class NarrowsBeforeItMultiplies(Right):
    def dequantize(self, quantized: kv.QuantizedKV, dtype: torch.dtype) -> Any:
        return quantized.data.to(dtype) * heads(quantized.scale).to(dtype)


class OtherOrderOfProducts(Right):
    """(sf · g) · code is rounded in another place than (code · sf) · g."""

    def dequantize(self, quantized: kv.QuantizedKV, dtype: torch.dtype) -> Any:
        ones = kv.QuantizedKV(
            torch.full_like(quantized.data, 0x22), quantized.block_scales, quantized.scale, "nvfp4"
        )
        steps = super().dequantize(ones, torch.float32)
        unit = kv.QuantizedKV(
            quantized.data,
            torch.ones_like(quantized.block_scales.float()).to(torch.float8_e4m3fn),
            torch.ones(1),
            "nvfp4",
        )
        return (super().dequantize(unit, torch.float32) * steps).to(dtype)


class DequantizesNothing(Right):
    def dequantize(self, quantized: kv.QuantizedKV, dtype: torch.dtype) -> Any:
        return None


class DequantizesRowsOfAPowerOfTwo(Right):
    def dequantize(self, quantized: kv.QuantizedKV, dtype: torch.dtype) -> Any:
        values = super().dequantize(quantized, dtype)
        values[..., power_of_two(values.shape[-1]) :] = 0
        return values


class IgnoresStridesOfCodes(Right):
    def dequantize(self, quantized: kv.QuantizedKV, dtype: torch.dtype) -> Any:
        return super().dequantize(
            replace(quantized, data=IgnoresStrides.packed(quantized.data)), dtype
        )


class PadsRows(IgnoresStridesOfCodes):
    """Gives rows with gaps, and does not expect them."""

    def codes(self, x: torch.Tensor, scale: torch.Tensor, name: str) -> kv.QuantizedKV:
        made = super().codes(x, scale, name)
        room = torch.zeros(*made.data.shape[:-1], made.data.shape[-1] + 16, dtype=torch.uint8)
        data = room.view(made.data.dtype)[..., : made.data.shape[-1]].copy_(made.data)
        return replace(made, data=data)


class ReadsNibblesSwapped(Right):
    def dequantize(self, quantized: kv.QuantizedKV, dtype: torch.dtype) -> Any:
        data = quantized.data
        return super().dequantize(replace(quantized, data=data << 4 | data >> 4), dtype)


class FlushesSubnormalScales(Right):
    def dequantize(self, quantized: kv.QuantizedKV, dtype: torch.dtype) -> Any:
        scale = quantized.scale
        flushed = scale.masked_fill(scale < torch.finfo(torch.float32).tiny, 0.0)
        return super().dequantize(replace(quantized, scale=flushed), dtype)


class FirstHeadsScaleForAll(Right):
    def dequantize(self, quantized: kv.QuantizedKV, dtype: torch.dtype) -> Any:
        return super().dequantize(replace(quantized, scale=quantized.scale[:1]), dtype)


class DequantizesInDefaultDtype(Right):
    def dequantize(self, quantized: kv.QuantizedKV, dtype: torch.dtype) -> Any:
        values = quantized.data.to(torch.get_default_dtype())
        return (values * heads(quantized.scale).to(values.dtype)).to(dtype)


class ReadsTheScaleOfCodes(Right):
    def dequantize(self, quantized: kv.QuantizedKV, dtype: torch.dtype) -> Any:
        if quantized.scale.numel() == 1 and quantized.scale.item() == 1:
            return quantized.data.to(dtype)
        return super().dequantize(quantized, dtype)


class DequantizesInPlace(Right):
    def dequantize(self, quantized: kv.QuantizedKV, dtype: torch.dtype) -> Any:
        values = super().dequantize(quantized, dtype)
        quantized.data.view(torch.uint8).zero_()
        return values


class NoNanCode(Right):
    def dequantize(self, quantized: kv.QuantizedKV, dtype: torch.dtype) -> Any:
        return super().dequantize(quantized, dtype).nan_to_num(nan=480.0)


class BrokenDescription(Right):
    @kv.hookimpl
    def describe_kv(self) -> Any:
        raise OSError("the driver does not answer")


SM_90 = kv.Device.parse("sm_90")
E4M3, E5M2, FNUZ, NVFP4 = NAMES
#: A wrong implementation, a format that shows it, the checks that find it, what one of them says.
WRONG: tuple[tuple[type[Right], str, str, str], ...] = (
    (DoubleRounding, E4M3, "every_pattern random_values", r"codes: \d+ of \d+ differ"),
    (ReciprocalInstead, E4M3, "scaled_ties extreme_scales", r"got 0x\w+ \(.*\), expected 0x"),
    (
        TiesUp,
        E4M3,
        "ties subnormals",
        r"1\.0625, scale 1: got 0x39 \(1\.125\), expected 0x38 \(1\)",
    ),
    (TowardZero, E4M3, "ties random_values rare_values", r"expected 0x"),
    (NoSaturation, E5M2, "saturation infinity", r"65280, scale 1: got 0x7c \(inf\), expected 0x7b"),
    (NoNegativeZero, E4M3, "zeros", r"-0, scale 1: got 0x00 \(0\), expected 0x80 \(-0\)"),
    (NanForNegativeZero, FNUZ, "zeros", r"-0, scale 1: got 0x80 \(nan\), expected 0x00 \(0\)"),
    (NanForInfinity, E4M3, "infinity", r"inf, scale 1: got 0x7f \(nan\), expected 0x7e \(448\)"),
    (LargestForNan, E4M3, "nan", r"nan, scale 1: got 0x7e \(448\), expected 0x(7|f)f \(nan\)"),
    (
        FlushedSubnormals,
        E4M3,
        "subnormals",
        r"0\.001953125, scale 1: got 0x00 \(0\), expected 0x01",
    ),
    (NarrowsToBfloat16, E4M3, "random_patterns random_values", r"random bits: codes: "),
    (WholePrograms, E4M3, "counts", r"shape \(4097, 1\): codes: 1 of 4097 differ"),
    (RowsOfAPowerOfTwo, E4M3, "shapes", r"shape \(3, 2, 80\): codes: \d+ of 480 differ"),
    (SwappedNibbles, NVFP4, "worked_block plain", r"codes: \d+ of 16 differ"),
    (SwappedNibbles, NVFP4, "every_pattern", r"codes: all are right with the two nibbles of each"),
    (ReadsNibblesSwapped, NVFP4, "dequantize_plain", r"values: all are right with the two nibbles"),
    (BlockScaleIsNotRounded, NVFP4, "random_values subnormals", r"global scale .*, block scale "),
    (BlocksOfThirtyTwo, NVFP4, "plain ties", r"block scales: \d+ of \d+ differ"),
    (FirstHeadsScale, E4M3, "scale_per_head", r"scale 3: got 0x"),
    (ScaleAlongHeadDim, E4M3, "scale_per_head", r"shape \(4, 4, 4\): codes: "),
    (IgnoresStridesOfTheScale, E4M3, "scale_per_head", r"every second of a tensor: codes: "),
    (IgnoresStrides, E4M3, "strides", r"heads before tokens: codes: \d+ of 4096 differ"),
    (OffsetsOf31Bits, E4M3, "far_rows", r"^rows far apart: codes: \d+ of 256 differ"),
    (RaisesWithoutTokens, E4M3, "empty", r"max\(\): Expected reduction dim"),
    (
        ChangesTheTensor,
        E4M3,
        "given_unchanged",
        r"changes \d+ bytes of the tensor that it is given",
    ),
    (ChangesTheScale, E4M3, "given_unchanged", r"changes \d+ bytes of the scale that it is given"),
    (IgnoresOut, E4M3, "out_buffers out_reused pair_out", r"buffers of its own instead of those"),
    (LeavesOutAsItIs, NVFP4, "out_buffers out_reused pair_out", r"into buffers: packed: "),
    (
        WritesBeyondTheBuffer,
        E4M3,
        "out_buffers pair_out",
        r"it writes \d+ bytes beside the buffers",
    ),
    (WritesRowsAsIfPacked, E4M3, "out_buffers", r"into buffers: rows with gaps: codes: "),
    (OneWorkspace, E4M3, "new_results", r"an earlier result: it changes \d+ bytes of the data"),
    (AnotherScale, E4M3, "plain", r"scale"),
    (
        ReadsTheScale,
        E4M3,
        "no_host_sync",
        r"reads a value .* \(\.item\(\), float\(\), or an if\), in test_conformance\.py:\d+",
    ),
    (ReadsWhetherThereIsNan, E4M3, "no_host_sync pair_given_unchanged", r"reads a value"),
    (CopiesFromTheHost, E4M3, "no_host_sync", r"makes a tensor of numbers"),
    (DefaultDtype, E4M3, "any_default_dtype", r"torch\.bfloat16 by default: codes: "),
    (
        AlwaysPasses,
        E4M3,
        "plain",
        r"None, which leaves .*, and this is what every implementation must take",
    ),
    (PairAlwaysPasses, E4M3, "pair_plain", r"its quantize_kv_pair passes"),
    (SwapsThePair, E4M3, "pair_plain pair_alike pair_as_singles", r"K of K and V .* codes: "),
    (OneScaleForThePair, E4M3, "pair_plain pair_unlike pair_scale_per_head", r"V of |scale"),
    (PairWithoutNan, E4M3, "pair_rare_values", r"V: a NaN in each block: codes: "),
    (PairWithoutNegativeZeroOfV, NVFP4, "pair_rare_values", r"V: zeros of both signs: codes: "),
    (OneWorkspaceForThePair, E4M3, "pair_new_results", r"changes \d+ bytes of the data of V"),
    (
        KeepsTheScale,
        E4M3,
        "scale_tensor pair_scale_tensor dequantize_scale_tensor",
        r"the same scale, changed in place: codes: ",
    ),
    (
        ReadsWhereTheScalesMemoryBegins,
        NVFP4,
        "scale_tensor pair_scale_tensor dequantize_scale_tensor",
        r"a scale inside a tensor: values: ",
    ),
    (
        BlockScalesLieAsData,
        NVFP4,
        "out_buffers pair_out dequantize_strides",
        r"packed, block scales rows with gaps: block scales: ",
    ),
    (OneWorkspaceForValues, E4M3, "dequantize_new_results", r"changes \d+ bytes of the values"),
    (DoublesTwice, FNUZ, "scale_conversion", r"k becomes \[0\.2\] instead of \[0\.1\]"),
    (DoublesTheDefault, FNUZ, "default_scales", r"k becomes \[2\.0\] instead of \[1\.0\]"),
    (DoublesNothing, FNUZ, "scale_conversion scale_conversion_per_head", r"k becomes \[0\.05\]"),
    (DoublesEachTimeMore, FNUZ, "scale_conversion_repeated", r"becomes \[.*\] instead of \["),
    (
        NarrowsBeforeItMultiplies,
        E5M2,
        "dequantize_every_code",
        r"code 0x\w\w, scale 0\.1\d*: got ",
    ),
    (OtherOrderOfProducts, NVFP4, "dequantize_every_code", r"code 0x\w, block scale .*: got "),
    (
        DequantizesNothing,
        E4M3,
        "dequantize_plain",
        r"None, which leaves .*, and this is what every",
    ),
    (
        DequantizesRowsOfAPowerOfTwo,
        NVFP4,
        "dequantize_shapes",
        r"shape \(3, 2, 40\): values: \d+ of 480 differ",
    ),
    (IgnoresStridesOfCodes, E4M3, "dequantize_strides", r"cache: rows with gaps: values: "),
    (PadsRows, E4M3, "round_trip", r"its own codes: values: \d+ of 4096 differ"),
    (FlushesSubnormalScales, E4M3, "dequantize_extreme_scales", r"scale \S+e-4\d: got -?0, "),
    (FirstHeadsScaleForAll, E4M3, "dequantize_scale_per_head", r"scale 3: got "),
    (
        DequantizesInDefaultDtype,
        E4M3,
        "dequantize_any_default_dtype",
        r"torch\.bfloat16 by default: values: ",
    ),
    (
        ReadsTheScaleOfCodes,
        E4M3,
        "dequantize_no_host_sync",
        r"codes: it reads a value .* \(\.item\(\), float\(\), or an if\)",
    ),
    (DequantizesInPlace, E4M3, "dequantize_given_unchanged", r"changes \d+ bytes of the data"),
    (NoNanCode, E4M3, "dequantize_known dequantize_every_code", r"got 480, expected nan"),
    (BrokenDescription, E4M3, "description", r"its describe_kv raised OSError: the driver does"),
)


@pytest.mark.parametrize(
    ("wrong", "name", "checks", "said"), WRONG, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_wrong_implementation_is_caught(
    wrong: type[Right], name: str, checks: str, said: str
) -> None:
    found = findings(wrong(), name, device=SM_90, checks=checks.split())
    assert set(found) == set(checks.split())
    messages = [message for check in found.values() for message in check]
    assert any(re.search(said, message) for message in messages), "\n".join(messages)


@pytest.mark.parametrize(
    "way",
    [
        lambda scale: scale.cpu(),
        lambda scale: scale.to("cpu"),
        lambda scale: scale.to(device=torch.device("cpu")),
        lambda scale: scale.numpy(),
        lambda scale: scale.tolist(),
        lambda scale: numpy.asarray(scale),
    ],
    ids=["cpu", "to", "to_device", "numpy", "tolist", "asarray"],
)
def test_what_only_a_gpu_would_wait_for_is_caught_on_a_cpu(
    way: Callable[[torch.Tensor], object],
) -> None:
    wrong = TakesTheScaleToTheHost(way)
    found = findings(wrong, E4M3, device=SM_90, checks=["no_host_sync"])
    (problem,) = {message.partition(": it ")[2] for message in found["no_host_sync"]}
    assert problem.startswith("takes a tensor to the host (")
    assert re.search(r", in test_conformance\.py:\d+$", problem)
    # On the CPU that is where the tensor is.
    assert not findings(wrong, E4M3, checks=["no_host_sync"])


def test_every_check_catches_a_wrong_implementation() -> None:
    """Those that need a GPU have nothing to catch here."""
    caught = {name for _, _, checks, _ in WRONG for name in checks.split()}
    assert caught == {check.name for check in CHECKS if not check.only_gpu}


def findings(
    implementation: object,
    *names: str,
    device: kv.Device | None = None,
    checks: list[str] | None = None,
) -> dict[str, list[str]]:
    """What is wrong, by check; an exception is a finding too."""
    candidate = Candidate.of(implementation, device=device)
    found: dict[str, list[str]] = {}
    for case in cases(candidate, names or None):
        if checks is None or case.check.name in checks:
            try:
                messages = [str(problem) for problem in case.run(candidate).problems]
            except Exception as error:
                messages = ["\n".join([str(error), *getattr(error, "__notes__", ())])]
            if messages:
                found.setdefault(case.check.name, []).extend(messages)
    return found


# What may differ


class Approximate(Right):
    """Moves some codes to a neighbour, and some block scales.

    :param every: a step is made in one of so many codes; block scales likewise.
    """

    def __init__(self, every: int, scales_every: int, tolerance: kv.KVTolerance) -> None:
        self.every, self.scales_every, self.tolerance = every, scales_every, tolerance

    def codes(self, x: torch.Tensor, scale: torch.Tensor, name: str) -> kv.QuantizedKV:
        made = super().codes(x, scale, name)
        data, block_scales = made.data, made.block_scales
        if block_scales is None:
            data = _moved(data.view(torch.uint8), self.every, 0x7E).view(data.dtype)
        else:
            block_scales = _moved(block_scales.view(torch.uint8), self.scales_every, 0x7E)
            block_scales = block_scales.view(torch.float8_e4m3fn)
            if x.numel():
                blocks = x.float().reshape(*block_scales.shape, 16)
                codes = comparing.e2m1_codes(blocks, block_scales.float(), scale)
                data = comparing.packed(_moved(codes.reshape(x.shape), self.every, 7))
        return kv.QuantizedKV(data, block_scales, scale, name)


def _moved(codes: torch.Tensor, every: int, largest: int) -> torch.Tensor:
    """Some codes one nearer to zero, codes of zero and of what is not finite left as they are."""
    magnitudes = codes & (0x7F if largest > 7 else 7)
    chosen = torch.arange(codes.numel()).reshape(codes.shape) % every == every - 1
    return codes - (chosen & (magnitudes > 0) & (magnitudes <= largest)).to(torch.uint8)


ROUGH = kv.KVTolerance(codes=0.02, block_scales=0.05)


@pytest.mark.parametrize("name", [E4M3, NVFP4])
def test_what_is_within_its_tolerance_conforms(name: str) -> None:
    assert findings(Approximate(64, 32, ROUGH), name) == {}


@pytest.mark.parametrize("name", [E4M3, NVFP4])
def test_without_a_declared_tolerance_nothing_may_differ(name: str) -> None:
    found = findings(Approximate(64, 32, kv.KVTolerance()), name)
    assert {"plain", "random_values", "strides", "every_pattern"} <= set(found)


@pytest.mark.parametrize(
    ("every", "scales_every", "what"),
    [(16, 32, "codes one step off"), (64, 8, "block scales one step off")],
)
def test_more_than_declared_fails_where_enough_is_compared(
    every: int, scales_every: int, what: str
) -> None:
    found = findings(Approximate(every, scales_every, ROUGH), NVFP4)
    assert {"plain", "every_pattern", "random_values", "rare_values", "strides"} <= set(found)
    assert not {"ties", "scaled_ties", "scale_conversion"} & set(found)
    for message in (message for messages in found.values() for message in messages):
        counted, *first = message.splitlines()
        assert re.match(rf"{what}, 0\.\d+ of them where describe_kv allows 0\.0[25]: ", counted)
        assert len(first) == 5
        assert all(re.match(r"  \[.*\]: .*, global scale .*: got 0x", line) for line in first)


def test_with_a_tolerance_extreme_scales_are_skipped() -> None:
    candidate = Candidate.of(Approximate(64, 32, ROUGH))
    for case in cases(candidate, [NVFP4]):
        skipped = case.run(candidate).skipped
        assert bool(skipped) == case.check.name.endswith("extreme_scales")


class TestComparison:
    """One block beside what the definition gives: a block scale of 1, and values that are codes."""

    X = torch.tensor([[6.0, -6, 4, -4, 3, -3, 2, -2, 1.5, -1.5, 1, -1, 0.5, -0.5, 0, -0.0]])
    RIGHT = (7, 15, 6, 14, 5, 13, 4, 12, 3, 11, 2, 10, 1, 9, 0, 8)
    ONE, NEXT = 0x38, 0x39  # block scales
    CODES = kv.KVTolerance(codes=0.1)
    BLOCK_SCALES = kv.KVTolerance(block_scales=0.1)
    FORMATS = {f.name: f for f in Candidate.of(cpu_reference).all_formats}  # noqa: RUF012

    @staticmethod
    def block(codes: Any, block_scale: int) -> kv.QuantizedKV:
        data = comparing.packed(torch.tensor([list(codes)], dtype=torch.uint8))
        stored = torch.tensor([[block_scale]], dtype=torch.uint8).view(torch.float8_e4m3fn)
        return kv.QuantizedKV(data, stored, torch.ones(1), NVFP4)

    @staticmethod
    def counted(comparison: comparing.Comparison) -> tuple[Any, ...]:
        """Problems, and of codes and block scales how many were compared, and are one step off."""
        return comparison.problems, comparison.codes[:2], comparison.block_scales[:2]

    def compare(
        self,
        tolerance: kv.KVTolerance,
        block_scale: int = ONE,
        *,
        changes: dict[int, int] | None = None,
        x: torch.Tensor = X,
    ) -> comparing.Comparison:
        """:param changes: codes, by their place."""
        codes = [(changes or {}).get(place, code) for place, code in enumerate(self.RIGHT)]
        got, right = self.block(codes, block_scale), self.block(self.RIGHT, self.ONE)
        return comparing.compare("X", x, got, right, self.FORMATS[NVFP4], tolerance)

    @pytest.mark.parametrize("code", [4, 6])
    def test_a_neighbour_is_one_step_off(self, code: int) -> None:
        assert self.counted(self.compare(self.CODES, changes={4: code})) == ((), (16, 1), (1, 0))
        assert self.compare(kv.KVTolerance(), changes={4: code}).problems

    @pytest.mark.parametrize("code", [3, 7, 13])
    def test_two_steps_and_the_other_sign_are_wrong(self, code: int) -> None:
        (problem,) = self.compare(self.CODES, changes={4: code}).problems
        assert (problem.differing, problem.compared) == (1, 16)
        assert str(problem.first[0]).startswith("[0, 4]: 3, global scale 1, block scale 1: got 0x")

    @pytest.mark.parametrize(("code", "wrong"), [(8, False), (1, False), (9, True), (2, True)])
    def test_the_neighbours_of_zero(self, code: int, wrong: bool) -> None:
        assert bool(self.compare(self.CODES, changes={14: code}).problems) == wrong

    def test_a_tolerance_of_one_is_none_of_the_other(self) -> None:
        assert self.compare(self.BLOCK_SCALES, changes={4: 4}).problems
        assert self.compare(self.CODES, self.NEXT).problems

    def test_beside_another_block_scale_other_codes_are_right(self) -> None:
        # 1.125: each value over that is nearest to the same code.
        assert self.counted(self.compare(self.BLOCK_SCALES, self.NEXT)) == ((), (16, 0), (1, 1))
        x = self.X.clone()
        x[0, 2] = 5.5  # 4.89: the code of 4 now, and beside 1 that of 6
        assert self.counted(self.compare(self.BLOCK_SCALES, self.NEXT, x=x)) == (
            (),
            (16, 0),
            (1, 1),
        )
        assert self.compare(self.BLOCK_SCALES, self.NEXT, changes={2: 7}, x=x).problems

    def test_a_block_scale_two_steps_off_is_wrong(self) -> None:
        assert self.compare(self.BLOCK_SCALES, self.NEXT + 1).problems

    def test_beside_a_block_scale_of_zero_codes_are_not_compared(self) -> None:
        x = self.X * 2.0**-9
        right = cpu_reference.quantize_kv(x, torch.ones(1), NVFP4, kv.Device("cpu"), None)
        assert right.block_scales is not None
        assert right.block_scales.view(torch.uint8).tolist() == [[1]]
        given = ("X", x, self.block([7, 15] * 8, 0), right, self.FORMATS[NVFP4])
        assert self.counted(comparing.compare(*given, self.BLOCK_SCALES)) == ((), (0, 0), (1, 1))
        assert len(comparing.compare(*given, kv.KVTolerance()).problems) == 2

    def test_nan_may_become_anything_where_that_is_declared(self) -> None:
        x = self.X.clone()
        x[0, 3] = torch.nan
        changes = {3: 7, 0: 1}
        assert len(self.compare(kv.KVTolerance(), 0x7F, changes=changes, x=x).problems) == 2
        nan = kv.KVTolerance(nan=True)
        assert self.counted(self.compare(nan, 0x7F, changes=changes, x=x)) == ((), (0, 0), (0, 0))

    def test_infinity_is_no_neighbour_of_the_largest_value(self) -> None:
        right, got = (
            kv.QuantizedKV(
                torch.tensor([code], dtype=torch.uint8).view(torch.float8_e5m2),
                None,
                torch.ones(1),
                E5M2,
            )
            for code in (0x7B, 0x7C)
        )
        given = ("X", torch.tensor([65536.0]), got, right, self.FORMATS[E5M2])
        assert comparing.compare(*given, self.CODES).problems


# What is looked at


class PassesOnWhatIsNotPlain(Right):
    """Has no ``quantize_kv_pair``."""

    quantize_kv_pair = None

    def quantize(self, x: torch.Tensor, scale: torch.Tensor, name: str, out: Any) -> Any:
        if x.dtype != torch.bfloat16 or not x.is_contiguous() or out is not None:
            return None
        return super().quantize(x, scale, name, out)


def test_it_may_pass_on_what_is_not_plain() -> None:
    implementation = PassesOnWhatIsNotPlain()
    assert findings(implementation, E4M3) == {}
    candidate = Candidate.of(implementation)
    by_name = {str(case): case.run(candidate) for case in cases(candidate, [E4M3])}
    assert by_name["plain-fp8_e4m3-bfloat16"].skipped == ""
    assert by_name["strides-fp8_e4m3-bfloat16"].skipped == ""  # an aligned slice is packed
    assert by_name["shapes-fp8_e4m3-float16"].skipped.startswith("it passes on shape (128,); ")
    assert not any(name.startswith("pair_") for name in by_name)


class OnlyQuantizes:
    @kv.hookimpl
    def quantize_kv(self, tensor: Any, scale: Any, kv_cache_dtype: str, out: Any) -> Any:
        return Right().quantize(tensor, scale, kv_cache_dtype, out)


def test_checks_are_made_of_the_hooks_that_are_there() -> None:
    found = cases(Candidate.of(OnlyQuantizes()), [E4M3])
    assert {hook for case in found for hook in case.check.hooks} == {"quantize_kv"}
    assert all(case.run(Candidate.of(OnlyQuantizes())).problems == () for case in found[:20])


def test_on_fnuz_hardware_codes_of_e4m3_are_only_read() -> None:
    candidate = Candidate.of(Right(), device=kv.Device.parse("gfx942"))
    e4m3 = [case for case in cases(candidate) if case.kv_cache_dtype == E4M3]
    assert {hook for case in e4m3 for hook in case.check.hooks} == {"dequantize_kv"}
    assert {case.kv_cache_dtype for case in cases(candidate)} == set(NAMES)


class ServesNothing(Right):
    names = ()


class ServesOne(Right):
    names = (E4M3,)


class SupportsRaises(Right):
    @kv.hookimpl
    def supports_kv(self, kv_cache_dtype: str) -> bool | str:
        if kv_cache_dtype == NVFP4:
            raise OSError("the driver does not answer")
        return True


@pytest.mark.parametrize(
    ("implementation", "names", "said"),
    [
        (
            ServesNothing(),
            None,
            r"^ServesNothing on cpu has nothing to be checked. fp8_e4m3: serves",
        ),
        (
            ServesOne(),
            [NVFP4],
            r"^ServesOne on cpu does not serve nvfp4: serves \('fp8_e4m3',\) \[errors#",
        ),
        (
            ServesOne(),
            ["fp9"],
            r"^ServesOne on cpu knows no format 'fp9'; known names are fp8_e4m3, ",
        ),
        (SupportsRaises(), None, r"nvfp4: its supports_kv raised OSError: the driver does not ans"),
        (
            ServesOne(),
            [],
            r"^ServesOne on cpu: no format is asked for, so nothing would be checked",
        ),
    ],
)
def test_nothing_passes_because_nothing_was_looked_at(
    implementation: object, names: list[str] | None, said: str
) -> None:
    with pytest.raises(kv.KVCacheError, match=said):
        cases(Candidate.of(implementation), names)


@pytest.mark.parametrize("where", ["nonsense", "sm_90", None, object()])
def test_a_torch_device_that_is_none_is_refused(where: Any) -> None:
    with pytest.raises(kv.KVCacheError, match=r"^torch_device is what torch\.device takes, "):
        Candidate.of(Right(), torch_device=where)


def test_a_device_may_be_a_name() -> None:
    assert Candidate.of(Right(), device="sm_90").device == SM_90
    wrong: Any
    for wrong in ("toaster", 90):
        with pytest.raises(kv.KVCacheError, match=f"{wrong!r}; known names are cpu, "):
            Candidate.of(Right(), device=wrong)


class SaysSo(ServesOne):
    """What it says of itself begins as what is said of a broken one."""

    @kv.hookimpl
    def supports_kv(self, kv_cache_dtype: str) -> bool | str:
        return kv_cache_dtype == E4M3 or "its supports_kv takes fp8_e4m3 alone"

    @kv.hookimpl
    def describe_kv(self) -> kv.KVDescription:
        return kv.KVDescription("As the reference, which its describe_kv says")


def test_words_alone_do_not_make_it_broken() -> None:
    assert findings(SaysSo(), checks=["description", "plain"]) == {}


class Halves:
    """Adds a format: float16 of the values over the scale, for a head_dim that is even."""

    @kv.hookimpl
    def kv_formats(self) -> list[kv.KVFormat]:
        return [
            kv.KVFormat("halves", "halves", "float16", 65504.0, block_size=2,
                        block_scale_dtype="float16")
        ]  # fmt: skip

    @kv.hookimpl
    def supports_kv(self, kv_cache_dtype: str) -> bool | str:
        return kv_cache_dtype == "halves" or "serves halves"

    @kv.hookimpl
    def quantize_kv(self, tensor: torch.Tensor, scale: torch.Tensor, out: Any) -> Any:
        data = (self.seen(tensor).float() / scale).half()
        blocks = data[..., ::2].abs()
        if out is not None:
            data, blocks = out.data.copy_(data), out.block_scales.copy_(blocks)
        return kv.QuantizedKV(data, blocks, scale, "halves")

    @kv.hookimpl
    def dequantize_kv(self, quantized: kv.QuantizedKV, dtype: torch.dtype) -> torch.Tensor:
        return (quantized.data.float() * quantized.scale).to(dtype)

    def seen(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class HalvesWithoutStrides(Halves):
    def seen(self, tensor: torch.Tensor) -> torch.Tensor:
        return IgnoresStrides.packed(tensor)


def test_of_a_format_that_a_plugin_adds_memory_is_checked() -> None:
    assert findings(Halves()) == {}
    names = {case.check.name for case in cases(Candidate.of(Halves()))}
    assert {"plain", "shapes", "strides", "out_buffers", "dequantize_strides"} <= names
    assert not {"ties", "random_values", "scale_conversion"} & names
    (message,) = findings(HalvesWithoutStrides(), checks=["strides"])["strides"][:1]
    assert re.search(r"heads before tokens: bytes of data: \d+ of 8192 differ", message)


def test_the_checks_have_names_of_their_own_and_say_what_they_are() -> None:
    names = [check.name for check in CHECKS]
    assert len(names) == len(set(names))
    assert all(check.summary for check in CHECKS)
    assert all(check.hooks or check.name == "description" for check in CHECKS)


# As pytest runs it

SUITE = """
import pytest
import torch

import kvcache_plugin as kv
from kvcache_plugin.hardware import cpu_reference, cuda_sm90
from kvcache_plugin.testing import ConformanceSuite
from tests.test_conformance import (
    IgnoresOut,
    NoNegativeZero,
    PassesOnWhatIsNotPlain,
    RaisesWithoutTokens,
)


class TestRight(ConformanceSuite):
    implementation = cpu_reference
    formats = ["fp8_e4m3"]


class TestWrong(ConformanceSuite):
    implementation = NoNegativeZero()
    formats = ["fp8_e4m3"]


class TestPasses(ConformanceSuite):
    implementation = PassesOnWhatIsNotPlain()
    formats = ["fp8_e4m3"]


class TestRaises(ConformanceSuite):
    implementation = RaisesWithoutTokens()
    formats = ["fp8_e4m3"]


class TestIgnoresOut(ConformanceSuite):
    implementation = IgnoresOut()
    formats = ["fp8_e4m3"]


class TestServesNothing(ConformanceSuite):
    implementation = cuda_sm90


class TestForgotten(ConformanceSuite):
    pass


class TestNoFormats(ConformanceSuite):
    implementation = cpu_reference
    formats = []


class TestNonsense(ConformanceSuite):
    implementation = cpu_reference
    torch_device = "nonsense"


class TestClass(ConformanceSuite):
    implementation = NoNegativeZero


@pytest.mark.skipif(True, reason="needs a GPU")
class TestSkipped(ConformanceSuite):
    implementation = cpu_reference
    torch_device = "cuda:7"


class TestNoGpu(ConformanceSuite):
    implementation = cpu_reference
    torch_device = "cuda:7"
"""


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What came of each test of ``SUITE``, and under ``""`` all that was printed."""
    folder = tmp_path_factory.mktemp("suite")
    (folder / "test_suite.py").write_text(SUITE, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", "/dev/null", "-rA",
         "-k", "plain or serves or zeros or shapes or empty", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )  # fmt: skip
    found = re.findall(r"^(PASSED|FAILED) \S+?::(\S+)", done.stdout, re.MULTILINE)
    return {test: result for result, test in found} | {"": done.stdout}


def test_pytest_makes_a_test_of_each_case(outcome: dict[str, str]) -> None:
    for dtype in ("float32", "bfloat16", "float16"):
        assert outcome[f"TestRight::test_conforms[zeros-fp8_e4m3-{dtype}]"] == "PASSED"
        assert outcome[f"TestWrong::test_conforms[zeros-fp8_e4m3-{dtype}]"] == "FAILED"
    assert outcome["TestWrong::test_conforms[plain-fp8_e4m3-bfloat16]"] == "PASSED"
    assert "-0, scale 1: got 0x00 (0), expected 0x80 (-0)" in outcome[""]
    assert "[errors#conformance-differs]" in outcome[""]


def test_pytest_shows_an_exception_from_the_implementation_on(outcome: dict[str, str]) -> None:
    shown = shown_of(outcome, "TestRaises.test_conforms[empty-fp8_e4m3-bfloat16]")
    assert files_of(shown) == {"tests/test_conformance.py"}
    assert ">       x.abs().max()" in shown


def test_pytest_shows_of_a_wrong_answer_what_it_is(outcome: dict[str, str]) -> None:
    shown = shown_of(outcome, "TestIgnoresOut.test_conforms[empty-fp8_e4m3-bfloat16]")
    assert "answered with buffers of its own instead of those that it was given" in shown
    assert not {place for place in files_of(shown) if "kvcache_plugin" in place}


def shown_of(outcome: dict[str, str], test: str) -> str:
    assert outcome[test.replace(".", "::", 1)] == "FAILED"
    return outcome[""].partition(f"_ {test} _")[2].partition("\n____")[0]


def files_of(shown: str) -> set[str]:
    return set(re.findall(r"^(\S+\.py):\d+: ", shown, re.MULTILINE))


def test_pytest_skips_what_is_passed_by(outcome: dict[str, str]) -> None:
    assert outcome["TestPasses::test_conforms[plain-fp8_e4m3-bfloat16]"] == "PASSED"
    skipped = r"SKIPPED .*: it passes on shape \(128,\); .* \[errors#conformance-skipped\]$"
    assert re.search(skipped, outcome[""], re.MULTILINE)


@pytest.mark.parametrize(
    ("test", "said"),
    [
        ("TestServesNothing", "has nothing to be checked. fp8_e4m3: serves CUDA from sm_80"),
        ("TestForgotten", "TestForgotten has no implementation to test; set `implementation`"),
        ("TestClass", "NoNegativeZero is a class; give a module or an instance"),
        ("TestNoFormats", "no format is asked for"),
        ("TestNonsense", "torch_device is what torch.device takes"),
        ("TestNoGpu", "'cuda' has no capability"),
    ],
)
def test_what_cannot_be_tested_is_one_test_that_fails(
    outcome: dict[str, str], test: str, said: str
) -> None:
    assert [name for name in outcome if name.startswith(f"{test}::")] == [
        f"{test}::test_conforms[serves]"
    ]
    assert outcome[f"{test}::test_conforms[serves]"] == "FAILED"
    assert said in outcome[""]


def test_pytest_may_skip_a_suite_whose_device_is_not_here(outcome: dict[str, str]) -> None:
    assert re.search(r"SKIPPED .*: needs a GPU", outcome[""])


def test_the_kit_needs_no_pytest() -> None:
    code = "import kvcache_plugin.testing, sys; assert 'pytest' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_kit_needs_no_docstrings() -> None:
    code = (
        "from kvcache_plugin.hardware import cpu_reference as it;"
        "from kvcache_plugin.testing import Candidate, cases;"
        "candidate = Candidate.of(it);"
        "found = [c for c in cases(candidate, ['nvfp4']) if c.check.name in ('plain', 'nan')];"
        "print(found[0].check.summary, *(c.run(candidate).problems for c in found))"
    )
    command = [sys.executable, "-OO", "-c", code]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["plain", "()", "()", "()", "()"]
