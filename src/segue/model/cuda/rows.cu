// Attention of rows that see nothing together, with norms and rotation of their queries and keys before it, and new KV on its way to
// the cache.
//
// What a row and a KV head have to multiply is one to eight columns wide. A warpgroup's product would be for nobody but them, and all
// it has to read would have to be in shared memory first. So a warp does a piece of a row out of its registers, sixteen tokens at a
// time, beginning with the newest, and a multiprocessor has many such warps: while some wait, others have something to do. Where
// pieces are few, two or four warps share one, and take sixteens in turns. Rows that follow each other in a sequence have pieces
// together, as many as have columns; each sees no more than what came before it.
//
// Norms and angles are brought to shared memory before the kernel's turn. Registers are what there is least of: a kernel that keeps some
// of them in memory takes a third longer.
//
// A product of a warp has sixteen lines, eight columns, and is sixteen deep. Weights have tokens for lines and heads for columns; what
// comes of them has a value's numbers for lines. What lies side by side in memory need not do so in a product: lanes load sixteen bytes,
// and take them for whichever depths or lines they have there.
//
//     queries   column lane / 4                          numbers 8 * (lane % 4) and seven more, of each 32
//     keys      tokens lane / 4 and 8 on                 the same numbers
//     values    tokens lane % 4 * 2, 1 on, 8 on, 9 on    numbers 8 * (lane / 4) and seven more, of each 64
//     weights   tokens lane / 4 and 8 on                 columns lane % 4 * 2, and 1 on
//     totals    columns lane % 4 * 2, and 1 on           numbers as values have them
//
// A column is a head of the first row, and so on; then of the next one.
//
// It is compiled for what attention.h says, FIELDS (of a piece) and MOST_NEW (tokens of a sequence in a step).

#include <attention.h>

static_assert(GROUP <= 8 && SIZE % 16 == 0);
constexpr int SEGMENTS = DIM / 32, WARPS = 4, PROGRAM = 32 * WARPS, TOKENS = 16;
constexpr int SAID = HALVES * 16 + 4;                    // numbers that a lane says of a piece to another warp
constexpr int NORM_BYTES = DIM * 2, ANGLES_BYTES = DIM * 4;  // of a position: cosines, then sines

struct Step {
    const u16* qkv;  // [rows, ALL_HEADS, DIM]
    u16 *k_cache, *v_cache, *out;
    const u16 *q_norm, *k_norm;
    const float *cosines, *sines;  // [positions, DIM / 2]
    const int *positions, *slots, *tables, *own, *counts, *starts;
    float *sums, *logs;
    int* arrivals;
    float scale, eps;  // the scale is for exponentials to base 2
    int table_stride;
};

DEVICE int my_lane() { return my_thread() % 32; }
DEVICE int my_warp() { return my_thread() / 32; }

// A piece of some rows, as work.py writes it, for one KV head; and which of its sixteens a warp takes: the last but `turn`, and so on.
struct Piece {
    int row, rows, table, begin, end, result, known, position, kv_head, turn, turns, count;  // `position`: of the first row

    DEVICE Piece(const Step& step, int number, int together) {  // warps that share it: 1, 2 or 4
        const int* from = step.own + number / KV_HEADS * FIELDS;
        row = from[0], rows = from[1], table = from[2], begin = from[3], end = from[4], result = from[5], known = from[6];
        kv_head = number % KV_HEADS, position = step.positions[row];
        turn = my_warp() % together, turns = together;
        const int sixteens = (end - begin + TOKENS - 1) / TOKENS;
        count = (sixteens - turn + turns - 1) / turns;
    }
    DEVICE int token(int number) const {  // with which a sixteen begins
        return begin + ((end - begin - 1) / TOKENS - turn - number * turns) * TOKENS;
    }
    DEVICE bool has_new(int number) const { return token(number) + TOKENS > known; }
    DEVICE bool is_new(int token) const { return token >= known && token < end; }
    DEVICE int row_of(int token) const { return row - (position - token); }  // of one that is new
    DEVICE bool writes(int token) const { return token >= position && token < end; }
    DEVICE u64 place_of_new(const Step& step, int token) const {  // in a cache
        const int slot = step.slots[row_of(token)];
        return u64(line_of(slot / SIZE, slot % SIZE, kv_head)) * DIM;
    }
    DEVICE bool has(int column) const { return column < rows * GROUP; }
    DEVICE int room(int column, int token) const {  // how many tokens from this one on it sees
        const int its_end = position + column / GROUP + 1;
        return (its_end < end ? its_end : end) - token;
    }
};

