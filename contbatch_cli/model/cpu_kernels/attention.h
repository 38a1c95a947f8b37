/* Attention over the paged cache, read in place, for a flat batch of runs of any length.
 *
 * T tokens of the step, H query heads, K kv heads, G = H / K, D key size, E value size, B block size. Cache: keys [N, B, K, D] and
 * values [N, B, K, E]. A unit of work is up to UNIT_ROWS / G neighbouring tokens of one run; the G query heads of one kv head are G
 * rows each, so that a key is read once for all of them.
 *
 * Online softmax (Milakov and Gimelshein 2018; tiled as in FlashAttention, Dao et al. 2022) over tiles of TILE_KEYS keys that begin
 * at multiples of TILE_KEYS, whatever the run: a token's output is the same sequence of operations in a run of one as in a run of
 * many, bit for bit. Masked keys have weight exactly 0, and no slot is read that the run's own context does not hold. */
#ifndef CONTBATCH_ATTENTION_H
#define CONTBATCH_ATTENTION_H

#define TILE_KEYS 64
#define UNIT_ROWS (4 * TILE_ROWS)

typedef struct {
    int32_t heads, kv_heads, key_size, value_size;
    int32_t window; /* a token sees itself and the window - 1 before it; 0: all before it */
    float scaling, softcap; /* softcap 0: none */
    const float *sinks; /* [H] or null */
} AttentionShape;

typedef struct {
    int32_t num_tokens, num_sequences, block_size, padding;
    const int64_t *slots;        /* [T] where each token's key and value go */
    const int32_t *query_starts; /* [S + 1] */
    const int32_t *context_lens; /* [S] */
    const int32_t *table_starts; /* [S] where each sequence's table begins in `tables` */
    const int32_t *tables;
} Step;

typedef struct {
    const float *data;
    ptrdiff_t token_stride, head_stride;
} Heads;

typedef struct {
    int32_t sequence, first, count; /* tokens `first` to `first + count` of the run */
} Unit;

typedef struct {
    const AttentionShape *shape;
    const Step *step;
    Heads queries;
    const float *keys, *values;
    float *out; /* [T, H, E] */
    const Unit *units;
    int num_units, heads_split;
    char *scratch;
    size_t scratch_per_thread;
} Attention;

/* One thread's working memory for `rows` query rows. */
typedef struct {
    float *queries, *sums, *highest, *total, *scores, *keys, *values;
} Rows;

static size_t lay_out_rows(const AttentionShape *shape, char *memory, Rows *rows) {
    size_t count = shape->heads > UNIT_ROWS ? shape->heads : UNIT_ROWS;
    if (shape->heads / shape->kv_heads > UNIT_ROWS) count = shape->heads;
    size_t value_width = whole(shape->value_size, PANEL), sizes[7] = {
        count * shape->key_size, count * value_width, count, count, count * TILE_KEYS,
        (size_t)TILE_KEYS * shape->key_size, TILE_KEYS * PANEL};
    float **fields[7] = {&rows->queries, &rows->sums, &rows->highest, &rows->total, &rows->scores, &rows->keys, &rows->values};
    size_t offset = 0;
    for (int i = 0; i < 7; i++) {
        *fields[i] = (float *)(memory + offset);
        offset += whole(sizes[i] * sizeof(float), 64);
    }
    return whole(offset, 4096);
}

static int tokens_per_unit(const AttentionShape *shape) {
    int tokens = UNIT_ROWS / (shape->heads / shape->kv_heads);
    return tokens < 1 ? 1 : tokens;
}

static int count_units(const AttentionShape *shape, const Step *step) {
    int tokens = tokens_per_unit(shape), count = 0;
    for (int s = 0; s < step->num_sequences; s++)
        count += (step->query_starts[s + 1] - step->query_starts[s] + tokens - 1) / tokens;
    return count;
}

