// What a kernel says to a Hopper processor: barriers in shared memory, copies by the tensor memory accelerator, products by
// warpgroups. Addresses in shared memory are numbers of 32 bits.
//
// tests/cuda has the same words for a CPU, where each thread is a fiber, so that a kernel can be tested without a device.

#pragma once

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

struct alignas(64) TensorMap {
    u64 opaque[16];
};

#define KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads)
#define KERNEL_OF(threads, count) extern "C" __global__ void __launch_bounds__(threads, count)  // so many programs on a multiprocessor
#define GIVEN const __grid_constant__
#define DEVICE __device__ __forceinline__

// Who I am

DEVICE int my_thread() { return int(threadIdx.x); }
DEVICE int my_program() { return int(blockIdx.x); }
DEVICE int num_programs() { return int(gridDim.x); }
DEVICE u32 my_rank() {  // in my cluster
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Registers, that warpgroups begin with equally many of: each of its threads gives some away, or waits for others to

template <int COUNT>
DEVICE void keep_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
DEVICE void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Shared memory

extern __shared__ __align__(1024) unsigned char shared_memory[];
DEVICE u32 shared_begin() { return u32(__cvta_generic_to_shared(shared_memory)); }
DEVICE float shared_float(u32 at) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(at) : "memory");
    return value;
}
DEVICE void shared_two(float* two, u32 at) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(two[0]), "=f"(two[1]) : "r"(at) : "memory");
}
DEVICE void shared_four(float* four, u32 at) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(four[0]), "=f"(four[1]), "=f"(four[2]), "=f"(four[3]) : "r"(at) : "memory");
}
DEVICE void keep_word(u32 at, u32 value) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(value) : "memory"); }
DEVICE void keep_float(u32 at, float value) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(value) : "memory"); }
DEVICE u32 kept_word(u32 at) {
    u32 value;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(at) : "memory");
    return value;
}
DEVICE void keep_words(u32 at, const u32* four) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(four[0]), "r"(four[1]), "r"(four[2]), "r"(four[3]) : "memory");
}
DEVICE void kept_words(u32* four, u32 at) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(four[0]), "=r"(four[1]), "=r"(four[2]), "=r"(four[3]) : "r"(at) : "memory");
}
DEVICE void fence_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }  // they see what this thread kept
DEVICE u32 of_rank(u32 at, u32 rank) {  // the same place in another program of the cluster
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
    return there;
}

// Global memory

DEVICE uint2 load_pair(const void* from) { return *reinterpret_cast<const uint2*>(from); }
DEVICE void store_pair(void* to, uint2 value) { *reinterpret_cast<uint2*>(to) = value; }

DEVICE void store_word(void* to, u32 value) { *reinterpret_cast<u32*>(to) = value; }
DEVICE void store_two(float* to, float one, float other) { *reinterpret_cast<float2*>(to) = {one, other}; }
DEVICE void load_floats(float* four, const float* from) {
    const float4 value = *reinterpret_cast<const float4*>(from);
    four[0] = value.x, four[1] = value.y, four[2] = value.z, four[3] = value.w;
}
DEVICE void load_words(u32* four, const u16* from) {
    const uint4 value = *reinterpret_cast<const uint4*>(from);
    four[0] = value.x, four[1] = value.y, four[2] = value.z, four[3] = value.w;
}
DEVICE void load_words_once(u32* four, const u16* from) {  // which nobody else here reads
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(four[0]), "=r"(four[1]), "=r"(four[2]), "=r"(four[3]) : "l"(from));
}
DEVICE void store_words(u16* to, const u32* four) { *reinterpret_cast<uint4*>(to) = {four[0], four[1], four[2], four[3]}; }

// What other programs of this kernel wrote before they added one

DEVICE void load_floats_new(float* four, const float* from) {
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(four[0]), "=f"(four[1]), "=f"(four[2]), "=f"(four[3])
                 : "l"(from)
                 : "memory");
}
DEVICE void load_two_new(float* two, const float* from) {
    asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];" : "=f"(two[0]), "=f"(two[1]) : "l"(from) : "memory");
}
DEVICE int add_one(int* count) {  // what it was before
    int before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(count) : "memory");
    return before;
}
DEVICE int take_one(int* count) {  // the same, but that it says nothing of what else was written
    int before;
    asm volatile("atom.relaxed.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(count) : "memory");
    return before;
}
DEVICE void clear(int* count) { *count = 0; }

// Kernels that begin early

DEVICE void wait_for_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void let_next_kernel_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Threads together

DEVICE void meet_warp() { __syncwarp(); }
DEVICE void meet_threads(int name, int count) { asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(count) : "memory"); }
DEVICE float from_lane(float value, int distance) { return __shfl_xor_sync(0xffffffff, value, distance); }
DEVICE int of_lane(int value, int lane) { return __shfl_sync(0xffffffff, value, lane); }
DEVICE float from_neighbour(float value, int distance) {  // where not all of a warp come, but all of four lanes
    return __shfl_xor_sync(0xfu << (threadIdx.x & 28), value, distance);
}
DEVICE void arrive_threads(int name, int count) { asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(count) : "memory"); }
// With `fence_barriers` before it, that is enough for others to find barriers there; more would be a fence for the whole device.
DEVICE void arrive_at_cluster() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
DEVICE void wait_for_cluster() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// Barriers in shared memory: a phase ends when all have arrived and all bytes that were announced have come

