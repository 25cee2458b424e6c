// Absorbed attention of each row over its selected tokens, for up to 16 heads: a row is shared by a cluster of thread
// blocks and merged in place.
//
// Tokens stand on the wide side of the tensor cores' products and heads on the narrow one (8 or 16 of them, no padding
// beyond the next of these): S^T = K q^T, 64 tokens by HEADS, then O^T = V^T P^T, 64 values by HEADS. A unit is 128
// entries of a selection; block r of a row's cluster takes units r, r + C, ... Within a unit warpgroup w scores tokens
// 64w to 64w + 63 and then owns values 256w to 256w + 255 of the sum over all 128. Keys and values are the same bytes
// in shared memory: bfloat16 tokens lie in nine columns of 64 values in the 128-byte swizzle, which the tensor cores
// read as K-major keys and as M-major values; FP8 tokens lie as they are stored (656 bytes) and are widened to float16
// in registers, values with their scales.
//
// Each part pushes its sums, maxima and sums of weights into the shared memory of the blocks that own the values
// (st.async), and the owners add the parts up in order. A part is a unit (MODE 0: at most one in a block; MODE 1:
// several), so that the bits of a row depend neither on other rows nor on the number of blocks; or all units of a block
// (MODE 2, for many rows and for more than 16 units; sparse_mla_rows.cu is for still more rows of a bfloat16 cache). Tokens are refilled for the next unit as soon as their values are
// summed: bfloat16 column by column, FP8 those of a group of warps.
//
// Entries that do not count are never read: their tokens are zeros, their scores minus infinity.
//
// EARLY: the host promises that all of this was complete before the preceding kernel began, but for the queries and for
// tokens at the slots `stored`, which that kernel may be writing. A block's first unit is then fetched while it runs.
//
// Nearly all of this runs once a launch, two warps to a scheduler, so instructions are time: addresses are a base and a
// constant, and what does not depend on the preceding kernel stands before the wait for it (NOTES.md).
//
// BULK (FP8, MODE 2): each warp's copy engine fetches the tokens that the warp scores, one copy a token, and a multiprocessor
// holds two blocks, of which one works while the other waits.
//
// Macros: HEADS (8 or 16); FP8: the cache's layout; MODE; EARLY; BULK; RESIDENT: blocks that a multiprocessor must hold;
// FIXED_BYTES: the shared memory without the inbox, as the host counts it.

#include "hopper.cuh"
#include "products.cuh"
#include "softmax.cuh"

constexpr int THREADS = 256, UNIT = 128, TILE = 64;
constexpr int LATENT = 512;
constexpr int ROW_BYTES = FP8 ? 656 : 1152;
constexpr int COLUMN_BYTES = TILE * 128;  // 64 tokens by 64 bfloat16
constexpr int TILE_BYTES = TILE * ROW_BYTES;
constexpr int TOKENS_BYTES = UNIT * ROW_BYTES;
constexpr int SCALES_AT = 512, ROPE_AT = 528;  // in an FP8 token
constexpr int Q_COLUMN = HEADS * 128;
constexpr int Q_BYTES = 9 * Q_COLUMN;
constexpr int P_TILE = HEADS * 128;  // 64 tokens of all heads
constexpr int BATCH = 4;             // FP8: steps of 16 that are widened together
constexpr int PARTS = 16;            // that a row is added up from, at most
constexpr int SUMS = HEADS / 2;
constexpr bool ONE = MODE == 0, SEPARATE = MODE < 2;

constexpr int Q_AT = TOKENS_BYTES;
constexpr int P_AT = Q_AT + Q_BYTES;                       // bfloat16: in the tile's rope column, which is dead by then
constexpr int WEIGHTS_AT = P_AT + (FP8 ? 2 * P_TILE : 0);  // (maximum, sum of weights) by part
constexpr int SHARES_AT = WEIGHTS_AT + PARTS * HEADS * 8;  // what the sums of each part are multiplied with
constexpr int WARPS_AT = SHARES_AT + PARTS * HEADS * 4;    // each warp's maximum of each head
constexpr int WARP_SUMS_AT = WARPS_AT + 8 * HEADS * 4;     // and its sum of weights
constexpr int MAXIMA_AT = WARP_SUMS_AT + 8 * HEADS * 4;    // the block's
constexpr int FACTORS_AT = MAXIMA_AT + HEADS * 4;          // FP8: of each head's scores
constexpr int SCALES16_AT = FACTORS_AT + (FP8 ? HEADS * 4 : 0);     // FP8: [4 groups][4 of 32 tokens][4 lanes][8] float16
constexpr int BARRIER_AT = SCALES16_AT + (FP8 ? 4 * UNIT * 2 : 0);  // of the weights, then of the sums
constexpr int TOKENS_BARRIER_AT = BARRIER_AT + 16;                  // BULK: of each warp's tokens
constexpr int INBOX_AT = TOKENS_BARRIER_AT + (BULK ? 64 : 0);       // [parts][values of the block * HEADS]
static_assert(FIXED_BYTES == INBOX_AT, "");
static_assert(INBOX_AT % 16 == 0, "");
static_assert(HEADS * (LATENT * 2 + 16) <= TOKENS_BYTES, "");
constexpr u32 NOTHING = 0xffffffffu;