/* The step's units, the long runs' before the single tokens. */
static void list_units(const AttentionShape *shape, const Step *step, Unit *units) {
    int tokens = tokens_per_unit(shape);
    for (int single = 0; single < 2; single++)
        for (int s = 0; s < step->num_sequences; s++) {
            int length = step->query_starts[s + 1] - step->query_starts[s];
            if ((length == 1) != single) continue;
            for (int first = (length - 1) / tokens * tokens; first >= 0; first -= tokens)
                *units++ = (Unit){s, first, length - first < tokens ? length - first : tokens};
        }
}

/* Step `width` of a transposition: lanes whose number has that bit set change places with the other vector's. */
#define LOW(lane, width) ((lane) & (width) ? (lane) - (width) + LANES : (lane))
#define HIGH(lane, width) ((lane) & (width) ? (lane) + LANES : (lane) + (width))
#define LANES4(side, first, width) side(first, width), side(first + 1, width), side(first + 2, width), side(first + 3, width)
#if LANES == 16
#define ALL_LANES(side, width) \
    {LANES4(side, 0, width), LANES4(side, 4, width), LANES4(side, 8, width), LANES4(side, 12, width)}
#elif LANES == 8
#define ALL_LANES(side, width) {LANES4(side, 0, width), LANES4(side, 4, width)}
#else
#define ALL_LANES(side, width) {LANES4(side, 0, width)}
#endif

#define EXCHANGE(width)                                                                                                          \
    if (width < LANES) {                                                                                                         \
        const ivec low = ALL_LANES(LOW, width), high = ALL_LANES(HIGH, width);                                                   \
        UNROLL for (int i = 0; i < LANES; i++) {                                                                                 \
            if (i & width) continue;                                                                                             \
            vec a = r[i], b = r[(i + width) % LANES];                                                                            \
            r[i] = __builtin_shuffle(a, b, low);                                                                                 \
            r[(i + width) % LANES] = __builtin_shuffle(a, b, high);                                                              \
        }                                                                                                                        \
    }

/* LANES x LANES floats, rows at `rows`, become columns of `out` (stride PANEL). */
ALWAYS_INLINE void transpose(const float *const *rows, int offset, float *out) {
#if defined(__clang__)
    for (int j = 0; j < LANES; j++)
        for (int i = 0; i < LANES; i++) out[i * PANEL + j] = rows[j][offset + i];
#else
    vec r[LANES];
    UNROLL for (int i = 0; i < LANES; i++) r[i] = load(rows[i] + offset);
    EXCHANGE(1) EXCHANGE(2) EXCHANGE(4) EXCHANGE(8)
    UNROLL for (int i = 0; i < LANES; i++) store(out + i * PANEL, r[i]);
#endif
}

/* Bring LANES keys and values, from column `i` on a line of each, into the second-level cache. */
ALWAYS_INLINE void prefetch_lanes(const float *const *keys, const float *const *values, int i, int key_size, int value_size) {
    for (int j = 0; j < LANES; j++) {
        if (i < key_size) __builtin_prefetch(keys[j] + i, 0, 2);
        if (i < value_size) __builtin_prefetch(values[j] + i, 0, 2);
    }
}

/* Keys [count, D] at their places, to panels [ceil(count / PANEL)][D][PANEL]. What fills up the last panel is any number. */
static void pack_keys(const AttentionShape *shape, const float *const *keys, const float *const *values, int count, float *panels) {
    int size = shape->key_size, longest = size > shape->value_size ? size : shape->value_size;
    for (int first = 0; first < TILE_KEYS; first += LANES) {
        const float *rows[LANES];
        for (int j = 0; j < LANES; j++) rows[j] = keys[first + j < count ? first + j : first];
        float *out = panels + (size_t)(first / PANEL) * PANEL * size + first % PANEL;
        int i = 0, ahead = TILE_KEYS + first;
        for (; i + LANES <= size; i += LANES) {
            prefetch_lanes(keys + ahead, values + ahead, i, size, shape->value_size);
            if (first < count) transpose(rows, i, out + (size_t)i * PANEL);
        }
        for (int k = i; k < longest; k += 16) prefetch_lanes(keys + ahead, values + ahead, k, size, shape->value_size);
        if (first < count)
            for (; i < size; i++)
                for (int j = 0; j < LANES; j++) out[(size_t)i * PANEL + j] = rows[j][i];
    }
}

