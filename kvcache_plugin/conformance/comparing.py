"""Compares codes and values, and says where they differ.

All tensors are on the CPU. A code is compared by its bits; any code of NaN stands for NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from math import copysign, isfinite
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcache_plugin.description import KVTolerance
    from kvcache_plugin.formats import KVFormat
    from kvcache_plugin.quantized import QuantizedKV

# OCP Microscaling specification 1.0: the magnitudes of codes 0 to 7; bit 3 is the sign.
E2M1_MAGNITUDES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BLOCK: Final = 16
_E2M1: Final = "e2m1"
_E4M3: Final = "float8_e4m3fn"
_FLOAT32_MAX: Final = torch.finfo(torch.float32).max
_MOST_SHOWN: Final = 5
_NIBBLES_EXCHANGED: Final = (
    "all are right with the two nibbles of each byte exchanged; the even element is the low one"
)
#: The place of a code that is not finite: far from that of any other.
_NOWHERE: Final = -(1 << 20)


@dataclass(frozen=True)
class Difference:
    """One code, block scale or value that is not what it must be.

    :param index: where it is.
    :param given: what it was made from, in words.
    :param got: what it is.
    :param expected: what it must be.
    """

    index: tuple[int, ...]
    given: str
    got: str
    expected: str

    def __str__(self) -> str:
        return f"{list(self.index)}: {self.given}: got {self.got}, expected {self.expected}"


@dataclass(frozen=True)
class Problem:
    """What is wrong with one answer.

    :param what: which input, and what is wrong.
    :param differing: how many differ; 0 where nothing was counted.
    :param compared: of how many.
    :param first: the first few of them.
    """

    what: str
    differing: int = 0
    compared: int = 0
    first: tuple[Difference, ...] = ()

    def __str__(self) -> str:
        counted = f": {self.differing} of {self.compared} differ" if self.compared else ""
        return "\n".join([f"{self.what}{counted}", *(f"  {each}" for each in self.first)])


class Count(NamedTuple):
    """How many were compared, how many of those are one step off, and the first few of these."""

    compared: int = 0
    off: int = 0
    first: tuple[Difference, ...] = ()

    def plus(self, other: Count) -> Count:
        first = (*self.first, *other.first)[:_MOST_SHOWN]
        return Count(self.compared + other.compared, self.off + other.off, first)


class Comparison(NamedTuple):
    """What is wrong, and how much was compared; what may be one step off is counted alone."""

    problems: tuple[Problem, ...] = ()
    codes: Count = Count()
    block_scales: Count = Count()


def is_exact(tolerance: KVTolerance) -> bool:
    """Whether no code and no block scale may be off, but perhaps what a NaN leads to."""
    return not (tolerance.codes or tolerance.block_scales)


def compare(
    what: str,
    x: torch.Tensor,
    got: QuantizedKV,
    expected: QuantizedKV,
    kv_format: KVFormat,
    tolerance: KVTolerance,
) -> Comparison:
    """Compare what was made of ``x`` with what the definition gives, as far as tolerance goes."""
    if not x.numel():
        return Comparison()
    if kv_format.family == "fp8":
        return _compare_fp8(what, x, got, expected, kv_format, tolerance)
    if kv_format.family == "nvfp4":
        return _compare_nvfp4(what, x, got, expected, tolerance)
    return compare_bytes(what, got, expected)


def compare_bytes(what: str, got: QuantizedKV, expected: QuantizedKV) -> Comparison:
    """Equal bytes: of a format whose codes only its own implementation understands."""
    both = [("data", got.data, expected.data)]
    if got.block_scales is not None and expected.block_scales is not None:
        both.append(("block scales", got.block_scales, expected.block_scales))
    problems: tuple[Problem, ...] = ()
    count = Count()
    for part, ours, right in both:
        comparison = _compare_parts(f"{what}: bytes of {part}", bits(ours), bits(right))
        problems += comparison.problems
        count = count.plus(comparison.codes)
    return Comparison(problems, count)


def _compare_parts(what: str, got: torch.Tensor, expected: torch.Tensor) -> Comparison:
    problems = differences(
        what,
        got != expected,
        lambda i: "the same values, packed and into new buffers, give the expected one",
        lambda i: f"0x{int(got[i]):02x}",
        lambda i: f"0x{int(expected[i]):02x}",
    )
    return Comparison(problems, Count(got.numel()))


def compare_values(
    what: str, quantized: QuantizedKV, got: torch.Tensor, expected: torch.Tensor
) -> Comparison:
    """Equal bits, signs of zeros too; any NaN is as good as another."""
    if not got.numel():
        return Comparison()
    wrong = _other_values(got, expected)
    problems = differences(
        f"{what}: values",
        wrong,
        lambda i: _code_at(quantized, i),
        lambda i: number(got[i]),
        lambda i: number(expected[i]),
    )
    is_packed = 2 * quantized.data.shape[-1] == got.shape[-1]
    if problems and is_packed and not _other_values(_exchanged(got), expected).any():
        problems += (Problem(f"{what}: values: {_NIBBLES_EXCHANGED}"),)
    return Comparison(problems, Count(got.numel()))


def _other_values(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    other = (bits(got) != bits(expected)).reshape(*got.shape, -1).any(-1)
    return other & ~(got.isnan() & expected.isnan())


def differences(
    what: str,
    wrong: torch.Tensor,
    given: Callable[[tuple[int, ...]], str],
    got: Callable[[tuple[int, ...]], str],
    expected: Callable[[tuple[int, ...]], str],
) -> tuple[Problem, ...]:
    """The one problem that wrong elements are, none where no element is wrong."""
    if not wrong.any():
        return ()
    first = _first(wrong, given, got, expected)
    return (Problem(what, int(wrong.sum()), wrong.numel(), first),)


def _first(
    wrong: torch.Tensor,
    given: Callable[[tuple[int, ...]], str],
    got: Callable[[tuple[int, ...]], str],
    expected: Callable[[tuple[int, ...]], str],
) -> tuple[Difference, ...]:
    places = [tuple(place) for place in wrong.nonzero()[:_MOST_SHOWN].tolist()]
    return tuple(Difference(i, given(i), got(i), expected(i)) for i in places)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes, those of an element side by side along the last dimension."""
    return tensor.detach().resolve_neg().contiguous().view(torch.uint8)


