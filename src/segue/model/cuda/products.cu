// The product of some rows and a matrix, for as few rows as take less time than the matrix does to be read.
//
//     out [rows, width] = rows [rows, depth] x weights [width, depth], transposed
//
// A cluster computes a tile of 64 columns, each of its RANKS programs over its part of the depth: weights and rows come 128 deep at a
// time, in a ring of stages. The first weights are asked for while the kernel before still runs. In the end the program of rank r is sent
// what the others have of its columns, adds it up in the order of ranks, and writes them.
//
// If PAIRS, the matrix is two, one after the other, and what is written is silu of the first product, times the second.
//
// It is compiled for ROWS: 8, 16, 32 or 64, at most; RANKS: 1, 2 or 4; PAIRS: 0 or 1.

#include <hopper.h>

constexpr int TILE = 64, DEPTH = 128;
constexpr int WEIGHTS_BYTES = TILE * DEPTH * 2, ROWS_BYTES = ROWS * DEPTH * 2;
constexpr int COLUMNS = TILE / RANKS, PART_BYTES = COLUMNS * ROWS * 4;  // of a program
constexpr int MULTIPLIERS = 128, THREADS = MULTIPLIERS + 32;           // the last warp copies

struct Product {
    TensorMap weights, rows;
    u16* out;
    const u16* bias;  // or null; of pairs there is none
    int num_rows, width, depth, stages;
};

// A place in the ring, and how often it has been gone through, as barriers count it.
struct Turn {
    u32 at = 0, parity = 0;
    DEVICE void next(u32 size) {
        if (++at == size) at = 0, parity ^= 1;
    }
};

struct Shared {
    u32 weights, rows, parts, full, empty, sent;

    DEVICE Shared(const Product& product) {
        weights = shared_begin();
        rows = weights + product.stages * WEIGHTS_BYTES;
        parts = rows + product.stages * ROWS_BYTES;  // [RANKS, rows, columns]
        full = parts + RANKS * PART_BYTES;
        empty = full + 8 * product.stages;
        sent = empty + 8 * product.stages;
    }
};

DEVICE void bring(const Product& product, const Shared& here) {
    const int num_chunks = product.depth / (RANKS * DEPTH), first = int(my_rank()) * num_chunks;
    const int octet = my_program() / RANKS * (TILE / 8 / (PAIRS ? 2 : 1));  // of columns, or of those of either matrix
    const int ahead = num_chunks < product.stages ? num_chunks : product.stages;
    const auto bring_weights = [&](int chunk, u32 at) {
        arrive_expecting(here.full + 8 * at, WEIGHTS_BYTES + ROWS_BYTES);
        copy_weights(here.weights + at * WEIGHTS_BYTES, &product.weights, octet, (first + chunk) * (DEPTH / 64), here.full + 8 * at);
    };
    const auto bring_rows = [&](int chunk, u32 at) {
        copy_rows(here.rows + at * ROWS_BYTES, &product.rows, (first + chunk) * (DEPTH / 64), here.full + 8 * at);
    };
    for (int chunk = 0; chunk < ahead; chunk++) bring_weights(chunk, chunk);
    wait_for_kernel_before();
    for (int chunk = 0; chunk < ahead; chunk++) bring_rows(chunk, chunk);
    Turn turn;
    for (int chunk = ahead; chunk < num_chunks; chunk++, turn.next(product.stages)) {
        wait_for(here.empty + 8 * turn.at, turn.parity);
        bring_weights(chunk, turn.at);
        bring_rows(chunk, turn.at);
    }
}

DEVICE void multiply(const Product& product, const Shared& here, float (&sums)[ROWS / 2]) {
    const int num_chunks = product.depth / (RANKS * DEPTH);
    float others[ROWS / 2] = {};  // in turns, so that one need not wait for the other
    Turn turn;
    u32 before = 0;
    for (int chunk = 0; chunk < num_chunks; chunk++, turn.next(product.stages)) {
        wait_for(here.full + 8 * turn.at, turn.parity);
        const u64 left = operand(here.weights + turn.at * WEIGHTS_BYTES), right = operand(here.rows + turn.at * ROWS_BYTES);
        products_begin();
#pragma unroll
        for (int step = 0; step < DEPTH / 16; step += 2) {
            const u64 half = step / 4, at = step % 4 * NEXT_SIXTEEN;
            const u64 a = left + half * (WEIGHTS_BYTES / 32) + at, b = right + half * (ROWS_BYTES / 32) + at;
            multiply_add<ROWS>(sums, a, b);
            multiply_add<ROWS>(others, a + NEXT_SIXTEEN, b + NEXT_SIXTEEN);
        }
        products_commit();
        products_wait<1>();  // so the chunk before this one has been read
        if (chunk > 0 && my_thread() % 32 == 0) arrive(here.empty + 8 * before);
        before = turn.at;
    }
    products_wait<0>();
#pragma unroll
    for (int at = 0; at < ROWS / 2; at++) sums[at] += others[at];
}

