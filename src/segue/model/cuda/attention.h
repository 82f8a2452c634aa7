// What kernels of attention of few rows have in common: heads on their way from a product to where they are needed, and a softmax that
// goes on from one stretch of keys and values to the next.
//
// It is compiled for HEADS and KV_HEADS, DIM (64 or 128), SIZE (of a block), STAGES, HAS_NORM (of queries and keys).

#pragma once

#include <hopper.h>

constexpr int GROUP = HEADS / KV_HEADS, ALL_HEADS = HEADS + 2 * KV_HEADS;
constexpr int LANES = 64, CHUNK = 64, HALVES = DIM / 64;  // 64 numbers, or 128 bytes, lie in a line
constexpr int PLANE = CHUNK * 128, TILE_BYTES = HALVES * PLANE, STAGE_BYTES = 2 * TILE_BYTES;
constexpr int WORKERS = 128, THREADS = WORKERS + 32;  // the last warp copies
constexpr int FOUR = 4, PART = DIM / 2 / FOUR;        // threads that prepare a head, and what each has of its left and of its right half
constexpr float LOW = -1e30f;                         // below all weights, but a number: nothing fades to it

// Where eight numbers of a line lie, beginning with `column` of DIM.
DEVICE u32 octet_at(u32 tile, int line, int column) {
    return tile + column / 64 * PLANE + line * 128 + ((column % 64 / 8 ^ line & 7) << 4);
}

// Where a token's numbers of one head are, in caches and in the lines of their maps.
DEVICE u32 line_of(int block, int inside, int kv_head) { return u32(block * KV_HEADS + kv_head) * SIZE + inside; }

// What a thread has of a head: two numbers in each word, from the left half and, across from them, from the right.
struct Head {
    u32 left[PART / 2] = {}, right[PART / 2] = {};

    DEVICE void load(const u16* from) {
#pragma unroll
        for (int at = 0; at < PART / 2; at += 4) load_words(left + at, from + 2 * at), load_words(right + at, from + DIM / 2 + 2 * at);
    }
    DEVICE void store(u16* to) const {
#pragma unroll
        for (int at = 0; at < PART / 2; at += 4) store_words(to + 2 * at, left + at), store_words(to + DIM / 2 + 2 * at, right + at);
    }
    DEVICE void keep(u32 tile, int line, int part) const {
#pragma unroll
        for (int at = 0; at < PART / 2; at += 4) {
            keep_words(octet_at(tile, line, part * PART + 2 * at), left + at);
            keep_words(octet_at(tile, line, DIM / 2 + part * PART + 2 * at), right + at);
        }
    }
    DEVICE void find(u32 tile, int line, int part) {
#pragma unroll
        for (int at = 0; at < PART / 2; at += 4) {
            kept_words(left + at, octet_at(tile, line, part * PART + 2 * at));
            kept_words(right + at, octet_at(tile, line, DIM / 2 + part * PART + 2 * at));
        }
    }
};

// What a head is turned by: of its token's position.
struct Angles {
    float cosines[PART] = {}, sines[PART] = {};

    DEVICE void load(const float* all_cosines, const float* all_sines, int position, int part) {
        const u64 from = u64(position) * (DIM / 2) + part * PART;
#pragma unroll
        for (int at = 0; at < PART; at += 4) load_floats(cosines + at, all_cosines + from + at), load_floats(sines + at, all_sines + from + at);
    }
};

// Norm and rotation. All threads of a head come here; `norm` has weights if there are any.
DEVICE void turn(Head& head, const Angles& angles, const Head& norm, float eps) {
    float scale = 1;
    if (HAS_NORM) {
        float squares = 0;
#pragma unroll
        for (int at = 0; at < PART / 2; at++) {
            const float l = low_of(head.left[at]), m = high_of(head.left[at]), r = low_of(head.right[at]), s = high_of(head.right[at]);
            squares += l * l + m * m + r * r + s * s;
        }
        squares += from_neighbour(squares, 1);
        squares += from_neighbour(squares, 2);
        scale = inverse_root(squares / DIM + eps);
    }
#pragma unroll
    for (int at = 0; at < PART / 2; at++) {
        float left[2] = {low_of(head.left[at]), high_of(head.left[at])};
        float right[2] = {low_of(head.right[at]), high_of(head.right[at])};
        if (HAS_NORM) {
            left[0] *= scale * low_of(norm.left[at]), left[1] *= scale * high_of(norm.left[at]);
            right[0] *= scale * low_of(norm.right[at]), right[1] *= scale * high_of(norm.right[at]);
        }
        const float *c = angles.cosines + 2 * at, *s = angles.sines + 2 * at;
        head.left[at] = packed(left[0] * c[0] - right[0] * s[0], left[1] * c[1] - right[1] * s[1]);
        head.right[at] = packed(right[0] * c[0] + left[0] * s[0], right[1] * c[1] + left[1] * s[1]);
    }
}

// Each thread has, of lanes `line` and `line + 8`, every fourth pair of columns.
struct Sums {
    float total[HALVES][32] = {}, peak[2] = {LOW, LOW}, mass[2] = {};

