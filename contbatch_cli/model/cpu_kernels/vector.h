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
ALWAYS_INLINE vec max_vec(vec a, vec b) { return select_vec(a > b, a, b); }

ALWAYS_INLINE size_t whole(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

ALWAYS_INLINE vec lane_numbers(void) {
    vec v;
    for (int i = 0; i < LANES; i++) v[i] = (float)i;
    return v;
}

ALWAYS_INLINE float max_lanes(vec v) {
    float m = v[0];
    for (int i = 1; i < LANES; i++) m = v[i] > m ? v[i] : m;
    return m;
}

ALWAYS_INLINE float sum_lanes(vec v) {
    float part[LANES];
    memcpy(part, &v, sizeof v);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) part[i] += part[i + width];
    return part[0];
}

/* exp to about one unit in the last place; 0 below -87.3 (so for -inf), the largest finite power above 88.3; NaN stays NaN. */
ALWAYS_INLINE vec exp_vec(vec x) {
    const vec magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    ivec tiny = x < splat(-87.3f);
    vec clamped = select_vec(tiny, splat(-87.3f), x);
    clamped = select_vec(clamped > splat(88.3f), splat(88.3f), clamped);
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

ALWAYS_INLINE float exp_one(float x) { return exp_vec(splat(x))[0]; }

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
