"""The rules for checkpoint scales: every case from the field, and every row of the tables."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import math
import pickle
import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import kvcache_plugin as kv
from kvcache_plugin.scales import _has_reciprocal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

CASES = Path(__file__).parent / "cases" / "scales.jsonl"
LAYER = "model.layers.3.self_attn.attn"
LOGGER = "kvcache_plugin"
FNUZ = "gfx942"

INF = float("inf")
NAN = float("nan")
FLOAT32_MAX = float(np.finfo(np.float32).max)
BEYOND_FLOAT32 = 1e300
NO_RECIPROCAL = 2.0**-128  # 1 / 2^-128 is 2^128, beyond float32
SMALLEST_WITH_RECIPROCAL = 2.0**-127
FLOAT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
FLOAT8_DTYPES = (
    *(torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
)
PER_TENSOR_SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1, 1))

sides = pytest.mark.parametrize("side", ["k", "v"])


def validate(k: Any, v: Any, device: str = "cpu", **options: Any) -> kv.KVScales:
    options = {"kv_cache_dtype": "fp8_e4m3", "layer": LAYER, **options}
    return kv.validate_kv_scales(k, v, device=device, **options)


def refused(k: Any, v: Any, device: str = "cpu", **options: Any) -> str:
    with pytest.raises(kv.KVScaleError) as caught:
        validate(k, v, device, **options)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, kv.KVCacheError)
    message = str(caught.value)
    assert message.startswith(f"{LAYER}: ")
    assert caught.value.layer == LAYER
    assert caught.value.problem in message
    assert caught.value.remedy in message
    return message


def refused_beside(side: str, scale: Any, other: Any = 1.0, **options: Any) -> str:
    """The message when the scale of one side is wrong and the other one is valid."""
    return refused(scale, other, **options) if side == "k" else refused(other, scale, **options)


def fields(scales: kv.KVScales) -> tuple[Any, Any, str, str]:
    return scales.k, scales.v, scales.k_source, scales.v_source


@pytest.fixture(autouse=True)
def warnings(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    # What loading the implementations says is not about scales.
    kv.explain("cpu", "fp8_e4m3")
    kv.explain(FNUZ, "fp8_e4m3")
    caplog.clear()
    caplog.set_level(logging.DEBUG, LOGGER)
    return caplog


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.name.split(".")[0] == LOGGER and record.levelno >= logging.WARNING
    ]


# The cases from the field, cases/scales.jsonl.


@dataclass(frozen=True)
class Case:
    """One line: what to pass, where the cache is, and what is logged meanwhile."""

    k: Any
    v: Any
    device: str
    warnings: pytest.LogCaptureFixture

    def error(self) -> str:
        message = refused(self.k, self.v, self.device)
        assert warned(self.warnings) == []
        return message

    def scales(self, **options: Any) -> kv.KVScales:
        return validate(self.k, self.v, self.device, **options)


def _error(*patterns: str) -> Callable[[Case], None]:
    def check(case: Case) -> None:
        message = case.error()
        for pattern in patterns:
            assert re.search(pattern, message), f"{pattern!r} is not in {message!r}"

    return check


def _served(*expected: Any, warning: tuple[str, ...] = ()) -> Callable[[Case], None]:
    def check(case: Case) -> None:
        assert fields(case.scales()) == expected
        lines = warned(case.warnings)
        assert len(lines) == bool(warning)
        assert all(part in line for line in lines for part in (LAYER, *warning))

    return check


def _three_passes(raw: float | None, expected: float) -> Callable[[Case], None]:
    def check(case: Case) -> None:
        scale = None if raw is None else torch.tensor(raw, dtype=torch.float64)
        for _ in range(3):
            scales = validate(scale, case.v, case.device)
            assert (scales.k, scales.v) == (expected, expected)
        assert scale is None or scale.item() == raw

    return check


def _per_head(case: Case) -> None:
    scales = case.scales(granularity="head", num_kv_heads=2)
    for scale, raw in ((scales.k, case.k), (scales.v, case.v)):
        assert isinstance(scale, torch.Tensor)
        assert scale.shape == (2,)
        assert scale.tolist() == [float(np.float32(value)) for value in raw.flatten().tolist()]
    assert (scales.k_source, scales.v_source) == ("checkpoint", "checkpoint")


def _fnuz_1e38(case: Case) -> None:
    scales = case.scales()
    assert scales.k == 2e38
    assert scales.k <= FLOAT32_MAX
    assert scales.v == 2.0


#: What each ``expect`` of the file means. The text is the key, so that a new one fails until it is
#: understood.
EXPECTATIONS: dict[str, Callable[[Case], None]] = {
    "KVScaleError: must be finite": _error("fp8 KV cache scales must be finite, got k_scale="),
    "KVScaleError: must be finite (v is not replaced by k)": _error(
        r"fp8 KV cache scales must be finite, got k_scale=1\.0 v_scale=-inf"
    ),
    "KVScaleError: per-tensor, both shapes named": _error(
        "Only support per-tensor scaling factor for fp8 KV cache, "
        r"got k_scale shape=\(2,\) v_scale shape=\(\)"
    ),
    "KVScaleError: per-tensor (shape before value)": _error(
        "Only support per-tensor scaling factor for fp8 KV cache, "
        r"got k_scale shape=\(2,\) v_scale shape=\(\)"
    ),
    "KVScaleError: fit in torch.float32": _error(
        r"fp8 KV cache scales must be finite and fit in torch\.float32, "
        r"got k_scale=6e\+38 v_scale=2\.0"
    ),
    "k=2e38 (within float32)": _fnuz_1e38,
    "1.0, 1.0, default": _served(1.0, 1.0, "default", "default"),
    "KVScaleError: v is corrupt, not a missing one": _error("v_scale=-0.3", "corrupt: v_scale"),
    "KVScaleError": _error("k_scale=0.05 v_scale=0.0"),
    "0.05, 0.05, k duplicated, warning": _served(
        0.05, 0.05, "duplicated", "checkpoint", warning=("v_scale=0.05",)
    ),
    "0.05, 0.05, v duplicated": _served(0.05, 0.05, "checkpoint", "duplicated"),
    "1.0, 1.0, default, warning with both values": _served(
        1.0, 1.0, "default", "default", warning=("k_scale=0.0", "v_scale=0.0")
    ),
    "KVScaleError: reciprocal is not finite in float32": _error("k_scale=1e-39", "reciprocal"),
    "KVScaleError: fit in torch.float32 (a number beyond float32)": _error(
        r"must be finite and fit in torch\.float32, got k_scale=1e\+300 v_scale=0\.05"
    ),
    "0.1 each time, never 0.2 or 0.4": _three_passes(0.05, 0.1),
    "1.0 each time": _three_passes(None, 1.0),
    "per head: tensors (2,), with granularity='head', num_kv_heads=2": _per_head,
    "0.05, 0.05: shape (1,) is per tensor": _served(0.05, 0.05, "checkpoint", "checkpoint"),
}


def _lines() -> list[dict[str, Any]]:
    return [json.loads(line) for line in CASES.read_text().splitlines() if line.strip()]


def _as_tensor(scale: Any) -> Any:
    """Numbers and lists as a checkpoint holds them, in float64 so that none is changed."""
    if isinstance(scale, (float, int, list)):
        return torch.tensor(scale, dtype=torch.float64)
    return scale


def _as_number(scale: Any) -> Any:
    return _as_tensor(scale) if isinstance(scale, list) else scale


@pytest.mark.parametrize("line", _lines(), ids=lambda line: f"{line['source']}: {line['expect']}")
@pytest.mark.parametrize("form", [_as_number, _as_tensor], ids=["number", "tensor"])
def test_case_from_the_field(
    line: dict[str, Any], form: Callable[[Any], Any], warnings: pytest.LogCaptureFixture
) -> None:
    unknown = set(line) - {"source", "k", "v", "device", "expect"}
    assert not unknown
    case = Case(form(line["k"]), form(line["v"]), line.get("device", "cpu"), warnings)
    assert line["expect"] in EXPECTATIONS, "write down what this expectation means"
    EXPECTATIONS[line["expect"]](case)


def test_every_expectation_has_a_case() -> None:
    assert {line["expect"] for line in _lines()} == set(EXPECTATIONS)


# The table of the original report, in the very words of its sentences.


def float32(value: float | list[float] | list[list[float]]) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32)


REFUSED: dict[str, tuple[Any, Any, str, str]] = {
    "several elements": (
        float32([1.0, 2.0]),
        float32(1.0),
        "cpu",
        "Only support per-tensor scaling factor for fp8 KV cache, "
        "got k_scale shape=(2,) v_scale shape=()",
    ),
    "several elements of V": (
        float32(1.0),
        float32([[1.0, 2.0, 3.0]]),
        "cpu",
        "Only support per-tensor scaling factor for fp8 KV cache, "
        "got k_scale shape=() v_scale shape=(1, 3)",
    ),
    "several elements, NaN among them": (
        float32([1.0, NAN]),
        float32(NAN),
        "cpu",
        "Only support per-tensor scaling factor for fp8 KV cache, "
        "got k_scale shape=(2,) v_scale shape=()",
    ),
    "NaN": (
        float32(NAN),
        float32(1.0),
        "cpu",
        "fp8 KV cache scales must be finite, got k_scale=nan v_scale=1.0",
    ),
    "+inf": (
        float32(INF),
        float32(1.0),
        "cpu",
        "fp8 KV cache scales must be finite, got k_scale=inf v_scale=1.0",
    ),
    "-inf beside a valid scale": (
        float32(1.0),
        float32(-INF),
        "cpu",
        "fp8 KV cache scales must be finite, got k_scale=1.0 v_scale=-inf",
    ),
    "NaN is not hidden by the conversion": (
        float32(NAN),
        float32(1.0),
        FNUZ,
        "fp8 KV cache scales must be finite, got k_scale=nan v_scale=1.0",
    ),
    "NaN comes before a negative side": (
        -1.0,
        NAN,
        "cpu",
        "fp8 KV cache scales must be finite, got k_scale=-1.0 v_scale=nan",
    ),
    "float32 3e38, doubled": (
        float32(3e38),
        float32(1.0),
        FNUZ,
        "fp8 KV cache scales must be finite and fit in torch.float32, "
        "got k_scale=6.0000000109955115e+38 v_scale=2.0",
    ),
    "3e38 of V, doubled": (
        1.0,
        3e38,
        FNUZ,
        "fp8 KV cache scales must be finite and fit in torch.float32, "
        "got k_scale=2.0 v_scale=6e+38",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_original_report_refused(name: str, warnings: pytest.LogCaptureFixture) -> None:
    k, v, device, sentence = REFUSED[name]
    message = refused(k, v, device)
    assert sentence in message
    # A sentence alone does not help: the way out follows it.
    assert len(message) > len(f"{LAYER}: {sentence}") + 20
    assert warned(warnings) == []


@pytest.mark.parametrize(
    ("k", "v", "device", "expected"),
    [
        (0.05, 0.07, "cpu", (0.05, 0.07, "checkpoint", "checkpoint")),
        (1.0, 1.0, "cpu", (1.0, 1.0, "checkpoint", "checkpoint")),
        (None, None, "cpu", (1.0, 1.0, "default", "default")),
        (None, None, FNUZ, (1.0, 1.0, "default", "default")),
        (0.05, None, "cpu", (0.05, 0.05, "checkpoint", "duplicated")),
        (0.05, None, FNUZ, (0.1, 0.1, "checkpoint", "duplicated")),
        (1.0, 1.0, FNUZ, (2.0, 2.0, "checkpoint", "checkpoint")),
        (1e38, 1.0, FNUZ, (2e38, 2.0, "checkpoint", "checkpoint")),
        (3e38, 1.0, "cpu", (3e38, 1.0, "checkpoint", "checkpoint")),
        (FLOAT32_MAX, 1.0, "cpu", (FLOAT32_MAX, 1.0, "checkpoint", "checkpoint")),
        (FLOAT32_MAX / 2, 1.0, FNUZ, (FLOAT32_MAX, 2.0, "checkpoint", "checkpoint")),
    ],
)
def test_original_report_accepted(
    k: float | None,
    v: float | None,
    device: str,
    expected: tuple[float, float, str, str],
    warnings: pytest.LogCaptureFixture,
) -> None:
    scales = validate(k, v, device)
    assert fields(scales) == expected
    assert type(scales.k) is type(scales.v) is float
    assert not scales.per_head
    assert warned(warnings) == []


# Numbers and tensors of every kind.


@pytest.mark.parametrize(
    ("number", "value"),
    [
        (1, 1.0),
        (0.05, 0.05),
        (Fraction(1, 8), 0.125),
        (np.float64(0.05), 0.05),
        (np.float32(0.05), float(np.float32(0.05))),
        (np.float16(0.05), float(np.float16(0.05))),
        (np.int64(2), 2.0),
        (np.uint8(3), 3.0),
    ],
    ids=lambda number: type(number).__name__,
)
@sides
def test_numbers(number: Any, value: float, side: str) -> None:
    scales = validate(number, 0.5) if side == "k" else validate(0.5, number)
    assert getattr(scales, side) == value
    assert type(getattr(scales, side)) is float


@pytest.mark.parametrize("shape", PER_TENSOR_SHAPES)
@pytest.mark.parametrize("dtype", [*FLOAT_DTYPES, *FLOAT8_DTYPES], ids=str)
@pytest.mark.parametrize("device", ["cpu", FNUZ])
def test_tensors_of_one_element(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    factor = 2.0 if device == FNUZ else 1.0
    k, v = (torch.full(shape, value).to(dtype) for value in (0.375, 0.0625))
    expected = (0.375 * factor, 0.0625 * factor, "checkpoint", "checkpoint")
    assert fields(validate(k, v, device)) == expected


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_parameters(dtype: torch.dtype) -> None:
    k = torch.nn.Parameter(torch.tensor([0.375], dtype=dtype))
    assert fields(validate(k, None)) == (0.375, 0.375, "checkpoint", "duplicated")
    per_head = torch.nn.Parameter(torch.tensor([0.375, 0.5], dtype=dtype))
    scales = validate(per_head, None, granularity="head", num_kv_heads=2)
    assert_heads(scales.k, [0.375, 0.5])
    assert isinstance(scales.k, torch.Tensor)
    assert not scales.k.requires_grad


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_a_tensor_is_the_value_that_it_holds(dtype: torch.dtype) -> None:
    """0.05 is another number in each dtype; nothing is rounded again."""
    tensor = torch.tensor(0.05, dtype=torch.float64).to(dtype)
    expected = {
        torch.float64: 0.05,
        torch.float32: float(np.float32(0.05)),
        torch.float16: float(np.float16(0.05)),
        torch.bfloat16: 1.6015625 * 2.0**-5,  # 0x3D4D
    }[dtype]
    assert fields(validate(tensor, None)) == (expected, expected, "checkpoint", "duplicated")


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("shape", PER_TENSOR_SHAPES)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@sides
def test_corrupt_tensors(
    dtype: torch.dtype, shape: tuple[int, ...], value: float, side: str
) -> None:
    message = refused_beside(side, torch.full(shape, value, dtype=dtype), other=0.5)
    shown = {"k": "0.5", "v": "0.5", side: str(value)}
    assert (
        f"fp8 KV cache scales must be finite, got k_scale={shown['k']} v_scale={shown['v']}"
        in message
    )


@pytest.mark.parametrize("value", [BEYOND_FLOAT32, math.nextafter(FLOAT32_MAX, INF), 10**40])
@sides
def test_beyond_float32(value: float, side: str) -> None:
    message = refused_beside(side, value, other=0.5)
    assert "fp8 KV cache scales must be finite and fit in torch.float32, got k_scale=" in message
    assert f"{side}_scale={float(value)!r}" in message


def test_an_integer_beyond_float64() -> None:
    assert "KV cache scales must be finite" in refused(10**400, 1.0)
    assert "KV cache scales must be finite" in refused(1.0, -(10**400))


@pytest.mark.parametrize("value", [1e-39, NO_RECIPROCAL, 5e-324, 2.0**-149, 1e-46])
@pytest.mark.parametrize("as_tensor", [False, True])
@sides
def test_no_finite_reciprocal(value: float, as_tensor: bool, side: str) -> None:
    scale = torch.tensor(value, dtype=torch.float64) if as_tensor else value
    message = refused_beside(side, scale, other=0.5)
    assert "fp8 KV cache scales must be finite and fit in torch.float32, got k_scale=" in message
    assert f"{side}_scale={as_shown(value)} " in message
    assert "reciprocal" in message


def as_shown(value: float) -> str:
    """By numpy: of a float32 in as few digits as tell it from the others."""
    with np.errstate(over="ignore"):
        rounded = np.float32(value)
    return repr(float(str(rounded)) if float(rounded) == value else value)


@given(st.floats(width=32, allow_nan=False))
@example(3.4028234663852886e38)
@example(-0.0)
@example(0.1)  # no float32
@example(6.0000000109955115e38)
@settings(max_examples=1000)
def test_a_value_is_shown_as_its_file_has_it(value: float) -> None:
    message = refused(NAN, value)
    assert f"got k_scale=nan v_scale={as_shown(value)} (corrupt: " in message


def test_the_smallest_scale_with_a_reciprocal() -> None:
    assert validate(SMALLEST_WITH_RECIPROCAL, 1.0).k == SMALLEST_WITH_RECIPROCAL
    # Doubled it has one; the rule is about what is served.
    assert validate(NO_RECIPROCAL, 1.0, FNUZ).k == SMALLEST_WITH_RECIPROCAL


NOT_A_SCALE: dict[str, Callable[[], Any]] = {
    "bool": lambda: True,
    "numpy bool": lambda: np.bool_(True),
    "string": lambda: "0.05",
    "bytes": lambda: b"0.05",
    "list": lambda: [0.05],
    "tuple": lambda: (0.05,),
    "dict": lambda: {"scale": 0.05},
    "complex": lambda: 0.05 + 0j,
    "numpy array": lambda: np.array([0.05]),
    "object": object,
    "meta tensor": lambda: torch.empty((), device="meta"),
    "integer tensor": lambda: torch.tensor(1),
    "uint8 tensor": lambda: torch.tensor([1], dtype=torch.uint8),
    "bool tensor": lambda: torch.tensor(True),
    "complex tensor": lambda: torch.tensor(0.05 + 0j),
}


@pytest.mark.parametrize("kind", NOT_A_SCALE)
@sides
def test_what_is_no_scale_names_the_side(kind: str, side: str) -> None:
    message = refused_beside(side, NOT_A_SCALE[kind]())
    other = {"k": "v", "v": "k"}[side]
    assert f"{side}_scale" in message
    assert f"{other}_scale must" not in message


@pytest.mark.parametrize("kind", NOT_A_SCALE)
@sides
def test_what_is_no_scale_beside_an_unset_one(kind: str, side: str) -> None:
    assert f"{side}_scale" in refused_beside(side, NOT_A_SCALE[kind](), other=None)


@pytest.mark.parametrize("shape", [(0,), (1, 0), (0, 0, 0)])
@sides
def test_empty_tensors(shape: tuple[int, ...], side: str) -> None:
    message = refused_beside(side, torch.empty(shape))
    assert "Only support per-tensor scaling factor for fp8 KV cache" in message
    assert f"{side}_scale shape={shape}" in message


def _torch_float_dtypes() -> list[torch.dtype]:
    found = {d for d in vars(torch).values() if isinstance(d, torch.dtype) and d.is_floating_point}
    return sorted(found, key=str)


@pytest.mark.parametrize("dtype", _torch_float_dtypes(), ids=str)
def test_every_floating_dtype_of_torch_is_read_or_refused(dtype: torch.dtype) -> None:
    """Packed float4 has two values in one element, and so is no scale."""
    nbytes = torch.finfo(dtype).bits // 8 if dtype in FLOAT_DTYPES else 1
    pattern = torch.full((nbytes,), 0x38, dtype=torch.uint8)  # some positive value in each
    scale = pattern.view(dtype)
    assert scale.numel() == 1
    try:
        scales = validate(scale, 1.0)
    except kv.KVScaleError as error:
        assert "k_scale" in str(error)  # noqa: PT017 - either outcome is right
        assert "float4" in str(dtype)
    else:
        assert isinstance(scales.k, float)
        assert scales.k > 0


# Which pair is used.


@pytest.mark.parametrize(
    ("k", "v"), [(0.0, 0.0), (-1.0, -0.5), (0.0, -3.0), (-0.0, 0.0), (-2.0, None), (None, 0.0)]
)
@pytest.mark.parametrize("device", ["cpu", FNUZ])
def test_no_side_is_positive(
    k: float | None, v: float | None, device: str, warnings: pytest.LogCaptureFixture
) -> None:
    assert fields(validate(k, v, device)) == (1.0, 1.0, "default", "default")
    (line,) = warned(warnings)
    assert line.startswith(f"{LAYER}: ")
    for side, value in (("k", k), ("v", v)):
        shown = re.search(rf"{side}_scale=([^\s,;]+)", line)
        assert shown
        assert value is None or float(shown[1]) == value
        assert value is not None or shown[1] == "unset"


@pytest.mark.parametrize("bad", [0.0, -0.0, -0.3, -1.0, -1e38, -5e-324])
@sides
@pytest.mark.parametrize("device", ["cpu", FNUZ])
def test_one_corrupt_side_is_never_replaced(
    bad: float, side: str, device: str, warnings: pytest.LogCaptureFixture
) -> None:
    message = refused_beside(side, bad, other=0.05, device=device)
    assert f"{side}_scale={bad!r}" in message
    other = {"k": "v", "v": "k"}[side]
    assert f"{other}_scale=0.05" in message
    assert f"corrupt: {side}_scale" in message
    assert warned(warnings) == []


@pytest.mark.parametrize("device", ["cpu", FNUZ])
def test_v_alone_is_used_for_k_with_a_warning(
    device: str, warnings: pytest.LogCaptureFixture
) -> None:
    expected = 0.1 if device == FNUZ else 0.05
    scales = validate(None, 0.05, device)
    assert fields(scales) == (expected, expected, "duplicated", "checkpoint")
    (line,) = warned(warnings)
    assert line.startswith(f"{LAYER}: ")
    assert "v_scale=0.05" in line


@pytest.mark.parametrize("bad", [NAN, INF, -INF, BEYOND_FLOAT32, 1e-39])
@sides
def test_one_corrupt_side_beside_an_unset_one(bad: float, side: str) -> None:
    assert f"{side}_scale={bad!r}" in refused_beside(side, bad, other=None)


def test_a_layer_without_a_name() -> None:
    with pytest.raises(kv.KVScaleError, match=r"^fp8 KV cache scales must be finite") as caught:
        kv.validate_kv_scales(NAN, 1.0, kv_cache_dtype="fp8")
    assert caught.value.layer == ""


# Formats and devices.


@pytest.mark.parametrize(
    ("name", "device", "factor"),
    [
        ("fp8", "cpu", 1.0),
        ("fp8_e4m3", "cpu", 1.0),
        ("fp8_e5m2", "cpu", 1.0),
        ("nvfp4", "cpu", 1.0),
        ("fp8_e4m3", "sm_90", 1.0),
        ("fp8_e4m3", "gfx950", 1.0),
        ("fp8_e4m3", "gfx1201", 1.0),
        ("fp8_e4m3", "gfx90a", 1.0),
        ("fp8", "gfx940", 2.0),
        ("fp8_e4m3", "gfx941", 2.0),
        ("fp8_e4m3", "gfx942", 2.0),
        ("fp8_e4m3", "gfx942:sramecc+:xnack-", 2.0),
        ("fp8_e4m3fnuz", "gfx942", 2.0),
        ("fp8_e4m3fnuz", "cpu", 2.0),
        ("fp8_e5m2", "gfx942", 1.0),
        ("nvfp4", "sm_100", 1.0),
    ],
)
def test_conversion_by_format_and_device(name: str, device: str, factor: float) -> None:
    scales = validate(0.05, 0.07, device, kv_cache_dtype=name)
    assert (scales.k, scales.v) == (0.05 * factor, 0.07 * factor)
    default = validate(None, None, device, kv_cache_dtype=name)
    assert fields(default) == (1.0, 1.0, "default", "default")


@pytest.mark.parametrize("device", [torch.device("cpu"), torch.empty(0), kv.Device.parse("cpu")])
def test_the_device_may_be_given_in_any_way(device: Any) -> None:
    assert validate(0.05, 0.07, device).k == 0.05


@pytest.mark.parametrize("scale", [0.05, 1.0, 1e-30, 1e38])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_conversion_starts_from_the_raw_value(scale: float, as_tensor: bool) -> None:
    raw = torch.tensor([scale], dtype=torch.float64) if as_tensor else scale
    first = validate(raw, raw, FNUZ)
    for _ in range(3):
        assert fields(validate(raw, raw, FNUZ)) == fields(first)
    assert fields(first) == (2 * scale, 2 * scale, "checkpoint", "checkpoint")
    assert float(raw) == scale


@pytest.mark.parametrize("name", ["auto", "fp8_e4m3x", "int8", "", "bfloat16", "FP4"])
def test_an_unknown_format_lists_the_known(name: str) -> None:
    message = refused(1.0, 1.0, kv_cache_dtype=name)
    assert repr(name) in message
    for known in ("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_e4m3fnuz", "nvfp4"):
        assert re.search(rf"\b{known}\b", message)


@pytest.mark.parametrize("name", [None, 8, torch.float8_e4m3fn])
def test_a_format_that_is_no_name(name: Any) -> None:
    with pytest.raises(kv.KVScaleError, match="nvfp4"):
        kv.validate_kv_scales(1.0, 1.0, kv_cache_dtype=name)


@pytest.mark.parametrize("name", [None, 8, torch.float8_e4m3fn])
def test_a_format_that_is_no_name_says_the_layer(name: Any) -> None:
    refused(1.0, 1.0, kv_cache_dtype=name)


@pytest.mark.parametrize("value", [NAN, INF, BEYOND_FLOAT32, 1e-39])
@pytest.mark.parametrize("name", ["fp8_e5m2", "fp8_e4m3fnuz", "nvfp4"])
def test_every_format_refuses_corrupt_scales(name: str, value: float) -> None:
    assert "KV cache scales must be finite" in refused(value, 1.0, kv_cache_dtype=name)
    assert "Only support per-tensor scaling factor" in refused(
        float32([value, 1.0]), 1.0, kv_cache_dtype=name
    )


# Per head.

HEADS = 4
RAW_HEADS = [0.05, 0.07, 1.0, 3e-5]
PER_HEAD_SHAPES: tuple[tuple[int, ...], ...] = ((HEADS,), (HEADS, 1, 1))
per_head_shapes = pytest.mark.parametrize("shape", PER_HEAD_SHAPES)


def heads(
    values: list[float], shape: tuple[int, ...] = (HEADS,), dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).to(dtype).reshape(shape)


def validate_heads(k: Any, v: Any, device: str = "cpu", **options: Any) -> kv.KVScales:
    return validate(k, v, device, **{"granularity": "head", "num_kv_heads": HEADS, **options})


def refused_heads(k: Any, v: Any, device: str = "cpu", **options: Any) -> str:
    return refused(k, v, device, **{"granularity": "head", "num_kv_heads": HEADS, **options})


def assert_heads(scale: Any, values: list[float]) -> None:
    """float32 on the CPU, rounded once from these."""
    assert isinstance(scale, torch.Tensor)
    assert (scale.dtype, scale.device.type) == (torch.float32, "cpu")
    assert tuple(scale.shape) == (len(values),)
    assert scale.tolist() == [float(np.float32(value)) for value in values]


@per_head_shapes
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("device", ["cpu", FNUZ])
def test_per_head(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: str,
    warnings: pytest.LogCaptureFixture,
) -> None:
    factor = 2.0 if device == FNUZ else 1.0
    k, v = heads(RAW_HEADS, shape, dtype), heads(RAW_HEADS[::-1], (HEADS,), dtype)
    before = k.clone(), v.clone()
    scales = validate_heads(k, v, device)
    assert scales.per_head
    assert_heads(scales.k, [value * factor for value in before[0].double().flatten().tolist()])
    assert_heads(scales.v, [value * factor for value in before[1].double().flatten().tolist()])
    assert (scales.k_source, scales.v_source) == ("checkpoint", "checkpoint")
    assert torch.equal(k, before[0])
    assert torch.equal(v, before[1])
    assert warned(warnings) == []


@pytest.mark.parametrize("shape", [(1,), (1, 1, 1)])
def test_one_head(shape: tuple[int, ...]) -> None:
    scales = validate_heads(torch.full(shape, 0.5), torch.full(shape, 0.25), num_kv_heads=1)
    assert_heads(scales.k, [0.5])
    assert_heads(scales.v, [0.25])


@pytest.mark.parametrize("device", ["cpu", FNUZ])
def test_per_head_default_is_not_converted(device: str, warnings: pytest.LogCaptureFixture) -> None:
    scales = validate_heads(None, None, device)
    assert_heads(scales.k, [1.0] * HEADS)
    assert_heads(scales.v, [1.0] * HEADS)
    assert (scales.k_source, scales.v_source) == ("default", "default")
    assert warned(warnings) == []


@sides
@pytest.mark.parametrize("device", ["cpu", FNUZ])
def test_per_head_duplicated(side: str, device: str, warnings: pytest.LogCaptureFixture) -> None:
    raw = heads(RAW_HEADS)
    k, v = (raw, None) if side == "k" else (None, raw)
    scales = validate_heads(k, v, device)
    factor = 2.0 if device == FNUZ else 1.0
    assert_heads(scales.k, [value * factor for value in RAW_HEADS])
    assert_heads(scales.v, [value * factor for value in RAW_HEADS])
    sources = ("checkpoint", "duplicated")
    assert (scales.k_source, scales.v_source) == (sources if side == "k" else sources[::-1])
    assert len(warned(warnings)) == (side == "v")


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_per_head_results_share_no_memory(dtype: torch.dtype) -> None:
    raw = heads(RAW_HEADS, dtype=dtype)
    before = raw.clone()
    scales = validate_heads(raw, None)
    assert isinstance(scales.k, torch.Tensor)
    assert isinstance(scales.v, torch.Tensor)
    scales.k.fill_(7.0)
    assert torch.equal(raw, before)
    assert_heads(scales.v, before.double().tolist())


def test_per_head_all_not_positive(warnings: pytest.LogCaptureFixture) -> None:
    scales = validate_heads(heads([0.0, -1.0, 0.0, -2.0]), heads([0.0] * HEADS))
    assert_heads(scales.k, [1.0] * HEADS)
    assert scales.k_source == "default"
    (line,) = warned(warnings)
    assert line.startswith(f"{LAYER}: ")
    assert "-2.0" in line


@pytest.mark.parametrize("bad", [NAN, INF, -INF, 0.0, -0.3, BEYOND_FLOAT32, 1e-39])
@pytest.mark.parametrize("head", range(HEADS))
@sides
@per_head_shapes
def test_per_head_error_names_the_head(
    bad: float, head: int, side: str, shape: tuple[int, ...]
) -> None:
    values = list(RAW_HEADS)
    values[head] = bad
    pair = heads(values, shape), heads(RAW_HEADS)
    message = refused_heads(*(pair if side == "k" else pair[::-1]))
    assert f"{side}_scale of head {head}" in message
    other = {"k": "v", "v": "k"}[side]
    assert f"{other}_scale of" not in message
    assert repr(bad) in message


def test_per_head_error_names_every_corrupt_head() -> None:
    message = refused_heads(heads([0.1, NAN, 0.1, INF]), heads([-INF, 0.1, 0.1, 0.1]))
    assert "k_scale of heads 1, 3" in message
    assert "v_scale of head 0" in message


def test_per_head_error_of_many_heads_is_short() -> None:
    message = refused_heads(torch.full((128,), NAN), torch.ones(128), num_kv_heads=128)
    assert len(message) < 1000
    assert "128" in message


def test_per_head_one_head_of_a_side_not_positive_beside_an_unset_side() -> None:
    assert "k_scale of head 2" in refused_heads(heads([0.1, 0.2, 0.0, 0.3]), None)


def test_per_head_doubled_beyond_float32_names_the_head() -> None:
    message = refused_heads(heads([0.1, 3e38, 0.1, 0.1]), heads(RAW_HEADS), FNUZ)
    assert "fp8 KV cache scales must be finite and fit in torch.float32" in message
    assert "k_scale of head 1" in message
    assert "6e+38" in message


@pytest.mark.parametrize(
    "shape", [(), (1,), (3,), (5,), (1, HEADS), (HEADS, 1), (1, HEADS, 1), (HEADS, 1, 1, 1), (0,)]
)
@sides
def test_per_head_shape(shape: tuple[int, ...], side: str) -> None:
    pair = torch.full(shape, NAN), heads(RAW_HEADS)
    message = refused_heads(*(pair if side == "k" else pair[::-1]))
    assert f"{side}_scale shape={shape}" in message
    assert str(HEADS) in message


def test_a_number_is_no_scale_per_head() -> None:
    assert "shape=()" in refused_heads(0.05, heads(RAW_HEADS))


def test_one_scale_per_head_where_one_per_tensor_is_expected() -> None:
    message = refused(heads(RAW_HEADS), heads(RAW_HEADS), num_kv_heads=HEADS)
    assert "Only support per-tensor scaling factor for fp8 KV cache" in message


@pytest.mark.parametrize("count", [None, 0, -1, 2.0, True, "4"])
def test_per_head_needs_the_number_of_heads(count: Any) -> None:
    message = refused_heads(heads(RAW_HEADS), heads(RAW_HEADS), num_kv_heads=count)
    assert "num_kv_heads" in message
    assert repr(count) in message


@pytest.mark.parametrize("granularity", ["channel", "", None, "Head"])
def test_unknown_granularity(granularity: Any) -> None:
    message = refused(1.0, 1.0, granularity=granularity, num_kv_heads=HEADS)
    assert repr(granularity) in message
    assert "'tensor'" in message
    assert "'head'" in message


def test_nvfp4_has_no_scale_per_head() -> None:
    message = refused_heads(heads(RAW_HEADS), heads(RAW_HEADS), kv_cache_dtype="nvfp4")
    assert "nvfp4" in message
    assert "head" in message


# Nothing around the call matters.


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def as_engines_load() -> Iterator[None]:
    with default_dtype(torch.bfloat16), torch.device("meta"), torch.no_grad():
        yield


SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "default dtype bfloat16": lambda: default_dtype(torch.bfloat16),
    "default dtype float16": lambda: default_dtype(torch.float16),
    "default device meta": lambda: torch.device("meta"),
    "inference mode": torch.inference_mode,
    "as engines load": as_engines_load,
}
in_surroundings = pytest.mark.parametrize("surroundings", SURROUNDINGS)


@in_surroundings
@pytest.mark.parametrize("device", ["cpu", FNUZ])
def test_surroundings_do_not_change_scales(surroundings: str, device: str) -> None:
    factor = 2.0 if device == FNUZ else 1.0
    tensors = torch.tensor(0.05, dtype=torch.float64), torch.tensor([0.07], dtype=torch.float64)
    per_head = heads(RAW_HEADS), heads(RAW_HEADS, (HEADS, 1, 1))
    with SURROUNDINGS[surroundings]():
        numbers = validate(0.05, 0.07, device)
        from_tensors = validate(*tensors, device)
        default = validate(None, None, device)
        from_heads = validate_heads(*per_head, device)
        default_heads = validate_heads(None, None, device)
    for scales in (numbers, from_tensors):
        assert (scales.k, scales.v) == (0.05 * factor, 0.07 * factor)
    assert fields(default) == (1.0, 1.0, "default", "default")
    assert_heads(from_heads.k, [value * factor for value in RAW_HEADS])
    assert_heads(from_heads.v, [value * factor for value in RAW_HEADS])
    assert_heads(default_heads.k, [1.0] * HEADS)


@in_surroundings
@pytest.mark.parametrize("name", REFUSED)
def test_surroundings_do_not_change_errors(surroundings: str, name: str) -> None:
    k, v, device, sentence = REFUSED[name]
    with SURROUNDINGS[surroundings]():
        message = refused(k, v, device)
    assert sentence in message


@in_surroundings
def test_surroundings_do_not_hide_corrupt_heads(surroundings: str) -> None:
    k, v = heads([0.1, NAN, 0.2, 0.3]), heads(RAW_HEADS)
    with SURROUNDINGS[surroundings]():
        assert "k_scale of head 1" in refused_heads(k, v)


# The error itself.


@pytest.mark.parametrize("remake", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy])
def test_the_error_survives_pickling(remake: Callable[[kv.KVScaleError], kv.KVScaleError]) -> None:
    with pytest.raises(kv.KVScaleError) as caught:
        validate(NAN, 1.0)
    again = remake(caught.value)
    assert type(again) is kv.KVScaleError
    assert str(again) == str(caught.value)
    attributes = (again.problem, again.layer, again.remedy)
    assert attributes == (caught.value.problem, caught.value.layer, caught.value.remedy)
    assert again.layer == LAYER
    assert again.problem.startswith("fp8 KV cache scales must be finite")
    assert again.remedy


# Properties.

Source: TypeAlias = Literal["checkpoint", "duplicated", "default"]


def expected_scales(
    k: float | None, v: float | None, factor: float
) -> tuple[float, float, Source, Source] | None:
    """What comes of a pair, by the table of the design; ``None`` where it is refused."""
    loaded = [scale for scale in (k, v) if scale is not None]
    if any(math.isnan(scale) or math.isinf(scale) for scale in loaded):
        return None
    positive = [scale for scale in loaded if scale > 0]
    if not positive:
        return 1.0, 1.0, "default", "default"
    if len(positive) < len(loaded):
        return None
    served = [scale * factor for scale in (positive[0], positive[-1])]
    for scale in served:
        with np.errstate(all="ignore"):
            reciprocal = np.float32(1) / np.float32(scale)
        if scale > FLOAT32_MAX or not np.isfinite(reciprocal):
            return None
    k_source: Source = "duplicated" if k is None else "checkpoint"
    v_source: Source = "duplicated" if v is None else "checkpoint"
    return served[0], served[1], k_source, v_source


extremes = st.sampled_from(
    [
        *(None, NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 0.05, 1e-39, 1e38, 3e38, BEYOND_FLOAT32),
        *(FLOAT32_MAX, FLOAT32_MAX / 2, NO_RECIPROCAL, SMALLEST_WITH_RECIPROCAL, 5e-324),
        *(math.nextafter(FLOAT32_MAX, INF), math.nextafter(NO_RECIPROCAL, 1), 2.0**-149, 2.0**-150),
    ]
)
scale_values = st.one_of(extremes, st.floats(), st.floats(1e-6, 10.0))


@given(scale_values, scale_values, st.sampled_from(["cpu", FNUZ]), st.booleans())
@example(1e38, 3e38, FNUZ, False)
@example(FLOAT32_MAX / 2, None, FNUZ, True)
@settings(deadline=None, max_examples=300)
def test_any_pair(k: float | None, v: float | None, device: str, as_tensor: bool) -> None:
    expected = expected_scales(k, v, 2.0 if device == FNUZ else 1.0)
    k_scale, v_scale = (_as_tensor(scale) if as_tensor else scale for scale in (k, v))
    if expected is None:
        refused(k_scale, v_scale, device)
        return
    scales = validate(k_scale, v_scale, device)
    assert fields(scales) == expected
    for scale in (scales.k, scales.v):
        assert isinstance(scale, float)
        assert 0 < scale <= FLOAT32_MAX
        assert np.isfinite(np.float32(scale))
        assert np.isfinite(np.float32(1) / np.float32(scale))


@given(
    st.lists(scale_values.filter(lambda s: s is not None), min_size=2, max_size=3),
    st.sampled_from(["cpu", FNUZ]),
)
@settings(deadline=None, max_examples=200)
def test_any_heads(values: list[float], device: str) -> None:
    """K per head beside a good V: every head must be good by itself."""
    factor = 2.0 if device == FNUZ else 1.0
    pair = heads(values, (len(values),)), torch.ones(len(values))
    expected = [expected_scales(value, 1.0, factor) for value in values]
    if None in expected:
        refused_heads(*pair, device, num_kv_heads=len(values))
        return
    scales = validate_heads(*pair, device, num_kv_heads=len(values))
    assert_heads(scales.k, [value * factor for value in values])
    assert_heads(scales.v, [factor] * len(values))


@given(scale_values)
@settings(deadline=None, max_examples=100)
def test_the_sides_are_alike(scale: float | None) -> None:
    """A pair and its mirror are both refused, or give the same values."""
    other = 0.5
    try:
        forward = validate(scale, other)
    except kv.KVScaleError:
        refused(other, scale)
    else:
        backward = validate(other, scale)
        assert (forward.k, forward.v) == (backward.v, backward.k)
        assert (forward.k_source, forward.v_source) == (backward.v_source, backward.k_source)


def test_a_reciprocal_is_there_where_float32_has_one() -> None:
    """Beside torch's own arithmetic, for each of the numbers around the smallest that has one."""
    smallest = 2.0**-128
    around = torch.tensor([smallest]).view(torch.int32) + torch.arange(-3000, 3000)
    rare = torch.tensor([1, 2, 0x7F7FFFFF, 0x00800000, 0x007FFFFF, 0x3F800000])
    numbers = torch.cat([around, rare]).to(torch.int32).view(torch.float32)
    expected = numbers.reciprocal().isfinite().tolist()
    assert [_has_reciprocal(x) for x in numbers.tolist()] == expected
    assert True in expected
    assert False in expected
    # Halfway between two of float32, and what is rounded to 0 there.
    for number in (smallest * (1 + 2.0**-22), smallest * (1 + 2.0**-23), 2.0**-150, 1e-320):
        one = torch.tensor(number, dtype=torch.float64).float()
        assert _has_reciprocal(number) == bool(one.reciprocal().isfinite())


