/* Vectors of the widest float registers that the compiler was told of, and the elementwise functions on them.
 *
 * Nothing here depends on how many rows are computed at once: each output element is the same sequence of operations whatever
 * stands beside it. Do not compile with -ffast-math. */
#ifndef CONTBATCH_VECTOR_H
#define CONTBATCH_VECTOR_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__AVX__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16    /* 32 registers: 14 rows x 2 vectors of accumulators */
#define TILE_ROWS 14
#elif defined(__AVX__)
#define LANES 8     /* 16 registers: 6 x 2 */
#define TILE_ROWS 6
#elif defined(__aarch64__)
#define LANES 4     /* 32 registers: 12 x 2 */
#define TILE_ROWS 12
#else
#define LANES 4     /* 16 registers: 6 x 2 */
#define TILE_ROWS 6
#endif
#define PANEL (2 * LANES) /* columns of one packed panel */

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));
typedef float vec_unaligned __attribute__((vector_size(LANES * 4), aligned(4)));

#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define ALIGNED __attribute__((aligned(64)))
#define UNROLL _Pragma("GCC unroll 16")

ALWAYS_INLINE vec load(const float *p) { return *(const vec_unaligned *)p; }
ALWAYS_INLINE void store(float *p, vec v) { *(vec_unaligned *)p = v; }
ALWAYS_INLINE ivec load_int(const void *p) { return (ivec)load(p); }
ALWAYS_INLINE vec splat(float x) { return x - (vec){0}; }
ALWAYS_INLINE vec select_vec(ivec mask, vec yes, vec no) { return (vec)(((ivec)yes & mask) | ((ivec)no & ~mask)); }
/* The second where either is NaN, as processors have it. */
ALWAYS_INLINE vec max_vec(vec a, vec b) {
#if LANES == 16
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif LANES == 8
    return (vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return select_vec(a > b, a, b);
#endif
}
ALWAYS_INLINE vec min_vec(vec a, vec b) {
#if LANES == 16
    return (vec)_mm512_min_ps((__m512)a, (__m512)b);
#elif LANES == 8
    return (vec)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return select_vec(a < b, a, b);
#endif
}

ALWAYS_INLINE size_t whole(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

ALWAYS_INLINE vec lane_numbers(void) {
    vec v;
    for (int i = 0; i < LANES; i++) v[i] = (float)i;
    return v;
}

/* A vector whose lanes have changed places with those `distance` away. */
#if defined(__clang__)
ALWAYS_INLINE vec swap_lanes(vec v, const int distance) {
    vec swapped;
    for (int i = 0; i < LANES; i++) swapped[i] = v[i ^ distance];
    return swapped;
}
#else
#define NUMBERS4(first, distance) (first) ^ (distance), ((first) + 1) ^ (distance), ((first) + 2) ^ (distance), ((first) + 3) ^ (distance)
#if LANES == 16
#define SWAPPED(distance) {NUMBERS4(0, distance), NUMBERS4(4, distance), NUMBERS4(8, distance), NUMBERS4(12, distance)}
#elif LANES == 8
#define SWAPPED(distance) {NUMBERS4(0, distance), NUMBERS4(4, distance)}
#else
#define SWAPPED(distance) {NUMBERS4(0, distance)}
#endif
#define swap_lanes(v, distance) __builtin_shuffle(v, (ivec)SWAPPED(distance))
#endif

/* All lanes by `combine`, which does not ask for the order: halves, quarters and so on, as many steps as the width has bits. */
#if LANES == 16
#define HALVES(combine) v = combine(v, swap_lanes(v, 8)), v = combine(v, swap_lanes(v, 4)),
#elif LANES == 8
#define HALVES(combine) v = combine(v, swap_lanes(v, 4)),
#else
#define HALVES(combine)
#endif
#define REDUCED(combine) (HALVES(combine) v = combine(v, swap_lanes(v, 2)), combine(v, swap_lanes(v, 1)))[0]

ALWAYS_INLINE vec add_vec(vec a, vec b) { return a + b; }
ALWAYS_INLINE float max_lanes(vec v) { return REDUCED(max_vec); }
ALWAYS_INLINE float sum_lanes(vec v) { return REDUCED(add_vec); }

/* exp to about one unit in the last place; 0 below -87.3 (so for -inf), the largest finite power above 88.3; NaN stays NaN. */
ALWAYS_INLINE vec exp_vec(vec x) {
    const vec magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    ivec tiny = x < splat(-87.3f);
    vec clamped = min_vec(splat(88.3f), max_vec(splat(-87.3f), x));
    vec n = (clamped * 1.44269504088896341f + magic) - magic;
    vec r = clamped - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    vec p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    vec finite = select_vec(x == x, n, (vec){0});
    vec power = (vec)((__builtin_convertvector(finite, ivec) + 127) << 23);
    return select_vec(tiny, (vec){0}, p * power);
}


ALWAYS_INLINE vec tanh_vec(vec x) { return 1.0f - 2.0f / (1.0f + exp_vec(2.0f * x)); }
ALWAYS_INLINE vec silu_vec(vec x) { return x / (1.0f + exp_vec(-x)); }
ALWAYS_INLINE vec gelu_tanh_vec(vec x) {
    vec inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return x / (1.0f + exp_vec(-2.0f * inner));
}

/* The weighted sum of one row, to its root mean square: out = x * rsqrt(mean(x^2) + eps) * weight. */
static void rms_norm_row(const float *x, const float *weight, float eps, int size, float *out) {
    vec sums = {0};
    int i = 0;
    float tail = 0;
    for (; i + LANES <= size; i += LANES) sums += load(x + i) * load(x + i);
    for (int j = i; j < size; j++) tail += x[j] * x[j];
    float scale = 1.0f / sqrtf((sum_lanes(sums) + tail) / (float)size + eps);
    for (i = 0; i + LANES <= size; i += LANES) store(out + i, load(weight + i) * (load(x + i) * scale));
    for (; i < size; i++) out[i] = weight[i] * (x[i] * scale);
}

#endif
