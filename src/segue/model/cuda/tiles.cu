// Attention of prompts: a tile of up to 128 rows of one sequence, which follow each other, over all that came before them, paged.
//
//     begin |---- chunks that all rows see whole ----|---- a chunk or two, up to which depends on the row ----| end: the tile's last token
//
// A program does a tile for one head. Two warpgroups multiply, 64 rows each. One warp copies: queries, and then keys and values, 128
// tokens at a time, in a ring of stages. A warpgroup asks for a chunk's products of queries and keys, and with them for those of the
// weights of the chunk before and their values, so that it has weights to work out while there is something to multiply. The two take
// turns to ask: while one works out weights, what the other asked for is multiplied.
//
// It is compiled for HEADS and KV_HEADS, DIM (64 or 128), SIZE (of a block), STAGES, FIELDS (of a tile).

#include <hopper.h>

constexpr int ROWS = 64, CHUNK = 128, HALVES = DIM / 64;  // 64 numbers, or 128 bytes, lie in a line
constexpr int BOX = SIZE < 64 ? SIZE : 64;                // tokens that are copied at once
constexpr int PLANE = CHUNK * 128, TILE_BYTES = HALVES * PLANE;
static_assert(CHUNK / BOX * HALVES <= 32 && CHUNK == 2 * ROWS);
constexpr int GROUP = 128, WORKERS = 2 * GROUP, THREADS = WORKERS + GROUP;  // of the last ones a warp copies
enum { ALL_MET = 1, MENDED, MET, TURN = MET + 2 };                          // names of meetings; the last two are of each warpgroup

struct Step {
    TensorMap queries, keys, values;
    u16* out;  // [rows, HEADS, DIM]
    const int *tables, *tiles, *num_tiles;
    float scale;  // for exponentials to base 2
    int table_stride;
};

// As inputs.py writes it.
struct Tile {
    int first_row, num_rows, table, first;  // the last one is the position of its first row
    int end, num_chunks, num_groups;        // warpgroups that have rows

    DEVICE Tile(const int* from) {
        first_row = from[0], num_rows = from[1], table = from[2], first = from[3];
        end = first + num_rows, num_chunks = (end + CHUNK - 1) / CHUNK, num_groups = num_rows > ROWS ? 2 : 1;
    }
    DEVICE int num_seen(int group) const {  // chunks; all see all of them but the last
        const int stop = first + (group + 1) * ROWS;
        return stop < end ? (stop + CHUNK - 1) / CHUNK : num_chunks;
    }
};

// A stage of the ring, and how often it has been gone through, as barriers count it.
struct Turn {
    u32 at = 0, parity = 0;
    DEVICE void next() {
        if (++at == STAGES) at = 0, parity ^= 1;
    }
};

// Keys or values of some chunks.
struct Ring {
    u32 tiles, full, empty;

    DEVICE u32 tile(const Turn& turn) const { return tiles + turn.at * TILE_BYTES; }
    DEVICE u32 come(const Turn& turn) const { return full + 8 * turn.at; }
    DEVICE u32 read(const Turn& turn) const { return empty + 8 * turn.at; }
    DEVICE void wait(const Turn& turn) const { wait_for(come(turn), turn.parity); }
    DEVICE void give_back(const Turn& turn) const {
        if (my_thread() % 32 == 0) arrive(read(turn));
    }
};

struct Shared {
    u32 queries, queries_come;
    Ring keys, values;

    DEVICE Shared() {
        queries = shared_begin();
        keys.tiles = queries + TILE_BYTES;
        values.tiles = keys.tiles + STAGES * TILE_BYTES;
        keys.full = values.tiles + STAGES * TILE_BYTES;
        keys.empty = keys.full + 8 * STAGES;
        values.full = keys.empty + 8 * STAGES;
        values.empty = values.full + 8 * STAGES;
        queries_come = values.empty + 8 * STAGES;
    }
    DEVICE void make_barriers(int num_groups) const {
        for (int at = 0; at < STAGES; at++) {
            make_barrier(keys.full + 8 * at, 1), make_barrier(values.full + 8 * at, 1);
            make_barrier(keys.empty + 8 * at, 4 * num_groups), make_barrier(values.empty + 8 * at, 4 * num_groups);
        }
        make_barrier(queries_come, 1);
        fence_barriers();
    }
};

