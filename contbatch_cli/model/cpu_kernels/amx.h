/* Products in float32 on a processor's matrix unit (Intel AMX), which multiplies bfloat16 and sums in float32.
 *
 * Each factor is cut into three bfloat16 parts of descending size, whose sum it is: w = w0 + w1 + w2 by cutting off, exactly, and
 * x = x0 + x1 + x2 by rounding, to 2^-26 of it or better. Of the nine products of parts the six largest are summed,
 *
 *     x0 w0   over all of K, and apart from it   x1 w1 + x1 w0 + x2 w0 + x0 w2 + x0 w1   over all of K,
 *
 * what is left out being about 2^-25 of a term and of either sign. So the result is as near to the exact one as a sum of fused
 * multiply-adds in float32 is. The method is that of Henry, Tang and Heinecke, "Leveraging the bfloat16 Artificial Intelligence
 * Datatype For Higher-Precision Computations" (ARITH 2019). A row's result does not depend on the rows beside it.
 *
 * A tile is 1 KiB: 16 rows of 64 bytes. Rows of x: [M / 16][K / 32][part][16 rows][32 inputs]. A panel of weights, cut up when its
 * turn comes, by each thread in memory of its own: [K / 32][part][half of the panel][16 pairs of inputs][16 columns][2]. */
#ifndef CONTBATCH_AMX_H
#define CONTBATCH_AMX_H

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__) && LANES == 16
#define HAS_AMX 1
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#define TILE_BYTES 1024
#define PARTS 3

static int amx_is_on;

/* Ask the system for the unit's registers; whether it gives them. */
static int request_amx(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} TileConfig;

static void configure_tiles(void) {
    TileConfig config ALIGNED = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        config.row_bytes[i] = 64;
        config.rows[i] = 16;
    }
    _tile_loadconfig(&config);
}

/* The working memory of one product: the rows in parts, then each thread's panel in parts. */
typedef struct {
    char *rows, *panels;
    int blocks; /* of 32 inputs */
} PartsMemory;

static size_t lay_out_parts(int m_size, int k, int num_threads, char *memory, PartsMemory *to) {
    to->blocks = (k + 31) / 32;
    size_t row_tiles = (m_size + 15) / 16, row_bytes = row_tiles * to->blocks * PARTS * TILE_BYTES;
    to->rows = memory;
    to->panels = memory + row_bytes;
    return row_bytes + (size_t)num_threads * to->blocks * PARTS * 2 * TILE_BYTES;
}

/* The parts of 32 inputs of one row, to its place in three tiles; inputs from `count` on are zero. */
static void split_inputs(const float *x, int count, char *tiles) {
    for (int half = 0; half < 2; half++) {
        int left = count - 16 * half;
        __mmask16 mask = left >= 16 ? 0xffff : left > 0 ? (__mmask16)((1 << left) - 1) : 0;
        __m512 rest = _mm512_maskz_loadu_ps(mask, x + 16 * half);
        for (int part = 0; part < PARTS; part++) {
            __m256i rounded = (__m256i)_mm512_cvtneps_pbh(rest);
            _mm256_storeu_si256((__m256i *)(tiles + part * TILE_BYTES + 32 * half), rounded);
            rest = _mm512_sub_ps(rest, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16)));
        }
    }
}

/* All rows in parts; those that fill up the last tile are zero. */
static void split_phase(Worker *worker, const float *x, int m_size, int k, const PartsMemory *to) {
    int victim = 0, row, filled = (m_size + 15) / 16 * 16;
    while ((row = next_item(worker, filled, &victim)) >= 0) {
        char *tiles = to->rows + (size_t)(row / 16) * to->blocks * PARTS * TILE_BYTES + row % 16 * 64;
        for (int block = 0; block < to->blocks; block++, tiles += PARTS * TILE_BYTES)
            split_inputs(x + (size_t)row * k + 32 * block, row < m_size ? k - 32 * block : 0, tiles);
    }
}

/* A quarter of 32 inputs of a panel, of which `count` are there, in `num_parts` parts: two tiles a part. `lines` for each pair and half,
 * from `next` on, come into the second-level cache meanwhile. */
