// Attention of beams over paged KV, with all that lies between the product before it and the one after it: norms and rotation of queries
// and keys, and new KV on its way to the cache.
//
// An item is up to 64 lanes, heads of one KV head times beams that share a stretch of KV. A cluster of RANKS programs does it: each sees
// a part of what is shared for all lanes, and what beams have for themselves for its own ones, in boxes of 16 tokens:
//
//     | newest: OWN_ROWS beams, `each` tokens of each | older: 16 of each beam, and again | its part of what is shared |
//
// In the end the program of rank r is sent what the others have of its LINES lanes, puts it together in the order of ranks, and writes
// these. What there is room for, but for this step's own tokens, is asked for while the kernel before still runs.
//
// What a beam has for itself is in slots that it lists. The last one is this step's: its key and value are made out of the product, and
// go to the cache.
//
// It is compiled for what attention.h says, FIELDS (of an item) and RANKS: 2, 4 or 8.

#include <attention.h>

constexpr int BOX = 16, BOXES = CHUNK / BOX;                    // of a chunk
constexpr int LINES = LANES / RANKS, OWN_ROWS = LINES / GROUP;  // that a program finishes
constexpr int LINE_BYTES = DIM * 4, PEAK_BYTES = 8;
static_assert(GROUP % 2 == 0 && LINES % GROUP == 0);

struct Step {
    TensorMap keys, values, key_lines, value_lines;  // of boxes, and of single tokens
    const u16* qkv;                                  // [rows, ALL_HEADS, DIM]
    u16 *k_cache, *v_cache, *out;
    const u16 *q_norm, *k_norm;
    const float *cosines, *sines;                    // [positions, DIM / 2]
    const int *positions, *slots, *tables, *items, *num_items;
    const int *tails, *tail_counts;        // slots of each row, and how many
    float scale, eps;                      // the scale is for exponentials to base 2
    int table_stride, tail_stride, shift;  // `each` is two to the power of `shift`: 4 or 16
};

struct Shared {
    u32 queries, ring, parts, peaks, full, empty, sent;

    DEVICE Shared() {
        queries = shared_begin();
        ring = queries + TILE_BYTES;
        parts = ring;  // once all programs of the cluster have seen what is in the ring
        peaks = parts + RANKS * LINES * LINE_BYTES;  // and masses
        full = ring + STAGES * STAGE_BYTES;
        empty = full + 8 * STAGES;
        sent = empty + 8 * STAGES;
    }
    DEVICE u32 keys(int chunk) const { return ring + chunk % STAGES * STAGE_BYTES; }
    DEVICE u32 values(int chunk) const { return keys(chunk) + TILE_BYTES; }
};
static_assert(LANES * (LINE_BYTES + PEAK_BYTES) <= STAGES * STAGE_BYTES);

// What a program sees of its item.
struct View {
    const Step& step;
    int first_row, num_rows, table, kv_head;
    int first_own;                    // of the rows that it finishes
    int newest, older, begin, total;  // boxes; `begin`: of what is shared, its first
    int stop;                         // of what is shared, the end of its part

    DEVICE View(const Step& given, const int* item, int head, int rank) : step(given) {
        first_row = item[0], num_rows = item[1], table = item[2], kv_head = head, first_own = rank * OWN_ROWS;
        const int shared = item[4], boxes = (shared + BOX - 1) / BOX, end = boxes * (rank + 1) / RANKS;
        begin = boxes * rank / RANKS, stop = shared < end * BOX ? shared : end * BOX;
        newest = ((OWN_ROWS << step.shift) + BOX - 1) / BOX, older = 0;
        for (int row = 0; row < OWN_ROWS; row++) {
            const int rounds = first_of_newest(count(row)) / BOX;
            older = rounds > older ? rounds : older;
        }
        older *= OWN_ROWS;
        total = newest + older + end - begin;
    }
    DEVICE int num_chunks() const { return (total + BOXES - 1) / BOXES; }

    // Rows that it finishes, by their number among these.

    DEVICE int count(int row) const {  // of tokens that it has for itself
        const int at = first_own + row;
        if (at >= num_rows) return 0;
        return step.tail_counts[first_row + at];
    }
    DEVICE int first_of_newest(int count) const { return count ? (count - 1) >> step.shift << step.shift : 0; }

    // Lines of boxes