/* Columns `first` to `first + PANEL` of values [count, E] at their places, to [count, PANEL]. */
static void pack_values(const float *const *values, int count, int first, int size, float *panel) {
    for (int j = 0; j < count; j++) memcpy(panel + j * PANEL, values[j] + first, sizeof(float) * (size - first));
}

/* Scores [rows, TILE_KEYS] of the tile's keys. */
static void score(const AttentionShape *shape, const float *queries, int rows, const float *keys, int count, float *scores) {
    int size = shape->key_size;
    for (int first = 0; first < count; first += PANEL)
        for (int low = 0; low < rows; low += TILE_ROWS) {
            int high = rows < low + TILE_ROWS ? rows : low + TILE_ROWS;
            const float *panel = keys + (size_t)first * size;
            kernels[high - low](queries + (size_t)low * size, size, panel, PANEL, size, (const char *)panel, 0,
                                scores + low * TILE_KEYS + first, TILE_KEYS, 0);
        }
}

/* sums [rows, PANEL] (stride `width`) += weights [rows, count] times values [count, PANEL] (stride ldv). */
static void add_columns(const float *weights, int rows, const float *values, ptrdiff_t ldv, int count, float *sums, int width) {
    for (int low = 0; low < rows; low += TILE_ROWS) {
        int high = rows < low + TILE_ROWS ? rows : low + TILE_ROWS;
        kernels[high - low](weights + low * TILE_KEYS, TILE_KEYS, values, ldv, count, (const char *)values, 0,
                            sums + (size_t)low * width, width, 1);
    }
}

/* sums [rows, E] += weights [rows, TILE_KEYS] times the tile's values, which are at `values` and lie `stride` apart where their
 * slots follow each other. Whole panels are read in place, a last part of one by a copy. */
static void add_values(const AttentionShape *shape, const float *weights, int rows, const float *const *values, ptrdiff_t stride,
                       int count, float *copy, float *sums) {
    int size = shape->value_size, width = (int)whole(size, PANEL), end;
    for (int start = 0; start < count; start = end) {
        for (end = start + 1; end < count && values[end] == values[end - 1] + stride; end++) {}
        for (int first = 0; first + PANEL <= size; first += PANEL)
            add_columns(weights + start, rows, values[start] + first, stride, end - start, sums + first, width);
    }
    int first = size / PANEL * PANEL;
    if (first == size) return;
    pack_values(values, count, first, size, copy);
    add_columns(weights, rows, copy, PANEL, count, sums + first, width);
}

/* One row's step of the online softmax: its scores become weights; the keys that it sees are `low` to `high` of the tile. */
ALWAYS_INLINE void weigh(float *scores, int count, int low, int high, float softcap, float *highest, float *total, float *sums,
                         int width) {
    vec lanes = lane_numbers(), most = splat(-INFINITY), added = {0};
    for (int i = 0; i < count; i += LANES) {
        vec x = load(scores + i), place = lanes + (float)i;
        if (softcap != 0) x = softcap * tanh_vec(x / softcap);
        x = select_vec((place >= (float)low) & (place < (float)high), x, splat(-INFINITY));
        store(scores + i, x);
        most = select_vec(x <= most, most, x);
    }
    float top = max_lanes(most);
    top = top <= *highest ? *highest : top;
    if (top == -INFINITY) top = 0; /* sees nothing of this tile, nor of those before it */
    for (int i = 0; i < count; i += LANES) {
        vec weight = exp_vec(load(scores + i) - top);
        store(scores + i, weight);
        added += weight;
    }
    float scale = *highest == -INFINITY ? 0.0f : exp_one(*highest - top);
    *total = *total * scale + sum_lanes(added);
    if (scale != 1.0f)
        for (int i = 0; i < width; i += LANES) store(sums + i, load(sums + i) * scale);
    if (low < high) *highest = top;
}