// Each lane has, for every eight rows, two columns of two rows: c and c + 8 of its warp's sixteen.
DEVICE void send(const Shared& here, const float (&sums)[ROWS / 2]) {
    const int warp = my_thread() / 32, lane = my_thread() % 32, rank = warp * 16 / COLUMNS;
    const u32 to = of_rank(here.parts + my_rank() * PART_BYTES, rank), barrier = of_rank(here.sent, rank);
#pragma unroll
    for (int eight = 0; eight < ROWS / 8; eight++)
        send_four(to + ((warp * 16 % COLUMNS / 16 * (ROWS / 8) + eight) * 32 + lane) * 16, sums + 4 * eight, barrier);
}

// One of the sums for a column of sixteen: where the lanes that had them put them.
DEVICE float sum_of(const Shared& here, int row, int column) {
    const u32 lane = column % 8 * 4 + row % 8 / 2, number = column % 16 / 8 * 2 + row % 2;
    const u32 at = here.parts + ((column / 16 * (ROWS / 8) + row / 8) * 32 + lane) * 16 + number * 4;
    float sum = shared_float(at);
#pragma unroll
    for (int rank = 1; rank < RANKS; rank++) sum += shared_float(at + rank * PART_BYTES);
    return sum;
}

DEVICE void finish(const Product& product, const Shared& here) {
    constexpr int WRITTEN = COLUMNS / (PAIRS ? 2 : 1), QUADS = WRITTEN / 4;
    const int begin = my_program() * WRITTEN;
    for (int item = my_thread(); item < product.num_rows * QUADS; item += MULTIPLIERS) {
        const int row = item / QUADS, column = item % QUADS * 4;
        float values[4];
#pragma unroll
        for (int at = 0; at < 4; at++) {
            const int one = column + at;
            if (PAIRS) {
                const int gate = one / 8 * 16 + one % 8;
                const float value = sum_of(here, row, gate);
                values[at] = value / (1.0f + exponential(-value)) * sum_of(here, row, gate + 8);
            } else {
                values[at] = sum_of(here, row, one);
            }
        }
        if (product.bias) {
            const uint2 bias = load_pair(product.bias + begin + column);
            values[0] += low_of(bias.x), values[1] += high_of(bias.x), values[2] += low_of(bias.y), values[3] += high_of(bias.y);
        }
        store_pair(product.out + row * product.width + begin + column, {packed(values[0], values[1]), packed(values[2], values[3])});
    }
}

KERNEL(THREADS) compute(GIVEN Product product) {
    const Shared here(product);
    let_next_kernel_begin();
    if (my_thread() >= MULTIPLIERS) {
        const int lane = my_thread() % 32;
        for (int at = lane; at < product.stages; at += 32)
            make_barrier(here.full + 8 * at, 1), make_barrier(here.empty + 8 * at, MULTIPLIERS / 32);
        if (lane == 0) make_barrier(here.sent, 1);
        fence_barriers();
        meet_warp();
        if (lane == 0) arrive_expecting(here.sent, RANKS * PART_BYTES);
        arrive_threads(1, THREADS);
        arrive_at_cluster();
        if (lane == 0) bring(product, here);
        meet_warp();
        wait_for_cluster();
        return;
    }
    arrive_at_cluster();
    meet_threads(1, THREADS);
    float sums[ROWS / 2] = {};
    multiply(product, here, sums);
    wait_for_cluster();  // so all of its programs have their barriers
    send(here, sums);
    wait_for_ranks(here.sent, 0);
    wait_for_kernel_before();
    finish(product, here);
}
