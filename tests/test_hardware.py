"""Who serves which device and format; docs/hardware.md shows what each says of it."""

from __future__ import annotations

import pytest

import kvcache_plugin as kv
from tests.pages.hardware import DEVICES, FORMATS

#: Who serves a device, in every format.
FIRST = {
    "cpu": "cpu_fast",
    "sm_80": "cuda_sm90",
    "sm_89": "cuda_sm90",
    "sm_90": "cuda_sm90",
    "sm_100": "cuda_sm100",
    "sm_103": "cuda_sm100",
    "sm_110": "triton_gpu",
    "sm_120": "cuda_sm120",
    "sm_121": "cuda_sm120",
    "gfx90a": "triton_gpu",
    "gfx942": "rocm_fnuz",
    "gfx950": "triton_gpu",
}
#: Who would serve the same devices, if the first did not.
LATER = {
    "cpu_fast": ["cpu_reference"],
    "triton_gpu": ["cpu_reference"],
    **{
        name: ["triton_gpu", "cpu_reference"]
        for name in ("cuda_sm90", "cuda_sm100", "cuda_sm120", "rocm_fnuz")
    },
}


def test_the_page_has_every_device() -> None:
    assert set(DEVICES) == set(FIRST)


@pytest.mark.parametrize("kv_cache_dtype", FORMATS)
@pytest.mark.parametrize("device", FIRST)
def test_one_serves_a_device_and_the_others_say_why_they_do_not(
    device: str, kv_cache_dtype: str
) -> None:
    first = FIRST[device]
    rows = kv.explain(device, kv_cache_dtype)
    assert [row.name for row in rows if row.chosen] == [first]
    later = [row.name for row in rows if row.reason == f"{first} comes before it"]
    assert later == LATER[first]
    for row in rows:
        if row.name not in (first, *later):
            assert f"and this is {device}" in row.reason


@pytest.mark.parametrize("device", [device for device in FIRST if device != "cpu"])
def test_a_gpu_is_never_left_to_the_reference(device: str) -> None:
    """It comes last on each, and is there."""
    for kv_cache_dtype in FORMATS:
        last = kv.explain(device, kv_cache_dtype)[-1]
        assert last.name == "cpu_reference"
        assert not last.chosen