__device__ __forceinline__ u32 pack_p(float low, float high) {
  return FP8 ? pack_f16(low, high) : pack_bf16(low, high);
}
__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
// This lane's part in fetching tokens: of rows 16 * (warp of the group) + lane / 8 + 4i of both tiles, 16 bytes of each 128. A
// group of warps fetches half of the latents, of which `cache` and `targets` are at the first, and what only the scores of its
// tile need: rope, and an FP8 token's scales.
struct Fetch {
  const u8 *cache;  // at this lane's piece of token 0
  u32 token[8];     // tile 0: 0..3, tile 1: 4..7; in units of 16 bytes
  u32 targets[2];   // of rows of even and of odd i, less i * ROW, in tile 0

  __device__ __forceinline__ u32 from(int tile, int i) const { return tile ? token[4 + i] : token[i]; }
  __device__ __forceinline__ bool wanted(int tile, int i) const { return from(tile, i) != NOTHING; }
  __device__ __forceinline__ u32 target(int tile, int i) const {
    return targets[i % 2] + tile * TILE_BYTES + i * (FP8 ? 4 * ROW_BYTES : 512);
  }
#if FP8
  // A token begins anywhere in a line of 128 bytes: a lane copies what stands at its place of each line, so that eight lanes ask
  // for one line, and for no sector twice. Pieces of 128 bytes of the token would ask for two lines each.
  __device__ __forceinline__ const u8 *line(int tile, int i) const {
    const u8 *pointer = cache + size_t(wanted(tile, i) ? from(tile, i) & ~7u : 0) * 16;
    settle(pointer);
    return pointer;
  }
  // Of the line in which a token begins, what is not the token's.
  __device__ __forceinline__ u32 before(int tile, int i) const { return from(tile, i) % 8 * 16; }
  // Half of the latents, 256 bytes: one line and, of the two beside it, what this lane has of the first or else of the last.
  __device__ __forceinline__ void half_of(int tile, int i, int lane, const u8 *pointer) const {
    const u32 to = target(tile, i) - before(tile, i), beside = lane % 8 * 16 < before(tile, i) ? 256 : 0;
    copy_async(to + beside, pointer + beside, wanted(tile, i));
    copy_async(to + 128, pointer + 128, wanted(tile, i));
  }
  // Scales and rope, 144 bytes in two lines.
  __device__ __forceinline__ void tail_of(int tile, int i, int lane, const u8 *pointer) const {
    const u32 to = target(tile, i) - before(tile, i), place = lane % 8 * 16;
    const int at = tile ? 256 : 512;  // behind the half that the group of this tile fetches
    if (place >= before(tile, i)) copy_async(to + at, pointer + at, wanted(tile, i));
    if (place <= before(tile, i)) copy_async(to + at + 128, pointer + at + 128, wanted(tile, i));
  }
  __device__ __forceinline__ void token_of(int tile, int i, int group, int lane) const {
    const u8 *const pointer = line(tile, i);
    half_of(tile, i, lane, pointer);
    if (group == tile) tail_of(tile, i, lane, pointer);
  }
  // Of all tokens.
  __device__ __forceinline__ void half(int lane) const {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile)
#pragma unroll
      for (int i = 0; i < 4; ++i) half_of(tile, i, lane, line(tile, i));
  }
  __device__ __forceinline__ void tail(int group, int lane) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) tail_of(group, i, lane, line(group, i));
  }
#else
  static constexpr int COLUMNS = 4;
  __device__ __forceinline__ const u8 *source(int tile, int i) const {
    const u8 *pointer = cache + size_t(wanted(tile, i) ? from(tile, i) : 0) * 16;
    settle(pointer);
    return pointer;
  }
  // All that a group of warps fetches of one of this lane's tokens.
  __device__ __forceinline__ void token_of(int tile, int i, int group, int lane) const {
    const u8 *const pointer = source(tile, i);
#pragma unroll
    for (int k = 0; k < COLUMNS; ++k) copy_async(target(tile, i) + k * COLUMN_BYTES, pointer + k * 128, wanted(tile, i));
    if (group == tile) tail_of(tile, i, pointer);
  }
  // One column of all tokens, of this group's.
  __device__ __forceinline__ void column(int k) const {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        copy_async(target(tile, i) + k * COLUMN_BYTES, source(tile, i) + k * 128, wanted(tile, i));
  }
  __device__ __forceinline__ void tail(int group, int lane) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) tail_of(group, i, source(group, i));
  }
  __device__ __forceinline__ void tail_of(int tile, int i, const u8 *pointer) const {
    const int k = (2 - tile) * COLUMNS;
    copy_async(target(tile, i) + k * COLUMN_BYTES, pointer + k * 128, wanted(tile, i));
  }
#endif
};

#if BULK
// A warp's part in fetching tokens: the 16 that it scores, one a lane.
struct BulkFetch {
  u32 barrier, target;  // the warp's; where this lane's token goes
  u8 *stored;           // the same
  const u8 *cache;
  int first, slot;      // this lane's entry of unit 0 (none: beyond every selection); its slot in the unit that comes next
  u32 counted;          // of the 16, in the unit at hand

