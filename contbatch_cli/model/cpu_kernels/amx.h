/* Products in float32 on a processor's matrix unit (Intel AMX), which multiplies bfloat16 and sums in float32.
 *
 * Each factor is cut into three bfloat16 parts of descending size, whose sum it is: w = w0 + w1 + w2 by cutting off, exactly, and
 * x = x0 + x1 + x2 by rounding, to 2^-26 of it or better. Of the nine products of parts the six largest are summed, for 32 inputs at a time,
 *
 *     x1 w1 + x1 w0 + x2 w0 + x0 w0 + x0 w2 + x0 w1
 *
 * what is left out being about 2^-25 of a term and of either sign. A weight that bfloat16 holds is its own only part: x2 w + x1 w + x0 w
 * is all there is. So the result is as near to the exact one as a sum of fused multiply-adds in float32 is. The method is that of Henry,
 * Tang and Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision Computations" (ARITH 2019). A row's
 * result does not depend on the rows beside it.
 *
 * A tile is 1 KiB: 16 rows of 64 bytes. Rows of x: [M / 16][K / 32][part][16 rows][32 inputs]. A block of 32 inputs of a float32 panel, cut
 * up: [part][half of the panel][16 pairs of inputs][16 columns][2]; a bfloat16 panel lies ready. */
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

/* All eight tiles of 16 rows of 64 bytes. Constant data: compilers do not know that the instruction reads all of it. */
static void configure_tiles(void) {
    static const TileConfig config ALIGNED = {
        .palette = 1, .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64}, .rows = {16, 16, 16, 16, 16, 16, 16, 16}};
    _tile_loadconfig(&config);
}

/* What was stored before is there for loads of tiles behind it, which compilers do not know to read memory. */
#define STORES_DONE __asm__ volatile("" ::: "memory")

/* The rows of x in parts. */
typedef struct {
    char *tiles;
    int blocks; /* of 32 inputs */
} Parts;

static size_t lay_out_parts(int m_size, int k, char *memory, Parts *to) {
    to->blocks = (k + 31) / 32;
    to->tiles = memory;
    return (size_t)((m_size + 15) / 16) * to->blocks * PARTS * TILE_BYTES;
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
static void split_phase(Worker *worker, const float *x, int m_size, int k, const Parts *to) {
    int victim = 0, row, filled = (m_size + 15) / 16 * 16;
    while ((row = next_item(worker, filled, &victim)) >= 0) {
        char *tiles = to->tiles + (size_t)(row / 16) * to->blocks * PARTS * TILE_BYTES + row % 16 * 64;
        for (int block = 0; block < to->blocks; block++, tiles += PARTS * TILE_BYTES)
            split_inputs(x + (size_t)row * k + 32 * block, row < m_size ? k - 32 * block : 0, tiles);
    }
}

/* A panel of weights. Of float32 ones there is room for the parts of two blocks, the one at work and the next: they are cut up anew for
 * each 32 rows, which in the first-level cache, beside the products, costs less than to keep them. Of bfloat16 ones `lines` lines of the
 * next panel, from `ahead` on, are fetched during each block. */
typedef struct {
    const char *weights, *ahead;
    int k, blocks, lines;
    char parts[2][2 * PARTS * TILE_BYTES] ALIGNED;
} Panel;

/* Cut up two neighbouring inputs of LANES columns: a row of the tile of each part. */
ALWAYS_INLINE void split_pair(__m512 even, __m512 odd, char *tile) {
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000);
    UNROLL for (int part = 0; part < PARTS; part++, tile += 2 * TILE_BYTES) {
        __m512i cut = _mm512_and_si512(_mm512_castps_si512(odd), upper);
        __m512i low = _mm512_srli_epi32(_mm512_castps_si512(even), 16);
        _mm512_storeu_si512(tile, _mm512_or_si512(cut, low));
        odd = _mm512_sub_ps(odd, _mm512_castsi512_ps(cut));
        even = _mm512_sub_ps(even, _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(even), upper)));
    }
}

