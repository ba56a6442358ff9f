"""What numbers become in each format, as ml_dtypes and the specifications have it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tests import oracles
from tests.pages.markdown import code, power_of_two, table

if TYPE_CHECKING:
    from tests.oracles import Minifloat

FORMS = {form.name: form for form in (*oracles.FP8, oracles.E2M1)}


def _just_above(number: float) -> float:
    """The next float32."""
    return float(np.nextafter(np.float32(number), np.float32(np.inf)))


def inputs(form: Minifloat) -> list[tuple[str, float]]:
    """What is looked at in a format, float32 numbers, each with what it is."""
    step = 2.0**-form.mantissa_bits
    smallest, normal = form.smallest, 2.0 ** (1 - form.bias)
    beyond = form.largest + (form.largest - float(form.magnitudes[-2])) / 2
    return [
        ("a value of the format", 1.0),
        ("tie: to the even code, down", 1 + step / 2),
        ("just above the tie", _just_above(1 + step / 2)),
        ("tie: to the even code, up", 1 + 3 * step / 2),
        ("the largest value", form.largest),
        ("half a step beyond", beyond),
        ("twice the largest", 2 * form.largest),
        ("the smallest normal value", normal),
        ("tie of the largest subnormal with it", normal - smallest / 2),
        ("the smallest subnormal value", smallest),
        ("tie with 0", smallest / 2),
        ("just above the tie", _just_above(smallest / 2)),
        ("negative tie with 0", -smallest / 2),
        ("zero", 0.0),
        ("negative zero", -0.0),
        ("infinity", float("inf")),
        ("negative infinity", -float("inf")),
        ("NaN", float("nan")),
    ]


def expected(form: Minifloat) -> list[int]:
    """The code of each input."""
    numbers = np.array([number for _, number in inputs(form)], np.float32)
    return [int(found) for found in oracles.rounded(numbers, form)]


def rounding(form: Minifloat) -> str:
    found = expected(form)
    values = oracles.decoded(np.array(found, np.uint8), form)
    return table(
        ("number", "what it is", "code", "bits", "value"),
        [
            (
                _number(number),
                what,
                code(f"0x{each:0{_digits(form)}X}"),
                code(_bits(each, form)),
                _number(float(value)),
            )
            for (what, number), each, value in zip(inputs(form), found, values, strict=True)
        ],
    )


def e2m1_codes() -> str:
    """All of them."""
    form = oracles.E2M1
    every = np.arange(16, dtype=np.uint8)
    values = oracles.decoded(every, form)
    return table(
        ("code", "bits", "value"),
        [
            (code(f"0x{int(each):X}"), code(_bits(int(each), form)), _number(float(value)))
            for each, value in zip(every, values, strict=True)
        ],
    )


def ranges() -> str:
    """How a scale from the largest magnitude uses a format."""
    rows = []
    for form in FORMS.values():
        magnitudes = form.magnitudes
        normal = magnitudes[magnitudes >= 2.0 ** (1 - form.bias)]
        below, above = normal[:-1], normal[1:]
        error = float(((above - below) / (above + below)).max())
        rows.append(
            (
                code(form.name),
                f"amax / {form.largest:g}",
                f"amax · {power_of_two(form.smallest / 2)} / {form.largest:g}",
                f"1/{1 / error:g}, {error:.1%}",
                str(len(magnitudes)),
                f"{np.log2(form.largest / form.smallest):.1f}",
            )
        )
    return table(
        (
            "codes",
            "scale",
            "becomes 0, up to",
            "largest relative error of a normal value",
            "magnitudes, with 0",
            "largest over smallest, as a power of 2",
        ),
        rows,
    )


def _digits(form: Minifloat) -> int:
    return (form.exponent_bits + form.mantissa_bits + 1) // 4


def _bits(each: int, form: Minifloat) -> str:
    """``sign_exponent_mantissa``."""
    exponent, mantissa = each >> form.mantissa_bits, each & ((1 << form.mantissa_bits) - 1)
    sign, exponent = divmod(exponent, 1 << form.exponent_bits)
    return f"{sign}_{exponent:0{form.exponent_bits}b}_{mantissa:0{form.mantissa_bits}b}"


def _number(number: float) -> str:
    """As short as it is exact; ``2⁻⁹ · 1.5`` and what lies close to a tie are told as they are."""
    if not np.isfinite(number):
        return {"inf": "inf", "-inf": "−inf"}.get(str(number), "NaN")
    sign = "−" if np.copysign(1, number) < 0 else ""
    size = abs(number)
    if 0 < size < 1 / 4:
        mantissa, exponent = np.frexp(size)
        if mantissa == 1 / 2:
            return f"{sign}{power_of_two(size)}"
        return f"{sign}{_short(float(mantissa) * 2)} · {power_of_two(2.0 ** (int(exponent) - 1))}"
    return f"{sign}{_short(size)}"


def _short(size: float) -> str:
    return f"{size:.9g}"
