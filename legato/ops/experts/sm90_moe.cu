// y[t] = sum over a of weights[t, a] * w2[e] swiglu(w13[e] x[t]), e = ids[t, a], and a shared expert, in one launch.
//
// One block per multiprocessor, all resident. First half: a "unit" is eight features of one expert, their gate rows and
// their up rows together in one tile of 16 outputs, for up to eight rows of x that chose the expert (one tile of
// mma.m16n8k16; an expert with more rows is several "tiles"). The warps of a block share a unit's K, so after the sums have
// met in shared memory one lane has gate and up of a feature. Second half: a block owns up to STRIPS strips of 16 outputs
// of every expert, a warp takes strips of one tile at a time with all of their K, and the block adds up what the choices
// of its rows give, in their order, in float32.
//
// Nothing stands between the halves: eight features of a row are stored at once, over a value that no feature has, and
// whoever needs them loads until they are there. Two buffers take turns; each launch clears what the last one used.
//
// Weights are packed (sm90_formats.cuh) so that whatever a warp reads lies in one piece. Each warp streams its own
// sequence of them through a ring of its own with bulk copies, across units and halves: the ring is full of the second
// half's weights while its features are computed. What the shared expert's units need is asked for before the launch's
// dependency is resolved, for nobody needs to know the routing for that.
//
// Who computes what follows from ids alone; every block works it out for itself. The order of every sum is fixed: it
// depends neither on who computes it nor on what other rows chose.
//
// Macros: FORMAT of the routed experts; SHARED: format of the shared one, or NONE (-1); HIDDEN, WIDTH: D and F, multiples
// of 128; GRID: blocks; WARPS; SLOTS of a ring, and steps of a slot: CHUNK, SHARED_CHUNK; DYNAMIC_BYTES of shared memory
// that the launch gives; BUFFERS in which sums meet: how far warps may part; SPAN: strips of an item; X_ROWS: rows of a tile, and of x that fit (up to so many rows of the
// launch stay for the whole first half, more are fetched tile by tile); MOST_PAIRS: rows * choices; MOST_TILES;
// MOST_FEATURES: rows of a buffer of features; EXPERTS: how many there are; TERMS_SHARED: 1 where what a block adds up fits
// the shared memory of the first half's rows.

#include "sm90_formats.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int SHARED_FORMAT = SHARED == NONE ? FORMAT : SHARED;
typedef Format<FORMAT> Routed;
typedef Format<SHARED_FORMAT> Shared;
constexpr int UNITS = WIDTH / 8;           // of one tile
constexpr int DEPTH = HIDDEN / 128;        // K of the first half, in 128
constexpr int STRIPS_ALL = HIDDEN / 16;
constexpr int STRIPS = (STRIPS_ALL + GRID - 1) / GRID;
constexpr int PIECE = WIDTH % 256 ? 128 : 256;  // of K that the second half holds of its rows in registers
constexpr int PIECES = WIDTH / PIECE;
constexpr int SLICE = (DEPTH + WARPS - 1) / WARPS;  // of K of a warp in the first half, at most, in 128
constexpr int X_PITCH = SLICE * 256 + 16;           // rows start in different banks
constexpr int X_BYTES = X_ROWS * X_PITCH;
constexpr int PIECE_STEPS = PIECE / Routed::STEP_K, SHARED_PIECE_STEPS = PIECE / Shared::STEP_K;
constexpr int CHUNK_BYTES = CHUNK * Routed::BYTES, SHARED_CHUNK_BYTES = SHARED == NONE ? 0 : SHARED_CHUNK * Shared::BYTES;
constexpr int SLOT_BYTES = CHUNK_BYTES > SHARED_CHUNK_BYTES ? CHUNK_BYTES : SHARED_CHUNK_BYTES;
constexpr int RING_BYTES = SLOTS * SLOT_BYTES;
constexpr int COLUMN_PAIRS = (X_ROWS + 1) / 2;             // of a tile's eight columns, those that may be rows
constexpr int PARTIAL_FLOATS = 32 * COLUMN_PAIRS;          // of a warp's sums of a unit
constexpr int PARTIAL_BYTES = WARPS * PARTIAL_FLOATS * 4;  // of a buffer
static_assert(WARPS == 16, "the order of a sum is that of four groups of four warps");
constexpr size_t FEATURE_BYTES = size_t(MOST_FEATURES) * WIDTH * 2;
constexpr int TERM_PITCH = STRIPS * 16 + 4;  // floats
static_assert(SLOT_BYTES % 16 == 0 && X_BYTES % 16 == 0, "copies are aligned");
static_assert(WARPS * (RING_BYTES + X_BYTES) + BUFFERS * PARTIAL_BYTES == DYNAMIC_BYTES, "the launch counts as this does");
static_assert(HIDDEN % 128 == 0 && (WIDTH % 256 == 0 || WIDTH == 128), "K comes in steps and pieces");

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  while (!barrier_passed(barrier, parity)) {
  }
}