ALWAYS_INLINE void split_weights(const int num_parts, const int quarter, const int lines, const float *weights, int count,
                                 const char *next, char *to) {
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000);
    next += quarter * 8 * lines * 64;
    for (int pair = 4 * quarter; pair < 4 * quarter + 4; pair++)
        for (int half = 0; half < 2; half++, next += lines * 64) {
            const float *from = weights + (size_t)2 * pair * PANEL + half * LANES;
            __m512 even = 2 * pair < count ? _mm512_loadu_ps(from) : _mm512_setzero_ps();
            __m512 odd = 2 * pair + 1 < count ? _mm512_loadu_ps(from + PANEL) : _mm512_setzero_ps();
            char *tile = to + half * TILE_BYTES + pair * 64;
            for (int line = 0; line < lines; line++) __builtin_prefetch(next + line * 64, 0, 2);
            UNROLL for (int part = 0; part < num_parts; part++, tile += 2 * TILE_BYTES) {
                __m512i cut = _mm512_and_si512(_mm512_castps_si512(odd), upper);
                __m512i low = _mm512_srli_epi32(_mm512_castps_si512(even), 16);
                _mm512_storeu_si512(tile, _mm512_or_si512(cut, low));
                odd = _mm512_sub_ps(odd, _mm512_castsi512_ps(cut));
                even = _mm512_sub_ps(even, _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(even), upper)));
            }
        }
}

/* A panel [K, PANEL] of weights and where its parts go: all blocks side by side, or each second one to the same place. */
typedef struct {
    const float *weights;
    char *parts;
    int k, blocks;
} Panel;

ALWAYS_INLINE char *parts_of(const int is_kept, const Panel *panel, int block) {
    return panel->parts + (size_t)(is_kept ? block : block % 2) * 2 * PARTS * TILE_BYTES;
}

/* A quarter of block `block`. In two passes each fetches half of the next panel. */
ALWAYS_INLINE void split_quarter(const int num_parts, const int is_kept, const int has_passes, const int quarter, const Panel *panel,
                                 int block) {
    const float *weights = panel->weights + (size_t)block * 32 * PANEL;
    const char *next = (const char *)(weights + (size_t)panel->k * PANEL) + (num_parts == 1 ? 2048 : 0);
    int count = panel->k - 32 * block;
    char *to = parts_of(is_kept, panel, block);
    if (count >= 32) split_weights(num_parts, quarter, has_passes ? 1 : 2, weights, 32, next, to);
    else if (count > 0) split_weights(num_parts, quarter, has_passes ? 1 : 2, weights, count, next, to);
}

#define SPLIT(num_parts, quarter, block) split_quarter(num_parts, is_kept, row_tiles == 2 && !is_kept, quarter, panel, block)
#define A_TILES(part)                                                      \
    _tile_loadd(4, a + (part) * TILE_BYTES, 64);                           \
    if (row_tiles == 2) _tile_loadd(5, a + row_step + (part) * TILE_BYTES, 64)
#define B_TILES(part)                                    \
    _tile_loadd(6, b + (2 * (part)) * TILE_BYTES, 64);   \
    _tile_loadd(7, b + (2 * (part) + 1) * TILE_BYTES, 64)
#define ADD_PRODUCTS                 \
    _tile_dpbf16ps(0, 4, 6);         \
    _tile_dpbf16ps(1, 4, 7);         \
    if (row_tiles == 2) {            \
        _tile_dpbf16ps(2, 5, 6);     \
        _tile_dpbf16ps(3, 5, 7);     \
    }

/* sums [2][16 * row_tiles, PANEL] of a panel and of `row_tiles` tiles of rows, 1 or 2, from `rows` on: of the large products, and of the
 * small ones. With `is_first` the panel is cut up on the way, and its parts stay if `is_kept`; else they are there. */
