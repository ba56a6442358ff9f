"""How the Triton kernels are launched: strides, buffers, widths, pairs, and the right GPU.

Triton's interpreter runs the kernels, on CPU tensors. What values become what codes is the
conformance kit's matter; here the codes are compared with the reference's.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache_plugin import Device, OutBuffers, QuantizedKV
from kvcache_plugin.hardware import cpu_reference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

if sys.platform != "linux":  # where the test extra brings it
    pytest.importorskip("triton")

import triton
import triton.language as tl

from kvcache_plugin.hardware import triton_kernels, triton_launch

# The interpreter computes with numpy, which warns of what floating point is made for.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in (divide|multiply):RuntimeWarning")

CPU = Device("cpu")
GPU = Device.parse("sm_90")
FP8 = {
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "fp8_e4m3fnuz": torch.float8_e4m3fnuz,
}
NVFP4 = "nvfp4"
FORMATS = (*FP8, NVFP4)
HEAD_DIM = 32
#: Found in a buffer where nothing is to be written.
POISON = 0xA5
KERNELS = ("quantize_fp8", "dequantize_fp8", "quantize_nvfp4", "dequantize_nvfp4")

every_format = pytest.mark.parametrize("form", FORMATS)
every_family = pytest.mark.parametrize("form", ["fp8_e4m3", NVFP4])


# Tensors whose rows lie anywhere.


@dataclass(frozen=True)
class Layout:
    """Of a tensor with some leading dimensions and a last one.

    :param order: the leading dimensions, the outermost in memory first.
    :param gaps: for each of those, elements that are left free behind one step along it, as a
        multiple of what one step inside it takes.
    :param spread: the stride of the last dimension.
    :param offset: elements in memory before the first one.
    """

    order: tuple[int, ...]
    gaps: tuple[int, ...]
    spread: int = 1
    offset: int = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Of this layout, in memory of its own that is full of ``POISON``."""
        *lead, length = shape
        strides = [0] * len(lead)
        step = length * self.spread
        for dim, gap in zip(reversed(self.order), self.gaps, strict=True):
            strides[dim] = step * (1 + gap)
            step = strides[dim] * lead[dim]
        itemsize = torch.empty(0, dtype=dtype).element_size()
        memory = torch.full(((self.offset + step) * itemsize,), POISON, dtype=torch.uint8)
        return memory.view(dtype).as_strided(shape, (*strides, self.spread), self.offset)


def packed(dims: int) -> Layout:
    return Layout(tuple(range(dims)), (0,) * dims)


def scattered(dims: int, **others: int) -> Layout:
    """No two dimensions can be merged."""
    return Layout(tuple(range(dims)), (1,) * dims, **others)


def layouts(dims: int) -> st.SearchStrategy[Layout]:
    return st.builds(
        Layout,
        order=st.permutations(range(dims)).map(tuple),
        gaps=st.tuples(*[st.integers(0, 2)] * dims),
        spread=st.sampled_from([1, 1, 1, 2]),
        offset=st.integers(0, 3),
    )


