/* Matrix products with weights of 8 bits.
 *
 * A weight [N, K] is a scale for each output column times whole numbers of -127 to 127. The rows of x are brought to the same form
 * as they come, each GROUP of consecutive inputs with a scale of its own, so that one large input does not coarsen a whole row.
 * Products within a group are summed in whole numbers, exactly; groups are summed in float, in ascending order. What stands beside
 * a row changes nothing of it.
 *
 * Packed weight: panels of PANEL columns, [N / PANEL][K / 4][PANEL][4], K filled up to whole quads with zeros. Little-endian. */
#ifndef CONTBATCH_INT8_H
#define CONTBATCH_INT8_H

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define GROUP 64 /* inputs with a common scale; a multiple of 4 and of LANES */

/* `dot`: sums + products of a vector of quads of weights with one quad of inputs. Three ways, by what the processor has.
 *
 * WEIGHT_OFFSET is what packed weights are raised by, where the instruction takes one side without sign; `input` and ORDER are the
 * type and order in which a quad of inputs is kept. */
#if (defined(__AVX512VNNI__) && LANES == 16) || (defined(__AVXVNNI__) && LANES == 8)
#define WEIGHT_OFFSET 128
#define ORDER {0, 1, 2, 3}
typedef int8_t input;
typedef int8_t inputs __attribute__((vector_size(LANES)));
typedef ivec Quads;
ALWAYS_INLINE Quads unpack(ivec weights) { return weights; }
ALWAYS_INLINE ivec dot(ivec sums, Quads weights, const input *quad) {
    int32_t x;
    memcpy(&x, quad, sizeof x);
#if LANES == 16
    return (ivec)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, _mm512_set1_epi32(x));
#else
    return (ivec)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)weights, _mm256_set1_epi32(x));
#endif
}

#elif (defined(__AVX512BW__) && LANES == 16) || (defined(__AVX2__) && LANES == 8) || (defined(__SSE2__) && LANES == 4)
#define WEIGHT_OFFSET 0
#define ORDER {0, 2, 1, 3}
typedef int16_t input;
typedef int16_t inputs __attribute__((vector_size(LANES * 2)));
typedef int16_t svec __attribute__((vector_size(LANES * 4)));
typedef struct {
    svec even, odd; /* bytes 0 and 2 of each quad, bytes 1 and 3 */
} Quads;
ALWAYS_INLINE Quads unpack(ivec weights) { return (Quads){((svec)weights << 8) >> 8, (svec)weights >> 8}; }
ALWAYS_INLINE ivec multiply_pairs(svec weights, const input *pair) {
    int32_t x;
    memcpy(&x, pair, sizeof x);
#if LANES == 16
    return (ivec)_mm512_madd_epi16((__m512i)weights, _mm512_set1_epi32(x));
#elif LANES == 8
    return (ivec)_mm256_madd_epi16((__m256i)weights, _mm256_set1_epi32(x));
#else
    return (ivec)_mm_madd_epi16((__m128i)weights, _mm_set1_epi32(x));
#endif
}
ALWAYS_INLINE ivec dot(ivec sums, Quads weights, const input *quad) {
    return sums + multiply_pairs(weights.even, quad) + multiply_pairs(weights.odd, quad + 2);
}

#else
#define WEIGHT_OFFSET 0
#define ORDER {0, 1, 2, 3}
typedef int16_t input;
typedef int16_t inputs __attribute__((vector_size(LANES * 2)));
typedef struct {
    ivec bytes[4];
} Quads;
ALWAYS_INLINE Quads unpack(ivec weights) {
    return (Quads){{weights << 24 >> 24, weights << 16 >> 24, weights << 8 >> 24, weights >> 24}};
}
ALWAYS_INLINE ivec dot(ivec sums, Quads weights, const input *quad) {
    for (int i = 0; i < 4; i++) sums += weights.bytes[i] * quad[i];
    return sums;
}
#endif

/* a * b + c, rounded alike wherever it stands: left to itself the compiler fuses it in one kernel and not in another. */
ALWAYS_INLINE vec multiply_add(vec a, vec b, vec c) {
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__) && LANES == 8
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

/* Rows of x in 8 bits. */
typedef struct {
    int quads, groups;
    input *values;        /* [M][quads][4] */
    float *scales;        /* [M][groups] */
    int32_t *corrections; /* [M][groups]: WEIGHT_OFFSET times the sum of the group's values */
} Quantised;

