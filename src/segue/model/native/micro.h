// The one multiply-add loop of this folder: a tile of up to kMaxRows rows by kPanel columns held in registers.
//
// Every element of the tile is a single chain of fused multiply-adds over k in increasing order. The chain is read
// from memory and written back to it, so cutting k into blocks, or rows and columns into tiles, never changes a bit of
// the result. This is what makes a row independent of the batch it is computed in.
#pragma once

#include "simd.h"

namespace segue {

constexpr int kVectors = kWidth == 4 ? 4 : 2;      // vectors across a panel
constexpr int kPanel = kVectors * kWidth;          // columns of a panel
constexpr int kMaxRows = kWidth == 16 ? 12 : 6;    // rows of a tile; fills the register file
constexpr int64_t kGroup = 32;                     // k values that share one int8 scale

// A panel of weights as the loop sees it. `Raw` holds kStep consecutive k for kWidth columns, and `expand` takes one
// of them out; the two narrow formats interleave k inside 32-bit lanes, so that expanding is a shift or a mask. Tiles
// for up to kInPlaceRows rows expand the panel for themselves, on execution ports that the multiply-adds leave free;
// for more rows it is expanded into memory beforehand.
struct FloatPanel {
    static constexpr int kStep = 1;
    static constexpr int64_t kInPlaceRows = INT64_MAX;
    typedef Vec Raw;
    struct Scale {};
    const float* data;
    const float* scales;

    Scale scale(int64_t, int) const { return {}; }
    Raw raw(int64_t step, int v) const { return load<Vec>(data + step * kPanel + v * kWidth); }
    static Vec expand(Raw raw, int, Scale) { return raw; }
};

struct HalfPanel {
    static constexpr int kStep = 2;
    static constexpr int64_t kInPlaceRows = 8;
    typedef UVec Raw;
    struct Scale {};
    const uint32_t* data;
    const float* scales;

    Scale scale(int64_t, int) const { return {}; }
    Raw raw(int64_t step, int v) const { return load<UVec>(data + step * kPanel + v * kWidth); }
    static Vec expand(Raw raw, int i, Scale) { return i == 0 ? (Vec)(raw << 16) : (Vec)(raw & 0xffff0000u); }
};

// A code is converted while it sits in the top byte of its lane, as code * 2^24; the stored scales carry the 2^-24.
struct CodePanel {
    static constexpr int kStep = 4;
    static constexpr int64_t kInPlaceRows = 4;
    typedef UVec Raw;
    typedef Vec Scale;
    const uint32_t* data;
    const float* scales;

    Scale scale(int64_t k, int v) const { return load<Vec>(scales + k / kGroup * kPanel + v * kWidth); }
    Raw raw(int64_t step, int v) const { return load<UVec>(data + step * kPanel + v * kWidth); }
    static Vec expand(Raw raw, int i, Scale scale) {
        const UVec top = i == 3 ? raw & 0xff000000u : i == 0 ? raw << 24 : (raw << (24 - 8 * i)) & 0xff000000u;
        return __builtin_convertvector((IVec)top, Vec) * scale;
    }
};

// Keeps a value in its register; compilers otherwise load a panel's vector again for every row.
inline void pin(Vec& v) {
#if defined(__x86_64__)
    asm("" : "+x"(v));
#elif defined(__aarch64__)
    asm("" : "+w"(v));
#else
    (void)v;
#endif
}

template <int kRows, class Panel>
inline void multiply_step(Vec (&acc)[kRows][kVectors], const float* x, int64_t ldx,
                          const typename Panel::Raw (&raw)[kVectors], int i,
                          const typename Panel::Scale (&scale)[kVectors]) {
    Vec w[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
        w[v] = Panel::expand(raw[v], i, scale[v]);
        if (kRows > 1) pin(w[v]);
    }
#pragma GCC unroll 12
    for (int m = 0; m < kRows; ++m) {
        const Vec a = splat(x[m * ldx]);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) acc[m][v] += a * w[v];
    }
}

