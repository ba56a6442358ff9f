"""What ``quantize_kv`` and ``dequantize_kv`` refuse, with which words, and what they never do."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kvcache_plugin as kv

if TYPE_CHECKING:
    from collections.abc import Callable

INF = float("inf")
NAN = float("nan")
TOKENS, HEADS, HEAD_DIM = 5, 3, 32
SHAPE = (TOKENS, HEADS, HEAD_DIM)
FP8_DTYPES = {
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "fp8_e4m3fnuz": torch.float8_e4m3fnuz,
}
FP8_NAMES = tuple(FP8_DTYPES)
NVFP4 = "nvfp4"
NAMES = (*FP8_NAMES, NVFP4)
BLOCK_SIZE = 16
#: Half of the smallest float32 rounds to 0, and the next number above it does not.
ROUNDS_TO_ZERO = 2.0**-150

every_format = pytest.mark.parametrize("name", NAMES)
every_fp8 = pytest.mark.parametrize("name", FP8_NAMES)


def values(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(*(shape or SHAPE), generator=generator).to(dtype)


def refused(call: Callable[[], Any], *parts: str) -> str:
    """The message of the error, which says each of these parts."""
    with pytest.raises(kv.KVQuantizeError) as caught:
        call()
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, kv.KVCacheError)
    message = str(caught.value)
    for part in parts:
        assert part in message, f"{part!r} is not in {message!r}"
    return message


# Scales on another device.


@pytest.mark.parametrize(("scale_device", "tensor_device"), [("cpu", "meta"), ("meta", "cpu")])
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (NVFP4, "NVFP4 global scale tensor must already be on the KV tensor device."),
        *(
            (name, "FP8 scale tensor must already be on the KV tensor device.")
            for name in FP8_NAMES
        ),
    ],
)
@pytest.mark.parametrize("scale_shape", [(), (1,), (HEADS,)])
def test_a_scale_on_another_device(
    scale_device: str,
    tensor_device: str,
    name: str,
    sentence: str,
    scale_shape: tuple[int, ...],
) -> None:
    scale = torch.ones(scale_shape, device=scale_device)
    tensor = torch.zeros(SHAPE, device=tensor_device)
    message = refused(lambda: kv.quantize_kv(tensor, scale, name), sentence)
    rest = message.replace(sentence, "")
    assert f"on {scale_device}" in rest
    assert f"on {tensor_device}" in rest


@every_format
def test_a_scale_on_another_device_beside_empty_values(name: str) -> None:
    tensor = torch.zeros(0, HEADS, HEAD_DIM)
    refused(
        lambda: kv.quantize_kv(tensor, torch.ones(1, device="meta"), name),
        "must already be on the KV tensor device.",
    )


# K or V.


@pytest.mark.parametrize("head_dim", [1, 8, 15, 17, 24, 40, 127])
@pytest.mark.parametrize("lead", [(), (TOKENS, HEADS), (0,)])
def test_nvfp4_head_dim(head_dim: int, lead: tuple[int, ...]) -> None:
    message = refused(
        lambda: kv.quantize_kv(torch.zeros(*lead, head_dim), 1.0, NVFP4),
        NVFP4,
        f"head_dim={head_dim}",
        "multiple of 16",
        str((*lead, head_dim)),
    )
    assert "FP8" in message  # the way out


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool, torch.float64),
        *(torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz),
    ],
    ids=str,
)
@every_format
def test_dtype_of_k_or_v(dtype: torch.dtype, name: str) -> None:
    tensor = torch.zeros(SHAPE).to(dtype)
    refused(
        lambda: kv.quantize_kv(tensor, 1.0, name),
        *(str(dtype), name, str(SHAPE), "float32", "bfloat16", "float16"),
    )


@every_format
def test_k_or_v_without_dimensions(name: str) -> None:
    refused(lambda: kv.quantize_kv(torch.tensor(1.0), 1.0, name), "[..., head_dim]", "()")


@pytest.mark.parametrize("tensor", [None, 1.0, [1.0] * 16, np.zeros(16, np.float32), "k"])
@every_format
def test_k_or_v_that_is_no_tensor(tensor: Any, name: str) -> None:
    refused(lambda: kv.quantize_kv(tensor, 1.0, name), "tensor", type(tensor).__name__)


@pytest.mark.parametrize("name", ["fp4", "auto", "", "float8_e4m3fn"])
def test_an_unknown_format_lists_the_known(name: str) -> None:
    message = refused(lambda: kv.quantize_kv(values(), 1.0, name), repr(name))
    for known in ("fp8", *NAMES):
        assert f" {known}" in message


@pytest.mark.parametrize("name", [None, 8, torch.float8_e4m3fn])
def test_a_format_that_is_no_name(name: Any) -> None:
    refused(lambda: kv.quantize_kv(values(), 1.0, name), repr(name), NVFP4)


# Scales: numbers.


@pytest.mark.parametrize(
    "scale",
    [
        *(0, 0.0, -0.0, -1, -0.05, NAN, INF, -INF, 1e300, 1e-60, 3.5e38, 10**400, -(10**400)),
        *(ROUNDS_TO_ZERO, np.float32("nan"), np.float64(0.0), np.float16("inf")),
    ],
    ids=lambda scale: repr(scale)[:20],
)
@every_format
def test_numbers_that_are_no_scale(scale: float, name: str) -> None:
    refused(
        lambda: kv.quantize_kv(values(), scale, name),
        *("finite and > 0", repr(scale)[:20], "validate_kv_scales"),
    )


@pytest.mark.parametrize(
    "scale",
    [True, False, np.bool_(True), "0.05", b"1", None, [1.0], (1.0,), 1j, np.ones(1)],
    ids=repr,
)
@every_format
def test_what_is_no_number(scale: Any, name: str) -> None:
    refused(
        lambda: kv.quantize_kv(values(), scale, name),
        *("number", "tensor", type(scale).__name__, repr(scale), "validate_kv_scales"),
    )


@every_format
def test_the_smallest_number_that_is_a_scale(name: str) -> None:
    smallest = np.nextafter(ROUNDS_TO_ZERO, 1)
    result = kv.quantize_kv(values(), float(smallest), name)
    assert result.scale.tolist() == [2.0**-149]


# Scales: tensors.


@pytest.mark.parametrize(
    "dtype", [torch.int32, torch.int64, torch.uint8, torch.bool, torch.complex64], ids=str
)
@pytest.mark.parametrize("shape", [(), (1,), (HEADS,)])
@every_format
def test_scale_tensors_that_are_not_floating(
    dtype: torch.dtype, shape: tuple[int, ...], name: str
) -> None:
    scale = torch.ones(shape, dtype=dtype)
    refused(lambda: kv.quantize_kv(values(), scale, name), "floating-point", str(dtype))


def _torch_float_dtypes() -> list[torch.dtype]:
    found = {d for d in vars(torch).values() if isinstance(d, torch.dtype) and d.is_floating_point}
    return sorted(found, key=str)


@pytest.mark.parametrize("dtype", _torch_float_dtypes(), ids=str)
@every_format
def test_scale_tensors_of_every_floating_dtype(dtype: torch.dtype, name: str) -> None:
    """Packed float4 has two values in one element, and so is no scale; the others are."""
    packed = "float4" in str(dtype)
    nbytes = 1 if packed else torch.finfo(dtype).bits // 8
    scale = torch.full((nbytes,), 0x38, dtype=torch.uint8).view(dtype)
    assert scale.numel() == 1
    if packed:
        refused(lambda: kv.quantize_kv(values(), scale, name), str(dtype))
    else:
        assert kv.quantize_kv(values(), scale, name).scale.item() > 0


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1)])
@every_format
def test_one_scale_of_any_shape_is_the_same_scale(shape: tuple[int, ...], name: str) -> None:
    expected = kv.quantize_kv(values(), torch.tensor([0.03125]), name)
    for scale in (0.03125, torch.full(shape, 0.03125, dtype=torch.float64)):
        got = kv.quantize_kv(values(), scale, name)
        assert torch.equal(got.scale, expected.scale)
        assert torch.equal(got.data.view(torch.uint8), expected.data.view(torch.uint8))


@pytest.mark.parametrize(
    "shape",
    [(0,), (2,), (HEADS + 1,), (TOKENS,), (HEAD_DIM,), (HEADS, 1), (1, HEADS), (HEADS, 1, 1)],
)
@every_fp8
def test_fp8_scale_shapes(shape: tuple[int, ...], name: str) -> None:
    scale = torch.ones(shape)
    refused(
        lambda: kv.quantize_kv(values(), scale, name),
        *("FP8 scale", "[H]", "[..., H, head_dim]", str(shape), str(SHAPE)),
    )


@every_fp8
def test_one_scale_per_head_needs_heads(name: str) -> None:
    scale = torch.ones(HEAD_DIM)
    refused(lambda: kv.quantize_kv(values(HEAD_DIM), scale, name), "[H]", f"({HEAD_DIM},)")


@pytest.mark.parametrize("shape", [(0,), (2,), (HEADS,), (HEADS, 1, 1)])
def test_nvfp4_scale_shapes(shape: tuple[int, ...]) -> None:
    scale = torch.ones(shape)
    refused(
        lambda: kv.quantize_kv(values(), scale, NVFP4),
        *("NVFP4 global scale", "one element", str(shape)),
    )


# Buffers of the caller.


def buffers(name: str, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor | None]:
    if name != NVFP4:
        return torch.zeros(SHAPE, device=device).to(FP8_DTYPES[name]), None
    data = torch.zeros(TOKENS, HEADS, HEAD_DIM // 2, dtype=torch.uint8, device=device)
    scales = torch.zeros(TOKENS, HEADS, HEAD_DIM // BLOCK_SIZE, device=device)
    return data, scales.to(torch.float8_e4m3fn)


def refused_out(name: str, out: Any, *parts: str) -> None:
    tensor = values()
    refused(lambda: kv.quantize_kv(tensor, 1.0, name, out=out), "out", *parts)


@every_format
def test_buffers_that_fit_are_taken(name: str) -> None:
    assert kv.quantize_kv(values(), 1.0, name, out=buffers(name)).data.shape[0] == TOKENS


@pytest.mark.parametrize(
    "reshape",
    [
        lambda t: t[:-1],
        lambda t: t[..., :-1],
        lambda t: t[0],
        lambda t: t.flatten(),
        lambda t: t[None],
    ],
    ids=["tokens", "head_dim", "dimensions", "flat", "one more dimension"],
)
@every_format
def test_data_buffer_of_another_shape(
    reshape: Callable[[torch.Tensor], torch.Tensor], name: str
) -> None:
    data, block_scales = buffers(name)
    wrong = reshape(data)
    refused_out(
        name, (wrong, block_scales), "data", str(tuple(wrong.shape)), str(tuple(data.shape))
    )


@every_format
def test_data_buffer_of_the_unpacked_or_packed_shape(name: str) -> None:
    """Half of head_dim is right for NVFP4 alone."""
    data, block_scales = buffers(name)
    other = HEAD_DIM if name == NVFP4 else HEAD_DIM // 2
    wrong = torch.zeros(TOKENS, HEADS, other).to(data.dtype)
    refused_out(name, (wrong, block_scales), "data", str(tuple(wrong.shape)))


@pytest.mark.parametrize(
    "dtype",
    [
        torch.int8,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e4m3fnuz,
        torch.uint8,
    ],
    ids=str,
)
@every_format
def test_data_buffer_of_another_dtype(dtype: torch.dtype, name: str) -> None:
    data, block_scales = buffers(name)
    wrong = torch.zeros(data.shape).to(dtype)
    if dtype == data.dtype:
        assert kv.quantize_kv(values(), 1.0, name, out=(wrong, block_scales)).data is wrong
    else:
        refused_out(name, (wrong, block_scales), "data", str(dtype), str(data.dtype))


@every_format
def test_buffers_on_another_device(name: str) -> None:
    data, block_scales = buffers(name)
    elsewhere = buffers(name, "meta")
    refused_out(name, (elsewhere[0], block_scales), "data", "meta", "cpu")
    if block_scales is not None:
        refused_out(name, (data, elsewhere[1]), "block_scales", "meta", "cpu")


@pytest.mark.parametrize(
    ("wrong", "parts"),
    [
        (torch.zeros(TOKENS, HEADS, 1).to(torch.float8_e4m3fn), ("(5, 3, 1)", "(5, 3, 2)")),
        (torch.zeros(TOKENS * HEADS * 2).to(torch.float8_e4m3fn), ("(30,)", "(5, 3, 2)")),
        (torch.zeros(TOKENS, HEADS, 2), ("torch.float32", "torch.float8_e4m3fn")),
        (torch.zeros(TOKENS, HEADS, 2, dtype=torch.uint8), ("torch.uint8", "torch.float8_e4m3fn")),
        (torch.zeros(TOKENS, HEADS, 2).to(torch.float8_e4m3fnuz), ("torch.float8_e4m3fnuz",)),
        (None, ("NoneType", "torch.float8_e4m3fn")),
        ([1.0], ("list",)),
    ],
    ids=["shape", "flat", "float32", "uint8", "fnuz", "none", "list"],
)
def test_block_scale_buffers(wrong: Any, parts: tuple[str, ...]) -> None:
    data, _ = buffers(NVFP4)
    refused_out(NVFP4, (data, wrong), "block_scales", *parts)


def test_nvfp4_needs_both_buffers() -> None:
    data, _ = buffers(NVFP4)
    for out in (data, (data,), kv.QuantizedKV(data, None, torch.ones(1), NVFP4)):
        refused_out(NVFP4, out, "block_scales")


@every_fp8
def test_fp8_has_no_block_scales(name: str) -> None:
    data, _ = buffers(name)
    block_scales = torch.zeros(TOKENS, HEADS, 2).to(torch.float8_e4m3fn)
    refused_out(name, (data, block_scales), "block_scales", name)


@pytest.mark.parametrize(
    "out",
    [1, "out", {}, [], (), (None, None, None), np.zeros(3), object()],
    ids=lambda o: repr(o)[:12],
)
@every_format
def test_out_of_another_kind(out: Any, name: str) -> None:
    refused_out(name, out, "QuantizedKV", type(out).__name__)


@every_format
@pytest.mark.parametrize("field", ["data", "block_scales"])
def test_out_whose_elements_share_their_place(field: str, name: str) -> None:
    whole = kv.quantize_kv(values(), 0.5, name)
    parts = {"data": whole.data, "block_scales": whole.block_scales}
    if parts[field] is None:
        field = "data"
    part = parts[field]
    assert part is not None
    parts[field] = torch.zeros_like(part[:1]).expand(part.shape)
    refused_out(name, (parts["data"], parts["block_scales"]), field, "not expanded")


@every_format
def test_out_as_a_list(name: str) -> None:
    refused_out(name, list(buffers(name)), "tuple", "list")


@pytest.mark.parametrize("wrong", [None, 1.0, [1.0]])
@every_format
def test_data_buffer_that_is_no_tensor(wrong: Any, name: str) -> None:
    refused_out(name, (wrong, buffers(name)[1]), "data", type(wrong).__name__)


@every_format
def test_refused_buffers_are_left_as_they_are(name: str) -> None:
    data, block_scales = buffers(name)
    wrong = data[:-1]
    before = wrong.view(torch.uint8).clone(), wrong._version
    refused_out(name, (wrong, block_scales))
    assert torch.equal(wrong.view(torch.uint8), before[0])
    assert wrong._version == before[1]


# What dequantize_kv refuses.

fp8_result = pytest.fixture(lambda: kv.quantize_kv(values(), 0.05, "fp8_e4m3"), name="fp8")
nvfp4_result = pytest.fixture(lambda: kv.quantize_kv(values(), 0.05, NVFP4), name="nvfp4")


def refused_back(quantized: Any, *parts: str, **options: Any) -> None:
    refused(lambda: kv.dequantize_kv(quantized, **options), *parts)


@pytest.mark.parametrize("quantized", [None, 1, torch.zeros(16), (torch.zeros(16), None)])
def test_dequantize_takes_quantized_kv(quantized: Any) -> None:
    refused_back(quantized, "QuantizedKV", type(quantized).__name__)


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.int8, torch.uint8, torch.float8_e4m3fn, "bfloat16", None],
    ids=str,
)
def test_dequantize_to_another_dtype(fp8: kv.QuantizedKV, dtype: Any) -> None:
    refused_back(fp8, str(dtype), "float32, bfloat16 or float16", dtype=dtype)


@pytest.mark.parametrize("name", ["fp4", "auto", ""])
def test_dequantize_unknown_format(fp8: kv.QuantizedKV, name: str) -> None:
    refused_back(replace(fp8, kv_cache_dtype=name), repr(name), NVFP4)


@pytest.mark.parametrize("name", [None, 8, torch.float8_e4m3fn])
def test_dequantize_format_that_is_no_name(fp8: kv.QuantizedKV, name: Any) -> None:
    refused_back(replace(fp8, kv_cache_dtype=name), repr(name))


@pytest.mark.parametrize("name", ["fp8_e5m2", "fp8_e4m3fnuz", NVFP4])
def test_dequantize_codes_of_another_format(fp8: kv.QuantizedKV, name: str) -> None:
    refused_back(replace(fp8, kv_cache_dtype=name), "data", "torch.float8_e4m3fn")


def test_dequantize_nvfp4_codes_as_fp8(nvfp4: kv.QuantizedKV) -> None:
    refused_back(replace(nvfp4, kv_cache_dtype="fp8_e4m3"), "data", "torch.uint8")


def test_dequantize_nvfp4_without_block_scales(nvfp4: kv.QuantizedKV) -> None:
    refused_back(replace(nvfp4, block_scales=None), "block_scales", "torch.float8_e4m3fn")


def test_dequantize_fp8_with_block_scales(fp8: kv.QuantizedKV, nvfp4: kv.QuantizedKV) -> None:
    refused_back(replace(fp8, block_scales=nvfp4.block_scales), "fp8_e4m3", "block_scales")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda s: s[:-1],
        lambda s: s[..., :-1],
        lambda s: s.flatten(),
        lambda s: s.view(torch.uint8),
        lambda s: s.float(),
        lambda s: s.to("meta"),
    ],
    ids=["tokens", "blocks", "flat", "uint8", "float32", "device"],
)
def test_dequantize_other_block_scales(
    nvfp4: kv.QuantizedKV, spoil: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    assert nvfp4.block_scales is not None
    refused_back(replace(nvfp4, block_scales=spoil(nvfp4.block_scales)), "block_scales")


@pytest.mark.parametrize("width", [1, 7, 12])
def test_dequantize_nvfp4_data_that_is_no_multiple(nvfp4: kv.QuantizedKV, width: int) -> None:
    data = nvfp4.data[..., :width]
    refused_back(replace(nvfp4, data=data), f"head_dim={2 * width}", "16", str(tuple(data.shape)))


@pytest.mark.parametrize("kind", ["fp8", "nvfp4"])
def test_dequantize_data_without_dimensions(kind: str, request: pytest.FixtureRequest) -> None:
    quantized = request.getfixturevalue(kind)
    refused_back(replace(quantized, data=quantized.data.flatten()[0]), "()")


@pytest.mark.parametrize("kind", ["fp8", "nvfp4"])
@pytest.mark.parametrize("data", [None, 1, [1]])
def test_dequantize_data_that_is_no_tensor(
    kind: str, data: Any, request: pytest.FixtureRequest
) -> None:
    refused_back(replace(request.getfixturevalue(kind), data=data), "data", type(data).__name__)


@pytest.mark.parametrize("kind", ["fp8", "nvfp4"])
@pytest.mark.parametrize("scale", [None, 0.05, [0.05]])
def test_dequantize_scale_that_is_no_tensor(
    kind: str, scale: Any, request: pytest.FixtureRequest
) -> None:
    refused_back(replace(request.getfixturevalue(kind), scale=scale), "scale", type(scale).__name__)


@pytest.mark.parametrize("kind", ["fp8", "nvfp4"])
@pytest.mark.parametrize(
    ("scale", "part"),
    [
        (torch.ones(1, dtype=torch.float64), "torch.float64"),
        (torch.ones(1, dtype=torch.bfloat16), "torch.bfloat16"),
        (torch.ones(1, dtype=torch.int32), "torch.int32"),
        (torch.ones(1, device="meta"), "meta"),
        (torch.ones(2), "(2,)"),
        (torch.ones(0), "(0,)"),
        (torch.ones(HEADS, 1), "(3, 1)"),
    ],
    ids=["float64", "bfloat16", "int32", "device", "two", "none", "column"],
)
def test_dequantize_other_scales(
    kind: str, scale: torch.Tensor, part: str, request: pytest.FixtureRequest
) -> None:
    refused_back(replace(request.getfixturevalue(kind), scale=scale), "scale", part)


def test_dequantize_nvfp4_has_no_scale_per_head(nvfp4: kv.QuantizedKV) -> None:
    refused_back(replace(nvfp4, scale=torch.ones(HEADS)), "scale", f"({HEADS},)")


# Nothing is read, nothing crosses devices.

_READS = {
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::is_nonzero",
    "aten::item",
    "aten::masked_select",
    "aten::nonzero",
    "aten::unique2",
}
_COPIES = {"aten::_to_copy", "aten::copy_", "aten::copy"}
#: torch.tensor(...): a constant of the host, copied where the device is another one.
_HOST_CONSTANT = "aten::lift_fresh"


class _NoSyncError(Exception):
    pass


class NoSync(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fails where a value is read by the host, or goes from one device to another."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        self.seen.add(name)
        if name in _READS or name == _HOST_CONSTANT:
            raise _NoSyncError(f"{name} reads a value, or makes a constant of the host's")
        result = func(*args, **kwargs)
        if name in _COPIES:
            tensors = [t for t in (*args, result) if isinstance(t, torch.Tensor)]
            if len({tensor.device for tensor in tensors}) > 1:
                raise _NoSyncError(f"{name} copies across devices")
        return result


@pytest.mark.parametrize(
    "action",
    [
        lambda: torch.ones(1).item(),
        lambda: bool(torch.ones(1) > 0),
        lambda: float(torch.ones(1)),
        lambda: torch.ones(3)[torch.tensor([True, False, True])],
        lambda: torch.ones(1).to("meta"),
        lambda: torch.ones(1, device="meta").copy_(torch.ones(1)),
        lambda: torch.tensor([1.0, 2.0]),
    ],
    ids=["item", "bool", "float", "mask", "to", "copy_", "constant"],
)
def test_the_watch_sees_what_it_is_to_see(action: Callable[[], Any]) -> None:
    with pytest.raises(_NoSyncError), NoSync():
        action()


@every_format
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("with_out", [False, True], ids=["new", "out"])
@pytest.mark.parametrize("kind", ["number", "0-d", "(1,)", "float64", "per head"])
def test_quantizing_reads_nothing(name: str, device: str, with_out: bool, kind: str) -> None:
    if kind == "per head" and name == NVFP4:
        kind = "(1,)"
    scale: Any = {
        "number": 0.05,
        "0-d": torch.ones((), device=device),
        "(1,)": torch.ones(1, device=device),
        "float64": torch.ones(1, dtype=torch.float64, device=device),
        "per head": torch.ones(HEADS, device=device),
    }[kind]
    tensor = values().to(device)
    out = buffers(name, device) if with_out else None
    kv.quantize_kv(tensor, scale, name)  # the choice of an implementation is made once
    with NoSync() as watch:
        result = kv.quantize_kv(tensor, scale, name, out=out)
    # With buffers to fill, the C kernels of the CPU need no operation of torch's.
    assert watch.seen or (with_out and device == "cpu")
    assert {result.data.device.type, result.scale.device.type} == {device}


@pytest.mark.parametrize("value", [NAN, INF, -1.0, 0.0])
@every_format
def test_the_value_of_a_scale_tensor_is_not_looked_at(value: float, name: str) -> None:
    """A check would need the value; validate_kv_scales has made it at load."""
    result = kv.quantize_kv(values(), torch.tensor([value]), name)
    assert np.array_equal(result.scale.numpy(), np.array([value], np.float32), equal_nan=True)


@every_format
def test_dequantizing_reads_no_value(name: str) -> None:
    """Only the table of e2m1 is a constant of the host's."""
    quantized = kv.quantize_kv(values(), 0.05, name)

    class Watch(NoSync):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func._schema.name == _HOST_CONSTANT:
                return func(*args, **(kwargs or {}))
            return super().__torch_dispatch__(func, types, args, kwargs)

    with Watch() as watch:
        kv.dequantize_kv(quantized, dtype=torch.float32)
    assert watch.seen


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize(
    "special",
    [
        lambda: torch.ones(4, 64).to_sparse(),
        lambda: torch.ones(4, 64).to_sparse_csr(),
        lambda: torch.nested.nested_tensor([torch.ones(2, 64), torch.ones(3, 64)]),
    ],
    ids=["sparse", "sparse csr", "nested"],
)
def test_tensors_of_a_special_layout_are_refused(special: Callable[[], torch.Tensor]) -> None:
    with pytest.raises(kv.KVQuantizeError, match="must be a plain tensor"):
        kv.quantize_kv(special(), 0.5, "fp8")


