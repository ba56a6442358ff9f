"""The NVFP4 cache that is read as plain K and V, without an engine around it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcache_plugin import KVQuantizeError, dequantize_kv, quantize_kv
from kvcache_plugin.hosts.packed_nvfp4 import LayerScales, PackedNVFP4

LOC = torch.tensor([7, 3, 9])


def scale(value: float) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor(value), requires_grad=False)


def layer(layer_id: int, k: float | None, v: float | None) -> Any:
    k_scale, v_scale = (None if x is None else scale(x) for x in (k, v))
    return SimpleNamespace(layer_id=layer_id, k_scale=k_scale, v_scale=v_scale)


def cache_of(*layers: Any, scales_later: bool = False) -> PackedNVFP4:
    cache = PackedNVFP4(device="cpu", dtype=torch.bfloat16, scales_later=scales_later)
    cache.read_scales_from(iter(layers))
    return cache


def store(cache: PackedNVFP4, layer_id: int) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
    """Buffers of one layer with K and V in them, as SGLang's pool does it."""
    buffers = cache.create_buffers(12, 2, 32, 1, "cpu")
    key, value = torch.randn(2, 3, 2, 32).to(torch.bfloat16)
    cache.quantize_and_store(
        *(buffers[f"{side}_{kind}buffer"][0] for kind in ("", "scale_") for side in "kv"),
        LOC,
        key,
        value,
        cache.k_scales_gpu[layer_id : layer_id + 1],
        cache.v_scales_gpu[layer_id : layer_id + 1],
    )
    return buffers, key, value


def read(cache: PackedNVFP4, buffers: dict[str, Any], side: str, layer_id: int) -> torch.Tensor:
    return cache.dequantize_kv_tensor(
        buffers[f"{side}_buffer"][0], buffers[f"{side}_scale_buffer"][0], layer_id
    )


def test_a_row_holds_codes_and_then_block_scales() -> None:
    cache = cache_of(layer(4, 0.01, 0.02))
    buffers, key, value = store(cache, 4)
    for side, x, factor in (("k", key, 0.01), ("v", value, 0.02)):
        expected = quantize_kv(x, factor, "nvfp4")
        rows = buffers[f"{side}_buffer"][0]
        assert rows.shape == (12, 2, 16 + 2)
        assert torch.equal(rows[LOC, :, :16], expected.data)
        assert torch.equal(rows[LOC, :, 16:], expected.block_scales.view(torch.uint8))
        others = torch.ones(12, dtype=torch.bool)
        others[LOC] = False
        assert not rows[others].any()
        plain = read(cache, buffers, side, 4)
        assert torch.equal(plain[LOC], dequantize_kv(expected))
        assert not plain[others].any()


def test_heads_may_come_in_one_dimension() -> None:
    cache = cache_of()
    buffers, key, value = store(cache, 0)
    again = cache.create_buffers(12, 2, 32, 1, "cpu")
    flat = (x.flatten(1) for x in (key, value))
    cache.quantize_and_store(again["k_buffer"][0], again["v_buffer"][0], None, None, LOC, *flat)
    assert torch.equal(again["k_buffer"][0], buffers["k_buffer"][0])
    assert torch.equal(again["v_buffer"][0], buffers["v_buffer"][0])


def test_what_goes_with_the_rows_takes_no_room() -> None:
    buffers = cache_of().create_buffers(12, 2, 32, 3, "cpu")
    for side in "kv":
        assert len(buffers[f"{side}_buffer"]) == len(buffers[f"{side}_scale_buffer"]) == 3
        for empty in buffers[f"{side}_scale_buffer"]:
            assert (len(empty), empty.nbytes, empty.stride(0)) == (12, 0, 0)
            assert empty.is_contiguous()


@pytest.mark.parametrize(("k", "v"), [(0.01, 0.02), (0.01, None), (None, None)])
def test_scales_that_come_later_are_left_out_where_a_layer_has_both(
    k: float | None, v: float | None
) -> None:
    cache = cache_of(layer(0, k, v), scales_later=True)
    buffers, key, _ = store(cache, 0)
    quantized = quantize_kv(key, k or 1.0, "nvfp4")
    if k is not None and v is not None:
        quantized = type(quantized)(
            quantized.data, quantized.block_scales, torch.ones(1), quantized.kv_cache_dtype
        )
    assert torch.equal(read(cache, buffers, "k", 0)[LOC], dequantize_kv(quantized))


def test_a_code_times_its_block_scale_is_exact_in_the_dtypes_of_models() -> None:
    codes = torch.tensor([0x21, 0x43, 0x65, 0x07], dtype=torch.uint8).repeat(2).expand(127, 8)
    block_scales = torch.arange(127, dtype=torch.uint8)[:, None].view(torch.float8_e4m3fn)
    quantized = type(quantize_kv(torch.zeros(1, 16), 1.0, "nvfp4"))(
        codes, block_scales, torch.ones(1), "nvfp4"
    )
    exact = dequantize_kv(quantized, dtype=torch.float32)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(dequantize_kv(quantized, dtype=dtype).float(), exact)


def test_scales_are_those_of_the_layer_now() -> None:
    one, other = layer(3, 0.5, 0.25), layer(3, 8.0, 8.0)
    scales = LayerScales("k_scale", "cpu")
    scales.read_from([one, other])
    assert scales[3:4].tolist() == [0.5]
    one.k_scale.data.fill_(0.125)
    assert scales[3:4].tolist() == [0.125]
    one.k_scale = scale(2.0)
    assert scales[3:4].tolist() == [2.0]
    one.k_scale = 4.0
    assert scales[3:4].tolist() == [4.0]
    one.k_scale = None
    assert scales[3:4].tolist() == scales[9:10].tolist() == [1.0]
    assert not scales.has(3)


def test_k_that_does_not_fit_is_refused_and_nothing_is_written() -> None:
    cache = cache_of()
    buffers = cache.create_buffers(12, 2, 32, 1, "cpu")
    key = torch.ones(3, 2, 32, dtype=torch.float64)
    with pytest.raises(KVQuantizeError):
        cache.quantize_and_store(
            buffers["k_buffer"][0], buffers["v_buffer"][0], None, None, LOC, key, key
        )
    assert not buffers["k_buffer"][0].any()


def test_a_token_costs_its_rows_and_its_share_of_a_read() -> None:
    rows = 2 * 2 * (16 + 2) * 3
    assert cache_of().compute_cell_size(2, 32, 3, 1) == rows + 2 * 2 * 32 * 2


def test_there_is_no_workspace() -> None:
    with pytest.raises(NotImplementedError, match="read as plain K and V"):
        cache_of().dequantize_prev_kv()