  __device__ __forceinline__ void look(const int *slots, int unit, int width) {
    const int at = unit * UNIT + first;
    slot = -1;
    if (at < width) slot = load_fresh(slots + at);
  }
  // Nobody reads the tokens before any more. Those that do not count are zeros.
  __device__ __forceinline__ void ask(int unit, int count, int lane) {
    const bool own = lane < 16, wanted = own && slot >= 0 && unit * UNIT + first < count;
    counted = __ballot_sync(~0u, wanted);
    if (lane == 0) barrier_expect(barrier, __popc(counted) * ROW_BYTES);
    __syncwarp();
    if (wanted) {
      fence_async();  // zeros may have been stored there
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
          "l"(cache + size_t(slot) * ROW_BYTES), "r"(ROW_BYTES), "r"(barrier)
          : "memory");
    } else if (own) {
#pragma unroll 1
      for (int i = 0; i < ROW_BYTES; i += 16) *reinterpret_cast<uint4 *>(stored + i) = make_uint4(0, 0, 0, 0);
    }
  }
};
#endif

__device__ __forceinline__ void read_slots(int (&found)[8], const int *slots, int first, int width) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int at = first + i / 4 * TILE + i % 4 * 4;
    found[i] = -1;
    if (at < width) found[i] = load_fresh(slots + at);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    sparse_mla(const u8 *q, const u8 *cache, const int *slots, const int *counts, u8 *out, int heads, int width,
               int slots_stride, int q_stride, float scale
#if EARLY
               ,
               const int *stored, int num_stored
#endif
    ) {
  extern __shared__ __align__(1024) u8 shared[];
  const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const int group = warp / 4, g = lane / 4, t = lane % 4;
  u32 blocks, rank;
  asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(blocks));
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  const int log_blocks = 31 - __clz(blocks);  // the host takes powers of two: divisions would be a hundred instructions
  const int row = blockIdx.x >> log_blocks, first_head = blockIdx.y * HEADS;
  const u32 base = shared_address(shared), barrier = base + BARRIER_AT;
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier + 8) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
#if BULK
  const int own_token = warp * 16 + lane % 16;
  BulkFetch bulk = {base + TOKENS_BARRIER_AT + warp * 8, base + own_token * ROW_BYTES, shared + own_token * ROW_BYTES, cache,
                    lane < 16 ? own_token : 1 << 30, -1, 0};
  u32 phase = 0;
  if (lane == 0) {
    barrier_init(bulk.barrier, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
#endif
  __syncwarp();
  if (blocks > 1) cluster_arrive_relaxed();
  slots += size_t(row) * slots_stride;
  // Where the selection is older than the preceding kernel, this brings it closer; where not, it costs nothing.
  if (threadIdx.x < 4 && int(rank * UNIT + threadIdx.x * 32) < width) prefetch(slots + rank * UNIT + threadIdx.x * 32);
  if (threadIdx.x == 4) prefetch(counts + row);
  const int my_row = warp % 4 * 16 + lane / 8;
  int found[8], count;
  Fetch fetch;
  fetch.cache = cache + lane % 8 * 16 + group * (FP8 ? 256 : 512);
  fetch.targets[0] = base + group * (FP8 ? 256 : 4 * COLUMN_BYTES) +
                     (FP8 ? my_row * ROW_BYTES + lane % 8 * 16 : my_row * 128 + ((lane ^ my_row) & 7) * 16);
  fetch.targets[1] = FP8 ? fetch.targets[0] : fetch.targets[0] ^ 64;
  settle(fetch.targets[0]), settle(fetch.targets[1]);
  auto take = [&](int unit) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const bool counted = found[i] >= 0 && unit * UNIT + my_row + i / 4 * TILE + i % 4 * 4 < count;
      fetch.token[i] = counted ? u32(found[i]) * (ROW_BYTES / 16) : NOTHING;
    }
  };
  auto select = [&]() {
#if BULK
    bulk.look(slots, rank, width);
#else
    read_slots(found, slots, rank * UNIT + my_row, width);
#endif
    count = min(load_fresh(counts + row), width);
  };
#if EARLY
  // All but the tokens that the preceding kernel may still be storing is complete: only those are fetched behind it.
  select();
  const int own = load_fresh(stored + min(lane, num_stored - 1));
  take(rank);
  u32 late = 0;
  for (int j = 0; j < num_stored; ++j) {
    const int slot = __shfl_sync(~0u, own, j);
#pragma unroll
    for (int i = 0; i < 8; ++i) late |= u32(found[i] == slot && fetch.token[i] != NOTHING) << i;
  }
  if (int(rank) * UNIT < count) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (~late >> i & 1) fetch.token_of(i / 4, i % 4, group, lane);
  }
#endif
  asm volatile("griddepcontrol.launch_dependents;");
  // What can be said of the queries before there are any.
  q += size_t(row) * q_stride * 2 + first_head * 1152;
  const int own_heads = min(heads - first_head, HEADS);
#if FP8
  q += warp * 1152 + lane * 32;
  settle(q);
#else
  constexpr int PIECES = (HEADS * 72 + THREADS - 1) / THREADS;
  const u8 *query[PIECES];
  u32 query_target[PIECES];
  bool query_wanted[PIECES];
#pragma unroll
  for (int i = 0; i < PIECES; ++i) {
    const int at = threadIdx.x + i * THREADS, head = at / 72, piece = at % 72;
    query[i] = q + at * 16;
    query_target[i] = base + Q_AT + piece / 8 * Q_COLUMN + head * 128 + (((piece ^ head) & 7) << 4);
    query_wanted[i] = head < own_heads;
    settle(query[i]), settle(query_target[i]);
  }