__device__ __forceinline__ void copy_bulk(u32 target, const void *source, u32 bytes, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
          target),
      "l"(source), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// Past the L1: others write these bytes in this launch or the one before.
__device__ __forceinline__ void copy16(u32 target, const void *source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
}

__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ uint4 load_relaxed(const u8 *pointer) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(pointer)
               : "memory");
  return v;
}

__device__ __forceinline__ void store_relaxed(u8 *pointer, uint4 v) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(pointer), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}

// What no feature is: the conversion to bfloat16 makes one NaN, and this is another.
constexpr u32 MISSING = 0xffffffffu;

// An item of the second half: up to SPAN strips of a tile, or one of a shared expert's tile, whose weights may be four times as
// many bytes and would keep one warp busy when all others are done. Items go round the warps.
struct Item {
  int tile, strip, strips;
};

__device__ __forceinline__ Item item_of(int number, int live, int shared_tiles, int num_tiles) {
  const int of_shared = shared_tiles * live, rest = number - of_shared;
  if (live == 0) return {num_tiles, 0, 0};
  if (SHARED != NONE && rest < 0) return {number / live, number % live, 1};
  if (SPAN >= STRIPS) return {shared_tiles + rest, 0, live};
  const int per_tile = (live + SPAN - 1) / SPAN, strip = rest % per_tile * SPAN;
  return {shared_tiles + rest / per_tile, strip, min(SPAN, live - strip)};
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    moe(const u8 *__restrict__ w13, const u8 *__restrict__ w2, const float *__restrict__ factors,
        const u8 *__restrict__ shared13, const u8 *__restrict__ shared2, const u8 *__restrict__ x, const int *ids,
        const float *weights, u8 *__restrict__ y, u8 *both_features, float *terms_global, u64 *state, int rows,
        int choices, int experts, int x_stride) {
  extern __shared__ __align__(1024) u8 memory[];
  __shared__ __align__(8) u64 full_barriers[WARPS][SLOTS];
  __shared__ __align__(8) u64 met_barriers[BUFFERS], free_barriers[BUFFERS];
  __shared__ int expert_of[MOST_TILES];     // -1: the shared expert
  __shared__ int count_of[MOST_TILES];      // rows of a tile
  __shared__ int pair_of[MOST_TILES][X_ROWS];  // row * choices + choice (the shared expert's follow), and the row 16 bits up
  __shared__ int id_of[MOST_PAIRS];
  __shared__ float weight_of[MOST_PAIRS];
  __shared__ int seen_of[EXPERTS], open_of[EXPERTS];  // pairs of an expert so far, and its last tile
  __shared__ float down_of[MOST_TILES];
  __shared__ int tiles_found;

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int block = blockIdx.x, pairs = rows * choices;
  u8 *const ring = memory + warp * RING_BYTES;
  float *const partial = reinterpret_cast<float *>(memory + WARPS * RING_BYTES);
  u8 *const x_all = memory + WARPS * RING_BYTES + BUFFERS * PARTIAL_BYTES, *const x_own = x_all + warp * X_BYTES;
  float *const terms = TERMS_SHARED ? reinterpret_cast<float *>(x_all)
                                    : terms_global + size_t(block) * (pairs + rows) * TERM_PITCH;
  const u32 ring_at = shared_address(ring), full = shared_address(full_barriers[warp]);
  u64 once;  // most weights are read by one block only
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));

  // This warp's slice of K in the first half, and this block's strips in the second.
  const int slice_begin = warp * DEPTH / WARPS;
  const int slice = DEPTH % WARPS == 0 ? SLICE : (warp + 1) * DEPTH / WARPS - slice_begin;
  const int strip_begin = block * STRIPS_ALL / GRID, live = (block + 1) * STRIPS_ALL / GRID - strip_begin;

  // The shared expert's tiles stand first. Its units go round the blocks, whatever the routing.
  const int shared_tiles = SHARED == NONE ? 0 : (rows + X_ROWS - 1) / X_ROWS;
  const int shared_all = shared_tiles * UNITS;
  const int shared_units = shared_all > block ? (shared_all - block + GRID - 1) / GRID : 0;
  int routed_first = 0, routed_units = 0, num_tiles = shared_tiles;

  // What this warp reads, in order: units of the shared expert, routed units, then strips of tiles. Lane 0 asks for it.
  const u8 *source = nullptr;
  int source_steps = 0, source_chunk = 0, source_run = 0, source_unit = 0, fetch_slot = 0, in_flight = 0;
  int source_more = 0;  // units of the same tile that follow the open one
  int source_number = warp;  // of the item of the second half
  bool source_shared = false;
  auto open = [&](bool known) {
    if (source_unit < shared_units) {
      const int unit = (block + source_unit * GRID) % UNITS;
      source_shared = true, source_chunk = SHARED_CHUNK;
      source_steps = slice * (128 / Shared::STEP_K);
      source = shared13 + (size_t(unit) * DEPTH + slice_begin) * (128 / Shared::STEP_K) * Shared::BYTES;
      ++source_unit;
      return true;
    }
    if (!known) return false;
    if (source_unit < shared_units + routed_units) {
      constexpr size_t unit_bytes = size_t(DEPTH) * (128 / Routed::STEP_K) * Routed::BYTES;
      source_steps = slice * (128 / Routed::STEP_K);
      if (source_more > 0) {  // behind the end of what was asked for of the last one
        --source_more;
        source += unit_bytes - source_steps * Routed::BYTES;
      } else {
        const int unit = routed_first + source_unit - shared_units;
        source_shared = false, source_chunk = CHUNK;
        source_more = UNITS - 1 - unit % UNITS;
        source = w13 + (size_t(expert_of[shared_tiles + unit / UNITS]) * UNITS + unit % UNITS) * unit_bytes +
                 slice_begin * (128 / Routed::STEP_K) * Routed::BYTES;
      }
      ++source_unit;
      return true;
    }
    const Item source_item = item_of(source_number, live, shared_tiles, num_tiles);
    if (source_item.tile >= num_tiles) return false;
    // All of an item in one run where K is one piece; else piece by piece, strip by strip.
    const int expert = expert_of[source_item.tile], strips = source_item.strips;
    const int strip = strip_begin + source_item.strip + (PIECES == 1 ? 0 : source_run % strips);
    const int piece = PIECES == 1 ? 0 : source_run / strips;
    source_shared = SHARED != NONE && expert < 0;
    if (source_shared) {
      source_chunk = SHARED_CHUNK;
      source_steps = SHARED_PIECE_STEPS * (PIECES == 1 ? strips : 1);
      source = shared2 + (size_t(strip) * PIECES + piece) * SHARED_PIECE_STEPS * Shared::BYTES;
    } else {
      source_chunk = CHUNK;
      source_steps = PIECE_STEPS * (PIECES == 1 ? strips : 1);
      source = w2 + ((size_t(expert) * STRIPS_ALL + strip) * PIECES + piece) * PIECE_STEPS * Routed::BYTES;
    }
    if (PIECES == 1 || ++source_run == PIECES * strips) source_run = 0, source_number += WARPS;
    return true;
  };
  // One more chunk into the next slot; false where nothing is left, or nothing is known yet.
  auto fetch = [&](bool known) {
    while (source_steps == 0)
      if (!open(known)) return false;
    const int steps = min(source_chunk, source_steps);
    const u32 bytes = steps * (source_shared ? Shared::BYTES : Routed::BYTES);
    barrier_expect(full + fetch_slot * 8, bytes);
    copy_bulk(ring_at + fetch_slot * SLOT_BYTES, source, bytes, full + fetch_slot * 8, once);
    source += bytes, source_steps -= steps;
    if (++fetch_slot == SLOTS) fetch_slot = 0;
    return true;
  };

  if (lane == 0) {
    for (int slot = 0; slot < SLOTS; ++slot) barrier_init(full + slot * 8, 1);
    if (warp == 0)
      for (int i = 0; i < BUFFERS; ++i) {
        barrier_init(shared_address(&met_barriers[i]), WARPS);
        barrier_init(shared_address(&free_barriers[i]), 1);
      }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    while (in_flight < SLOTS && fetch(false)) ++in_flight;
  }
  for (int i = threadIdx.x; i < experts; i += THREADS) seen_of[i] = 0;
  for (int i = threadIdx.x; i < MOST_TILES; i += THREADS) count_of[i] = 0;
  for (int i = threadIdx.x; i < shared_tiles * X_ROWS; i += THREADS) pair_of[i / X_ROWS][i % X_ROWS] = pairs + i | i << 16;
  __syncthreads();
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");

  // All that the preceding kernels wrote is asked for before any of it is used.
  const u64 finished = __ldcg(reinterpret_cast<unsigned long long *>(state));
  const u64 used_bytes[2] = {__ldcg(reinterpret_cast<unsigned long long *>(state) + 1),
                             __ldcg(reinterpret_cast<unsigned long long *>(state) + 2)};
  const int own_pair = threadIdx.x < pairs ? int(threadIdx.x) : -1;
  int own_id = 0;
  float own_weight = 0.0f;
  if (own_pair >= 0) own_id = __ldcg(ids + own_pair), own_weight = __ldcg(weights + own_pair);
  // Rows of x that stay for the whole first half.
  const bool resident = rows <= X_ROWS;
  auto stage_row = [&](int slot, int row) {
    const u8 *from = x + (size_t(row) * x_stride + slice_begin * 128) * 2;
    for (int at = lane * 16; at < slice * 256; at += 512) copy16(shared_address(x_own) + slot * X_PITCH + at, from + at);
  };
  if (resident)
    for (int row = 0; row < rows; ++row) stage_row(row, row);
  copies_commit();
  if (own_pair >= 0) id_of[own_pair] = own_id, weight_of[own_pair] = own_weight;
  for (int i = threadIdx.x + THREADS; i < pairs; i += THREADS) {
    id_of[i] = __ldcg(ids + i);
    weight_of[i] = __ldcg(weights + i);
  }
  // Launches take turns with two buffers of features; each clears what the one before it used. The first word of `state`
  // counts blocks that have finished, this one not yet among them; the others say how many bytes of a buffer were used.
  const int turn = finished / GRID & 1;
  u8 *const features = both_features + turn * FEATURE_BYTES;
  {
    u8 *const used = both_features + (turn ^ 1) * FEATURE_BYTES;
    const u64 bytes = turn ? used_bytes[0] : used_bytes[1];
    for (u64 at = (u64(block) * THREADS + threadIdx.x) * 16; at < bytes; at += u64(GRID) * THREADS * 16)
      *reinterpret_cast<uint4 *>(used + at) = make_uint4(MISSING, MISSING, MISSING, MISSING);
    if (block == 0 && threadIdx.x == 0) state[1 + turn] = u64(pairs + rows) * WIDTH * 2;
  }

  // The tiles, in the order in which pairs first name their experts; an expert's pairs in ascending order, X_ROWS to a tile.
  if (threadIdx.x < shared_tiles)
    expert_of[threadIdx.x] = -1, count_of[threadIdx.x] = min(X_ROWS, rows - int(threadIdx.x) * X_ROWS);
  __syncthreads();
  if (warp == 0) {
    const u32 lower = (1u << lane) - 1;
    int found = shared_tiles;
    for (int first = 0; first < pairs; first += 32) {
      const int pair = first + lane, id = pair < pairs ? id_of[pair] : -1;
      const bool valid = id >= 0 && id < experts;
      const u32 same = __match_any_sync(0xffffffffu, valid ? id : -1 - lane);
      const int before = valid ? seen_of[id] : 0, rank = before + __popc(same & lower), place = rank % X_ROWS;
      const bool opens = valid && place == 0;
      const u32 openers = __ballot_sync(0xffffffffu, opens);
      int tile = found + __popc(openers & lower), from = lane;
      const int opener = rank - place - before;  // among the same, or of an earlier group where negative
      if (valid && opener >= 0) {
        u32 left = same;
        for (int i = 0; i < opener; ++i) left &= left - 1;
        from = __ffs(left) - 1;
      }
      tile = __shfl_sync(0xffffffffu, tile, from);
      if (valid && opener < 0) tile = open_of[id];
      __syncwarp();
      if (valid) {
        pair_of[tile][place] = pair | pair / choices << 16;
        if (opens) expert_of[tile] = id;
        atomicMax(&count_of[tile], place + 1);
        if (same >> lane == 1) seen_of[id] = rank + 1, open_of[id] = tile;
      }
      __syncwarp();
      found += __popc(openers);
    }
    if (lane == 0) tiles_found = found;
  }
  __syncthreads();
  num_tiles = tiles_found;

  // This block's routed units: so many that all blocks need about the same time, with what they have of the shared expert.
  {
    const float all = float(num_tiles - shared_tiles) * UNITS;
    // Widening bounds the four-bit formats: there a unit of the shared expert, which is read ahead, costs about as one of
    // theirs in spite of its bytes.
    constexpr float by_bytes = float(128 / Shared::STEP_K * Shared::BYTES) / (128 / Routed::STEP_K * Routed::BYTES);
    constexpr float ratio = SHARED == NONE ? 0.0f : FORMAT == NVFP4 || FORMAT == INT4 ? 1.0f : by_bytes;
    const int more = shared_all % GRID, least = shared_all / GRID;  // `more` blocks have one unit of it more than `least`
    const float fair = (all + shared_all * ratio) / GRID;
    const float with_more = more == 0 ? 0.0f : fmaxf(0.0f, fair - (least + 1) * ratio);
    const float without = (all - more * with_more) / (GRID - more);
    auto boundary = [&](int b) {
      if (b == GRID) return int(all);
      return int(b < more ? b * with_more : more * with_more + (b - more) * without);
    };
    routed_first = boundary(block);
    routed_units = boundary(block + 1) - routed_first;
  }
  if (lane == 0)
    while (in_flight < SLOTS && fetch(true)) ++in_flight;
  __syncwarp();
  // For the second half: nobody waits for these while there are weights to ask for.
  if (FORMAT == NVFP4)
    for (int i = threadIdx.x; i < num_tiles; i += THREADS)
      down_of[i] = expert_of[i] < 0 ? 1.0f : factors[expert_of[i] * 3 + 2];

  int slot = 0;
  u32 parity = 0;
  auto next_slot = [&]() {
    __syncwarp();
    if (lane == 0) fetch(true);
    if (++slot == SLOTS) slot = 0, parity ^= 1;
  };

  // First half.
  copies_wait<0>();
  __syncwarp();
  int staged = -1;
  for (int index = 0; index < shared_units + routed_units; ++index) {
    const bool is_shared = SHARED != NONE && index < shared_units;
    const int unit = is_shared ? block + index * GRID : shared_tiles * UNITS + routed_first + index - shared_units;
    const int tile = unit / UNITS, feature = unit % UNITS * 8;
    const int count = count_of[tile];
    const bool reduces = warp == index % WARPS;
    auto row_of = [&](int place) { return pair_of[tile][place] >> 16; };
    if (!resident && tile != staged) {
      __syncwarp();
      for (int place = 0; place < count; ++place) stage_row(place, row_of(place));
      copies_commit();
      copies_wait<0>();
      __syncwarp();
      staged = tile;
    }
    float gate_factor = 1.0f, up_factor = 1.0f;
    if (FORMAT == NVFP4 && reduces && !is_shared) {
      gate_factor = factors[expert_of[tile] * 3];
      up_factor = factors[expert_of[tile] * 3 + 1];
    }
    const int place = g < count ? g : 0;  // columns beyond the tile's rows are computed and not read
    const u8 *x_lane = x_own + (resident ? row_of(place) : place) * X_PITCH + t * 32;
    Sums sums = {};
    if (is_shared) {
      for (int left = slice * (128 / Shared::STEP_K); left > 0; left -= SHARED_CHUNK) {
        barrier_wait(full + slot * 8, parity);
#pragma unroll
        for (int s = 0; s < SHARED_CHUNK; ++s)
          if (s < left)
            multiply<SHARED_FORMAT>(sums, ring + slot * SLOT_BYTES + s * Shared::BYTES, lane, [&](int b) {
              const u8 *at = x_lane + s * Shared::STEP_K * 2 + b * 128;
              return Fragment{load16(at), load16(at + 16)};
            });
        x_lane += SHARED_CHUNK * Shared::STEP_K * 2;
        next_slot();
      }
    } else {
      for (int left = slice * (128 / Routed::STEP_K); left > 0; left -= CHUNK) {
        barrier_wait(full + slot * 8, parity);
#pragma unroll
        for (int s = 0; s < CHUNK; ++s)
          if (s < left)
            multiply<FORMAT>(sums, ring + slot * SLOT_BYTES + s * Routed::BYTES, lane, [&](int b) {
              const u8 *at = x_lane + s * Routed::STEP_K * 2 + b * 128;
              return Fragment{load16(at), load16(at + 16)};
            });
        x_lane += CHUNK * Routed::STEP_K * 2;
        next_slot();
      }
    }
    // The warps' sums meet in one of two buffers; one warp after the other adds them up.
    const int buffer = index % BUFFERS;
    const u32 met = shared_address(&met_barriers[buffer]), freed = shared_address(&free_barriers[buffer]);
    float *const here = partial + buffer * (PARTIAL_BYTES / 4);
    if (index >= BUFFERS) barrier_wait(freed, (index / BUFFERS - 1) & 1);
    const float4 own =
        make_float4(sums[0][0] + sums[1][0], sums[0][1] + sums[1][1], sums[0][2] + sums[1][2], sums[0][3] + sums[1][3]);
    const bool few = COLUMN_PAIRS == 1 || count <= 2;  // all in the lanes of t = 0
    if (few ? t == 0 : t < COLUMN_PAIRS)
      reinterpret_cast<float4 *>(here + warp * PARTIAL_FLOATS)[few ? g : g * COLUMN_PAIRS + t] = own;
    __syncwarp();
    if (lane == 0) barrier_arrive(met);
    if (reduces) {
      barrier_wait(met, index / BUFFERS & 1);
      // Four groups of four warps, whoever adds them: of one or two rows eight lanes a group, else every lane all of its place.
      auto group_sum = [&](int group, int place_of) {
        const float4 *from = reinterpret_cast<const float4 *>(here + group * 4 * PARTIAL_FLOATS) + place_of;
        float4 sum = from[0];
#pragma unroll
        for (int w = 1; w < 4; ++w) {
          const float4 one = from[w * (PARTIAL_FLOATS / 4)];
          sum.x += one.x, sum.y += one.y, sum.z += one.z, sum.w += one.w;
        }
        return sum;
      };
      float4 total;
      if (few) {
        total = group_sum(lane / 8, lane % 8);
#pragma unroll
        for (int step = 8; step <= 16; step *= 2) {
          total.x += __shfl_xor_sync(0xffffffffu, total.x, step), total.y += __shfl_xor_sync(0xffffffffu, total.y, step);
          total.z += __shfl_xor_sync(0xffffffffu, total.z, step), total.w += __shfl_xor_sync(0xffffffffu, total.w, step);
        }
      } else {
        const int place_of = g * COLUMN_PAIRS + min(t, COLUMN_PAIRS - 1);
        const float4 a = group_sum(0, place_of), b = group_sum(1, place_of);
        const float4 c = group_sum(2, place_of), d = group_sum(3, place_of);
        total = make_float4((a.x + b.x) + (c.x + d.x), (a.y + b.y) + (c.y + d.y), (a.z + b.z) + (c.z + d.z),
                            (a.w + b.w) + (c.w + d.w));
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(freed);
      const u32 both = to_bf16_pair(silu(total.x * gate_factor) * (total.z * up_factor),
                                    silu(total.y * gate_factor) * (total.w * up_factor));
      // Lane n writes row n's eight features at once: their presence says that they are there. In a block of 64, lanes'
      // first eight columns stand before their last eight.
      u32 part[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int from = few ? 2 * i : 8 * i + lane / 2 % 4;
        const u32 first = __shfl_sync(0xffffffffu, both, from);
        const u32 second = __shfl_sync(0xffffffffu, both, from + (few ? 1 : 4));
        part[i] = __byte_perm(first, second, lane % 2 ? 0x7632 : 0x5410);
      }
      const int column = feature / 64 * 64 + feature / 8 % 2 * 32 + feature / 16 % 4 * 8;
      if (lane < count)
        store_relaxed(features + (size_t(pair_of[tile][lane] & 0xffff) * WIDTH + column) * 2,
                      make_uint4(part[0], part[1], part[2], part[3]));
    }
  }

  // What a block adds up lies where its rows of x were.
  __syncthreads();

  // Second half. A lane holds its part of its row for a piece of K, and asks for the next where it takes the last.
  auto item_at = [&](int number) { return item_of(number, live, shared_tiles, num_tiles); };
  auto row_at = [&](int number, int piece) {
    const int tile = min(item_at(number).tile, num_tiles - 1), place = g < count_of[tile] ? g : 0;
    return features + (size_t(pair_of[tile][place] & 0xffff) * WIDTH + piece * PIECE) * 2 + t * 16;
  };
  Fragment held[PIECE / 64];
  const u8 *row = nullptr;
  if (item_at(warp).tile < num_tiles) {
    row = row_at(warp, 0);
#pragma unroll
    for (int b = 0; b < PIECE / 64; ++b) held[b] = {load_relaxed(row + b * 128), load_relaxed(row + b * 128 + 64)};
  }
  for (int number = warp;; number += WARPS) {
    const Item item = item_at(number);
    if (item.tile >= num_tiles) break;
    const int tile = item.tile, count = count_of[tile], strips = item.strips;
    const bool is_shared = SHARED != NONE && expert_of[tile] < 0;
    Sums sums[SPAN] = {};
    for (int piece = 0; piece < PIECES; ++piece) {
      // Other blocks may still be computing them.
      auto missing = [&]() {
        bool some = false;
#pragma unroll
        for (int b = 0; b < PIECE / 64; ++b) some |= held[b].first.x == MISSING || held[b].second.x == MISSING;
        return some;
      };
      while (__any_sync(0xffffffffu, missing())) {
#pragma unroll
        for (int b = 0; b < PIECE / 64; ++b) held[b] = {load_relaxed(row + b * 128), load_relaxed(row + b * 128 + 64)};
      }
      row = piece + 1 < PIECES ? row_at(number, piece + 1) : row_at(number + WARPS, 0);
      auto take = [&](int b, bool last) {
        const Fragment now = held[b];
        if (last) held[b] = {load_relaxed(row + b * 128), load_relaxed(row + b * 128 + 64)};
        return now;
      };
      if (is_shared) {
#pragma unroll
        for (int k = 0; k < SHARED_PIECE_STEPS; ++k) {
          if (k % SHARED_CHUNK == 0) barrier_wait(full + slot * 8, parity);
          multiply<SHARED_FORMAT>(sums[0], ring + slot * SLOT_BYTES + k % SHARED_CHUNK * Shared::BYTES, lane,
                                  [&](int b) { return take(k * (Shared::STEP_K / 64) + b, true); });
          if (k % SHARED_CHUNK == SHARED_CHUNK - 1 || k == SHARED_PIECE_STEPS - 1) next_slot();
        }
      } else {
#pragma unroll
        for (int s = 0; s < SPAN; ++s)
#pragma unroll
          for (int k = 0; k < PIECE_STEPS; ++k) {
            constexpr int RUN = PIECES == 1 ? SPAN * PIECE_STEPS : PIECE_STEPS;
            const int at = PIECES == 1 ? s * PIECE_STEPS + k : k;
            if (s >= strips) break;
            if (at % CHUNK == 0) barrier_wait(full + slot * 8, parity);
            multiply<FORMAT>(sums[s], ring + slot * SLOT_BYTES + at % CHUNK * Routed::BYTES, lane,
                             [&](int b) { return take(k * (Routed::STEP_K / 64) + b, s == strips - 1); });
            if (at % CHUNK == CHUNK - 1 || at == RUN - 1 || (k == PIECE_STEPS - 1 && s == strips - 1)) next_slot();
          }
      }
    }
    const float factor = FORMAT == NVFP4 ? down_of[tile] : 1.0f;
#pragma unroll
    for (int s = 0; s < SPAN; ++s)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (s < strips && 2 * t + i % 2 < count)
          terms[size_t(pair_of[tile][2 * t + i % 2] & 0xffff) * TERM_PITCH + (item.strip + s) * 16 + g + i / 2 * 8] =
              (sums[s][0][i] + sums[s][1][i]) * factor;
  }
  __syncthreads();

  // Each row's choices in their order, then the shared expert.
  for (int i = threadIdx.x; i < rows * live * 8; i += THREADS) {
    const int row = i / (live * 8), column = i % (live * 8) * 2;
    float2 total = make_float2(0.0f, 0.0f);
    for (int choice = 0; choice < choices; ++choice) {
      const int pair = row * choices + choice;
      if (id_of[pair] < 0 || id_of[pair] >= experts) continue;
      const float2 term = *reinterpret_cast<const float2 *>(terms + size_t(pair) * TERM_PITCH + column);
      total.x += weight_of[pair] * term.x, total.y += weight_of[pair] * term.y;
    }
    if (SHARED != NONE) {
      const float2 term = *reinterpret_cast<const float2 *>(terms + size_t(pairs + row) * TERM_PITCH + column);
      total.x += term.x, total.y += term.y;
    }
    *reinterpret_cast<u32 *>(y + (size_t(row) * HIDDEN + strip_begin * 16 + column) * 2) =
        to_bf16_pair(total.x, total.y);
  }
  if (threadIdx.x == 0) atomicAdd(reinterpret_cast<unsigned long long *>(state), 1ull);
}