// Which blocks a warp's sixteens lie in: each lane knows of one of them.
struct Blocks {
    int mine = 0;

    DEVICE int of(const Step& step, const Piece& piece, int number) {
        if (number % 32 == 0) {
            const int upto = number + my_lane();
            mine = upto < piece.count ? step.tables[piece.table * step.table_stride + piece.token(upto) / SIZE] : 0;
        }
        return of_lane(mine, number % 32);
    }
};

// What a lane has of a query or a key.
struct Line {
    u32 words[SEGMENTS][4];

    DEVICE void clear() {
#pragma unroll
        for (int at = 0; at < SEGMENTS; at++) words[at][0] = words[at][1] = words[at][2] = words[at][3] = 0;
    }
    DEVICE void load(const u16* from) {
#pragma unroll
        for (int at = 0; at < SEGMENTS; at++) load_words_once(words[at], from + 32 * at + 8 * (my_lane() % 4));
    }
    DEVICE void store(u16* to) const {
#pragma unroll
        for (int at = 0; at < SEGMENTS; at++) store_words(to + 32 * at + 8 * (my_lane() % 4), words[at]);
    }
};

// A warp's own shared memory: norms of queries and keys, and the angles of all new positions of its piece; then what it says of its
// piece to another warp.
struct Shared {
    u32 norms, angles, said, is_last;

    DEVICE Shared() {
        norms = shared_begin() + my_warp() * BYTES;
        angles = norms + 2 * NORM_BYTES, said = norms, is_last = shared_begin() + WARPS * BYTES + my_warp() * 4;
    }
    DEVICE u32 norm(bool of_key) const { return norms + of_key * NORM_BYTES; }

    static constexpr int NORMS_AND_ANGLES = 2 * NORM_BYTES + MOST_NEW * ANGLES_BYTES;
    static constexpr int BYTES = NORMS_AND_ANGLES > SAID * 128 ? NORMS_AND_ANGLES : SAID * 128;

    DEVICE void bring(const Step& step, const Piece& piece) const {
        const int lane = my_lane(), half = lane / 16, at = lane % 16;
        u32 words[4];
        meet_warp();  // nobody looks at the last piece's any more
        if (HAS_NORM && at < DIM / 8) {
            load_words(words, (half ? step.k_norm : step.q_norm) + at * 8);
            keep_words(norm(half) + at * 16, words);
        }
        const float* from = half ? step.sines : step.cosines;
        for (int position = piece.known; at < DIM / 8 && position < piece.position + piece.rows; position++) {
            load_words(words, reinterpret_cast<const u16*>(from + u64(position) * (DIM / 2) + at * 4));
            keep_words(angles + (position - piece.known) * ANGLES_BYTES + half * (ANGLES_BYTES / 2) + at * 16, words);
        }
        meet_warp();
    }
};

