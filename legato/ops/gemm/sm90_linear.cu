// y = x W^T (+ residual) for a few rows of x, bound by the bytes of W.
//
// Weights stand on the wide side of mma.m16n8k16 (16 of them by 8 rows of x). They were reordered once, at load (see
// sm90_packing.py): "blocks" of 1 KB hold 16 outputs by 64 bytes of K in the order in which a warp's lanes want them (in
// bfloat16, 16 bytes of a lane are its whole part of one mma), and all blocks that a warp reads one after the other lie one
// after the other. Each warp therefore streams its own slice of K
// through a ring of its own with plain bulk copies and needs no other warp until its sum is complete. No load of a
// weight waits for the preceding kernel: the rings are filled before griddepcontrol.wait.
//
// A block computes STRIPS * 16 outputs. Its RANKS blocks of a cluster, and in them the WARPS warps, have a contiguous
// slice of K each; the sums meet first in the block's shared memory, then in that of the rank which owns the outputs,
// always in the same order. Nothing depends on the number of rows but the number of tiles of 8 of them, and a row's
// arithmetic does not depend on that either.
//
// x comes in one of three ways. Where a block reads little of it, lanes fetch their fragments straight into registers, a
// batch ahead (X_COPIES 0): that has the shortest latency. Where K is long, warps copy their rows' parts into rings of their
// own (X_COPIES 1): fragments would take requests of 64 bytes, and their number is what a multiprocessor would wait for. Where
// more is on its way at once than the L1 holds, through which loads come, asynchronous copies of 16 bytes go past it (X_ASYNC).
//
// What is known of a weight is compiled in: a kernel that is started hundreds of times in an iteration, between others, waits
// for each of its instructions to be fetched.
//
// Macros: STRIPS, WARPS, RANKS as above; K_BLOCKS: blocks of K that the weight has; WHOLE: its strips divide into groups of
// STRIPS; TILES of 8 rows; CHUNK: blocks of K in a slot of the ring; SLOTS: of a ring;
// BATCH: slots whose part of x is fetched together; X_SLOTS: such batches in flight (X_COPIES 0: 1 if a slice is never
// longer than a batch, else 2); PACED: slots of a ring in flight while the dependency is not resolved (the others are
// asked for as those arrive, so that weights for later do not delay those that the preceding kernel still waits for);
// HELD: blocks of K, of a warp's first, whose weights are read into registers before the dependency is waited for: what stands in
// shared memory then has only to be read at 128 bytes a cycle, but everything waits for that; and the ring goes on behind them.
// FP8: weights are e4m3 with one float32 scale per 128x128; RESIDENT: thread blocks that a multiprocessor must hold;
// SWIGLU: outputs are four of a gate and the same four of its up in turn, and y is silu(gate) * up, half as wide. NORM: x is an
// RMSNorm's input. Lanes multiply it by the norm's weight as they hold it, each warp sums the squares of its slice of K
// beside its products, and the block divides by their root at the end: x is read once and no normed row is written
// (X_COPIES 0, X_SLOTS 1, RANKS 1: a block then has all of K, and a warp its whole slice at once). BEST: of each row only the
// highest output is wanted. Blocks meet at a key per row, value above and
// complement of the index below, by atomic maxima, whose order does not matter; the last one says which it is.

#ifndef BEST
#define BEST 0
#endif
#ifndef NORM
#define NORM 0
#endif