/* Gather the unit's queries of kv heads `kv_low` to `kv_high`, scaled, and begin their sums. */
static void begin_rows(const Attention *job, Unit unit, int kv_low, int kv_high, Rows *rows) {
    const AttentionShape *shape = job->shape;
    int group = shape->heads / shape->kv_heads, size = shape->key_size, row = 0;
    size_t width = whole(shape->value_size, PANEL);
    for (int kv = kv_low; kv < kv_high; kv++)
        for (int t = 0; t < unit.count; t++)
            for (int g = 0; g < group; g++, row++) {
                int head = kv * group + g;
                ptrdiff_t token = job->step->query_starts[unit.sequence] + unit.first + t;
                const float *query = job->queries.data + token * job->queries.token_stride + head * job->queries.head_stride;
                for (int i = 0; i < size; i++) rows->queries[(size_t)row * size + i] = query[i] * shape->scaling;
                rows->highest[row] = shape->sinks ? shape->sinks[head] : -INFINITY;
                rows->total[row] = shape->sinks ? 1.0f : 0.0f;
            }
    memset(rows->sums, 0, row * width * sizeof(float));
}

static void finish_rows(const Attention *job, Unit unit, int kv_low, int kv_high, const Rows *rows) {
    const AttentionShape *shape = job->shape;
    int group = shape->heads / shape->kv_heads, row = 0;
    size_t width = whole(shape->value_size, PANEL);
    for (int kv = kv_low; kv < kv_high; kv++)
        for (int t = 0; t < unit.count; t++)
            for (int g = 0; g < group; g++, row++) {
                size_t token = job->step->query_starts[unit.sequence] + unit.first + t;
                float *out = job->out + (token * shape->heads + kv * group + g) * shape->value_size;
                float scale = 1.0f / rows->total[row];
                for (int i = 0; i < shape->value_size; i++) out[i] = rows->sums[row * width + i] * scale;
            }
}

/* One tile for one kv head: `count` keys from position `start`, for `unit.count * G` rows from `first_row` on. `slots` are the
 * tile's and then the next tile's. */
static void attend_tile(const Attention *job, Unit unit, int kv, int first_row, int start, int count, const int64_t *slots,
                        Rows *rows) {
    const AttentionShape *shape = job->shape;
    int group = shape->heads / shape->kv_heads, num_rows = unit.count * group, columns = (int)whole(count, PANEL);
    int width = (int)whole(shape->value_size, PANEL);
    const float *keys[2 * TILE_KEYS], *values[2 * TILE_KEYS];
    for (int j = 0; j < 2 * TILE_KEYS; j++) {
        keys[j] = job->keys + (slots[j] * shape->kv_heads + kv) * shape->key_size;
        values[j] = job->values + (slots[j] * shape->kv_heads + kv) * shape->value_size;
    }
    float *scores = rows->scores;
    pack_keys(shape, keys, values, count, rows->keys);
    score(shape, rows->queries + (size_t)first_row * shape->key_size, num_rows, rows->keys, count, scores);
    int run_start = job->step->context_lens[unit.sequence] -
                    (job->step->query_starts[unit.sequence + 1] - job->step->query_starts[unit.sequence]);
    for (int row = 0; row < num_rows; row++) {
        int position = run_start + unit.first + row / group;
        int high = position + 1 - start, low = shape->window ? high - shape->window : 0;
        high = high < 0 ? 0 : high > count ? count : high;
        low = low < 0 ? 0 : low > high ? high : low;
        int place = first_row + row;
        weigh(scores + row * TILE_KEYS, columns, low, high, shape->softcap, rows->highest + place, rows->total + place,
              rows->sums + (size_t)place * width, width);
    }
    add_values(shape, scores, num_rows, values, (ptrdiff_t)shape->kv_heads * shape->value_size, count, rows->values,
               rows->sums + (size_t)first_row * width);
}

