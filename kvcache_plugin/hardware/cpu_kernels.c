/*
 * Quantizes and dequantizes K and V on a CPU, with the bits of cpu_reference.py.
 *
 * Plain C11: the loops are written so that a compiler vectorises them, and nothing depends on the
 * instructions that it finds. Floating-point arithmetic is IEEE float32, rounded to nearest; no
 * product and sum may be contracted to one operation (-ffp-contract=off), but for the explicit
 * fmaf below. Nothing is left behind by a call: threads are joined before it returns.
 */

#include <fenv.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define NOINLINE static __attribute__((noinline))

enum dtype { FLOAT32, BFLOAT16, FLOAT16 };
enum format { E4M3, E5M2, E4M3FNUZ, NVFP4 };
enum operation { QUANTIZE, DEQUANTIZE };

enum {
    BLOCK = 16,  /* values that share an NVFP4 block scale */
    CHUNK = 32,  /* blocks that are worked on together: their buffers stay in the first cache */
    MOST_DIMS = 8,
    MOST_THREADS = 256,
    CACHE_LINE = 64,  /* bytes, of most machines */
    ALIGNMENT = 64,  /* values: where the work of one thread ends and the next begins */
};

#define FLOAT32_MAX 0x1.fffffep127f
#define EXPONENT 0x7F800000u
#define MAGNITUDE 0x7FFFFFFFu
#define QUIET_NAN 0x7FC00000u

/* What a call is about. Python packs it, so that every field has 64 bits. Lengths and strides are
 * those of the leading dimensions, in elements; the last dimension is dense everywhere. */
typedef struct {
    int64_t operation, dtype, format;
    int64_t heads;  /* 1, or the length of the last leading dimension: a scale for each of these */
    int64_t threads;
    uint64_t values, data, block_scales, scale;  /* addresses */
    int64_t width;  /* values of a row */
    int64_t dims;
    int64_t geometry[];  /* [4][dims]: lengths, strides of values, data, and block scales */
} job;

/* The rows of a job with dimensions merged that follow one another in memory. */
typedef struct {
    int dims;
    int64_t count, width;
    int64_t length[MOST_DIMS], values[MOST_DIMS], data[MOST_DIMS], block_scales[MOST_DIMS];
} rows;

typedef struct {
    const job *job;
    const rows *rows;
    int64_t begin, end;  /* values, counted through all rows */
} part;

/* An 8-bit format. */
typedef struct {
    float largest;
    uint32_t mantissa;  /* bits */
    uint32_t lowest;    /* biased float32 exponent of the smallest normal value */
    uint32_t nan;
    uint32_t negative_zero;  /* 0 where there is none */
    /* A code is infinite or NaN where (code & special_mask ^ special_flip) >= special. */
    uint32_t special_mask, special_flip, special;
} minifloat;

INLINE minifloat minifloat_of(int64_t format) {
    if (format == E5M2) return (minifloat){57344.0f, 2, 113, 0x7F, 0x80, 0x7F, 0, 0x7C};
    if (format == E4M3FNUZ) return (minifloat){240.0f, 3, 120, 0x80, 0, 0xFF, 0x7F, 0xFF};
    return (minifloat){448.0f, 3, 121, 0x7F, 0x80, 0x7F, 0, 0x7F};
}

INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

INLINE float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* a + b·c with one rounding, where c is a power of two: the product is exact, the sum is rounded. */
INLINE float add_scaled(float a, float b, float c) {
#ifdef FP_FAST_FMAF
    return fmaf(b, c, a);
#else
    return a + b * c;
#endif
}

/* float16 of a magnitude, exactly. */
INLINE float half_value(uint16_t magnitude) {
    uint32_t bits = (uint32_t)magnitude << 13;
    float subnormal = (float)(int32_t)magnitude * 0x1p-24f;
    uint32_t normal = bits + (magnitude >= 0x7C00 ? 224u << 23 : 112u << 23);
    return magnitude < 0x0400 ? subnormal : float_of(normal);
}

/* The code of a finite magnitude within a format's reach, ties to even.
 *
 * The sum with a power of two that is 2^(23 - mantissa) times that of the magnitude is rounded
 * where the code ends, and holds its mantissa in the lowest bits. */