#include "../sm90.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int BLOCK_BYTES = 1024;
constexpr int BLOCK_K = FP8 ? 64 : 32;
constexpr int SLOT_BYTES = STRIPS * CHUNK * BLOCK_BYTES;
constexpr int RING_BYTES = SLOTS * SLOT_BYTES;
constexpr int OUTPUTS = STRIPS * 16;
constexpr int TOKENS = TILES * 8;
constexpr int PITCH = OUTPUTS + 4;            // of a token's partial sums, in floats: lanes of a quad hit different banks
constexpr int OWN = OUTPUTS / RANKS;          // outputs that this rank finishes
constexpr int PARTIAL_BYTES = TOKENS * PITCH * 4;
constexpr int PARTIAL_STRIDE = RING_BYTES > PARTIAL_BYTES ? RING_BYTES : PARTIAL_BYTES;
constexpr int RINGS_BYTES = WARPS * PARTIAL_STRIDE;
constexpr int X_BLOCKS = BATCH * CHUNK;       // of K, in a slot of x
constexpr int X_ROW = X_BLOCKS * BLOCK_K * 2;
constexpr int X_PITCH = FP8 ? X_ROW + 16 : X_ROW % 128 ? X_ROW : X_ROW + 64;  // two rows' pieces hit different banks
constexpr int X_SLOT_BYTES = TOKENS * X_PITCH;
constexpr int X_BYTES = X_COPIES || X_ASYNC ? WARPS * X_SLOTS * X_SLOT_BYTES : 0;
constexpr int INBOX_BYTES = RANKS > 1 ? RANKS * TOKENS * OWN * 4 : 0;
constexpr int QUADS = OUTPUTS / 4;            // groups of four outputs, the unit of the reduction
constexpr int OWN_QUADS = OWN / 4;
constexpr int ITEM_QUADS = SWIGLU ? 2 : 1;     // that one thread finishes together
constexpr int OWN_ITEMS = (TOKENS * OWN_QUADS / ITEM_QUADS + THREADS - 1) / THREADS;
constexpr bool ROOMY = !FP8 || STRIPS * TILES <= 4;  // there are registers to hold addresses meanwhile
constexpr bool EVENLY = K_BLOCKS % (RANKS * WARPS) == 0;  // all slices of K are equally long
constexpr int SLICE = K_BLOCKS / (RANKS * WARPS);
static_assert(OWN_QUADS % ITEM_QUADS == 0, "a gate and its up belong to the same rank");
static_assert(OUTPUTS % (4 * RANKS) == 0, "every rank owns groups of four outputs");
static_assert(!BEST || (!SWIGLU && TOKENS <= 16), "the best of what a product is, of few rows");
static_assert(HELD <= X_BLOCKS && HELD <= SLOTS * CHUNK, "blocks held are of the first batch and of the ring as it was first filled");
static_assert(!HELD || X_SLOTS == 1 || !(X_COPIES || X_ASYNC), "the first batch of x is a case of its own");
static_assert(!NORM || (RANKS == 1 && X_SLOTS == 1 && !X_COPIES && !SWIGLU), "a norm needs all of x at once");

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra.uni ready;\n"
      "bra.uni again;\n"
      "ready:\n}" ::"r"(barrier), "r"(parity)
      : "memory");
}

__device__ __forceinline__ bool elected() {
  u32 is;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(is));
  return is;
}

// Past the L1: a preceding kernel may still have been writing when this one began.
__device__ __forceinline__ uint2 load_fresh_pair(const void *pointer) {
  uint2 v;
  asm volatile("ld.global.cg.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(pointer));
  return v;
}

// What the compiler would otherwise work out behind the wait for the dependency, where everything waits for it: a use before that
// never runs, for `rows` is never zero, and which it cannot know.
__device__ __forceinline__ void settle(const void *address, int rows) {
  asm volatile("{\n.reg .pred p;\nsetp.eq.s32 p, %1, 0;\n@p prefetch.global.L2 [%0];\n}" ::"l"(address), "r"(rows) : "memory");
}

// The same for places in shared memory.
__device__ __forceinline__ void settle(u32 first, u32 second, int rows) {
  asm volatile("{\n.reg .pred p;\nsetp.eq.s32 p, %2, 0;\n@p st.shared.u32 [%0], %1;\n}" ::"r"(first), "r"(second), "r"(rows)
               : "memory");
}

__device__ __forceinline__ u32 at_rank(u32 address, u32 rank) {
  u32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

__device__ __forceinline__ float4 load_sums(u32 address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ float from_bf16(u32 bits) { return __uint_as_float(bits << 16); }

__device__ __forceinline__ float as_bf16(float v) { return from_bf16(to_bf16_pair(v, 0.0f) & 0xffff); }

// Gate and up are rounded first, so that the result is what two launches would give.
__device__ __forceinline__ float gated(float gate, float up) {
  gate = as_bf16(gate);
  return gate / (1.0f + __expf(-gate)) * as_bf16(up);
}

#if BEST
// Of all rows: the best so far, and how many blocks have had their say. All zero before a launch and after it.
struct Ballot {
  u64 best[TOKENS];
  u32 blocks;
};

// The better of two is the greater: equal values prefer the lower index. Values are rounded first, as logits are.
__device__ __forceinline__ u64 key_of(float value, u32 index) {
  const u32 bits = __float_as_uint(as_bf16(value) + 0.0f);  // the two zeros are equal
  return u64(bits >> 31 ? ~bits : bits | 0x80000000u) << 32 | ~index;
}

__device__ __forceinline__ u64 better(u64 a, u64 b) { return a > b ? a : b; }
#endif

constexpr int PIECES = FP8 ? 2 : 1;  // of 16 bytes: what a lane needs of a row of x for one block of K
typedef uint4 Fragments[TILES][PIECES];

#if !X_COPIES && !X_ASYNC
__device__ __forceinline__ uint4 load_fresh(const void *pointer) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(pointer));
  return v;
}

// This lane's part of x for `count` blocks of K from `first` on, at most a batch. `rows`: where its row of each tile begins, at
// its place in a block of K; rows that there are not repeat the last, since such sums go nowhere.
__device__ __forceinline__ void load_rows(Fragments (&into)[X_BLOCKS], const u8 *const (&rows)[TILES], int first, int count) {
#pragma unroll
  for (int b = 0; b < X_BLOCKS; ++b)
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
      for (int p = 0; p < PIECES; ++p) {
        if (EVENLY && SLICE % X_BLOCKS == 0) {
          into[b][tile][p] = load_fresh(rows[tile] + size_t(first + b) * (BLOCK_K * 2) + p * 16);
        } else {
          into[b][tile][p] = make_uint4(0, 0, 0, 0);
          if (b < count) into[b][tile][p] = load_fresh(rows[tile] + size_t(first + b) * (BLOCK_K * 2) + p * 16);
        }
      }
}
#endif

#if NORM
constexpr int NORM_PIECES = X_BLOCKS * 4 * PIECES;  // of 16 bytes: the norm's weight over a warp's slice of K

// Two numbers of x times the norm's weight, rounded to bfloat16 as a normed row would be.
__device__ __forceinline__ u32 scaled_pair(u32 x, u32 weight) {
  u32 v;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(v) : "r"(x), "r"(weight));
  return v;
}

