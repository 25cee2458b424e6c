// Index scores on Hopper: score[t, j] = scale_j * sum_h gate[t, h] * relu(q[t, h] . k_j), each key read once for up to
// eight rows of one request. See NOTES.md for what bounds it.
//
// One block per SM walks a contiguous run of (window, page) tiles that `plan_scores` assigned to it. Four warps stream pages
// into a ring of shared memory; two warpgroups take tiles in turn, keys as the 64 rows of the product and the heads of the
// window's rows as its columns, so that the sum over heads stays inside four threads.
#include "wgmma.cuh"

typedef unsigned char byte;
typedef unsigned long long u64;

constexpr int PAGE = 64, HEADS = 32, WIDTH = 128, PAGE_BYTES = PAGE * (WIDTH + 4);
constexpr int WINDOW = 8;              // rows that share one reading of the keys
constexpr int GROUPS = 2;              // consumer warpgroups
constexpr int CONSUMERS = GROUPS * 128, THREADS = CONSUMERS + 128;  // and the producers' warpgroup
constexpr int RECORD = 64, LISTED = 56;  // words of a block's record, page ids among them
static_assert(HEADS * WIDTH == CONSUMERS * 16, "a consumer loads 16 bytes of every row");
static_assert(STAGES % 4 == 0, "a producer warp owns every fourth stage, a group every second");

// What a block does first: some pages of one window; and what follows: the windows after it, in order.
struct Segment { int row, rows, request, first, count; };

__device__ __forceinline__ unsigned shared_address(const void* pointer) { return (unsigned)__cvta_generic_to_shared(pointer); }

__device__ __forceinline__ void barrier_init(unsigned barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ int barrier_poll(unsigned barrier, unsigned parity) {
    int done;
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.s32 %0, 1, 0, p;\n}"
                 : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    return done;
}
// A bound on the polls turns a lost copy into an error instead of a hang.
__device__ __forceinline__ void barrier_wait(unsigned barrier, unsigned parity) {
#pragma unroll 1
    for (unsigned polls = 0; polls < 1u << 24; polls++)
        if (barrier_poll(barrier, parity)) return;
    __trap();
}
// Keys are read once and not again before the next layer's have passed through: they leave the L2 first, so that scores stay.
__device__ __forceinline__ u64 read_once() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ __forceinline__ void copy_16(unsigned into, const byte* from, u64 policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(into), "l"(from), "l"(policy) : "memory");
}
// One of the barrier's arrivals, made when this thread's copies so far have landed.
__device__ __forceinline__ void arrive_after_copies(unsigned barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ uint4 load_shared_16(unsigned at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
    return v;
}
__device__ __forceinline__ float load_shared(unsigned at) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(at) : "memory");
    return v;
}
// A predicated store: a branch here costs more than the store.
__device__ __forceinline__ void store_if(int condition, float* at, float value) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %0, 0;\n@p st.global.f32 [%1], %2;\n}" ::"r"(condition), "l"(at), "f"(value) : "memory");
}
__device__ __forceinline__ void consumers_meet() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }

__device__ __forceinline__ Segment window_after(const int4* windows, int index, int left) {
    int4 window = __ldg(windows + index);  // row | rows << 24, request, pages, first tile
    return {window.x & 0xFFFFFF, window.x >> 24, window.y, 0, min(window.z, left)};
}

// The arguments of the kernel, as both roles see them.
struct Call {
    const byte* q;
    const float* gates;
    const byte* cache;
    int num_pages;
    const int* page_table;
    int table_width;
    const int* lengths;
    const int* record;  // this block's
    const int4* windows;
    float* scores;
};

// Shared memory: queries; the stages' keys and scales; how far each row of the window sees (-1: no row); windows and tiles behind
// us after this window; the rows' gates; barriers of full and of empty stages. Swizzled rows start at multiples of 1024.
constexpr int KEY_BYTES = PAGE * WIDTH, SCALE_BYTES = PAGE * 4;
constexpr int KEYS = WINDOW * HEADS * WIDTH, SCALES = KEYS + STAGES * KEY_BYTES, LENGTHS = SCALES + STAGES * SCALE_BYTES;
constexpr int BEHIND = LENGTHS + WINDOW * 4, GATES = BEHIND + 16, GATE_PITCH = HEADS + 4;  // four rows lie in different banks
constexpr int FULL = GATES + WINDOW * GATE_PITCH * 4, EMPTY = FULL + STAGES * 8;           // and STAGES * 8 more

