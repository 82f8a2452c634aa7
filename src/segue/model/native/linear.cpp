// Packing weight matrices into panels, reading rows back, and y = x W^T + b.
//
// Packed layout: columns of the product (rows of W) are cut into panels of kPanel; a panel holds all k for its
// columns, contiguous, as 32-bit lanes [k / step][column], step = 1, 2 or 4 values of k in a lane (fp32, bf16, int8).
// int8 keeps one fp32 scale for each column and group of kGroup k: scales[panel][k / kGroup][column].
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <cmath>

#include "kernels.h"
#include "micro.h"

namespace segue {
namespace {

enum Storage : int32_t { kFloat = 0, kHalf = 1, kCode = 2 };

constexpr int step_of(int storage) { return storage == kFloat ? 1 : storage == kHalf ? 2 : 4; }
int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t lanes_per_panel(int64_t k, int storage) { return ceil_div(k, step_of(storage)) * kPanel; }
int64_t scales_per_panel(int64_t k) { return ceil_div(k, kGroup) * kPanel; }

constexpr float kCodeUnit = 1.0f / 16777216.0f;  // codes are expanded as code * 2^24

void pack_codes(const float* row, int64_t k, uint32_t* lanes, float* scales) {
    for (int64_t k0 = 0; k0 < k; k0 += kGroup) {
        const int64_t k1 = std::min(k, k0 + kGroup);
        float peak = 0;
        for (int64_t i = k0; i < k1; ++i) peak = std::max(peak, std::fabs(row[i]));
        const float scale = peak / 127.0f;
        scales[k0 / kGroup * kPanel] = scale * kCodeUnit;
        for (int64_t i = k0; i < k1; ++i) {
            const int code = scale > 0 ? int(std::lrintf(row[i] / scale)) : 0;
            lanes[i / 4 * kPanel] |= uint32_t(uint8_t(std::clamp(code, -127, 127))) << (8 * (i % 4));
        }
    }
}

void pack_row(const float* row, int64_t k, int storage, uint32_t* lanes, float* scales) {
    if (storage == kFloat) {
        for (int64_t i = 0; i < k; ++i) __builtin_memcpy(lanes + i * kPanel, row + i, 4);
    } else if (storage == kHalf) {
        for (int64_t i = 0; i < k; ++i) lanes[i / 2 * kPanel] |= uint32_t(to_bf16(row[i])) << (16 * (i % 2));
    } else {
        pack_codes(row, k, lanes, scales);
    }
}

float unpack_one(const uint32_t* lanes, const float* scales, int64_t i, int storage) {
    const uint32_t lane = lanes[i / step_of(storage) * kPanel];
    if (storage == kCode) return float(int32_t(lane << (24 - 8 * (i % 4))) & ~0xffffff) * scales[i / kGroup * kPanel];
    const uint32_t bits = storage == kFloat ? lane : i % 2 ? lane & 0xffff0000u : lane << 16;
    float value;
    __builtin_memcpy(&value, &bits, 4);
    return value;
}

struct Product {
    const float* x;
    const uint32_t* lanes;
    const float* scales;
    const float* bias;
    float* out;
    int64_t m, k, n;
};

// How a product is cut. A panel's k_block (fp32) stays near the first-level cache while row_block rows pass over it,
// and those rows' x, row_block * k_block, stays in the second while panels_at_once panels pass over it. With few rows,
// blocks are shorter and panels come one by one: what counts is to read the weights in order.
struct Blocking {
    int64_t k_block, row_block, panels_at_once;
};

template <class Panel>
Panel panel_at(const Product& p, int64_t index) {
    const int64_t lanes = ceil_div(p.k, Panel::kStep) * kPanel;
    const float* scales = p.scales ? p.scales + index * scales_per_panel(p.k) : nullptr;
    typedef decltype(Panel::data) Data;
    return Panel{reinterpret_cast<Data>(p.lanes + index * lanes), scales};
}

// Writes whole steps, so up to three rows past k1.
template <class Panel>
void expand_block(Panel panel, int64_t k0, int64_t k1, float* out) {
    constexpr int kStep = Panel::kStep;
    for (int64_t k = k0; k < k1; k += kStep)
        for (int v = 0; v < kVectors; ++v) {
            const auto raw = panel.raw(k / kStep, v);
            const auto scale = panel.scale(k, v);
#pragma GCC unroll 4
            for (int i = 0; i < kStep; ++i)
                store(out + (k - k0 + i) * kPanel + v * kWidth, Panel::expand(raw, i, scale));
        }
}

// The panel's memory for [k0, k1), `distance` bytes further on: panels follow each other, so it may be in the next.
template <class Panel>
Ahead memory_ahead(Panel panel, int64_t k0, int64_t k1, int64_t distance) {
    constexpr int64_t kLine = kPanel * sizeof(float);
    const char* data = reinterpret_cast<const char*>(panel.data);
    return {data + k0 / Panel::kStep * kLine + distance, (k1 - k0) / Panel::kStep * kLine};
}

// A single tile runs over the weights once and fetches a little ahead of itself. Several tiles use a block in turn,
// and meanwhile fetch the following block between them: so computing and reading memory overlap.
constexpr int64_t kNearBytes = 1024;

// Rows [row0, row1) of one panel's columns, over [k0, k1). Whether a narrow panel is expanded
// in place or beforehand, the numbers are the same.
template <class Panel>
void multiply_block(const Product& p, Panel panel, int64_t row0, int64_t row1, int64_t k0, int64_t k1, Start start,
                    float* c, int64_t ldc) {
    const float* x = p.x + row0 * p.k;
    const bool one_tile = row1 - row0 <= std::min<int64_t>(kMaxRows, Panel::kInPlaceRows);
    const Ahead ahead = one_tile ? memory_ahead(panel, k0, k1, kNearBytes) : memory_ahead(panel, k1, 2 * k1 - k0, 0);
    if (row1 - row0 <= Panel::kInPlaceRows) {
        multiply_rows(row1 - row0, x, p.k, panel, k0, k1, start, c, ldc, ahead);
        return;
    }
    static thread_local Scratch scratch;
    float* wide = scratch.reserve((k1 - k0 + 3) * kPanel);
    expand_block(panel, k0, k1, wide);
    multiply_rows(row1 - row0, x + k0, p.k, FloatPanel{wide, nullptr}, 0, k1 - k0, start, c, ldc, ahead);
}

// The last panel may be wider than the output, so its tile is worked on beside it.
template <class Panel>
void multiply_edge(const Product& p, Panel panel, int64_t row0, int64_t row1, int64_t k0, int64_t k1, int64_t column) {
    static thread_local Scratch scratch;
    float* tile = scratch.reserve((row1 - row0) * kPanel);
    const int64_t columns = p.n - column;
    for (int64_t row = row0; row < row1; ++row)
        for (int64_t i = 0; i < kPanel; ++i) {
            const float* from = k0 > 0 ? p.out + row * p.n : p.bias;
            tile[(row - row0) * kPanel + i] = from && i < columns ? from[column + i] : 0.0f;
        }
    multiply_block(p, panel, row0, row1, k0, k1, Start{tile, kPanel}, tile, kPanel);
    for (int64_t row = row0; row < row1; ++row)
        std::copy_n(tile + (row - row0) * kPanel, columns, p.out + row * p.n + column);
}

template <class Panel>
void multiply_panels(const Product& p, int64_t row0, int64_t row1, int64_t panel0, int64_t panel1, int64_t k_block) {
    for (int64_t k0 = 0; k0 < p.k; k0 += k_block) {
        const int64_t k1 = std::min(p.k, k0 + k_block);
        for (int64_t i = panel0; i < panel1; ++i) {
            const int64_t column = i * kPanel;
            const Panel panel = panel_at<Panel>(p, i);
            if (column + kPanel > p.n) {
                multiply_edge(p, panel, row0, row1, k0, k1, column);
                continue;
            }
            float* c = p.out + row0 * p.n + column;
            const Start start = k0 > 0 ? Start{c, p.n} : p.bias ? Start{p.bias + column, 0} : from_zero();
            multiply_block(p, panel, row0, row1, k0, k1, start, c, p.n);
        }
    }
}

Blocking blocking_for(const Product& p, int64_t in_place_rows) {
    if (p.m <= std::min<int64_t>(kMaxRows, in_place_rows)) return {p.k, p.m, 1};
    const int64_t k_blocks = ceil_div(p.k, p.m <= 64 ? 320 : 768);
    const int64_t k_block = ceil_div(ceil_div(p.k, k_blocks), kGroup) * kGroup;
    const int64_t row_blocks = ceil_div(p.m, 96);
    return {k_block, ceil_div(p.m, row_blocks), p.m <= 64 ? 1 : 8};
}

// Panels come in pairs, gate and up for the same columns; what they give stays in the cache until it is combined.
template <class Panel>
void multiply_pairs(const Product& p, int64_t row0, int64_t row1, int64_t panel0, int64_t panel1, int64_t k_block) {
    static thread_local Scratch scratch;
    const int64_t rows = row1 - row0, tile = rows * kPanel;
    float* tiles = scratch.reserve((panel1 - panel0) * tile);
    for (int64_t k0 = 0; k0 < p.k; k0 += k_block)
        for (int64_t i = panel0; i < panel1; ++i) {
            float* c = tiles + (i - panel0) * tile;
            multiply_block(p, panel_at<Panel>(p, i), row0, row1, k0, std::min(p.k, k0 + k_block),
                           k0 > 0 ? Start{c, kPanel} : from_zero(), c, kPanel);
        }
    for (int64_t i = panel0; i < panel1; i += 2) {
        const float *gate = tiles + (i - panel0) * tile, *up = gate + tile;
        const int64_t column = i / 2 * kPanel, width = std::min<int64_t>(kPanel, p.n - column);
        for (int64_t row = 0; row < rows; ++row)
            silu_mul(gate + row * kPanel, up + row * kPanel, p.out + (row0 + row) * p.n + column, width);
    }
}

// Work is cut into (rows, run of panels), `unit` panels never apart. Few rows: long runs, each read from memory once, in order.
template <class Panel, class Work>
void run(const Product& p, int64_t panels, int64_t unit, int threads, const Work& work) {
    const Blocking b = blocking_for(p, Panel::kInPlaceRows);
    const int64_t at_once = std::max(b.panels_at_once, unit), row_blocks = ceil_div(p.m, b.row_block);
    const int64_t run = row_blocks > 1 ? at_once : ceil_div(ceil_div(panels, threads * 4), unit) * unit;
    const int64_t runs = ceil_div(panels, run);
    // A weight of half a megabyte is worth two readers even if each value is used once.
    const int64_t weights = panels * kPanel * p.k;
    const bool alone = weights < kWorthWaking / 8 && p.m * weights < kWorthWaking;
    parallel_for(row_blocks * runs, alone ? 1 : threads, [&](int64_t task) {
        const int64_t row0 = task / runs * b.row_block, row1 = std::min(p.m, row0 + b.row_block);
        const int64_t first = task % runs * run, last = std::min(panels, first + run);
        for (int64_t i = first; i < last; i += at_once)
            work(p, row0, row1, i, std::min(last, i + at_once), b.k_block);
    });
}

template <class Panel>
void linear(const Product& p, int threads) {
    run<Panel>(p, ceil_div(p.n, kPanel), 1, threads, multiply_panels<Panel>);
}

template <class Panel>
void gated(const Product& p, int threads) {
    run<Panel>(p, 2 * ceil_div(p.n, kPanel), 2, threads, multiply_pairs<Panel>);
}

}  // namespace
}  // namespace segue