def test_a_hook_that_converts_in_place_changes_nothing_of_the_callers() -> None:
    class InPlace:
        @kv.hookimpl
        def validate_kv_scales(self, scales: kv.KVScales) -> kv.KVScales:
            assert isinstance(scales.k, torch.Tensor)
            assert isinstance(scales.v, torch.Tensor)
            scales.k.mul_(2)
            scales.v.mul_(2)
            return scales

    plugin = InPlace()
    kv.register(plugin, "in_place")
    try:
        raw = torch.tensor([0.25, 0.5], dtype=torch.float64)
        for _ in range(2):
            scales = validate(raw, None, granularity="head", num_kv_heads=2)
            # K's tensor is not V's, either: each is doubled once.
            assert_heads(scales.k, [0.5, 1.0])
            assert_heads(scales.v, [0.5, 1.0])
        assert raw.tolist() == [0.25, 0.5]
    finally:
        kv.unregister(plugin)


@pytest.mark.parametrize(
    ("name", "pair", "options"),
    [
        ("scale-not-finite", (0.05, NAN), {}),
        ("scale-not-positive", (0.05, -0.06), {}),
        ("scale-not-positive", (torch.tensor([0.05, 0.0]), None), {"num_kv_heads": 2}),
        ("scale-out-of-range", (0.05, BEYOND_FLOAT32), {}),
        ("scale-out-of-range", (NO_RECIPROCAL, 0.06), {}),
        ("scale-not-a-number", ("0.05", 0.06), {}),
        ("scale-not-a-number", (torch.tensor(3), 0.06), {}),
        ("scale-not-loaded", (torch.tensor(0.05, device="meta"), 0.06), {}),
        ("scale-wrong-shape", (torch.ones(8), torch.ones(8)), {}),
        ("scale-wrong-shape", (torch.ones(4), torch.ones(8)), {"num_kv_heads": 8}),
        ("invalid-granularity", (0.05, 0.06), {"num_kv_heads": 0}),
        ("format-unknown", (0.05, 0.06), {"kv_cache_dtype": "fp9"}),
    ],
)
def test_the_name_of_an_error(name: str, pair: tuple[Any, Any], options: dict[str, Any]) -> None:
    granularity = "head" if "num_kv_heads" in options else "tensor"
    with pytest.raises(kv.KVScaleError) as caught:
        validate(*pair, granularity=granularity, **options)
    assert caught.value.name == name
    assert str(caught.value).endswith(f" [errors#{name}]")
    assert str(caught.value).count("[errors#") == 1