// Memory to fetch while multiplying, spread evenly over the work; it may lie past the end of an allocation.
struct Ahead {
    const char* at = nullptr;
    int64_t bytes = 0;
};

// What sums start from, one row of a panel's width for each row of the tile: themselves, or the same for all.
struct Start {
    const float* at;
    int64_t stride;
};

inline Start from_zero() {
    alignas(64) static const float zeros[kPanel] = {};
    return {zeros, 0};
}

// c[m][:] = start[m][:] + sum over k in [k0, k1) of x[m][k] * panel[k][:]; k0 is a multiple of the panel's step. `stride`
// is how far `next` moves for each of them.
template <int kRows, class Panel>
__attribute__((noinline)) void multiply_tile(const float* x, int64_t ldx, Panel panel, int64_t k0, int64_t k1,
                                             Start start, float* c, int64_t ldc, const char* next, int64_t stride) {
    Vec acc[kRows][kVectors];
#pragma GCC unroll 12
    for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) acc[m][v] = load<Vec>(start.at + m * start.stride + v * kWidth);

    constexpr int kStep = Panel::kStep;
    for (int64_t k = k0; k < k1;) {
        typename Panel::Scale scale[kVectors];
        for (int v = 0; v < kVectors; ++v) scale[v] = panel.scale(k, v);
        int64_t end = k1;
        if (kStep == 4 && (k / kGroup + 1) * kGroup < k1) end = (k / kGroup + 1) * kGroup;
        for (; k + kStep <= end; k += kStep, next += stride) {
            __builtin_prefetch(next);
            typename Panel::Raw raw[kVectors];
            for (int v = 0; v < kVectors; ++v) raw[v] = panel.raw(k / kStep, v);
#pragma GCC unroll 4
            for (int i = 0; i < kStep; ++i) multiply_step<kRows, Panel>(acc, x + k + i, ldx, raw, i, scale);
        }
        if (kStep > 1 && k < end) {
            typename Panel::Raw raw[kVectors];
            for (int v = 0; v < kVectors; ++v) raw[v] = panel.raw(k / kStep, v);
            for (int i = 0; k < end; ++i, ++k) multiply_step<kRows, Panel>(acc, x + k, ldx, raw, i, scale);
        }
    }

#pragma GCC unroll 12
    for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) store(c + m * ldc + v * kWidth, acc[m][v]);
}

template <class Panel>
using TileFn = void (*)(const float*, int64_t, Panel, int64_t, int64_t, Start, float*, int64_t, const char*, int64_t);

template <class Panel, class Heights>
struct TileTable;

template <class Panel, int... kRows>
struct TileTable<Panel, std::integer_sequence<int, kRows...>> {
    static constexpr TileFn<Panel> at[] = {multiply_tile<kRows + 1, Panel>...};
};

// Any number of rows, in tiles of nearly equal height.
template <class Panel>
inline void multiply_rows(int64_t rows, const float* x, int64_t ldx, Panel panel, int64_t k0, int64_t k1, Start start,
                          float* c, int64_t ldc, Ahead ahead = {}) {
    typedef TileTable<Panel, std::make_integer_sequence<int, kMaxRows>> Tiles;
    const int64_t tiles = (rows + kMaxRows - 1) / kMaxRows;
    const int64_t steps = (k1 - k0 + Panel::kStep - 1) / Panel::kStep;
    const int64_t stride = (ahead.bytes + tiles * steps - 1) / (tiles * steps);
    for (int64_t t = 0, row = 0; t < tiles; ++t) {
        const int height = int((rows - row + tiles - t - 1) / (tiles - t));
        const Start here{start.at + row * start.stride, start.stride};
        Tiles::at[height - 1](x + row * ldx, ldx, panel, k0, k1, here, c + row * ldc, ldc, ahead.at, stride);
        ahead.at += steps * stride;
        row += height;
    }
}

}  // namespace segue