// Norm and rotation. All four lanes of a line come here.
DEVICE void turn(Line& line, u32 norm, u32 angles, float eps) {
    const int column = my_lane() % 4 * 8;
    float scale = 1;
    if (HAS_NORM) {
        float squares = 0;
#pragma unroll
        for (int at = 0; at < SEGMENTS; at++)
#pragma unroll
            for (int word = 0; word < 4; word++) {
                const float low = low_of(line.words[at][word]), high = high_of(line.words[at][word]);
                squares += low * low + high * high;
            }
        squares += from_neighbour(squares, 1);
        squares += from_neighbour(squares, 2);
        scale = inverse_root(squares / DIM + eps);
    }
#pragma unroll
    for (int at = 0; at < SEGMENTS / 2; at++) {
        u32 *left = line.words[at], *right = line.words[at + SEGMENTS / 2], of_left[4], of_right[4];
        if (HAS_NORM) {
            kept_words(of_left, norm + 64 * at + 2 * column);
            kept_words(of_right, norm + DIM + 64 * at + 2 * column);
        }
#pragma unroll
        for (int two = 0; two < 2; two++) {
            float c[4], s[4];
            shared_four(c, angles + 128 * at + 4 * column + 16 * two);
            shared_four(s, angles + ANGLES_BYTES / 2 + 128 * at + 4 * column + 16 * two);
#pragma unroll
            for (int word = 2 * two; word < 2 * two + 2; word++) {
                float l[2] = {low_of(left[word]), high_of(left[word])}, r[2] = {low_of(right[word]), high_of(right[word])};
                if (HAS_NORM) {
                    l[0] *= scale * low_of(of_left[word]), l[1] *= scale * high_of(of_left[word]);
                    r[0] *= scale * low_of(of_right[word]), r[1] *= scale * high_of(of_right[word]);
                }
                const float *mine_c = c + word % 2 * 2, *mine_s = s + word % 2 * 2;
                left[word] = packed(l[0] * mine_c[0] - r[0] * mine_s[0], l[1] * mine_c[1] - r[1] * mine_s[1]);
                right[word] = packed(r[0] * mine_c[0] + l[0] * mine_s[0], r[1] * mine_c[1] + l[1] * mine_s[1]);
            }
        }
    }
}

// Sixteen keys and values. What came with earlier steps is brought from the cache, what is new made of the product; what lies behind a
// piece's end is zeros.
struct Keys {
    Line lines[2];

    DEVICE static int token(int which) { return my_lane() / 4 + 8 * which; }

    DEVICE void bring(const Step& step, const Piece& piece, int block, int first) {
        const u16* from = step.k_cache + u64(line_of(block, first % SIZE, piece.kv_head)) * DIM;
#pragma unroll
        for (int which = 0; which < 2; which++) {
            if (first + token(which) < piece.known && first + token(which) < piece.end)
                lines[which].load(from + token(which) * DIM);
            else
                lines[which].clear();
        }
    }
    DEVICE static const u16* place(const Step& step, const Piece& piece, int token) {
        return step.qkv + (u64(piece.row_of(token)) * ALL_HEADS + HEADS + piece.kv_head) * DIM;
    }
    DEVICE void load_new(const Step& step, const Piece& piece, int first) {
#pragma unroll
        for (int which = 0; which < 2; which++)
            if (piece.is_new(first + token(which))) lines[which].load(place(step, piece, first + token(which)));
    }
};

struct Values {
    u32 words[4][HALVES][4];

    DEVICE static int token(int which) { return my_lane() % 4 * 2 + which % 2 + which / 2 * 8; }
    DEVICE static int column(int half) { return 64 * half + 8 * (my_lane() / 4); }