/* Bytes that `rows` rows of `k` inputs take, the arrays laid out from `memory` on. */
static size_t lay_out_quantised(int rows, int k, char *memory, Quantised *x) {
    x->quads = (k + 3) / 4;
    x->groups = (k + GROUP - 1) / GROUP;
    size_t values = whole(sizeof(input) * 4 * x->quads * rows, 64), each = whole(sizeof(float) * x->groups * rows, 64);
    x->values = (input *)memory;
    x->scales = (float *)(memory + values);
    x->corrections = (int32_t *)(memory + values + each);
    return values + 2 * each;
}

ALWAYS_INLINE int32_t largest_int(ivec v) {
    int32_t part[LANES] ALIGNED;
    memcpy(part, &v, sizeof v);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) part[i] = part[i] > part[i + width] ? part[i] : part[i + width];
    return part[0];
}

ALWAYS_INLINE int32_t sum_ints(ivec v) {
    int32_t part[LANES] ALIGNED;
    memcpy(part, &v, sizeof v);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) part[i] += part[i + width];
    return part[0];
}

/* One group, `x` [GROUP] filled up with zeros, to `values` [GROUP]. An input that is not finite makes the scale so. */
ALWAYS_INLINE void quantise_group(const float *x, input *values, float *scale, int32_t *correction) {
    ivec top = {0}, sums = {0};
    for (int i = 0; i < GROUP; i += LANES) {
        ivec magnitude = (ivec)load(x + i) & 0x7fffffff; /* orders like the numbers, infinity and NaN last */
        top = (top & (top > magnitude)) | (magnitude & ~(top > magnitude));
    }
    int32_t bits = largest_int(top);
    float largest;
    memcpy(&largest, &bits, sizeof largest);
    int is_zero = largest <= 1e-30f;
    float inverse = is_zero ? 0.0f : 127.0f / largest;
    const vec magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer, which its low bits then are */
    for (int i = 0; i < GROUP; i += LANES) {
        ivec v = (ivec)multiply_add(load(x + i), splat(inverse), magic) - (ivec)magic;
        inputs narrow = __builtin_convertvector(v, inputs);
        memcpy(values + i, &narrow, sizeof narrow);
        sums += v;
    }
    *scale = is_zero ? 0.0f : largest / 127.0f;
    *correction = WEIGHT_OFFSET * sum_ints(sums);
}

/* `values` [4 * quads] to the order of the inputs. */
ALWAYS_INLINE void place(const input *values, int quads, input *to) {
    static const int order[4] = ORDER;
    if (order[1] == 1) memcpy(to, values, sizeof(input) * 4 * quads);
    else
        for (int i = 0; i < 4 * quads; i++) to[i] = values[(i & ~3) + order[i & 3]];
}

static void quantise_row(const float *x, int k, int row, const Quantised *to) {
    for (int group = 0; group < to->groups; group++) {
        float part[GROUP] ALIGNED;
        input values[GROUP] ALIGNED;
        int first = group * GROUP, count = k - first < GROUP ? k - first : GROUP;
        size_t place_of_group = (size_t)row * to->groups + group;
        const float *from = x + first;
        if (count < GROUP) {
            memset(part, 0, sizeof part);
            memcpy(part, from, sizeof(float) * count);
            from = part;
        }
        quantise_group(from, values, to->scales + place_of_group, to->corrections + place_of_group);
        place(values, (count + 3) / 4, to->values + 4 * ((size_t)row * to->quads + first / 4));
    }
}

static void quantise_phase(Worker *worker, const float *x, int rows, int k, const Quantised *to) {
    int victim = 0, row;
    while ((row = next_item(worker, rows, &victim)) >= 0) quantise_row(x + (size_t)row * k, k, row, to);
}

