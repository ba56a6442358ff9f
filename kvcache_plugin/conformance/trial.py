"""One check of one candidate, with one format and dtype: what it is asked, and what is wrong."""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Final

import torch

from kvcache_plugin import calls, formats
from kvcache_plugin.conformance import inputs
from kvcache_plugin.conformance.comparing import (
    Count,
    Problem,
    bits,
    compare,
    compare_bytes,
    compare_values,
    number,
)
from kvcache_plugin.device import Device
from kvcache_plugin.errors import add_note
from kvcache_plugin.hardware import cpu_reference
from kvcache_plugin.manager import Manager
from kvcache_plugin.quantized import QuantizedKV

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvcache_plugin.arguments import Out, OutPair, Scale
    from kvcache_plugin.conformance.candidate import Candidate
    from kvcache_plugin.conformance.comparing import Comparison
    from kvcache_plugin.description import KVTolerance
    from kvcache_plugin.formats import KVFormat
    from kvcache_plugin.scales import KVScales

_CPU: Final = Device("cpu")
#: Codes: of fewer, and of their block scales, a fraction is mostly chance.
_ENOUGH: Final = 4096


class Trial:
    """Asks a candidate and keeps what is wrong with its answers.

    :param dtype: of the values that are quantized, or that codes become.
    """

    def __init__(self, candidate: Candidate, kv_format: KVFormat, dtype: torch.dtype) -> None:
        self.candidate = candidate
        self.kv_format = kv_format
        self.dtype = dtype
        self.tolerance: KVTolerance = candidate.describe(kv_format).tolerance
        self.problems: list[Problem] = []
        self.passed_by: list[str] = []
        self.not_possible = ""
        self.codes = Count()
        self.block_scales = Count()
        self.has_reference = has_reference(kv_format)

    @property
    def skipped(self) -> str:
        """Why nothing was looked at; empty where something was."""
        if self.problems or self.codes.compared or self.block_scales.compared:
            return ""
        passes = f"it passes on {'; '.join(self.passed_by)}" if self.passed_by else ""
        return passes or self.not_possible

    def wrong(self, what: str) -> None:
        self.problems.append(Problem(what))

    # What it is given

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor in the trial's dtype, on the candidate's device."""
        if tensor.dtype != self.dtype:
            tensor = inputs.cast(tensor, self.dtype)
        return tensor.to(self.candidate.torch_device)

    def values(self, *shape: int, seed: int = 0) -> torch.Tensor:
        """K or V as they are mostly, of this shape but for a ``head_dim`` that the format takes."""
        *lead, head_dim = shape
        multiple = self.kv_format.head_dim_multiple
        return self.put(inputs.normal(*lead, -(-head_dim // multiple) * multiple, seed=seed))

    def scale(self, *values: float) -> torch.Tensor:
        tensor = torch.tensor(values, dtype=torch.float32, device="cpu")
        return tensor.to(self.candidate.torch_device)

    def scale_inside(self, *values: float) -> torch.Tensor:
        """A scale that does not lie where its memory begins."""
        return self.scale(9.0, *values, 9.0)[1:-1]

    def scale_for(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale(inputs.calibrated_scale(x, self.kv_format))

    def buffers(
        self,
        shape: tuple[int, ...] | torch.Size,
        layout: inputs.Layout = inputs.PACKED,
        *,
        offset: int = 0,
    ) -> inputs.Buffers:
        device = self.candidate.torch_device
        return inputs.new_buffers(tuple(shape), self.kv_format, layout, device, offset=offset)

    def layouts(self) -> list[inputs.Layout]:
        return inputs.layouts(self.kv_format)

    def codes_of(self, x: torch.Tensor) -> QuantizedKV | None:
        """Codes to dequantize: the reference's, or of a format that is not built in its own."""
        quantized = self.expected(x, self.scale_for(x), "values to be dequantized")
        return None if quantized is None else self.on_device(quantized)

    def on_device(self, quantized: QuantizedKV) -> QuantizedKV:
        device = self.candidate.torch_device
        block_scales = quantized.block_scales
        return QuantizedKV(
            quantized.data.to(device),
            None if block_scales is None else block_scales.to(device),
            quantized.scale.to(device),
            quantized.kv_cache_dtype,
        )

    # Asking, and comparing with what the definition gives

    def quantize(
        self,
        x: torch.Tensor,
        scale: Scale,
        what: str,
        *,
        out: Out | None = None,
        expected: QuantizedKV | None = None,
        may_pass: bool = True,
    ) -> QuantizedKV | None:
        """Quantize, and compare.

        :param what: the input in words, for messages.
        :param expected: the right answer; by default the reference's.
        :param may_pass: whether the candidate may leave this input to the next implementation.
        :returns: ``None`` where it passes.
        """
        if expected is None:
            expected = self.expected(x, scale, what)
        with self._noting(what):
            got = self.candidate.quantize(x, scale, self.kv_format, out)
        if self._answered(got, what, may_pass) and expected is not None:
            assert got is not None
            self.judge(x, got, expected, what)
        return got

    def quantize_pair(
        self,
        tensors: tuple[torch.Tensor, torch.Tensor],
        scales: tuple[Scale, Scale],
        what: str,
        *,
        out: OutPair | None = None,
    ) -> tuple[QuantizedKV, QuantizedKV] | None:
        """Quantize K and V in one call, and compare each."""
        expected = [self.expected(x, scale, what) for x, scale in zip(tensors, scales, strict=True)]
        with self._noting(what):
            got = self.candidate.quantize_pair(tensors, scales, self.kv_format, out)
        if self._answered(got, what, may_pass=True):
            assert got is not None
            for side, x, ours, right in zip("KV", tensors, got, expected, strict=True):
                if right is not None:
                    self.judge(x, ours, right, f"{side} of {what}")
        return got

    def dequantize(
        self,
        quantized: QuantizedKV,
        what: str,
        *,
        expected: torch.Tensor | None = None,
        may_pass: bool = True,
    ) -> torch.Tensor | None:
        """Dequantize to the trial's dtype, and compare."""
        on_cpu = _on_cpu(quantized)
        if expected is None:
            if self.has_reference:
                expected = calls.dequantize(_reference(), _CPU, on_cpu, self.dtype)
            else:
                packed = self.on_device(on_cpu)
                with self._noting(f"{what}, packed"):
                    expected = self.candidate.dequantize(packed, self.dtype)
        with self._noting(what):
            got = self.candidate.dequantize(quantized, self.dtype)
        if self._answered(got, what, may_pass) and expected is not None:
            assert got is not None
            self._note(compare_values(what, on_cpu, got.cpu(), expected.cpu()))
        return got

    def convert(self, scales: tuple[Scale | None, Scale | None], what: str) -> KVScales | None:
        """The scales as its ``validate_kv_scales`` converts them; ``None`` where it passes."""
        heads = next((len(s) for s in scales if isinstance(s, torch.Tensor)), None)
        with self._noting(what):
            converted = self.candidate.convert(*scales, self.kv_format, num_kv_heads=heads)
        self._answered(converted, what, may_pass=True)
        return converted

    def expected(self, x: torch.Tensor, scale: Scale, what: str) -> QuantizedKV | None:
        """What the definition gives, on the CPU.

        Of a format that is not built in, what the candidate itself makes of the same values when
        they are packed and there are no buffers; ``None`` where it passes then.
        """
        if self.has_reference:
            scale = scale.cpu() if isinstance(scale, torch.Tensor) else scale
            return calls.quantize(_reference(), _CPU, x.cpu(), scale, self.kv_format.name)
        packed = x.clone(memory_format=torch.contiguous_format)
        with self._noting(f"{what}, packed"):
            got = self.candidate.quantize(packed, scale, self.kv_format)
        return None if got is None else _on_cpu(got, copy=True)

    def judge(self, x: torch.Tensor, got: QuantizedKV, expected: QuantizedKV, what: str) -> None:
        ours = _on_cpu(got)
        if not torch.equal(bits(ours.scale), bits(expected.scale)):
            given = ", ".join(map(number, expected.scale))
            self.wrong(
                f"{what}: the result has scale {', '.join(map(number, ours.scale))}, and {given} "
                "was given"
            )
        if self.has_reference:
            self._note(compare(what, x.cpu(), ours, expected, self.kv_format, self.tolerance))
        else:
            self._note(compare_bytes(what, ours, expected))

    def same_bytes(self, got: QuantizedKV, expected: QuantizedKV, what: str) -> None:
        """See that two answers of the candidate are the same."""
        self._note(compare_bytes(what, _on_cpu(got), _on_cpu(expected)))

    def judge_fractions(self) -> None:
        """See that no more is one step off than it declares, where there is enough to judge by."""
        if self.codes.compared < _ENOUGH:
            return
        for name, count, declared in (
            ("codes", self.codes, self.tolerance.codes),
            ("block scales", self.block_scales, self.tolerance.block_scales),
        ):
            if count.off > declared * count.compared:
                self.problems.append(
                    Problem(
                        f"{name} one step off, {count.off / count.compared:.3g} of them where "
                        f"describe_kv allows {declared:.3g}",
                        count.off,
                        count.compared,
                        count.first,
                    )
                )

    def _note(self, comparison: Comparison) -> None:
        self.problems += comparison.problems
        self.codes = self.codes.plus(comparison.codes)
        self.block_scales = self.block_scales.plus(comparison.block_scales)

    def _answered(self, answer: object, what: str, may_pass: bool) -> bool:
        if answer is not None:
            return True
        self.passed_by.append(what)
        if not may_pass:
            self.wrong(
                f"{what}: its answer is None, which leaves the call to the next implementation, "
                "and this is what every implementation must take"
            )
        return False

    @contextmanager
    def _noting(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            add_note(
                error,
                f"conformance: {self.candidate} was given {what}, {self.kv_format.name}, "
                f"{self.dtype}",
            )
            raise


def has_reference(kv_format: KVFormat) -> bool:
    """Whether the CPU reference defines a format; those that a plugin adds it does not."""
    return kv_format in formats.BUILT_IN


@cache
def _reference() -> Manager:
    manager = Manager()
    manager.register(cpu_reference, "cpu_reference")
    return manager


def _on_cpu(quantized: QuantizedKV, *, copy: bool = False) -> QuantizedKV:
    """The same, packed, on the CPU."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach().cpu().contiguous()
        return tensor.clone() if copy else tensor

    block_scales = quantized.block_scales
    return QuantizedKV(
        moved(quantized.data),
        None if block_scales is None else moved(block_scales),
        moved(quantized.scale),
        quantized.kv_cache_dtype,
    )