using namespace segue;

// Zeroes memory that weights will be packed into, on huge pages where the system has them: a tenth faster to stream.
SEGUE_API void segue_clear(char* memory, int64_t bytes) {
#if defined(__linux__)
    const uintptr_t page = 4096, first = (uintptr_t(memory) + page - 1) / page * page;
    if (bytes > 2 * int64_t(page)) madvise(reinterpret_cast<void*>(first), bytes - page, MADV_HUGEPAGE);
#endif
    std::fill_n(memory, bytes, char(0));
}

SEGUE_API int32_t segue_panel_width() { return kPanel; }
SEGUE_API int32_t segue_group_size() { return kGroup; }

// Rows [first, first + count) of W; `lanes` must be zero where they go. `first` is a multiple of the panel width.
SEGUE_API void segue_pack(const float* rows, int64_t count, int64_t k, int64_t first, int32_t storage, uint32_t* lanes,
                          float* scales, int32_t threads) {
    parallel_for(ceil_div(count, kPanel), threads, [&](int64_t i) {
        const int64_t panel = first / kPanel + i;
        for (int64_t row = i * kPanel; row < std::min(count, (i + 1) * kPanel); ++row)
            pack_row(rows + row * k, k, storage, lanes + panel * lanes_per_panel(k, storage) + row % kPanel,
                     scales + panel * scales_per_panel(k) + row % kPanel);
    });
}

