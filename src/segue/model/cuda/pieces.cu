// Attention of a few rows over paged KV, with all that lies between the product before it and the one after it: norms and rotation of
// queries and keys, and new KV on its way to the cache.
//
// What is to be done is a list of pieces (work.py). A piece is a stretch of KV and its lanes: the heads of one row, or of all rows that
// share the stretch, up to 64 of them. A program does pieces of one KV head, one after the other. One warp brings the stretch, 64 tokens
// at a time, in a ring of stages, and begins before the kernel's turn has come, since what it reads is older than the step:
//
//     begin |------------- KV of earlier steps -------------|- known -- this step's own tokens --| end
//
// Keys and values of this step's own tokens, which end the stretch of a single row, do not come from memory: whoever needs them makes
// them out of the product, and the row that they are of writes them to the cache.
//
// What a piece gives is a row's output if the row has no other, or else a sum with its peak and mass, as `_together` in attention.py
// reads them. If the step MERGES, whoever is last of a row's pieces puts them together.
//
// It is compiled for what attention.h says, and FIELDS (of a piece).

#include <attention.h>

constexpr int BOX = SIZE < CHUNK ? SIZE : CHUNK;  // tokens that are copied at once
constexpr int ROUNDS = LANES * FOUR / WORKERS;    // how often a thread prepares a part of a head
static_assert(CHUNK / BOX * 2 * HALVES <= 32);

struct Step {
    TensorMap keys, values;
    const u16* qkv;  // [rows, ALL_HEADS, DIM]
    u16 *k_cache, *v_cache, *out;
    const u16 *q_norm, *k_norm;
    const float *cosines, *sines;  // [positions, DIM / 2]
    const int *positions, *slots, *tables, *own, *shared, *counts, *starts;
    float *sums, *logs;
    int* arrivals;
    float scale, eps;  // the scale is for exponentials to base 2
    int table_stride, merges;
};

// A piece, as work.py writes it.
struct Piece {
    int first_row, table, begin, end, result, known, num_lanes, num_chunks;
    bool is_own;

    DEVICE Piece(const int* from, bool own) {
        first_row = from[0], table = from[2], begin = from[3], end = from[4], result = from[5], known = from[6];
        num_lanes = from[1] * GROUP, num_chunks = (end - begin + CHUNK - 1) / CHUNK, is_own = own;
    }
    DEVICE int first_new() const { return known < begin ? begin : known; }  // of this step's own tokens; `end` if there is none
};

// What a program does. Pieces that rows share, which take longest, come first; it goes back and forth, so that who had a long one is the
// last to get another.
struct Pieces {
    const Step& step;
    int num_shared, total, round = 0, slot, slots;

    DEVICE Pieces(const Step& given) : step(given) {
        num_shared = step.shared ? step.counts[1] : 0, total = num_shared + (step.own ? step.counts[0] : 0);
        slot = my_program() / KV_HEADS, slots = num_programs() / KV_HEADS;
    }
    DEVICE int number() const { return round * slots + (round % 2 ? slots - 1 - slot : slot); }
    DEVICE bool is_over() const { return number() >= total; }
    DEVICE void next() { round++; }
    DEVICE Piece piece() const {
        const int at = number();
        return at < num_shared ? Piece(step.shared + at * FIELDS, false) : Piece(step.own + (at - num_shared) * FIELDS, true);
    }
};

// A stage of the ring, and how often it has been gone through, as barriers count it.
struct Turn {
    u32 at = 0, parity = 0;
    DEVICE void next() {
        if (++at == STAGES) at = 0, parity ^= 1;
    }
};

struct Shared {
    u32 queries, ring, full, empty, is_last;

    DEVICE Shared() {
        queries = shared_begin();
        ring = queries + TILE_BYTES;
        full = ring + STAGES * STAGE_BYTES;
        empty = full + 8 * STAGES;
        is_last = empty + 8 * STAGES;
    }
    DEVICE u32 keys(u32 stage) const { return ring + stage * STAGE_BYTES; }
    DEVICE u32 values(u32 stage) const { return keys(stage) + TILE_BYTES; }
};

// The copying warp