    DEVICE void load(const u16* from, int which) {
#pragma unroll
        for (int half = 0; half < HALVES; half++) load_words_once(words[which][half], from + column(half));
    }
    DEVICE void bring(const Step& step, const Piece& piece, int block, int first) {
        const u16* from = step.v_cache + u64(line_of(block, first % SIZE, piece.kv_head)) * DIM;
#pragma unroll
        for (int which = 0; which < 4; which++) {
            if (first + token(which) < piece.known && first + token(which) < piece.end)
                load(from + token(which) * DIM, which);
            else
#pragma unroll
                for (int half = 0; half < HALVES; half++)
                    words[which][half][0] = words[which][half][1] = words[which][half][2] = words[which][half][3] = 0;
        }
    }
    DEVICE void load_new(const Step& step, const Piece& piece, int first) {
#pragma unroll
        for (int which = 0; which < 4; which++) {
            const int mine = first + token(which);
            if (piece.is_new(mine)) load(Keys::place(step, piece, mine) + KV_HEADS * DIM, which);
        }
    }
    DEVICE void store_new(const Step& step, const Piece& piece, int first) const {
#pragma unroll
        for (int which = 0; which < 4; which++) {
            const int mine = first + token(which);
            if (!piece.writes(mine)) continue;
            u16* to = step.v_cache + piece.place_of_new(step, mine);
#pragma unroll
            for (int half = 0; half < HALVES; half++) store_words(to + column(half), words[which][half]);
        }
    }
};

// What has just come of the product: queries, if they are `fresh`, and keys. One after the other by the same instructions, since these
// have to be read too.
DEVICE void turn_new(Line& queries, Keys& keys, const Step& step, const Shared& here, const Piece& piece, int first, bool are_fresh) {
    const int column = my_lane() / 4;
#pragma unroll 1
    for (int which = are_fresh ? -1 : 0; which < 2; which++) {
        const bool is_query = which < 0;
        const int token = is_query ? piece.position + column / GROUP : first + Keys::token(which);
        if (is_query ? !piece.has(column) : !piece.is_new(token)) continue;
        Line line;
#pragma unroll
        for (int at = 0; at < 4 * SEGMENTS; at++) {
            const u32 of_query = queries.words[at / 4][at % 4], of_key = keys.lines[0].words[at / 4][at % 4];
            line.words[at / 4][at % 4] = is_query ? of_query : which ? keys.lines[1].words[at / 4][at % 4] : of_key;
        }
        turn(line, here.norm(!is_query), here.angles + (token - piece.known) * ANGLES_BYTES, step.eps);
#pragma unroll
        for (int at = 0; at < 4 * SEGMENTS; at++) {
            const u32 turned = line.words[at / 4][at % 4];
            if (is_query) queries.words[at / 4][at % 4] = turned;
            if (which == 0) keys.lines[0].words[at / 4][at % 4] = turned;
            if (which == 1) keys.lines[1].words[at / 4][at % 4] = turned;
        }
        if (!is_query && piece.writes(token)) line.store(step.k_cache + piece.place_of_new(step, token));
    }
}

// Of two columns.
struct Totals {
    float total[HALVES][4][4] = {}, peak[2] = {LOW, LOW}, mass[2] = {};

    DEVICE void fade(const float (&by)[2]) {
#pragma unroll
        for (int half = 0; half < HALVES; half++)
#pragma unroll
            for (int at = 0; at < 16; at++) total[half][at / 4][at % 4] *= by[at % 2];
        mass[0] *= by[0], mass[1] *= by[1];
    }
    DEVICE void add_up() {  // what lanes have of a column's mass
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2)
            mass[0] += from_lane(mass[0], distance), mass[1] += from_lane(mass[1], distance);
    }
    DEVICE void say(u32 at) const {
        const auto say = [&](int number, float value) { keep_float(at + 4 * (32 * number + my_lane()), value); };
#pragma unroll
        for (int number = 0; number < HALVES * 16; number++) say(number, total[number / 16][number % 16 / 4][number % 4]);
        say(SAID - 4, peak[0]), say(SAID - 3, peak[1]), say(SAID - 2, mass[0]), say(SAID - 1, mass[1]);
    }
    DEVICE void hear(u32 at) {  // what another warp said
        const auto said = [&](int number) { return shared_float(at + 4 * (32 * number + my_lane())); };
        float by[2], gain[2];
#pragma unroll
        for (int which = 0; which < 2; which++) {
            const float other = said(SAID - 4 + which), highest = larger(peak[which], other);
            by[which] = power_of_two(peak[which] - highest), gain[which] = power_of_two(other - highest), peak[which] = highest;
        }
        fade(by);
#pragma unroll
        for (int number = 0; number < HALVES * 16; number++) total[number / 16][number % 16 / 4][number % 4] += gain[number % 2] * said(number);
        mass[0] += gain[0] * said(SAID - 2), mass[1] += gain[1] * said(SAID - 1);
    }
};