// Where eight numbers of a line lie, beginning with `column` of DIM.
DEVICE u32 octet_at(u32 tile, int line, int column) {
    return tile + column / 64 * PLANE + line * 128 + ((column % 64 / 8 ^ line & 7) << 4);
}

// The copying warp

// Copies of a chunk, a lane's: only of blocks that the tile's tokens are in. What lies behind those is not looked at, or written over.
struct Box {
    int number, plane, count, line = 0;  // of the chunk's boxes; `line` of the cache

    DEVICE Box(const Step& step, const Tile& tile, int kv_head, int chunk) {
        const int begin = chunk * CHUNK, left = tile.end - begin, lane = my_thread() % 32;
        number = lane / HALVES, plane = lane % HALVES, count = left >= CHUNK ? CHUNK / BOX : (left + BOX - 1) / BOX;
        const int token = begin + number * BOX;
        if (number < count)
            line = (step.tables[tile.table * step.table_stride + token / SIZE] * KV_HEADS + kv_head) * SIZE + token % SIZE;
    }
    DEVICE void bring(const Ring& ring, const TensorMap* map, const Turn& turn) const {
        if (my_thread() % 32 == 0) {  // alone: others might miss that it was empty, if it is full and empty again before they look
            wait_for(ring.read(turn), turn.parity ^ 1);
            arrive_expecting(ring.come(turn), count * (HALVES * BOX * 128));
        }
        meet_warp();
        if (number < count) copy_tokens(ring.tile(turn) + plane * PLANE + number * (BOX * 128), map, 64 * plane, line, ring.come(turn));
    }
};

DEVICE void bring_all(const Step& step, const Shared& here, const Tile& tile, int head) {
    const int kv_head = head / (HEADS / KV_HEADS);
    Box box(step, tile, kv_head, 0);
    wait_for_kernel_before();
    if (my_thread() % 32 == 0) {
        arrive_expecting(here.queries_come, TILE_BYTES);
        for (int half = 0; half < HALVES; half++)
            copy_head(here.queries + half * PLANE, &step.queries, 64 * half, head, tile.first_row, here.queries_come);
    }
    Turn turn;
    for (int chunk = 0; chunk < tile.num_chunks; chunk++, turn.next()) {
        box.bring(here.keys, &step.keys, turn);
        box.bring(here.values, &step.values, turn);
        if (chunk + 1 < tile.num_chunks) box = Box(step, tile, kv_head, chunk + 1);
    }
}

// A warpgroup's rows

// Each thread has, of rows `line` and `line + 8`, every fourth pair of columns.
struct Sums {
    float total[HALVES][32] = {}, peak[2] = {lowest(), lowest()}, mass[2] = {};
};
using Weights = float[CHUNK / 2];

DEVICE int my_group() { return my_thread() / GROUP; }
DEVICE int my_line() { return my_thread() / 32 * 16 + my_thread() % 32 / 4; }

DEVICE void ask_for_weights(Weights& weights, const Shared& here, const Turn& turn) {
    const u64 queries = operand(here.queries + my_group() * (ROWS * 128)), keys = operand(here.keys.tile(turn));
    products_begin();
    multiply(weights, queries, keys);
#pragma unroll
    for (int sixteen = 1; sixteen < DIM / 16; sixteen++) {
        const u64 at = u64(sixteen / 4) * (PLANE / 16) + sixteen % 4 * NEXT_SIXTEEN;
        multiply_add<CHUNK>(weights, queries + at, keys + at);
    }
    products_commit();
}

