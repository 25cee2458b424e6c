// Products of many sorted rows with the experts they chose, on the tensor cores, straight from the packed weights.
//
// A tile is 16 outputs for each of WARPS warps, of one expert, by up to COLUMNS of its rows, computed as COLUMNS of them; tiles
// go round the blocks, all outputs of the same rows one after the other. Weights are the left operand: each warp streams its
// own strip of 16 outputs through a ring of its own (cp.async, across tiles), widens 64 of K at a time into registers and
// multiplies them by rows in shared memory, which one warp more fetches: 128 of K of all rows of a tile are one piece of memory
// (sm90_pairs.cu writes them so). Widening into one set of registers goes on while the tensor cores read the other. Where
// a format has scales outside its weights, sums of 128 of K are multiplied by them, in float32.
//
// GATED products (w13) have gate and up of a feature in one lane: features leave as columns of the next product, in the order
// in which it reads them. The others (w2) leave as rows of bfloat16, times the expert's factor.
//
// Macros: FORMAT; WARPS, 8 or 16; COLUMNS, a multiple of 16; STAGES and SLOTS of the rings of rows and of weights; MOST_TILES.

#include "sm90_formats.cuh"
#include "sm90_wgmma.cuh"

typedef Format<FORMAT> F;
constexpr int COMPUTING = WARPS * 32, THREADS = COMPUTING + 128;
// What a launch's registers are shared out as: those that fetch need few.
constexpr int FETCH_REGISTERS = WARPS == 16 ? 32 : 40, COMPUTE_REGISTERS = WARPS == 16 ? 112 : 232;
constexpr int STRIP_BYTES = F::BYTES * (128 / F::STEP_K);  // 16 outputs by 128 of K
constexpr int STAGE_BYTES = COLUMNS * 256;
constexpr int SUMS = COLUMNS / 2;  // of a thread
static_assert(STAGE_BYTES % 1024 == 0 && STRIP_BYTES % 16 == 0, "swizzled rows and copies are aligned");

// Nothing waits longer than for a neighbour's work: a fault ends with an error here, not with a GPU that hangs.
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
#pragma unroll 1
  for (int i = 0; i < 4000000; ++i)
    if (barrier_passed(barrier, parity)) return;
  asm volatile("trap;");
}
__device__ __forceinline__ void copy16(u32 target, const void *source) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
}
// The 8 x 8 matrix of a warp, a lane's pair side by side in a row, transposed.
__device__ __forceinline__ u32 transposed(u32 pair) {
  u32 v;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(v) : "r"(pair));
  return v;
}
// A word of each lane's four, w[i] of lane t becomes w[t] of lane i of the quad.
__device__ __forceinline__ void transpose_quad(u32 (&w)[4], int t) {
  const bool odd = t & 1, high = t & 2;
  u32 a = __shfl_xor_sync(~0u, odd ? w[0] : w[1], 1), b = __shfl_xor_sync(~0u, odd ? w[2] : w[3], 1);
  if (odd)
    w[0] = a, w[2] = b;
  else
    w[1] = a, w[3] = b;
  a = __shfl_xor_sync(~0u, high ? w[0] : w[2], 2), b = __shfl_xor_sync(~0u, high ? w[1] : w[3], 2);
  if (high)
    w[0] = a, w[1] = b;
  else
    w[2] = a, w[3] = b;
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
};

struct Tile {
  int expert, row, columns, m;
};

// Tiles of this block, from shared memory.
struct Tiles {
  const uint2 *list;
  int count, m_tiles;

  __device__ __forceinline__ Tile at(int index) const {
    const uint2 found = list[index / m_tiles];
    return {int(found.y & 0xffff), int(found.x), int(found.y >> 16), index % m_tiles};
  }
};

// Where in the ring of rows a warp stands.
struct Stage {
  u32 slot, parity;

  __device__ __forceinline__ void advance() {
    if (++slot == STAGES) slot = 0, parity ^= 1;
  }
};

// A warp's strips, one after the other through all of its tiles.
struct Stream {
  const u8 *source;
  int index, left;
  u32 fetching, reading;  // slots

  __device__ __forceinline__ void open(const Product &what, const Tiles &tiles, int warp) {
    if (index >= tiles.count) return;
    const Tile tile = tiles.at(index);
    source = what.weights +
             ((size_t(tile.expert) * what.m_tiles + tile.m) * WARPS + warp) * size_t(what.k_blocks) * STRIP_BYTES;
    left = what.k_blocks;
  }

