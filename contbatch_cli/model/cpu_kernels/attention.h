/* Attention over the paged cache, read in place, for a flat batch of runs of any length.
 *
 * T tokens of the step, H query heads, K kv heads, G = H / K, D key size, E value size, B block size. Cache: keys [N, B, K, D] and
 * values [N, B, K, E]. A unit of work is up to UNIT_ROWS / G neighbouring tokens of one run; the G query heads of one kv head are G
 * rows each, so that a key is read once for all of them. Units of short runs whose tables begin with the same blocks (a prefix that the
 * cache holds once) form a bundle: the tiles that they have in common are read once for all its rows, then each unit reads its own.
 *
 * Online softmax (Milakov and Gimelshein 2018; tiled as in FlashAttention, Dao et al. 2022) over tiles of TILE_KEYS keys that begin
 * at multiples of TILE_KEYS, whatever the run and the bundle: a token's output is the same sequence of operations in a run of one as in a
 * run of many, bit for bit. Masked keys have weight exactly 0, and no slot is read that the run's own context does not hold. */
#ifndef CONTBATCH_ATTENTION_H
#define CONTBATCH_ATTENTION_H

#define TILE_KEYS 64
#define UNIT_ROWS (8 * TILE_ROWS)

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
    const int32_t *table_starts; /* [S + 1] where each sequence's table begins in `tables` */
    const int32_t *tables;
    const int32_t *order;  /* [S] the sequences in the order of their tables */
    const int32_t *common; /* [S] leading blocks that each has in common with the one before it in that order */
} Step;

typedef struct {
    const float *data;
    ptrdiff_t token_stride, head_stride;
} Heads;

typedef struct {
    int32_t sequence, first, count; /* tokens `first` to `first + count` of the run */
    int32_t row;                    /* where its rows begin among those of its bundle, of one kv head */
} Unit;

typedef struct {
    int32_t first, count; /* units `first` to `first + count` */
    int32_t rows;         /* of one kv head */
    int32_t shared;       /* leading positions that all have in common, in whole tiles; 0 where there is one unit */
} Bundle;

typedef struct {
    const AttentionShape *shape;
    const Step *step;
    Heads queries;
    const float *keys, *values;
    float *out; /* [T, H, E] */
    Unit *units;
    Bundle *bundles;
    int num_units, num_bundles, heads_split;
    char *scratch;
    size_t scratch_per_thread;
} Attention;

/* One thread's working memory for `rows` query rows. */
typedef struct {
    float *queries, *sums, *highest, *total, *scores, *keys, *values;
} Rows;

static int most_rows(const AttentionShape *shape) { return shape->heads > UNIT_ROWS ? shape->heads : UNIT_ROWS; }

