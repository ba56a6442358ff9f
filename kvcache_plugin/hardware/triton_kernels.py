"""Triton kernels that quantize and dequantize K and V: FP8 and NVFP4.

They compute what the CPU reference defines, bit for bit: IEEE division, ties to even, saturation
before any cast, no contraction of a product and a sum (they are launched with FP fusion off).
Codes are rounded in integers, and by the GPU's own cast only where ``NATIVE`` says that it has one.
Codes and block scales are passed as bytes, so that no target needs to know the FP8 types.

K and V come by two branches, for Triton loses what it knows of the alignment of a pointer that is
chosen between two.

Elements are numbered through all rows, ``[..., head_dim]`` flattened. A program takes ``BLOCK`` of
them; with ``WIDE`` they are numbered in 64 bits. Rows of a strided tensor are found by up to three
strides, those of a packed one (``*_DIMS`` 0) follow one another.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: NVFP4: values that share a block scale.
VALUES_PER_SCALE = tl.constexpr(16)
_FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)


@triton.jit(do_not_specialize=["middle", "inner"])
def quantize_fp8(
    key,
    key_scale,
    key_codes,
    value,
    value_scale,
    value_codes,
    count,
    middle,
    inner,
    stride_2,
    stride_1,
    stride_0,
    code_stride_2,
    code_stride_1,
    code_stride_0,
    PAIR: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    DIMS: tl.constexpr,
    CODE_DIMS: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    LARGEST: tl.constexpr,
    FNUZ: tl.constexpr,
    NATIVE: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """K, and V where ``PAIR``: ``R(clamp(x / s, ±LARGEST))``.

    :param key: float32, bfloat16 or float16; strides are in elements.
    :param key_scale: float32, one element, or ``HEADS``.
    :param key_codes: bytes.
    :param count: elements of K.
    """
    element = _elements(WIDE, BLOCK)
    inside = element < count
    row, column = element // HEAD_DIM, element % HEAD_DIM
    at = element
    if DIMS > 0:
        at = _row_start(row, middle, inner, stride_2, stride_1, stride_0, DIMS) + column
    code_at = element
    if CODE_DIMS > 0:
        code_at = (
            _row_start(row, middle, inner, code_stride_2, code_stride_1, code_stride_0, CODE_DIMS)
            + column
        )
    if PAIR and tl.program_id(1) == 1:
        x = _float32(tl.load(value + at, mask=inside, other=0.0))
        scale = _scale_of(value_scale, row, HEAD_DIM, HEADS, WIDE, BLOCK)
        codes = _fp8_codes(x, scale, MANTISSA, BIAS, LARGEST, FNUZ, NATIVE)
        tl.store(value_codes + code_at, codes, mask=inside)
    else:
        x = _float32(tl.load(key + at, mask=inside, other=0.0))
        scale = _scale_of(key_scale, row, HEAD_DIM, HEADS, WIDE, BLOCK)
        codes = _fp8_codes(x, scale, MANTISSA, BIAS, LARGEST, FNUZ, NATIVE)
        tl.store(key_codes + code_at, codes, mask=inside)


@triton.jit(do_not_specialize=["middle", "inner"])
def dequantize_fp8(
    codes,
    scale,
    values,
    count,
    middle,
    inner,
    stride_2,
    stride_1,
    stride_0,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    DIMS: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    FNUZ: tl.constexpr,
    INTERPRETED: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``R_dtype(fp32(code) · s)``; ``values`` are packed."""
    element = _elements(WIDE, BLOCK)
    inside = element < count
    row, column = element // HEAD_DIM, element % HEAD_DIM
    at = element
    if DIMS > 0:
        at = _row_start(row, middle, inner, stride_2, stride_1, stride_0, DIMS) + column
    code = tl.load(codes + at, mask=inside, other=0).to(tl.int32)
    each = _scale_of(scale, row, HEAD_DIM, HEADS, WIDE, BLOCK)
    x = _fp8_values(code, MANTISSA, BIAS, FNUZ) * each
    tl.store(values + element, _narrow(x, values, INTERPRETED), mask=inside)