__device__ __forceinline__ Segment first_segment(int2 words) {
    const unsigned all = 0xFFFFFFFFu;
    return {__shfl_sync(all, words.x, 0), __shfl_sync(all, words.y, 0), __shfl_sync(all, words.x, 1), __shfl_sync(all, words.y, 1),
            __shfl_sync(all, words.x, 2)};
}

// ---------------------------------------------------------------------------------------------------------------------
// Producers: four warps take pages in turn, 16 bytes at a time. Lane l holds two words of the record, so the first pages need no
// second look-up. Chunk c of key j goes to chunk c ^ (j % 8) of its row.

__device__ __forceinline__ void produce(const Call& call, unsigned shared, int2 words) {
    const unsigned all = 0xFFFFFFFFu;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
    const int from = lane * 16, even = from ^ (lane >> 3) << 4, odd = even ^ 4 << 4;  // keys j and j + 4
    Segment segment = first_segment(words);
    int next = __shfl_sync(all, words.x, 3), left = __shfl_sync(all, words.y, 3) - segment.count, tile = 0;
    int stage = warp;
    unsigned parity = 1;  // the first round finds every stage empty
    bool listed = true;
    const u64 policy = read_once();
    while (true) {
        int ids = 0, held = 0;  // page ids that the lanes hold, beyond those of the record
        for (int i = (warp - tile) & 3; i < segment.count; i += 4) {
            int id;
            if (listed && i < LISTED) {
                int low = __shfl_sync(all, words.x, 4 + i / 2), high = __shfl_sync(all, words.y, 4 + i / 2);
                id = i & 1 ? high : low;
            } else {
                if (held == 0 && i + 4 * lane < segment.count)
                    ids = __ldg(call.page_table + (u64)segment.request * call.table_width + segment.first + i + 4 * lane);
                id = __shfl_sync(all, ids, held);
                held = (held + 1) & 31;
            }
            id = (unsigned)id < (unsigned)call.num_pages ? id : 0;  // a page that does not exist is nobody's, but is no fault
            const byte* page = call.cache + (u64)id * PAGE_BYTES + from;
            const unsigned keys = shared + KEYS + stage * KEY_BYTES;
            barrier_wait(shared + EMPTY + stage * 8, parity);
#pragma unroll
            for (int part = 0; part < 16; part++) copy_16(keys + (part & 1 ? odd : even) + part * 512, page + part * 512, policy);
            if (lane < PAGE / 4) copy_16(shared + SCALES + stage * SCALE_BYTES + from, page + KEY_BYTES, policy);
            arrive_after_copies(shared + FULL + stage * 8);
            stage += 4;
            if (stage >= STAGES) stage -= STAGES, parity ^= 1;
        }
        if (left == 0) return;
        tile += segment.count;
        segment = window_after(call.windows, next++, left);
        left -= segment.count;
        listed = false;
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Consumers

// The rows of a window are multiplied in one or two parts of 1, 2 or 4 rows: 1, 2, 4, 4 + 2 or 4 + 4.
__device__ __forceinline__ int padded_rows(int rows) { return rows < 2 ? rows : (rows + 1) & ~1; }
__device__ __forceinline__ int height_of_part(int row, int rows) {
    if (rows <= 2) return rows;
    return row < 4 || rows > 6 ? 4 : 2;
}

// What a window's rows bring, into shared memory: all loads first, one latency.
// Queries become the right operand: a row of 128 bytes per head, swizzled. The heads of a part are ordered so that a thread of a
// quad gets the products of whole quarters of heads: all four of one row in a part of 4 rows, two in a part of 2. Gates are
// halved: see `quarter`.
__device__ __forceinline__ void stage_window(const Call& call, Segment segment, byte* shared) {
    const byte* q = call.q + (u64)segment.row * HEADS * WIDTH;
    uint4 pieces[WINDOW];
#pragma unroll
    for (int i = 0; i < WINDOW; i++) {
        pieces[i] = {0, 0, 0, 0};
        if (i < segment.rows) pieces[i] = __ldg((const uint4*)q + i * CONSUMERS + threadIdx.x);
    }
    float gate = 0;
    if (threadIdx.x < segment.rows * HEADS) gate = __ldg(call.gates + (u64)segment.row * HEADS + threadIdx.x);
    int length = -1;  // no row
    if (threadIdx.x < segment.rows) length = __ldg(call.lengths + segment.row + threadIdx.x);
    const int piece = threadIdx.x & 7, head = threadIdx.x >> 3;
#pragma unroll
    for (int i = 0; i < WINDOW; i++) {
        if (i >= padded_rows(segment.rows)) break;
        const int height = height_of_part(i, segment.rows), shift = height == 4 ? 5 : height == 2 ? 4 : 3;
        const int at = (i & 4) * HEADS + ((head & (1 << shift) - 1) >> 1) * 8 + ((i & 3) * (4 / height) + (head >> shift)) * 2 + (head & 1);
        *(uint4*)(shared + at * WIDTH + (piece ^ (at & 7)) * 16) = pieces[i];
    }
    ((float*)(shared + GATES))[(threadIdx.x >> 5) * GATE_PITCH + (threadIdx.x & 31)] = gate * 0.5f;
    if (threadIdx.x < WINDOW) ((int*)(shared + LENGTHS))[threadIdx.x] = length;
}

// ROWS rows of a window. A thread of a quad finishes row q of four; half a row, for one of its two keys at the end, of two; a
// quarter of one.
template <int ROWS, bool HELD> struct Part {
    static constexpr int HEADS_EACH = 8 * ROWS;
    float held[HELD ? HEADS_EACH : 1];
    unsigned gates;
    float* scores;  // of this thread's row and (lower) key in the next tile
    int visible;    // keys of the row from that one on
    int is_mine;

    // `scores` of the window's first row, `stride` between rows; `position` of the first tile.
    __device__ __forceinline__ void load(unsigned shared, int first, float* first_scores, int stride, int position) {
        const int lane = threadIdx.x & 31, q = lane & 3, row = first + q * ROWS / 4, head = q * HEADS_EACH % HEADS;
        gates = shared + GATES + (row * GATE_PITCH + head) * 4;
        if constexpr (HELD) {
#pragma unroll
            for (int i = 0; i < HEADS_EACH; i += 4) {
                uint4 four = load_shared_16(gates + i * 4);
                held[i] = __uint_as_float(four.x), held[i + 1] = __uint_as_float(four.y);
                held[i + 2] = __uint_as_float(four.z), held[i + 3] = __uint_as_float(four.w);
            }
        }
        const int key = position + (threadIdx.x >> 5 & 3) * 16 + (lane >> 2) + (ROWS == 4 ? 0 : (lane & 1) * 8);
        const int length = __float_as_int(load_shared(shared + LENGTHS + row * 4));
        is_mine = length >= 0 && (ROWS > 1 || q < 2);  // of one row, half of the quad stores
        visible = length - key;
        scores = first_scores + (long long)row * stride + key;
    }

    // Eight heads, in order. x + |x| is twice the rectified x, exactly, and an addition is twice as fast as a maximum; the
    // gates are halved instead.
    __device__ __forceinline__ float quarter(const float (&products)[ROWS * 16], int which, int upper) const {
        float sum = 0;
#pragma unroll
        for (int c = 8 * which; c < 8 * which + 8; c++) {
            float x = products[c / 2 * 4 + c % 2 + 2 * upper];
            float gate;
            if constexpr (HELD) gate = held[c];
            else gate = load_shared(gates + c * 4);
            sum = fmaf(gate, x + fabsf(x), sum);
        }
        return sum;
    }

    __device__ __forceinline__ void store(float score, int offset) {
        store_if(is_mine, scores + offset, offset < visible ? score : -__int_as_float(0x7F800000));
    }

    // Every row is (quarter 0 + quarter 1) + (quarter 2 + quarter 3), whichever rows are beside it.
    __device__ __forceinline__ void finish(const float (&products)[ROWS * 16], float low, float high) {
        const unsigned all = 0xFFFFFFFFu;
        if constexpr (ROWS == 4) {
            float below = (quarter(products, 0, 0) + quarter(products, 1, 0)) + (quarter(products, 2, 0) + quarter(products, 3, 0));
            float above = (quarter(products, 0, 1) + quarter(products, 1, 1)) + (quarter(products, 2, 1) + quarter(products, 3, 1));
            store(below * low, 0);
            store(above * high, 8);
        } else {
            float below = quarter(products, 0, 0), above = quarter(products, 0, 1);
            if constexpr (ROWS == 2) below += quarter(products, 1, 0), above += quarter(products, 1, 1);
            const bool odd = threadIdx.x & 1;
            float sum = (odd ? above : below) + __shfl_xor_sync(all, odd ? below : above, 1);
            if constexpr (ROWS == 1) sum += __shfl_xor_sync(all, sum, 2);
            store(sum * (odd ? high : low), 0);
        }
        scores += GROUPS * PAGE;
        visible -= GROUPS * PAGE;
    }
};

template <int ROWS> __device__ __forceinline__ void issue(float (&products)[ROWS * 16], u64 keys, u64 queries) {
    hold(products);
    multiply_fence();
#pragma unroll
    for (int step = 0; step < 4; step++) multiply<ROWS * HEADS>(products, keys + 2 * step, queries + 2 * step, step);
    multiply_commit();
}

// A group's place in the ring.
struct Cursor {
    unsigned shared;
    int stage;
    unsigned parity;

    __device__ __forceinline__ int poll() const { return barrier_poll(shared + FULL + stage * 8, parity); }
    // `ready`: what `poll` said earlier, when asking cost nothing. The copies were ordinary writes; the tensor cores read through
    // another proxy.
    __device__ __forceinline__ void wait(int ready) const {
        if (!ready) barrier_wait(shared + FULL + stage * 8, parity);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __device__ __forceinline__ u64 keys() const { return swizzled_rows(shared + KEYS + stage * KEY_BYTES); }
    // Of this thread's two keys.
    __device__ __forceinline__ void scales(float& low, float& high) const {
        const unsigned at = shared + SCALES + stage * SCALE_BYTES + ((threadIdx.x >> 5 & 3) * 16 + (threadIdx.x >> 2 & 7)) * 4;
        low = load_shared(at), high = load_shared(at + 32);
    }
    __device__ __forceinline__ void release() const {
        __syncwarp();
        if ((threadIdx.x & 31) == 0) barrier_arrive(shared + EMPTY + stage * 8);
    }
    __device__ __forceinline__ void advance() {
        stage += GROUPS;
        if (stage >= STAGES) stage -= STAGES, parity ^= 1;
    }
};

// Which tiles of a window a group finishes, and where their scores go.
struct Run {
    float* scores;
    int stride, position, count;
};

// A window in one part.
template <int ROWS> __device__ __forceinline__ void consume(Cursor& cursor, const Run& run) {
    const u64 right = swizzled_rows(cursor.shared);
    Part<ROWS, true> part;
    part.load(cursor.shared, 0, run.scores, run.stride, run.position);
    float products[ROWS * 16];
    for (int left = run.count; left > 0; left--) {
        cursor.wait(0);
        issue<ROWS>(products, cursor.keys(), right);
        float low, high;
        cursor.scales(low, high);
        multiply_wait<0>();
        hold(products);
        cursor.release();
        cursor.advance();
        part.finish(products, low, high);
    }
}

// A window in two parts: while one is finished, the other is multiplied.
template <int SECOND> __device__ __forceinline__ void consume_two(Cursor& cursor, const Run& run) {
    if (run.count == 0) return;
    const u64 right0 = swizzled_rows(cursor.shared), right1 = right0 + (4 * HEADS * WIDTH >> 4);
    Part<4, true> part0;
    Part<SECOND, SECOND < 4> part1;
    part0.load(cursor.shared, 0, run.scores, run.stride, run.position);
    part1.load(cursor.shared, 4, run.scores, run.stride, run.position);
    float products0[64], products1[SECOND * 16];
    float low, high;
    cursor.wait(0);
    issue<4>(products0, cursor.keys(), right0);
    issue<SECOND>(products1, cursor.keys(), right1);
    for (int left = run.count - 1; left > 0; left--) {
        Cursor next = cursor;
        next.advance();
        const int ready = next.poll();
        cursor.scales(low, high);
        multiply_wait<1>();
        hold(products0);
        part0.finish(products0, low, high);
        next.wait(ready);
        issue<4>(products0, next.keys(), right0);
        multiply_wait<1>();
        hold(products1);
        cursor.release();
        part1.finish(products1, low, high);
        issue<SECOND>(products1, next.keys(), right1);
        cursor = next;
    }
    cursor.scales(low, high);
    multiply_wait<1>();
    hold(products0);
    part0.finish(products0, low, high);
    multiply_wait<0>();
    hold(products1);
    cursor.release();
    cursor.advance();
    part1.finish(products1, low, high);
}

__device__ __forceinline__ void consume_all(const Call& call, byte* memory, int2 words) {
    const int group = threadIdx.x >> 7, stride = call.table_width * PAGE;
    const unsigned shared = shared_address(memory);
    Segment segment = first_segment(words);
    int index = 0, tile = 0;
    Cursor cursor = {shared, group, 0};
    while (segment.count > 0) {
        stage_window(call, segment, memory);
        // Kept here rather than in registers, of which the loops below need all.
        if (threadIdx.x == 0) *(int2*)(memory + BEHIND) = {index + 1, tile + segment.count};
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        consumers_meet();
        // Tiles go to the groups in turn, over the whole block's run.
        const int skipped = (tile + group) & 1;
        const Run run = {call.scores + (u64)segment.row * stride, stride, (segment.first + skipped) * PAGE,
                         (segment.count - skipped + 1) >> 1};
        if (segment.rows == 1) consume<1>(cursor, run);
        else if (segment.rows == 2) consume<2>(cursor, run);
        else if (segment.rows <= 4) consume<4>(cursor, run);
        else if (segment.rows <= 6) consume_two<2>(cursor, run);
        else consume_two<4>(cursor, run);
        int2 rest;  // the window after the record's, and tiles in all
        asm volatile("ld.global.nc.v2.s32 {%0, %1}, [%2];" : "=r"(rest.x), "=r"(rest.y) : "l"(call.record + 6));
        index = __float_as_int(load_shared(shared + BEHIND)), tile = __float_as_int(load_shared(shared + BEHIND + 4));
        if (tile == rest.y) return;
        segment = window_after(call.windows, rest.x + index - 1, rest.y - tile);
        consumers_meet();  // nobody still reads the queries of the window before
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
index_scores(const byte* q, const float* gates, const byte* cache, int num_pages, const int* page_table, int table_width,
             const int* lengths, const int* plan, float* scores) {
    extern __shared__ __align__(1024) byte memory[];
    const unsigned shared = shared_address(memory);
    const Call call = {q, gates, cache, num_pages, page_table, table_width, lengths, plan + blockIdx.x * RECORD,
                       (const int4*)(plan + gridDim.x * RECORD), scores};
    // A warp makes its barriers one after the other, so every warp makes some.
    if (threadIdx.x % 32 == 0) {
        for (int i = threadIdx.x / 32; i < 2 * STAGES; i += THREADS / 32)
            barrier_init(shared + FULL + i * 8, i < STAGES ? 32 : 4);  // a producer warp; the four warps of the group that takes the stage
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    int2 words;  // asked for before the barrier
    asm volatile("ld.global.nc.v2.s32 {%0, %1}, [%2];" : "=r"(words.x), "=r"(words.y)
                 : "l"((const int2*)call.record + (threadIdx.x & 31)));
    __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        produce(call, shared, words);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        consume_all(call, memory, words);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The plan: rows of one request that stand together make windows of up to eight; their pages, end to end, are cut into one run
// per block of `index_scores`. Once per forward, one block.
//
// plan: blocks records of 64 words {row, rows, request, first page; pages, -, next window, tiles in all; 56 page ids}, then one
// int4 per window {row | rows << 24, request, pages, first tile}.

constexpr int PLANNERS = 1024;

// Inclusive scan over the block of `value` under addition or maximum.
template <bool MAXIMUM> __device__ __forceinline__ int scan(int value, int* scratch) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        int other = __shfl_up_sync(0xFFFFFFFFu, value, step);
        if (lane >= step) value = MAXIMUM ? max(value, other) : value + other;
    }
    if (lane == 31) scratch[warp] = value;
    __syncthreads();
    if (warp == 0) {
        int total = scratch[lane];
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            int other = __shfl_up_sync(0xFFFFFFFFu, total, step);
            if (lane >= step) total = MAXIMUM ? max(total, other) : total + other;
        }
        scratch[lane] = total;
    }
    __syncthreads();
    if (warp > 0) value = MAXIMUM ? max(value, scratch[warp - 1]) : value + scratch[warp - 1];
    return value;
}

extern "C" __global__ void __launch_bounds__(PLANNERS, 1)
plan_scores(const int* page_table, int table_width, const int* request, const int* lengths, int rows, int blocks, int* plan) {
    __shared__ int scratch[3][32];
    __shared__ int carried[3];
    int4* windows = (int4*)(plan + blocks * RECORD);
    if (threadIdx.x == 0) carried[0] = 0, carried[1] = 0, carried[2] = 0;
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    __syncthreads();
    for (int top = 0; top < rows; top += PLANNERS) {
        const int row = top + threadIdx.x;
        const bool is_row = row < rows;
        const int owner = is_row ? __ldg(request + row) : -1;
        const bool starts = is_row && (row == 0 || __ldg(request + row - 1) != owner);
        const int start = max(scan<true>(starts ? row : 0, scratch[0]), carried[0]);
        int height = 0, longest = 0;
        if (is_row && (row - start) % WINDOW == 0)
            for (; height < WINDOW && row + height < rows && __ldg(request + row + height) == owner; height++)
                longest = max(longest, __ldg(lengths + row + height));
        const int pages = min((longest + PAGE - 1) / PAGE, table_width);
        const int index = scan<false>(pages > 0, scratch[1]) + carried[1];
        const int end = scan<false>(pages, scratch[2]) + carried[2];
        if (pages > 0) windows[index - 1] = {row | height << 24, owner, pages, end - pages};
        __syncthreads();
        if (threadIdx.x == PLANNERS - 1) carried[0] = start, carried[1] = index, carried[2] = end;
        __syncthreads();
    }
    const int num_windows = carried[1], tiles = carried[2];
    for (int block = threadIdx.x >> 5; block < blocks; block += PLANNERS / 32) {
        const int begin = (int)((long long)tiles * block / blocks), stop = (int)((long long)tiles * (block + 1) / blocks);
        int* record = plan + block * RECORD;
        const int lane = threadIdx.x & 31;
        if (begin == stop) {
            if (lane < 8) record[lane] = 0;
            continue;
        }
        int low = 0, high = num_windows;  // the last window that starts at or before `begin`
        while (high - low > 1) {
            int middle = (low + high) / 2;
            if (windows[middle].w <= begin) low = middle; else high = middle;
        }
        const int4 window = windows[low];
        const int first = begin - window.w, count = min(window.z - first, stop - begin);
        if (lane == 0) {
            ((int4*)record)[0] = {window.x & 0xFFFFFF, window.x >> 24, window.y, first};
            ((int4*)record)[1] = {count, 0, low + 1, stop - begin};
        }
        for (int i = lane; i < min(count, LISTED); i += 32)
            record[8 + i] = __ldg(page_table + (u64)window.y * table_width + first + i);
    }
}
