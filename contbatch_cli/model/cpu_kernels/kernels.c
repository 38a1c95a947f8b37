/* The library's entry points. All pointers are to float32, C-contiguous unless strides are passed. One call runs at a time. */
#define _GNU_SOURCE
#include "vector.h"
#include "team.h"
#include "gemm.h"
#include "attention.h"
#include "int8.h"
#include "amx.h"
#include "linear.h"
#include "layer.h"
#include <sys/mman.h>
#include <unistd.h>

static Team team;
static atomic_flag busy = ATOMIC_FLAG_INIT;

typedef struct {
    char *memory;
    size_t size;
} Buffer;

/* At least `size` bytes, kept for the next call. NULL when there is no memory. */
static char *reserve(Buffer *buffer, size_t size) {
    if (size > buffer->size) {
        free(buffer->memory);
        buffer->size = whole(size + size / 4, 4096);
        buffer->memory = aligned_alloc(4096, buffer->size);
        if (!buffer->memory) buffer->size = 0;
        else memset(buffer->memory, 0, buffer->size);
    }
    return buffer->memory;
}

static Buffer units_buffer, rows_buffer, layer_buffer, scratch_buffer;

static int second_level_cache_bytes(void) {
    static int bytes;
    if (!bytes) {
        long found = 0;
#ifdef _SC_LEVEL2_CACHE_SIZE
        found = sysconf(_SC_LEVEL2_CACHE_SIZE);
#endif
        bytes = found >= 65536 && found <= (1 << 26) ? (int)found : 1 << 20;
    }
    return bytes;
}

static void acquire(void) {
    while (atomic_flag_test_and_set_explicit(&busy, memory_order_acquire)) sched_yield();
}

static void release(void) { atomic_flag_clear_explicit(&busy, memory_order_release); }

void contbatch_init(void *parallel, void *thread_num, void *num_threads) {
    omp_parallel = (parallel_function)parallel;
    omp_thread_num = (integer_function)thread_num;
    omp_num_threads = (integer_function)num_threads;
}

/* Turn the processor's matrix unit on or off for products in float32; whether it is on then. */
int contbatch_use_amx(int wanted) {
#if HAS_AMX
    amx_is_on = wanted && request_amx();
    return amx_is_on;
#else
    (void)wanted;
    return 0;
#endif
}

/* Columns of a packed panel, and lanes of a vector: what a packed weight's layout depends on. */
int contbatch_panel(void) { return PANEL; }

void contbatch_pack(const float *weight, int n, int k, float *packed) { pack_panels(weight, n, k, packed); }

void contbatch_pack16(const float *weight, int n, int k, uint16_t *packed) { pack_panels16(weight, n, k, packed); }

/* Inputs that a bfloat16 panel is filled up to a multiple of. */
int contbatch_block(void) { return BLOCK; }

int contbatch_fits_bfloat16(const float *values, size_t size) { return fits_bfloat16(values, size); }

void contbatch_pack_int8(const int8_t *weight, int n, int k, uint8_t *packed) { pack_int8_panels(weight, n, k, packed); }

/* Advice only: the part of `memory` that consists of whole huge pages of 2 MiB. */
void contbatch_prefer_huge_pages(char *memory, size_t bytes) {
#ifdef MADV_HUGEPAGE
    size_t huge = 1 << 21, skipped = (huge - (uintptr_t)memory % huge) % huge;
    if (bytes >= skipped + huge) madvise(memory + skipped, (bytes - skipped) / huge * huge, MADV_HUGEPAGE);
#else
    (void)memory, (void)bytes;
#endif
}

typedef struct {
    const Linear *linear;
    const float *x, *residual;
    float *out;
    char *scratch;
    int rows;
} LinearCall;

static void linear_body(void *worker, void *argument) {
    const LinearCall *call = argument;
    linear_phase(worker, call->linear, call->x, call->rows, call->out, call->residual, call->scratch);
}

/* out [M, N] = x [M, K] times the packed weight, plus bias; the epilogue may add `residual` [M, N] or gate. 1 when
 * done, 0 when there is no memory. */
int contbatch_linear(const Linear *linear, const float *x, int rows, float *out, const float *residual, int num_threads) {
    size_t scratch = linear_scratch(linear, rows);
    acquire();
    LinearCall call = {linear, x, residual, out, scratch ? reserve(&scratch_buffer, scratch) : 0, rows};
    int planned = !scratch || call.scratch;
    if (planned) team_run(&team, num_threads, 2, linear_body, &call);
    release();
    return planned;
}