// The same for one block of K; `weights`: this lane's pieces of the norm's weight.
__device__ __forceinline__ void scale(Fragments &into, const Fragments &x, const uint4 *weights) {
#pragma unroll
  for (int p = 0; p < PIECES; ++p) {
    const uint4 weight = weights[p];
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
      into[tile][p] = make_uint4(scaled_pair(x[tile][p].x, weight.x), scaled_pair(x[tile][p].y, weight.y),
                                 scaled_pair(x[tile][p].z, weight.z), scaled_pair(x[tile][p].w, weight.w));
  }
}

__device__ __forceinline__ void add_squares(u32 x, float &squares) {
  const float first = __uint_as_float(x << 16), second = __uint_as_float(x & 0xffff0000u);
  squares = fmaf(first, first, fmaf(second, second, squares));
}

// Squares of one block of K are added up behind its products, which do not wait for them.
__device__ __forceinline__ void add_squares(const Fragments &x, float (&squares)[TILES]) {
#pragma unroll
  for (int p = 0; p < PIECES; ++p)
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      add_squares(x[tile][p].x, squares[tile]), add_squares(x[tile][p].y, squares[tile]);
      add_squares(x[tile][p].z, squares[tile]), add_squares(x[tile][p].w, squares[tile]);
    }
}

#if !X_ASYNC
// This lane's part of x for a whole slice of K. Blocks and rows that there are not repeat the last: loads without conditions
// are in flight together, and such sums go nowhere.
__device__ __forceinline__ void load_slice(Fragments (&into)[X_BLOCKS], const u8 *const (&rows)[TILES], int count) {
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
    const u8 *row = rows[tile];
#pragma unroll
    for (int b = 0; b < X_BLOCKS; ++b)
#pragma unroll
      for (int p = 0; p < PIECES; ++p)
        into[b][tile][p] =
            load_fresh(row + (EVENLY && SLICE == X_BLOCKS ? b : min(b, max(count - 1, 0))) * (BLOCK_K * 2) + p * 16);
  }
}
#endif
#endif

#if FP8
// Four packed e4m3 to two pairs of bfloat16 times 2^-120: sign at bit 15, exponent and mantissa from bit 10 down, which is exact
// for all of them, since the tensor cores take subnormal numbers as they are. Of the packed word the first pair lies in place; of
// the second, exponents are four bits too high, mantissas four too low, signs a rotation by four away.
__device__ __forceinline__ void widen(u32 word, u32 &first, u32 &second) {
  first = word & 0x87f087f0u;
  second = (__funnelshift_l(word, word, 28) & 0x87808780u) | (word << 4 & 0x00700070u);
}

// x times 2^64, so that sums stay far from the smallest floats. What they then lack is in the scales.
constexpr float LACKING = 0x1p56f;

__device__ __forceinline__ uint4 lifted(uint4 x) {
  const u32 factor = 0x5f805f80u;
  uint4 v;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(v.x) : "r"(x.x), "r"(factor));
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(v.y) : "r"(x.y), "r"(factor));
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(v.z) : "r"(x.z), "r"(factor));
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(v.w) : "r"(x.w), "r"(factor));
  return v;
}
#endif

// Sums of odd steps of 16 are kept apart where there are few strips: a chain of dependent products would be too slow.
constexpr int CHAINS = !FP8 && STRIPS <= 2 ? 2 : 1;
typedef float Sums[STRIPS][TILES][CHAINS][4];

// FP8: the scales of a warp's slice of K, one per lane and 128 of K: those of the group's first 128 outputs, and the next.
struct Scales {
  float first, second;
  int boundary;  // the strip with which the second row of scales begins
};

#ifndef FP8_CHAINS
#define FP8_CHAINS 2
#endif
// This lane's weights of a strip of a block, the upper half of them or the lower.
struct InShared {
  const u8 *block;
  int lane;

