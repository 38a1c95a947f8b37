/* Matrix products with weights packed once.
 *
 * Shapes: x [M, K] row-major, weight [N, K], output [M, N]. Packed weight: panels of PANEL columns, the last one filled up with zeros:
 * [N / PANEL][K][PANEL] in float32, and [N / PANEL][K / 2][PANEL][2] in bfloat16, K filled up to whole BLOCKs with zeros, for weights that
 * bfloat16 holds exactly: half the bytes for the same numbers. An output element is one sum over k in ascending order with fused
 * multiply-adds in float32, whatever M is and in either form, so a row's result does not depend on the rows beside it.
 *
 * A panel stays in the second-level cache while all rows pass by; meanwhile the next one is prefetched, so that with few rows the
 * weights stream at memory speed. */
#ifndef CONTBATCH_GEMM_H
#define CONTBATCH_GEMM_H

typedef enum { STORE = 0, ADD = 1, SILU_GATE = 2, GELU_TANH_GATE = 3 } Epilogue;

typedef enum { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2 } Format;
#define BLOCK 32 /* inputs; a bfloat16 panel has whole ones */

typedef struct {
    const void *packed;  /* in `format` (INT8: int8.h) */
    const float *bias;   /* [N] or null; for the gates: in the packed order, filled up to whole panels */
    const float *scales; /* of INT8: one for each packed column, filled up to whole panels; else null */
    int32_t k, n;        /* n: output columns (for the gates, half the packed columns) */
    int32_t epilogue, format;
} Linear;

ALWAYS_INLINE size_t panel_bytes(const Linear *linear) {
    size_t k = linear->k;
    return PANEL * (linear->format == BFLOAT16 ? 2 * whole(k, BLOCK) : 4 * k);
}

ALWAYS_INLINE int num_panels(const Linear *linear) {
    int width = linear->epilogue >= SILU_GATE ? LANES : PANEL;
    return (linear->n + width - 1) / width;
}

/* c [rows, PANEL] (+)= a [rows, K] (stride lda) times one panel [K, PANEL] (stride ldp); one line of `prefetch` a step of k. */
ALWAYS_INLINE void kernel(const int rows, const float *restrict a, ptrdiff_t lda, const float *restrict panel, ptrdiff_t ldp,
                          int k_size, const char *prefetch, ptrdiff_t prefetch_step, float *restrict c, ptrdiff_t ldc, int accumulate) {
    vec sums[TILE_ROWS][2];
    UNROLL for (int m = 0; m < rows; m++) {
        sums[m][0] = accumulate ? load(c + m * ldc) : (vec){0};
        sums[m][1] = accumulate ? load(c + m * ldc + LANES) : (vec){0};
    }
    for (int k = 0; k < k_size; k++) {
        vec b0 = load(panel + k * ldp), b1 = load(panel + k * ldp + LANES);
        __builtin_prefetch(prefetch + k * prefetch_step, 0, 2);
        UNROLL for (int m = 0; m < rows; m++) {
            float x = a[m * lda + k];
            sums[m][0] += x * b0;
            sums[m][1] += x * b1;
        }
    }
    UNROLL for (int m = 0; m < rows; m++) {
        store(c + m * ldc, sums[m][0]);
        store(c + m * ldc + LANES, sums[m][1]);
    }
}

/* The same with a bfloat16 panel: a pair of neighbouring inputs lies in each 32 bits, the first in the lower half. */
ALWAYS_INLINE void kernel16(const int rows, const float *restrict a, ptrdiff_t lda, const uint32_t *restrict panel, int k_size,
                            const char *prefetch, ptrdiff_t prefetch_step, float *restrict c) {
    vec sums[TILE_ROWS][2];
    UNROLL for (int m = 0; m < rows; m++) sums[m][0] = sums[m][1] = (vec){0};
    for (int k = 0; k < k_size; k += 2, panel += PANEL, prefetch += prefetch_step) {
        vec b0 = (vec)(load_int(panel) << 16), b1 = (vec)(load_int(panel + LANES) << 16);
        __builtin_prefetch(prefetch, 0, 2);
        UNROLL for (int m = 0; m < rows; m++) {
            float x = a[m * lda + k];
            sums[m][0] += x * b0;
            sums[m][1] += x * b1;
        }
        if (k + 1 == k_size) break;
        b0 = (vec)(load_int(panel) & (int32_t)0xffff0000), b1 = (vec)(load_int(panel + LANES) & (int32_t)0xffff0000);
        UNROLL for (int m = 0; m < rows; m++) {
            float x = a[m * lda + k + 1];
            sums[m][0] += x * b0;
            sums[m][1] += x * b1;
        }
    }
    UNROLL for (int m = 0; m < rows; m++) {
        store(c + m * PANEL, sums[m][0]);
        store(c + m * PANEL + LANES, sums[m][1]);
    }
}

