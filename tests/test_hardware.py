"""Who serves which device and format, and why the others do not, is what docs/hardware.md says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import kvcache_plugin as kv

PAGE = Path(__file__).resolve().parents[1] / "docs" / "hardware.md"
FORMATS = ("fp8_e4m3", "fp8_e5m2", "fp8_e4m3fnuz", "nvfp4")
DEVICES = (
    *("cpu", "sm_80", "sm_89", "sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121"),
    *("gfx90a", "gfx942", "gfx950"),
)

#: Who would serve the same devices, if the first did not.
LATER = {
    "cpu_fast": ("cpu_reference",),
    "triton_gpu": ("cpu_reference",),
    **dict.fromkeys(
        ("cuda_sm90", "cuda_sm100", "cuda_sm120", "rocm_fnuz"), ("triton_gpu", "cpu_reference")
    ),
}


def table(first_column: str) -> list[list[str]]:
    """The rows of the page's table whose first column has this title."""
    lines = iter(PAGE.read_text(encoding="utf-8").splitlines())
    for line in lines:
        if line.startswith(f"| {first_column} |"):
            break
    next(lines)
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def names(cell: str) -> list[str]:
    return [name.strip(" `") for name in cell.split(",")]


def who() -> dict[tuple[str, str], str]:
    rows = table("device | fp8_e4m3 | fp8_e5m2 | fp8_e4m3fnuz | nvfp4")
    return {
        (device.strip("`"), kv_cache_dtype): name.strip("`")
        for device, *cells in rows
        for kv_cache_dtype, name in zip(FORMATS, cells, strict=True)
    }


def how() -> dict[tuple[str, str], str]:
    return {
        (device, kv_cache_dtype): sentence
        for devices, formats, sentence in table("device | format | how")
        for device in names(devices)
        for kv_cache_dtype in (FORMATS if formats == "all" else names(formats))
    }


def why_not() -> dict[tuple[str, str], str]:
    """The reason of each implementation, and of it on one device where that has its own."""
    reasons = {}
    for where, reason in table("implementation | reason"):
        found = re.fullmatch(r"`(\w+)`(?: on `(\w+)`)?", where)
        assert found
        reasons[found[1], found[2] or ""] = reason
    return reasons


def test_the_page_has_every_device_and_format() -> None:
    everything = {(device, kv_cache_dtype) for device in DEVICES for kv_cache_dtype in FORMATS}
    assert set(who()) == everything
    assert set(how()) == everything


@pytest.mark.parametrize("kv_cache_dtype", FORMATS)
@pytest.mark.parametrize("device", DEVICES)
def test_explain_says_what_the_page_says(device: str, kv_cache_dtype: str) -> None:
    reasons = why_not()
    first = who()[device, kv_cache_dtype]
    rows = kv.explain(device, kv_cache_dtype)
    assert [row.name for row in rows if row.chosen] == [first]
    for row in rows:
        if row.chosen:
            assert row.reason == how()[device, kv_cache_dtype]
        elif row.name in LATER.get(first, ()):
            assert row.reason == f"{first} comes before it"
        else:
            reason = reasons.get((row.name, device)) or reasons[row.name, ""]
            assert row.reason == reason.replace("…", device)


@pytest.mark.parametrize("device", [device for device in DEVICES if device != "cpu"])
def test_a_gpu_is_never_left_to_the_reference(device: str) -> None:
    """It comes last on each, and is there."""
    for kv_cache_dtype in FORMATS:
        last = kv.explain(device, kv_cache_dtype)[-1]
        assert last.name == "cpu_reference"
        assert not last.chosen