DEVICE void ask_for_totals(Sums& sums, const u32 (&held)[CHUNK / 4], const Shared& here, const Turn& turn) {
    const u64 values = operand(here.values.tile(turn));
    products_begin();
#pragma unroll
    for (int sixteen = 0; sixteen < CHUNK / 16; sixteen++)
#pragma unroll
        for (int half = 0; half < HALVES; half++)
            multiply_add_held(sums.total[half], held + 4 * sixteen, values + half * (PLANE / 16) + sixteen * NEXT_SIXTEEN_LINES);
    products_commit();
}

// What a row does not see: behind `last`, a column of the chunk, of the upper one of a thread's rows.
DEVICE void hide(Weights& weights, int last) {
    const int column = my_thread() % 4 * 2;
#pragma unroll
    for (int at = 0; at < CHUNK / 2; at++)
        if (at / 4 * 8 + at % 2 + column > last + at / 2 % 2 * 8) weights[at] = lowest();
}

// Exponentials, with which the sums go on once totals have been multiplied by `fade`.
DEVICE void soften(Weights& weights, Sums& sums, float (&fade)[2], float scale) {
    float peak[2] = {sums.peak[0], sums.peak[1]}, shift[2];
#pragma unroll
    for (int at = 0; at < CHUNK / 2; at++) peak[at / 2 % 2] = larger(peak[at / 2 % 2], weights[at]);
#pragma unroll
    for (int which = 0; which < 2; which++) {
        peak[which] = larger(peak[which], from_lane(peak[which], 1));
        peak[which] = larger(peak[which], from_lane(peak[which], 2));
        shift[which] = peak[which] * scale;
        fade[which] = power_of_two(sums.peak[which] * scale - shift[which]);
        sums.mass[which] *= fade[which], sums.peak[which] = peak[which];
    }
#pragma unroll
    for (int at = 0; at < CHUNK / 2; at++) {
        weights[at] = power_of_two(weights[at] * scale - shift[at / 2 % 2]);
        sums.mass[at / 2 % 2] += weights[at];
    }
}

// What was asked for has come to the totals, and they wait for more: weights as a product takes its left side from registers.
DEVICE void absorb(Sums& sums, u32 (&held)[CHUNK / 4], const Weights& weights, const float (&fade)[2]) {
    products_wait<0>();
#pragma unroll
    for (int half = 0; half < HALVES; half++) keep_order(sums.total[half]);
#pragma unroll
    for (int at = 0; at < CHUNK / 4; at++) held[at] = packed(weights[2 * at], weights[2 * at + 1]);
    keep_order(held);
#pragma unroll
    for (int half = 0; half < HALVES; half++)
#pragma unroll
        for (int at = 0; at < 32; at++) sums.total[half][at] *= fade[at / 2 % 2];
}

// Values behind the tile's last token, by all who read them: a weight of 0 does not help against no number.
DEVICE void mend(const Shared& here, const Tile& tile, const Turn& turn) {
    const bool is_alone = tile.num_groups == 1 || tile.num_seen(0) < tile.num_chunks;
    const int left = tile.end % CHUNK, readers = is_alone ? GROUP : WORKERS;
    if (left == 0) return;
    for (int item = my_thread() % readers; item < (CHUNK - left) * (DIM / 8); item += readers) {
        const u32 zeros[4] = {};
        keep_words(octet_at(here.values.tile(turn), left + item / (DIM / 8), item % (DIM / 8) * 8), zeros);
    }
    fence_products();
    meet_threads(MENDED, readers);
}