typedef void (*kernel_function)(const float *, ptrdiff_t, const float *, ptrdiff_t, int, const char *, ptrdiff_t, float *, ptrdiff_t,
                                int);
typedef void (*kernel16_function)(const float *, ptrdiff_t, const uint32_t *, int, const char *, ptrdiff_t, float *);

#define KERNEL(rows)                                                                                                             \
    static __attribute__((noinline)) void kernel_##rows(const float *a, ptrdiff_t lda, const float *panel, ptrdiff_t ldp, int k, \
                                                        const char *prefetch, ptrdiff_t step, float *c, ptrdiff_t ldc,           \
                                                        int accumulate) {                                                        \
        kernel(rows, a, lda, panel, ldp, k, prefetch, step, c, ldc, accumulate);                                                 \
    }                                                                                                                            \
    static __attribute__((noinline)) void kernel16_##rows(const float *a, ptrdiff_t lda, const uint32_t *panel, int k,           \
                                                          const char *prefetch, ptrdiff_t step, float *c) {                      \
        kernel16(rows, a, lda, panel, k, prefetch, step, c);                                                                     \
    }
KERNEL(1) KERNEL(2) KERNEL(3) KERNEL(4) KERNEL(5) KERNEL(6)
#if TILE_ROWS > 6
KERNEL(7) KERNEL(8) KERNEL(9) KERNEL(10) KERNEL(11) KERNEL(12)
#endif
#if TILE_ROWS > 12
KERNEL(13) KERNEL(14)
#endif

#if TILE_ROWS > 12
#define EACH_HEIGHT(name) {0, name##_1, name##_2, name##_3, name##_4, name##_5, name##_6, name##_7, name##_8, name##_9, name##_10, \
                           name##_11, name##_12, name##_13, name##_14}
#elif TILE_ROWS > 6
#define EACH_HEIGHT(name) {0, name##_1, name##_2, name##_3, name##_4, name##_5, name##_6, name##_7, name##_8, name##_9, name##_10, \
                           name##_11, name##_12}
#else
#define EACH_HEIGHT(name) {0, name##_1, name##_2, name##_3, name##_4, name##_5, name##_6}
#endif
static const kernel_function kernels[TILE_ROWS + 1] = EACH_HEIGHT(kernel);
static const kernel16_function kernels16[TILE_ROWS + 1] = EACH_HEIGHT(kernel16);

/* What becomes of a tile [rows, PANEL] of sums: scales, bias, then into `out` by the kind of linear. */
static void finish_tile(const Linear *linear, const float *tile, int rows, int panel, float *out, ptrdiff_t ldo,
                        const float *residual) {
    int gated = linear->epilogue >= SILU_GATE;
    int first = panel * (gated ? LANES : PANEL);
    int width = linear->n - first < (gated ? LANES : PANEL) ? linear->n - first : (gated ? LANES : PANEL);
    const float *bias = linear->bias ? linear->bias + (ptrdiff_t)panel * PANEL : 0;
    const float *scales = linear->scales ? linear->scales + (ptrdiff_t)panel * PANEL : 0;
    for (int m = 0; m < rows; m++) {
        float result[PANEL] ALIGNED;
        float *row = out + m * ldo + first;
        vec low = load(tile + m * PANEL), high = load(tile + m * PANEL + LANES);
        if (scales) {
            low *= load(scales);
            high *= load(scales + LANES);
        }
        if (bias) {
            low += load(bias);
            high += load(bias + LANES);
        }
        if (gated) low = (linear->epilogue == SILU_GATE ? silu_vec(low) : gelu_tanh_vec(low)) * high;
        if (linear->epilogue == ADD && width == PANEL) {
            low += load(residual + m * ldo + first);
            high += load(residual + m * ldo + first + LANES);
        }
        store(result, low);
        store(result + LANES, high);
        if (linear->epilogue == ADD && width < PANEL)
            for (int i = 0; i < width; i++) result[i] += residual[m * ldo + first + i];
        if (width == PANEL)
            memcpy(row, result, sizeof result);
        else
            memcpy(row, result, sizeof(float) * width);
    }
}