/* The slots of TILE_KEYS positions from `start`; those from `end` on stand for nothing and name the last position's. */
static void list_slots(const Step *step, const int32_t *table, int start, int end, int64_t *slots) {
    for (int j = 0; j < TILE_KEYS; j++) {
        int position = start + j < end ? start + j : end - 1;
        slots[j] = (int64_t)table[position / step->block_size] * step->block_size + position % step->block_size;
    }
}

/* Position after the unit's last token. */
static int unit_end(const Step *step, Unit unit) {
    int length = step->query_starts[unit.sequence + 1] - step->query_starts[unit.sequence];
    return step->context_lens[unit.sequence] - length + unit.first + unit.count;
}

/* The first position of the unit's first tile. */
static int unit_start(const Attention *job, Unit unit) {
    int seen = unit_end(job->step, unit) - unit.count + 1, window = job->shape->window;
    return window && seen > window ? (seen - window) / TILE_KEYS * TILE_KEYS : 0;
}

static void list_unit_slots(const Step *step, Unit unit, int start, int64_t *slots) {
    list_slots(step, step->tables + step->table_starts[unit.sequence], start, unit_end(step, unit), slots);
}

/* One unit, kv heads `kv_low` to `kv_high` side by side, so that each block is read in one sweep. During the last tile the first of
 * the unit that `follows` is prefetched. */
static void attend_unit(const Attention *job, Unit unit, Unit follows, int kv_low, int kv_high, Rows *rows) {
    const Step *step = job->step;
    const AttentionShape *shape = job->shape;
    int end = unit_end(step, unit);
    int group_rows = unit.count * (shape->heads / shape->kv_heads);
    begin_rows(job, unit, kv_low, kv_high, rows);
    int64_t slots[2 * TILE_KEYS];
    int start = unit_start(job, unit);
    list_unit_slots(step, unit, start, slots);
    for (; start < end; start += TILE_KEYS) {
        int is_last = start + TILE_KEYS >= end;
        list_unit_slots(step, is_last ? follows : unit, is_last ? unit_start(job, follows) : start + TILE_KEYS, slots + TILE_KEYS);
        int count = end - start < TILE_KEYS ? end - start : TILE_KEYS;
        for (int kv = kv_low; kv < kv_high; kv++) attend_tile(job, unit, kv, (kv - kv_low) * group_rows, start, count, slots, rows);
        memcpy(slots, slots + TILE_KEYS, sizeof slots / 2);
    }
    finish_rows(job, unit, kv_low, kv_high, rows);
}

static void attention_phase(Worker *worker, const Attention *job) {
    Rows rows;
    lay_out_rows(job->shape, job->scratch + worker->index * job->scratch_per_thread, &rows);
    int victim = 0, item, kv_heads = job->shape->kv_heads;
    while ((item = next_item(worker, job->num_units * job->heads_split, &victim)) >= 0) {
        Unit unit = job->units[item / job->heads_split], follows = job->units[(item + 1) / job->heads_split % job->num_units];
        int part = item % job->heads_split;
        int low = share_start(kv_heads, part, job->heads_split), high = share_start(kv_heads, part + 1, job->heads_split);
        if (unit.count == 1) {
            attend_unit(job, unit, follows, low, high, &rows);
        } else {
            for (int kv = low; kv < high; kv++) attend_unit(job, unit, kv + 1 < high ? unit : follows, kv, kv + 1, &rows);
        }
    }
}

/* Put the step's keys and values, of any strides, into their slots. One phase. */
static void write_phase(Worker *worker, const AttentionShape *shape, const Step *step, Heads keys, Heads values,
                        float *key_cache, float *value_cache) {
    int victim = 0, token;
    while ((token = next_item(worker, step->num_tokens, &victim)) >= 0)
        for (int kv = 0; kv < shape->kv_heads; kv++) {
            int64_t place = step->slots[token] * shape->kv_heads + kv;
            memcpy(key_cache + place * shape->key_size, keys.data + token * keys.token_stride + kv * keys.head_stride,
                   sizeof(float) * shape->key_size);
            memcpy(value_cache + place * shape->value_size, values.data + token * values.token_stride + kv * values.head_stride,
                   sizeof(float) * shape->value_size);
        }
}

#endif
