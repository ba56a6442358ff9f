"""The tables of the pages are the code's, and what the code has is on a page."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
import torch

import kvcache_plugin as kv
from kvcache_plugin import manager
from kvcache_plugin import testing as kv_testing
from kvcache_plugin.formats import BUILT_IN
from kvcache_plugin.hosts import seams
from kvcache_plugin.hosts.seams import Seam
from tests.oracles import E2M1, FP8
from tests.pages import rounding
from tests.pages.commands import commands
from tests.pages.formats import NUMBERS
from tests.pages.markdown import DOCS, pages
from tests.pages.parts import PART, parts, rewritten

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    from kvcache_plugin.formats import KVFormat
    from tests.oracles import Minifloat


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_a_page_is_what_would_be_written(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert rewritten(text) == text, "stale: python -m tests.pages"


def test_every_part_is_on_a_page() -> None:
    texts = [page.read_text(encoding="utf-8") for page in pages()]
    found = [
        name for text in texts for name in re.findall(r"^<!-- generated: (.*) -->$", text, re.M)
    ]
    assert set(found) == set(parts())
    assert len(found) == sum(len(PART.findall(text)) for text in texts), "a part has no end"


def test_a_stale_part_is_written_anew_and_the_rest_stays() -> None:
    stale = "# A\n\n<!-- generated: switches -->\n| old |\n<!-- end -->\n\nB\n"
    written = rewritten(stale)
    assert written.startswith("# A\n\n<!-- generated: switches -->\n\n| variable |")
    assert written.endswith(" |\n\n<!-- end -->\n\nB\n")
    assert "old" not in written
    assert rewritten(written) == written


# Names


def test_every_public_name_is_on_the_page_once() -> None:
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    found = re.findall(r"^::: kvcache_plugin\.(.+)$", page, re.M)
    expected = [*kv.__all__, *(f"testing.{name}" for name in kv_testing.__all__)]
    assert sorted(found) == sorted(expected)


#: Functions and classes, and the methods of those that are on the page by themselves.
PUBLIC: dict[str, Any] = {
    **{name: getattr(kv, name) for name in kv.__all__},
    **{name: getattr(kv_testing, name) for name in kv_testing.__all__},
    "Device.of": kv.Device.of,
    "Device.parse": kv.Device.parse,
    "Candidate.of": kv_testing.Candidate.of,
    "Case.run": kv_testing.Case.run,
}


@pytest.mark.parametrize(
    "name", [name for name, found in PUBLIC.items() if hasattr(found, "__qualname__")]
)
def test_what_is_public_tells_its_parameters_and_its_result(name: str) -> None:
    found = PUBLIC[name]
    told = inspect.getdoc(found) or ""
    assert told
    signature = inspect.signature(found)
    if not inspect.isclass(found) or "__init__" in vars(found):
        for parameter in signature.parameters.keys() - {"self"}:
            assert f":param {parameter}:" in told, parameter
    for field in getattr(found, "_fields", ()):  # a NamedTuple, which has no __init__
        assert f":ivar {field}:" in told, field
    if "." not in name and inspect.isfunction(found) and signature.return_annotation != "None":
        assert ":returns:" in told


@pytest.mark.parametrize("name", kv.__all__)
def test_methods_of_what_is_public_are_told(name: str) -> None:
    found = getattr(kv, name)
    for method, defined in (vars(found) if inspect.isclass(found) else {}).items():
        function = getattr(defined, "fget", getattr(defined, "__func__", defined))
        if inspect.isfunction(function) and not method.startswith("_"):
            assert inspect.getdoc(function), method


# The command line


@pytest.mark.parametrize("name", commands())
def test_every_option_stands_in_the_section_of_its_command(name: str) -> None:
    page = (DOCS / "cli.md").read_text(encoding="utf-8")
    _, found, section = page.partition(f"\n## {name}\n")
    assert found
    section = section.partition("\n## ")[0]
    parser: argparse.ArgumentParser = commands()[name]
    for action in parser._actions:
        for option in action.option_strings or [str(action.metavar)]:
            assert re.search(rf"`[^`]*{re.escape(option)}\b", section), option
    assert re.search(rf"^\$ kvcache-plugin {name}", section, re.M), "no example"
    assert "**Exit status**" in section


# Seams


def test_every_function_that_we_touch_is_in_a_table() -> None:
    found = set()
    for value in vars(seams).values():
        for seam in value if isinstance(value, tuple) else (value,):
            if isinstance(seam, Seam):
                found.add(seam)
    assert found == {*seams.SEAMS, *seams.PEERS}


# Formats and numerics: what the pages show is ml_dtypes', and so are the code's numbers.


@pytest.mark.parametrize("kv_format", BUILT_IN, ids=lambda kv_format: kv_format.name)
def test_the_numbers_of_a_format_are_those_of_its_specification(kv_format: KVFormat) -> None:
    found = NUMBERS[kv_format.name]
    assert kv_format.largest == float(found.max)
    assert kv_format.values_per_element * found.bits == 8 == kv_format.torch_dtype.itemsize * 8


@pytest.fixture(params=["cpu_fast", "cpu_reference"])
def served_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The implementation that serves the CPU."""
    name: str = request.param
    blocked = {"cpu_fast", "cpu_reference"} - {name}
    found = manager.Manager(frozenset(blocked))
    found.discover()
    monkeypatch.setattr(manager, "_manager", found)
    return name