    DEVICE int row_of(int box, int line) const {  // of one that is not shared
        return box < newest ? (box * BOX + line) >> step.shift : (box - newest) % OWN_ROWS;
    }
    DEVICE int in_turn(int token) const { return token & ((1 << step.shift) - 1); }  // of `each` tokens, where one is
    DEVICE int token_of(int box, int line, int count) const {
        return box < newest ? first_of_newest(count) + in_turn(line) : (box - newest) / OWN_ROWS * BOX + line;
    }
    DEVICE int end_of(int box, int count) const { return box < newest ? count : first_of_newest(count); }
    DEVICE int shared_token(int box) const { return (begin + box - newest - older) * BOX; }
    DEVICE bool is_shared(int box) const { return box >= newest + older; }
    DEVICE bool is_there(int box, int line) const {
        if (is_shared(box)) return shared_token(box) + line < stop;
        const int row = row_of(box, line), own = row < OWN_ROWS ? count(row) : 0;
        return token_of(box, line, own) < end_of(box, own);
    }
};

// The copying warp: half of its lanes copy keys, the others values. A lane has a line of each box, or half of all of a shared one.

struct Source {
    u32 line;
    bool is_there, is_shared;
};

// Where a lane's part of a box comes from. What each row has for itself is told by the lane of that number.
DEVICE Source source_of(const View& view, int box, int own_count) {
    const Step& step = view.step;
    const bool is_shared = view.is_shared(box);
    const int line = my_thread() % 16, row = is_shared ? 0 : view.row_of(box, line);
    const int told = of_lane(own_count, row), own = row < OWN_ROWS ? told : 0;
    const int token = is_shared ? view.shared_token(box) : view.token_of(box, line, own);
    bool is_there = box < view.total && token < (is_shared ? view.stop : view.end_of(box, own));
    is_there = is_there && (is_shared ? line < HALVES : token != own - 1);  // a row's last token is new
    const int* from = is_shared ? step.tables + view.table * step.table_stride + token / SIZE
                                : step.tails + (view.first_row + view.first_own + row) * step.tail_stride + token;
    const int found = is_there ? *from : 0;
    return {is_shared ? line_of(found, token % SIZE, view.kv_head) : line_of(found / SIZE, found % SIZE, view.kv_head), is_there, is_shared};
}

DEVICE void bring(const View& view, const Shared& here, int chunk, int own_count) {
    const int line = my_thread() % 16, stage = chunk % STAGES;
    const bool is_value = my_thread() % 32 / 16;
    const u32 barrier = here.full + 8 * stage, tile = is_value ? here.values(chunk) : here.keys(chunk);
    Source sources[BOXES];
#pragma unroll
    for (int at = 0; at < BOXES; at++) sources[at] = source_of(view, chunk * BOXES + at, own_count);
    if (my_thread() == WORKERS) wait_for(here.empty + 8 * stage, (chunk / STAGES & 1) ^ 1);
    meet_warp();
#pragma unroll
    for (int at = 0; at < BOXES; at++) {
        const Source& source = sources[at];
        if (!source.is_there) continue;
        if (source.is_shared) {
            expect(barrier, BOX * 128);
            copy_tokens(tile + line * PLANE + at * (BOX * 128), is_value ? &view.step.values : &view.step.keys, 64 * line, int(source.line), barrier);
        } else {
            expect(barrier, HALVES * 128);
#pragma unroll
            for (int half = 0; half < HALVES; half++)
                copy_tokens(tile + half * PLANE + (at * BOX + line) * 128, is_value ? &view.step.value_lines : &view.step.key_lines, 64 * half,
                            int(source.line), barrier);
        }
    }
    meet_warp();
    if (my_thread() == WORKERS) arrive(barrier);
}

DEVICE int my_part() { return my_thread() % FOUR; }
DEVICE const u16* of_product(const Step& step, int row, int head) { return step.qkv + (u64(row) * ALL_HEADS + head) * DIM + my_part() * PART; }

// A key or a value of a row that this program finishes, for four threads. It goes to the cache, and to its place among what the program
// sees: in the first stages, in a line that nothing else comes to.
struct New {
    bool is_there = false, is_value = false;
    int row = 0, slot = 0, line = 0;
    Angles angles;
    Head norm, head;

    New() = default;
    DEVICE New(const View& view, int number) {
        const Step& step = view.step;
        const int own = number / 2;
        is_there = own < OWN_ROWS && view.first_own + own < view.num_rows, is_value = number % 2;
        if (!is_there) return;
        row = view.first_row + view.first_own + own, slot = step.slots[row];
        line = (own << step.shift) + view.in_turn(view.count(own) - 1);
        if (is_value) return;
        angles.load(step.cosines, step.sines, step.positions[row], my_part());
        if (HAS_NORM) norm.load(step.k_norm + my_part() * PART);
    }
    DEVICE void load(const View& view) {
        if (is_there) head.load(of_product(view.step, row, HEADS + is_value * KV_HEADS + view.kv_head));
    }
    DEVICE void put(const View& view, const Shared& here) {
        if (!is_there) return;
        if (!is_value) turn(head, angles, norm, view.step.eps);
        head.keep(is_value ? here.values(line / CHUNK) : here.keys(line / CHUNK), line % CHUNK, my_part());
        u16* cache = is_value ? view.step.v_cache : view.step.k_cache;
        head.store(cache + u64(line_of(slot / SIZE, slot % SIZE, view.kv_head)) * DIM + my_part() * PART);
    }
};

