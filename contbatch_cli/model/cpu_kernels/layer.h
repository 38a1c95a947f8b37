/* One decoder layer of the common kind in one call: RMSNorm, fused query-key-value product, rotary embedding, cache write,
 * attention, output product, residual, RMSNorm, gated MLP, residual. */
#ifndef CONTBATCH_LAYER_H
#define CONTBATCH_LAYER_H

typedef struct {
    Linear qkv, output, gate_up, down;
    const float *attention_norm, *mlp_norm; /* [hidden] */
    const float *query_norm, *key_norm;     /* [D] or null */
    float eps;
    int32_t hidden, rotary_size;
    AttentionShape shape;
} Layer;

typedef struct {
    const Layer *layer;
    const Step *step;
    const float *hidden, *cosines, *sines; /* [T, hidden], [T, rotary_size] twice */
    float *out, *keys, *values;
    float *normed, *qkv, *attended, *gated; /* working memory: [T, hidden], [T, (H + K) * D + K * E], [T, H * E], [T, intermediate] */
    char *scratch;                          /* what one linear needs at a time */
    Attention attention;
} LayerCall;

static void norm_phase(Worker *worker, const LayerCall *call, const float *x, const float *weight) {
    int victim = 0, token;
    size_t size = call->layer->hidden;
    while ((token = next_item(worker, call->step->num_tokens, &victim)) >= 0)
        rms_norm_row(x + token * size, weight, call->layer->eps, (int)size, call->normed + token * size);
}

/* Rotate one head in place by the half-split rule: pairs (i, i + size / 2). */
ALWAYS_INLINE void rotate(float *head, const float *cosines, const float *sines, int size) {
    int half = size / 2;
    for (int i = 0; i < half; i++) {
        float a = head[i], b = head[i + half];
        head[i] = a * cosines[i] - b * sines[i];
        head[i + half] = b * cosines[i + half] + a * sines[i + half];
    }
}

/* Norms and rotary embedding of one token's query and key heads, in place. */
static void place_token(const LayerCall *call, int token) {
    const Layer *layer = call->layer;
    const AttentionShape *shape = &layer->shape;
    float *head = call->qkv + (size_t)token * layer->qkv.n;
    for (int i = 0; i < shape->heads + shape->kv_heads; i++, head += shape->key_size) {
        const float *norm = i < shape->heads ? layer->query_norm : layer->key_norm;
        if (norm) rms_norm_row(head, norm, layer->eps, shape->key_size, head);
        rotate(head, call->cosines + (size_t)token * layer->rotary_size, call->sines + (size_t)token * layer->rotary_size,
               layer->rotary_size);
    }
}

static void place_phase(Worker *worker, const LayerCall *call) {
    const AttentionShape *shape = &call->layer->shape;
    int victim = 0, token, width = call->layer->qkv.n;
    while ((token = next_item(worker, call->step->num_tokens, &victim)) >= 0) {
        place_token(call, token);
        const float *keys = call->qkv + (size_t)token * width + shape->heads * shape->key_size;
        const float *values = keys + shape->kv_heads * shape->key_size;
        int64_t slot = call->step->slots[token] * shape->kv_heads;
        memcpy(call->keys + slot * shape->key_size, keys, sizeof(float) * shape->kv_heads * shape->key_size);
        memcpy(call->values + slot * shape->value_size, values, sizeof(float) * shape->kv_heads * shape->value_size);
    }
}

static void layer_body(void *worker_pointer, void *argument) {
    Worker *worker = worker_pointer;
    const LayerCall *call = argument;
    const Layer *layer = call->layer;
    int tokens = call->step->num_tokens;
    norm_phase(worker, call, call->hidden, layer->attention_norm);
    barrier(worker);
    linear_phase(worker, &layer->qkv, call->normed, tokens, call->qkv, 0, call->scratch);
    barrier(worker);
    place_phase(worker, call);
    barrier(worker);
    attention_phase(worker, &call->attention);
    barrier(worker);
    linear_phase(worker, &layer->output, call->attended, tokens, call->out, call->hidden, call->scratch);
    barrier(worker);
    norm_phase(worker, call, call->out, layer->mlp_norm);
    barrier(worker);
    linear_phase(worker, &layer->gate_up, call->normed, tokens, call->gated, 0, call->scratch);
    barrier(worker);
    linear_phase(worker, &layer->down, call->gated, tokens, call->out, call->out, call->scratch);
}

#endif