#endif
  if (blocks > 1) cluster_wait();
  asm volatile("griddepcontrol.wait;" ::: "memory");

#if FP8
  uint4 queries[HEADS / 8][4];
#pragma unroll
  for (int i = 0; i < HEADS / 8; ++i)
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int head = warp + 8 * i, block = lane + k / 2 * 32;
      queries[i][k] = make_uint4(0, 0, 0, 0);
      if (head < own_heads && block < 36)
        queries[i][k] = load_fresh(reinterpret_cast<const uint4 *>(q + i * 8 * 1152 + k / 2 * 1024) + k % 2);
    }
#endif
#if !EARLY
  select();
#endif
  const int units = (count + UNIT - 1) / UNIT;

#if !FP8
#pragma unroll
  for (int i = 0; i < PIECES; ++i)
    if (int(threadIdx.x) + i * THREADS < HEADS * 72) copy_async(query_target[i], query[i], query_wanted[i]);
#endif
#if !EARLY && !BULK
  take(rank);
#endif
  const bool works = int(rank) < units;
#if EARLY
  if (late) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (late >> i & 1) fetch.token_of(i / 4, i % 4, group, lane);
  }
  copies_commit();
#else
  if (works) {
#if BULK
    bulk.ask(rank, count, lane);
#elif FP8
    fetch.tail(group, lane), copies_commit();
    fetch.half(lane), copies_commit();
#else
#pragma unroll
    for (int k = 0; k < 4; ++k) fetch.column(k), copies_commit();
    fetch.tail(group, lane), copies_commit();
#endif
  }
