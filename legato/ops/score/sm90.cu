// Index scores on Hopper: score[t, j] = scale_j * sum_h gate[t, h] * relu(q[t, h] . k_j), each key read once for up to
// eight rows of one request. See NOTES.md for what bounds it.
//
// One block per SM walks a contiguous run of (window, page) tiles that `plan_scores` assigned to it. A warp streams pages
// into a ring of shared memory; two warpgroups take tiles in turn, keys as the 64 rows of the product
// and the heads of the window's rows as its columns, so that the sum over heads stays inside four threads.
#include "wgmma.cuh"
#include "../sm90.cuh"

typedef unsigned char byte;

constexpr int PAGE = 64, HEADS = 32, WIDTH = 128, PAGE_BYTES = PAGE * (WIDTH + 4);
constexpr int WINDOW = 8;              // rows that share one reading of the keys
constexpr int GROUPS = 2;              // consumer warpgroups
constexpr int CONSUMERS = GROUPS * 128, THREADS = CONSUMERS + 128;  // and the producer's warpgroup
constexpr int HEADER = 8, BATCH = 32, RECORD = HEADER + BATCH;  // words of a block's record, the first page ids among them
static_assert(HEADS * WIDTH == CONSUMERS * 16, "a consumer loads 16 bytes of every row");
static_assert(STAGES % GROUPS == 0, "a group owns every second stage");

// What a block does first: some pages of one window; and what follows: the windows after it, in order.
struct Segment { int row, rows, request, first, count; };

// The same in every lane, and known to the compiler as such: what follows from it, the descriptors of products above all, is worked
// out once for the warp.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(0xFFFFFFFFu, value, 0); }

// Asked for anew each time: kept, it would take a register that the loops need.
__device__ __forceinline__ int lane_of_thread() {
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}
// By one thread of the warp.
__device__ __forceinline__ void barrier_arrive_once(unsigned barrier) {
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xFFFFFFFF;\n@p mbarrier.arrive.shared::cta.b64 _, [%0];\n}" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ int barrier_poll(unsigned barrier, unsigned parity) {
    int done;
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.s32 %0, 1, 0, p;\n}"
                 : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    return done;
}
// A look: `try_wait` holds the warp for microseconds where the phase does not end.
__device__ __forceinline__ int barrier_look(unsigned barrier, unsigned parity) {
    int done;
    asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.s32 %0, 1, 0, p;\n}"
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
__device__ __forceinline__ void copy_keys(unsigned into, const CUtensorMap* map, int page, unsigned barrier, u64 policy) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
                 " [%0], [%1, {%2, %2, %3}], [%4], %5;"
                 ::"r"(into), "l"(map), "r"(0), "r"(page), "r"(barrier), "l"(policy) : "memory");
}
__device__ __forceinline__ void copy_scales(unsigned into, const CUtensorMap* map, int page, unsigned barrier, u64 policy) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
                 " [%0], [%1, {%2, %3}], [%4], %5;"
                 ::"r"(into), "l"(map), "r"(0), "r"(page), "r"(barrier), "l"(policy) : "memory");
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
    const CUtensorMap *keys, *scale_map;
    const int* page_table;
    int table_width;
    const int* lengths;
    const int* record;  // this block's
    const int4* windows;
    float* scores;
};

// Shared memory: queries; the stages' keys and scales; how far each row of the window sees (-1: no row); windows and tiles behind
// us after this window; the rows' gates; barriers of full and of empty stages; page ids. Swizzled rows start at multiples of 1024.
constexpr int KEY_BYTES = PAGE * WIDTH, SCALE_BYTES = PAGE * 4;
constexpr int KEYS = WINDOW * HEADS * WIDTH, SCALES = KEYS + STAGES * KEY_BYTES, LENGTHS = SCALES + STAGES * SCALE_BYTES;
constexpr int BEHIND = LENGTHS + WINDOW * 4, GATES = BEHIND + 16, GATE_PITCH = HEADS + 4;  // four rows lie in different banks
constexpr int FULL = GATES + WINDOW * GATE_PITCH * 4, EMPTY = FULL + STAGES * 8;
constexpr int IDS = (EMPTY + STAGES * 8 + 255) / 256 * 256;  // and two batches of page ids

