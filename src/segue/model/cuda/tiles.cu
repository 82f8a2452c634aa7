// Attention of prompts: a tile of up to 128 rows of one sequence, which follow each other, over all that came before them, paged.
//
//     begin |---- chunks that all rows see whole ----|---- a chunk or two, up to which depends on the row ----| end: the tile's last token
//
// A program does a tile for one head, and then others that nobody has taken, until none is left. Two warpgroups multiply, 64 rows each.
// One warp copies: queries, and then keys and values, 128 tokens at a time, in a ring of stages; it goes on to the next tile while this
// one's last chunks are multiplied, and its rows written. A warpgroup asks for a chunk's products of queries and keys, and with them for
// those of the weights of the chunk before and their values. The two take turns to ask: while one works out weights, what the other
// asked for is multiplied.
//
// It is compiled for HEADS and KV_HEADS, DIM (64 or 128), SIZE (of a block), STAGES, FIELDS (of a tile).

#include <hopper.h>

constexpr int ROWS = 64, CHUNK = 128, HALVES = DIM / 64;  // 64 numbers, or 128 bytes, lie in a line
constexpr int BOX = SIZE < 64 ? SIZE : 64;                // tokens that are copied at once
constexpr int PLANE = CHUNK * 128, TILE_BYTES = HALVES * PLANE;
static_assert(CHUNK / BOX * HALVES <= 32 && CHUNK == 2 * ROWS);
constexpr int GROUP = 128, WORKERS = 2 * GROUP, THREADS = WORKERS + GROUP;  // of the last ones a warp copies
constexpr int AHEAD = 2;                                                    // tiles whose queries there is room for
enum { ALL_MET = 1, MENDED, MET, TURN = MET + 2 };                          // names of meetings; the last two are of each warpgroup

struct Step {
    TensorMap queries, keys, values;
    u16* out;  // [rows, HEADS, DIM]
    const int *tables, *tiles, *num_tiles;
    int* taken;   // tiles, besides each program's first one; 0 before and after
    float scale;  // for exponentials to base 2
    int table_stride;
};

// A tile, for one head: what goes with its queries, and what follows from it.
struct Tile {
    int first_row, num_rows, head, first;  // the last one is the position of its first row; without rows, it is none
    int end, num_chunks, num_groups;       // warpgroups that have rows

    DEVICE Tile(int row, int rows, int of_head, int position) {
        first_row = row, num_rows = rows, head = of_head, first = position;
        end = first + num_rows, num_chunks = (end + CHUNK - 1) / CHUNK, num_groups = num_rows > ROWS ? 2 : 1;
    }
    DEVICE int num_seen(int group) const {  // chunks; all see all of them but the last
        const int stop = first + (group + 1) * ROWS;
        return stop < end ? (stop + CHUNK - 1) / CHUNK : num_chunks;
    }
    DEVICE void keep(u32 at) const {
        const u32 four[4] = {u32(first_row), u32(num_rows), u32(head), u32(first)};
        keep_words(at, four);
    }
    DEVICE static Tile kept(u32 at) {
        u32 four[4];
        kept_words(four, at);
        return {int(four[0]), int(four[1]), int(four[2]), int(four[3])};
    }
};

// A place in a ring, and how often it has been gone through, as barriers count it.
template <int PLACES>
struct Turn {
    u32 at = 0, parity = 0;
    DEVICE void next() {
        if (++at == PLACES) at = 0, parity ^= 1;
    }
};

// Keys or values of some chunks, or queries of some tiles.
template <int PLACES>
struct Ring {
    u32 tiles, barriers;