INLINE uint32_t encode(float magnitude, uint32_t mantissa, uint32_t lowest) {
    uint32_t dropped = 23 - mantissa;
    uint32_t exponent = bits_of(magnitude) & EXPONENT;
    exponent = exponent > lowest << 23 ? exponent : lowest << 23;
    uint32_t power = exponent + (dropped << 23);
    uint32_t rounded = bits_of(magnitude + float_of(power));
    return rounded - power + ((exponent - (lowest << 23)) >> dropped);
}

/* The value of a code without its sign that is neither NaN nor infinite. */
INLINE float decode(uint32_t code, uint32_t mantissa, uint32_t lowest) {
    float step = float_of((lowest - mantissa) << 23);
    uint32_t normal = (code << (23 - mantissa)) + ((lowest - 1) << 23);
    float subnormal = (float)(int32_t)code * step;
    return code >> mantissa ? float_of(normal) : subnormal;
}

INLINE int64_t size_of(int dtype) { return dtype == FLOAT32 ? 4 : 2; }

/* The bits of a value without its sign, and the sign in the highest bit of a byte. */
INLINE uint32_t magnitude_at(const void *x, int64_t i, int dtype) {
    if (dtype == FLOAT32) return ((const uint32_t *)x)[i] & MAGNITUDE;
    return ((const uint16_t *)x)[i] & 0x7FFF;
}

INLINE uint8_t sign_at(const void *x, int64_t i, int dtype) {
    if (dtype == FLOAT32) return ((const uint32_t *)x)[i] >> 24 & 0x80;
    return ((const uint16_t *)x)[i] >> 8 & 0x80;
}

INLINE float value_of(uint32_t magnitude, int dtype) {
    if (dtype == FLOAT32) return float_of(magnitude);
    if (dtype == BFLOAT16) return float_of(magnitude << 16);
    return half_value((uint16_t)magnitude);
}

INLINE float signed_at(const void *x, int64_t i, int dtype) {
    if (dtype == FLOAT32) return ((const float *)x)[i];
    if (dtype == BFLOAT16) return float_of((uint32_t)((const uint16_t *)x)[i] << 16);
    float magnitude = half_value(((const uint16_t *)x)[i] & 0x7FFF);
    return float_of(bits_of(magnitude) | (uint32_t)sign_at(x, i, dtype) << 24);
}

INLINE uint32_t infinity_of(int dtype) {
    return dtype == FLOAT32 ? EXPONENT : dtype == BFLOAT16 ? EXPONENT >> 16 : 0x7C00;
}