  __device__ __forceinline__ uint4 operator()(int strip, int half) const {
    return *reinterpret_cast<const uint4 *>(block + strip * BLOCK_BYTES + half * 512 + lane * 16);
  }
};

struct InRegisters {
  const uint4 (&block)[STRIPS][2];

  __device__ __forceinline__ uint4 operator()(int strip, int half) const { return block[strip][half]; }
};

// One block of K. Of the last group of a weight, which may have fewer strips, whatever lies behind them is
// multiplied too: such sums go nowhere.
template <typename Weights>
__device__ __forceinline__ void multiply(Sums &sums, const Fragments &x, Weights weights, const Scales &scales, int pair) {
#if FP8
  Fragments high;
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
    for (int p = 0; p < PIECES; ++p) high[tile][p] = lifted(x[tile][p]);
  const float first_scale = __shfl_sync(0xffffffffu, scales.first, pair);
  const float second_scale = __shfl_sync(0xffffffffu, scales.second, pair);
#endif
#pragma unroll
  for (int strip = 0; strip < STRIPS; ++strip) {
    const uint4 upper = weights(strip, 0), lower = weights(strip, 1);
#if FP8
    const u32 codes[2][4] = {{upper.x, upper.y, upper.z, upper.w}, {lower.x, lower.y, lower.z, lower.w}};
    float products[TILES][FP8_CHAINS][4] = {};
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      u32 a0, a1, a2, a3;
      widen(codes[0][step], a0, a2);
      widen(codes[1][step], a1, a3);
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
        const uint4 piece = high[tile][step / 2];
        mma(products[tile][step % FP8_CHAINS], a0, a1, a2, a3, step % 2 ? piece.z : piece.x, step % 2 ? piece.w : piece.y);
      }
    }
    const float scale = strip < scales.boundary ? first_scale : second_scale;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        sums[strip][tile][0][i] +=
            scale * (FP8_CHAINS == 2 ? products[tile][0][i] + products[tile][FP8_CHAINS - 1][i] : products[tile][0][i]);
#else
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      mma(sums[strip][tile][0], upper.x, upper.y, upper.z, upper.w, x[tile][0].x, x[tile][0].y);
      mma(sums[strip][tile][CHAINS - 1], lower.x, lower.y, lower.z, lower.w, x[tile][0].z, x[tile][0].w);
    }