@pytest.mark.parametrize("form", FP8, ids=lambda form: form.name)
def test_fp8_codes_of_the_page_are_those_that_are_written(form: Minifloat, served_by: str) -> None:
    rows = kv.explain("cpu", form.name)
    assert [row.name for row in rows if row.chosen] == [served_by]
    x = torch.tensor([number for _, number in rounding.inputs(form)])
    found = kv.quantize_kv(x, 1.0, form.name).data.view(torch.uint8)
    assert found.tolist() == rounding.expected(form)


@pytest.mark.usefixtures("served_by")
def test_e2m1_codes_of_the_page_are_those_that_are_written() -> None:
    """An infinity makes a block scale of 448, so that a value is multiplied by 1."""
    blocks = torch.zeros(len(rounding.inputs(E2M1)), 16)
    blocks[:, 0] = torch.tensor([number for _, number in rounding.inputs(E2M1)])
    blocks[:, 1] = float("inf")
    quantized = kv.quantize_kv(blocks, float(np.float32(1) / np.float32(448)), "nvfp4")
    assert (quantized.data[:, 0] & 0xF).tolist() == rounding.expected(E2M1)


@pytest.mark.parametrize("form", rounding.FORMS.values(), ids=lambda form: form.name)
def test_codes_of_the_page_are_those_of_ml_dtypes(form: Minifloat) -> None:
    """As they are, for what is finite, within the range, and no zero with a sign."""
    numbers = np.array([number for _, number in rounding.inputs(form)], np.float32)
    expected = np.array(rounding.expected(form), np.uint8)
    known = np.isfinite(numbers) & (np.abs(numbers) <= form.largest)
    if not form.negative_zero:
        known &= ~np.signbit(numbers)
    assert known.sum() >= 11
    codes = numbers[known].astype(form.dtype).view(np.uint8)
    assert codes.tolist() == expected[known].tolist()


def test_the_largest_relative_error_of_e4m3_is_that_of_its_worst_tie() -> None:
    """1 + 1/16 becomes 1: off by 1 part in 17."""
    tie = np.float32(1.0625)
    value = tie.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert (tie - value) / tie == pytest.approx(1 / 17)
    assert "| `fp8_e4m3` | amax / 448 | amax · 2⁻¹⁰ / 448 | 1/17, 5.9% |" in rounding.ranges()


@pytest.mark.usefixtures("served_by")
@pytest.mark.parametrize("form", FP8, ids=lambda form: form.name)
def test_what_is_said_to_become_zero_does_and_what_is_larger_does_not(form: Minifloat) -> None:
    amax = 3.0
    threshold = np.float32(amax * form.smallest / 2 / form.largest)
    x = torch.tensor(
        [amax, float(threshold * np.float32(1.01)), float(threshold * np.float32(0.99))]
    )
    values = kv.dequantize_kv(
        kv.quantize_kv(x, amax / form.largest, form.name), dtype=torch.float32
    )
    assert values[0] == pytest.approx(amax)
    assert values[1] > 0
    assert values[2] == 0
