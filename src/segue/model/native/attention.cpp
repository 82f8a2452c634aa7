// Causal attention over a paged KV cache, for ragged batches of decode and prefill rows alike.
//
// What a query row computes is fixed by its position and its keys alone:
//
//     keys     0 ........................ 255 | 256 ...                  partitions of kPartition keys
//     tiles    0..63 | 64..127 | 128..191 |...|                          tiles of kTile keys
//
// Inside a partition, tiles run in increasing order with an online softmax; partitions start afresh and are merged
// in increasing order. Both grids are anchored at position 0, never at the chunk being computed. Which thread does a
// partition, and which other rows share a tile, changes nothing. Keys a row must not see take no part in its sums,
// not even with weight zero, so an infinity or NaN there cannot reach it.
//
// Beams of one search are a sequence whose rows are all at one position: they share the keys before `shared`, and each has
// slots of its own for those behind. Tiles that all share are walked once for all of them.
#include <algorithm>
#include <limits>
#include <tuple>
#include <vector>

#include "kernels.h"
#include "micro.h"

namespace segue {
namespace {

constexpr int64_t kTile = 64;
constexpr int64_t kPartition = 256;
constexpr int64_t kUnitRows = 96;  // query rows (token, head) that share a walk over the keys
constexpr int64_t kMaxDim = 256;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

struct Call {
    const float* qkv;
    const void *k_cache, *v_cache;
    bool half_cache;
    const int32_t *tables, *starts, *lengths;
    Tails tails;
    int64_t table_stride, sequences, heads, kv_heads, dim, block_size, window;
    float scale;
    float* out;

    int64_t group() const { return heads / kv_heads; }
    int64_t padded_dim() const { return (dim + kPanel - 1) / kPanel * kPanel; }
    int64_t row_stride() const { return (heads + 2 * kv_heads) * dim; }
};

struct Range {
    int64_t begin, end;
    bool empty() const { return begin >= end; }
    Range operator&(Range o) const { return {std::max(begin, o.begin), std::min(end, o.end)}; }
};

// Consecutive tokens of one sequence, with the query heads of one KV head: they share every key and value they read.
struct Unit {
    int64_t sequence, kv_head, first_row, first_position, tokens;
    int64_t shared;        // for beams: keys that all of them see; those behind lie in
    const int32_t* slots;  // [token][position - shared], which is null for others
    int64_t partial = 0;   // where its partitions' results lie when they are computed separately
    bool split = false;