#endif
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    linear(const u8 *__restrict__ weight, const u8 *__restrict__ x, const u8 *__restrict__ residual,
           u8 *__restrict__ y, int rows, int outputs, int x_stride, int residual_stride
#if FP8
           ,
           const float *__restrict__ scales, int scale_columns
#endif
#if NORM
           ,
           const u8 *__restrict__ norm, float eps
#endif
#if BEST
           ,
           Ballot *__restrict__ ballot, u64 *__restrict__ keys, int first, int width
#endif
    ) {
  extern __shared__ __align__(1024) u8 shared[];
  __shared__ __align__(8) u64 full_barriers[WARPS][SLOTS];
  __shared__ __align__(8) u64 x_barriers[WARPS][X_SLOTS];
  __shared__ __align__(8) u64 inbox_barrier;
#if NORM
  __shared__ float row_squares[WARPS][TOKENS];
  __shared__ __align__(16) uint4 norm_pieces[WARPS][NORM_PIECES];
#endif

  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int rank = RANKS > 1 ? blockIdx.x % RANKS : 0;
  const int group = blockIdx.x / RANKS;
  u64 once;  // a weight is read by one block only
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
#if X_COPIES
  u64 keep;  // x is read by all
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(keep));
#endif

  // The slice of K, in blocks, of this warp among all warps of the cluster.
  const int slice = rank * WARPS + warp;
  const int begin = EVENLY ? slice * SLICE : slice * K_BLOCKS / (RANKS * WARPS);
  const int length = EVENLY ? SLICE : (slice + 1) * K_BLOCKS / (RANKS * WARPS) - begin;
  const int num_chunks = (length + CHUNK - 1) / CHUNK;
  const int live = WHOLE ? STRIPS : min(STRIPS, outputs / 16 - group * STRIPS);
  const u8 *stream = weight + (size_t(group) * STRIPS * K_BLOCKS + size_t(begin) * live) * BLOCK_BYTES;
  const u32 ring = shared_address(shared) + warp * PARTIAL_STRIDE;
  const u32 full = shared_address(full_barriers[warp]);
  const u32 x_full = shared_address(x_barriers[warp]);

  auto fetch = [&](int chunk) {
    const int slot = chunk % SLOTS;
    const u32 bytes =
        (EVENLY && SLICE % CHUNK == 0 ? CHUNK : min(CHUNK, length - chunk * CHUNK)) * live * BLOCK_BYTES;
    barrier_expect(full + slot * 8, bytes);
    copy_bulk(ring + slot * SLOT_BYTES, stream + size_t(chunk) * CHUNK * live * BLOCK_BYTES, bytes, full + slot * 8,
              once);
  };
  const int ring_chunks = min(SLOTS, num_chunks);
  if (elected()) {
    for (int slot = 0; slot < SLOTS; ++slot) barrier_init(full + slot * 8, 1);
    for (int slot = 0; slot < X_SLOTS; ++slot) barrier_init(x_full + slot * 8, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    for (int chunk = 0; chunk < min(PACED, ring_chunks); ++chunk) fetch(chunk);
  }
  if (RANKS > 1 && threadIdx.x == 0) {
    barrier_init(shared_address(&inbox_barrier), 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    barrier_expect(shared_address(&inbox_barrier), rows * OUTPUTS * 4);
  }
  __syncwarp();
  if (RANKS > 1) {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  }
#if !X_COPIES && !X_ASYNC
  const u8 *row_places[TILES];
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
    row_places[tile] = x + size_t(min(tile * 8 + lane / 4, rows - 1)) * x_stride * 2 + lane % 4 * (BLOCK_K / 2) +
                       size_t(begin) * (BLOCK_K * 2);
    settle(row_places[tile], rows);
  }
#endif
#pragma unroll
  for (int chunk = PACED; chunk < SLOTS; ++chunk) {
    if (chunk >= num_chunks) break;
    barrier_wait(full + (chunk - PACED) * 8, 0);
    if (elected()) fetch(chunk);
  }
  __syncwarp();
#if NORM
  // Into shared memory: that is over before the wait, where loads into registers would be moved behind it.
#pragma unroll 1
  for (int i = lane; i < length * 4 * PIECES; i += 32)
    norm_pieces[warp][i] = *reinterpret_cast<const uint4 *>(norm + size_t(begin) * (BLOCK_K * 2) + i * 16);
  __syncwarp();
#endif
  Scales scales_at = {1.0f, 1.0f, STRIPS};
#if FP8
  const int scale_row = group * OUTPUTS / 128, scale_column = begin / 2 + lane;
  scales_at.boundary = (scale_row + 1) * 8 - group * STRIPS;
  if (scale_column < scale_columns) {
    scales_at.first = scales[size_t(scale_row) * scale_columns + scale_column] * LACKING;
    if ((scale_row + 1) * 128 < outputs)
      scales_at.second = scales[size_t(scale_row + 1) * scale_columns + scale_column] * LACKING;
  }
#endif
  // Where this thread's sums go, and what it finishes.
  const u32 memory = shared_address(shared), own_partial = ring + (lane % 4 * 2 * PITCH + lane / 4) * 4;
  const u32 inbox = memory + RINGS_BYTES + X_BYTES;
  constexpr int OWN_TURN = OWN_QUADS / ITEM_QUADS;
  const int first_token = threadIdx.x / OWN_TURN, first_quad = threadIdx.x % OWN_TURN * ITEM_QUADS;
  const int first_output = group * OUTPUTS + rank * OWN + first_quad * 4;
  u8 *const first_y = y + (size_t(first_token) * outputs + first_output) / ITEM_QUADS * 2;
  const u32 first_own = RANKS == 1 ? memory + (first_token * PITCH + first_quad * 4) * 4
                                   : inbox + (first_token * OWN + first_quad * 4) * 4;
  if (ROOMY) settle(own_partial, first_own, rows);
#if !BEST
  if (ROOMY) settle(first_y, rows);
#endif
  const int sent_token = threadIdx.x / QUADS, sent_quad = threadIdx.x % QUADS;
  const u32 sent = memory + (sent_token * PITCH + sent_quad * 4) * 4;
  u32 sent_to = 0, sent_barrier = 0;
  if (RANKS > 1) {
    const u32 place = inbox + ((rank * TOKENS + sent_token) * OWN + sent_quad % OWN_QUADS * 4) * 4;
    sent_to = at_rank(place, sent_quad / OWN_QUADS), sent_barrier = at_rank(shared_address(&inbox_barrier), sent_quad / OWN_QUADS);
    if (ROOMY) settle(sent, sent_to ^ sent_barrier, rows);
    // The others' barriers are there. Now, where nothing waits for it.
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
  }
#if HELD
  // Weights wait in registers, so that less is to be read when x has come.
  uint4 held[HELD][STRIPS][2];
#pragma unroll
  for (int b = 0; b < HELD; ++b) {
    if (b % CHUNK == 0) barrier_wait(full + b / CHUNK * 8, 0);
#pragma unroll
    for (int strip = 0; strip < STRIPS; ++strip)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint4 &v = held[b][strip][half];
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "r"(ring + b / CHUNK * SLOT_BYTES + (b % CHUNK * live + strip) * BLOCK_BYTES + half * 512 + lane * 16));
      }
    // Their slots are free for what comes behind the ring.
    const int next = b / CHUNK + SLOTS;
    if (b % CHUNK == CHUNK - 1 && next < num_chunks) {
      __syncwarp();
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      if (elected()) fetch(next);
    }
  }
  __syncwarp();