#endif
#if FP8
  if (works) {
    // Queries as float16 with a power of two for each head, so that nothing overflows; in each 16 values the order in
    // which a lane's four codes of a token come out of `widen`.
#pragma unroll
    for (int i = 0; i < HEADS / 8; ++i) {
      const int head = warp + 8 * i;
      const uint4(&part)[4] = queries[i];
      float most = 0;
      auto largest = [&](u32 pair) {
        most = fmaxf(most, fmaxf(fabsf(__uint_as_float(pair << 16)), fabsf(__uint_as_float(pair & 0xffff0000u))));
      };
#pragma unroll
      for (int k = 0; k < 4; ++k) largest(part[k].x), largest(part[k].y), largest(part[k].z), largest(part[k].w);
#pragma unroll
      for (int step = 16; step; step /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
      const int exponent = min(max(int(__float_as_uint(most) >> 23) - 127, -100), 100);
      const float shrink = __uint_as_float(u32(127 - exponent) << 23);
      if (lane == 0)
        *reinterpret_cast<float *>(shared + FACTORS_AT + head * 4) = scale * __uint_as_float(u32(127 + exponent) << 23);
      u8 *const to = shared + Q_AT + head * 128;
      auto narrow = [&](u32 pair) {
        return pack_f16(__uint_as_float(pair << 16) * shrink, __uint_as_float(pair & 0xffff0000u) * shrink);
      };
      auto shrunk = [&](u32 pair) {
        return pack_bf16(__uint_as_float(pair << 16) * shrink, __uint_as_float(pair & 0xffff0000u) * shrink);
      };
      const uint4 a = part[0], b = part[1];
      const int piece = lane % 4 * 2;
      u8 *const column = to + lane / 4 * Q_COLUMN;
      *reinterpret_cast<uint4 *>(column + ((piece ^ head) & 7) * 16) =
          make_uint4(narrow(a.x), narrow(a.z), narrow(b.x), narrow(b.z));
      *reinterpret_cast<uint4 *>(column + (((piece + 1) ^ head) & 7) * 16) =
          make_uint4(narrow(a.y), narrow(a.w), narrow(b.y), narrow(b.w));
      if (lane < 4) {
        const uint4 c = part[2], d = part[3];
        *reinterpret_cast<uint4 *>(to + 8 * Q_COLUMN + ((piece ^ head) & 7) * 16) =
            make_uint4(shrunk(c.x), shrunk(c.y), shrunk(c.z), shrunk(c.w));
        *reinterpret_cast<uint4 *>(to + 8 * Q_COLUMN + (((piece + 1) ^ head) & 7) * 16) =
            make_uint4(shrunk(d.x), shrunk(d.y), shrunk(d.z), shrunk(d.w));
      }
    }
    fence_async();
  }
#endif

  float o[4][SUMS];
  float maximum[HEADS / 4], sum[HEADS / 4];  // of heads 8j + 2t and the next
  auto restart = [&]() {
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < SUMS; ++j) o[i][j] = 0;
#pragma unroll
    for (int j = 0; j < HEADS / 4; ++j) maximum[j] = NO_SCORE, sum[j] = 0;
  };
  restart();

  auto total = [&](int head) {
    float v = 0;
#pragma unroll
    for (int w = 0; w < 8; ++w) v += *reinterpret_cast<const float *>(shared + WARP_SUMS_AT + (w * HEADS + head) * 4);
    return v;
  };
  const int parts = SEPARATE ? units : min(int(blocks), units), owned = LATENT >> log_blocks;  // values of each block
  // Tells every block of the cluster a part's maxima and sums of weights.
  auto announce = [&](int part) {
    static_assert(HEADS * PARTS <= THREADS, "a thread for each head of each block");
    if (threadIdx.x < HEADS * blocks) {
      const int head = threadIdx.x % HEADS, owner = (threadIdx.x / HEADS + rank) & (blocks - 1);
      push(remote(base + WEIGHTS_AT + (part * HEADS + head) * 8, owner),
           *reinterpret_cast<const float *>(shared + MAXIMA_AT + head * 4), total(head), remote(barrier, owner));
    }
  };
  // Sends 64 values of a part's sums for each warpgroup to the blocks that own them, four heads of one value per lane: lanes
  // of even t take row g, of odd t row g + 8.
  auto deliver = [&](int part, int m) {
    const int value = group * 256 + m * 64 + warp % 4 * 16, owner = value / 16 >> (5 - log_blocks);
    const int slab = value / 16 & (owned / 16 - 1);
    const u32 signal = remote(barrier + 8, owner);
    // Of 16 values in order, eight heads each: rows g and g + 8 are values 2g and 2g + 1 of an FP8 token.
    const int place = FP8 ? 2 * g + t % 2 : t % 2 * 8 + g;
    const u32 to =
        remote(base + INBOX_AT + (part * owned * HEADS + slab * HEADS * 16 + place * 8 + t / 2 * 4) * 4, owner);
#pragma unroll
    for (int j = 0; j < HEADS / 8; ++j) {
      const float v0 = o[m][4 * j], v1 = o[m][4 * j + 1], v2 = o[m][4 * j + 2], v3 = o[m][4 * j + 3];
      const float x = __shfl_xor_sync(~0u, t % 2 ? v0 : v2, 1), y = __shfl_xor_sync(~0u, t % 2 ? v1 : v3, 1);
      push(to + j * 512, t % 2 ? x : v0, t % 2 ? y : v1, t % 2 ? v2 : x, t % 2 ? v3 : y, signal);
    }
  };
  if (blocks > 1 && threadIdx.x == 0) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(parts * HEADS * 8) : "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier + 8), "r"(parts * owned * HEADS * 4)
                 : "memory");
  }
  const u32 tile_at = base + group * TILE_BYTES;
  const u32 p_at = FP8 ? base + P_AT : base + 8 * COLUMN_BYTES;  // of tile 0
  constexpr int P_STRIDE = FP8 ? P_TILE : TILE_BYTES;
  const u32 keys_at = lower_half(tile_at), queries_at = lower_half(base + Q_AT), weights_at = lower_half(p_at);
  const u32 values_at = lower_half(base + group * 4 * COLUMN_BYTES);

  for (int unit = rank; unit < units; unit += blocks) {
    const bool more = !ONE && unit + int(blocks) < units, again = !SEPARATE && unit != int(rank);
    const bool at_once = EARLY && (ONE || unit == int(rank));  // one group of copies
    const bool complete = SEPARATE || !more;  // the part
    bool counted[2];  // this lane's rows g and g + 8
#if BULK
    if (more) bulk.look(slots, unit + blocks, width);
    counted[0] = bulk.counted >> g & 1, counted[1] = bulk.counted >> (g + 8) & 1;
#else
    if (more) read_slots(found, slots, (unit + blocks) * UNIT + my_row, width);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const u32 low = __shfl_sync(~0u, group ? fetch.token[4 + i * 2] : fetch.token[i * 2], g % 4 * 8);
      const u32 high = __shfl_sync(~0u, group ? fetch.token[5 + i * 2] : fetch.token[1 + i * 2], g % 4 * 8);
      counted[i] = (g < 4 ? low : high) != NOTHING;
    }
#endif
    float s[SUMS];
#pragma unroll
    for (int j = 0; j < SUMS; ++j) s[j] = 0;

#if FP8
    constexpr bool APART =
        HEADS <= 16;   // a sum for each scale; with more heads the keys are multiplied with their scales
    u32 factor[2][4];  // scales of rows g and g + 8
    float scaled[2][4];
    float parts[APART ? 4 : 1][SUMS];
#if BULK
    if (!again) __syncthreads();  // the queries
    barrier_wait(bulk.barrier, phase);
    phase ^= 1;
    __syncwarp();  // and zeros of other lanes
#else
    if (at_once)
      copies_wait<0>();
    else
      copies_wait<1>();
    __syncthreads();
#endif
    {
      const u8 *const own = shared + group * TILE_BYTES + (warp % 4 * 16) * ROW_BYTES + SCALES_AT;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float4 f = *reinterpret_cast<const float4 *>(own + (g + 8 * i) * ROW_BYTES);
        scaled[i][0] = f.x, scaled[i][1] = f.y, scaled[i][2] = f.z, scaled[i][3] = f.w;
        factor[i][0] = pack_f16(f.x, f.x), factor[i][1] = pack_f16(f.y, f.y);
        factor[i][2] = pack_f16(f.z, f.z), factor[i][3] = pack_f16(f.w, f.w);
        // Lane t of the quad stores group t's for the products with the values, of 32 tokens those that a lane there takes
        // side by side: 2t and 2t + 1 of each 8.
        const u32 mine = t == 0 ? factor[i][0] : t == 1 ? factor[i][1] : t == 2 ? factor[i][2] : factor[i][3];
        *reinterpret_cast<unsigned short *>(shared + SCALES16_AT + t * UNIT * 2 + (warp / 2 * 4 + g / 2) * 16 +
                                            (warp % 2 * 2 + i) * 4 + g % 2 * 2) = mine;
      }
    }
    const u32 rows_at = tile_at + (warp % 4 * 16 + lane % 16) * ROW_BYTES + lane / 16 * 16;
    u32 a[2][BATCH][4];
