// What happens to one row at a time between the products: norms, rotation and the KV write.
#include <algorithm>
#include <cmath>

#include "kernels.h"

namespace segue {
namespace {

// Below this many values in a call, waking a second thread costs more than it saves.
constexpr int64_t kWorthThreads = 32768;

template <class Body>
void for_rows(int64_t rows, int64_t values_per_row, int threads, const Body& body) {
    const int64_t chunk = std::max<int64_t>(1, kWorthThreads / 4 / std::max<int64_t>(1, values_per_row));
    const bool alone = rows * values_per_row < kWorthThreads;
    parallel_for((rows + chunk - 1) / chunk, alone ? 1 : threads, [&](int64_t i) {
        for (int64_t row = i * chunk; row < std::min(rows, (i + 1) * chunk); ++row) body(row);
    });
}

// The lanes' order is fixed by the row's length alone.
__attribute__((noinline)) void norm_row(const float* x, const float* weight, float eps, float* out, int64_t size) {
    Vec sums[4] = {};
    int64_t i = 0;
    for (; i + 4 * kWidth <= size; i += 4 * kWidth)
        for (int j = 0; j < 4; ++j) {
            const Vec v = load<Vec>(x + i + j * kWidth);
            sums[j] += v * v;
        }
    float sum = sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; i < size; ++i) sum += x[i] * x[i];
    const float inverse = 1.0f / std::sqrt(sum / float(size) + eps);
    for (int64_t j = 0; j < size; ++j) out[j] = x[j] * inverse * weight[j];
}

// In whole vectors by hand: a compiler cannot know that a head's two halves are apart.
void rotate(float* head, const float* cos, const float* sin, int64_t half) {
    int64_t i = 0;
    for (; i + kWidth <= half; i += kWidth) {
        const Vec a = load<Vec>(head + i), b = load<Vec>(head + half + i);
        const Vec c = load<Vec>(cos + i), s = load<Vec>(sin + i);
        store(head + i, a * c - b * s);
        store(head + half + i, b * c + a * s);
    }
    for (; i < half; ++i) {
        const float a = head[i], b = head[half + i];
        head[i] = a * cos[i] - b * sin[i];
        head[half + i] = b * cos[i] + a * sin[i];
    }
}

void write_kv(const float* from, float* to, int64_t size) { std::copy_n(from, size, to); }

void write_kv(const float* from, uint16_t* to, int64_t size) {
    for (int64_t i = 0; i < size; ++i) to[i] = to_bf16(from[i]);
}

struct Rope {
    float* qkv;
    const float *cos, *sin;
    const int32_t* positions;
    const int64_t* slots;
    const float *q_norm, *k_norm;
    float eps;
    int64_t heads, kv_heads, dim, block_size;

    template <class T>
    void run_row(int64_t row, T* k_cache, T* v_cache) const {
        float* base = qkv + row * (heads + 2 * kv_heads) * dim;
        const int64_t half = dim / 2, position = positions[row];
        for (int64_t h = 0; h < heads + kv_heads; ++h) {
            const float* norm = h < heads ? q_norm : k_norm;
            if (norm) norm_row(base + h * dim, norm, eps, base + h * dim, dim);
            rotate(base + h * dim, cos + position * half, sin + position * half, half);
        }
        const int64_t block = slots[row] / block_size, offset = slots[row] % block_size;
        for (int64_t h = 0; h < kv_heads; ++h) {
            const int64_t at = ((block * kv_heads + h) * block_size + offset) * dim;
            write_kv(base + (heads + h) * dim, k_cache + at, dim);
            write_kv(base + (heads + kv_heads + h) * dim, v_cache + at, dim);
        }
    }
};

}  // namespace
}  // namespace segue

using namespace segue;

SEGUE_API void segue_rms_norm(const float* x, const float* weight, float eps, float* out, int64_t rows, int64_t size,
                              int32_t threads) {
    for_rows(rows, size, threads, [&](int64_t i) { norm_row(x + i * size, weight, eps, out + i * size, size); });
}

SEGUE_API void segue_add_rms_norm(float* residual, const float* x, const float* weight, float eps, float* out,
                                  int64_t rows, int64_t size, int32_t threads) {
    for_rows(rows, size, threads, [&](int64_t i) {
        float* sum = residual + i * size;
        for (int64_t j = 0; j < size; ++j) sum[j] += x[i * size + j];
        norm_row(sum, weight, eps, out + i * size, size);
    });
}

SEGUE_API void segue_rope_store(float* qkv, const float* cos, const float* sin, const int32_t* positions,
                                const int64_t* slots, void* k_cache, void* v_cache, int32_t half_cache,
                                const float* q_norm, const float* k_norm, float eps, int64_t rows, int64_t heads,
                                int64_t kv_heads, int64_t dim, int64_t block_size, int32_t threads) {
    const Rope rope{qkv, cos, sin, positions, slots, q_norm, k_norm, eps, heads, kv_heads, dim, block_size};
    for_rows(rows, (heads + 2 * kv_heads) * dim, threads, [&](int64_t i) {
        if (half_cache)
            rope.run_row(i, static_cast<uint16_t*>(k_cache), static_cast<uint16_t*>(v_cache));
        else
            rope.run_row(i, static_cast<float*>(k_cache), static_cast<float*>(v_cache));
    });
}