// Weights of sixteen tokens for two columns: of a token and of one 8 on.
DEVICE void weigh(float (&weights)[4], const Line& queries, const Keys& keys) {
    float others[4] = {};  // in turns, so that one need not wait for the other
#pragma unroll
    for (int at = 0; at < SEGMENTS; at++) {
        const u32 *one = keys.lines[0].words[at], *other = keys.lines[1].words[at], *query = queries.words[at];
        multiply_add_warp(weights, one[0], other[0], one[1], other[1], query[0], query[1]);
        multiply_add_warp(others, one[2], other[2], one[3], other[3], query[2], query[3]);
    }
#pragma unroll
    for (int at = 0; at < 4; at++) weights[at] += others[at];
}

// What they come to, as products take them, tokens for depths. `room`: how many of the sixteen tokens either column sees.
struct Shares {
    u32 early, late;
};
DEVICE Shares shares_of(float (&weights)[4], Totals& totals, float scale, const int (&room)[2]) {
    float peak[2] = {totals.peak[0], totals.peak[1]}, fade[2];
#pragma unroll
    for (int at = 0; at < 4; at++) {
        weights[at] = Keys::token(at / 2) < room[at % 2] ? weights[at] * scale : lowest();
        peak[at % 2] = larger(peak[at % 2], weights[at]);
    }
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2)
        peak[0] = larger(peak[0], from_lane(peak[0], distance)), peak[1] = larger(peak[1], from_lane(peak[1], distance));
#pragma unroll
    for (int which = 0; which < 2; which++) fade[which] = power_of_two(totals.peak[which] - peak[which]), totals.peak[which] = peak[which];
    totals.fade(fade);
#pragma unroll
    for (int at = 0; at < 4; at++) weights[at] = power_of_two(weights[at] - peak[at % 2]), totals.mass[at % 2] += weights[at];
    return {turned_over(packed(weights[0], weights[1])), turned_over(packed(weights[2], weights[3]))};
}

DEVICE void add(Totals& totals, const Shares& shares, const Values& values) {
#pragma unroll
    for (int half = 0; half < HALVES; half++)
#pragma unroll
        for (int at = 0; at < 4; at++) {
            const u32 one = values.words[0][half][at], next = values.words[1][half][at];
            const u32 late = values.words[2][half][at], last = values.words[3][half][at];
            multiply_add_warp(totals.total[half][at], lows(one, next), highs(one, next), lows(late, last), highs(late, last), shares.early, shares.late);
        }
}

// To where rows' output is to be, or, if they have so many other pieces, where they are put together.
DEVICE void give(const Step& step, const Piece& piece, const Totals& totals, int others) {
    const bool is_whole = others == 0;
#pragma unroll
    for (int which = 0; which < 2; which++) {
        const int column = my_lane() % 4 * 2 + which, row = column / GROUP;
        if (!piece.has(column)) continue;
        const float share = 1 / totals.mass[which];
        const int to = is_whole ? piece.row + row : piece.result + row * (others + 1);
        const u64 at = u64(to) * HEADS + piece.kv_head * GROUP + column % GROUP;
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
            const auto number = [&](int of) { return totals.total[half][of / 2][of % 2 * 2 + which]; };
            if (is_whole) {
                u32 words[4];
#pragma unroll
                for (int two = 0; two < 4; two++) words[two] = packed(number(2 * two) * share, number(2 * two + 1) * share);
                store_words(step.out + at * DIM + Values::column(half), words);
            } else {
#pragma unroll
                for (int two = 0; two < 4; two++)
                    store_two(step.sums + at * DIM + Values::column(half) + 2 * two, number(2 * two), number(2 * two + 1));
            }
        }
        if (!is_whole && my_lane() < 4) store_two(step.logs + 2 * at, totals.peak[which], totals.mass[which]);
    }
}