#pragma unroll
    for (int part = 0; part < (4 / BATCH > 1 ? 4 / BATCH : 1); ++part) {
      constexpr int STEPS = BATCH < 4 ? BATCH : 4;
#pragma unroll
      for (int k = 0; k < STEPS; ++k) load_matrices(a[part][k], rows_at + ROPE_AT + (part * STEPS + k) * 32);
      products_begin();
#pragma unroll
      for (int k = 0; k < STEPS; ++k)
        Products<HEADS, 0>::bf16(s, a[part][k], matrix(queries_at, 8 * Q_COLUMN + (part * STEPS + k) * 32),
                                 part + k);
      products_commit();
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half == 0 && !at_once && !BULK) {
        copies_wait<0>();
        __syncthreads();
      }
      u32 codes[2][BATCH / 2][4];
      auto load = [&](int part) {
        const int first = part * BATCH % 8, scales = half + part * BATCH / 8 * 2;
#pragma unroll
        for (int k = 0; k < BATCH; k += 2)
          load_matrices(codes[part % 2][k / 2], rows_at + scales * 128 + (first + k) * 16);
      };
      load(0);
#pragma unroll
      for (int part = 0; part < 16 / BATCH; ++part) {
        const int first = part * BATCH % 8,
                  scales = half + part * BATCH / 8 * 2;  // step of 16 in 128 values; these 128
        const int which = (part + (BATCH < 4 ? 4 / BATCH : 1)) % 2;
        if (part + 1 < 16 / BATCH) load(part + 1);
        products_wait<1>();
#pragma unroll
        for (int k = 0; k < BATCH; k += 2) {
          const u32(&c)[4] = codes[part % 2][k / 2];
          u32(&low)[4] = a[which][k], (&high)[4] = a[which][k + 1];
          widen_both(c[0], low[0], low[2]), widen_both(c[1], low[1], low[3]);
          widen_both(c[2], high[0], high[2]), widen_both(c[3], high[1], high[3]);
          if (!APART) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              low[i] = multiply_pair(low[i], factor[i % 2][scales]);
              high[i] = multiply_pair(high[i], factor[i % 2][scales]);
            }
          }
        }
        products_begin();
#pragma unroll
        for (int k = 0; k < BATCH; ++k) {
          const u64 queries = matrix(queries_at, (scales * 2 + (first + k) / 4) * Q_COLUMN + (first + k) % 4 * 32);
          if (APART)
            Products<HEADS, 0>::f16(parts[APART ? scales : 0], a[which][k], queries, first + k);
          else
            Products<HEADS, 0>::f16(s, a[which][k], queries, 1);
        }
        products_commit();
      }
    }
    if (APART) {
      products_wait<0>();
      hold(s);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        hold(parts[APART ? i : 0]);
#pragma unroll
        for (int j = 0; j < SUMS; ++j) s[j] += scaled[j / 2 % 2][i] * parts[APART ? i : 0][j];
      }
    }
#else
    auto score = [&](int k) {  // one column of each half
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int kk = 0; kk < 4; ++kk) {
          const int column = half * 4 + k;
          Products<HEADS, 0>::bf16(s, matrix(keys_at, column * COLUMN_BYTES + kk * 32),
                                   matrix(queries_at, column * Q_COLUMN + kk * 32), k + half + kk);
        }
    };
    auto score_rope = [&]() {
#pragma unroll
      for (int kk = 0; kk < 4; ++kk)
        Products<HEADS, 0>::bf16(s, matrix(keys_at, 8 * COLUMN_BYTES + kk * 32),
                                 matrix(queries_at, 8 * Q_COLUMN + kk * 32), 1);
      products_commit();
    };
    if (at_once) {
      copies_wait<0>();
      fence_async();
      __syncthreads();
      products_begin();
#pragma unroll
      for (int k = 0; k < 4; ++k) score(k);
      score_rope();
    } else {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (k == 0) copies_wait<4>();
        if (k == 1) copies_wait<3>();
        if (k == 2) copies_wait<2>();
        if (k == 3) copies_wait<1>();
        fence_async();
        __syncthreads();
        products_begin();
        score(k);
        products_commit();
      }
      copies_wait<0>();
      fence_async();
      group_barrier(group);
      products_begin();
      score_rope();
    }
#endif
    products_wait<0>();
    hold(s);

    // The largest score of each head over the unit.
#pragma unroll
    for (int j = 0; j < HEADS / 8; ++j) {
      float2 f = make_float2(scale, scale);
      if (FP8) f = read_pair(shared + FACTORS_AT + (8 * j + 2 * t) * 4);
      count_scores(s, j, counted, f);
      const float2 most = largest_scores(s, j);
      if (g == 0) *reinterpret_cast<float2 *>(shared + WARPS_AT + (warp * HEADS + 8 * j + 2 * t) * 4) = most;
    }
    __syncthreads();
    if (FP8 && more && !BULK) {
      // The tail is dead: scores are made, scales were copied.
      const int unit_next = unit + blocks;
      take(unit_next);
      fetch.tail(group, lane), copies_commit();
    }