@triton.jit(do_not_specialize=["block_count", "middle", "inner"])
def quantize_nvfp4(
    key,
    key_scale,
    key_codes,
    key_block_scales,
    value,
    value_scale,
    value_codes,
    value_block_scales,
    count,
    code_count,
    block_count,
    middle,
    inner,
    stride_2,
    stride_1,
    stride_0,
    code_stride_2,
    code_stride_1,
    code_stride_0,
    block_stride_2,
    block_stride_1,
    block_stride_0,
    PAIR: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    CODE_DIMS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """K, and V where ``PAIR``: e2m1 codes, two to a byte, and e4m3 block scales.

    ``code_count`` is ``count / 2`` and ``block_count`` is ``count / 16``, each an argument of its
    own: what Triton knows of its alignment lets a thread store 16 bytes at once.
    """
    element = _elements(WIDE, BLOCK)
    inside = element < count
    at = element
    if DIMS > 0:
        row = element // HEAD_DIM
        at = _row_start(row, middle, inner, stride_2, stride_1, stride_0, DIMS) + element % HEAD_DIM

    code = _elements(WIDE, BLOCK // 2)
    code_inside = code < code_count
    block = _elements(WIDE, BLOCK // VALUES_PER_SCALE)
    block_inside = block < block_count
    code_at, block_at = code, block
    if CODE_DIMS > 0:
        CODES: tl.constexpr = HEAD_DIM // 2
        code_at = (
            _row_start(
                code // CODES, middle, inner, code_stride_2, code_stride_1, code_stride_0, CODE_DIMS
            )
            + code % CODES
        )
        BLOCKS: tl.constexpr = HEAD_DIM // VALUES_PER_SCALE
        block_at = (
            _row_start(
                block // BLOCKS,
                middle,
                inner,
                block_stride_2,
                block_stride_1,
                block_stride_0,
                CODE_DIMS,
            )
            + block % BLOCKS
        )
    if PAIR and tl.program_id(1) == 1:
        x = _float32(tl.load(value + at, mask=inside, other=0.0))
        codes, block_scales = _nvfp4_codes(x, tl.load(value_scale), BLOCK)
        tl.store(value_codes + code_at, codes, mask=code_inside)
        tl.store(value_block_scales + block_at, block_scales, mask=block_inside)
    else:
        x = _float32(tl.load(key + at, mask=inside, other=0.0))
        codes, block_scales = _nvfp4_codes(x, tl.load(key_scale), BLOCK)
        tl.store(key_codes + code_at, codes, mask=code_inside)
        tl.store(key_block_scales + block_at, block_scales, mask=block_inside)


@triton.jit(do_not_specialize=["block_count", "middle", "inner"])
def dequantize_nvfp4(
    codes,
    block_scales,
    scale,
    values,
    count,
    code_count,
    block_count,
    middle,
    inner,
    stride_2,
    stride_1,
    stride_0,
    block_stride_2,
    block_stride_1,
    block_stride_0,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``R_dtype((e2m1(code) · sf) · g)``; ``values`` are packed."""
    code = _elements(WIDE, BLOCK // 2)
    block = _elements(WIDE, BLOCK // VALUES_PER_SCALE)
    code_at, block_at = code, block
    if DIMS > 0:
        CODES: tl.constexpr = HEAD_DIM // 2
        code_at = _row_start(code // CODES, middle, inner, stride_2, stride_1, stride_0, DIMS)
        code_at += code % CODES
        BLOCKS: tl.constexpr = HEAD_DIM // VALUES_PER_SCALE
        block_at = _row_start(
            block // BLOCKS, middle, inner, block_stride_2, block_stride_1, block_stride_0, DIMS
        )
        block_at += block % BLOCKS
    both = tl.load(codes + code_at, mask=code < code_count, other=0).to(tl.int32)
    block_scale = tl.load(block_scales + block_at, mask=block < block_count, other=0)
    sf = _repeated(_fp8_values(block_scale.to(tl.int32), 3, 7, False), VALUES_PER_SCALE // 2)
    g = tl.load(scale)
    low = _signed_float(both << 28, 4, 2, 1) * sf * g
    high = _signed_float(both << 24, 4, 2, 1) * sf * g
    element = _elements(WIDE, BLOCK)
    x = tl.reshape(tl.join(low, high), (BLOCK,))
    tl.store(values + element, _narrow(x, values, INTERPRETED), mask=element < count)


# What they share.


@triton.jit
def _elements(WIDE: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    if WIDE:
        program = program.to(tl.int64)
    return program * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _row_start(row, middle, inner, stride_2, stride_1, stride_0, DIMS: tl.constexpr):
    """Where a row begins; rows are numbered through ``[outer, middle, inner]``."""
    if DIMS == 1:
        start = row * stride_0
    elif DIMS == 2:
        start = row // inner * stride_1 + row % inner * stride_0
    else:
        outer = row // inner
        start = outer // middle * stride_2 + outer % middle * stride_1 + row % inner * stride_0
    return start


@triton.jit
def _scale_of(
    scale,
    row,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The scale, or that of each element's head; rows past the last one have a head, too."""
    if HEADS == 1:
        each = tl.load(scale)
    elif HEAD_DIM % 16 == 0:
        # 16 elements, as many as a thread has, are of one row: their scale is read once.
        rows = _elements(WIDE, BLOCK // 16) // (HEAD_DIM // 16)
        each = _repeated(tl.load(scale + rows % HEADS), 16)
    else:
        each = tl.load(scale + row % HEADS)
    return each


@triton.jit
def _repeated(x, TIMES: tl.constexpr):
    """Each element of ``x``, ``TIMES`` times over."""
    wide = tl.broadcast_to(x[:, None], (x.shape[0], TIMES))
    return tl.reshape(wide, (x.shape[0] * TIMES,))


@triton.jit
def _float32(x):
    """Widened exactly. bfloat16 is the upper half of float32."""
    if x.dtype == tl.bfloat16:
        wide = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        wide = x.to(tl.float32)
    return wide


@triton.jit
def _narrow(x, values, INTERPRETED: tl.constexpr):
    """Rounded once to the dtype that ``values`` points to.

    Triton's interpreter does not round to nearest even when it narrows to bfloat16.
    """
    if INTERPRETED and values.dtype.element_ty == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x != x, 0x7FC0, rounded)
        narrow = rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        narrow = x.to(values.dtype.element_ty)
    return narrow


@triton.jit
def _rounded(magnitude, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """The code of a magnitude within the format's range, to nearest and ties to even, in integers.

    Normal codes: drop all but ``MANTISSA`` bits and move the exponent's bias. Subnormal ones: added
    to ``2^23`` of the smallest steps, a float32 has the count of steps as its last bits, rounded by
    the addition.
    """
    bits = magnitude.to(tl.int32, bitcast=True)
    SHIFT: tl.constexpr = 23 - MANTISSA
    odd = (bits >> SHIFT) & 1
    normal = ((bits + odd + ((1 << (SHIFT - 1)) - 1)) >> SHIFT) - ((127 - BIAS) << MANTISSA)
    STEPS: tl.constexpr = 2.0 ** (24 - BIAS - MANTISSA)
    STEPS_BITS: tl.constexpr = (127 + 24 - BIAS - MANTISSA) << 23
    subnormal = (magnitude + STEPS).to(tl.int32, bitcast=True) - STEPS_BITS
    SMALLEST_NORMAL: tl.constexpr = 2.0 ** (1 - BIAS)
    return tl.where(magnitude < SMALLEST_NORMAL, subnormal, normal)


@triton.jit
def _fp8_codes(
    x,
    scale,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    LARGEST: tl.constexpr,
    FNUZ: tl.constexpr,
    NATIVE: tl.constexpr,
):
    quotient = tl.div_rn(x, scale)
    if NATIVE:
        quotient = tl.minimum(quotient, LARGEST, propagate_nan=tl.PropagateNan.ALL)
        quotient = tl.maximum(quotient, -LARGEST, propagate_nan=tl.PropagateNan.ALL)
        if MANTISSA == 3:
            codes = quotient.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        else:
            codes = quotient.to(tl.float8e5).to(tl.uint8, bitcast=True)
    else:
        magnitude = _rounded(tl.minimum(tl.abs(quotient), LARGEST), MANTISSA, BIAS)
        sign = (quotient.to(tl.int32, bitcast=True) >> 24) & 0x80
        if FNUZ:
            # 0x80 is NaN, and there is no negative zero.
            signed = tl.where(magnitude == 0, 0, magnitude | sign)
            signed = tl.where(quotient != quotient, 0x80, signed)
        else:
            signed = tl.where(quotient != quotient, 0x7F, magnitude) | sign
        codes = signed.to(tl.uint8)
    return codes


@triton.jit
def _fp8_values(codes, MANTISSA: tl.constexpr, BIAS: tl.constexpr, FNUZ: tl.constexpr):
    """The float32 of codes from 0 to 255."""
    if MANTISSA == 2:
        # e5m2 is the upper byte of float16.
        values = (codes << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        values = _signed_float(codes << 24, 8, 7 - MANTISSA, BIAS)
        if FNUZ:
            values = tl.where(codes == 0x80, float("nan"), values)
        else:
            # 0x7F is NaN, and would be 480 if it were a number.
            values = tl.where(tl.abs(values) == 480.0, float("nan"), values)
    return values


@triton.jit
def _signed_float(code, BITS: tl.constexpr, EXPONENT_BITS: tl.constexpr, BIAS: tl.constexpr):
    """The float32 of a code of ``BITS`` bits, which are the upper ones of an int32.

    Sign, exponent and mantissa are moved to those of float32, where the bias is another; exact.
    """
    KEPT: tl.constexpr = ((1 << (BITS - 1)) - 1) << (24 - BITS + EXPONENT_BITS)
    bits = (code >> (8 - EXPONENT_BITS)) & (KEPT - 0x80000000)
    return bits.to(tl.float32, bitcast=True) * 2.0 ** (127 - BIAS)


@triton.jit
def _nvfp4_codes(x, g, BLOCK: tl.constexpr):
    """e2m1 codes, packed, and e4m3 block scales of ``BLOCK`` values with global scale ``g``."""
    x = tl.reshape(x, (BLOCK // VALUES_PER_SCALE, VALUES_PER_SCALE))
    # NaN counts as 0. A maximum would not do: AMD's is NaN where an operand is a signalling one.
    magnitude = tl.where(x == x, tl.abs(x), 0.0)
    largest = tl.max(magnitude, 1)
    ideal = tl.minimum(tl.div_rn(largest, 6.0 * g), 448.0)
    # Also where 6·g is infinite, and the quotient of the two NaN.
    ideal = tl.where(largest == float("inf"), 448.0, ideal)
    block_scale = _rounded(ideal, 3, 7)
    sf = (block_scale << 20).to(tl.float32, bitcast=True) * 2.0**120
    reciprocal = tl.minimum(tl.div_rn(1.0, sf * g), _FLOAT32_MAX)
    reciprocal = tl.where(sf == 0.0, 0.0, reciprocal)
    # inf · 0 is 0, too.
    most = tl.where(reciprocal == 0.0, 0.0, 6.0)
    scaled = tl.minimum(magnitude * reciprocal[:, None], most[:, None])
    codes = _e2m1_codes(scaled) | ((x.to(tl.int32, bitcast=True) >> 28) & 8)
    low, high = tl.split(tl.reshape(codes, (BLOCK // 2, 2)))
    return (low | (high << 4)).to(tl.uint8), block_scale.to(tl.uint8)


@triton.jit
def _e2m1_codes(magnitude):
    """Codes 0 to 7 of magnitudes up to 6: bits 0 to 2 of the result. Bits 3 to 22 are 0.

    A magnitude is added to a number whose unit in the last place is the step between codes there,
    so that the addition rounds it to a code, ties to even:

    ==========  =====  ============  =====================
    magnitude   power  added         codes, steps counted
    ==========  =====  ============  =====================
    below 2     1      2^22          0 to 4, from 0
    below 4     2      2^23 + 2      4 to 6, from 2
    up to 6     4      2^24 + 8      6 and 7, from 4
    ==========  =====  ============  =====================
    """
    power = (magnitude.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    # 1 and less become a bit more than 1, of which the formula makes 2^22.
    power = tl.maximum(power, 1.0 + 2.0**-22)
    return (magnitude + (power * (2.0**22 + 3.0) - 4.0)).to(tl.int32, bitcast=True)