#endif
#if X_ASYNC
  // Rows in whole turns of a warp: a lane's pieces lie as far apart.
  constexpr int ROW_PIECES = X_ROW / 16;
  constexpr bool IN_TURNS = 32 % ROW_PIECES == 0;
  const u8 *const x_place = x + size_t(begin) * (BLOCK_K * 2) + size_t(lane / ROW_PIECES) * x_stride * 2 + lane % ROW_PIECES * 16;
  const size_t x_turn = size_t(32 / (IN_TURNS ? ROW_PIECES : 32)) * x_stride * 2;
  const u32 x_target = shared_address(shared) + RINGS_BYTES + warp * (X_SLOTS * X_SLOT_BYTES) +
                       lane / ROW_PIECES * X_PITCH + lane % ROW_PIECES * 16;
  settle(x_place, rows), settle(x_target, u32(x_turn), rows);
#endif
  asm volatile("griddepcontrol.wait;" ::: "memory");
  // Not before: what starts after a product may then read, ahead of its own wait, all that the product's input was made
  // from. Successors lose nothing: they have the time of the product itself to fetch what they need.
  asm volatile("griddepcontrol.launch_dependents;");

  const int num_batches = (length + X_BLOCKS - 1) / X_BLOCKS;
#if X_ASYNC
  // This warp's part of x, batch by batch, 16 bytes a lane at a time.
  u8 *const x_ring = shared + RINGS_BYTES + warp * (X_SLOTS * X_SLOT_BYTES);
  auto fetch_x = [&](int batch) {
    const int left = length - batch * X_BLOCKS;
    const int pieces = EVENLY && SLICE % X_BLOCKS == 0 ? ROW_PIECES : min(X_BLOCKS, left) * (BLOCK_K / 8);
    const u32 target = shared_address(x_ring) + batch % X_SLOTS * X_SLOT_BYTES;
    const u8 *source = x + size_t(begin + batch * X_BLOCKS) * (BLOCK_K * 2);
    if (left > 0) {
#pragma unroll
      for (int i = 0; i < (TOKENS * ROW_PIECES + 31) / 32; ++i) {
        const int item = i * 32 + lane, row = item / ROW_PIECES, piece = item % ROW_PIECES;
        if (row < rows && piece < pieces)
          asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                           IN_TURNS ? x_target + batch % X_SLOTS * X_SLOT_BYTES + i * (32 / ROW_PIECES) * X_PITCH
                                    : target + row * X_PITCH + piece * 16),
                       "l"(IN_TURNS ? x_place + batch * X_ROW + i * x_turn : source + size_t(row) * x_stride * 2 + piece * 16)
                       : "memory");
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
#pragma unroll
  for (int batch = 0; batch < X_SLOTS; ++batch) fetch_x(batch);
#elif X_COPIES
  // This warp's part of x, batch by batch; a lane copies a row. Rows that do not exist leave what was there: a row's sums
  // never meet another's.
  u8 *const x_ring = shared + RINGS_BYTES + warp * (X_SLOTS * X_SLOT_BYTES);
  auto fetch_x = [&](int batch) {
    const u32 slot = batch % X_SLOTS, barrier = x_full + slot * 8;
    const int first = begin + batch * X_BLOCKS;
    const u32 bytes = min(X_BLOCKS, length - batch * X_BLOCKS) * (BLOCK_K * 2);
    if (lane == 0) barrier_expect(barrier, rows * bytes);
    __syncwarp();
    for (int row = lane; row < rows; row += 32)
      copy_bulk(shared_address(x_ring) + slot * X_SLOT_BYTES + row * X_PITCH,
                x + (size_t(row) * x_stride + size_t(first) * BLOCK_K) * 2, bytes, barrier, keep);
  };
  for (int batch = 0; batch < min(X_SLOTS, num_batches); ++batch) fetch_x(batch);
#elif NORM
  Fragments x_even[X_BLOCKS];
  load_slice(x_even, row_places, length);
#else
  Fragments x_even[X_BLOCKS];
  load_rows(x_even, row_places, 0, length);
#endif
  // Four outputs of one row each: the residual is fetched now, while the weights are still on their way.
#if !SWIGLU
  uint2 added[OWN_ITEMS];
#pragma unroll
  for (int i = 0; i < OWN_ITEMS; ++i) {
    const int item = i * THREADS + threadIdx.x;
    const int token = item / OWN_QUADS, output = group * OUTPUTS + rank * OWN + item % OWN_QUADS * 4;
    added[i] = make_uint2(0, 0);
    if (residual != nullptr && token < rows && output < outputs)
      added[i] = load_fresh_pair(residual + (size_t(token) * residual_stride + output) * 2);
  }
#endif

#if NORM
  float squares[TILES] = {};
#endif
  Sums sums = {};
  auto pair = [&](int block) { return (begin + block) / 2 - begin / 2; };
  auto consume = [&](int batch, const Fragments(&part)[X_BLOCKS], bool is_first) {
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const int chunk = batch * BATCH + i, slot = chunk % SLOTS;
      const int count = EVENLY && SLICE % CHUNK == 0 ? CHUNK : min(CHUNK, length - chunk * CHUNK);
      if (!(EVENLY && SLICE % X_BLOCKS == 0) && length - chunk * CHUNK <= 0) break;
      const Fragments *own = part + i * CHUNK;
#if NORM
      Fragments scaled[CHUNK];
#pragma unroll
      for (int b = 0; b < CHUNK; ++b)
        if (b < count)
          scale(scaled[b], own[b], norm_pieces[warp] + ((i * CHUNK + b) * 4 + lane % 4) * PIECES);
      own = scaled;
#endif
      const bool whole_held = is_first && (i + 1) * CHUNK <= HELD;
      if (!whole_held) barrier_wait(full + slot * 8, chunk / SLOTS & 1);
      const u8 *filled = shared + warp * PARTIAL_STRIDE + slot * SLOT_BYTES;
#pragma unroll
      for (int b = 0; b < CHUNK; ++b) {
#if HELD
        if (is_first && i * CHUNK + b < HELD) {
          if (b < count) multiply(sums, own[b], InRegisters{held[i * CHUNK + b]}, scales_at, pair(chunk * CHUNK + b));
          continue;
        }
#endif
        if (b < count)
          multiply(sums, own[b], InShared{filled + b * live * BLOCK_BYTES, lane}, scales_at, pair(chunk * CHUNK + b));
      }
#if NORM
#pragma unroll
      for (int b = 0; b < CHUNK; ++b)
        if (b < count) add_squares(part[i * CHUNK + b], squares);
#endif
      __syncwarp();
      if (chunk + SLOTS < num_chunks && !whole_held) {
        // The copy must not overtake reads of the slot that are still on their way.
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        if (elected()) fetch(chunk + SLOTS);
      }
    }
  };