    int64_t num_own() const { return first_position + 1 - shared; }
    // The keys token j sees.
    Range keys(const Call& c, int64_t j) const {
        const int64_t end = first_position + (slots ? 0 : j) + 1;
        return {c.window > 0 ? std::max<int64_t>(0, end - c.window) : 0, end};
    }
    Range keys(const Call& c) const { return {keys(c, 0).begin, keys(c, tokens - 1).end}; }
    Range partitions(const Call& c) const {
        return {keys(c).begin / kPartition, (keys(c).end + kPartition - 1) / kPartition};
    }
};

Range partition_keys(int64_t partition) { return {partition * kPartition, (partition + 1) * kPartition}; }

// The softmax of some keys, unnormalised: sums are relative to 2^peak. One per query row, rows [token][head].
struct State {
    float *peak, *total, *sums;
    static int64_t size(int64_t rows, const Call& c) { return rows * (c.padded_dim() + 2); }
    static State at(float* memory, int64_t rows) { return {memory, memory + rows, memory + 2 * rows}; }
    void reset(int64_t rows, const Call& c) const {
        std::fill_n(peak, rows, kMinusInfinity);
        std::fill_n(total, rows, 0.0f);
        std::fill_n(sums, rows * c.padded_dim(), 0.0f);
    }
};

struct Buffers {
    float *queries, *keys, *values, *scores;
    State state, merged;
};

Buffers buffers_for(const Call& c, int64_t rows) {
    static thread_local Scratch scratch;
    const int64_t padded = c.padded_dim(), state = (State::size(rows, c) + 15) / 16 * 16;
    float* p = scratch.reserve(rows * c.dim + kTile * (c.dim + padded) + rows * kTile + 2 * state + 64);
    Buffers b;
    b.keys = p, p += kTile * c.dim;
    b.values = p, p += kTile * padded;
    b.scores = p, p += rows * kTile;
    b.queries = p, p += rows * c.dim;
    b.state = State::at(p, rows), p += state;
    b.merged = State::at(p, rows);
    return b;
}

typedef float Vec8 __attribute__((vector_size(32)));
typedef uint16_t Half8 __attribute__((vector_size(16)));
typedef uint32_t Bits8 __attribute__((vector_size(32)));

inline Vec8 load8(const float* p) { return load<Vec8>(p); }
inline Vec8 load8(const uint16_t* p) { return (Vec8)(__builtin_convertvector(load<Half8>(p), Bits8) << 16); }

// Eight keys of eight values become eight values of eight keys.
template <class T>
inline void transpose8(const T* const* rows, int64_t offset, float* out, int64_t stride) {
    Vec8 r[8], s[8];
    for (int i = 0; i < 8; ++i) r[i] = load8(rows[i] + offset);
    for (int i = 0; i < 8; i += 2) {
        s[i] = __builtin_shufflevector(r[i], r[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        s[i + 1] = __builtin_shufflevector(r[i], r[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; ++j) {
            r[i + 2 * j] = __builtin_shufflevector(s[i + j], s[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
            r[i + 2 * j + 1] = __builtin_shufflevector(s[i + j], s[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
    for (int j = 0; j < 4; ++j) {
        store(out + j * stride, __builtin_shufflevector(r[j], r[j + 4], 0, 1, 2, 3, 8, 9, 10, 11));
        store(out + (j + 4) * stride, __builtin_shufflevector(r[j], r[j + 4], 4, 5, 6, 7, 12, 13, 14, 15));
    }
}

// Where each key of a tile, and its value, lie in the caches; those outside `seen` read as zeros.
template <class T>
struct Located {
    const T *keys[kTile], *values[kTile];

    // Positions from `shared` on, as token j of a group has them.
    void locate_own(const Call& c, const Unit& u, int64_t j, int64_t first, Range seen) {
        const int32_t* slots = u.slots + j * u.num_own();
        for (int64_t key = std::max(seen.begin, u.shared); key < seen.end; ++key) {
            const int64_t slot = slots[key - u.shared], block = slot / c.block_size;
            const int64_t at = ((block * c.kv_heads + u.kv_head) * c.block_size + slot % c.block_size) * c.dim;
            keys[key - first] = static_cast<const T*>(c.k_cache) + at;
            values[key - first] = static_cast<const T*>(c.v_cache) + at;
        }
    }

    Located(const Call& c, const Unit& u, int64_t first, Range seen) {
        static const T zeros[kMaxDim] = {};
        std::fill_n(keys, kTile, zeros);
        std::fill_n(values, kTile, zeros);
        const int32_t* table = c.tables + u.sequence * c.table_stride;
        for (int64_t key = seen.begin; key < seen.end;) {
            const int64_t block = key / c.block_size, end = std::min(seen.end, (block + 1) * c.block_size);
            const int64_t in_block = key - block * c.block_size;
            int64_t at = ((table[block] * c.kv_heads + u.kv_head) * c.block_size + in_block) * c.dim;
            for (; key < end; ++key, at += c.dim) {
                keys[key - first] = static_cast<const T*>(c.k_cache) + at;
                values[key - first] = static_cast<const T*>(c.v_cache) + at;
            }
        }
    }
};

// The tile's keys as panels [key / kPanel][dim][kPanel] and its values as panels [dim / kPanel][key][kPanel], in fp32: those
// from `begin` on, a multiple of eight.
template <class T>
void load_tile(const Call& c, const Located<T>& from, int64_t begin, int64_t count, const Buffers& b) {
    constexpr int64_t kLine = 64 / sizeof(T);
    for (int64_t t = begin; t < count; t += 8)
        for (int64_t d = 0; d < c.dim; d += 8) {
            if (d % kLine == 0)
                for (int i = 0; i < 8; ++i) __builtin_prefetch(from.values[t + i] + d);
            transpose8(from.keys + t, d, b.keys + (t / kPanel * c.dim + d) * kPanel + t % kPanel, kPanel);
        }
    for (int64_t t = begin; t < count; ++t) {
        float* out = b.values + t * kPanel;
        for (int64_t d = 0; d < c.dim; d += 8)
            store(out + d / kPanel * kTile * kPanel + d % kPanel, load8(from.values[t] + d));
        for (int64_t d = c.dim; d < c.padded_dim(); d += 8)
            store(out + d / kPanel * kTile * kPanel + d % kPanel, Vec8{});
    }
}

// Blocks lie anywhere, so the processor cannot guess which rows the next tile needs; they are fetched during this
// one's products. Right when rows [first, first + count) are in one block, a few useless fetches when not.
template <class T>
Ahead rows_ahead(const Call& c, const T* const* rows, int64_t first, int64_t count) {
    return {reinterpret_cast<const char*>(rows[first]), count * c.dim * int64_t(sizeof(T))};
}

// A panel of keys concerns no token before the first of them.
template <class T>
void score_rows(const Call& c, const Unit& u, Range tokens, int64_t first, int64_t used, const Buffers& b,
                const Located<T>& next) {
    for (int64_t t = 0; t < used; t += kPanel) {
        const int64_t row = std::max(tokens.begin, first + t - u.first_position) * c.group();
        multiply_rows(tokens.end * c.group() - row, b.queries + row * c.dim, c.dim,
                      FloatPanel{b.keys + t * c.dim, nullptr}, 0, c.dim, from_zero(), b.scores + row * kTile + t, kTile,
                      rows_ahead(c, next.keys, t, kPanel));
    }
}

inline float highest(const float* scores) {
    Vec high = load<Vec>(scores);
    for (int64_t t = kWidth; t < kTile; t += kWidth) {
        const Vec v = load<Vec>(scores + t);
        high = v > high ? v : high;
    }
    return max_lanes(high);
}

inline float to_weights(float* scores, float peak) {
    Vec total = {};
    for (int64_t t = 0; t < kTile; t += kWidth) {
        const Vec weight = exp2_down(load<Vec>(scores + t) - peak);
        store(scores + t, weight);
        total += weight;
    }
    return sum_lanes(total);
}

// Turns rows' scores into weights relative to their new peaks, and rescales what they have summed so far. As many rows as a
// vector has lanes go together, so that what a row needs once is computed for all of them at once.
__attribute__((noinline)) void soften(float* scores, State s, Range rows, int64_t padded) {
    for (int64_t row = rows.begin; row < rows.end; row += kWidth) {
        const int64_t count = std::min<int64_t>(kWidth, rows.end - row);
        float old[kWidth] = {}, peak[kWidth] = {}, keep[kWidth];
        for (int64_t i = 0; i < count; ++i) {
            old[i] = s.peak[row + i];
            peak[i] = std::max(old[i], highest(scores + (row + i) * kTile));
        }
        store(keep, exp2_vec(load<Vec>(old) - load<Vec>(peak)));
        for (int64_t i = 0; i < count; ++i) {
            const float total = to_weights(scores + (row + i) * kTile, peak[i]);
            s.total[row + i] = s.total[row + i] * keep[i] + total;
            s.peak[row + i] = peak[i];
            if (keep[i] == 1.0f) continue;
            float* sums = s.sums + (row + i) * padded;
            for (int64_t d = 0; d < padded; d += kWidth) store(sums + d, load<Vec>(sums + d) * keep[i]);
        }
    }
}

template <class T>
void add_values(const Call& c, const Buffers& b, Range rows, Range seen, const Located<T>& next) {
    if (rows.empty()) return;
    const int64_t padded = c.padded_dim(), share = kTile * kPanel / padded;
    for (int64_t d = 0; d < padded; d += kPanel) {
        float* sums = b.state.sums + rows.begin * padded + d;
        multiply_rows(rows.end - rows.begin, b.scores + rows.begin * kTile, kTile,
                      FloatPanel{b.values + d * kTile, nullptr}, seen.begin, seen.end, Start{sums, padded}, sums, padded,
                      rows_ahead(c, next.values, d / kPanel * share, share));
    }
}

// One tile of keys for every token that sees any of it. Tokens that see all of it go through the product together.
template <class T>
void visit_tile(const Call& c, const Unit& u, int64_t first, Range seen, Range seen_next, const Buffers& b) {
    const Range tile{first, first + kTile};
    const Located<T> here(c, u, first, seen), next(c, u, first + kTile, seen_next);
    load_tile(c, here, 0, seen.end - first, b);
    const int64_t group = c.group();
    // Tokens see later keys as they go: those that see part of the tile are consecutive.
    Range tokens{0, u.tokens};
    while (!tokens.empty() && (u.keys(c, tokens.begin) & tile).empty()) ++tokens.begin;
    while (!tokens.empty() && (u.keys(c, tokens.end - 1) & tile).empty()) --tokens.end;
    if (tokens.empty()) return;
    score_rows(c, u, tokens, first, seen.end - first, b, next);
    for (int64_t j = tokens.begin; j < tokens.end; ++j) {
        const Range keys = u.keys(c, j) & tile;
        for (int64_t row = j * group; row < (j + 1) * group; ++row) {
            float* scores = b.scores + row * kTile;
            std::fill(scores, scores + (keys.begin - first), kMinusInfinity);
            std::fill(scores + (keys.end - first), scores + kTile, kMinusInfinity);
        }
    }
    soften(b.scores, b.state, {tokens.begin * group, tokens.end * group}, c.padded_dim());
    Range whole{0, 0};
    for (int64_t j = tokens.begin; j < tokens.end; ++j) {
        const Range keys = u.keys(c, j) & tile, rows{j * group, (j + 1) * group};
        if (keys.end - keys.begin == kTile)
            whole = whole.empty() ? rows : Range{whole.begin, rows.end};
        else
            add_values(c, b, rows, {keys.begin - first, keys.end - first}, next);
    }
    add_values(c, b, whole, {0, kTile}, next);
}

// A tile with keys that beams do not share: what they do is loaded once, the rest for each.
template <class T>
void visit_own_tile(const Call& c, const Unit& u, int64_t first, Range seen, const Buffers& b) {
    const Range shared = seen & Range{first, u.shared};
    const int64_t group = c.group(), used = seen.end - first;
    const int64_t own = shared.empty() ? 0 : (u.shared - first) / 8 * 8;
    Located<T> here(c, u, first, shared.empty() ? Range{first, first} : shared);
    if (!shared.empty()) load_tile(c, here, 0, own, b);
    for (int64_t j = 0; j < u.tokens; ++j) {
        const Range rows{j * group, (j + 1) * group};
        here.locate_own(c, u, j, first, seen);
        load_tile(c, here, own, used, b);
        score_rows(c, u, {j, j + 1}, first, used, b, here);
        for (int64_t row = rows.begin; row < rows.end; ++row) {
            float* scores = b.scores + row * kTile;
            std::fill(scores, scores + (seen.begin - first), kMinusInfinity);
            std::fill(scores + used, scores + kTile, kMinusInfinity);
        }
        soften(b.scores, b.state, rows, c.padded_dim());
        add_values(c, b, rows, {seen.begin - first, used}, here);
    }
}

template <class T>
void visit(const Call& c, const Unit& u, int64_t first, Range keys, const Buffers& b) {
    const Range seen = keys & Range{first, first + kTile};
    const Range next = keys & Range{first + kTile, u.slots ? std::min(u.shared, first + 2 * kTile) : first + 2 * kTile};
    if (u.slots && seen.end > u.shared)
        visit_own_tile<T>(c, u, first, seen, b);
    else
        visit_tile<T>(c, u, first, seen, next.empty() ? Range{0, 0} : next, b);
}

void visit_partition(const Call& c, const Unit& u, int64_t partition, const Buffers& b) {
    b.state.reset(u.tokens * c.group(), c);
    const Range keys = u.keys(c) & partition_keys(partition);
    for (int64_t first = keys.begin / kTile * kTile; first < keys.end; first += kTile) {
        if (c.half_cache)
            visit<uint16_t>(c, u, first, keys, b);
        else
            visit<float>(c, u, first, keys, b);
    }
}

__attribute__((noinline)) void merge_row(State into, State from, int64_t row, int64_t padded) {
    const float peak = std::max(into.peak[row], from.peak[row]);
    const float keep = exp2_one(into.peak[row] - peak), add = exp2_one(from.peak[row] - peak);
    into.total[row] = into.total[row] * keep + from.total[row] * add;
    into.peak[row] = peak;
    for (int64_t d = row * padded; d < (row + 1) * padded; d += kWidth)
        store(into.sums + d, load<Vec>(into.sums + d) * keep + load<Vec>(from.sums + d) * add);
}

// `merged` takes in a partition for the tokens that see any of its keys; their first one is copied as it is.
void merge_partition(const Call& c, const Unit& u, int64_t partition, State merged, State part) {
    const int64_t group = c.group(), padded = c.padded_dim();
    for (int64_t j = 0; j < u.tokens; ++j) {
        const Range keys = u.keys(c, j);
        if ((keys & partition_keys(partition)).empty()) continue;
        for (int64_t row = j * group; row < (j + 1) * group; ++row) {
            if (partition > keys.begin / kPartition) {
                merge_row(merged, part, row, padded);
                continue;
            }
            merged.peak[row] = part.peak[row], merged.total[row] = part.total[row];
            std::copy_n(part.sums + row * padded, padded, merged.sums + row * padded);
        }
    }
}

void load_queries(const Call& c, const Unit& u, float* out) {
    const int64_t size = c.group() * c.dim;
    const float scale = c.scale * 1.4426950408889634f;  // softmax works in powers of two
    for (int64_t j = 0; j < u.tokens; ++j) {
        const float* from = c.qkv + (u.first_row + j) * c.row_stride() + u.kv_head * size;
        for (int64_t i = 0; i < size; ++i) out[j * size + i] = from[i] * scale;
    }
}

void write_out(const Call& c, const Unit& u, State s) {
    const int64_t group = c.group(), padded = c.padded_dim();
    for (int64_t row = 0; row < u.tokens * group; ++row) {
        const int64_t token = u.first_row + row / group, head = u.kv_head * group + row % group;
        const float inverse = 1.0f / s.total[row];
        for (int64_t d = 0; d < c.dim; ++d)
            c.out[(token * c.heads + head) * c.dim + d] = s.sums[row * padded + d] * inverse;
    }
}

void run_unit(const Call& c, const Unit& u) {
    const Buffers b = buffers_for(c, u.tokens * c.group());
    load_queries(c, u, b.queries);
    const Range partitions = u.partitions(c);
    for (int64_t p = partitions.begin; p < partitions.end; ++p) {
        visit_partition(c, u, p, b);
        merge_partition(c, u, p, b.merged, b.state);
    }
    write_out(c, u, b.merged);
}

// A unit's partitions apart, each into its own place, and later together.
void run_one_partition(const Call& c, const Unit& u, int64_t partition, float* partials) {
    const int64_t rows = u.tokens * c.group(), size = State::size(rows, c);
    Buffers b = buffers_for(c, rows);
    load_queries(c, u, b.queries);
    b.state = State::at(partials + u.partial + (partition - u.partitions(c).begin) * size, rows);
    visit_partition(c, u, partition, b);
}

void merge_unit(const Call& c, const Unit& u, float* partials) {
    const int64_t rows = u.tokens * c.group(), size = State::size(rows, c);
    const Buffers b = buffers_for(c, rows);
    const Range partitions = u.partitions(c);
    for (int64_t p = partitions.begin; p < partitions.end; ++p)
        merge_partition(c, u, p, b.merged, State::at(partials + u.partial + (p - partitions.begin) * size, rows));
    write_out(c, u, b.merged);
}

std::vector<Unit> units_of(const Call& c) {
    std::vector<Unit> units;
    const int64_t step = std::max<int64_t>(1, kUnitRows / c.group());
    for (int64_t s = 0; s < c.sequences; ++s) {
        const int64_t rows = c.starts[s + 1] - c.starts[s], shared = c.tails.shared_of(s);
        for (int64_t j = 0; j < rows; j += step)
            for (int64_t h = 0; h < c.kv_heads; ++h) {
                const int64_t first = c.starts[s] + j, count = std::min(step, rows - j);
                if (shared < 0)
                    units.push_back({s, h, first, c.lengths[s] - rows + j, count, 0, nullptr});
                else
                    units.push_back({s, h, first, c.lengths[s] - 1, count, shared,
                                     c.tails.of(s) + j * (c.lengths[s] - shared)});
            }
    }
    return units;
}

struct Task {
    int64_t unit, partition, cost;
};

// Units with few rows, or all of them when there are too few to go round, are cut at partitions. Big tasks first;
// KV heads of the same blocks next to each other, because they are neighbours in memory.
std::vector<Task> tasks_of(const Call& c, std::vector<Unit>& units, int threads, int64_t& partial_floats) {
    std::vector<Task> tasks;
    partial_floats = 0;
    for (size_t i = 0; i < units.size(); ++i) {
        Unit& u = units[i];
        const int64_t rows = u.tokens * c.group(), span = u.keys(c).end - u.keys(c).begin;
        const Range parts = u.partitions(c);
        u.split = threads > 1 && parts.end - parts.begin > 1 && (rows <= 16 || int64_t(units.size()) < 4 * threads);
        if (!u.split) {
            tasks.push_back({int64_t(i), 0, rows * span});
            continue;
        }
        u.partial = partial_floats;
        partial_floats += (parts.end - parts.begin) * State::size(rows, c);
        for (int64_t p = parts.begin; p < parts.end; ++p) {
            const Range keys = u.keys(c) & partition_keys(p);
            tasks.push_back({int64_t(i), p, rows * (keys.end - keys.begin)});
        }
    }
    std::stable_sort(tasks.begin(), tasks.end(), [&](const Task& a, const Task& b) {
        const auto key = [&](const Task& t) { return std::tuple(-t.cost, units[t.unit].sequence, t.partition); };
        return key(a) < key(b);
    });
    return tasks;
}

void attend(const Call& c, int threads) {
    static thread_local Scratch scratch;
    std::vector<Unit> units = units_of(c);
    int64_t partial_floats;
    const std::vector<Task> tasks = tasks_of(c, units, threads, partial_floats);
    float* partials = scratch.reserve(partial_floats);
    int64_t scores = 0;
    for (const Task& task : tasks) scores += task.cost;
    const bool alone = scores * c.dim * 2 < kWorthWaking / 4;
    parallel_for(int64_t(tasks.size()), alone ? 1 : threads, [&](int64_t i) {
        const Unit& u = units[tasks[i].unit];
        if (u.split)
            run_one_partition(c, u, tasks[i].partition, partials);
        else
            run_unit(c, u);
    });
    if (partial_floats == 0) return;
    parallel_for(int64_t(units.size()), units.size() < 32 ? 1 : threads, [&](int64_t i) {
        if (units[i].split) merge_unit(c, units[i], partials);
    });
}

}  // namespace
}  // namespace segue

SEGUE_API void segue_attention(const float* qkv, const void* k_cache, const void* v_cache, int32_t half_cache,
                               const int32_t* tables, int64_t table_stride, const int32_t* starts,
                               const int32_t* lengths, const segue::Tails* tails, int64_t sequences, int64_t heads,
                               int64_t kv_heads, int64_t dim, int64_t block_size, float scale, int64_t window,
                               float* out, int32_t threads) {
    const segue::Call call{qkv,     k_cache,      v_cache,   half_cache != 0,
                           tables,  starts,       lengths,   tails ? *tails : segue::Tails{},
                           table_stride, sequences, heads,   kv_heads,
                           dim,     block_size,   window,    scale,
                           out};
    segue::attend(call, threads);
}