#pragma unroll
    for (int j = 0; j < HEADS / 8; ++j) {
      float x = NO_SCORE, y = NO_SCORE;
#pragma unroll
      for (int w = 0; w < 8; ++w) {
        const float2 v = read_pair(shared + WARPS_AT + (w * HEADS + 8 * j + 2 * t) * 4);
        x = fmaxf(x, v.x), y = fmaxf(y, v.y);
      }
      x = fmaxf(x, maximum[2 * j]), y = fmaxf(y, maximum[2 * j + 1]);
      weigh(s, j, make_float2(x, y), maximum, sum, o, again);
      const int head = 8 * j + lane % 8, piece = warp % 4 * 2 + lane / 8 % 2;
      store_matrices_transposed(p_at + group * P_STRIDE + head * 128 + ((piece ^ head) & 7) * 16,
                                pack_p(s[4 * j], s[4 * j + 1]), pack_p(s[4 * j + 2], s[4 * j + 3]));
    }
    if (complete) {
      // What the other blocks must know of this one.
#pragma unroll
      for (int j = 0; j < HEADS / 8; ++j) {
        const float2 all = summed_over_tokens(sum[2 * j], sum[2 * j + 1]);
        if (g == 0) {
          *reinterpret_cast<float2 *>(shared + WARP_SUMS_AT + (warp * HEADS + 8 * j + 2 * t) * 4) = all;
          if (warp == 0)
            *reinterpret_cast<float2 *>(shared + MAXIMA_AT + (8 * j + 2 * t) * 4) =
                make_float2(maximum[2 * j], maximum[2 * j + 1]);
        }
      }
    }
    fence_async();
    __syncthreads();

    // The weighted sums of 256 values.
    products_begin();
#if FP8
    if (complete && blocks > 1) announce(SEPARATE ? unit : rank);
    u32 codes[2][BATCH / 2][4], factors[2][BATCH / 2][4];
    auto load = [&](int part) {
      const int first = part * BATCH % 8, m = part * BATCH / 8, scales = group * 2 + m / 2;  // step of 16 tokens
#pragma unroll
      for (int k = 0; k < BATCH; k += 2) {
        load_matrices_transposed(codes[part % 2][k / 2],
                                 base + ((first + k) * 16 + lane) * ROW_BYTES + group * 256 + m * 64 + warp % 4 * 16);
        const uint4 four =
            *reinterpret_cast<const uint4 *>(shared + SCALES16_AT + scales * UNIT * 2 + ((first + k) / 2 * 4 + t) * 16);
        factors[part % 2][k / 2][0] = four.x, factors[part % 2][k / 2][1] = four.y;
        factors[part % 2][k / 2][2] = four.z, factors[part % 2][k / 2][3] = four.w;
      }
    };
    load(0);
#pragma unroll
    for (int part = 0; part < 32 / BATCH; ++part) {
      const int first = part * BATCH % 8, m = part * BATCH / 8, which = part % 2;
      if (part + 1 < 32 / BATCH) load(part + 1);
      products_wait<1>();
      // Of the products of 64 values, the last were issued two turns ago.
      constexpr int TURNS = 8 / BATCH;
      if (part > TURNS && part % TURNS == 1) {
        hold(o[part / TURNS - 1]);
        if (complete && blocks > 1) deliver(SEPARATE ? unit : rank, part / TURNS - 1);
      }
#pragma unroll
      for (int k = 0; k < BATCH; k += 2) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          u32 even, odd;  // values 2g and 2g + 1 of tokens 2t and 2t + 1
          widen_both(__byte_perm(codes[which][k / 2][i], 0, 0x3120), even, odd);
          a[which][k + i / 2][i % 2 * 2] = multiply_pair(even, factors[which][k / 2][i]);
          a[which][k + i / 2][i % 2 * 2 + 1] = multiply_pair(odd, factors[which][k / 2][i]);
        }
      }
      products_begin();
#pragma unroll
      for (int k = 0; k < BATCH; ++k)
        Products<HEADS, 0>::f16(o[m], a[which][k], matrix(weights_at, (first + k) / 4 * P_STRIDE + (first + k) % 4 * 32),
                                1);
      products_commit();
      if (more && part + 1 == 32 / BATCH) {  // all codes are in registers
#if BULK
        __syncthreads();
        bulk.ask(unit + blocks, count, lane);
#else
        group_barrier(group);
        fetch.half(lane), copies_commit();
#endif
      }
    }
    products_wait<0>();
    hold(o[3]);
    if (complete && blocks > 1) deliver(SEPARATE ? unit : rank, 3);