// Where they are few, the copying warp makes them, while others are busy with queries.
constexpr bool COPIER_MAKES_NEW = 2 * OWN_ROWS * FOUR <= 32;
static_assert(2 * OWN_ROWS * FOUR <= WORKERS);

DEVICE void make_new(const View& view, const Shared& here) {
    New mine(view, my_thread() % 32 / FOUR);
    wait_for_kernel_before();
    mine.load(view);
    mine.put(view, here);
    fence_products();
}

DEVICE void bring_all(const View& view, const Shared& here) {
    const int lane = my_thread() % 32, own_count = lane < OWN_ROWS ? view.count(lane) : 0;
    int chunk = 0;
    for (; chunk < STAGES && chunk < view.num_chunks(); chunk++) bring(view, here, chunk, own_count);
    if (COPIER_MAKES_NEW) make_new(view, here);
    arrive_threads(2, THREADS);
    for (; chunk < view.num_chunks(); chunk++) bring(view, here, chunk, own_count);
    let_next_kernel_begin();  // no earlier: weights that it asks for would come first
}

// Queries

// A weight of 0 does not help against what is no number.
DEVICE void clear_nobodys(const View& view, const Shared& here, int chunk) {
    const int line = my_thread() % CHUNK, box = chunk * BOXES + line / BOX;
    if (box < view.total && view.is_there(box, line % BOX)) return;
    const u32 zeros[4] = {};
    for (int octet = my_thread() / CHUNK; octet < DIM / 8; octet += WORKERS / CHUNK) keep_words(octet_at(here.values(chunk), line, octet * 8), zeros);
}

// Four threads have two heads of a row, and, where there is much that is new, a part of that.
DEVICE void prepare(const View& view, const Shared& here) {
    const Step& step = view.step;
    const int lane = my_thread() / FOUR * 2, at = lane / GROUP, row = view.first_row + at;
    const bool is_there = at < view.num_rows;
    Angles angles;
    Head norm, first, second;
    New mine;
    if (is_there) angles.load(step.cosines, step.sines, step.positions[row], my_part());
    if (HAS_NORM) norm.load(step.q_norm + my_part() * PART);
    if (!COPIER_MAKES_NEW) mine = New(view, my_thread() / FOUR);
    for (int chunk = 0; chunk < STAGES && chunk < view.num_chunks(); chunk++) {
        wait_for(here.full + 8 * chunk, 0);
        clear_nobodys(view, here, chunk);
    }
    wait_for_cluster();  // so all of its programs have their barriers
    wait_for_kernel_before();
    const int head = view.kv_head * GROUP + lane % GROUP;
    if (is_there) first.load(of_product(step, row, head)), second.load(of_product(step, row, head + 1));
    if (!COPIER_MAKES_NEW) mine.load(view), mine.put(view, here);
    if (!is_there) return;
    turn(first, angles, norm, step.eps);
    first.keep(here.queries, lane, my_part());
    turn(second, angles, norm, step.eps);
    second.keep(here.queries, lane + 1, my_part());
}

// Where four numbers of a line are, of those that come from one program: next to each other for all threads that send them at once.
DEVICE u32 part_at(u32 parts, int rank, int sixteen, int line, int quarter) {
    return parts + (((rank * (DIM / 16) + sixteen) * LINES + line) * 4 + quarter) * 16;
}

// One of the two lanes that a thread has something of, to the program that finishes it.
DEVICE void send(const Shared& here, const Sums& sums, int which) {
    const int lane = my_line() + which * 8, rank = lane / LINES, line = lane % LINES, quarter = my_thread() % 4, mine = int(my_rank());
    const u32 to = of_rank(part_at(here.parts, mine, 0, line, quarter), rank), barrier = of_rank(here.sent, rank);
#pragma unroll
    for (int sixteen = 0; sixteen < DIM / 16; sixteen++) {
        const float* from = sums.total[sixteen / 4] + sixteen % 4 * 8 + which * 2;
        const float four[4] = {from[0], from[1], from[4], from[5]};
        send_four(to + sixteen * (LINES * 4 * 16), four, barrier);
    }
    if (quarter == 0) send_two(of_rank(here.peaks + (mine * LINES + line) * PEAK_BYTES, rank), sums.peak[which], sums.mass[which], barrier);
}