ALWAYS_INLINE void multiply_tiles(const int row_tiles, const int is_first, const int is_kept, const char *rows, const Panel *panel,
                                  float *sums) {
    ptrdiff_t row_step = (ptrdiff_t)panel->blocks * PARTS * TILE_BYTES;
    const char *a = rows, *b;
    float *small = sums + 16 * row_tiles * PANEL;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    if (is_first) {
        SPLIT(PARTS, 0, 0);
        SPLIT(PARTS, 1, 0);
        SPLIT(PARTS, 2, 0);
        SPLIT(PARTS, 3, 0);
    }
    for (int block = 0; block < panel->blocks; block++, a += PARTS * TILE_BYTES) {
        b = parts_of(is_kept, panel, block);
        A_TILES(1);
        B_TILES(1);
        ADD_PRODUCTS
        if (is_first) SPLIT(PARTS, 0, block + 1);
        B_TILES(0);
        ADD_PRODUCTS
        if (is_first) SPLIT(PARTS, 1, block + 1);
        A_TILES(2);
        ADD_PRODUCTS
        if (is_first) SPLIT(PARTS, 2, block + 1);
        A_TILES(0);
        if (row_tiles == 1) {
            _tile_dpbf16ps(2, 4, 6);
            _tile_dpbf16ps(3, 4, 7);
        }
        B_TILES(2);
        ADD_PRODUCTS
        if (is_first) SPLIT(PARTS, 3, block + 1);
        B_TILES(1);
        ADD_PRODUCTS
    }
    _tile_stored(0, small, PANEL * sizeof(float));
    _tile_stored(1, small + LANES, PANEL * sizeof(float));
    if (row_tiles == 1) {
        _tile_stored(2, sums, PANEL * sizeof(float));
        _tile_stored(3, sums + LANES, PANEL * sizeof(float));
        return;
    }
    _tile_stored(2, small + 16 * PANEL, PANEL * sizeof(float));
    _tile_stored(3, small + 16 * PANEL + LANES, PANEL * sizeof(float));
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    a = rows;
    if (!is_kept) {
        SPLIT(1, 0, 0);
        SPLIT(1, 1, 0);
        SPLIT(1, 2, 0);
        SPLIT(1, 3, 0);
    }
    for (int block = 0; block < panel->blocks; block++, a += PARTS * TILE_BYTES) {
        b = parts_of(is_kept, panel, block);
        A_TILES(0);
        B_TILES(0);
        ADD_PRODUCTS
        if (!is_kept) {
            SPLIT(1, 0, block + 1);
            SPLIT(1, 1, block + 1);
            SPLIT(1, 2, block + 1);
            SPLIT(1, 3, block + 1);
        }
    }
    _tile_stored(0, sums, PANEL * sizeof(float));
    _tile_stored(1, sums + LANES, PANEL * sizeof(float));
    _tile_stored(2, sums + 16 * PANEL, PANEL * sizeof(float));
    _tile_stored(3, sums + 16 * PANEL + LANES, PANEL * sizeof(float));
}

#define MULTIPLY(name, row_tiles, is_first, is_kept)                                                    \
    static __attribute__((noinline)) void name(const char *rows, const Panel *panel, float *sums) {     \
        multiply_tiles(row_tiles, is_first, is_kept, rows, panel, sums);                                \
    }
MULTIPLY(one_alone, 1, 1, 0)
MULTIPLY(two_alone, 2, 1, 0)
MULTIPLY(two_first, 2, 1, 1)
MULTIPLY(one_more, 1, 0, 1)
MULTIPLY(two_more, 2, 0, 1)

/* c [rows, PANEL]: 32 rows at most, the first of those that pass by this panel if `is_first`, and the last if `is_last`. */
static void multiply(const char *rows, int count, int is_first, int is_last, const Panel *panel, float *c) {
    int is_two = count > 16;
    if (is_first && is_last) (is_two ? two_alone : one_alone)(rows, panel, c);
    else if (is_first) two_first(rows, panel, c);
    else (is_two ? two_more : one_more)(rows, panel, c);
    const float *small = c + (is_two ? 32 : 16) * PANEL;
    for (int i = 0; i < count * PANEL; i += LANES) store(c + i, load(c + i) + load(small + i));
}

/* Blocks of rows, of whole tiles, that stay in the second-level cache beside a panel. */
static Tiling parts_tiling(const Linear *linear, int m_size, int row_bytes) {
    int tiles = (m_size + 15) / 16, most = second_level_cache_bytes() / 5 * 3 / (16 * row_bytes);
    if (most < 4) most = 4;
    int blocks = (tiles + most - 1) / most;
    return (Tiling){m_size, num_panels(linear), (tiles + blocks - 1) / blocks * 16, blocks};
}

static void parts_phase(Worker *worker, const Linear *linear, const PartsMemory *memory, int m_size, float *out, const float *residual) {
    float c[2 * 32 * PANEL] ALIGNED;
    int victim = 0, item;
    Tiling tiling = parts_tiling(linear, m_size, memory->blocks * PARTS * 64);
    size_t n = linear->n, tile_step = (size_t)memory->blocks * PARTS * TILE_BYTES;
    Panel panel = {0, memory->panels + worker->index * 2 * tile_step, linear->k, memory->blocks};
    configure_tiles();
    while ((item = next_item(worker, tiling.panels * tiling.blocks, &victim)) >= 0) {
        int number = item % tiling.panels, first = item / tiling.panels * tiling.rows;
        int end = first + tiling.rows < m_size ? first + tiling.rows : m_size;
        panel.weights = (const float *)linear->packed + (size_t)number * linear->k * PANEL;
        for (int row = first; row < end; row += 32) {
            int count = end - row < 32 ? end - row : 32;
            multiply(memory->rows + row / 16 * tile_step, count, row == first, end - row <= 32, &panel, c);
            finish_tile(linear, c, count, number, out + row * n, n, residual + (residual ? row * n : 0));
        }
    }
    _tile_release();
}

#undef SPLIT
#undef A_TILES
#undef B_TILES
#undef ADD_PRODUCTS
#else
#define HAS_AMX 0
#endif

#endif