/* c [rows, PANEL] = the rows of x from `first` on, times one panel; one line of `prefetch` a quad. */
ALWAYS_INLINE void int8_kernel(const int rows, const Quantised *x, size_t first, const char *panel, const char *prefetch,
                               ptrdiff_t prefetch_step, float *restrict c) {
    const input *values = x->values + first * x->quads * 4;
    const float *scales = x->scales + first * x->groups;
    const int32_t *corrections = x->corrections + first * x->groups;
    ptrdiff_t ldx = (ptrdiff_t)x->quads * 4;
    for (int group = 0, quad = 0; group < x->groups; group++) {
        int end = quad + GROUP / 4 < x->quads ? quad + GROUP / 4 : x->quads;
        ivec sums[TILE_ROWS][2];
        UNROLL for (int m = 0; m < rows; m++) sums[m][0] = sums[m][1] = (ivec){0};
        for (; quad < end; quad++) {
            const float *weights = (const float *)(panel + (size_t)quad * PANEL * 4);
            Quads b0 = unpack((ivec)load(weights)), b1 = unpack((ivec)load(weights + LANES));
            __builtin_prefetch(prefetch + quad * prefetch_step, 0, 2);
            UNROLL for (int m = 0; m < rows; m++) {
                sums[m][0] = dot(sums[m][0], b0, values + m * ldx + quad * 4);
                sums[m][1] = dot(sums[m][1], b1, values + m * ldx + quad * 4);
            }
        }
        UNROLL for (int m = 0; m < rows; m++) {
            float scale = scales[m * x->groups + group];
            int32_t correction = corrections[m * x->groups + group];
            for (int half = 0; half < 2; half++) {
                float *to = c + m * PANEL + half * LANES;
                vec before = group ? load(to) : (vec){0};
                store(to, multiply_add(__builtin_convertvector(sums[m][half] - correction, vec), splat(scale), before));
            }
        }
    }
}

typedef void (*int8_kernel_function)(const Quantised *, size_t, const char *, const char *, ptrdiff_t, float *);

#define INT8_KERNEL(rows)                                                                                                      \
    static __attribute__((noinline)) void int8_kernel_##rows(const Quantised *x, size_t first, const char *panel,             \
                                                             const char *prefetch, ptrdiff_t step, float *c) {                \
        int8_kernel(rows, x, first, panel, prefetch, step, c);                                                                \
    }
INT8_KERNEL(1) INT8_KERNEL(2) INT8_KERNEL(3) INT8_KERNEL(4) INT8_KERNEL(5) INT8_KERNEL(6)
#if TILE_ROWS > 6
INT8_KERNEL(7) INT8_KERNEL(8) INT8_KERNEL(9) INT8_KERNEL(10) INT8_KERNEL(11) INT8_KERNEL(12)
#endif
#if TILE_ROWS > 12
INT8_KERNEL(13) INT8_KERNEL(14)
#endif

static const int8_kernel_function int8_kernels[TILE_ROWS + 1] = {
    0, int8_kernel_1, int8_kernel_2, int8_kernel_3, int8_kernel_4, int8_kernel_5, int8_kernel_6,
#if TILE_ROWS > 6
    int8_kernel_7, int8_kernel_8, int8_kernel_9, int8_kernel_10, int8_kernel_11, int8_kernel_12,
#endif
#if TILE_ROWS > 12
    int8_kernel_13, int8_kernel_14,
#endif
};

static void int8_phase(Worker *worker, const Linear *linear, const Quantised *x, int m_size, float *out, const float *residual) {
    float tile[TILE_ROWS * PANEL] ALIGNED;
    Tiling tiling = tiling_of(linear, m_size, 4 * (int)sizeof(input) * x->quads);
    size_t panel_size = (size_t)x->quads * PANEL * 4, n = linear->n;
    int victim = 0, item;
    while ((item = next_item(worker, tiling.panels * tiling.blocks, &victim)) >= 0) {
        Block block = block_of(&tiling, item);
        const char *weights = (const char *)linear->packed + block.panel * panel_size;
        for (int t = 0; t < block.tiles; t++) {
            int low = block.count * t / block.tiles, high = block.count * (t + 1) / block.tiles;
            size_t row = (size_t)(block.first + low);
            int8_kernels[high - low](x, row, weights, weights + panel_size + t * x->quads * block.step, block.step, tile);
            finish_tile(linear, tile, high - low, block.panel, out + row * n, n, residual + (residual ? row * n : 0));
        }
    }
}

/* Pack whole numbers [N, K] of 8 bits. */
static void pack_int8_panels(const int8_t *weight, int n, int k, uint8_t *packed) {
    for (int first = 0; first < n; first += PANEL)
        for (int i = 0; i < k; i += 4)
            for (int j = 0; j < PANEL; j++)
                for (int b = i; b < i + 4; b++)
                    *packed++ = (uint8_t)((first + j < n && b < k ? weight[(size_t)(first + j) * k + b] : 0) + WEIGHT_OFFSET);
}

#endif
