// KV from outside on its way into the blocks. Nobody reads it soon, and an ordinary store would first fetch from memory
// what it is about to overwrite, so these stores go past the cache where the processor can do that.
#include <cstring>

#include "simd.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace segue {
namespace {

// Both ends of a run are multiples of 16 bytes from memory that begins on 16: checked by the caller.
void store_past_cache(const char* from, char* to, int64_t size) {
#if defined(__SSE2__)
    for (int64_t i = 0; i < size; i += 16)
        _mm_stream_si128(reinterpret_cast<__m128i*>(to + i),
                         _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
#else
    std::memcpy(to, from, size);
#endif
}

void finish_stores() {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

}  // namespace
}  // namespace segue

using namespace segue;

namespace {

// A block's part of every plane is one run of `run` bytes; in a slot the planes' runs lie end to end.
template <typename Move>
void each_run(const int32_t* blocks, const int64_t* slots, int64_t count, int64_t planes, int64_t num_blocks,
              int64_t run, Move move) {
    for (int64_t i = 0; i < count; ++i)
        for (int64_t plane = 0; plane < planes; ++plane)
            move((plane * num_blocks + blocks[i]) * run, (slots[i] * planes + plane) * run);
    finish_stores();
}

}  // namespace

// Whole blocks of `kv` [planes, num_blocks, run] to slots of `memory` [slots, planes, run].
SEGUE_API void segue_blocks_out(const char* kv, char* memory, const int32_t* blocks, const int64_t* slots,
                                int64_t count, int64_t planes, int64_t num_blocks, int64_t run) {
    each_run(blocks, slots, count, planes, num_blocks, run,
             [&](int64_t block, int64_t slot) { store_past_cache(kv + block, memory + slot, run); });
}

// The other way round.
SEGUE_API void segue_blocks_in(const char* memory, char* kv, const int32_t* blocks, const int64_t* slots, int64_t count,
                               int64_t planes, int64_t num_blocks, int64_t run) {
    each_run(blocks, slots, count, planes, num_blocks, run,
             [&](int64_t block, int64_t slot) { store_past_cache(memory + slot, kv + block, run); });
}

// `chunk` [planes, heads, chunk_tokens, row] holds tokens from `start` on; those from `first` to `last` go to
// `kv` [planes, num_blocks, heads, block_size, row], token t to block blocks[t / block_size].
SEGUE_API void segue_place(const char* chunk, char* kv, const int32_t* blocks, int64_t planes, int64_t heads,
                           int64_t num_blocks, int64_t block_size, int64_t row, int64_t chunk_tokens, int64_t start,
                           int64_t first, int64_t last) {
    for (int64_t plane = 0; plane < planes; ++plane)
        for (int64_t head = 0; head < heads; ++head) {
            const char* from = chunk + (plane * heads + head) * chunk_tokens * row;
            for (int64_t t = first; t < last;) {
                const int64_t block = blocks[t / block_size], inside = t % block_size;
                const int64_t count = block_size - inside < last - t ? block_size - inside : last - t;
                char* to = kv + (((plane * num_blocks + block) * heads + head) * block_size + inside) * row;
                store_past_cache(from + (t - start) * row, to, count * row);
                t += count;
            }
        }
    finish_stores();
}