// Of some rows' pieces one is last: its warps put them together, and leave the count as it was.
DEVICE void merge(const Step& step, const Piece& piece, int others, u32 is_last) {
    const int name = 1 + my_warp() / piece.turns, count = 32 * piece.turns, thread = my_thread() % count;
    meet_threads(name, count);
    if (thread == 0) {
        int* arrived = step.arrivals + piece.row * KV_HEADS + piece.kv_head;
        const bool last = add_one(arrived) == others;
        if (last) clear(arrived);
        keep_word(is_last, last);
    }
    meet_threads(name, count);
    for (int at = 0; kept_word(is_last) && at < piece.rows; at++) put_together(step, piece.row + at, piece.kv_head, thread, count);
}

DEVICE void attend(const Step& step, const Shared& here, const Piece& piece, bool& has_waited) {
    Blocks blocks;
    Keys keys;
    Values values;
    Line queries;
    const int column = my_lane() / 4, others = step.starts[piece.row + 1] - step.starts[piece.row] - 1;
    const auto block = [&](int number) { return blocks.of(step, piece, number); };
    if (piece.count > 0) {
        const int first = block(0);
        keys.bring(step, piece, first, piece.token(0));
        values.bring(step, piece, first, piece.token(0));
    }
    here.bring(step, piece);
    if (!has_waited) wait_for_kernel_before(), has_waited = true;
    queries.clear();
    if (piece.has(column)) {
        const int head = piece.kv_head * GROUP + column % GROUP;
        queries.load(step.qkv + (u64(piece.row + column / GROUP) * ALL_HEADS + head) * DIM);
    }
    Totals totals;
    for (int number = 0; number < piece.count; number++) {
        const bool has_next = number + 1 < piece.count, has_new = piece.has_new(number);
        const int first = piece.token(number), next = has_next ? block(number + 1) : 0;
        if (has_new) keys.load_new(step, piece, first), values.load_new(step, piece, first);
        if (has_new || number == 0) turn_new(queries, keys, step, here, piece, first, number == 0);
        if (has_new) values.store_new(step, piece, first);
        float weights[4] = {};
        weigh(weights, queries, keys);
        if (has_next) keys.bring(step, piece, next, piece.token(number + 1));
        const int two = my_lane() % 4 * 2, room[2] = {piece.room(two, first), piece.room(two + 1, first)};
        const Shares shares = shares_of(weights, totals, step.scale, room);
        add(totals, shares, values);
        if (has_next) values.bring(step, piece, next, piece.token(number + 1));
    }
    totals.add_up();
    const int name = 1 + my_warp() / piece.turns, count = 32 * piece.turns;
    if (piece.turns > 1) {
        meet_warp();  // angles have been read
        if (piece.turn > 0) totals.say(here.said);
        meet_threads(name, count);
        for (int other = 1; piece.turn == 0 && other < piece.turns; other++) totals.hear(here.said + other * Shared::BYTES);
    }
    if (piece.turn == 0) give(step, piece, totals, others);
    if (others > 0) merge(step, piece, others, here.is_last - my_warp() % piece.turns * 4);
}

KERNEL_OF(PROGRAM, 2) compute(GIVEN Step step) {
    const Shared here;
    let_next_kernel_begin();
    const int total = step.counts[0] * KV_HEADS, warps = num_programs() * WARPS;
    const int together = 4 * total <= warps ? 4 : 2 * total <= warps ? 2 : 1, each = WARPS / together;  // who shares a piece has no other
    bool has_waited = false;
    for (int number = my_program() * each + my_warp() / together; number < total; number += num_programs() * each)
        attend(step, here, Piece(step, number, together), has_waited);
    if (!has_waited) wait_for_kernel_before();
}