// ---------------------------------------------------------------------------------------------------------------------
// Producer: one thread issues; its warp looks up page ids, 32 at a time, one batch ahead. (Shuffles or votes per page take longer
// than the page.) The copy engine swizzles rows as they arrive, and fills with zeros for a page id that is no page.

__device__ __forceinline__ void issue_pages(const Call& call, unsigned shared, unsigned ids, int count, int& stage, unsigned& parity) {
    const u64 policy = read_once();
#pragma unroll 1
    for (int i = 0; i < count; i++) {
        const unsigned full = shared + FULL + stage * 8;
        const int page = __float_as_int(load_shared(ids + i * 4));
        barrier_wait(full + (EMPTY - FULL), parity);
        barrier_expect(full, PAGE_BYTES);
        copy_keys(shared + KEYS + stage * KEY_BYTES, call.keys, page, full, policy);
        copy_scales(shared + SCALES + stage * SCALE_BYTES, call.scale_map, page, full, policy);
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
}

__device__ __forceinline__ void produce(const Call& call, unsigned shared, Segment segment, int next, int tiles) {
    const int lane = lane_of_thread();
    int stage = 0, left = tiles - segment.count;
    unsigned parity = 1, ids = shared + IDS;  // the first round finds every stage empty
    int page = __ldg(call.record + HEADER + lane);  // the record lists the first batch
    while (true) {
        const int* table = call.page_table + (u64)segment.request * call.table_width + segment.first;
        for (int done = 0; done < segment.count; done += BATCH) {
            asm volatile("st.shared.s32 [%0], %1;" ::"r"(ids + lane * 4), "r"(page) : "memory");
            __syncwarp();
            const int ahead = done + BATCH + lane;
            if (ahead < segment.count) page = __ldg(table + ahead);
            if (lane == 0) issue_pages(call, shared, ids, min(BATCH, segment.count - done), stage, parity);
            ids ^= BATCH * 4;
        }
        if (left == 0) return;
        segment = window_after(call.windows, next++, left);
        left -= segment.count;
        if (lane < segment.count) page = __ldg(call.page_table + (u64)segment.request * call.table_width + segment.first + lane);
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
// quad gets the products of whole quarters of heads: all four of one row in a part of 4 rows, two in a part of 2.
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
    ((float*)(shared + GATES))[(threadIdx.x >> 5) * GATE_PITCH + (threadIdx.x & 31)] = gate;
    if (threadIdx.x < WINDOW) ((int*)(shared + LENGTHS))[threadIdx.x] = length;
}

// Which tiles of a window a group finishes, and where their scores go: to rows from `row` on, `stride` apart.
struct Run {
    float* scores;
    unsigned row, stride;
    int position, count;
};

// By a maximum, though an addition (x + |x| is twice this) issues twice as fast: additions hold the tensor cores up, as the
// multiplications do that follow; maxima do not. A NaN stays one.
__device__ __forceinline__ float rectified(float x) {
    float y;
    asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
    return y;
}

// ROWS rows of a window. A thread of a quad finishes row q of four; half a row, for one of its two keys at the end, of two; a
// quarter of one.
template <int ROWS, bool HELD> struct Part {
    static constexpr int HEADS_EACH = 8 * ROWS;
    float held[HELD ? HEADS_EACH : 1];
    unsigned gates;
    float* scores;
    unsigned at;    // of this thread's row and (lower) key in the next tile
    int visible;    // keys of the row from that one on
    int is_mine;

    __device__ __forceinline__ void load(unsigned shared, int first, const Run& run) {
        const int lane = lane_of_thread(), q = lane & 3, row = first + q * ROWS / 4, head = q * HEADS_EACH % HEADS;
        gates = shared + GATES + (row * GATE_PITCH + head) * 4;
        if constexpr (HELD) {
#pragma unroll
            for (int i = 0; i < HEADS_EACH; i += 4) {
                uint4 four = load_shared_16(gates + i * 4);
                held[i] = __uint_as_float(four.x), held[i + 1] = __uint_as_float(four.y);
                held[i + 2] = __uint_as_float(four.z), held[i + 3] = __uint_as_float(four.w);
            }
        }
        const int key = run.position + (threadIdx.x >> 5 & 3) * 16 + (lane >> 2) + (ROWS == 4 ? 0 : (lane & 1) * 8);
        const int length = __float_as_int(load_shared(shared + LENGTHS + row * 4));
        is_mine = length >= 0 && (ROWS > 1 || q < 2);  // of one row, half of the quad stores
        visible = length - key;
        scores = run.scores;
        at = (run.row + row) * run.stride + key;
    }

    // Eight heads of the lower key and of the upper one, in order.
    __device__ __forceinline__ float2 quarter(const float (&products)[ROWS * 16], int which) const {
        float2 sum = {0, 0};
#pragma unroll
        for (int c = 8 * which; c < 8 * which + 8; c += 4) {
            float gate[4];
            if constexpr (HELD) {
#pragma unroll
                for (int e = 0; e < 4; e++) gate[e] = held[c + e];
            } else {
                const uint4 four = load_shared_16(gates + c * 4);
                gate[0] = __uint_as_float(four.x), gate[1] = __uint_as_float(four.y);
                gate[2] = __uint_as_float(four.z), gate[3] = __uint_as_float(four.w);
            }
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float lower = products[(c + e) / 2 * 4 + (c + e) % 2], upper = products[(c + e) / 2 * 4 + (c + e) % 2 + 2];
                sum.x = fmaf(gate[e], rectified(lower), sum.x);
                sum.y = fmaf(gate[e], rectified(upper), sum.y);
            }
        }
        return sum;
    }

    __device__ __forceinline__ void store(float score, int offset) {
        store_if(is_mine, scores + (at + offset), offset < visible ? score : -__int_as_float(0x7F800000));
    }

    // Every row is (quarter 0 + quarter 1) + (quarter 2 + quarter 3), whichever rows are beside it.
    __device__ __forceinline__ void finish(const float (&products)[ROWS * 16], float2 scales) {
        const unsigned all = 0xFFFFFFFFu;
        if constexpr (ROWS == 4) {
            const float2 a = quarter(products, 0), b = quarter(products, 1), c = quarter(products, 2), d = quarter(products, 3);
            store(((a.x + b.x) + (c.x + d.x)) * scales.x, 0);
            store(((a.y + b.y) + (c.y + d.y)) * scales.y, 8);
        } else {
            float2 both = quarter(products, 0);
            if constexpr (ROWS == 2) {
                const float2 b = quarter(products, 1);
                both.x += b.x, both.y += b.y;
            }
            const bool odd = threadIdx.x & 1;
            float sum = (odd ? both.y : both.x) + __shfl_xor_sync(all, odd ? both.x : both.y, 1);
            if constexpr (ROWS == 1) sum += __shfl_xor_sync(all, sum, 2);
            store(sum * (odd ? scales.y : scales.x), 0);
        }
        at += GROUPS * PAGE;
        visible -= GROUPS * PAGE;
    }
};

template <int ROWS> __device__ __forceinline__ void issue(float (&products)[ROWS * 16], unsigned keys, unsigned queries) {
    hold(products);
    multiply_fence();
#pragma unroll
    for (int step = 0; step < 4; step++)
        multiply<ROWS * HEADS>(products, descriptor(keys + 2 * step), descriptor(queries + 2 * step), step);
    multiply_commit();
}

// A group's place in the ring.
struct Cursor {
    unsigned shared;
    int stage;
    unsigned parity, scales_of_thread;

    __device__ __forceinline__ int is_full() const { return barrier_look(shared + FULL + stage * 8, parity); }
    // `ready`: what `is_full` said earlier, when asking cost nothing.
    __device__ __forceinline__ void wait(int ready) const {
        if (!ready) barrier_wait(shared + FULL + stage * 8, parity);
    }
    __device__ __forceinline__ unsigned keys() const { return lower_word(shared + KEYS) + stage * (KEY_BYTES / 16); }
    // Of this thread's two keys.
    __device__ __forceinline__ float2 scales() const {
        const unsigned at = scales_of_thread + stage * SCALE_BYTES;
        return {load_shared(at), load_shared(at + 32)};
    }
    __device__ __forceinline__ void release() const {
        __syncwarp();
        barrier_arrive_once(shared + EMPTY + stage * 8);
    }
    __device__ __forceinline__ void advance() {
        stage += GROUPS;
        if (stage >= STAGES) stage -= STAGES, parity ^= 1;
    }
};

// A window in one part.
template <int ROWS> __device__ __forceinline__ void consume(Cursor& cursor, const Run& run) {
    const unsigned right = lower_word(cursor.shared);
    Part<ROWS, true> part;
    part.load(cursor.shared, 0, run);
    float products[ROWS * 16];
    for (int left = uniform(run.count); left > 0; left--) {
        cursor.wait(0);
        issue<ROWS>(products, cursor.keys(), right);
        const float2 scales = cursor.scales();
        multiply_wait<0>();
        hold(products);
        cursor.release();
        cursor.advance();
        part.finish(products, scales);
    }
}

// A window in two parts: while one is finished, the other is multiplied.
template <int SECOND> __device__ __forceinline__ void consume_two(Cursor& cursor, const Run& run) {
    if (run.count == 0) return;
    const unsigned right0 = lower_word(cursor.shared), right1 = right0 + (4 * HEADS * WIDTH >> 4);
    Part<4, true> part0;
    Part<SECOND, SECOND < 4> part1;
    part0.load(cursor.shared, 0, run);
    part1.load(cursor.shared, 4, run);
    float products0[64], products1[SECOND * 16];
    cursor.wait(0);
    issue<4>(products0, cursor.keys(), right0);
    issue<SECOND>(products1, cursor.keys(), right1);
    for (int left = uniform(run.count) - 1; left > 0; left--) {
        Cursor next = cursor;
        next.advance();
        const int ready = next.is_full();
        multiply_wait<1>();
        hold(products0);
        part0.finish(products0, cursor.scales());
        next.wait(ready);
        issue<4>(products0, next.keys(), right0);
        multiply_wait<1>();
        hold(products1);
        part1.finish(products1, cursor.scales());
        cursor.release();
        issue<SECOND>(products1, next.keys(), right1);
        cursor = next;
    }
    multiply_wait<1>();
    hold(products0);
    part0.finish(products0, cursor.scales());
    multiply_wait<0>();
    hold(products1);
    part1.finish(products1, cursor.scales());
    cursor.release();
    cursor.advance();
}

__device__ __forceinline__ void consume_all(const Call& call, byte* memory, Segment segment, int next, int tiles) {
    const int group = uniform(threadIdx.x >> 7);
    const unsigned shared = shared_address(memory);
    int tile = 0;
    Cursor cursor = {shared, group, 0, shared + SCALES + ((threadIdx.x >> 5 & 3) * 16 + (threadIdx.x >> 2 & 7)) * 4};
    while (segment.count > 0) {
        stage_window(call, segment, memory);
        // Kept here rather than in registers, of which the loops below need all.
        if (threadIdx.x == 0) *(int4*)(memory + BEHIND) = {next + 1, tile + segment.count, tiles, 0};
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        consumers_meet();
        // Tiles go to the groups in turn, over the whole block's run.
        const int skipped = (tile + group) & 1;
        const Run run = {call.scores, (unsigned)segment.row, (unsigned)call.table_width * PAGE, (segment.first + skipped) * PAGE,
                         (segment.count - skipped + 1) >> 1};
        if (segment.rows == 1) consume<1>(cursor, run);
        else if (segment.rows == 2) consume<2>(cursor, run);
        else if (segment.rows <= 4) consume<4>(cursor, run);
        else if (segment.rows <= 6) consume_two<2>(cursor, run);
        else consume_two<4>(cursor, run);
        const uint4 behind = load_shared_16(shared + BEHIND);
        next = behind.x, tile = behind.y, tiles = behind.z;
        if (tile == tiles) return;
        segment = window_after(call.windows, next - 1, tiles - tile);
        consumers_meet();  // nobody still reads the queries of the window before
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
index_scores(const __grid_constant__ CUtensorMap key_map, const __grid_constant__ CUtensorMap scale_map, const byte* q, const float* gates, const int* page_table, int table_width,
             const int* lengths, const int* plan, float* scores) {
    extern __shared__ __align__(1024) byte memory[];
    const unsigned shared = shared_address(memory);
    const Call call = {q, gates, &key_map, &scale_map, page_table, table_width, lengths, plan + blockIdx.x * RECORD,
                       (const int4*)(plan + gridDim.x * RECORD), scores};
    // A warp makes its barriers one after the other, so every warp makes some.
    if (lane_of_thread() == 0) {
        for (int i = threadIdx.x / 32; i < 2 * STAGES; i += THREADS / 32)
            barrier_init(shared + FULL + i * 8, i < STAGES ? 1 : 4);  // the producer; the four warps of the group that takes the stage
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (threadIdx.x == CONSUMERS) {
        asm volatile("prefetch.tensormap [%0];" ::"l"(&key_map) : "memory");
        asm volatile("prefetch.tensormap [%0];" ::"l"(&scale_map) : "memory");
    }
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    int4 head, tail;  // asked for before the barrier
    asm volatile("ld.global.nc.v4.s32 {%0, %1, %2, %3}, [%4];" : "=r"(head.x), "=r"(head.y), "=r"(head.z), "=r"(head.w) : "l"(call.record));
    asm volatile("ld.global.nc.v4.s32 {%0, %1, %2, %3}, [%4];" : "=r"(tail.x), "=r"(tail.y), "=r"(tail.z), "=r"(tail.w) : "l"(call.record + 4));
    __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x < CONSUMERS + 32) produce(call, shared, {head.x, head.y, head.z, head.w, tail.x}, tail.z, tail.w);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        consume_all(call, memory, {head.x, head.y, head.z, head.w, tail.x}, tail.z, tail.w);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The plan: rows of one request that stand together make windows of up to eight; their pages, end to end, are cut into one run
// per block of `index_scores`. Once per forward, one block.
//
// plan: blocks records of 40 words {row, rows, request, first page; pages, -, next window, tiles in all; 32 page ids}, then one
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
plan_scores(const int* page_table, int table_width, const int* request, const int* lengths, int rows, int blocks, int settled, int* plan) {
    __shared__ int scratch[3][32];
    __shared__ int carried[3];
    int4* windows = (int4*)(plan + blocks * RECORD);
    if (threadIdx.x == 0) carried[0] = 0, carried[1] = 0, carried[2] = 0;
    if (!settled) asm volatile("griddepcontrol.wait;" ::: "memory");
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
            if (lane < HEADER) record[lane] = 0;
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
        record[HEADER + lane] = lane < count ? __ldg(page_table + (u64)window.y * table_width + first + lane) : -1;
    }
    // What comes next takes the end of this launch for the end of the one before it as well.
    if (settled) asm volatile("griddepcontrol.wait;" ::: "memory");
}