/* `order` [S] and `common` [S] of a step whose other fields are there. */
void contbatch_order(const Step *step, int32_t *order, int32_t *common) {
    acquire();
    order_tables(step, order, common);
    release();
}

/* Units and working memory of an attention. 0 when there is no memory. */
static int plan_attention(Attention *job, int num_threads) {
    Rows unused;
    size_t most = count_units(job->shape, job->step);
    job->scratch_per_thread = lay_out_rows(job->shape, 0, &unused);
    job->units = (Unit *)reserve(&units_buffer, (sizeof(Unit) + sizeof(Bundle)) * most);
    job->bundles = (Bundle *)(job->units + most);
    job->scratch = reserve(&rows_buffer, job->scratch_per_thread * num_threads);
    if (!job->units || !job->scratch) return 0;
    list_units(job, num_threads);
    job->heads_split = job->num_bundles < 4 * num_threads ? job->shape->kv_heads : 1;
    return 1;
}

typedef struct {
    Attention job;
    Heads keys, values;
    float *key_cache, *value_cache;
} AttentionCall;

static void attention_body(void *worker, void *argument) {
    const AttentionCall *call = argument;
    write_phase(worker, call->job.shape, call->job.step, call->keys, call->values, call->key_cache, call->value_cache);
    barrier(worker);
    attention_phase(worker, &call->job);
}

/* Write the step's keys and values into the cache, then attend: out [T, H, E]. `strides`: token and head stride of queries, keys and
 * values, in floats. 1 when done, 0 when there is no memory. */
int contbatch_attend(const AttentionShape *shape, const Step *step, const float *queries, const float *keys, const float *values,
                     const int64_t *strides, float *key_cache, float *value_cache, float *out, int num_threads) {
    AttentionCall call = {.job = {.shape = shape, .step = step, .queries = {queries, strides[0], strides[1]}, .keys = key_cache,
                                  .values = value_cache, .out = out},
                          .keys = {keys, strides[2], strides[3]}, .values = {values, strides[4], strides[5]},
                          .key_cache = key_cache, .value_cache = value_cache};
    acquire();
    int planned = plan_attention(&call.job, num_threads);
    if (planned) team_run(&team, num_threads, 2, attention_body, &call);
    release();
    return planned;
}

/* Bytes of working memory that any of the layer's linears needs. */
static size_t layer_scratch(const Layer *layer, int rows) {
    const Linear *linears[4] = {&layer->qkv, &layer->output, &layer->gate_up, &layer->down};
    size_t most = 0;
    for (int i = 0; i < 4; i++) {
        size_t needed = linear_scratch(linears[i], rows);
        most = needed > most ? needed : most;
    }
    return most;
}

/* One decoder layer: out [T, hidden] from hidden [T, hidden]. 1 when done, 0 when there is no memory. */
int contbatch_layer(const Layer *layer, const Step *step, const float *hidden, const float *cosines, const float *sines,
                    float *key_cache, float *value_cache, float *out, int num_threads) {
    size_t tokens = step->num_tokens, sizes[4] = {layer->hidden, layer->qkv.n, layer->output.k, layer->gate_up.n};
    acquire();
    char *memory = reserve(&layer_buffer, sizeof(float) * tokens * (sizes[0] + sizes[1] + sizes[2] + sizes[3]) + 256);
    size_t scratch = layer_scratch(layer, step->num_tokens);
    float *parts[4];
    for (int i = 0; i < 4; i++) {
        parts[i] = (float *)memory;
        memory += whole(sizeof(float) * tokens * sizes[i], 64);
    }
    LayerCall call = {.layer = layer, .step = step, .hidden = hidden, .cosines = cosines, .sines = sines, .out = out,
                      .keys = key_cache, .values = value_cache, .normed = parts[0], .qkv = parts[1], .attended = parts[2],
                      .gated = parts[3], .scratch = scratch ? reserve(&scratch_buffer, scratch) : 0};
    call.attention = (Attention){.shape = &layer->shape, .step = step, .keys = key_cache, .values = value_cache,
                                 .queries = {parts[1], layer->qkv.n, layer->shape.key_size}, .out = parts[2]};
    int planned = layer_buffer.memory && (!scratch || call.scratch) && plan_attention(&call.attention, num_threads);
    if (planned) team_run(&team, num_threads, MAX_PHASES, layer_body, &call);
    release();
    return planned;
}
