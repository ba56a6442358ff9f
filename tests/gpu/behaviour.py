"""What only a GPU can show: graphs, streams, compilation, several cards and very many elements.

Run it with ``python -m tests.gpu.behaviour``; it needs no pytest. Checks compare with what a plain
call gives on the GPU; that those codes are right is the matter of ``kvcache-plugin selftest``. Exit
status 1 when one fails.
"""

from __future__ import annotations

import sys
import traceback
from typing import Final

import torch

import kvcache_plugin as kv

FORMATS: Final = ("fp8_e4m3", "fp8_e5m2", "nvfp4")
SHAPE: Final = (64, 8, 128)
#: float16, so that 2^31 of them and their codes fit beside each other on most cards.
MANY: Final = (1 << 31) + (1 << 20)


def k_and_v() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(1)
    key, value = (
        torch.randn(SHAPE, generator=generator, device="cuda", dtype=torch.bfloat16)
        for _ in range(2)
    )
    return key, value


def same(actual: kv.QuantizedKV, x: torch.Tensor, scale: float, kv_cache_dtype: str) -> None:
    """Bit-equal with a plain call."""
    expected = kv.quantize_kv(x, scale, kv_cache_dtype)
    for ours, plain in (
        (actual.data, expected.data),
        (actual.block_scales, expected.block_scales),
    ):
        if ours is not None and plain is not None:
            wrong = ours.view(torch.uint8) != plain.view(torch.uint8)
            assert not wrong.any(), f"{kv_cache_dtype}: {int(wrong.sum())} bytes differ"


def graph_uses_the_scale_of_its_replay(kv_cache_dtype: str) -> None:
    key, value = k_and_v()
    scale = torch.full((1,), 0.05, device="cuda")
    kv.quantize_kv_pair(key, value, scale, scale, kv_cache_dtype)  # compiles the kernels
    kv.quantize_kv(key, 0.05, kv_cache_dtype)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one = kv.quantize_kv(key, scale, kv_cache_dtype)
        pair = kv.quantize_kv_pair(key, value, scale, scale, kv_cache_dtype)
        from_number = kv.quantize_kv(key, 0.05, kv_cache_dtype)
        values = kv.dequantize_kv(one)
    for number in (0.05, 0.02, 1.5):
        scale.fill_(number)
        graph.replay()
        same(one, key, number, kv_cache_dtype)
        same(pair[0], key, number, kv_cache_dtype)
        same(pair[1], value, number, kv_cache_dtype)
        same(from_number, key, 0.05, kv_cache_dtype)
        assert torch.equal(values, kv.dequantize_kv(one))
    key.copy_(value)
    graph.replay()
    same(one, value, 1.5, kv_cache_dtype)


def nothing_waits_for_the_device(kv_cache_dtype: str) -> None:
    key, value = k_and_v()
    scale = torch.full((1,), 0.05, device="cuda")
    kv.quantize_kv(key, scale, kv_cache_dtype)
    torch.cuda.set_sync_debug_mode("error")
    try:
        quantized = kv.quantize_kv(key, 0.05, kv_cache_dtype)
        kv.quantize_kv_pair(key, value, scale, scale, kv_cache_dtype)
        kv.dequantize_kv(quantized)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def compiles_whole(kv_cache_dtype: str) -> None:
    key, _ = k_and_v()
    scale = torch.full((1,), 0.05, device="cuda")

    @torch.compile(fullgraph=True)  # type: ignore[untyped-decorator]
    def there_and_back(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        quantized = kv.quantize_kv(x * 2, scale, kv_cache_dtype)
        return quantized.data, kv.dequantize_kv(quantized)

    expected = kv.quantize_kv(key * 2, scale, kv_cache_dtype)
    data, values = there_and_back(key)
    assert torch.equal(data.view(torch.uint8), expected.data.view(torch.uint8))
    assert torch.equal(values, kv.dequantize_kv(expected))


def runs_on_the_callers_stream(kv_cache_dtype: str) -> None:
    key, _ = k_and_v()
    scale = torch.full((1,), 0.05, device="cuda")
    kv.quantize_kv(key, scale, kv_cache_dtype)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = torch.zeros_like(key)
        torch.cuda._sleep(50_000_000)
        late.copy_(key)
        quantized = kv.quantize_kv(late, scale, kv_cache_dtype)
    stream.synchronize()
    same(quantized, key, 0.05, kv_cache_dtype)


def serves_a_card_that_is_not_current(kv_cache_dtype: str) -> None:
    if torch.cuda.device_count() < 2:
        print("    (one card only: not run)")
        return
    key, _ = k_and_v()
    same(kv.quantize_kv(key.to("cuda:1"), 0.05, kv_cache_dtype), key, 0.05, kv_cache_dtype)


def more_than_two_to_the_31_elements(kv_cache_dtype: str) -> None:
    """The ends of a tensor that 32 bits cannot number, against the same parts by themselves."""
    free, _ = torch.cuda.mem_get_info()
    if free < 12 * MANY // 2:
        print(f"    ({free >> 30} GiB free are too few: not run)")
        return
    big = torch.empty(MANY // 1024, 8, 128, dtype=torch.float16, device="cuda")
    ends = (slice(0, 64), slice(-64, None))
    for end in ends:
        big[end].normal_()
    scale = torch.full((1,), 0.05, device="cuda")
    whole = kv.quantize_kv(big, scale, kv_cache_dtype)
    for end in ends:
        part = kv.quantize_kv(big[end], scale, kv_cache_dtype)
        assert torch.equal(whole.data[end].view(torch.uint8), part.data.view(torch.uint8))
        if whole.block_scales is not None and part.block_scales is not None:
            ours, theirs = whole.block_scales[end], part.block_scales
            assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    values = kv.dequantize_kv(whole, dtype=torch.float16)
    for end in ends:
        part = kv.quantize_kv(big[end], scale, kv_cache_dtype)
        assert torch.equal(values[end], kv.dequantize_kv(part, dtype=torch.float16))


CHECKS: Final = (
    graph_uses_the_scale_of_its_replay,
    nothing_waits_for_the_device,
    compiles_whole,
    runs_on_the_callers_stream,
    serves_a_card_that_is_not_current,
    more_than_two_to_the_31_elements,
)


def main() -> int:
    failed = 0
    for check in CHECKS:
        for kv_cache_dtype in FORMATS:
            name = f"{check.__name__}[{kv_cache_dtype}]"
            try:
                check(kv_cache_dtype)
            except Exception:
                failed += 1
                print(f"failed {name}\n{traceback.format_exc()}")
            else:
                print(f"passed {name}")
            torch.cuda.empty_cache()
    print(f"{len(CHECKS) * len(FORMATS) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
