/* Matrix products with weights packed once.
 *
 * Shapes: x [M, K] row-major, weight [N, K], output [M, N]. Packed weight: panels of PANEL columns, [N / PANEL][K][PANEL], the last
 * one filled up with zeros. An output element is one sum over k in ascending order with fused multiply-adds, whatever M is, so a
 * row's result does not depend on the rows beside it.
 *
 * A panel stays in the second-level cache while all rows pass by; meanwhile the next one is prefetched, so that with few rows the
 * weights stream at memory speed. */
#ifndef CONTBATCH_GEMM_H
#define CONTBATCH_GEMM_H

typedef enum { STORE = 0, ADD = 1, SILU_GATE = 2, GELU_TANH_GATE = 3 } Epilogue;

typedef struct {
    const void *packed; /* float, or of 8 bits (int8.h) */
    const float *bias;  /* [N] or null; for the gates: in the packed order, filled up to whole panels */
    const float *scales; /* null for float weights; else one for each packed column, filled up to whole panels */
    int32_t k, n;      /* n: output columns (for the gates, half the packed columns) */
    int32_t epilogue;
} Linear;

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

typedef void (*kernel_function)(const float *, ptrdiff_t, const float *, ptrdiff_t, int, const char *, ptrdiff_t, float *, ptrdiff_t,
                                int);

#define KERNEL(rows)                                                                                                             \
    static __attribute__((noinline)) void kernel_##rows(const float *a, ptrdiff_t lda, const float *panel, ptrdiff_t ldp, int k, \
                                                        const char *prefetch, ptrdiff_t step, float *c, ptrdiff_t ldc,           \
                                                        int accumulate) {                                                        \
        kernel(rows, a, lda, panel, ldp, k, prefetch, step, c, ldc, accumulate);                                                 \
    }
KERNEL(1) KERNEL(2) KERNEL(3) KERNEL(4) KERNEL(5) KERNEL(6)
#if TILE_ROWS > 6
KERNEL(7) KERNEL(8) KERNEL(9) KERNEL(10) KERNEL(11) KERNEL(12)
#endif
#if TILE_ROWS > 12
KERNEL(13) KERNEL(14)
#endif

static const kernel_function kernels[TILE_ROWS + 1] = {
    0, kernel_1, kernel_2, kernel_3, kernel_4, kernel_5, kernel_6,
#if TILE_ROWS > 6
    kernel_7, kernel_8, kernel_9, kernel_10, kernel_11, kernel_12,
#endif
#if TILE_ROWS > 12
    kernel_13, kernel_14,
#endif
};

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
 * that are prefetched for each PANEL * 4 bytes of this one, so that all tiles together fetch it. */
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
    int k = linear->k, n = linear->n, victim = 0, item;
    size_t panel_size = (size_t)k * PANEL;
    while ((item = next_item(worker, tiling.panels * tiling.blocks, &victim)) >= 0) {
        Block block = block_of(&tiling, item);
        const float *weights = (const float *)linear->packed + block.panel * panel_size;
        const char *next = (const char *)(weights + panel_size);
        for (int t = 0; t < block.tiles; t++) {
            int low = block.count * t / block.tiles, high = block.count * (t + 1) / block.tiles;
            size_t row = (size_t)(block.first + low);
            kernels[high - low](x + row * k, k, weights, PANEL, k, next + t * k * block.step, block.step, tile, PANEL, 0);
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

#endif
