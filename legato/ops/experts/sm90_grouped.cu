// Products of many sorted rows with the experts they chose, on the tensor cores, straight from the packed weights.
//
// A tile is 128 outputs of one expert by up to MOST_COLUMNS of its rows; tiles go round the blocks, all outputs of the same
// rows one after the other. Weights are the left operand: each of eight warps streams its own strip of 16 outputs through a
// ring of its own (cp.async, across tiles), widens 64 of K at a time into registers and multiplies them by rows in shared
// memory, which a ninth warp fetches: 128 of K of all rows of a tile are one piece of memory (sm90_pairs.cu writes them so).
// Widening into one set of registers goes on while the tensor cores read the other.
//
// GATED products (w13) have gate and up of a feature in one lane: features leave as columns of the next product, in the order
// in which it reads them. The others (w2) leave as rows of bfloat16, times the expert's factor.
//
// Macros: FORMAT; MOST_COLUMNS, a multiple of 16; STAGES and SLOTS of the rings of rows and of weights; MOST_TILES.

#include "sm90_formats.cuh"
#include "sm90_wgmma.cuh"

typedef Format<FORMAT> F;
constexpr int WARPS = 8, THREADS = 384;
constexpr int STRIP_BYTES = F::BYTES * (128 / F::STEP_K);  // 16 outputs by 128 of K
constexpr int STAGE_BYTES = MOST_COLUMNS * 256;
static_assert(STAGE_BYTES % 1024 == 0 && STRIP_BYTES % 16 == 0, "swizzled rows and copies are aligned");

// How many columns a tile of n times 16 is computed with: there is code for these only.
__device__ constexpr int columns_class(int n) { return n <= 2 ? 2 : n <= 5 ? 5 : 9; }

__device__ __forceinline__ u32 shared_address(const void *pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}
__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ bool barrier_passed(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n.reg .pred done;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done;
}
// Nothing waits longer than for a neighbour's work: a fault ends with an error here, not with a GPU that hangs.
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
#pragma unroll 1
  for (int i = 0; i < 4000000; ++i)
    if (barrier_passed(barrier, parity)) return;
  asm volatile("trap;");
}
__device__ __forceinline__ void copy_bulk(u32 target, const void *source, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
               "l"(source), "r"(bytes), "r"(barrier)
               : "memory");
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
__device__ __forceinline__ float silu(float v) { return v / (1.0f + __expf(-v)); }

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
  if (F::SCALED) {
    const float2 scale = F::scales(step, lane);
    const u32 first = to_bf16_pair(scale.x, scale.x), second = to_bf16_pair(scale.y, scale.y);
#pragma unroll
    for (int i = 0; i < 8; ++i) upper[i] = multiply_pairs(upper[i], first), lower[i] = multiply_pairs(lower[i], second);
  }
#pragma unroll
  for (int j = 0; j < 4; ++j)
    a[4 * j] = upper[2 * j], a[4 * j + 1] = lower[2 * j], a[4 * j + 2] = upper[2 * j + 1], a[4 * j + 3] = lower[2 * j + 1];
}

template <int N>
__device__ __forceinline__ void multiply_block64(float (&sums)[N / 2], const u32 (&a)[16], u64 b) {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int j = 0; j < 4; ++j)
    multiply_registers<N>(sums, a[4 * j], a[4 * j + 1], a[4 * j + 2], a[4 * j + 3], b + 2 * j);
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

struct Rings {
  u32 rows, full, empty, weights;  // addresses
  const u8 *weights_at;
};

template <int N>
__device__ __forceinline__ void compute(const Product &what, const Tiles &tiles, const Rings &rings, Stage &stage,
                                        Stream &stream, const Tile &tile, int warp, int lane) {
  float sums[N / 2];
#pragma unroll
  for (int i = 0; i < N / 2; ++i) sums[i] = 0.0f;
  u32 a[2][16];
#pragma unroll
  for (int i = 0; i < 16; ++i) a[0][i] = a[1][i] = 0;
  u32 before = 0;
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
      if (block == 1 && kb > 0 && lane == 0) barrier_arrive(rings.empty + before * 8);
      widen_block(a[block], strip, block, lane);
      multiply_block64<N>(sums, a[block], b + block * 64);
    }
    before = stage.slot;
    stage.advance();
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  hold(a[0]), hold(a[1]), hold(sums);
  if (lane == 0) barrier_arrive(rings.empty + before * 8);

  const int g = lane / 4, t = lane % 4;
  if (what.gated) {
    const float gate = what.factors == nullptr ? 1.0f : what.factors[tile.expert * 3];
    const float up = what.factors == nullptr ? 1.0f : what.factors[tile.expert * 3 + 1];
    // Features as columns of the next product: of its 64 of K, a lane's two lie side by side.
    u8 *at = what.out + ((size_t(tile.m / 2) * what.groups + tile.row / 8) * 2 + tile.m % 2) * 1024 + g * 128 +
             (((warp % 2 * 4 + t) ^ g) << 4) + warp / 2 * 4;
#pragma unroll
    for (int q = 0; q < N / 8; ++q) {
      if (q * 8 >= tile.columns) break;
      const float first = silu(sums[4 * q] * gate) * (sums[4 * q + 2] * up);
      const float second = silu(sums[4 * q + 1] * gate) * (sums[4 * q + 3] * up);
      *reinterpret_cast<u32 *>(at + q * 2048) = transposed(to_bf16_pair(first, second));
    }
  } else {
    const float down = what.factors == nullptr ? 1.0f : what.factors[tile.expert * 3 + 2];
    const size_t pitch = size_t(what.m_tiles) * 256;
    u8 *at = what.out + size_t(tile.row + g) * pitch + tile.m * 256 + warp * 32 + t * 4;
#pragma unroll
    for (int q = 0; q < N / 8; ++q) {
      if (q * 8 >= tile.columns) break;
      const u32 first = transposed(to_bf16_pair(sums[4 * q] * down, sums[4 * q + 1] * down));
      const u32 second = transposed(to_bf16_pair(sums[4 * q + 2] * down, sums[4 * q + 3] * down));
      *reinterpret_cast<u32 *>(at + q * 8 * pitch) = first;
      *reinterpret_cast<u32 *>(at + q * 8 * pitch + 16) = second;
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
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
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
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const Product what = {weights, factors, out, k_blocks, m_tiles, groups, gated};
    u8 *const ring = memory + STAGES * STAGE_BYTES + warp * SLOTS * STRIP_BYTES;
    const Rings rings = {memory_at, full, empty, shared_address(ring), ring};
    Stream stream = {nullptr, int(blockIdx.x), 0, 0, 0};
    stream.open(what, tiles, warp);
    for (int i = 0; i < SLOTS - 1; ++i) stream.fetch(what, tiles, rings.weights, warp, lane);
    for (int index = blockIdx.x; index < tiles.count; index += gridDim.x) {
      const Tile tile = tiles.at(index);
#define CASE(n)                                                                           \
  case n:                                                                                 \
    if (16 * n <= MOST_COLUMNS && columns_class(n) == n)                                  \
      compute<16 * n>(what, tiles, rings, stage, stream, tile, warp, lane);               \
    break;
      switch (columns_class(tile.columns / 16)) {
        CASE(2) CASE(5) CASE(9)
      }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
  }
}
