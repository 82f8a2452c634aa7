// A decoder's layers from the first to the last in one call: with small batches, going back to Python between the operations
// costs a tenth of the step.
#include <algorithm>
#include <vector>

#include "kernels.h"

namespace segue {
namespace {

// These three are filled by layers.py, field by field: every field is eight bytes.
struct Matrix {
    const uint32_t* lanes;
    const float *scales, *bias;
    int64_t storage, n, k;

    void multiply(const float* x, float* out, int64_t rows, int threads) const {
        segue_linear(x, lanes, scales, int32_t(storage), bias, out, rows, k, n, threads);
    }
    void multiply_gated(const float* x, float* out, int64_t rows, int threads) const {
        segue_gated(x, lanes, scales, int32_t(storage), out, rows, k, n, threads);
    }
};

struct Layer {
    Matrix qkv, o, gate_up, down;
    const float *q_norm, *k_norm;
    const float *post_norm, *next_norm;  // after attention, and before the next layer
    void *k_cache, *v_cache;
    int64_t window;
};

struct Step {
    const float *cos, *sin;
    const int32_t* positions;
    const int64_t* slots;
    const int32_t* tables;
    const int32_t *starts, *lengths;
    const int64_t* sampled;  // rows, in increasing order
    Tails tails;
    float *residual, *normed, *qkv, *attended, *hidden, *gated;
    int64_t rows, sequences, num_sampled, table_stride;
    int64_t heads, kv_heads, dim, block_size, half_cache, threads;
    double eps, scale;
};

// Rows that nobody samples from are left out. In place: a row never moves back behind one that is still to move.
void gather(float* rows, const int64_t* wanted, int64_t count, int64_t size) {
    for (int64_t i = 0; i < count; ++i)
        if (wanted[i] != i) std::copy_n(rows + wanted[i] * size, size, rows + i * size);
}

// The rows that are sampled from, each as a sequence of its own: what a row attends to is in its table and its length. A
// search's beams stay together, all of them are sampled from.
struct SampledRows {
    std::vector<int32_t> tables, starts, lengths, shared, tail_starts;

    explicit SampledRows(const Step& s) {
        int64_t sequence = 0;
        for (int64_t i = 0; i < s.num_sampled;) {
            const int64_t row = s.sampled[i];
            while (s.starts[sequence + 1] <= row) ++sequence;
            const int32_t* table = s.tables + sequence * s.table_stride;
            const bool are_beams = s.tails.shared_of(sequence) >= 0;
            tables.insert(tables.end(), table, table + s.table_stride);
            starts.push_back(int32_t(i));
            lengths.push_back(s.positions[row] + 1);
            shared.push_back(int32_t(s.tails.shared_of(sequence)));
            tail_starts.push_back(are_beams ? s.tails.starts[sequence] : 0);
            i += are_beams ? s.starts[sequence + 1] - s.starts[sequence] : 1;
        }
        starts.push_back(int32_t(s.num_sampled));
    }
};

void attend(const Layer& l, const Step& s) {
    segue_attention(s.qkv, l.k_cache, l.v_cache, int32_t(s.half_cache), s.tables, s.table_stride, s.starts, s.lengths,
                    &s.tails, s.sequences, s.heads, s.kv_heads, s.dim, s.block_size, float(s.scale), l.window, s.attended,
                    int(s.threads));
}

// What rows become that nobody samples from is read by nobody after their last KV: attention is over the others alone.
void attend_sampled(const Layer& l, Step s) {
    const SampledRows rows(s);
    gather(s.qkv, s.sampled, s.num_sampled, l.qkv.n);
    gather(s.residual, s.sampled, s.num_sampled, l.o.n);
    s.tables = rows.tables.data(), s.starts = rows.starts.data(), s.lengths = rows.lengths.data();
    s.tails.shared = rows.shared.data(), s.tails.starts = rows.tail_starts.data();
    s.sequences = int64_t(rows.lengths.size());
    attend(l, s);
}

// `normed` holds the input and, afterwards, the output of the rows that are left.
void run_layer(const Layer& l, const Step& s, bool is_last) {
    const int threads = int(s.threads);
    const float eps = float(s.eps);
    const int64_t size = l.o.n, rows = is_last ? s.num_sampled : s.rows;
    l.qkv.multiply(s.normed, s.qkv, s.rows, threads);
    segue_rope_store(s.qkv, s.cos, s.sin, s.positions, s.slots, l.k_cache, l.v_cache, int32_t(s.half_cache), l.q_norm,
                     l.k_norm, eps, s.rows, s.heads, s.kv_heads, s.dim, s.block_size, threads);
    if (rows == 0) return;
    if (rows < s.rows)
        attend_sampled(l, s);
    else
        attend(l, s);
    l.o.multiply(s.attended, s.hidden, rows, threads);
    segue_add_rms_norm(s.residual, s.hidden, l.post_norm, eps, s.normed, rows, size, threads);
    l.gate_up.multiply_gated(s.normed, s.gated, rows, threads);
    l.down.multiply(s.gated, s.hidden, rows, threads);
    segue_add_rms_norm(s.residual, s.hidden, l.next_norm, eps, s.normed, rows, size, threads);
}

}  // namespace
}  // namespace segue

SEGUE_API void segue_layers(const void* layers, int64_t count, const void* step) {
    const auto* all = static_cast<const segue::Layer*>(layers);
    for (int64_t i = 0; i < count; ++i) segue::run_layer(all[i], *static_cast<const segue::Step*>(step), i == count - 1);
}
