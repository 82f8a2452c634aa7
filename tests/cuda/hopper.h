// The words of src/segue/model/cuda/hopper.h for a CPU: each thread of a kernel is a fiber, in an order drawn at random.
//
// What a device does some time later is done some time later here too: copies, and what is sent, arrive when the dice say so, and
// products read their operands when somebody waits for them. So memory that is given back too early, read too early or waited for in a
// circle shows, as it would on a device with bad luck. The kernel before ends some time later as well: whoever reads what it writes,
// writes anything, or ends before that has done wrong. So has who lets products read what a thread kept in shared memory and did not
// fence.

#pragma once

#include <ucontext.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <vector>

using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
struct uint2 {
    u32 x, y;
};

struct alignas(64) TensorMap {  // the first dimension has a stride of one element
    const u16* base;
    u64 sizes[5], strides[5];  // in bytes
    u32 box[5], dimensions;
};

#define KERNEL(threads) static void
#define KERNEL_OF(threads, count) static void
#define GIVEN const
#define DEVICE inline

namespace device {

constexpr size_t SHARED = 227 * 1024, STACK = 128 * 1024;

struct Barrier {
    long count, pending, bytes = 0;
    u32 phase = 0;
    void arrived(long bytes_expected) { pending--, bytes += bytes_expected, settle(); }
    void came(long some) { bytes -= some, settle(); }
    void settle() {
        if (pending == 0 && bytes == 0) phase++, pending = count;
    }
};

struct Meeting {
    int here = 0, round = 0;
};

struct Block {
    std::vector<unsigned char> memory = std::vector<unsigned char>(SHARED, 0xff);  // not numbers
    std::map<u32, Barrier> barriers;
    std::map<int, Meeting> meetings;
    std::map<u32, int> unfenced;  // sixteen bytes each, and who kept them
    std::map<int, u32> told;      // by each thread, to others of its warp
    std::map<int, std::vector<u32>> words;
};

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    int block, thread, pause = 0;
    bool done = false, has_waited = false;  // for the kernel before
    int meetings = 0;                       // with its cluster
    std::function<bool()> ready;
    std::vector<std::function<void()>> products;               // since the last commit
    std::deque<std::vector<std::function<void()>>> committed;  // not yet carried out
    std::vector<const u32*> held;                              // left sides of products, in registers
};

inline std::vector<Block> blocks;
inline std::vector<std::unique_ptr<Fiber>> fibers;
inline std::vector<std::function<void()>> under_way;  // copies
inline int ranks, threads;  // programs of a cluster, threads of a program
inline std::map<int, Meeting> clusters;
inline Fiber* me;
inline bool kernel_before_ended, is_wrong;
inline ucontext_t scheduler;
inline std::mt19937 dice;

inline void fail(const char* what) {
    fprintf(stderr, "emulated device: %s\n", what);
    abort();
}

inline void wait_until(std::function<bool()> ready) {
    if (ready() && dice() % 4) return;
    me->ready = std::move(ready);
    swapcontext(&me->context, &scheduler);
}

// Now and then a thread is held up, for whatever reason.
inline void linger(u32 seldom) {
    if (dice() % seldom) return;
    me->pause = int(dice() % 64);
    swapcontext(&me->context, &scheduler);
}

inline Block& block() { return blocks[me->block]; }

// Addresses in shared memory of a cluster: one more than the rank in the highest bits, or nothing for one's own.
inline Block& block_at(u32 at) { return at >> 24 ? blocks[me->block / ranks * ranks + (at >> 24) - 1] : block(); }
inline unsigned char* memory(Block& block, u32 at, size_t size) {
    at &= 0xffffff;
    if (at + size > SHARED) fail("outside of shared memory");
    return block.memory.data() + at;
}

inline void arrive_at(Meeting& meeting, int count) {
    if (++meeting.here == count) meeting.here = 0, meeting.round++;
}
inline void meet(Meeting& meeting, int count) {
    const int round = meeting.round;
    arrive_at(meeting, count);
    wait_until([&meeting, round] { return meeting.round != round; });
}

inline void meet_warp() { meet(block().meetings[100 + me->thread / 32], 32); }

inline u32 swizzled(u32 at) { return at ^ (at >> 7 & 7) << 4; }