// Only blocks that something is known of; what lies behind that is written over, or not looked at. A lane has one copy at most.
DEVICE void bring(const Step& step, const Shared& here, const Piece& piece, int kv_head, int chunk, const Turn& turn) {
    const int begin = piece.begin + chunk * CHUNK, stop = piece.known < piece.end ? piece.known : piece.end;
    const int left = stop - begin, boxes = left <= 0 ? 0 : left >= CHUNK ? CHUNK / BOX : (left + BOX - 1) / BOX;
    const int lane = my_thread() % 32, box = lane / (2 * HALVES), plane = lane % HALVES, token = begin + box * BOX;
    const bool is_value = lane / HALVES % 2, has_copy = box < boxes;
    const int block = has_copy ? step.tables[piece.table * step.table_stride + token / SIZE] : 0;
    const u32 barrier = here.full + 8 * turn.at;
    if (lane == 0) {  // alone: others might miss that it was empty, if it is full and empty again before they look
        wait_for(here.empty + 8 * turn.at, turn.parity ^ 1);
        arrive_expecting(barrier, boxes * (2 * HALVES * BOX * 128));
    }
    meet_warp();
    if (!has_copy) return;
    const u32 tile = is_value ? here.values(turn.at) : here.keys(turn.at);
    copy_tokens(tile + plane * PLANE + box * (BOX * 128), is_value ? &step.values : &step.keys, 64 * plane,
                int(line_of(block, token % SIZE, kv_head)), barrier);
}

DEVICE void bring_all(const Step& step, const Shared& here, int kv_head) {
    Turn turn;
    for (Pieces pieces(step); !pieces.is_over(); pieces.next()) {
        const Piece piece = pieces.piece();
        for (int chunk = 0; chunk < piece.num_chunks; chunk++, turn.next()) bring(step, here, piece, kv_head, chunk, turn);
    }
}

// Queries, and new keys and values

// One head of one row, to be prepared by four threads. All of it is older than the step.
struct Task {
    enum { NOTHING, QUERY, KEY, VALUE } what = NOTHING;
    int row = 0, head = 0, position = 0, slot = 0, line = 0;  // `line`: where it is to be, of what is new

    Task() = default;
    // The piece's queries; then a key and a value of each of its new tokens.
    DEVICE Task(const Step& step, const Piece& piece, int kv_head, int number) {
        if (number < piece.num_lanes) {
            what = QUERY, row = piece.first_row + number / GROUP, head = kv_head * GROUP + number % GROUP;
            position = step.positions[row];
            return;
        }
        const int extra = number - piece.num_lanes, token = piece.first_new() + extra / 2;
        if (!piece.is_own || token >= piece.end) return;
        row = piece.first_row - (step.positions[piece.first_row] - token), line = token - piece.begin, position = token;
        what = extra % 2 ? VALUE : KEY, head = HEADS + (extra % 2 ? KV_HEADS : 0) + kv_head, slot = step.slots[row];
    }
};

DEVICE void load(Head& head, const Step& step, const Task& task, int part) {
    if (task.what != Task::NOTHING) head.load(step.qkv + (u64(task.row) * ALL_HEADS + task.head) * DIM + part * PART);
}

DEVICE void write_kv(const Head& head, const Step& step, const Task& task, int kv_head, int part) {
    u16* to = task.what == Task::VALUE ? step.v_cache : step.k_cache;
    head.store(to + u64(line_of(task.slot / SIZE, task.slot % SIZE, kv_head)) * DIM + part * PART);
}

// One of the two lanes that a thread has something of.
DEVICE void give(const Sums& sums, const Step& step, const Piece& piece, int kv_head, int which, bool is_whole) {
    const int lane = my_line() + which * 8;
    if (lane >= piece.num_lanes) return;
    const int row = lane / GROUP, head = kv_head * GROUP + lane % GROUP;
    const u64 result = u64(piece.result + row) * HEADS + head;
    u16* out = step.out + (u64(piece.first_row + row) * HEADS + head) * DIM;
    const float share = 1 / sums.mass[which];
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
#pragma unroll
        for (int eight = 0; eight < 8; eight++) {
            const float one = sums.total[half][eight * 4 + which * 2], other = sums.total[half][eight * 4 + which * 2 + 1];
            const int column = half * 64 + eight * 8 + my_column();
            if (is_whole)
                store_word(out + column, packed(one * share, other * share));
            else
                store_two(step.sums + result * DIM + column, one, other);
        }
    }
    if (!is_whole && my_column() == 0) store_two(step.logs + 2 * result, sums.peak[which], sums.mass[which]);
}

// Of a row's pieces one is last: it puts them together, and leaves the count as it was.
DEVICE void merge(const Step& step, const Shared& here, const Piece& piece, int kv_head, int others) {
    meet_threads(2, WORKERS);
    if (my_thread() == 0) {
        int* arrived = step.arrivals + piece.first_row * KV_HEADS + kv_head;
        const bool is_last = add_one(arrived) == others;
        if (is_last) clear(arrived);
        keep_word(here.is_last, is_last);
    }
    meet_threads(2, WORKERS);
    if (kept_word(here.is_last)) put_together(step, piece.first_row, kv_head, my_thread(), WORKERS);
}