/* Store a float32, rounded once; a NaN has to be a QUIET_NAN, whose lowest bits are 0. */
INLINE void store(void *x, int64_t i, float value, int dtype) {
    uint32_t bits = bits_of(value), magnitude = bits & MAGNITUDE;
    if (dtype == FLOAT32) {
        ((uint32_t *)x)[i] = bits;
    } else if (dtype == BFLOAT16) {
        ((uint16_t *)x)[i] = (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
    } else {
        float within = float_of(magnitude < bits_of(65536.0f) ? magnitude : bits_of(65536.0f));
        uint32_t code = encode(within, 10, 113);
        code = magnitude > EXPONENT ? 0x7E00 : code;
        ((uint16_t *)x)[i] = (uint16_t)(code | (bits >> 16 & 0x8000));
    }
}

/* Has the memory of the chunk after the next one brought into the cache; it may be nobody's. */
INLINE void fetch_ahead(const char *values, const uint8_t *data, int64_t size, int64_t per_byte) {
    const uintptr_t chunk = CHUNK * BLOCK, x = (uintptr_t)values, codes = (uintptr_t)data;
    const uintptr_t of_values = chunk * (uintptr_t)size, of_codes = chunk / (uintptr_t)per_byte;
    for (uintptr_t i = 0; i < of_values; i += CACHE_LINE)
        __builtin_prefetch((const void *)(x + 2 * of_values + i));
    for (uintptr_t i = 0; i < of_codes; i += CACHE_LINE)
        __builtin_prefetch((const void *)(codes + 2 * of_codes + i));
}

/* FP8 */

/* The code of a quotient's magnitude. */
INLINE uint8_t saturated(uint32_t magnitude, uint32_t sign, minifloat f) {
    float within = float_of(magnitude);
    within = within < f.largest ? within : f.largest;
    uint32_t code = encode(within, f.mantissa, f.lowest);
    code = magnitude > EXPONENT ? f.nan : code;
    sign = code ? sign : sign & f.negative_zero;
    return (uint8_t)(code | sign);
}

INLINE void divide_fp8(
    const void *restrict x, uint8_t *restrict codes, int64_t count, float scale, minifloat f,
    int dtype
) {
    for (int64_t i = 0; i < count; i++) {
        uint32_t quotient = bits_of(signed_at(x, i, dtype) / scale);
        codes[i] = saturated(quotient & MAGNITUDE, quotient >> 24 & 0x80, f);
    }
}

#ifdef FP_FAST_FMAF
/* Divides by a multiplication and one step of correction, which is twice as fast: processors have
 * few dividers, and hyperthreads share them. Where a code could depend on it the quotient is the
 * rounded one: next to the numbers that are halfway between two codes, which tests try. It needs
 * scales with which nothing overflows, and what underflows is far below the smallest code. */
INLINE void multiply_fp8(
    const void *restrict x, uint8_t *restrict codes, int64_t count, float scale, minifloat f,
    int dtype
) {
    const float reciprocal = 1.0f / scale, most = 2.0f * f.largest * scale;
    for (int64_t i = 0; i < count; i++) {
        uint32_t magnitude = bits_of(value_of(magnitude_at(x, i, dtype), dtype));
        float within = float_of(magnitude);
        within = within < most ? within : most;
        float quotient = within * reciprocal;
        quotient = fmaf(fmaf(-quotient, scale, within), reciprocal, quotient);
        magnitude = magnitude > EXPONENT ? magnitude : bits_of(quotient);
        codes[i] = saturated(magnitude, sign_at(x, i, dtype), f);
    }
}
#endif

INLINE void quantize_fp8(
    const void *restrict x, uint8_t *restrict codes, int64_t count, float scale, minifloat f,
    int dtype
) {
#ifdef FP_FAST_FMAF
    if (0x1p-60f < scale && scale < 0x1p60f) {
        multiply_fp8(x, codes, count, scale, f, dtype);
        return;
    }
#endif
    divide_fp8(x, codes, count, scale, f, dtype);
}

INLINE void dequantize_fp8(
    const uint8_t *restrict codes, void *restrict x, int64_t count, float scale, minifloat f,
    int dtype
) {
    for (int64_t i = 0; i < count; i++) {
        uint32_t code = codes[i] & 0x7F, sign = (uint32_t)(codes[i] & 0x80) << 24;
        uint32_t bits = bits_of(decode(code, f.mantissa, f.lowest));
        uint32_t key = (codes[i] & f.special_mask) ^ f.special_flip;
        bits = key >= f.special ? EXPONENT | (key & 3) << 21 : bits;
        store(x, i, float_of(bits | sign) * scale, dtype);
    }
}

/* NVFP4 */

/* The largest magnitude of each block, as bits; NaN is left out. */
INLINE void block_maxima(const void *restrict x, uint32_t *restrict largest, int dtype) {
    const uint32_t infinity = infinity_of(dtype);
#define MAXIMA(type)                                                                              \
    type of_2[CHUNK * 8], of_4[CHUNK * 4], of_8[CHUNK * 2];                                       \
    for (int i = 0; i < CHUNK * 8; i++) {                                                    \
        type one = (type)magnitude_at(x, 2 * i, dtype);                                           \
        type other = (type)magnitude_at(x, 2 * i + 1, dtype);                                     \
        one = one > infinity ? 0 : one;                                                           \
        other = other > infinity ? 0 : other;                                                     \
        of_2[i] = one > other ? one : other;                                                      \
    }                                                                                             \
    for (int i = 0; i < CHUNK * 4; i++)                                                      \
        of_4[i] = of_2[2 * i] > of_2[2 * i + 1] ? of_2[2 * i] : of_2[2 * i + 1];                  \
    for (int i = 0; i < CHUNK * 2; i++)                                                      \
        of_8[i] = of_4[2 * i] > of_4[2 * i + 1] ? of_4[2 * i] : of_4[2 * i + 1];                  \
    for (int i = 0; i < CHUNK; i++)                                                          \
        largest[i] = of_8[2 * i] > of_8[2 * i + 1] ? of_8[2 * i] : of_8[2 * i + 1];
    if (dtype == FLOAT32) {
        MAXIMA(uint32_t)
    } else {
        MAXIMA(uint16_t)
    }
#undef MAXIMA
}

INLINE void quantize_chunk(
    const void *restrict x, uint8_t *restrict data, uint8_t *restrict block_scales, float scale,
    int dtype
) {
    const minifloat e4m3 = minifloat_of(E4M3);
    uint32_t largest[CHUNK];
    float reciprocals[CHUNK], spread[CHUNK * BLOCK];
    uint8_t codes[CHUNK * BLOCK];

    /* A block with this maximum has codes of 0 alone. It is the infinity, whose reciprocal is
     * negative or NaN where the scale is; with any other scale no block has it. */
    uint32_t all_zero = bits_of(scale) > EXPONENT ? infinity_of(dtype) : UINT32_MAX;
    block_maxima(x, largest, dtype);
    for (int b = 0; b < CHUNK; b++) {
        float ideal = value_of(largest[b], dtype) / (6.0f * scale);
        ideal = largest[b] == infinity_of(dtype) ? e4m3.largest : ideal;
        uint32_t magnitude = bits_of(ideal) & MAGNITUDE;
        float within = float_of(magnitude);
        within = within < e4m3.largest ? within : e4m3.largest;
        uint32_t code = encode(within, e4m3.mantissa, e4m3.lowest);
        code = magnitude > EXPONENT ? e4m3.nan : code;
        uint32_t sign = bits_of(ideal) & ~MAGNITUDE;
        block_scales[b] = (uint8_t)(code | sign >> 24);
        float served = float_of(bits_of(decode(code, e4m3.mantissa, e4m3.lowest)) | sign);
        float reciprocal = 1.0f / (served * scale);
        reciprocal = reciprocal < FLOAT32_MAX ? reciprocal : FLOAT32_MAX;
        /* 0 also where it is NaN, or negative: then each code is 0. With a mask, since compilers
         * make branches of a choice, and do not vectorise them. */
        uint32_t is_used = (code != 0) & (code != e4m3.nan) & (largest[b] != all_zero);
        reciprocals[b] = float_of(bits_of(reciprocal) & -is_used);
    }
    for (int b = 0; b < CHUNK; b++)
        for (int i = 0; i < BLOCK; i++)
            spread[b * BLOCK + i] = reciprocals[b];

    /* NaN is 0, and so is an infinity where its reciprocal can be 0: their product would be NaN. */
    uint32_t most = infinity_of(dtype) - (bits_of(448.0f * scale) < EXPONENT ? 0 : 1);
    for (int i = 0; i < CHUNK * BLOCK; i++) {
        uint32_t magnitude = magnitude_at(x, i, dtype);
        magnitude = magnitude > most ? 0 : magnitude;
        float y = value_of(magnitude, dtype) * spread[i];
        /* The steps between codes are 1/2 to 2, 1 to 4 and 2 above: a code is the smallest of 2·y,
         * y + 2 and y/2 + 4, rounded to an even integer: from 2^23 on float32 has no fraction. */
        uint32_t low = bits_of(add_scaled(0x1p23f, y, 2.0f));
        uint32_t middle = bits_of(y + (0x1p23f + 2));
        uint32_t high = bits_of(add_scaled(0x1p23f + 4, y, 0.5f));
        uint32_t code = low < middle ? low : middle;
        code = code < high ? code : high;
        code = code < bits_of(0x1p23f + 7) ? code : bits_of(0x1p23f + 7);
        codes[i] = (uint8_t)((code & 7) | sign_at(x, i, dtype) >> 4);
    }
    for (int i = 0; i < CHUNK * BLOCK / 2; i++)
        data[i] = (uint8_t)(codes[2 * i] | codes[2 * i + 1] << 4);
}

INLINE void dequantize_chunk(
    const uint8_t *restrict data, const uint8_t *restrict block_scales, void *restrict x,
    float scale, int dtype
) {
    const minifloat e4m3 = minifloat_of(E4M3);
    float halves[CHUNK], spread[CHUNK * BLOCK];
    uint8_t codes[CHUNK * BLOCK];

    for (int b = 0; b < CHUNK; b++) {
        uint32_t code = block_scales[b] & 0x7F, sign = (uint32_t)(block_scales[b] & 0x80) << 24;
        uint32_t bits = bits_of(decode(code, e4m3.mantissa, e4m3.lowest) * 0.5f);
        halves[b] = float_of((code == e4m3.nan ? QUIET_NAN : bits) | sign);
    }
    for (int b = 0; b < CHUNK; b++)
        for (int i = 0; i < BLOCK; i++)
            spread[b * BLOCK + i] = halves[b];
    for (int i = 0; i < CHUNK * BLOCK / 2; i++) {
        codes[2 * i] = data[i] & 0xF;
        codes[2 * i + 1] = data[i] >> 4;
    }
    for (int i = 0; i < CHUNK * BLOCK; i++) {
        /* Twice the magnitudes of codes 0 to 7, a digit each: 0, 1, 2, 3, 4, 6, 8, 12. */
        uint32_t twice = 0xC8643210u >> (codes[i] & 7) * 4 & 0xF;
        uint32_t sign = (uint32_t)(codes[i] & 8) << 28;
        float value = float_of(bits_of((float)(int32_t)twice * spread[i]) ^ sign) * scale;
        store(x, i, value, dtype);
    }
}

/* A piece of one row. Each dtype gets code of its own. */

INLINE void run_fp8(const job *j, char *values, uint8_t *data, int64_t count, float scale,
                    int dtype) {
    const int64_t step = CHUNK * BLOCK;
    for (int64_t i = 0; i < count; i += step) {
        const int64_t size = size_of(dtype), piece = count - i < step ? count - i : step;
        fetch_ahead(values + i * size, data + i, size, 1);
        if (j->operation == QUANTIZE)
            quantize_fp8(values + i * size, data + i, piece, scale, minifloat_of(j->format), dtype);
        else
            dequantize_fp8(data + i, values + i * size, piece, scale, minifloat_of(j->format), dtype);
    }
}

INLINE void run_chunk(const job *j, char *values, uint8_t *data, uint8_t *block_scales,
                      float scale, int dtype) {
    if (j->operation == QUANTIZE)
        quantize_chunk(values, data, block_scales, scale, dtype);
    else
        dequantize_chunk(data, block_scales, values, scale, dtype);
}

INLINE void run_nvfp4(const job *j, char *values, uint8_t *data, uint8_t *block_scales,
                      int64_t count, float scale, int dtype) {
    /* What is less than a chunk is made one: first as what is there, then as what is wanted. */
    char rest_values[CHUNK * BLOCK * 4] = {0};
    uint8_t rest_data[CHUNK * BLOCK / 2] = {0}, rest_scales[CHUNK] = {0};
    const int64_t size = size_of(dtype), rest = count % (CHUNK * BLOCK);
    for (int64_t i = 0; i < count - rest; i += CHUNK * BLOCK) {
        fetch_ahead(values + i * size, data + i / 2, size, 2);
        run_chunk(j, values + i * size, data + i / 2, block_scales + i / BLOCK, scale, dtype);
    }
    if (!rest) return;
    values += (count - rest) * size;
    data += (count - rest) / 2;
    block_scales += (count - rest) / BLOCK;
    if (j->operation == QUANTIZE) {
        memcpy(rest_values, values, (size_t)(rest * size));
    } else {
        memcpy(rest_data, data, (size_t)(rest / 2));
        memcpy(rest_scales, block_scales, (size_t)(rest / BLOCK));
    }
    run_chunk(j, rest_values, rest_data, rest_scales, scale, dtype);
    if (j->operation == QUANTIZE) {
        memcpy(data, rest_data, (size_t)(rest / 2));
        memcpy(block_scales, rest_scales, (size_t)(rest / BLOCK));
    } else {
        memcpy(values, rest_values, (size_t)(rest * size));
    }
}

INLINE void run_piece(const job *j, char *values, uint8_t *data, uint8_t *block_scales,
                      int64_t count, float scale, int dtype) {
    if (j->format == NVFP4)
        run_nvfp4(j, values, data, block_scales, count, scale, dtype);
    else
        run_fp8(j, values, data, count, scale, dtype);
}

/* Work and threads */

NOINLINE void run_rows(const part *p) {
    const job *j = p->job;
    const rows *r = p->rows;
    const int64_t per_byte = j->format == NVFP4 ? 2 : 1;
    const float *scales = (const float *)(uintptr_t)j->scale;
    int64_t row = p->begin / r->width, from = p->begin % r->width;
    for (int64_t left = p->end - p->begin; left > 0; row++, from = 0) {
        int64_t count = r->width - from < left ? r->width - from : left;
        int64_t values = from, data = from / per_byte, blocks = from / BLOCK, rest = row, head = 0;
        for (int d = r->dims - 1; d >= 0; d--) {
            int64_t index = rest % r->length[d];
            rest /= r->length[d];
            values += index * r->values[d];
            data += index * r->data[d];
            blocks += index * r->block_scales[d];
            if (d == r->dims - 1) head = index;
        }
        char *x = (char *)(uintptr_t)j->values + values * size_of((int)j->dtype);
        uint8_t *codes = (uint8_t *)(uintptr_t)j->data + data;
        /* An address that is only used where there are block scales. */
        uint8_t *block_scales = (uint8_t *)(uintptr_t)(j->block_scales + (uint64_t)blocks);
        float scale = scales[j->heads > 1 ? head : 0];
        if (scale != scale) scale = float_of(QUIET_NAN | (bits_of(scale) & ~MAGNITUDE));
        if (j->dtype == FLOAT32)
            run_piece(j, x, codes, block_scales, count, scale, FLOAT32);
        else if (j->dtype == BFLOAT16)
            run_piece(j, x, codes, block_scales, count, scale, BFLOAT16);
        else
            run_piece(j, x, codes, block_scales, count, scale, FLOAT16);
        left -= count;
    }
}

/* The caller may have subnormals flushed to zero, or another rounding. */
static void *run_part(void *given) {
    fenv_t before;
    fegetenv(&before);
    fesetenv(FE_DFL_ENV);
    run_rows(given);
    fesetenv(&before);
    return NULL;
}

static rows merged(const job *j) {
    const int64_t *length = j->geometry, *values = length + j->dims;
    const int64_t *data = values + j->dims, *block_scales = data + j->dims;
    const int64_t per_byte = j->format == NVFP4 ? 2 : 1;
    rows r = {.dims = 0, .count = 1, .width = j->width};
    int64_t kept[MOST_DIMS];
    for (int64_t d = j->dims - 1; d >= 0; d--) {
        int is_heads = j->heads > 1 && d == j->dims - 1;
        int is_dense = values[d] == r.width && data[d] == r.width / per_byte
            && (j->format != NVFP4 || block_scales[d] == r.width / BLOCK);
        if (!is_heads && length[d] == 1) continue;
        if (!is_heads && r.dims == 0 && is_dense)
            r.width *= length[d];
        else
            kept[r.dims++] = d;
    }
    for (int i = 0; i < r.dims; i++) {
        int64_t d = kept[r.dims - 1 - i];
        r.length[i] = length[d];
        r.values[i] = values[d];
        r.data[i] = data[d];
        r.block_scales[i] = block_scales[d];
        r.count *= length[d];
    }
    return r;
}

/* Does a job; there is at least one value. */
void kvcache_run(const job *j) {
    rows r = merged(j);
    part parts[MOST_THREADS];
    pthread_t threads[MOST_THREADS];
    int is_running[MOST_THREADS];
    int64_t total = r.count * r.width;
    int64_t count = j->threads < MOST_THREADS ? j->threads : MOST_THREADS;
    for (int64_t i = 0; i < count; i++) {
        int64_t end = i + 1 < count ? total / count * (i + 1) / ALIGNMENT * ALIGNMENT : total;
        parts[i] = (part){j, &r, i ? parts[i - 1].end : 0, end};
    }
    /* Signals are for the threads of the process, not for ours. */
    sigset_t all, before;
    sigfillset(&all);
    if (count > 1) pthread_sigmask(SIG_SETMASK, &all, &before);
    for (int64_t i = 1; i < count; i++)
        is_running[i] = !pthread_create(&threads[i], NULL, run_part, &parts[i]);
    if (count > 1) pthread_sigmask(SIG_SETMASK, &before, NULL);
    run_part(&parts[0]);
    for (int64_t i = 1; i < count; i++) {
        if (is_running[i])
            pthread_join(threads[i], NULL);
        else
            run_part(&parts[i]);
    }
}

/* Undoes for the calling thread what the process has set: rounding, subnormals that are zero. */
void kvcache_usual_arithmetic(void) { fesetenv(FE_DFL_ENV); }

/* Runs each kernel once: an instruction that the machine does not have ends the process here.
 * Returns how many there are. */
int kvcache_probe(void) {
    enum { KERNELS = 24, VALUES = (2 * CHUNK + 6) * BLOCK };
    static float values[VALUES], scale = 0.5f;
    static uint8_t data[VALUES], block_scales[VALUES / BLOCK];
    for (int64_t kernel = 0; kernel < KERNELS; kernel++) {
        job j = {
            .operation = kernel % 2, .dtype = kernel / 2 % 3, .format = kernel / 6,
            .heads = 1, .threads = 2, .width = VALUES, .dims = 0,
            .values = (uintptr_t)values, .data = (uintptr_t)data,
            .block_scales = (uintptr_t)block_scales, .scale = (uintptr_t)&scale,
        };
        kvcache_run(&j);
    }
    return KERNELS;
}
