// Products of many sorted rows with the experts they chose, on the tensor cores, straight from the packed weights.
//
// A tile is 16 outputs for each of WARPS warps, of one expert, by up to COLUMNS of its rows, computed as COLUMNS of them; tiles
// go round the blocks, all outputs of the same rows one after the other. Weights are the left operand: each warp streams its
// own strip of 16 outputs through a ring of its own (bulk copies, across tiles), widens 64 of K at a time into registers and
// multiplies them by rows in shared memory, which one warp more fetches: 128 of K of all rows of a tile are one piece of memory
// (sm90_pairs.cu writes them so). A slot and a stage hold CHUNK such pieces, so that a warp looks at barriers, and asks for
// more, once in CHUNK * 128 of K. Widening into one set of registers goes on while the tensor cores read the other. Where
// a format has scales outside its weights, sums of 128 of K are multiplied by them, in float32.
//
// GATED products (w13) have gate and up of a feature in one lane: features leave as columns of the next product, in the order
// in which it reads them. The others (w2) leave as rows of bfloat16, times the expert's factor.
//
// Macros: FORMAT; WARPS, 8 or 16; COLUMNS, a multiple of 16; CHUNK; STAGES and SLOTS of the rings of rows and of weights;
// MOST_TILES.

#include "sm90_formats.cuh"
#include "sm90_wgmma.cuh"

typedef Format<FORMAT> F;
constexpr int COMPUTING = WARPS * 32, THREADS = COMPUTING + 128;
// What a launch's registers are shared out as: those that fetch need few.
constexpr int FETCH_REGISTERS = WARPS == 16 ? 32 : 40, COMPUTE_REGISTERS = WARPS == 16 ? 112 : 232;
constexpr int STRIP_BYTES = F::BYTES * (128 / F::STEP_K);  // 16 outputs by 128 of K
constexpr int ROWS_BYTES = COLUMNS * 256;                  // the rows of a tile by 128 of K
constexpr int SLOT_BYTES = CHUNK * STRIP_BYTES, STAGE_BYTES = CHUNK * ROWS_BYTES;
constexpr int SUMS = COLUMNS / 2;  // of a thread
static_assert(ROWS_BYTES % 1024 == 0 && STRIP_BYTES % 16 == 0, "swizzled rows and copies are aligned");

// The 8 x 8 matrix of a warp, a lane's pair side by side in a row, transposed.
__device__ __forceinline__ u32 transposed(u32 pair) {
  u32 v;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(v) : "r"(pair));
  return v;
}