inline void copy_box(u32 to, const TensorMap& map, std::vector<u64> begin, u32 barrier) {
    if (to % 128) fail("a swizzled copy to the middle of a line");
    Block& here = block();
    under_way.push_back([=, &here, &map] {
        u64 at[5], total = 1, bytes = 0;
        for (u32 axis = 0; axis < map.dimensions; axis++) total *= map.box[axis];
        for (u64 number = 0; number < total; number++, bytes += 2) {
            u64 left = number;
            bool inside = true;
            const char* from = reinterpret_cast<const char*>(map.base);
            for (u32 axis = 0; axis < map.dimensions; axis++) {
                at[axis] = begin[axis] + left % map.box[axis], left /= map.box[axis];
                inside &= at[axis] < map.sizes[axis];
                from += at[axis] * (axis ? map.strides[axis] : 2);
            }
            u16 value = 0;
            if (inside) memcpy(&value, from, 2);
            const u32 there = swizzled(to + u32(bytes));
            is_wrong |= !here.unfenced.empty() && here.unfenced.count(there / 16);
            memcpy(memory(here, there, 2), &value, 2);
        }
        here.barriers.at(barrier).came(long(bytes));
    });
}

inline std::function<void()> kernel;
inline void entry() {
    kernel();
    me->done = true;
    swapcontext(&me->context, &scheduler);
}

// One launch, while the kernel `before` runs, and at some time ends. False if all that is left waits for something that never comes.
inline bool run(std::function<void()> what, std::function<void()> before, int num_programs, int num_threads, int cluster, u32 seed) {
    kernel = std::move(what);
    dice.seed(seed);
    ranks = cluster, threads = num_threads;
    clusters.clear();
    blocks = std::vector<Block>(num_programs);
    fibers.clear();
    under_way.clear();
    kernel_before_ended = is_wrong = false;
    for (int number = 0; number < int(blocks.size()) * threads; number++) {
        auto fiber = std::make_unique<Fiber>();
        fiber->stack.reset(new char[STACK]);
        fiber->block = number / threads, fiber->thread = number % threads;
        getcontext(&fiber->context);
        fiber->context.uc_stack.ss_sp = fiber->stack.get(), fiber->context.uc_stack.ss_size = STACK;
        makecontext(&fiber->context, entry, 0);
        fibers.push_back(std::move(fiber));
    }
    const u32 slow = 1 << dice() % 6;  // some devices take their time
    std::vector<u32> lazy((fibers.size() + 31) / 32);  // and so do some warps
    for (u32& each : lazy) each = dice() % 4 ? 1 : 1 << dice() % 6;
    std::vector<Fiber*> order;
    for (auto& fiber : fibers) order.push_back(fiber.get());
    while (!order.empty()) {
        bool moved = false;
        std::shuffle(order.begin(), order.end(), dice);
        for (Fiber* fiber : order) {
            if (fiber->ready && !fiber->ready()) continue;
            if (fiber->pause > 0) {
                fiber->pause--, moved = true;
                continue;
            }
            if (dice() % lazy[(fiber->block * threads + fiber->thread) / 32]) {
                moved = true;
                continue;
            }
            fiber->ready = nullptr, me = fiber, moved = true;
            swapcontext(&scheduler, &fiber->context);
        }
        std::erase_if(order, [](Fiber* fiber) { return fiber->done; });
        std::vector<std::function<void()>> later;
        std::shuffle(under_way.begin(), under_way.end(), dice);
        for (auto& each : under_way) {
            if (dice() % slow == 0)
                each();
            else
                later.push_back(each);
        }
        moved |= !under_way.empty();
        under_way = std::move(later);
        if (!kernel_before_ended) {
            moved = true, kernel_before_ended = dice() % 64 == 0;
            if (kernel_before_ended) before();
        }
        if (!moved && !order.empty()) return false;
    }
    for (size_t first = 0; first < fibers.size(); first += size_t(threads))
        is_wrong |= std::none_of(&fibers[first], &fibers[first] + threads, [](auto& fiber) { return fiber->has_waited; });
    return under_way.empty() && !is_wrong;
}

inline void must_have_waited() { is_wrong |= !me->has_waited; }

inline float to_float(u16 bits) {
#if IS_FP16
    _Float16 half;
    memcpy(&half, &bits, 2);
    return float(half);
#else
    const u32 wide = u32(bits) << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
#endif
}