static int second_level_cache_bytes(void);

/* How a product is cut into items: blocks of rows, each with each panel. */
typedef struct {
    int m_size, panels, rows, blocks;
} Tiling;

/* An item: `count` rows from `first` on, in `tiles` tiles of about the same height, times one panel. `step`: bytes of the next panel
 * that are prefetched for each PANEL * 4 bytes of this one, so that all tiles together fetch it. (Of a bfloat16 panel these are two
 * inputs.) */
typedef struct {
    int panel, first, count, tiles;
    ptrdiff_t step;
} Block;

/* The rows of x, of `row_bytes` each, that pass by one panel take at most about a third of the second-level cache. */
static Tiling tiling_of(const Linear *linear, int m_size, int row_bytes) {
    int rows = second_level_cache_bytes() / 3 / row_bytes;
    if (rows < 4 * TILE_ROWS) rows = 4 * TILE_ROWS;
    int blocks = (m_size + rows - 1) / rows;
    return (Tiling){m_size, num_panels(linear), (m_size + blocks - 1) / blocks, blocks};
}

static Block block_of(const Tiling *tiling, int item) {
    int first = item / tiling->panels * tiling->rows;
    int count = tiling->m_size - first < tiling->rows ? tiling->m_size - first : tiling->rows;
    int tiles = (count + TILE_ROWS - 1) / TILE_ROWS;
    return (Block){item % tiling->panels, first, count, tiles, ((ptrdiff_t)(PANEL * 4 / tiles) + 63) / 64 * 64};
}

static void float_phase(Worker *worker, const Linear *linear, const float *x, int m_size, float *out, const float *residual) {
    float tile[TILE_ROWS * PANEL] ALIGNED;
    Tiling tiling = tiling_of(linear, m_size, 4 * linear->k);
    int k = linear->k, n = linear->n, victim = 0, item, is_half = linear->format == BFLOAT16;
    size_t panel_size = panel_bytes(linear), lines = is_half ? (k + 1) / 2 : k;
    while ((item = next_item(worker, tiling.panels * tiling.blocks, &victim)) >= 0) {
        Block block = block_of(&tiling, item);
        const char *weights = (const char *)linear->packed + block.panel * panel_size, *next = weights + panel_size;
        for (int t = 0; t < block.tiles; t++) {
            int low = block.count * t / block.tiles, high = block.count * (t + 1) / block.tiles;
            size_t row = (size_t)(block.first + low);
            const char *ahead = next + t * lines * block.step;
            if (is_half) kernels16[high - low](x + row * k, k, (const uint32_t *)weights, k, ahead, block.step, tile);
            else kernels[high - low](x + row * k, k, (const float *)weights, PANEL, k, ahead, block.step, tile, PANEL, 0);
            finish_tile(linear, tile, high - low, block.panel, out + row * n, n, residual + (residual ? row * n : 0));
        }
    }
}

/* Pack `weight` [N, K]: packed [ceil(N / PANEL)][K][PANEL]. */
static void pack_panels(const float *weight, int n, int k, float *packed) {
    for (int first = 0; first < n; first += PANEL)
        for (int i = 0; i < k; i++)
            for (int j = 0; j < PANEL; j++) *packed++ = first + j < n ? weight[(size_t)(first + j) * k + i] : 0.0f;
}

/* Whether bfloat16 holds all of `size` values exactly. */
static int fits_bfloat16(const float *values, size_t size) {
    uint32_t lost = 0, bits;
    for (size_t i = 0; i < size && !lost;)
        for (size_t end = i + 4096 < size ? i + 4096 : size; i < end; i++) {
            memcpy(&bits, values + i, sizeof bits);
            lost |= bits & 0xffff;
        }
    return !lost;
}

/* Likewise in bfloat16, which holds all of `weight` exactly: packed [ceil(N / PANEL)][ceil(K / BLOCK) * BLOCK / 2][PANEL][2]. */
static void pack_panels16(const float *weight, int n, int k, uint16_t *packed) {
    for (int first = 0; first < n; first += PANEL)
        for (int i = 0; i < (int)whole(k, BLOCK); i += 2)
            for (int j = 0; j < PANEL; j++)
                for (int half = 0; half < 2; half++) {
                    uint32_t bits = 0;
                    if (first + j < n && i + half < k) memcpy(&bits, weight + (size_t)(first + j) * k + i + half, sizeof bits);
                    *packed++ = (uint16_t)(bits >> 16);
                }
}
#endif