// The compiler must neither read nor move these registers across this point while the tensor cores own them.
template <int COUNT>
__device__ __forceinline__ void hold(u32 (&d)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+r"(d[i])::"memory");
}
template <int COUNT>
__device__ __forceinline__ void hold(float (&d)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

struct Product {
  const u8 *weights;
  const float *factors;
  u8 *out;
  int k_blocks, m_tiles, groups, gated;
  int blocks_entries, blocks_m;  // how far all blocks together are: rows of the list, and outputs
};

struct Tile {
  int expert, row, columns;
};

// Tiles of this block, one after the other: rows of the list, in shared memory, and which of their outputs.
struct Walk {
  int entry, m;

  __device__ __forceinline__ Tile tile(const uint2 *list) const {
    const uint2 rows = list[entry];
    return {int(rows.y & 0xffff), int(rows.x), int(rows.y >> 16)};
  }
  __device__ __forceinline__ void advance(const Product &what) {
    entry += what.blocks_entries, m += what.blocks_m;
    if (m >= what.m_tiles) m -= what.m_tiles, ++entry;
  }
};

// Where in a ring a warp stands.
template <int LENGTH>
struct Place {
  u32 slot, parity;

  __device__ __forceinline__ void advance() {
    if (++slot == LENGTH) slot = 0, parity ^= 1;
  }
};

// A warp's strips, one after the other through all tiles of the block, as they are asked for. Which is the same in all lanes.
struct Stream {
  Walk walk;
  const u8 *source;
  int left;

  __device__ __forceinline__ void open(const Product &what, const uint2 *list, int found, int warp) {
    if (walk.entry >= found) return;
    const u32 strip = (walk.tile(list).expert * what.m_tiles + walk.m) * WARPS + warp;
    source = what.weights + u64(strip) * u32(what.k_blocks * STRIP_BYTES);
    left = what.k_blocks;
  }

  // CHUNK times 128 of K more, or what is left of them.
  __device__ __forceinline__ void fetch(const Product &what, const uint2 *list, int found, u32 target, u32 full, int warp,
                                        int lane) {
    if (left <= 0) return;
    const u32 bytes = min(left, CHUNK) * STRIP_BYTES;
    if (lane == 0) {
      barrier_expect(full, bytes);
      copy_bulk(target, source, bytes, full);
    }
    source += bytes, left -= CHUNK;
    if (left <= 0) walk.advance(what), open(what, list, found, warp);
  }
};

// A lane's part of 16 outputs by 64 of K as the left operands of four products.
__device__ __forceinline__ void widen_block(u32 (&a)[16], u32 strip, int block, int lane) {
  constexpr int PER_STEP = F::STEP_K / 64;
  const u32 step = strip + block / PER_STEP * F::BYTES;
  u32 upper[8], lower[8];
  F::widen(upper, lower, step, block % PER_STEP, lane);
#pragma unroll
  for (int j = 0; j < 4; ++j)
    a[4 * j] = upper[2 * j], a[4 * j + 1] = lower[2 * j], a[4 * j + 2] = upper[2 * j + 1], a[4 * j + 3] = lower[2 * j + 1];
}

__device__ __forceinline__ void multiply_block64(float (&sums)[SUMS], const u32 (&a)[16], u64 b, bool add) {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int j = 0; j < 4; ++j)
    multiply_registers<COLUMNS>(sums, a[4 * j], a[4 * j + 1], a[4 * j + 2], a[4 * j + 3], b + 2 * j, add || j > 0);
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// What the compiler shall keep, not work out anew.
__device__ __forceinline__ u32 kept(u32 value) {
  asm volatile("" : "+r"(value));
  return value;
}

// Addresses: of all rows and their barriers; of this warp's weights and theirs.
struct Rings {
  u32 rows, full, empty, weights, weights_full;
};

struct State {
  const uint2 *list;
  int found;
  Place<STAGES> stage;
  Place<SLOTS> slot;
  Stream stream;
};

__device__ __forceinline__ void compute(const Product &what, const Rings &rings, State &state, const Tile &tile, int m, int warp,
                                        int lane) {
  // Products of scaled weights: of 128 of K, then times its scale in float32.
  float sums[SUMS], scaled[F::SCALED ? SUMS : 1];
#pragma unroll
  for (int i = 0; i < SUMS; ++i) sums[i] = 0.0f;
  if (F::SCALED) {
#pragma unroll
    for (int i = 0; i < SUMS; ++i) scaled[F::SCALED ? i : 0] = 0.0f;
  }
  u32 a[2][16];
#pragma unroll
  for (int i = 0; i < 16; ++i) a[0][i] = a[1][i] = 0;
  // Asked for now, needed behind the last product.
  const float *const of_expert = what.factors == nullptr ? nullptr : what.factors + tile.expert * 3;
  float gate = 1.0f, up = 1.0f, down = 1.0f;
  if (of_expert != nullptr) gate = of_expert[0], up = of_expert[1], down = of_expert[2];
  u32 before = 0;
  float2 scale = {1.0f, 1.0f};
  auto add_scaled = [&] {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    hold(a[0]), hold(a[1]), hold(sums);
#pragma unroll
    for (int i = 0; i < SUMS; ++i) scaled[F::SCALED ? i : 0] += (i % 4 < 2 ? scale.x : scale.y) * sums[i];
  };
#pragma unroll 1
  for (int left = what.k_blocks; left > 0; left -= CHUNK) {
    const bool is_first = left == what.k_blocks;
    const u32 strips = rings.weights + state.slot.slot * SLOT_BYTES, weights_full = rings.weights_full + state.slot.slot * 8;
    // Rows in the 128-byte swizzle: 8 rows of 64 of K are 1 KB, and both halves of 128 of K lie together.
    const u32 at = rings.rows + state.stage.slot * STAGE_BYTES;
    const u64 b = (1ull << 62) | (128ull << 32) | (1ull << 16) | ((at & 0x3ffff) >> 4);
    block_barrier_wait(weights_full, state.slot.parity);
    block_barrier_wait(rings.full + state.stage.slot * 8, state.stage.parity);
#pragma unroll
    for (int step = 0; step < CHUNK; ++step) {
      if (step > 0 && step >= left) break;
      const u32 strip = strips + step * STRIP_BYTES;
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        hold(a[block]);
        if (step == 0 && block == 1 && !F::SCALED && !is_first && lane == 0) barrier_arrive(rings.empty + before * 8);
        widen_block(a[block], strip, block, lane);
        if (F::SCALED && block == 0) {
          if (step > 0 || !is_first) add_scaled();
          if (step == 0 && !is_first && lane == 0) barrier_arrive(rings.empty + before * 8);
          scale = F::scales(strip, lane);
        }
        multiply_block64(sums, a[block], b + step * (ROWS_BYTES / 16) + block * 64, !F::SCALED || block > 0);
      }
    }
    __syncwarp();  // every lane has read the slot
    state.stream.fetch(what, state.list, state.found, strips, weights_full, warp, lane);
    before = state.stage.slot;
    state.stage.advance(), state.slot.advance();
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  hold(a[0]), hold(a[1]), hold(sums);
  if (lane == 0) barrier_arrive(rings.empty + before * 8);
  if (F::SCALED) {
    add_scaled();
#pragma unroll
    for (int i = 0; i < SUMS; ++i) sums[i] = scaled[F::SCALED ? i : 0];
  }

  const int g = lane / 4, t = lane % 4;
  if (what.gated) {
    const int strip = m * WARPS + warp;
    // Features as columns of the next product: of its 64 of K, a lane's two lie side by side.
    u8 *at = what.out + ((size_t(strip / 16) * what.groups + tile.row / 8) * 2 + strip / 8 % 2) * 1024 + g * 128 +
             (((strip % 2 * 4 + t) ^ g) << 4) + strip % 8 / 2 * 4;
#pragma unroll
    for (int q = 0; q < COLUMNS / 8; ++q) {
      if (q * 8 >= tile.columns) break;
      const float first = silu(sums[4 * q] * gate) * (sums[4 * q + 2] * up);
      const float second = silu(sums[4 * q + 1] * gate) * (sums[4 * q + 3] * up);
      *reinterpret_cast<u32 *>(at + q * 2048) = transposed(to_bf16_pair(first, second));
    }
  } else {
    const size_t pitch = size_t(what.m_tiles) * (WARPS * 32);
    // A quad holds 16 rows' 32 bytes as words of every lane; turned, a lane has 16 bytes of one of two rows.
    u8 *at = what.out + size_t(tile.row + t / 2 * 8 + g) * pitch + (m * WARPS + warp) * 32 + t % 2 * 16;
#pragma unroll
    for (int q = 0; q < COLUMNS / 8; q += 2) {
      if (q * 8 >= tile.columns) break;
      u32 words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        words[i] = transposed(to_bf16_pair(sums[4 * q + 2 * i] * down, sums[4 * q + 2 * i + 1] * down));
      transpose_quad(words, t);
      *reinterpret_cast<uint4 *>(at + q * 8 * pitch) = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    grouped(const u8 *__restrict__ weights, const float *__restrict__ factors, const u8 *__restrict__ rows, u8 *out,
            const uint2 *__restrict__ planned, const int *__restrict__ totals, int k_blocks, int m_tiles, int groups,
            int gated, int blocks_entries, int blocks_m) {
  extern __shared__ __align__(1024) u8 memory[];
  __shared__ __align__(8) u64 barriers[2 * STAGES + WARPS * SLOTS];
  __shared__ uint2 list[MOST_TILES];
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const u32 full = kept(shared_address(barriers)), empty = full + 8 * STAGES, memory_at = kept(shared_address(memory));
  if (lane == 0)
    for (int i = warp; i < 2 * STAGES + WARPS * SLOTS; i += THREADS / 32)
      barrier_init(full + 8 * i, i >= STAGES && i < 2 * STAGES ? WARPS : 1);
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const int found = *totals;
  for (int i = threadIdx.x; i < found; i += THREADS) list[i] = planned[i];
  __syncthreads();
  const Product what = {weights, factors, out, k_blocks, m_tiles, groups, gated, blocks_entries, blocks_m};
  Walk walk = {int(blockIdx.x) / m_tiles, int(blockIdx.x) % m_tiles};
  if (warp >= WARPS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(FETCH_REGISTERS));
    if (warp == WARPS && lane == 0) {
      Place<STAGES> stage = {0, 1};
      for (; walk.entry < found; walk.advance(what)) {
        const Tile tile = walk.tile(list);
        const u8 *source = rows + size_t(tile.row) * 256;
        const u32 bytes = tile.columns * 256;
        for (int left = k_blocks; left > 0; left -= CHUNK) {
          const u32 to = memory_at + stage.slot * STAGE_BYTES, barrier = full + stage.slot * 8;
          const int steps = min(left, CHUNK);
          block_barrier_wait(empty + stage.slot * 8, stage.parity);
          barrier_expect(barrier, steps * bytes);
          for (int step = 0; step < steps; ++step, source += size_t(groups) * 2048)
            copy_bulk(to + step * ROWS_BYTES, source, bytes, barrier);
          stage.advance();
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COMPUTE_REGISTERS));
    const u32 ring = kept(memory_at + STAGES * STAGE_BYTES + warp * SLOTS * SLOT_BYTES);
    const Rings rings = {memory_at, full, empty, ring, kept(full + (2 * STAGES + warp * SLOTS) * 8)};
    State state = {list, found, {0, 0}, {0, 0}, {walk, nullptr, 0}};
    state.stream.open(what, list, found, warp);
    for (int i = 0; i < SLOTS; ++i)
      state.stream.fetch(what, list, found, rings.weights + i * SLOT_BYTES, rings.weights_full + i * 8, warp, lane);
    for (; walk.entry < found; walk.advance(what)) compute(what, rings, state, walk.tile(list), walk.m, warp, lane);
  }
}
