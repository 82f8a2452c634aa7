// What the kernels offer to each other and to Python.
#pragma once

#include "simd.h"

namespace segue {

// Where the keys lie that beams do not share. For sequence s that is one search's beams: each row sees the first shared[s]
// keys of the table, and behind them its own, in slots[starts[s] + row * own …]. shared[s] is -1 for others.
struct Tails {
    const int32_t *slots = nullptr, *shared = nullptr, *starts = nullptr;

    int64_t shared_of(int64_t s) const { return shared ? shared[s] : -1; }
    const int32_t* of(int64_t s) const { return slots + starts[s]; }
};

}  // namespace segue

SEGUE_API void segue_linear(const float* x, const uint32_t* lanes, const float* scales, int32_t storage,
                            const float* bias, float* out, int64_t m, int64_t k, int64_t n, int32_t threads);

SEGUE_API void segue_gated(const float* x, const uint32_t* lanes, const float* scales, int32_t storage, float* out,
                           int64_t m, int64_t k, int64_t n, int32_t threads);

SEGUE_API void segue_add_rms_norm(float* residual, const float* x, const float* weight, float eps, float* out,
                                  int64_t rows, int64_t size, int32_t threads);

SEGUE_API void segue_rope_store(float* qkv, const float* cos, const float* sin, const int32_t* positions,
                                const int64_t* slots, void* k_cache, void* v_cache, int32_t half_cache,
                                const float* q_norm, const float* k_norm, float eps, int64_t rows, int64_t heads,
                                int64_t kv_heads, int64_t dim, int64_t block_size, int32_t threads);

SEGUE_API void segue_attention(const float* qkv, const void* k_cache, const void* v_cache, int32_t half_cache,
                               const int32_t* tables, int64_t table_stride, const int32_t* starts,
                               const int32_t* lengths, const segue::Tails* tails, int64_t sequences, int64_t heads,
                               int64_t kv_heads, int64_t dim, int64_t block_size, float scale, int64_t window,
                               float* out, int32_t threads);