DEVICE void make_barrier(u32 at, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory"); }
DEVICE void fence_barriers() { asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void arrive(u32 barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory"); }
DEVICE void arrive_expecting(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
DEVICE void expect(u32 barrier, u32 bytes) {  // from somebody who does not arrive
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
#define WAIT_FOR(SCOPE) \
    u32 done; \
    do { \
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire." SCOPE \
                     ".shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}" \
                     : "=r"(done) \
                     : "r"(barrier), "r"(parity) \
                     : "memory"); \
    } while (!done)
DEVICE void wait_for(u32 barrier, u32 parity) { WAIT_FOR("cta"); }           // this program's threads and copies
DEVICE void wait_for_ranks(u32 barrier, u32 parity) { WAIT_FOR("cluster"); }  // what others of its cluster send

// Copies: boxes of a tensor, as its map says; their bytes count for a barrier

constexpr u64 READ_ONCE = 0x12F0000000000000ull;  // these lines leave the second cache first
DEVICE void copy_weights(u32 to, const TensorMap* map, int group, int depth, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %3, %3, %4, "
        "%5}], [%2], %6;" ::"r"(to),
        "l"(map), "r"(barrier), "r"(0), "r"(group), "r"(depth), "l"(READ_ONCE)
        : "memory");
}

DEVICE void copy_rows(u32 to, const TensorMap* map, int depth, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %3, %4}], [%2];" ::"r"(to),
        "l"(map), "r"(barrier), "r"(0), "r"(depth)
        : "memory");
}

DEVICE void copy_tokens(u32 to, const TensorMap* map, int column, int line, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to), "l"(map),
        "r"(barrier), "r"(column), "r"(line)
        : "memory");
}

DEVICE void copy_head(u32 to, const TensorMap* map, int column, int head, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
        "l"(map), "r"(barrier), "r"(column), "r"(head), "r"(row)
        : "memory");
}

DEVICE void send_four(u32 to_of_rank, const float* values, u32 barrier_of_rank) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to_of_rank),
                 "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3]), "r"(barrier_of_rank)
                 : "memory");
}

DEVICE void send_two(u32 to_of_rank, float one, float other, u32 barrier_of_rank) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(to_of_rank), "f"(one),
                 "f"(other), "r"(barrier_of_rank)
                 : "memory");
}

// Products of a warpgroup: 64 columns times 8, 16, 32 or 64 rows, 16 deep. Both sides lie in shared memory as copies with a
// swizzle of 128 bytes put them there, 64 deep.

DEVICE u64 operand(u32 at) { return (u64(1) << 62) | (u64(64) << 32) | (u64(1) << 16) | ((at & 0x3ffff) >> 4); }
constexpr u64 NEXT_SIXTEEN = 2;          // of an operand: 32 bytes on
constexpr u64 NEXT_SIXTEEN_LINES = 128;  // of one whose depth goes over lines
DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int OPEN>
DEVICE void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(OPEN) : "memory");
}

#if IS_FP16
#define ELEMENT "f16"
#else
#define ELEMENT "bf16"
#endif

template <int N>
DEVICE void multiply_add(float (&sums)[N / 2], u64 columns, u64 rows);

template <>
DEVICE void multiply_add<8>(float (&d)[4], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32." ELEMENT "." ELEMENT
                 " {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "l"(a), "l"(b));
}
template <>
DEVICE void multiply_add<16>(float (&d)[8], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n16k16.f32." ELEMENT "." ELEMENT
                 " {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, 1, 1, 1, 0, 0;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
                 : "l"(a), "l"(b));
}
template <>
DEVICE void multiply_add<32>(float (&d)[16], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32." ELEMENT "." ELEMENT
                 " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, 1, 1, 1, 0, 0;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
                   "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
                 : "l"(a), "l"(b));
}
template <>
DEVICE void multiply_add<64>(float (&d)[32], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." ELEMENT "." ELEMENT
                 " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
                 "%24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, 1, 1, 1, 0, 0;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
                   "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
                   "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
                   "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
                 : "l"(a), "l"(b));
}