    DEVICE void add_up() {  // what the four threads of a lane have of its mass
#pragma unroll
        for (int which = 0; which < 2; which++) {
            mass[which] += from_lane(mass[which], 1);
            mass[which] += from_lane(mass[which], 2);
        }
    }
};

// The first of a thread's two lines, and of its columns among eight.
DEVICE int my_line() { return my_thread() / 32 * 16 + my_thread() % 32 / 4; }
DEVICE int my_column() { return my_thread() % 4 * 2; }

// A chunk of keys and values. Of eight tokens, a lane sees those of which `room_of(eight, which)`, from a thread's first column on,
// says that so many are left.
template <class Room>
DEVICE void absorb(Sums& sums, u32 queries, u32 keys, u32 values, float scale, const Room& room_of) {
    float weights[32] = {};
    products_begin();
#pragma unroll
    for (int sixteen = 0; sixteen < DIM / 16; sixteen++) {
        const u64 at = u64(sixteen / 4) * (PLANE / 16) + sixteen % 4 * NEXT_SIXTEEN;
        multiply_add<64>(weights, operand(queries) + at, operand(keys) + at);
    }
    products_commit();
    products_wait<0>();
    keep_order(weights);
    float peak[2] = {sums.peak[0], sums.peak[1]};
#pragma unroll
    for (int eight = 0; eight < CHUNK / 8; eight++) {
#pragma unroll
        for (int which = 0; which < 2; which++) {
            const int room = room_of(eight, which);
#pragma unroll
            for (int one = 0; one < 2; one++) {
                float& weight = weights[eight * 4 + which * 2 + one];
                weight = one < room ? weight * scale : lowest();
                peak[which] = larger(peak[which], weight);
            }
        }
    }
    float fade[2];
#pragma unroll
    for (int which = 0; which < 2; which++) {
        peak[which] = larger(peak[which], from_lane(peak[which], 1));
        peak[which] = larger(peak[which], from_lane(peak[which], 2));
        fade[which] = power_of_two(sums.peak[which] - peak[which]);
        sums.mass[which] *= fade[which], sums.peak[which] = peak[which];
    }
    u32 held[16];  // as a product takes its left side from registers
#pragma unroll
    for (int at = 0; at < 32; at += 2) {
        const float one = power_of_two(weights[at] - peak[at / 2 % 2]), other = power_of_two(weights[at + 1] - peak[at / 2 % 2]);
        sums.mass[at / 2 % 2] += one + other;
        held[at / 2] = packed(one, other);
    }
#pragma unroll
    for (int half = 0; half < HALVES; half++)
#pragma unroll
        for (int at = 0; at < 32; at++) sums.total[half][at] *= fade[at / 2 % 2];
    products_begin();
#pragma unroll
    for (int sixteen = 0; sixteen < CHUNK / 16; sixteen++)
#pragma unroll
        for (int half = 0; half < HALVES; half++)
            multiply_add_held(sums.total[half], held + 4 * sixteen, operand(values + half * PLANE) + sixteen * NEXT_SIXTEEN_LINES);
    products_commit();
    products_wait<0>();
#pragma unroll
    for (int half = 0; half < HALVES; half++) keep_order(sums.total[half]);
}

// What all pieces of a row gave, by so many threads. Who has a column of a head asks for what eight of them gave at once.
template <class Step>
DEVICE void put_together(const Step& step, int row, int kv_head, int thread, int threads) {
    constexpr int EACH = DIM / 4, AT_ONCE = 8;  // threads of a head; pieces
    const int first = step.starts[row], last = step.starts[row + 1], column = thread % EACH * 4;
    for (int which = thread / EACH; which < GROUP; which += threads / EACH) {
        const int head = kv_head * GROUP + which;
        float peak = LOW, mass = 0, total[4] = {};
        for (int begin = first; begin < last; begin += AT_ONCE) {
            float parts[AT_ONCE][4], told[AT_ONCE][2], highest = peak;
#pragma unroll
            for (int at = 0; at < AT_ONCE; at++) {
                const u64 result = u64(begin + at < last ? begin + at : first) * HEADS + head;
                load_two_new(told[at], step.logs + 2 * result);
                load_floats_new(parts[at], step.sums + result * DIM + column);
            }
#pragma unroll
            for (int at = 0; at < AT_ONCE; at++) highest = larger(highest, told[at][0]);
            const float fade = power_of_two(peak - highest);
            mass *= fade, peak = highest;
#pragma unroll
            for (int each = 0; each < 4; each++) total[each] *= fade;
#pragma unroll
            for (int at = 0; at < AT_ONCE; at++) {
                const float gain = begin + at < last ? power_of_two(told[at][0] - highest) : 0;
                mass += gain * told[at][1];
#pragma unroll
                for (int each = 0; each < 4; each++) total[each] += gain * parts[at][each];
            }
        }
        u16* out = step.out + (u64(row) * HEADS + head) * DIM + column;
        const float share = 1 / mass;
        store_pair(out, {packed(total[0] * share, total[1] * share), packed(total[2] * share, total[3] * share)});
    }
}