  // 128 of K more, or an empty group of copies where nothing is left.
  __device__ __forceinline__ void fetch(const Product &what, const Tiles &tiles, u32 ring, int warp, int lane) {
    if (left > 0) {
      const u32 target = ring + fetching * STRIP_BYTES;
#pragma unroll
      for (int first = 0; first < STRIP_BYTES; first += 512)
        if (first + 512 <= STRIP_BYTES || first + lane * 16 < STRIP_BYTES)
          copy16(target + first + lane * 16, source + first + lane * 16);
      source += STRIP_BYTES;
      if (--left == 0) index += gridDim.x, open(what, tiles, warp);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
    if (++fetching == SLOTS) fetching = 0;
  }
};

// A lane's part of 16 outputs by 64 of K as the left operands of four products.
__device__ __forceinline__ void widen_block(u32 (&a)[16], const u8 *strip, int block, int lane) {
  constexpr int PER_STEP = F::STEP_K / 64;
  const u8 *step = strip + block / PER_STEP * F::BYTES;
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

struct Rings {
  u32 rows, full, empty, weights;  // addresses
  const u8 *weights_at;
};

__device__ __forceinline__ void compute(const Product &what, const Tiles &tiles, const Rings &rings, Stage &stage,
                                        Stream &stream, const Tile &tile, int warp, int lane) {
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
  for (int kb = 0; kb < what.k_blocks; ++kb) {
    asm volatile("cp.async.wait_group %0;" ::"n"(SLOTS - 2) : "memory");
    __syncwarp();  // every lane's copies are there, and every lane has read the slot before
    stream.fetch(what, tiles, rings.weights, warp, lane);
    const u8 *strip = rings.weights_at + stream.reading * STRIP_BYTES;
    if (++stream.reading == SLOTS) stream.reading = 0;
    barrier_wait(rings.full + stage.slot * 8, stage.parity);
    // Rows in the 128-byte swizzle: 8 rows of 64 of K are 1 KB, and both halves of 128 of K lie together.
    const u32 at = rings.rows + stage.slot * STAGE_BYTES;
    const u64 b = (1ull << 62) | (128ull << 32) | (1ull << 16) | ((at & 0x3ffff) >> 4);
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
      hold(a[block]);
      if (block == 1 && !F::SCALED && kb > 0 && lane == 0) barrier_arrive(rings.empty + before * 8);
      widen_block(a[block], strip, block, lane);
      if (F::SCALED && block == 0) {
        if (kb > 0) {
          add_scaled();
          if (lane == 0) barrier_arrive(rings.empty + before * 8);
        }
        scale = F::scales(strip, lane);
      }
      multiply_block64(sums, a[block], b + block * 64, !F::SCALED || block > 0);
    }
    before = stage.slot;
    stage.advance();
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
    const int strip = tile.m * WARPS + warp;
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
    u8 *at = what.out + size_t(tile.row + t / 2 * 8 + g) * pitch + (tile.m * WARPS + warp) * 32 + t % 2 * 16;
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
            int gated) {
  extern __shared__ __align__(1024) u8 memory[];
  __shared__ __align__(8) u64 barriers[2 * STAGES];
  __shared__ uint2 list[MOST_TILES];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 full = shared_address(barriers), empty = full + 8 * STAGES, memory_at = shared_address(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) barrier_init(full + 8 * i, 1), barrier_init(empty + 8 * i, WARPS);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const int found = *totals;
  for (int i = threadIdx.x; i < found; i += THREADS) list[i] = planned[i];
  __syncthreads();
  const Tiles tiles = {list, found * m_tiles, m_tiles};
  Stage stage = {0, 0};
  if (warp >= WARPS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(FETCH_REGISTERS));
    if (warp == WARPS && lane == 0) {
      stage.parity = 1;
      for (int index = blockIdx.x; index < tiles.count; index += gridDim.x) {
        const Tile tile = tiles.at(index);
        const u8 *source = rows + size_t(tile.row) * 256;
        for (int kb = 0; kb < k_blocks; ++kb) {
          barrier_wait(empty + stage.slot * 8, stage.parity);
          barrier_expect(full + stage.slot * 8, tile.columns * 256);
          copy_bulk(memory_at + stage.slot * STAGE_BYTES, source, tile.columns * 256, full + stage.slot * 8);
          source += size_t(groups) * 2048;
          stage.advance();
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COMPUTE_REGISTERS));
    const Product what = {weights, factors, out, k_blocks, m_tiles, groups, gated};
    u8 *const ring = memory + STAGES * STAGE_BYTES + warp * SLOTS * STRIP_BYTES;
    const Rings rings = {memory_at, full, empty, shared_address(ring), ring};
    Stream stream = {nullptr, int(blockIdx.x), 0, 0, 0};
    stream.open(what, tiles, warp);
    for (int i = 0; i < SLOTS - 1; ++i) stream.fetch(what, tiles, rings.weights, warp, lane);
    for (int index = blockIdx.x; index < tiles.count; index += gridDim.x) {
      const Tile tile = tiles.at(index);
      compute(what, tiles, rings, stage, stream, tile, warp, lane);
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
  }
}