// The same with 128 rows, whose sums are 64 numbers of a thread

#define EIGHT(HOW, d, at) \
    HOW(d[at]), HOW(d[at + 1]), HOW(d[at + 2]), HOW(d[at + 3]), HOW(d[at + 4]), HOW(d[at + 5]), HOW(d[at + 6]), HOW(d[at + 7])
#define SIXTY_FOUR(HOW, d) \
    EIGHT(HOW, d, 0), EIGHT(HOW, d, 8), EIGHT(HOW, d, 16), EIGHT(HOW, d, 24), EIGHT(HOW, d, 32), EIGHT(HOW, d, 40), EIGHT(HOW, d, 48), \
        EIGHT(HOW, d, 56)
#define CHANGED(value) "+f"(value)
#define MADE(value) "=f"(value)
#define SIXTY_FOUR_NAMES \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, " \
    "%28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, " \
    "%54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"
template <>
DEVICE void multiply_add<128>(float (&d)[64], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." ELEMENT "." ELEMENT " " SIXTY_FOUR_NAMES ", %64, %65, 1, 1, 1, 0, 0;"
                 : SIXTY_FOUR(CHANGED, d)
                 : "l"(a), "l"(b));
}
DEVICE void multiply(float (&d)[64], u64 a, u64 b) {  // whatever the sums were
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." ELEMENT "." ELEMENT " " SIXTY_FOUR_NAMES ", %64, %65, 0, 1, 1, 0, 0;"
                 : SIXTY_FOUR(MADE, d)
                 : "l"(a), "l"(b));
}

// They are worked out before what follows, and nobody looks at them before that: a compiler does not know what waits are for.
template <int N>
DEVICE void keep_order(float (&values)[N]) {
#pragma unroll
    for (int at = 0; at < N; at++) asm volatile("" : "+f"(values[at])::"memory");
}
template <int N>
DEVICE void keep_order(u32 (&values)[N]) {
#pragma unroll
    for (int at = 0; at < N; at++) asm volatile("" : "+r"(values[at])::"memory");
}

// 64 rows that each thread has two of, four words for 16 of their depth, times 64 columns: numbers of a line; lines are the depth
DEVICE void multiply_add_held(float (&d)[32], const u32* a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." ELEMENT "." ELEMENT
                 " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
                 "%24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
                   "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
                   "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
                   "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// Two numbers of 16 bits in 32, the first one lower

DEVICE u32 packed(float low, float high) {
    u32 both;
    asm("cvt.rn." ELEMENT "x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
#if IS_FP16
DEVICE float half_of(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}
#else
DEVICE float half_of(u16 bits) { return __uint_as_float(u32(bits) << 16); }
#endif
DEVICE float low_of(u32 both) { return half_of(u16(both)); }
DEVICE float high_of(u32 both) { return half_of(u16(both >> 16)); }
DEVICE float exponential(float x) { return __expf(x); }
DEVICE float power_of_two(float x) {
    float value;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
    return value;
}
DEVICE float inverse_root(float x) { return rsqrtf(x); }
DEVICE float larger(float one, float other) { return fmaxf(one, other); }
DEVICE float lowest() { return __int_as_float(0xff800000); }  // below all numbers
DEVICE u32 lows(u32 one, u32 other) { return __byte_perm(one, other, 0x5410); }  // the lower number of each
DEVICE u32 highs(u32 one, u32 other) { return __byte_perm(one, other, 0x7632); }

// Products of a warp: 16 lines times 8 columns, 16 deep. A lane has lines `lane / 4` and 8 on, and column `lane / 4`, at depths
// `lane % 4 * 2` and 8 on, two numbers in each word; of the sums, columns `lane % 4 * 2` and the next one of either line.

DEVICE void multiply_add_warp(float (&d)[4], u32 line, u32 other_line, u32 line_on, u32 other_line_on, u32 column, u32 column_on) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." ELEMENT "." ELEMENT ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(line), "r"(other_line), "r"(line_on), "r"(other_line_on), "r"(column), "r"(column_on));
}
// Of eight lines and columns, of which a lane has line `lane / 4` and two columns from `lane % 4 * 2` on: lines become columns.
DEVICE u32 turned_over(u32 two) {
    u32 turned;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(two));
    return turned;
}