// Queries and what is new, into the place of queries; what is new stays there until its chunk has come.
DEVICE void prepare_all(const Step& step, const Shared& here, const Piece& piece, int kv_head) {
    const int part = my_thread() % FOUR;
    const auto ask = [&](Angles& angles, Head& norm, const Task& task) {
        angles.load(step.cosines, step.sines, task.position, part);
        if (HAS_NORM) norm.load((task.what == Task::KEY ? step.k_norm : step.q_norm) + part * PART);
    };
    Task tasks[ROUNDS];
    Head heads[ROUNDS], norm;
    Angles angles;
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) tasks[round] = Task(step, piece, kv_head, round * (WORKERS / FOUR) + my_thread() / FOUR);
    if (tasks[0].what != Task::NOTHING) ask(angles, norm, tasks[0]);
    wait_for_kernel_before();
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) load(heads[round], step, tasks[round], part);
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) {
        const Task& task = tasks[round];
        if (task.what == Task::NOTHING) continue;
        if (round > 0) ask(angles, norm, task);  // the same, as a rule
        if (task.what != Task::VALUE) turn(heads[round], angles, norm, step.eps);
        heads[round].keep(here.queries, round * (WORKERS / FOUR) + my_thread() / FOUR, part);
        if (task.what != Task::QUERY && task.row == piece.first_row) write_kv(heads[round], step, task, kv_head, part);
    }
}

// What is new, from the place of queries to where it belongs in a chunk.
DEVICE void place_new(const Step& step, const Shared& here, const Piece& piece, int kv_head, int chunk, u32 stage) {
    const int part = my_thread() % FOUR;
    for (int number = my_thread() / FOUR; number < LANES; number += WORKERS / FOUR) {
        const Task task(step, piece, kv_head, number);
        if (task.what == Task::NOTHING || task.what == Task::QUERY || task.line / CHUNK != chunk) continue;
        Head head;
        head.find(here.queries, number, part);
        head.keep(task.what == Task::VALUE ? here.values(stage) : here.keys(stage), task.line % CHUNK, part);
    }
}

DEVICE void attend(const Step& step, const Shared& here, const Piece& piece, int kv_head, Turn& turn) {
    const int length = piece.end - piece.begin;
    const int others = step.merges ? step.starts[piece.first_row + 1] - step.starts[piece.first_row] - 1 : 1;
    prepare_all(step, here, piece, kv_head);
    Sums sums;
    for (int chunk = 0; chunk < piece.num_chunks; chunk++, turn.next()) {
        const int begin = chunk * CHUNK, left = length - begin;
        const bool is_new = piece.first_new() - piece.begin < begin + CHUNK && piece.first_new() < piece.end;
        wait_for(here.full + 8 * turn.at, turn.parity);
        if (is_new) place_new(step, here, piece, kv_head, chunk, turn.at);
        for (int item = my_thread(); item < (CHUNK - left) * (DIM / 8); item += WORKERS) {  // a weight of 0 does not help against no number
            const u32 zeros[4] = {};
            keep_words(octet_at(here.values(turn.at), left + item / (DIM / 8), item % (DIM / 8) * 8), zeros);
        }
        const bool is_mended = is_new || left < CHUNK;
        if (chunk == 0 || is_mended) fence_products(), meet_threads(2, WORKERS);
        absorb(sums, here.queries, here.keys(turn.at), here.values(turn.at), step.scale,
               [&](int eight, int) { return left - eight * 8 - my_column(); });
        if (my_thread() % 32 == 0) arrive(here.empty + 8 * turn.at);
    }
    sums.add_up();
    give(sums, step, piece, kv_head, 0, others == 0);
    give(sums, step, piece, kv_head, 1, others == 0);
    if (step.merges && others > 0) merge(step, here, piece, kv_head, others);
}

KERNEL_OF(THREADS, 2) compute(GIVEN Step step) {
    const Shared here;
    const int kv_head = my_program() % KV_HEADS;
    let_next_kernel_begin();
    if (my_thread() == WORKERS) {
        for (int at = 0; at < STAGES; at++) make_barrier(here.full + 8 * at, 1), make_barrier(here.empty + 8 * at, WORKERS / 32);
        fence_barriers();
    }
    meet_threads(1, THREADS);
    if (my_thread() >= WORKERS) {
        bring_all(step, here, kv_head);
        return;
    }
    Turn turn;
    for (Pieces pieces(step); !pieces.is_over(); pieces.next()) {
        attend(step, here, pieces.piece(), kv_head, turn);
        meet_threads(2, WORKERS);  // the next piece's queries go where this one's were
    }
    wait_for_kernel_before();
}