#if X_COPIES || X_ASYNC
  for (int batch = 0; batch < num_batches; ++batch) {
#if X_ASYNC
    asm volatile("cp.async.wait_group %0;" ::"n"(X_SLOTS - 1) : "memory");
    __syncwarp();
#else
    barrier_wait(x_full + batch % X_SLOTS * 8, batch / X_SLOTS & 1);
#endif
    const u8 *place = x_ring + batch % X_SLOTS * X_SLOT_BYTES + lane / 4 * X_PITCH + lane % 4 * (PIECES * 16);
    Fragments copied[X_BLOCKS];
#pragma unroll
    for (int b = 0; b < X_BLOCKS; ++b)
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
        for (int p = 0; p < PIECES; ++p)
          copied[b][tile][p] =
              *reinterpret_cast<const uint4 *>(place + b * (BLOCK_K * 2) + tile * 8 * X_PITCH + p * 16);
    __syncwarp();
#if X_ASYNC
    fetch_x(batch + X_SLOTS);
#else
    if (batch + X_SLOTS < num_batches) {
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      fetch_x(batch + X_SLOTS);
    }
#endif
    consume(batch, copied, X_SLOTS == 1);
  }
#elif X_SLOTS == 1
  consume(0, x_even, true);
#else
  Fragments x_odd[X_BLOCKS];
#if FP8
#pragma unroll 1
#endif
  for (int batch = 0; batch < num_batches; batch += 2) {
    const int next = (batch + 1) * X_BLOCKS, after = next + X_BLOCKS;
    if (next < length) load_rows(x_odd, row_places, next, length - next);
    if (HELD && batch == 0) consume(0, x_even, true);
    else consume(batch, x_even, false);
    if (next >= length) break;
    if (after < length) load_rows(x_even, row_places, after, length - after);
    consume(batch + 1, x_odd, false);
  }
#endif

#if NORM
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
    squares[tile] += __shfl_xor_sync(0xffffffffu, squares[tile], 1);
    squares[tile] += __shfl_xor_sync(0xffffffffu, squares[tile], 2);
    if (lane % 4 == 0) row_squares[warp][tile * 8 + lane / 4] = squares[tile];
  }
#endif

  // The warps' sums, token by token, in what was this warp's ring.