static size_t lay_out_rows(const AttentionShape *shape, char *memory, Rows *rows) {
    size_t count = most_rows(shape), value_width = whole(shape->value_size, PANEL), sizes[7] = {
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

static int run_length(const Step *step, int sequence) { return step->query_starts[sequence + 1] - step->query_starts[sequence]; }

/* Tokens of the sequence before its run. */
static int run_start(const Step *step, int sequence) { return step->context_lens[sequence] - run_length(step, sequence); }

ALWAYS_INLINE int lower(int a, int b) { return a < b ? a : b; }

static void add_unit(Attention *job, Unit unit) {
    int rows = unit.count * (job->shape->heads / job->shape->kv_heads);
    job->bundles[job->num_bundles++] = (Bundle){job->num_units, 1, rows, 0};
    job->units[job->num_units++] = unit;
}

/* Put the unit into the last bundle if it has `shared` leading positions in common with its last unit, at least as many as that bundle's
 * units have and, where that is one, as it has with what comes `next`, and if there is room. */
static int join_bundle(Attention *job, Unit unit, int shared, int next, int most) {
    int rows = unit.count * (job->shape->heads / job->shape->kv_heads);
    Bundle *last = job->bundles + job->num_bundles - 1;
    if (shared == 0 || last->rows + rows > most || shared < (last->count == 1 ? next : last->shared)) return 0;
    if (last->count == 1) last->shared = shared;
    unit.row = last->rows;
    last->rows += rows;
    last->count++;
    job->units[job->num_units++] = unit;
    return 1;
}

/* The units of short runs, whole runs each, in bundles of up to `most` rows. */
static void bundle_short_runs(Attention *job, int longest, int most) {
    const Step *step = job->step;
    int previous = -1, common = INT32_MAX;
    for (int i = 0; i < step->num_sequences; i++) {
        int s = step->order[i], length = run_length(step, s), shared = 0;
        common = lower(common, step->common[i]);
        if (length > longest) continue;
        if (previous >= 0 && !job->shape->window)
            shared = lower(lower(common * step->block_size, run_start(step, s)), run_start(step, previous)) / TILE_KEYS * TILE_KEYS;
        int next = i + 1 < step->num_sequences ? step->common[i + 1] * step->block_size / TILE_KEYS * TILE_KEYS : 0;
        Unit unit = {s, 0, length, 0};
        if (!join_bundle(job, unit, shared, next, most)) add_unit(job, unit);
        previous = s;
        common = INT32_MAX;
    }
}

/* The step's units in bundles, the long runs' before the short ones'. With many threads bundles are smaller, so that each gets some. */
static void list_units(Attention *job, int num_threads) {
    const Step *step = job->step;
    int tokens = tokens_per_unit(job->shape), longest = tokens / 2 > 1 ? tokens / 2 : 1, num_short = 0;
    job->num_units = job->num_bundles = 0;
    for (int s = 0; s < step->num_sequences; s++) {
        int length = run_length(step, s);
        if (length <= longest) num_short += length;
        else
            for (int first = (length - 1) / tokens * tokens; first >= 0; first -= tokens)
                add_unit(job, (Unit){s, first, lower(length - first, tokens), 0});
    }
    bundle_short_runs(job, longest, lower(UNIT_ROWS, num_short * job->shape->heads / (2 * num_threads)));
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

/* Where the first kv head's keys and values of a tile's positions are, and then those of the next tile. */
typedef struct {
    const float *keys[2 * TILE_KEYS], *values[2 * TILE_KEYS];
} Places;

/* Bring a line of LANES keys and values of kv head `kv`, from the `first` place and column `i` on, into the second-level cache. */
ALWAYS_INLINE void prefetch_lanes(const AttentionShape *shape, const Places *places, int kv, int first, int i) {
    for (int j = first; j < first + LANES; j++) {
        if (i < shape->key_size) __builtin_prefetch(places->keys[j] + kv * shape->key_size + i, 0, 2);
        if (i < shape->value_size) __builtin_prefetch(places->values[j] + kv * shape->value_size + i, 0, 2);
    }
}

/* A tile's keys [count, D] of kv head `kv`, to panels [ceil(count / PANEL)][D][PANEL]. What fills up the last panel is any number. */
static void pack_keys(const AttentionShape *shape, const Places *places, int kv, int count, float *panels) {
    int size = shape->key_size, longest = size > shape->value_size ? size : shape->value_size;
    for (int first = 0; first < TILE_KEYS; first += LANES) {
        const float *rows[LANES];
        for (int j = 0; j < LANES; j++) rows[j] = places->keys[first + j < count ? first + j : first] + kv * size;
        float *out = panels + (size_t)(first / PANEL) * PANEL * size + first % PANEL;
        int i = 0, ahead = TILE_KEYS + first;
        for (; i + LANES <= size; i += LANES) {
            prefetch_lanes(shape, places, kv, ahead, i);
            if (first < count) transpose(rows, i, out + (size_t)i * PANEL);
        }
        for (int k = i; k < longest; k += 16) prefetch_lanes(shape, places, kv, ahead, k);
        if (first < count)
            for (; i < size; i++)
                for (int j = 0; j < LANES; j++) out[(size_t)i * PANEL + j] = rows[j][i];
    }
}

/* `width` columns of values [count, E] at their places, from column `first` on, to [count, PANEL]. */
static void pack_values(const float *const *values, int count, int first, int width, float *panel) {
    for (int j = 0; j < count; j++) memcpy(panel + j * PANEL, values[j] + first, sizeof(float) * width);
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

/* sums [rows, E] += weights [rows, TILE_KEYS] times the tile's values of kv head `kv`, which lie K * E apart where their slots follow each
 * other. Whole panels are read in place, a last part of one by a copy. */
static void add_values(const AttentionShape *shape, const float *weights, int rows, const float *const *values, int kv, int count,
                       float *copy, float *sums) {
    int size = shape->value_size, width = (int)whole(size, PANEL), whole_panels = size / PANEL * PANEL, end;
    ptrdiff_t stride = (ptrdiff_t)shape->kv_heads * size;
    for (int start = 0; start < count; start = end) {
        for (end = start + 1; end < count && values[end] == values[end - 1] + stride; end++) {}
        for (int first = 0; first < whole_panels; first += PANEL)
            add_columns(weights + start, rows, values[start] + kv * size + first, stride, end - start, sums + first, width);
    }
    if (whole_panels == size) return;
    pack_values(values, count, kv * size + whole_panels, size - whole_panels, copy);
    add_columns(weights, rows, copy, PANEL, count, sums + whole_panels, width);
}

/* The keys of a tile that each of its rows sees: `low` to `high`. */
typedef struct {
    int first, step; /* row r sees none from `first + r / step` on */
    int window, count;
} Sight;

ALWAYS_INLINE void seen_by(const Sight *sight, int row, int *low, int *high) {
    int end = sight->first + row / sight->step, begin = sight->window ? end - sight->window : 0;
    *high = end < 0 ? 0 : end > sight->count ? sight->count : end;
    *low = begin < 0 ? 0 : begin > *high ? *high : begin;
}

/* Scores of up to `columns` keys as they count: soft cap, and -infinity for keys that the row does not see. Gives the largest. */
ALWAYS_INLINE float settle_scores(float *scores, int columns, int low, int high, float softcap) {
    vec most = splat(-INFINITY), lanes = lane_numbers();
    if (softcap == 0 && low == 0 && high == columns) {
        for (int i = 0; i < columns; i += LANES) most = max_vec(load(scores + i), most);
        return max_lanes(most);
    }
    for (int i = 0; i < columns; i += LANES) {
        vec x = load(scores + i), place = lanes + (float)i;
        if (softcap != 0) x = softcap * tanh_vec(x / softcap);
        x = select_vec((place >= (float)low) & (place < (float)high), x, splat(-INFINITY));
        store(scores + i, x);
        most = max_vec(x, most);
    }
    return max_lanes(most);
}

/* A step of the online softmax for `rows` rows, up to LANES: scores become weights, and sums and totals are scaled to the new highest. */
static void weigh(float *scores, int first, int rows, const Sight *sight, float softcap, float *highest, float *total, float *sums,
                  int width) {
    float tops[LANES], before[LANES], scales[LANES];
    int columns = (int)whole(sight->count, PANEL);
    for (int row = 0; row < LANES; row++) tops[row] = before[row] = -INFINITY;
    for (int row = 0; row < rows; row++) {
        int low, high;
        seen_by(sight, first + row, &low, &high);
        tops[row] = settle_scores(scores + row * TILE_KEYS, columns, low, high, softcap);
        before[row] = highest[row];
    }
    vec old = load(before), top = max_vec(load(tops), old);
    store(before, top);
    top = select_vec(top == splat(-INFINITY), (vec){0}, top); /* sees nothing of this tile, nor of those before it */
    store(tops, top);
    store(scales, exp_vec(old - top));
    for (int row = 0; row < rows; row++, scores += TILE_KEYS, sums += width) {
        vec added = {0}, highest_of_row = splat(tops[row]);
        for (int i = 0; i < columns; i += LANES) {
            vec weight = exp_vec(load(scores + i) - highest_of_row);
            store(scores + i, weight);
            added += weight;
        }
        total[row] = total[row] * scales[row] + sum_lanes(added);
        highest[row] = before[row];
        if (scales[row] != 1.0f)
            for (int i = 0; i < width; i += LANES) store(sums + i, load(sums + i) * scales[row]);
    }
}

/* Gather a bundle's queries of kv heads `kv_low` to `kv_high`, scaled, and begin their sums. */
static void begin_rows(const Attention *job, const Bundle *bundle, int kv_low, int kv_high, Rows *rows) {
    const AttentionShape *shape = job->shape;
    int group = shape->heads / shape->kv_heads, size = shape->key_size, row = 0;
    size_t width = whole(shape->value_size, PANEL);
    for (int kv = kv_low; kv < kv_high; kv++)
        for (const Unit *unit = job->units + bundle->first; unit < job->units + bundle->first + bundle->count; unit++)
            for (int t = 0; t < unit->count; t++)
                for (int g = 0; g < group; g++, row++) {
                    int head = kv * group + g;
                    ptrdiff_t token = job->step->query_starts[unit->sequence] + unit->first + t;
                    const float *query = job->queries.data + token * job->queries.token_stride + head * job->queries.head_stride;
                    for (int i = 0; i < size; i++) rows->queries[(size_t)row * size + i] = query[i] * shape->scaling;
                    rows->highest[row] = shape->sinks ? shape->sinks[head] : -INFINITY;
                    rows->total[row] = shape->sinks ? 1.0f : 0.0f;
                }
    memset(rows->sums, 0, row * width * sizeof(float));
}

static void finish_rows(const Attention *job, const Bundle *bundle, int kv_low, int kv_high, const Rows *rows) {
    const AttentionShape *shape = job->shape;
    int group = shape->heads / shape->kv_heads, row = 0;
    size_t width = whole(shape->value_size, PANEL);
    for (int kv = kv_low; kv < kv_high; kv++)
        for (const Unit *unit = job->units + bundle->first; unit < job->units + bundle->first + bundle->count; unit++)
            for (int t = 0; t < unit->count; t++)
                for (int g = 0; g < group; g++, row++) {
                    size_t token = job->step->query_starts[unit->sequence] + unit->first + t;
                    float *out = job->out + (token * shape->heads + kv * group + g) * shape->value_size;
                    float scale = 1.0f / rows->total[row];
                    for (int i = 0; i < shape->value_size; i++) out[i] = rows->sums[row * width + i] * scale;
                }
}

/* A tile: TILE_KEYS positions from `start`, of one unit, or, where `unit` is null, those that all units of the bundle have in common. */
typedef struct {
    const Unit *unit;
    int start;
} Tile;

/* Position after the unit's last token. */
static int unit_end(const Step *step, const Unit *unit) { return run_start(step, unit->sequence) + unit->first + unit->count; }

/* The unit's first tile behind what it shares. */
static Tile own_tile(const Attention *job, const Bundle *bundle, const Unit *unit) {
    int seen = unit_end(job->step, unit) - unit->count + 1, window = job->shape->window;
    return (Tile){unit, window && seen > window ? (seen - window) / TILE_KEYS * TILE_KEYS : bundle->shared};
}

static Tile first_tile(const Attention *job, const Bundle *bundle) {
    return bundle->shared ? (Tile){0, 0} : own_tile(job, bundle, job->units + bundle->first);
}

/* Go on to the bundle's next tile; 0 when there is none. */
static int next_tile(const Attention *job, const Bundle *bundle, Tile *tile) {
    const Unit *first = job->units + bundle->first;
    tile->start += TILE_KEYS;
    if (tile->start < (tile->unit ? unit_end(job->step, tile->unit) : bundle->shared)) return 1;
    const Unit *next = tile->unit ? tile->unit + 1 : first;
    if (next == first + bundle->count) return 0;
    *tile = own_tile(job, bundle, next);
    return 1;
}

/* The places of a tile's positions, from the one numbered `at` on; those behind the unit's last token stand for nothing and name that
 * token's. */
static void list_places(const Attention *job, const Bundle *bundle, Tile tile, Places *places, int at) {
    const Step *step = job->step;
    const Unit *unit = tile.unit ? tile.unit : job->units + bundle->first;
    const int32_t *table = step->tables + step->table_starts[unit->sequence];
    const AttentionShape *shape = job->shape;
    ptrdiff_t key_stride = (ptrdiff_t)shape->kv_heads * shape->key_size, value_stride = (ptrdiff_t)shape->kv_heads * shape->value_size;
    int left = unit_end(step, unit) - tile.start, block = tile.start / step->block_size, offset = tile.start % step->block_size;
    for (int j = 0; j < TILE_KEYS; j++) {
        int64_t slot = (int64_t)table[block] * step->block_size + offset;
        places->keys[at + j] = job->keys + slot * key_stride;
        places->values[at + j] = job->values + slot * value_stride;
        if (j + 1 < left && ++offset == step->block_size) {
            offset = 0;
            block++;
        }
    }
}

/* One tile for one kv head, whose rows begin at `first_row`. */
static void attend_tile(const Attention *job, const Bundle *bundle, Tile tile, int kv, int first_row, const Places *places, Rows *rows) {
    const AttentionShape *shape = job->shape;
    int group = shape->heads / shape->kv_heads, width = (int)whole(shape->value_size, PANEL);
    int num_rows = tile.unit ? tile.unit->count * group : bundle->rows;
    int count = tile.unit ? lower(unit_end(job->step, tile.unit) - tile.start, TILE_KEYS) : TILE_KEYS;
    float *scores = rows->scores;
    if (tile.unit) first_row += tile.unit->row;
    pack_keys(shape, places, kv, count, rows->keys);
    score(shape, rows->queries + (size_t)first_row * shape->key_size, num_rows, rows->keys, count, scores);
    Sight sight = {count, 1 << 30, 0, count};
    if (tile.unit) sight = (Sight){unit_end(job->step, tile.unit) - tile.unit->count + 1 - tile.start, group, shape->window, count};
    for (int row = 0, place = first_row; row < num_rows; row += LANES, place += LANES)
        weigh(scores + row * TILE_KEYS, row, lower(num_rows - row, LANES), &sight, shape->softcap, rows->highest + place,
              rows->total + place, rows->sums + (size_t)place * width, width);
    add_values(shape, scores, num_rows, places->values, kv, count, rows->values, rows->sums + (size_t)first_row * width);
}

/* One bundle, kv heads `kv_low` to `kv_high` side by side, so that each block is read in one sweep. During the last tile the first of
 * the bundle that `follows` is prefetched. */
static void attend_bundle(const Attention *job, const Bundle *bundle, const Bundle *follows, int kv_low, int kv_high, Rows *rows) {
    Places places;
    Tile tile = first_tile(job, bundle);
    begin_rows(job, bundle, kv_low, kv_high, rows);
    list_places(job, bundle, tile, &places, 0);
    for (int is_last = 0; !is_last;) {
        Tile next = tile;
        is_last = !next_tile(job, bundle, &next);
        if (is_last) next = first_tile(job, follows);
        list_places(job, is_last ? follows : bundle, next, &places, TILE_KEYS);
        for (int kv = kv_low; kv < kv_high; kv++) attend_tile(job, bundle, tile, kv, (kv - kv_low) * bundle->rows, &places, rows);
        memcpy(places.keys, places.keys + TILE_KEYS, sizeof places.keys / 2);
        memcpy(places.values, places.values + TILE_KEYS, sizeof places.values / 2);
        tile = next;
    }
    finish_rows(job, bundle, kv_low, kv_high, rows);
}

static void attention_phase(Worker *worker, const Attention *job) {
    Rows rows;
    lay_out_rows(job->shape, job->scratch + worker->index * job->scratch_per_thread, &rows);
    int victim = 0, item, kv_heads = job->shape->kv_heads;
    while ((item = next_item(worker, job->num_bundles * job->heads_split, &victim)) >= 0) {
        const Bundle *bundle = job->bundles + item / job->heads_split;
        const Bundle *follows = job->bundles + (item + 1) / job->heads_split % job->num_bundles;
        int part = item % job->heads_split, at_once = most_rows(job->shape) / bundle->rows;
        int low = share_start(kv_heads, part, job->heads_split), high = share_start(kv_heads, part + 1, job->heads_split);
        if (at_once < 1) at_once = 1;
        for (int kv = low; kv < high; kv += at_once)
            attend_bundle(job, bundle, kv + at_once < high ? bundle : follows, kv, lower(kv + at_once, high), &rows);
    }
}

static const Step *step_in_order; /* whose sequences are being sorted: `qsort` has no other way to know */

static int table_length(const Step *step, int sequence) { return step->table_starts[sequence + 1] - step->table_starts[sequence]; }

/* Leading blocks that two tables have in common. */
static int common_blocks(const Step *step, int a, int b) {
    const int32_t *first = step->tables + step->table_starts[a], *second = step->tables + step->table_starts[b];
    int most = lower(table_length(step, a), table_length(step, b)), count = 0;
    while (count < most && first[count] == second[count]) count++;
    return count;
}

static int compare_tables(const void *a, const void *b) {
    const Step *step = step_in_order;
    int first = *(const int32_t *)a, second = *(const int32_t *)b, count = common_blocks(step, first, second);
    int left = table_length(step, first) - count, right = table_length(step, second) - count;
    if (!left || !right) return left != right ? left - right : first - second;
    return step->tables[step->table_starts[first] + count] < step->tables[step->table_starts[second] + count] ? -1 : 1;
}

/* Sort the step's sequences by their tables, so that those which share a prefix stand together: `order` and `common` of Step. */
static void order_tables(const Step *step, int32_t *order, int32_t *common) {
    step_in_order = step;
    for (int i = 0; i < step->num_sequences; i++) order[i] = i;
    qsort(order, step->num_sequences, sizeof *order, compare_tables);
    for (int i = 0; i < step->num_sequences; i++) common[i] = i ? common_blocks(step, order[i - 1], order[i]) : 0;
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