SEGUE_API void segue_unpack(const uint32_t* lanes, const float* scales, int32_t storage, int64_t k, const int64_t* ids,
                            int64_t count, float* out, int32_t threads) {
    parallel_for(count, count < 8 ? 1 : threads, [&](int64_t i) {
        const int64_t panel = ids[i] / kPanel, column = ids[i] % kPanel;
        const uint32_t* from = lanes + panel * lanes_per_panel(k, storage) + column;
        const float* scale = scales + panel * scales_per_panel(k) + column;
        for (int64_t j = 0; j < k; ++j) out[i * k + j] = unpack_one(from, scale, j, storage);
    });
}

SEGUE_API void segue_linear(const float* x, const uint32_t* lanes, const float* scales, int32_t storage,
                            const float* bias, float* out, int64_t m, int64_t k, int64_t n, int32_t threads) {
    const Product p{x, lanes, scales, bias, out, m, k, n};
    if (storage == kFloat) linear<FloatPanel>(p, threads);
    if (storage == kHalf) linear<HalfPanel>(p, threads);
    if (storage == kCode) linear<CodePanel>(p, threads);
}

// out [m, n] = silu(x G^T) * (x U^T); the panels of G and U take turns, each padded to whole panels.
SEGUE_API void segue_gated(const float* x, const uint32_t* lanes, const float* scales, int32_t storage, float* out,
                           int64_t m, int64_t k, int64_t n, int32_t threads) {
    const Product p{x, lanes, scales, nullptr, out, m, k, n};
    if (storage == kFloat) gated<FloatPanel>(p, threads);
    if (storage == kHalf) gated<HalfPanel>(p, threads);
    if (storage == kCode) gated<CodePanel>(p, threads);
}