inline u16 to_half(float value) {
#if IS_FP16
    const _Float16 half = _Float16(value);
    u16 bits;
    memcpy(&bits, &half, 2);
    return bits;
#else
    u32 wide;
    memcpy(&wide, &value, 4);
    if (std::isnan(value)) return u16(0x7fff);
    return u16((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
#endif
}

}  // namespace device

// Who I am

inline int my_thread() { return device::me->thread; }
inline int my_program() { return device::me->block; }
inline int num_programs() { return int(device::blocks.size()); }
inline u32 my_rank() { return device::me->block % device::ranks; }

template <int COUNT>
inline void keep_registers() {}
template <int COUNT>
inline void take_registers() {}

// Memory

inline u32 shared_begin() { return 0; }
inline float shared_float(u32 at) {
    float value;
    memcpy(&value, device::memory(device::block(), at, 4), 4);
    return value;
}
inline void shared_two(float* two, u32 at) { memcpy(two, device::memory(device::block(), at, 8), 8); }
inline void shared_four(float* four, u32 at) { memcpy(four, device::memory(device::block(), at, 16), 16); }
inline void keep(u32 at, const void* from, u32 size) {
    device::linger(256);
    memcpy(device::memory(device::block(), at, size), from, size);
    device::block().unfenced[at / 16] = device::me->thread;
}
inline void keep_word(u32 at, u32 value) { keep(at, &value, 4); }
inline void keep_float(u32 at, float value) { keep(at, &value, 4); }
inline void keep_words(u32 at, const u32* four) { keep(at, four, 16); }
inline u32 kept_word(u32 at) {
    u32 value;
    memcpy(&value, device::memory(device::block(), at, 4), 4);
    return value;
}
inline void kept_words(u32* four, u32 at) { memcpy(four, device::memory(device::block(), at, 16), 16); }
inline void fence_products() {
    std::erase_if(device::block().unfenced, [](auto& each) { return each.second == device::me->thread; });
}
inline u32 of_rank(u32 at, u32 rank) { return at | (rank + 1) << 24; }
template <class T>
inline T loaded(const void* from) {
    if (reinterpret_cast<uintptr_t>(from) % sizeof(T)) device::fail("an unaligned load");
    T value;
    memcpy(&value, from, sizeof(T));
    return value;
}
inline uint2 load_pair(const void* from) { return loaded<uint2>(from); }
inline void store_pair(void* to, uint2 value) {
    device::must_have_waited();
    device::linger(64);
    memcpy(to, &value, 8);
}
template <class T>
inline void stored(void* to, const T& value) {
    device::must_have_waited();
    if (reinterpret_cast<uintptr_t>(to) % sizeof(T)) device::fail("an unaligned store");
    memcpy(to, &value, sizeof(T));
}
struct alignas(16) Sixteen {
    u32 words[4];
};
inline void store_word(void* to, u32 value) { stored(to, value); }
inline void store_two(float* to, float one, float other) { store_pair(to, {std::bit_cast<u32>(one), std::bit_cast<u32>(other)}); }
inline void store_words(u16* to, const u32* four) { stored(to, Sixteen{four[0], four[1], four[2], four[3]}); }
inline void load_words(u32* four, const u16* from) {
    const Sixteen value = loaded<Sixteen>(from);
    memcpy(four, &value, 16);
}
inline void load_words_once(u32* four, const u16* from) { load_words(four, from); }
inline void load_floats(float* four, const float* from) {
    const Sixteen value = loaded<Sixteen>(from);
    memcpy(four, &value, 16);
}
inline void load_floats_new(float* four, const float* from) { load_floats(four, from); }
inline void load_two_new(float* two, const float* from) {
    const uint2 value = load_pair(from);
    memcpy(two, &value, 8);
}
inline int add_one(int* count) {
    device::must_have_waited();
    return (*count)++;
}
inline int take_one(int* count) { return add_one(count); }
inline void clear(int* count) { *count = 0; }
inline void wait_for_kernel_before() {
    device::wait_until([] { return device::kernel_before_ended; });
    device::me->has_waited = true;
}
inline void let_next_kernel_begin() {}

// Threads together

inline void meet_warp() { device::meet_warp(); }
template <class T>
inline T exchanged(T value, int other, int number, int count) {
    device::Block& here = device::block();
    here.told[my_thread()] = std::bit_cast<u32>(value);
    device::meet(here.meetings[number], count);
    const T found = std::bit_cast<T>(here.told.at(other));
    device::meet(here.meetings[number], count);
    return found;
}
inline float from_lane(float value, int distance) { return exchanged(value, my_thread() ^ distance, 100 + my_thread() / 32, 32); }
inline int of_lane(int value, int lane) { return exchanged(value, my_thread() / 32 * 32 + lane, 100 + my_thread() / 32, 32); }
inline float from_neighbour(float value, int distance) { return exchanged(value, my_thread() ^ distance, 1000 + my_thread() / 4, 4); }
inline void meet_threads(int name, int count) { device::meet(device::block().meetings[name], count); }
inline void arrive_threads(int name, int count) { device::arrive_at(device::block().meetings[name], count); }
inline void arrive_at_cluster() { device::arrive_at(device::clusters[device::me->block / device::ranks], device::ranks * device::threads); }
inline void wait_for_cluster() {
    auto& meeting = device::clusters[device::me->block / device::ranks];
    device::wait_until([&meeting, round = ++device::me->meetings] { return meeting.round >= round; });
}

// Barriers

inline void make_barrier(u32 at, u32 count) { device::block().barriers[at] = {long(count), long(count)}; }
inline void fence_barriers() {}
inline device::Barrier& barrier_at(u32 at) { return device::block_at(at).barriers.at(at & 0xffffff); }
inline void arrive(u32 barrier) { barrier_at(barrier).arrived(0); }
inline void expect(u32 barrier, u32 bytes) { barrier_at(barrier).bytes += bytes; }
inline void arrive_expecting(u32 barrier, u32 bytes) { barrier_at(barrier).arrived(bytes); }
inline void wait_for(u32 barrier, u32 parity) {
    device::Barrier& here = barrier_at(barrier);
    device::wait_until([&here, parity] { return (here.phase & 1) != parity; });
}
inline void wait_for_ranks(u32 barrier, u32 parity) { wait_for(barrier, parity); }

// Copies

inline void copy_weights(u32 to, const TensorMap* map, int group, int depth, u32 barrier) {
    device::copy_box(to, *map, {0, 0, 0, u64(group), u64(depth)}, barrier);
}

inline void copy_rows(u32 to, const TensorMap* map, int depth, u32 barrier) {
    device::must_have_waited();
    device::copy_box(to, *map, {0, 0, u64(depth)}, barrier);
}

inline void copy_tokens(u32 to, const TensorMap* map, int column, int line, u32 barrier) {
    device::copy_box(to, *map, {u64(column), u64(line)}, barrier);
}

inline void copy_head(u32 to, const TensorMap* map, int column, int head, int row, u32 barrier) {
    device::must_have_waited();
    device::copy_box(to, *map, {u64(column), u64(head), u64(row)}, barrier);
}

inline void send(u32 to, std::vector<float> values, u32 barrier) {
    device::Block& there = device::block_at(to);
    device::Barrier& counts = barrier_at(barrier);
    device::under_way.push_back([&there, &counts, to, values = std::move(values)] {
        const size_t size = values.size() * 4;
        memcpy(device::memory(there, to, size), values.data(), size);
        counts.came(long(size));
    });
}
inline void send_four(u32 to, const float* values, u32 barrier) { send(to, {values, values + 4}, barrier); }
inline void send_two(u32 to, float one, float other, u32 barrier) { send(to, {one, other}, barrier); }

// Products

inline u64 operand(u32 at) { return at >> 4; }
constexpr u64 NEXT_SIXTEEN = 2, NEXT_SIXTEEN_LINES = 128;
namespace device {
// A number of an operand that begins there.
inline float element(Block& here, u64 begin, int line, int column) {
    const u32 at = swizzled(u32(begin << 4) + line / 8 * 1024 + line % 8 * 128 + column * 2);
    is_wrong |= !here.unfenced.empty() && here.unfenced.count(at / 16);
    u16 bits;
    memcpy(&bits, memory(here, at, 2), 2);
    return to_float(bits);
}
}  // namespace device
inline void products_begin() { device::meet_warp(); }
inline void products_commit() {
    device::me->committed.push_back(std::move(device::me->products));
    device::me->products.clear();
}
template <int OPEN>
inline void products_wait() {
    device::meet_warp();
    auto& committed = device::me->committed;
    for (; committed.size() > OPEN; committed.pop_front())
        for (auto& each : committed.front()) each();
    device::meet_warp();
}
template <int N>
inline void multiply_add(float (&sums)[N / 2], u64 columns, u64 rows) {
    device::Block& here = device::block();
    const int lane = my_thread() % 32, warp = my_thread() / 32 % 4;
    device::me->products.push_back([=, &here, &sums] {
        for (int number = 0; number < N / 2; number++) {
            const int column = warp * 16 + lane / 4 + number % 4 / 2 * 8, row = number / 4 * 8 + lane % 4 * 2 + number % 2;
            for (int depth = 0; depth < 16; depth++)
                sums[number] += device::element(here, columns, column, depth) * device::element(here, rows, row, depth);
        }
    });
}
inline void multiply(float (&sums)[64], u64 columns, u64 rows) {
    device::me->products.push_back([&sums] { std::fill(sums, sums + 64, 0.0f); });
    multiply_add<128>(sums, columns, rows);
}
template <class T, int N>
inline void keep_order(T (&)[N]) {}
inline void multiply_add_held(float (&sums)[32], const u32* left, u64 right) {
    device::Block& here = device::block();
    device::Fiber* const me = device::me;
    const int lane = my_thread() % 32, warp_begin = me->block * device::threads + my_thread() - lane;
    const size_t which = me->held.size();
    me->held.push_back(left);
    me->products.push_back([=, &here, &sums] {
        for (int number = 0; number < 32; number++) {
            const int is_lower = number % 4 / 2, column = number / 4 * 8 + lane % 4 * 2 + number % 2;
            for (int depth = 0; depth < 16; depth++) {
                const u32 word = device::fibers[warp_begin + lane / 4 * 4 + depth % 8 / 2]->held.at(which)[depth / 8 * 2 + is_lower];
                sums[number] += device::to_float(u16(depth % 2 ? word >> 16 : word)) * device::element(here, right, depth, column);
            }
        }
    });
}

// What each lane of a warp has, to all of them.
template <class T>
inline std::array<T, 32> gathered(const T& mine) {
    device::Block& here = device::block();
    const int warp = my_thread() / 32;
    here.words[my_thread()] = {mine.begin(), mine.end()};
    device::meet_warp();
    std::array<T, 32> all;
    for (int lane = 0; lane < 32; lane++) std::copy_n(here.words.at(warp * 32 + lane).begin(), mine.size(), all[lane].begin());
    device::meet_warp();
    return all;
}
inline float number_of(u32 word, int at) { return device::to_float(u16(at % 2 ? word >> 16 : word)); }
inline void multiply_add_warp(float (&sums)[4], u32 line, u32 other_line, u32 line_on, u32 other_line_on, u32 column, u32 column_on) {
    const auto all = gathered(std::array<u32, 6>{line, other_line, line_on, other_line_on, column, column_on});
    const int lane = my_thread() % 32;
    for (int number = 0; number < 4; number++)
        for (int depth = 0; depth < 16; depth++) {
            const int part = depth % 8 / 2, on = depth / 8;
            const u32 left = all[lane / 4 * 4 + part][on * 2 + number / 2], right = all[(lane % 4 * 2 + number % 2) * 4 + part][4 + on];
            sums[number] += number_of(left, depth) * number_of(right, depth);
        }
}
inline u32 turned_over(u32 two) {
    const auto all = gathered(std::array<u32, 1>{two});
    const int line = my_thread() % 32 / 4, column = my_thread() % 4 * 2;
    const auto bits = [&](int of_line, int at) { return all[of_line * 4 + at / 2][0] >> at % 2 * 16 & 0xffff; };
    return bits(column, line) | bits(column + 1, line) << 16;
}

inline u32 lows(u32 one, u32 other) { return (one & 0xffff) | other << 16; }
inline u32 highs(u32 one, u32 other) { return one >> 16 | (other & 0xffff0000); }
inline u32 packed(float low, float high) { return device::to_half(low) | u32(device::to_half(high)) << 16; }
inline float low_of(u32 both) { return device::to_float(u16(both)); }
inline float high_of(u32 both) { return device::to_float(u16(both >> 16)); }
inline float exponential(float x) { return std::exp(x); }
inline float power_of_two(float x) { return std::exp2(x); }
inline float inverse_root(float x) { return 1 / std::sqrt(x); }
inline float larger(float one, float other) { return std::fmax(one, other); }
inline float lowest() { return -INFINITY; }