// By way of where the warpgroup's queries were, so that lines are written whole.
DEVICE void give(const Sums& sums, const Step& step, const Shared& here, const Tile& tile, int head) {
    const int quarter = my_thread() % 4, begin = my_group() * ROWS, count = tile.num_rows - begin < ROWS ? tile.num_rows - begin : ROWS;
#pragma unroll
    for (int which = 0; which < 2; which++) {
        const float share = 1 / sums.mass[which];
#pragma unroll
        for (int half = 0; half < HALVES; half++)
#pragma unroll
            for (int eight = 0; eight < 8; eight++) {
                const float one = sums.total[half][eight * 4 + which * 2], other = sums.total[half][eight * 4 + which * 2 + 1];
                keep_word(octet_at(here.queries, my_line() + which * 8, half * 64 + eight * 8) + quarter * 4, packed(one * share, other * share));
            }
    }
    meet_threads(MET + my_group(), GROUP);
    for (int item = my_thread() % GROUP; item < count * (DIM / 8); item += GROUP) {
        const int line = begin + item / (DIM / 8), column = item % (DIM / 8) * 8;
        u32 four[4];
        kept_words(four, octet_at(here.queries, line, column));
        store_words(step.out + (u64(tile.first_row + line) * HEADS + head) * DIM + column, four);
    }
}

DEVICE void attend(const Step& step, const Shared& here, const Tile& tile, int head) {
    const int group = my_group(), num_seen = tile.num_seen(group), position = tile.first + my_line();
    const bool takes_turns = tile.num_groups == 2;
    Sums sums;
    Weights weights;
    u32 held[CHUNK / 4];
    float fade[2];
    Turn turn, before;  // of keys, and of values
    wait_for_kernel_before();
    if (takes_turns && group == 1) arrive_threads(TURN, WORKERS);
    wait_for(here.queries_come, 0);
    here.keys.wait(turn);
    ask_for_weights(weights, here, turn);
    products_wait<0>();
    keep_order(weights);
    here.keys.give_back(turn);
    if (CHUNK - 1 > tile.first + group * ROWS) hide(weights, position);
    soften(weights, sums, fade, step.scale);
    absorb(sums, held, weights, fade);
    turn.next();
    if (num_seen > 1) here.keys.wait(turn);
    for (int chunk = 1; chunk < num_seen; chunk++) {
        if (takes_turns) meet_threads(TURN + group, WORKERS);
        ask_for_weights(weights, here, turn);
        here.values.wait(before);
        ask_for_totals(sums, held, here, before);
        if (takes_turns) arrive_threads(TURN + 1 - group, WORKERS);
        products_wait<1>();
        keep_order(weights);
        here.keys.give_back(turn);
        if ((chunk + 1) * CHUNK - 1 > tile.first + group * ROWS) hide(weights, position - chunk * CHUNK);
        soften(weights, sums, fade, step.scale);
        keep_order(weights);
        turn.next();
        if (chunk + 1 < num_seen) here.keys.wait(turn);
        absorb(sums, held, weights, fade);
        here.values.give_back(before);
        before.next();
    }
    if (takes_turns && num_seen < tile.num_chunks) {  // the other one goes on
        meet_threads(TURN + group, WORKERS);
        arrive_threads(TURN + 1 - group, WORKERS);
    }
    here.values.wait(before);
    if (num_seen == tile.num_chunks) mend(here, tile, before);
    ask_for_totals(sums, held, here, before);
    products_wait<0>();
#pragma unroll
    for (int half = 0; half < HALVES; half++) keep_order(sums.total[half]);
#pragma unroll
    for (int which = 0; which < 2; which++) {
        sums.mass[which] += from_lane(sums.mass[which], 1);
        sums.mass[which] += from_lane(sums.mass[which], 2);
    }
    give(sums, step, here, tile, head);
}

KERNEL(THREADS) compute(GIVEN Step step) {
    const Shared here;
    let_next_kernel_begin();
    const int number = my_program() / HEADS, head = my_program() % HEADS;  // long ones first, of all heads
    if (number >= *step.num_tiles) {
        wait_for_kernel_before();
        return;
    }
    const Tile tile(step.tiles + number * FIELDS);
    if (my_thread() == WORKERS) here.make_barriers(tile.num_groups);
    meet_threads(ALL_MET, THREADS);
    if (my_thread() >= WORKERS) {
        keep_registers<24>();
        if (my_thread() < WORKERS + 32) bring_all(step, here, tile, head);
    } else {
        take_registers<240>();
        if (my_group() < tile.num_groups) attend(step, here, tile, head);
    }
}