def test_scales_of_a_special_layout_are_refused() -> None:
    sparse = torch.ones(1).to_sparse()
    with pytest.raises(kv.KVQuantizeError, match=r"plain layout, got .*sparse"):
        kv.quantize_kv(torch.ones(4, 64), sparse, "fp8")
    with pytest.raises(kv.KVScaleError, match=r"k_scale must be a plain .*sparse"):
        kv.validate_kv_scales(sparse, 1.0, kv_cache_dtype="fp8")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
@pytest.mark.parametrize(
    "special",
    [
        lambda: torch.zeros(4, 64).to_sparse(),
        lambda: torch.nested.nested_tensor([torch.ones(2, 64), torch.ones(3, 64)]),
    ],
    ids=["sparse", "nested"],
)
def test_buffers_of_a_special_layout_are_refused(special: Callable[[], torch.Tensor]) -> None:
    with pytest.raises(kv.KVQuantizeError, match="out: data must be a plain tensor"):
        kv.quantize_kv(torch.ones(4, 64), 0.5, "fp8", out=special())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_a_nested_scale_is_refused() -> None:
    nested = torch.nested.nested_tensor([torch.ones(1)])
    with pytest.raises(kv.KVQuantizeError, match=r"plain layout, got torch\.float32 of nested"):
        kv.quantize_kv(torch.ones(4, 64), nested, "fp8")


def test_a_scale_that_requires_grad_is_detached() -> None:
    result = kv.quantize_kv(torch.ones(4, 64), torch.ones(1, requires_grad=True), "fp8")
    assert not result.scale.requires_grad


def test_a_format_remembers_no_more_than_some_shapes() -> None:
    kv_format = kv.KVFormat("remembers", "int8", "int8", 1.0, 2, 16, "uint8")
    for tokens in range(3000):
        assert kv_format.data_shape((tokens, 32)) == (tokens, 16)
        assert kv_format.block_scales_shape([tokens, 32]) == (tokens, 2)
    assert len(kv_format._known_shapes) <= 1024
