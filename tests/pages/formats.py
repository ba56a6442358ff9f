"""The storage formats: their numbers, their sizes in memory, and the names that they go by."""

from __future__ import annotations

from typing import Any

import ml_dtypes

from kvcache_plugin.device import Device
from kvcache_plugin.formats import ALIASES, BUILT_IN, on_device
from tests import oracles
from tests.pages.markdown import code, power_of_two, table

HEAD_DIM = 128

_finfo: Any = ml_dtypes.finfo

#: What ml_dtypes has for the codes of each format.
NUMBERS = {
    **{form.name: _finfo(form.dtype) for form in oracles.FP8},
    "nvfp4": _finfo(oracles.E2M1.dtype),
}


def storage() -> str:
    return table(
        ("format", "torch dtype", "values in an element", "block", "block scales", "scale"),
        [
            (
                code(each.name),
                code(each.data_dtype),
                str(each.values_per_element),
                f"{each.block_size} values" if each.block_size else "none",
                code(each.block_scale_dtype) if each.block_scale_dtype else "none",
                "one, or one for each head" if each.per_head else "one",
            )
            for each in BUILT_IN
        ],
    )


def numbers() -> str:
    rows = []
    for each in BUILT_IN:
        found = NUMBERS[each.name]
        rows.append(
            (
                code(each.name),
                str(found.bits),
                f"1, {found.iexp}, {found.nmant}",
                f"±{each.largest:g}",
                f"±{power_of_two(float(found.smallest_normal))}",
                f"±{power_of_two(float(found.smallest_subnormal))}",
            )
        )
    return table(
        (
            "format",
            "bits of a code",
            "sign, exponent, mantissa",
            "largest",
            "smallest normal",
            "smallest subnormal",
        ),
        rows,
    )


def sizes() -> str:
    plain = HEAD_DIM * 2
    rows = [("bfloat16", str(plain), "-", str(plain), "16", "1")]
    for each in BUILT_IN:
        data, block_scales = (_bytes(size) for size in each.shapes((HEAD_DIM,)))
        whole = data + block_scales
        rows.append(
            (
                code(each.name),
                str(data),
                str(block_scales) if block_scales else "-",
                str(whole),
                f"{whole * 8 / HEAD_DIM:g}",
                f"{whole / plain:.3g}",
            )
        )
    return table(
        ("format", "codes", "block scales", "bytes", "bits for a value", "of bfloat16"), rows
    )


def _bytes(shape: tuple[int, ...] | None) -> int:
    """All dtypes of codes and of block scales take one byte."""
    return shape[0] if shape else 0


def names() -> str:
    fnuz = Device.parse("gfx942")
    return table(
        ("`kv_cache_dtype`", "stored as", "on gfx940, gfx941 and gfx942"),
        [
            (code(name), code(on_device(name, Device("cpu"))), code(on_device(name, fnuz)))
            for name in (*ALIASES, *(each.name for each in BUILT_IN))
        ],
    )