def filled(layout: Layout, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    tensor = layout.empty(shape, dtype)
    generator = torch.Generator().manual_seed(len(shape))
    return tensor.copy_(torch.randn(tuple(shape), generator=generator))


def buffers(form: str, shape: Sequence[int], layout: Layout) -> OutBuffers:
    *lead, head_dim = shape
    if form != NVFP4:
        return OutBuffers(layout.empty(shape, FP8[form]))
    return OutBuffers(
        layout.empty((*lead, head_dim // 2), torch.uint8),
        layout.empty((*lead, head_dim // 16), torch.float8_e4m3fn),
    )


# What is expected.


def scale_for(form: str, heads: int | None = None) -> torch.Tensor:
    if heads is None:
        return torch.tensor([0.004 if form == NVFP4 else 0.05])
    return torch.linspace(0.01, 0.3, heads)


def reference(tensor: torch.Tensor, scale: torch.Tensor, form: str) -> QuantizedKV:
    return cpu_reference.quantize_kv(tensor.contiguous(), scale, form, CPU, None)


def quantized(
    tensor: torch.Tensor, scale: torch.Tensor, form: str, out: OutBuffers | None = None
) -> QuantizedKV:
    answer = triton_launch.quantize((tensor,), (scale,), form, GPU, None if out is None else (out,))
    assert answer is not None
    return answer[0]


def assert_same_codes(one: QuantizedKV, other: QuantizedKV) -> None:
    for part, expected in ((one.data, other.data), (one.block_scales, other.block_scales)):
        assert (part is None) == (expected is None)
        if part is not None and expected is not None:
            assert part.shape == expected.shape
            assert torch.equal(part.view(torch.uint8), expected.view(torch.uint8))


def assert_as_reference(
    tensor: torch.Tensor,
    form: str,
    scale: torch.Tensor | None = None,
    out: OutBuffers | None = None,
) -> None:
    scale = scale_for(form) if scale is None else scale
    expected = reference(tensor, scale, form)
    got = quantized(tensor, scale, form, out)
    assert got.scale is scale
    assert_same_codes(got, expected)
    if out is not None:
        assert got.data is out.data
        assert got.block_scales is out.block_scales


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the memory that a tensor is part of."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def bytes_beside(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of its memory that are no part of it."""
    own = torch.zeros(tensor.untyped_storage().nbytes() // tensor.element_size(), dtype=torch.bool)
    own.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())[...] = True
    return memory_of(tensor)[~own.repeat_interleave(tensor.element_size())]


class Launched:
    """A kernel that notes the grid and the options of each launch."""

    def __init__(self, name: str, seen: list[tuple[str, tuple[int, int], dict[str, Any]]]) -> None:
        self.name = name
        self.kernel = getattr(triton_kernels, name)
        self.seen = seen

    def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            self.seen.append((self.name, grid, options))
            self.kernel[grid](*args, **options)

        return launch


class Launches:
    """All launches of a test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[str, tuple[int, int], dict[str, Any]]] = []
        for name in KERNELS:
            monkeypatch.setattr(triton_kernels, name, Launched(name, self.seen))

    def options(self, name: str) -> list[Any]:
        return [options[name] for *_, options in self.seen]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    return Launches(monkeypatch)


# Rows.


def row_starts(rows: Any, which: int, count: int) -> list[int]:
    """Where each row begins, as the kernels compute it."""
    stride_2, stride_1, stride_0 = rows.strides[which]
    starts = []
    for row in range(count):
        outer, inner = divmod(row, rows.inner)
        outermost, middle = divmod(outer, rows.middle)
        starts.append(outermost * stride_2 + middle * stride_1 + inner * stride_0)
    return starts


@given(st.data())
def test_rows_are_where_the_strides_say(data: st.DataObject) -> None:
    lead = data.draw(st.lists(st.integers(1, 4), max_size=5))
    tensors = [
        data.draw(layouts(len(lead))).empty((*lead, length), torch.uint8) for length in (16, 2)
    ]
    rows = triton_launch._rows(*tensors)
    assert rows.dims <= sum(length > 1 for length in lead)
    if rows.dims <= 3:
        for which, tensor in enumerate(tensors):
            places = itertools.product(*map(range, lead))
            strides = tensor.stride()[:-1]
            expected = [sum(map(int.__mul__, place, strides)) for place in places]
            assert row_starts(rows, which, len(expected)) == expected


@pytest.mark.parametrize("dims", range(5))
def test_rows_without_gaps_are_one_dimension(dims: int) -> None:
    shape = (*range(2, 2 + dims), HEAD_DIM)
    assert triton_launch._rows(packed(dims).empty(shape, torch.uint8)).dims == min(dims, 1)
    assert triton_launch._rows(scattered(dims).empty(shape, torch.uint8)).dims == dims


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_strides_are_read_and_written(data: st.DataObject) -> None:
    form = data.draw(st.sampled_from(FORMATS))
    lead = data.draw(st.lists(st.integers(1, 3), max_size=5))
    shape = (*lead, HEAD_DIM)
    source = filled(data.draw(layouts(len(lead))), shape, torch.float32)
    out = buffers(form, shape, data.draw(layouts(len(lead))))
    before = memory_of(source).clone()
    heads = lead[-1] if lead and form != NVFP4 and data.draw(st.booleans()) else None
    scale = scale_for(form, heads)
    assert_as_reference(source, form, scale, out)
    assert torch.equal(memory_of(source), before)
    for part in out:
        assert part is None or (bytes_beside(part) == POISON).all()
    values = triton_launch.dequantize(QuantizedKV(*out, scale, form), torch.float32)
    expected = cpu_reference.dequantize_kv(QuantizedKV(*out, scale, form), torch.float32, CPU)
    assert torch.equal(values, expected)
    assert values.is_contiguous()


@every_format
@pytest.mark.parametrize("head_dim", [16, 48, 80, 256])
def test_any_head_dim(form: str, head_dim: int) -> None:
    source = filled(scattered(2), (5, 3, head_dim), torch.bfloat16)
    assert_as_reference(source, form, scale_for(form, None if form == NVFP4 else 3))


@pytest.mark.parametrize("head_dim", [1, 5, 33])
@pytest.mark.parametrize("layout", [packed(2), scattered(2)], ids=["packed", "scattered"])
def test_fp8_has_no_rule_for_head_dim(head_dim: int, layout: Layout) -> None:
    source = filled(layout, (5, 3, head_dim), torch.float16)
    scale = scale_for("fp8_e4m3", 3)
    assert_as_reference(source, "fp8_e4m3", scale, buffers("fp8_e4m3", source.shape, layout))
    codes = reference(source, scale, "fp8_e4m3")
    expected = cpu_reference.dequantize_kv(codes, torch.float16, CPU)
    assert torch.equal(triton_launch.dequantize(codes, torch.float16), expected)


@every_format
def test_more_than_one_program_and_an_unfinished_last_one(form: str) -> None:
    source = filled(packed(2), (301, 2, HEAD_DIM), torch.bfloat16)
    out = buffers(form, source.shape, scattered(2, offset=1))
    assert_as_reference(source, form, out=out)
    assert_as_reference(source, form)
    codes = QuantizedKV(*out, scale_for(form), form)
    expected = cpu_reference.dequantize_kv(codes, torch.bfloat16, CPU)
    assert torch.equal(triton_launch.dequantize(codes, torch.bfloat16), expected)


@every_format
def test_no_tokens_launch_nothing(form: str, launches: Launches) -> None:
    assert_as_reference(torch.empty(0, 2, HEAD_DIM), form)
    codes = reference(torch.empty(0, 2, HEAD_DIM), scale_for(form), form)
    assert triton_launch.dequantize(codes, torch.float32).shape == (0, 2, HEAD_DIM)
    assert launches.seen == []


@every_format
@pytest.mark.parametrize("side", ["source", "out", "both"])
def test_more_dimensions_than_the_kernels_know(form: str, side: str, launches: Launches) -> None:
    shape = (2, 3, 2, 3, HEAD_DIM)
    source = filled(packed(4) if side == "out" else scattered(4), shape, torch.float32)
    out = buffers(form, shape, packed(4) if side == "source" else scattered(4))
    assert_as_reference(source, form, out=out)
    for part in out:
        assert part is None or (bytes_beside(part) == POISON).all()
    codes = QuantizedKV(*out, scale_for(form), form)
    expected = cpu_reference.dequantize_kv(codes, torch.float32, CPU)
    assert torch.equal(triton_launch.dequantize(codes, torch.float32), expected)
    assert max(launches.options("DIMS")) <= 3


@every_format
def test_buffers_are_written_in_place_whatever_the_strides_of_k(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, K and the buffers have three leading dimensions; together they have four."""
    monkeypatch.delattr(triton_launch, "_copy")
    shape = (2, 3, 2, 3, HEAD_DIM)
    source = filled(Layout((0, 1, 2, 3), (0, 1, 1, 1)), shape, torch.float32)
    out = buffers(form, shape, Layout((0, 1, 2, 3), (1, 1, 1, 0)))
    assert_as_reference(source, form, out=out)


@every_family
def test_one_row_many_times(form: str) -> None:
    assert_as_reference(filled(packed(0), (HEAD_DIM,), torch.bfloat16).expand(5, 3, -1), form)


@every_family
def test_a_negative_view_and_a_tensor_with_gradients(form: str) -> None:
    source = filled(packed(2), (3, 2, HEAD_DIM), torch.float32)
    assert_as_reference(torch._neg_view(source), form)
    assert_as_reference(source.requires_grad_(), form)


def test_scales_of_heads_lie_anywhere() -> None:
    source = filled(packed(2), (3, 4, HEAD_DIM), torch.float32)
    negated = torch._neg_view(torch.linspace(-1, -0.01, 4))
    for scale in (torch.linspace(0.01, 1, 8)[1::2], torch.tensor([0.07]).expand(4), negated):
        assert_as_reference(source, "fp8_e4m3", scale)
        codes = reference(source, scale, "fp8_e4m3")
        expected = cpu_reference.dequantize_kv(codes, torch.float32, CPU)
        assert torch.equal(triton_launch.dequantize(codes, torch.float32), expected)


@pytest.mark.parametrize("scattered_part", [0, 1])
def test_codes_and_block_scales_may_lie_differently(scattered_part: int) -> None:
    source = filled(packed(2), (5, 3, HEAD_DIM), torch.float32)
    layouts_of_parts = [packed(2), packed(2)]
    layouts_of_parts[scattered_part] = scattered(2)
    data, _ = buffers(NVFP4, source.shape, layouts_of_parts[0])
    _, block_scales = buffers(NVFP4, source.shape, layouts_of_parts[1])
    out = OutBuffers(data, block_scales)
    assert_as_reference(source, NVFP4, out=out)
    codes = QuantizedKV(*out, scale_for(NVFP4), NVFP4)
    expected = cpu_reference.dequantize_kv(codes, torch.float32, CPU)
    assert torch.equal(triton_launch.dequantize(codes, torch.float32), expected)


@every_format
@pytest.mark.parametrize("scale", [0.01, 1e38])
def test_bits_of_any_kind(form: str, scale: float) -> None:
    """Signalling NaN among them, and infinity times a reciprocal that is 0."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (64, 4, HEAD_DIM), generator=generator).to(torch.int32)
    source = bits.view(torch.float32)
    source[0, 0, 0] = float("inf")
    got, expected = (each(source, torch.tensor([scale]), form) for each in (quantized, reference))
    if form == NVFP4:
        assert_same_codes(got, expected)
    else:
        nan = expected.data.float().isnan()
        assert torch.equal(got.data.float().isnan(), nan)
        assert torch.equal(got.data.view(torch.uint8)[~nan], expected.data.view(torch.uint8)[~nan])


# More than 32 bits.


def huge(dtype: torch.dtype, length: int) -> torch.Tensor:
    """Two rows that are too far apart for 32 bits; memory that is not touched costs nothing."""
    return torch.empty(2**31 + 64, dtype=dtype).as_strided((2, length), (2**31, 1))


@every_family
def test_rows_far_apart(form: str, launches: Launches) -> None:
    source = huge(torch.bfloat16, HEAD_DIM)
    source.copy_(filled(packed(1), (2, HEAD_DIM), torch.bfloat16))
    assert_as_reference(source, form)
    near = source.contiguous()
    scales = huge(torch.float8_e4m3fn, 2) if form == NVFP4 else None
    codes = torch.uint8 if form == NVFP4 else FP8[form]
    out = OutBuffers(huge(codes, HEAD_DIM // 2 if form == NVFP4 else HEAD_DIM), scales)
    assert_as_reference(near, form, out=out)
    quantized_there = QuantizedKV(*out, scale_for(form), form)
    expected = cpu_reference.dequantize_kv(reference(near, scale_for(form), form), near.dtype, CPU)
    assert torch.equal(triton_launch.dequantize(quantized_there, near.dtype), expected)
    assert launches.options("WIDE") == [True, True, True]


@triton.jit
def last_number(out: Any, wide: tl.constexpr, block: tl.constexpr) -> None:
    if tl.program_id(0) == tl.num_programs(0) - 1:
        tl.store(out, tl.max(triton_kernels._elements(wide, block), 0))


def test_elements_are_numbered_past_32_bits() -> None:
    """With the largest block there is, for it takes the fewest programs to get there."""
    programs, block = 2**11 + 1, 2**20
    out = torch.zeros(1, dtype=torch.int64)
    last_number[(programs,)](out, wide=True, block=block)
    assert out.item() == programs * block - 1


def of_count(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8, device="meta")


def test_elements_are_numbered_in_64_bits_where_32_do_not_do() -> None:
    """The last program numbers more elements than there are."""
    largest = 2**31 - 1
    assert not triton_launch._is_wide(of_count(largest - 4096), of_count(1))
    assert triton_launch._is_wide(of_count(largest - 4095), of_count(1))
    assert triton_launch._is_wide(of_count(1), of_count(2**31))
    row = torch.empty(1, device="meta")
    assert triton_launch._is_wide(row.expand(2**31))
    assert not triton_launch._is_wide(row.expand(1000).as_strided((1, 1000), (2**40, 0)))


@every_format
@pytest.mark.parametrize("layout", [packed(3), scattered(3)], ids=["packed", "scattered"])
def test_64_bits_find_what_32_do(
    form: str, layout: Layout, monkeypatch: pytest.MonkeyPatch, launches: Launches
) -> None:
    monkeypatch.setattr(triton_launch, "_is_wide", lambda *tensors: True)
    source = filled(layout, (7, 9, 2, HEAD_DIM), torch.float32)
    out = buffers(form, source.shape, layout)
    scale = scale_for(form, None if form == NVFP4 else 2)
    assert_as_reference(source, form, scale, out)
    codes = QuantizedKV(*out, scale, form)
    expected = cpu_reference.dequantize_kv(codes, torch.float32, CPU)
    assert torch.equal(triton_launch.dequantize(codes, torch.float32), expected)
    assert launches.options("WIDE") == [True, True]


# K and V.


def pair(
    keys: torch.Tensor,
    values: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor],
    form: str,
    outs: tuple[OutBuffers, OutBuffers] | None = None,
) -> tuple[QuantizedKV, ...] | None:
    return triton_launch.quantize((keys, values), scales, form, GPU, outs)


@every_format
@pytest.mark.parametrize("layout", [packed(2), scattered(2)], ids=["packed", "scattered"])
def test_k_and_v_in_one_launch(form: str, layout: Layout, launches: Launches) -> None:
    shape = (150, 2, HEAD_DIM)
    keys = filled(layout, shape, torch.bfloat16)
    values = filled(layout, shape, torch.bfloat16).mul_(-3)
    scales = (scale_for(form), scale_for(form) * 2)
    outs = (buffers(form, shape, layout), buffers(form, shape, layout))
    for given_outs in (None, outs):
        answer = pair(keys, values, scales, form, given_outs)
        assert answer is not None
        for got, tensor, scale in zip(answer, (keys, values), scales, strict=True):
            assert got.scale is scale
            assert_same_codes(got, reference(tensor, scale, form))
    assert all(got.data is out.data for got, out in zip(answer, outs, strict=True))
    assert len(launches.seen) == 2
    assert {grid[1] for _, grid, _ in launches.seen} == {2}


def test_k_and_v_where_they_lie_in_an_engine(launches: Launches) -> None:
    """Slices of one projection, and the two halves of a cache block, aligned otherwise."""
    tokens, heads = 6, 3
    projected = filled(packed(1), (tokens, 4 * heads * HEAD_DIM + 8), torch.bfloat16)
    first, last = (heads * HEAD_DIM + at for at in (0, heads * HEAD_DIM + 1))
    keys, values = (
        projected[:, at : at + heads * HEAD_DIM].unflatten(1, (heads, HEAD_DIM))
        for at in (first, last)
    )
    cache = torch.full((tokens, 2, heads, HEAD_DIM), POISON, dtype=torch.uint8)
    outs = tuple(OutBuffers(cache[:, side].view(torch.float8_e4m3fn)) for side in (0, 1))
    scales = (scale_for("fp8_e4m3", heads), scale_for("fp8_e4m3", heads) * 3)
    answer = pair(keys, values, scales, "fp8_e4m3", (outs[0], outs[1]))
    assert answer is not None
    for got, tensor, scale in zip(answer, (keys, values), scales, strict=True):
        assert_same_codes(got, reference(tensor, scale, "fp8_e4m3"))
    assert len(launches.seen) == 1


def unlike_pairs() -> list[Any]:
    shape = (4, 2, HEAD_DIM)
    one = scale_for("fp8_e4m3")
    keys = filled(packed(2), shape, torch.bfloat16)
    unlike = {
        "shape": filled(packed(2), (4, 2, 2 * HEAD_DIM), torch.bfloat16),
        "dtype": keys.half(),
        "strides": filled(scattered(2), shape, torch.bfloat16),
    }
    outs = [buffers("fp8_e4m3", shape, layout) for layout in (packed(2), scattered(2))]
    return [
        *(pytest.param(values, (one, one), None, id=name) for name, values in unlike.items()),
        pytest.param(keys, (one, scale_for("fp8_e4m3", 2)), None, id="scales"),
        pytest.param(keys, (one, one), outs, id="out"),
    ]


@pytest.mark.parametrize(("values", "scales", "outs"), unlike_pairs())
def test_k_and_v_that_are_given_otherwise_are_passed(
    values: torch.Tensor, scales: Any, outs: Any, launches: Launches
) -> None:
    keys = filled(packed(2), (4, 2, HEAD_DIM), torch.bfloat16)
    assert pair(keys, values, scales, "fp8_e4m3", outs) is None
    assert launches.seen == []
    for out in outs or ():
        assert (memory_of(out.data) == POISON).all()


# The GPU.


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """``torch.cuda`` of a machine where GPU 0 is the current one."""
    entered: list[torch.device] = []

    @contextlib.contextmanager
    def device(chosen: torch.device) -> Iterator[None]:
        entered.append(chosen)
        yield

    cuda = SimpleNamespace(current_device=lambda: 0, device=device, entered=entered)
    monkeypatch.setattr(torch, "cuda", cuda)
    return cuda


@pytest.mark.parametrize(("name", "others"), [("cpu", []), ("cuda:0", []), ("cuda:1", ["cuda:1"])])
def test_the_gpu_of_the_tensors_is_the_current_one(
    name: str, others: list[str], cuda: SimpleNamespace
) -> None:
    with triton_launch._on(torch.device(name)):
        assert cuda.entered == [torch.device(other) for other in others]


@every_family
def test_kernels_are_launched_on_it(
    form: str, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[torch.device] = []

    @contextlib.contextmanager
    def on(device: torch.device) -> Iterator[None]:
        entered.append(device)
        before = len(launches.seen)
        yield
        assert len(launches.seen) == before + 1

    monkeypatch.setattr(triton_launch, "_on", on)
    source = filled(packed(2), (3, 2, HEAD_DIM), torch.float32)
    triton_launch.dequantize(quantized(source, scale_for(form), form), torch.float32)
    assert entered == [source.device, source.device]