    DEVICE u32 tile(const Turn<PLACES>& turn) const { return tiles + turn.at * TILE_BYTES; }
    DEVICE u32 full(const Turn<PLACES>& turn) const { return barriers + 16 * turn.at; }
    DEVICE u32 empty(const Turn<PLACES>& turn) const { return barriers + 16 * turn.at + 8; }
    DEVICE void make_barriers() const {
        for (int at = 0; at < PLACES; at++) make_barrier(barriers + 16 * at, 1), make_barrier(barriers + 16 * at + 8, WORKERS / 32);
    }
    DEVICE void wait(const Turn<PLACES>& turn) const { wait_for(full(turn), turn.parity); }
    DEVICE void wait_until_empty(const Turn<PLACES>& turn) const { wait_for(empty(turn), turn.parity ^ 1); }
    DEVICE void give_back(Turn<PLACES>& turn) const {
        if (my_thread() % 32 == 0) arrive(empty(turn));
        turn.next();
    }
    DEVICE void pass(Turn<PLACES>& turn) const {  // after it has come, as all of the warp saw, so that nobody is counted twice
        wait(turn);
        meet_warp();
        give_back(turn);
    }
};

struct Shared {
    Ring<AHEAD> queries;
    Ring<STAGES> keys, values;
    u32 told;  // of each tile, four words

