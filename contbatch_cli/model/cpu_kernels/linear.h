/* A linear layer by the way that its weights and the processor ask for. */
#ifndef CONTBATCH_LINEAR_H
#define CONTBATCH_LINEAR_H

/* Bytes of working memory that a linear needs for `rows` rows. */
static size_t linear_scratch(const Linear *linear, int rows) {
    Quantised quantised;
    if (linear->format == INT8) return lay_out_quantised(rows, linear->k, 0, &quantised);
#if HAS_AMX
    Parts parts;
    if (amx_is_on) return lay_out_parts(rows, linear->k, 0, &parts);
#endif
    return 0;
}

/* The phases of a linear: out [M, N] = x times its weight; `residual` [M, N] is read by ADD, and may be `out`. All results are there
 * after the next barrier; `scratch` holds `linear_scratch` bytes that no one else uses until then. */
static void linear_phase(Worker *worker, const Linear *linear, const float *x, int m_size, float *out, const float *residual,
                         char *scratch) {
    if (linear->format == INT8) {
        Quantised quantised;
        lay_out_quantised(m_size, linear->k, scratch, &quantised);
        quantise_phase(worker, x, m_size, linear->k, &quantised);
        barrier(worker);
        int8_phase(worker, linear, &quantised, m_size, out, residual);
        return;
    }
#if HAS_AMX
    if (amx_is_on) {
        Parts parts;
        lay_out_parts(m_size, linear->k, scratch, &parts);
        split_phase(worker, x, m_size, linear->k, &parts);
        barrier(worker);
        parts_phase(worker, linear, &parts, m_size, out, residual);
        return;
    }
#endif
    float_phase(worker, linear, x, m_size, out, residual);
}

#endif
