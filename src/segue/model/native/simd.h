// Vectors through the compilers' portable extension, so that one source serves AVX2, AVX-512 and NEON, and the few
// numeric pieces that every kernel shares. Nothing here depends on how many rows a call has.
#pragma once

#include <omp.h>

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <utility>

#define SEGUE_API extern "C" __attribute__((visibility("default")))

namespace segue {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

typedef float Vec __attribute__((vector_size(kWidth * 4)));
typedef int32_t IVec __attribute__((vector_size(kWidth * 4)));
typedef uint32_t UVec __attribute__((vector_size(kWidth * 4)));

template <class V, class T>
inline V load(const T* p) {
    V v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}

template <class V, class T>
inline void store(T* p, V v) {
    __builtin_memcpy(p, &v, sizeof v);
}

inline Vec splat(float x) { return x - Vec{}; }  // minus, not plus: it folds away, and keeps -0

// Lanes are folded in halves, always in the same order.
inline float sum_lanes(Vec v) {
    float lane[kWidth];
    store(lane, v);
    for (int half = kWidth / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
    return lane[0];
}

inline float max_lanes(Vec v) {
    float best = v[0];
    for (int i = 1; i < kWidth; ++i) best = v[i] > best ? v[i] : best;
    return best;
}

// 2^f for f in [-1/2, 1/2], to about one unit in the last place: a minimax fit with the constant held at 1.
inline Vec exp2_fraction(Vec f) {
    Vec p = splat(1.535336189e-04f);
    p = p * f + 1.339887442e-03f;
    p = p * f + 9.618437358e-03f;
    p = p * f + 5.550332471e-02f;
    p = p * f + 2.402264791e-01f;
    p = p * f + 6.931472029e-01f;
    return p * f + 1.0f;
}

constexpr float kRounder = 12582912.0f;  // after adding it, the mantissa's low bits hold round(x)

// 2^x; 0 below 2^-126 (so -inf gives exactly 0), NaN stays NaN, and the result saturates near 2^128.
inline Vec exp2_vec(Vec x) {
    const Vec low = splat(-126.0f), high = splat(127.9999f), rounder = splat(kRounder);
    const auto underflow = x < low;
    x = underflow ? low : x;
    x = x > high ? high : x;
    const Vec shifted = x + rounder;
    const Vec p = exp2_fraction(x - (shifted - rounder));
    // Two half steps, because round(x) can be 128, one more than a float's exponent can hold.
    const IVec n = (IVec)shifted - (IVec)rounder;
    const IVec first = n >> 1;
    const Vec scaled = p * (Vec)((first + 127) << 23) * (Vec)((n - first + 127) << 23);
    return underflow ? Vec{} : scaled;
}

// The same for x <= 0, which softmax needs for every score: a third less work. 0 below 2^-126.5.
inline Vec exp2_down(Vec x) {
    const Vec low = splat(-127.0f), rounder = splat(kRounder);  // at -127 the exponent's bits are all zeros: a factor of 0
    x = low > x ? low : x;
    const Vec shifted = x + rounder;
    const Vec p = exp2_fraction(x - (shifted - rounder));
    const IVec exponent = ((IVec)shifted << 23) + 0x3f800000;  // the rounder's own low bits are zeros
    return p * (Vec)exponent;
}

inline float exp2_one(float x) { return exp2_vec(splat(x))[0]; }

inline Vec silu_mul_vec(Vec gate, Vec up) {
    return gate / (1.0f + exp2_vec(gate * -1.4426950408889634f)) * up;
}

// silu(gate) * up, value by value.
inline void silu_mul(const float* gate, const float* up, float* out, int64_t size) {
    int64_t i = 0;
    for (; i + kWidth <= size; i += kWidth)
        store(out + i, silu_mul_vec(load<Vec>(gate + i), load<Vec>(up + i)));
    for (; i < size; ++i) out[i] = silu_mul_vec(splat(gate[i]), splat(up[i]))[0];
}

inline float from_bf16(uint16_t h) {
    const uint32_t bits = uint32_t(h) << 16;
    float f;
    __builtin_memcpy(&f, &bits, 4);
    return f;
}

// Round to nearest, ties to even; a NaN keeps its sign and stays a NaN.
inline uint16_t to_bf16(float f) {
    uint32_t bits;
    __builtin_memcpy(&bits, &f, 4);
    if (f != f) return uint16_t(bits >> 16) | 0x40;
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Below so many multiply-adds a call runs in one thread: tens of microseconds of work are done before a thread that has
// fallen asleep is there, which can take milliseconds on a virtual machine.
constexpr int64_t kWorthWaking = 1 << 20;

// Indices are handed out one by one, so a preempted thread does not hold the others up. One thread, or one index,
// runs in place: waking the pool costs more than small work.
template <class Body>
void parallel_for(int64_t count, int threads, const Body& body) {
    if (threads <= 1 || count <= 1) {
        for (int64_t i = 0; i < count; ++i) body(i);
        return;
    }
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t i = 0; i < count; ++i) body(i);
}

// Working memory that a thread keeps between calls. Grows, never shrinks; cache-line aligned.
class Scratch {
  public:
    float* reserve(int64_t floats) {
        if (floats > size_) {
            memory_.reset(static_cast<float*>(std::aligned_alloc(64, (floats * 4 + 63) / 64 * 64)));
            if (!memory_) std::abort();
            size_ = floats;
        }
        return memory_.get();
    }

  private:
    struct Free {
        void operator()(float* p) const { std::free(p); }
    };
    std::unique_ptr<float, Free> memory_;
    int64_t size_ = 0;
};

}  // namespace segue