    DEVICE Shared() {
        queries.tiles = shared_begin();
        keys.tiles = queries.tiles + AHEAD * TILE_BYTES;
        values.tiles = keys.tiles + STAGES * TILE_BYTES;
        told = values.tiles + STAGES * TILE_BYTES;
        queries.barriers = told + AHEAD * 16;
        keys.barriers = queries.barriers + AHEAD * 16;
        values.barriers = keys.barriers + STAGES * 16;
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

    DEVICE Box(const Step& step, const Tile& tile, int table, int chunk) {
        const int begin = chunk * CHUNK, left = tile.end - begin, lane = my_thread() % 32, kv_head = tile.head / (HEADS / KV_HEADS);
        number = lane / HALVES, plane = lane % HALVES, count = left >= CHUNK ? CHUNK / BOX : (left + BOX - 1) / BOX;
        const int token = begin + number * BOX;
        if (number < count) line = (step.tables[table * step.table_stride + token / SIZE] * KV_HEADS + kv_head) * SIZE + token % SIZE;
    }
    DEVICE void bring(const Ring<STAGES>& ring, const TensorMap* map, const Turn<STAGES>& turn) const {
        if (my_thread() % 32 == 0) {  // alone: others might miss that it was empty, if it is full and empty again before they look
            ring.wait_until_empty(turn);
            arrive_expecting(ring.full(turn), count * (HALVES * BOX * 128));
        }
        meet_warp();
        if (number < count) copy_tokens(ring.tile(turn) + plane * PLANE + number * (BOX * 128), map, 64 * plane, line, ring.full(turn));
    }
};

DEVICE void bring_queries(const Step& step, const Shared& here, const Tile& tile, const Turn<AHEAD>& turn) {
    const u32 barrier = here.queries.full(turn);
    here.queries.wait_until_empty(turn);
    tile.keep(here.told + 16 * turn.at);
    arrive_expecting(barrier, tile.num_rows > 0 ? TILE_BYTES : 0);
    for (int half = 0; half < HALVES && tile.num_rows > 0; half++)
        copy_head(here.queries.tile(turn) + half * PLANE, &step.queries, 64 * half, tile.head, tile.first_row, barrier);
}

// Long ones come first, of all heads. Who takes the last one, which is none, leaves the count as it was.
DEVICE void bring_all(const Step& step, const Shared& here) {
    const int total = *step.num_tiles * HEADS;
    const bool is_first_lane = my_thread() % 32 == 0;
    Turn<AHEAD> ahead;
    Turn<STAGES> turn;
    for (int number = my_program(); number < total; ahead.next()) {
        const int* fields = step.tiles + number / HEADS * FIELDS;
        const Tile tile(fields[0], fields[1], number % HEADS, fields[3]);
        const int table = fields[2];
        Box box(step, tile, table, 0);
        wait_for_kernel_before();
        int before = 0;
        if (is_first_lane) {
            bring_queries(step, here, tile, ahead);
            before = take_one(step.taken);
        }
        for (int chunk = 0; chunk < tile.num_chunks; chunk++, turn.next()) {
            box.bring(here.keys, &step.keys, turn);
            box.bring(here.values, &step.values, turn);
            if (chunk + 1 < tile.num_chunks) box = Box(step, tile, table, chunk + 1);
        }
        before = of_lane(before, 0);
        if (before == total - 1 && is_first_lane) clear(step.taken);
        number = num_programs() + before;
    }
    wait_for_kernel_before();
    if (is_first_lane) bring_queries(step, here, Tile(0, 0, 0, 0), ahead);
}

// A warpgroup's rows

struct Place {
    Turn<AHEAD> queries;
    Turn<STAGES> keys, values;
};

// Each thread has, of rows `line` and `line + 8`, every fourth pair of columns.
struct Sums {
    float total[HALVES][32] = {}, peak[2] = {lowest(), lowest()}, mass[2] = {};
};
using Weights = float[CHUNK / 2];

DEVICE int my_group() { return my_thread() / GROUP; }
DEVICE int my_line() { return my_thread() / 32 * 16 + my_thread() % 32 / 4; }

DEVICE void ask_for_weights(Weights& weights, const Shared& here, const Place& place) {
    const u64 queries = operand(here.queries.tile(place.queries) + my_group() * (ROWS * 128)), keys = operand(here.keys.tile(place.keys));
    products_begin();
    multiply(weights, queries, keys);
#pragma unroll
    for (int sixteen = 1; sixteen < DIM / 16; sixteen++) {
        const u64 at = u64(sixteen / 4) * (PLANE / 16) + sixteen % 4 * NEXT_SIXTEEN;
        multiply_add<CHUNK>(weights, queries + at, keys + at);
    }
    products_commit();
}

DEVICE void ask_for_totals(Sums& sums, const u32 (&held)[CHUNK / 4], const Shared& here, const Place& place) {
    const u64 values = operand(here.values.tile(place.values));
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
DEVICE void mend(const Tile& tile, u32 values) {
    const bool is_alone = tile.num_groups == 1 || tile.num_seen(0) < tile.num_chunks;
    const int left = tile.end % CHUNK, readers = is_alone ? GROUP : WORKERS;
    if (left == 0) return;
    for (int item = my_thread() % readers; item < (CHUNK - left) * (DIM / 8); item += readers) {
        const u32 zeros[4] = {};
        keep_words(octet_at(values, left + item / (DIM / 8), item % (DIM / 8) * 8), zeros);
    }
    fence_products();
    meet_threads(is_alone ? MET + my_group() : MENDED, readers);  // who is alone may be a tile behind
}

// By way of where the warpgroup's queries were, so that lines are written whole.
DEVICE void give(const Sums& sums, const Step& step, const Tile& tile, u32 room) {
    const int quarter = my_thread() % 4, begin = my_group() * ROWS, count = tile.num_rows - begin < ROWS ? tile.num_rows - begin : ROWS;
#pragma unroll
    for (int which = 0; which < 2; which++) {
        const float share = 1 / sums.mass[which];
#pragma unroll
        for (int half = 0; half < HALVES; half++)
#pragma unroll
            for (int eight = 0; eight < 8; eight++) {
                const float one = sums.total[half][eight * 4 + which * 2], other = sums.total[half][eight * 4 + which * 2 + 1];
                keep_word(octet_at(room, my_line() + which * 8, half * 64 + eight * 8) + quarter * 4, packed(one * share, other * share));
            }
    }
    fence_products();  // the next queries come there
    meet_threads(MET + my_group(), GROUP);
    for (int item = my_thread() % GROUP; item < count * (DIM / 8); item += GROUP) {
        const int line = begin + item / (DIM / 8), column = item % (DIM / 8) * 8;
        u32 four[4];
        kept_words(four, octet_at(room, line, column));
        store_words(step.out + (u64(tile.first_row + line) * HEADS + tile.head) * DIM + column, four);
    }
    meet_warp();
}

DEVICE void attend(const Step& step, const Shared& here, const Tile& tile, Place& place) {
    const int group = my_group(), num_seen = tile.num_seen(group), position = tile.first + my_line();
    const bool takes_turns = tile.num_groups == 2;
    const auto wait_for_turn = [&] {
        if (takes_turns) meet_threads(TURN + group, WORKERS);
    };
    const auto end_turn = [&] {
        if (takes_turns) arrive_threads(TURN + 1 - group, WORKERS);
    };
    Sums sums;
    Weights weights;
    u32 held[CHUNK / 4];
    float fade[2];
    here.keys.wait(place.keys);
    ask_for_weights(weights, here, place);
    products_wait<0>();
    keep_order(weights);
    here.keys.give_back(place.keys);
    if (CHUNK - 1 > tile.first + group * ROWS) hide(weights, position);
    soften(weights, sums, fade, step.scale);
    absorb(sums, held, weights, fade);
    for (int chunk = 1; chunk < num_seen; chunk++) {
        here.keys.wait(place.keys);
        wait_for_turn();
        ask_for_weights(weights, here, place);
        here.values.wait(place.values);
        ask_for_totals(sums, held, here, place);
        end_turn();
        products_wait<1>();
        keep_order(weights);
        here.keys.give_back(place.keys);
        if ((chunk + 1) * CHUNK - 1 > tile.first + group * ROWS) hide(weights, position - chunk * CHUNK);
        soften(weights, sums, fade, step.scale);
        keep_order(weights);
        absorb(sums, held, weights, fade);
        here.values.give_back(place.values);
    }
    const bool sees_all = num_seen == tile.num_chunks;
    if (!sees_all) wait_for_turn(), end_turn();  // the other one goes on
    here.values.wait(place.values);
    if (sees_all) mend(tile, here.values.tile(place.values));
    ask_for_totals(sums, held, here, place);
    products_wait<0>();
#pragma unroll
    for (int half = 0; half < HALVES; half++) keep_order(sums.total[half]);
    here.values.give_back(place.values);
    if (!sees_all) here.keys.pass(place.keys), here.values.pass(place.values);
#pragma unroll
    for (int which = 0; which < 2; which++) {
        sums.mass[which] += from_lane(sums.mass[which], 1);
        sums.mass[which] += from_lane(sums.mass[which], 2);
    }
    give(sums, step, tile, here.queries.tile(place.queries));
}

DEVICE void attend_all(const Step& step, const Shared& here) {
    Place place;
    wait_for_kernel_before();
    if (my_group() == 1) arrive_threads(TURN, WORKERS);  // the first turn is the other one's
    for (;; here.queries.give_back(place.queries)) {
        here.queries.wait(place.queries);
        const Tile tile = Tile::kept(here.told + 16 * place.queries.at);
        if (tile.num_rows == 0) return;
        if (my_group() < tile.num_groups)
            attend(step, here, tile, place);
        else
            for (int chunk = 0; chunk < tile.num_chunks; chunk++) here.keys.pass(place.keys), here.values.pass(place.values);
    }
}

KERNEL(THREADS) compute(GIVEN Step step) {
    const Shared here;
    let_next_kernel_begin();
    if (my_thread() == WORKERS) {
        here.queries.make_barriers(), here.keys.make_barriers(), here.values.make_barriers();
        fence_barriers();
    }
    meet_threads(ALL_MET, THREADS);
    if (my_thread() >= WORKERS) {
        keep_registers<40>();
        if (my_thread() < WORKERS + 32) bring_all(step, here);
    } else {
        take_registers<232>();
        attend_all(step, here);
    }
}
