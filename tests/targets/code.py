"""Machine code of a kernel, and what is wrong with it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Bytes that a thread moves at once where it has that many to move.
WIDEST = 16
#: Fused operations that make up a division on AMD.
_FUSED_IN_DIVISION = 5
_AMD_SIZES = {
    "byte": 1,
    "ubyte": 1,
    "sbyte": 1,
    "short": 2,
    "ushort": 2,
    "dword": 4,
    "dwordx2": 8,
    "dwordx4": 16,
    "b8": 1,
    "u8": 1,
    "b16": 2,
    "u16": 2,
    "b32": 4,
    "b64": 8,
    "b128": 16,
}


@dataclass(frozen=True)
class Code:
    """A kernel, compiled.

    :param variant: what was asked for; ``form`` is its format.
    :param elements: how many K or V elements a thread has.
    :param loads: bytes that a thread loads of K or V, or of codes.
    :param stores: bytes that it stores of codes, or of values.
    :param wide: whether elements are numbered in 64 bits.
    :param block_scales: bytes of block scales that it loads or stores; 0 for FP8.
    :param assembly: PTX, or AMD's.
    :param resources: of a cubin, as ``cuobjdump`` prints them; empty for AMD.
    :param machine: of a cubin, where it was disassembled.
    """

    target: str
    variant: str
    form: str
    kernel: str
    elements: int
    loads: int
    stores: int
    wide: bool
    block_scales: int
    assembly: str
    resources: str = ""
    machine: str = ""

    @property
    def is_cuda(self) -> bool:
        return self.target.startswith("sm_")

    @property
    def quantizes(self) -> bool:
        return self.kernel.startswith("quantize")

    def count(self, pattern: str) -> int:
        return len(re.findall(pattern, self.assembly))


def faults(code: Code) -> list[str]:
    """What is wrong, each in some words; empty when nothing is."""
    own = _cuda_faults(code) if code.is_cuda else _amd_faults(code)
    return [f"{code.target} {code.variant}: {fault}" for fault in (*_access_faults(code), *own)]


def _access_faults(code: Code) -> Iterator[str]:
    """K and V in one launch may have become one path through the code, or two."""
    accesses = _cuda_accesses(code.assembly) if code.is_cuda else _amd_accesses(code.assembly)
    for name, expected in (("load", code.loads), ("store", code.stores)):
        width = min(WIDEST, expected)
        sizes = [size for access, size in accesses if access == name]
        if sizes.count(width) * width not in (expected, 2 * expected):
            yield f"{name}s {sizes} bytes at once, instead of {expected} as {width} at once"
        block_scales = [size for size in sizes if size < 4]
        if sum(block_scales) > 2 * code.block_scales:
            yield f"{name}s {block_scales} bytes at once of {code.block_scales} of block scales"
        # A scale, or that of a head, is read by itself.
        scales = [size for size in sizes if size != width and size >= 4]
        if scales not in ([], [4], [4, 4]) or (scales and name == "store"):
            yield f"{name}s {scales} bytes at once"


def _cuda_accesses(ptx: str) -> list[tuple[str, int]]:
    found = re.findall(r"\b(ld|st)\.global\.(?:\w+\.)*?(?:v(\d)\.)?[busf](\d+)\b", ptx)
    names = {"ld": "load", "st": "store"}
    return [(names[name], int(times or 1) * int(bits) // 8) for name, times, bits in found]


def _amd_accesses(assembly: str) -> list[tuple[str, int]]:
    found = re.findall(r"\b(?:buffer|global|flat)_(load|store)_(\w+)", assembly)
    return [(name, _AMD_SIZES[size]) for name, size in found]


def _cuda_faults(code: Code) -> Iterator[str]:
    if code.count(r"\.local\b") or not re.search(r"STACK:0 .*LOCAL:0\b", code.resources):
        yield f"local memory: {code.resources}"
    if re.search(r"\b(?:LDL|STL)\b", code.machine):
        yield "registers are spilled"
    for pattern in (r"\bfma\.", r"\.ftz\b", r"\.approx\b", r"\bdiv\.full\b"):
        if code.count(pattern):
            yield f"{pattern} in PTX"
    if code.quantizes != bool(code.count(r"\bdiv\.rn\.f32\b")):
        yield "division is not div.rn.f32"
    # The assembler makes a division of them.
    if not code.quantizes and re.search(r"\bFFMA", code.machine):
        yield "FFMA in SASS"


def _amd_faults(code: Code) -> Iterator[str]:
    for name in (".vgpr_spill_count:", ".sgpr_spill_count:", ".private_segment_fixed_size:"):
        if not code.count(rf"{re.escape(name)}\s+0\b"):
            yield f"{name} is not 0"
    if code.count(r"\bscratch_(?:load|store)"):
        yield "local memory"
    if not code.count(r"\.amdhsa_float_denorm_mode_32 3\b"):
        yield "float32 subnormals are flushed"
    divisions = code.count(r"\bv_div_fixup_f32")
    if code.quantizes != bool(divisions):
        yield "division is not that of IEEE"
    fused = code.count(r"\bv_(?:dual_|pk_)?(?:fma|fmac|fmaak|fmamk|mac|mad)_f32")
    # Integers of 64 bits are divided with the help of fused operations, too.
    if fused != _FUSED_IN_DIVISION * divisions and not code.wide:
        yield f"{fused} fused operations for {divisions} divisions"
    # Those that give NaN for NaN; the kernels count on the others.
    if code.count(r"\bv_(?:minimum|maximum)"):
        yield "a minimum or maximum that propagates NaN"