def number(x: torch.Tensor) -> str:
    return f"{x.item():.9g}"


def unpacked(data: torch.Tensor) -> torch.Tensor:
    """The two codes of each byte, the one in the low nibble first."""
    return torch.stack((data & 0xF, data >> 4), dim=-1).flatten(-2)


def packed(codes: torch.Tensor) -> torch.Tensor:
    """Two codes to a byte, the even element in the low nibble."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def _exchanged(elements: torch.Tensor) -> torch.Tensor:
    """The two elements of each byte in the other order."""
    return elements.reshape(*elements.shape[:-1], -1, 2).flip(-1).reshape(elements.shape)


def e2m1_codes(x: torch.Tensor, sf: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """The e2m1 codes of blocks of float32 ``x`` beside block scales that are given."""
    reciprocal = (1.0 / (sf * g)).clamp(max=_FLOAT32_MAX).masked_fill(sf == 0, 0.0)
    scaled = x.abs() * reciprocal.unsqueeze(-1)
    codes = torch.zeros_like(x, dtype=torch.uint8)
    for above in range(1, len(E2M1_MAGNITUDES)):
        halfway = (E2M1_MAGNITUDES[above - 1] + E2M1_MAGNITUDES[above]) / 2
        codes += scaled >= halfway if above % 2 == 0 else scaled > halfway
    return torch.where(x.signbit(), codes | 8, codes)


# Codes


class _Alphabet(NamedTuple):
    """All codes of a small float.

    :param values: the value of each.
    :param places: the place of each among the finite ones, in their order; -0 is beside 0.
    """

    values: torch.Tensor
    places: torch.Tensor


@cache
def _alphabet(name: str) -> _Alphabet:
    """That of e2m1, or of a torch dtype."""
    if name == _E2M1:
        values = [*E2M1_MAGNITUDES, *(-magnitude for magnitude in E2M1_MAGNITUDES)]
    else:
        every_code = torch.arange(256, dtype=torch.uint8, device="cpu")
        values = every_code.view(getattr(torch, name)).float().tolist()
    finite = [code for code, value in enumerate(values) if isfinite(value)]
    in_order = sorted(finite, key=lambda code: (values[code], copysign(1.0, values[code])))
    places = torch.full((len(values),), _NOWHERE, dtype=torch.int64, device="cpu")
    places[in_order] = torch.arange(len(in_order), device="cpu")
    return _Alphabet(torch.tensor(values, dtype=torch.float32, device="cpu"), places)


@dataclass(frozen=True, eq=False)
class _Codes:
    """Codes to compare, all of one shape.

    :param left_out: which are not compared.
    :param given: what the code at an index was made from, in words.
    """

    what: str
    got: torch.Tensor
    expected: torch.Tensor
    alphabet: _Alphabet
    left_out: torch.Tensor
    given: Callable[[tuple[int, ...]], str]

    def compare(self, may_step: bool) -> tuple[tuple[Problem, ...], Count]:
        got, expected = self.got.long(), self.expected.long()
        values, places = self.alphabet
        wrong = got != expected
        wrong &= ~(values[got].isnan() & values[expected].isnan())
        wrong &= ~self.left_out
        off = torch.zeros_like(wrong)
        if may_step:
            off = wrong & ((places[got] - places[expected]).abs() == 1)
        in_words = (
            self.given,
            lambda i: self._show(got[i]),
            lambda i: self._show(expected[i]),
        )
        problems = differences(self.what, wrong & ~off, *in_words)
        compared = got.numel() - int(self.left_out.sum())
        return problems, Count(compared, int(off.sum()), _first(off, *in_words))

    def _show(self, code: torch.Tensor) -> str:
        digits = 1 if len(self.alphabet.values) == 16 else 2
        return f"0x{int(code):0{digits}x} ({number(self.alphabet.values[code])})"


def _compare_fp8(
    what: str,
    x: torch.Tensor,
    got: QuantizedKV,
    expected: QuantizedKV,
    kv_format: KVFormat,
    tolerance: KVTolerance,
) -> Comparison:
    x = x.float()
    scale = expected.scale if expected.scale.numel() == 1 else expected.scale.unsqueeze(-1)
    scale = scale.expand(x.shape)
    codes = _Codes(
        f"{what}: codes",
        bits(got.data),
        bits(expected.data),
        _alphabet(kv_format.data_dtype),
        x.isnan() & tolerance.nan,
        lambda i: f"{number(x[i])}, scale {number(scale[i])}",
    )
    problems, count = codes.compare(may_step=tolerance.codes > 0)
    return Comparison(problems, count)


def _compare_nvfp4(
    what: str, x: torch.Tensor, got: QuantizedKV, expected: QuantizedKV, tolerance: KVTolerance
) -> Comparison:
    assert got.block_scales is not None
    assert expected.block_scales is not None
    x, g = x.float(), expected.scale
    blocks = _blocks(x)
    largest = blocks.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(-1)
    left_out = blocks.isnan().any(-1) & tolerance.nan
    block_scales = _Codes(
        f"{what}: block scales",
        bits(got.block_scales),
        bits(expected.block_scales),
        _alphabet(_E4M3),
        left_out,
        lambda i: f"largest magnitude {number(largest[i])}, global scale {number(g)}",
    )
    right_codes = unpacked(expected.data)
    sf = got.block_scales.float()
    if not is_exact(tolerance):
        # Beside another block scale other codes are right, and beside 0 all of them mean 0.
        beside = e2m1_codes(blocks, sf, g)
        is_other = (block_scales.got != block_scales.expected).unsqueeze(-1)
        right_codes = torch.where(is_other, beside, _blocks(right_codes)).flatten(-2)
        left_out = left_out | (sf == 0)
    codes = _Codes(
        f"{what}: codes",
        unpacked(got.data),
        right_codes,
        _alphabet(_E2M1),
        left_out.repeat_interleave(BLOCK, -1),
        lambda i: (
            f"{number(x[i])}, global scale {number(g)}, block scale {number(_of_block(sf, i))}"
        ),
    )
    scale_problems, scale_count = block_scales.compare(may_step=tolerance.block_scales > 0)
    may_step = tolerance.codes > 0
    code_problems, code_count = codes.compare(may_step)
    if code_problems:
        still_wrong, _ = replace(codes, got=_exchanged(codes.got)).compare(may_step)
        if not still_wrong:
            code_problems += (Problem(f"{what}: codes: {_NIBBLES_EXCHANGED}"),)
    return Comparison(scale_problems + code_problems, code_count, scale_count)


def _blocks(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(*x.shape[:-1], -1, BLOCK)


def _of_block(tensor: torch.Tensor, index: tuple[int, ...]) -> torch.Tensor:
    """What there is for the block that the element at an index is in."""
    *lead, column = index
    place = (*lead, column // BLOCK)
    return tensor[place]


def _code_at(quantized: QuantizedKV, index: tuple[int, ...]) -> str:
    """The code that a value was made from, its block scale and its scale."""
    scale = quantized.scale
    scale = scale[0] if scale.numel() == 1 else scale[index[-2]]
    if quantized.block_scales is None:
        code = bits(quantized.data)[index]
        return f"code 0x{int(code):02x}, scale {number(scale)}"
    code, sf = unpacked(quantized.data)[index], _of_block(quantized.block_scales.float(), index)
    return f"code 0x{int(code):x}, block scale {number(sf)}, global scale {number(scale)}"