DEVICE void finish(const View& view, const Shared& here, int rank) {
    for (int number = my_thread(); number < LINES * DIM / 4; number += WORKERS) {
        const int quarter = number % 4, line = number / 4 % LINES, sixteen = number / (4 * LINES), lane = rank * LINES + line;
        if (lane / GROUP >= view.num_rows) continue;
        float told[RANKS][2], highest = LOW, mass = 0, total[4] = {};
#pragma unroll
        for (int each = 0; each < RANKS; each++) {
            shared_two(told[each], here.peaks + (each * LINES + line) * PEAK_BYTES);
            highest = larger(highest, told[each][0]);
        }
#pragma unroll
        for (int each = 0; each < RANKS; each++) {
            float part[4];
            shared_four(part, part_at(here.parts, each, sixteen, line, quarter));
            const float gain = power_of_two(told[each][0] - highest);
            mass += gain * told[each][1];
#pragma unroll
            for (int at = 0; at < 4; at++) total[at] += gain * part[at];
        }
        const int head = view.kv_head * GROUP + lane % GROUP, column = sixteen * 16 + quarter * 2;
        u16* out = view.step.out + (u64(view.first_row + lane / GROUP) * HEADS + head) * DIM + column;
        const float share = 1 / mass;
        store_word(out, packed(total[0] * share, total[1] * share));
        store_word(out + 8, packed(total[2] * share, total[3] * share));
    }
}

DEVICE void attend(const View& view, const Shared& here, int rank) {
    int own_row[2], own_end[2], own_first[2];  // of the rows of a thread's two lanes, if this program finishes them
#pragma unroll
    for (int which = 0; which < 2; which++) {
        const int row = (my_line() + which * 8) / GROUP - view.first_own;
        const bool is_mine = row >= 0 && row < OWN_ROWS;
        own_row[which] = is_mine ? row : -1, own_end[which] = is_mine ? view.count(row) : 0;
        own_first[which] = view.first_of_newest(own_end[which]);
    }
    prepare(view, here);
    fence_products(), meet_threads(2, THREADS);  // the copying warp too, with what is new
    Sums sums;
    for (int chunk = 0; chunk < view.num_chunks(); chunk++) {
        const int stage = chunk % STAGES;
        if (chunk >= STAGES) {
            wait_for(here.full + 8 * stage, chunk / STAGES & 1);
            if (!view.is_shared(chunk * BOXES) || chunk == view.num_chunks() - 1) {
                clear_nobodys(view, here, chunk);
                fence_products(), meet_threads(3, WORKERS);
            }
        }
        const u32 keys = here.keys(chunk), values = here.values(chunk);
        if (view.is_shared(chunk * BOXES)) {
            const int room = view.stop - view.shared_token(chunk * BOXES) - my_column();
            absorb(sums, here.queries, keys, values, view.step.scale, [&](int eight, int) { return room - eight * 8; });
        } else {
            absorb(sums, here.queries, keys, values, view.step.scale, [&](int eight, int which) {
                const int box = chunk * BOXES + eight / 2, line = eight % 2 * 8 + my_column();
                if (view.is_shared(box)) return view.stop - view.shared_token(box) - line;
                if (view.row_of(box, line) != own_row[which]) return 0;
                const bool is_newest = box < view.newest;
                const int token = is_newest ? own_first[which] + view.in_turn(line) : view.token_of(box, line, 0);
                return (is_newest ? own_end[which] : own_first[which]) - token;
            });
        }
        if (my_thread() % 32 == 0) arrive(here.empty + 8 * stage);
    }
    sums.add_up();
    arrive_at_cluster();  // all that was written to the ring has been read by products that have ended
    wait_for_cluster();   // so nobody looks at his any more
    send(here, sums, 0);
    send(here, sums, 1);
    wait_for_ranks(here.sent, 0);
    finish(view, here, rank);
}

KERNEL_OF(THREADS, 2) compute(GIVEN Step step) {
    const Shared here;
    const int rank = int(my_rank()), item = my_program() / RANKS / KV_HEADS, kv_head = my_program() / RANKS % KV_HEADS;
    if (item >= *step.num_items) {
        let_next_kernel_begin();
        wait_for_kernel_before();
        return;
    }
    if (my_thread() == WORKERS) {
        for (int at = 0; at < STAGES; at++) make_barrier(here.full + 8 * at, 1), make_barrier(here.empty + 8 * at, WORKERS / 32);
        make_barrier(here.sent, 1);
        fence_barriers();
        arrive_expecting(here.sent, RANKS * LINES * (LINE_BYTES + PEAK_BYTES));
    }
    arrive_at_cluster();
    meet_threads(1, THREADS);
    const View view(step, step.items + item * FIELDS, kv_head, rank);
    if (my_thread() < WORKERS) {
        attend(view, here, rank);
        return;
    }
    bring_all(view, here);
    wait_for_cluster();
    arrive_at_cluster();
    wait_for_cluster();
}