/* A quarter of a block of the panel in parts; meanwhile its like of the next panel comes into the second-level cache. Each fourth line is
 * asked for, and the processor's own prefetching brings those between: asking for all would hold up other loads. */
ALWAYS_INLINE void split_quarter(const int quarter, Panel *panel, int block) {
    int count = panel->k - 32 * block;
    if (count <= 0) return;
    const float *from = (const float *)panel->weights + ((size_t)block * 32 + 8 * quarter) * PANEL;
    const char *next = (const char *)(from + (size_t)panel->k * PANEL);
    char *to = panel->parts[block % 2] + quarter * 4 * 64;
    for (int line = 0; line < 16; line += 4) __builtin_prefetch(next + line * 64, 0, 2);
    for (int pair = 0; pair < 4; pair++, from += 2 * PANEL)
        for (int half = 0; half < 2; half++) {
            int left = count - 8 * quarter - 2 * pair;
            __m512 even = left > 0 ? _mm512_loadu_ps(from + half * LANES) : _mm512_setzero_ps();
            __m512 odd = left > 1 ? _mm512_loadu_ps(from + PANEL + half * LANES) : _mm512_setzero_ps();
            split_pair(even, odd, to + half * TILE_BYTES + pair * 64);
        }
}

#define ZERO_SUMS   \
    _tile_zero(0); \
    _tile_zero(1); \
    _tile_zero(2); \
    _tile_zero(3)
#define LOAD_X(part)                                                     \
    _tile_loadd(4, x + (part) * TILE_BYTES, 64);                         \
    if (row_tiles == 2) _tile_loadd(5, x + row_step + (part) * TILE_BYTES, 64)
#define LOAD_W(part)                                                     \
    _tile_loadd(6, w + 2 * (part) * TILE_BYTES, 64);                     \
    _tile_loadd(7, w + (2 * (part) + 1) * TILE_BYTES, 64)
#define MULTIPLY                                                         \
    _tile_dpbf16ps(0, 4, 6);                                             \
    _tile_dpbf16ps(1, 4, 7);                                             \
    if (row_tiles == 2) {                                                \
        _tile_dpbf16ps(2, 5, 6);                                         \
        _tile_dpbf16ps(3, 5, 7);                                         \
    }
ALWAYS_INLINE void store_sums(const int row_tiles, float *c) {
    _tile_stored(0, c, PANEL * sizeof(float));
    _tile_stored(1, c + LANES, PANEL * sizeof(float));
    if (row_tiles == 2) {
        _tile_stored(2, c + 16 * PANEL, PANEL * sizeof(float));
        _tile_stored(3, c + 16 * PANEL + LANES, PANEL * sizeof(float));
    }
}

/* c [16 * row_tiles, PANEL] = `row_tiles` tiles of rows, 1 or 2, from `rows` on, times a float32 panel, which is cut up a block ahead of
 * its use. */
ALWAYS_INLINE void multiply_float32(const int row_tiles, const char *rows, Panel *panel, float *c) {
    ptrdiff_t row_step = (ptrdiff_t)panel->blocks * PARTS * TILE_BYTES;
    ZERO_SUMS;
    for (int quarter = 0; quarter < 4; quarter++) split_quarter(quarter, panel, 0);
    for (int block = 0; block < panel->blocks; block++) {
        const char *x = rows + (size_t)block * PARTS * TILE_BYTES, *w = panel->parts[block % 2];
        STORES_DONE;
        LOAD_X(1);
        LOAD_W(1);
        MULTIPLY
        split_quarter(0, panel, block + 1);
        LOAD_W(0);
        MULTIPLY
        split_quarter(1, panel, block + 1);
        LOAD_X(2);
        MULTIPLY
        split_quarter(2, panel, block + 1);
        LOAD_X(0);
        MULTIPLY
        LOAD_W(2);
        MULTIPLY
        split_quarter(3, panel, block + 1);
        LOAD_W(1);
        MULTIPLY
    }
    store_sums(row_tiles, c);
}

