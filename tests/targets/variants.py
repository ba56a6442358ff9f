"""What the launch code is asked for, so that each kernel is compiled in the ways that differ.

Tensors are on torch's device ``meta``: they have shapes, strides and an alignment, and no memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from kvcache_plugin import OutBuffers, QuantizedKV

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

    from kvcache_plugin import Device

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
E4M3, E5M2, FNUZ, NVFP4 = "fp8_e4m3", "fp8_e5m2", "fp8_e4m3fnuz", "nvfp4"
CODES = {
    E4M3: torch.float8_e4m3fn,
    E5M2: torch.float8_e5m2,
    FNUZ: torch.float8_e4m3fnuz,
    NVFP4: torch.uint8,
}
# How ``[blocks, tokens, heads, length]`` lies in memory. All leading dimensions of the first can be
# merged; the others are left with one, two and three.
PACKED, PADDED, BESIDE, HEADS_FIRST = "packed", "padded", "beside", "heads first"
TOKENS, HEADS = 16, 8
#: So many that an element's number does not fit into 32 bits.
MANY_BLOCKS = 2**18


@dataclass(frozen=True)
class Variant:
    """One launch.

    :param dtype: of K, or of the values that codes become.
    :param source: layout of what is read; ``target`` of the caller's buffers, ``None`` without.
    :param misaligned: what is read begins one element after a multiple of 16 bytes.
    :param options: put in place of those that the launch code gives Triton.
    """

    form: str
    dtype: torch.dtype
    source: str = PACKED
    target: str | None = None
    pair: bool = False
    per_head: bool = False
    head_dim: int = 128
    blocks: int = 64
    misaligned: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def launch(self, triton_launch: ModuleType, device: Device) -> None:
        raise NotImplementedError

    def tensor(self, layout: str, length: int, dtype: torch.dtype) -> torch.Tensor:
        blocks = self.blocks
        if layout == PADDED:
            return self.empty(blocks, TOKENS, HEADS, 2 * length, dtype=dtype)[..., :length]
        if layout == BESIDE:
            return self.empty(blocks, 2, TOKENS, HEADS, length, dtype=dtype)[:, 0]
        if layout == HEADS_FIRST:
            return self.empty(blocks, HEADS, TOKENS, length, dtype=dtype).transpose(1, 2)
        return self.empty(blocks, TOKENS, HEADS, length, dtype=dtype)

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        before = int(self.misaligned)
        count = torch.Size(shape).numel()
        return torch.empty(before + count, dtype=dtype, device="meta")[before:].view(shape)

    def buffers(self, layout: str) -> OutBuffers:
        codes = CODES[self.form]
        if self.form != NVFP4:
            return OutBuffers(self.tensor(layout, self.head_dim, codes))
        return OutBuffers(
            self.tensor(layout, self.head_dim // 2, codes),
            self.tensor(layout, self.head_dim // 16, torch.float8_e4m3fn),
        )

    def scale(self) -> torch.Tensor:
        return torch.empty(HEADS if self.per_head else 1, device="meta")


class Quantize(Variant):
    def launch(self, triton_launch: ModuleType, device: Device) -> None:
        sides = 2 if self.pair else 1
        out = None if self.target is None else self.buffers(self.target)
        triton_launch.quantize(
            [self.tensor(self.source, self.head_dim, self.dtype)] * sides,
            [self.scale()] * sides,
            self.form,
            device,
            None if out is None else [out] * sides,
        )


class Dequantize(Variant):
    def launch(self, triton_launch: ModuleType, device: Device) -> None:
        codes = self.buffers(self.source)
        triton_launch.dequantize(QuantizedKV(*codes, self.scale(), self.form), self.dtype)


VARIANTS: tuple[Variant, ...] = (
    Quantize(E4M3, BF16),
    Quantize(E4M3, FP16),
    Quantize(E4M3, FP32, pair=True),
    Quantize(E5M2, BF16),
    Quantize(FNUZ, BF16),
    Quantize(E4M3, BF16, PADDED, PACKED),
    Quantize(E4M3, BF16, BESIDE, BESIDE, pair=True, per_head=True),
    Quantize(E5M2, FP16, HEADS_FIRST, HEADS_FIRST, per_head=True, head_dim=80),
    Quantize(FNUZ, FP16, PACKED, HEADS_FIRST, pair=True, per_head=True, head_dim=64),
    Quantize(E4M3, BF16, pair=True, blocks=MANY_BLOCKS),
    Quantize(E5M2, FP32, PADDED, BESIDE, per_head=True, blocks=MANY_BLOCKS),
    Quantize(NVFP4, BF16),
    Quantize(NVFP4, FP16),
    Quantize(NVFP4, FP32, pair=True),
    Quantize(NVFP4, BF16, PADDED, PACKED),
    Quantize(NVFP4, BF16, BESIDE, BESIDE, pair=True),
    Quantize(NVFP4, FP16, HEADS_FIRST, HEADS_FIRST, head_dim=64),
    Quantize(NVFP4, BF16, pair=True, blocks=MANY_BLOCKS),
    Quantize(NVFP4, FP32, PADDED, BESIDE, blocks=MANY_BLOCKS),
    Dequantize(E4M3, BF16),
    Dequantize(E4M3, FP32, per_head=True),
    Dequantize(E5M2, FP16),
    Dequantize(FNUZ, BF16),
    Dequantize(E4M3, FP16, PADDED),
    Dequantize(E4M3, BF16, BESIDE, per_head=True),
    Dequantize(E5M2, BF16, HEADS_FIRST, head_dim=80),
    Dequantize(E4M3, BF16, blocks=MANY_BLOCKS),
    Dequantize(FNUZ, FP32, HEADS_FIRST, per_head=True, blocks=MANY_BLOCKS),
    Dequantize(NVFP4, BF16),
    Dequantize(NVFP4, FP16),
    Dequantize(NVFP4, FP32),
    Dequantize(NVFP4, BF16, PADDED),
    Dequantize(NVFP4, BF16, BESIDE),
    Dequantize(NVFP4, FP16, HEADS_FIRST, head_dim=64),
    Dequantize(NVFP4, BF16, blocks=MANY_BLOCKS),
    Dequantize(NVFP4, FP32, HEADS_FIRST, blocks=MANY_BLOCKS),
)
#: Every variant is compiled for the first of these, and the plainest for the others.
TARGETS = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950")
OTHER_TARGETS = ("sm_89", "gfx90a", "gfx1201")


def variants_for(target: str) -> list[Variant]:
    plain = [each for each in VARIANTS if each.source == PACKED and each.target is None]
    return list(VARIANTS) if target in TARGETS else plain


_FUSED = Quantize(NVFP4, BF16, options={"enable_fp_fusion": True})
_NARROW = Quantize(E4M3, BF16, misaligned=True)
#: With what the checks must find fault.
FAULTY: dict[str, dict[str, Variant]] = {
    "sm_90": {
        "fused": _FUSED,
        "narrow": _NARROW,
        "spilled": Quantize(NVFP4, BF16, options={"maxnreg": 32}),
    },
    "gfx942": {
        "fused": _FUSED,
        "narrow": _NARROW,
        "spilled": Quantize(NVFP4, FP32, options={"num_warps": 1, "waves_per_eu": 8}),
    },
}
#: What an engine asks for as the number of tokens changes from step to step.
STEPS: tuple[Variant, ...] = tuple(
    replace(variant, blocks=blocks)
    for variant in (
        Quantize(E4M3, BF16, BESIDE, BESIDE, pair=True),
        Quantize(NVFP4, BF16, BESIDE, BESIDE, pair=True),
        Dequantize(E4M3, BF16, BESIDE),
        Dequantize(NVFP4, BF16, BESIDE),
    )
    for blocks in (2, 3, 5, 16, 17, 32)
)