#pragma unroll
  for (int strip = 0; strip < STRIPS; ++strip)
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float sum = sums[strip][tile][0][i];
        if (CHAINS == 2) sum += sums[strip][tile][1][i];
        const int place = (tile * 8 + i % 2) * PITCH + strip * 16 + i / 2 * 8;
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(own_partial + place * 4), "f"(sum) : "memory");
      }
  __syncthreads();

  auto over_warps = [&](u32 at) {
    float4 total = load_sums(at);
#pragma unroll
    for (int w = 1; w < WARPS; ++w) {
      const float4 more = load_sums(at + w * PARTIAL_STRIDE);
      total.x += more.x, total.y += more.y, total.z += more.z, total.w += more.w;
    }
    return total;
  };
  if (RANKS > 1) {
#pragma unroll
    for (int i = 0; i < (TOKENS * QUADS + THREADS - 1) / THREADS; ++i) {
      const int item = i * THREADS + threadIdx.x, token = item / QUADS, quad = item % QUADS;
      if (item < rows * QUADS) {
        const float4 sum = over_warps(i == 0 ? sent : memory + (token * PITCH + quad * 4) * 4);
        u32 target = sent_to, target_barrier = sent_barrier;
        if (i > 0) {
          const u32 place = inbox + ((rank * TOKENS + token) * OWN + quad % OWN_QUADS * 4) * 4;
          target = at_rank(place, quad / OWN_QUADS);
          target_barrier = at_rank(shared_address(&inbox_barrier), quad / OWN_QUADS);
        }
        asm volatile(
            "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(target),
            "f"(sum.x), "f"(sum.y), "f"(sum.z), "f"(sum.w), "r"(target_barrier)
            : "memory");
      }
    }
    barrier_wait(shared_address(&inbox_barrier), 0);
  }
  auto finished = [&](u32 at) {  // of this rank's
    if (RANKS == 1) return over_warps(at);
    float4 sum = load_sums(at);
#pragma unroll
    for (int r = 1; r < RANKS; ++r) {
      const float4 more = load_sums(at + r * TOKENS * OWN * 4);
      sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
    }
    return sum;
  };
#if BEST
  __shared__ u64 own_best[TOKENS][OWN_QUADS];
  __shared__ bool is_last;
  for (int item = threadIdx.x; item < TOKENS * OWN_QUADS; item += THREADS) own_best[0][item] = 0;
  __syncthreads();
#endif
#pragma unroll
  for (int i = 0; i < OWN_ITEMS; ++i) {
    const int item = i * THREADS + threadIdx.x;
    const int token = item / (OWN_QUADS / ITEM_QUADS), quad = item % (OWN_QUADS / ITEM_QUADS) * ITEM_QUADS;
    const int output = group * OUTPUTS + rank * OWN + quad * 4;
    if (token >= rows || output >= outputs) continue;
    const u32 at = i == 0 ? first_own
                   : RANKS == 1 ? memory + (token * PITCH + quad * 4) * 4
                                : inbox + (token * OWN + quad * 4) * 4;
    float4 sum = finished(at);
#if NORM
    float squares = row_squares[0][token];
#pragma unroll
    for (int w = 1; w < WARPS; ++w) squares += row_squares[w][token];
    const float factor = rsqrtf(squares / float(K_BLOCKS * BLOCK_K) + eps);
    sum.x *= factor, sum.y *= factor, sum.z *= factor, sum.w *= factor;
#endif
#if SWIGLU
    const float4 up = finished(at + 16);
    sum = make_float4(gated(sum.x, up.x), gated(sum.y, up.y), gated(sum.z, up.z), gated(sum.w, up.w));
#else
    sum.x += from_bf16(added[i].x & 0xffff), sum.y += from_bf16(added[i].x >> 16);
    sum.z += from_bf16(added[i].y & 0xffff), sum.w += from_bf16(added[i].y >> 16);
#endif
#if BEST
    const float values[4] = {sum.x, sum.y, sum.z, sum.w};
    u64 best = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (output + j < width) best = better(best, key_of(values[j], first + output + j));
    own_best[token][quad] = best;
#else
    const uint2 rounded = make_uint2(to_bf16_pair(sum.x, sum.y), to_bf16_pair(sum.z, sum.w));
    *reinterpret_cast<uint2 *>(i == 0 ? first_y : y + (size_t(token) * outputs + output) / ITEM_QUADS * 2) = rounded;
#endif
  }
#if BEST
  __syncthreads();
  for (int token = warp; token < rows; token += WARPS) {
    u64 best = 0;
    for (int quad = lane; quad < OWN_QUADS; quad += 32) best = better(best, own_best[token][quad]);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) best = better(best, __shfl_xor_sync(0xffffffffu, best, step));
    if (lane == 0) atomicMax(&ballot->best[token], best);
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) is_last = atomicAdd(&ballot->blocks, 1) == gridDim.x - 1;
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  if (threadIdx.x < rows) {
    const u64 best = atomicExch(&ballot->best[threadIdx.x], 0ull);
    reinterpret_cast<u64 *>(y)[threadIdx.x] = u32(~best);
    keys[threadIdx.x] = best ^ 1ull << 63;  // as a signed number in the same order
  }
  if (threadIdx.x == 0) ballot->blocks = 0;
#endif
}