/* The same with a bfloat16 panel, whose weights are their own only part: x2 w + x1 w + x0 w, with nothing left out. */
ALWAYS_INLINE void multiply_bfloat16(const int row_tiles, const char *rows, Panel *panel, float *c) {
    ptrdiff_t row_step = (ptrdiff_t)panel->blocks * PARTS * TILE_BYTES;
    ZERO_SUMS;
    for (int block = 0; block < panel->blocks; block++) {
        const char *x = rows + (size_t)block * PARTS * TILE_BYTES, *w = panel->weights + (size_t)block * 2 * TILE_BYTES;
        _tile_loadd(6, w, 2 * 64);
        _tile_loadd(7, w + 64, 2 * 64);
        for (int line = 0; line < panel->lines; line++, panel->ahead += 64) __builtin_prefetch(panel->ahead, 0, 2);
        LOAD_X(2);
        MULTIPLY
        LOAD_X(1);
        MULTIPLY
        LOAD_X(0);
        MULTIPLY
    }
    store_sums(row_tiles, c);
}

#define FOR_ROWS(format)                                                                               \
    static __attribute__((noinline)) void format##_1(const char *rows, Panel *panel, float *c) {       \
        multiply_##format(1, rows, panel, c);                                                          \
    }                                                                                                  \
    static __attribute__((noinline)) void format##_2(const char *rows, Panel *panel, float *c) {       \
        multiply_##format(2, rows, panel, c);                                                          \
    }
FOR_ROWS(float32)
FOR_ROWS(bfloat16)

/* Blocks of rows, of whole tiles, that stay in the second-level cache beside a panel. */
static Tiling parts_tiling(const Linear *linear, int m_size, int row_bytes) {
    int tiles = (m_size + 15) / 16, most = second_level_cache_bytes() / 5 * 3 / (16 * row_bytes);
    if (most < 4) most = 4;
    int blocks = (tiles + most - 1) / most;
    return (Tiling){m_size, num_panels(linear), (tiles + blocks - 1) / blocks * 16, blocks};
}

static void parts_phase(Worker *worker, const Linear *linear, const Parts *x, int m_size, float *out, const float *residual) {
    float c[32 * PANEL] ALIGNED;
    int victim = 0, item;
    Tiling tiling = parts_tiling(linear, m_size, x->blocks * PARTS * 64);
    size_t n = linear->n, tile_step = (size_t)x->blocks * PARTS * TILE_BYTES;
    Panel panel = {.k = linear->k, .blocks = x->blocks};
    int is_short = linear->format == BFLOAT16;
    configure_tiles();
    while ((item = next_item(worker, tiling.panels * tiling.blocks, &victim)) >= 0) {
        int number = item % tiling.panels, first = item / tiling.panels * tiling.rows;
        int end = first + tiling.rows < m_size ? first + tiling.rows : m_size, passes = (end - first + 31) / 32;
        panel.weights = (const char *)linear->packed + number * panel_bytes(linear);
        panel.ahead = panel.weights + panel_bytes(linear);
        panel.lines = (2 * TILE_BYTES / 64 + passes - 1) / passes;
        for (int row = first; row < end; row += 32) {
            int count = end - row < 32 ? end - row : 32;
            const char *rows = x->tiles + row / 16 * tile_step;
            if (is_short) (count > 16 ? bfloat16_2 : bfloat16_1)(rows, &panel, c);
            else (count > 16 ? float32_2 : float32_1)(rows, &panel, c);
            finish_tile(linear, c, count, number, out + row * n, n, residual + (residual ? row * n : 0));
        }
    }
    _tile_release();
}

#undef ZERO_SUMS
#undef LOAD_X
#undef LOAD_W
#undef MULTIPLY
#undef FOR_ROWS
#else
#define HAS_AMX 0
#endif

#endif