#else
#pragma unroll
    for (int m = 0; m < 4; ++m) {
#pragma unroll
      for (int tile = 0; tile < 2; ++tile)
#pragma unroll
        for (int k = 0; k < 4; ++k)
          Products<HEADS, 1>::bf16(o[m], matrix(values_at, tile * TILE_BYTES + m * COLUMN_BYTES + k * 2048),
                                   matrix(weights_at, tile * P_STRIDE + k * 32), 1);
      products_commit();
    }
    if (complete && blocks > 1) announce(SEPARATE ? unit : rank);
    if (more) take(unit + blocks);
    // A quarter of the values at a time: its columns are free, its sums are sent while the others are made.
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      if (m == 0) products_wait<3>();
      if (m == 1) products_wait<2>();
      if (m == 2) products_wait<1>();
      if (m == 3) products_wait<0>();
      if (more) {
        group_barrier(group);
        fetch.column(m), copies_commit();
      }
      hold(o[m]);
      if (complete && blocks > 1) deliver(SEPARATE ? unit : rank, m);
    }
    if (more) {
      __syncthreads();
      fetch.tail(group, lane), copies_commit();
    }
#endif
    if (SEPARATE && more && blocks > 1) restart();
    if (ONE) break;  // or the compiler prepares for a loop
  }
  copies_wait<0>();  // the queries of a block without a unit

  if (blocks == 1) {
    constexpr int PITCH = LATENT * 2 + 16;
    __syncthreads();  // the other group has read its values
#pragma unroll
    for (int j = 0; j < HEADS / 8; ++j) {
      const int head = 8 * j + 2 * t;
      const float x = works ? total(head) : 0, y = works ? total(head + 1) : 0;
      const float share_x = x > 0 ? 1 / x : 0, share_y = y > 0 ? 1 / y : 0;
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const u32 low = pack_bf16(o[m][4 * j] * share_x, o[m][4 * j + 1] * share_y);
        const u32 high = pack_bf16(o[m][4 * j + 2] * share_x, o[m][4 * j + 3] * share_y);
        const int value = group * 256 + m * 64 + warp % 4 * 16;
        if (FP8) {  // rows g and g + 8 are values 2g and 2g + 1
          *reinterpret_cast<u32 *>(shared + head * PITCH + (value + 2 * g) * 2) = __byte_perm(low, high, 0x5410);
          *reinterpret_cast<u32 *>(shared + (head + 1) * PITCH + (value + 2 * g) * 2) = __byte_perm(low, high, 0x7632);
        } else {
          store_matrices_transposed(base + (8 * j + lane % 8) * PITCH + (value + lane / 8 % 2 * 8) * 2, low, high);
        }
      }
    }
    __syncthreads();
    for (int at = threadIdx.x; at < own_heads * 64; at += THREADS)
      *reinterpret_cast<uint4 *>(out + (size_t(row) * heads + first_head) * (LATENT * 2) + at * 16) =
          *reinterpret_cast<const uint4 *>(shared + at / 64 * PITCH + at % 64 * 16);
    return;
  }

  // Each part's share of the row, while the sums are on their way.
  barrier_wait(barrier, 0);
  if (threadIdx.x < PARTS * HEADS) {
    const int part = threadIdx.x / HEADS, head = threadIdx.x % HEADS;
    const u8 *const weights = shared + WEIGHTS_AT + head * 8;
    float2 weight[PARTS];
    float most = NO_SCORE, all = 0, own = 0;
#pragma unroll
    for (int c = 0; c < PARTS; ++c)
      weight[c] = c < parts ? read_pair(weights + c * HEADS * 8) : make_float2(NO_SCORE, 0);
#pragma unroll
    for (int c = 0; c < PARTS; ++c) most = fmaxf(most, weight[c].x);
    if (most == NO_SCORE) most = 0;
#pragma unroll
    for (int c = 0; c < PARTS; ++c) {
      const float grown = exp2_fast(weight[c].x - most);
      all += grown * weight[c].y;
      if (c == part) own = grown;
    }
    if (part < parts) *reinterpret_cast<float *>(shared + SHARES_AT + threadIdx.x * 4) = all > 0 ? own / all : 0;
  }
  __syncthreads();
  // A thread has one head, and more than one value of it only where the blocks of a row are few. All but the sums is at hand when
  // they come.
  const int head = threadIdx.x / 128 % (HEADS / 8) * 8 + threadIdx.x % 8, pitch = owned * HEADS;
  const bool stores = head < own_heads && lane % 16 < 8;
  const u8 *target = out + ((size_t(row) * heads + first_head + head) * LATENT + rank * owned +
                            threadIdx.x / (16 * HEADS) * 16 + threadIdx.x % 128 / 8) * 2;
  settle(target);
  float share[PARTS];
#pragma unroll
  for (int c = 0; c < PARTS; ++c) share[c] = *reinterpret_cast<const float *>(shared + SHARES_AT + (c * HEADS + head) * 4);
  barrier_wait(barrier + 8, 0);
  const float *inbox = reinterpret_cast<const float *>(shared + INBOX_AT) + threadIdx.x;
  for (int left = pitch - int(threadIdx.x); left > 0; left -= THREADS) {
    float x = 0;
    if (ONE && parts == PARTS) {  // so many blocks, then
#pragma unroll
      for (int c = 0; c < PARTS; ++c) x += share[c] * inbox[c * (LATENT / PARTS) * HEADS];
    } else {
#pragma unroll
      for (int c = 0; c < PARTS; ++c)
        if (c < parts) x += share[c] * inbox[c * pitch];
    }
    const float next = __shfl_down_sync(~0u, x, 8);  // of the next value
    if (stores) *reinterpret_cast<u32 *>(const_cast<u8 *>(target)) = pack_bf16(x, next);
    inbox += THREADS, target += THREADS / HEADS * 2;
  }
}
