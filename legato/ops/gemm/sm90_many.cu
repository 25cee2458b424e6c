// y = x W^T (+ residual) for 33 to 128 rows of x, on the tensor cores' asynchronous product, with W as it is stored.
//
// A block computes 64 * HALVES outputs, one warpgroup each 64 of them, for all rows: weights are the left operand, in registers,
// rows of x the right one, in shared memory. Its RANKS blocks of a cluster share K. Two warps ask for what the others multiply,
// slot by slot through two rings of SLOTS: one for weights, which depend on nothing and are asked for before
// griddepcontrol.wait, one for rows. A slot of weights is free as soon as they are in registers, one of rows when the product
// that reads them is over.
//
// A slot is 128 bytes of K of a weight: 64 of bfloat16, or 128 of e4m3, which are widened on the way into registers, exactly;
// sums over 128 of K are multiplied by their scale in float32. Sums of a rank go from its registers into the shared memory
// of the rank that owns their eight rows (st.async) and are added in the order of ranks: a row's bits depend on no other row,
// nor on its place.
//
// Macros: TOKENS: rows, a multiple of 16; HALVES: 1 or 2; RANKS; SLOTS; PACED: slots of weights in flight at first, the others
// follow as those arrive; RESIDENT: blocks that a multiprocessor must hold; FP8.

#include "../sm90.cuh"

#include "../experts/sm90_wgmma.cuh"

constexpr int OUTPUTS = 64 * HALVES, WARPS = 4 * HALVES, COMPUTING = 32 * WARPS, THREADS = COMPUTING + 64;
constexpr int BLOCKS = FP8 ? 2 : 1;  // of 64 of K in a slot
constexpr int WEIGHT_BYTES = OUTPUTS * 128, X_BYTES = BLOCKS * TOKENS * 128;  // of a slot
constexpr int SUMS = TOKENS / 2;                                             // of a thread
constexpr int EIGHTS = TOKENS / 8, OWN = (EIGHTS + RANKS - 1) / RANKS;       // eights of rows; those that a rank finishes
constexpr int PART_BYTES = COMPUTING * 16;                                   // eight rows' sums of a rank
// There are registers for a residual meanwhile; and, of e4m3, to widen a slot while the one before it is multiplied.
constexpr bool ROOMY = !FP8 || TOKENS <= 64;
// Of two sets of registers for weights, the one that takes turns with the first, where there is room for two.
constexpr int SECOND = FP8 && TOKENS > 96 ? 0 : 1;
static_assert(TOKENS % 16 == 0, "rows of a slot are whole kilobytes");

// A box of a block's outputs, or of all rows, by 128 bytes, in the 128-byte swizzle.
__device__ __forceinline__ void copy_box(u32 target, const CUtensorMap *map, int column, int row, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], [%4], "
      "%5;" ::"r"(target),
      "l"(map), "r"(column), "r"(row), "r"(barrier), "l"(policy)
      : "memory");
}

__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

__device__ __forceinline__ u32 at_rank(u32 address, u32 rank) {
  u32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

// Past the L1: a preceding kernel may still have been writing when this one began.
__device__ __forceinline__ u32 load_fresh(const void *pointer) {
  u32 v;
  asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(pointer) : "memory");
  return v;
}

// The 8 x 8 matrix of a warp, a lane's pair side by side in a row, transposed.
__device__ __forceinline__ u32 transposed(u32 pair) {
  u32 v;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(v) : "r"(pair));
  return v;
}

// The compiler must neither read nor move these registers across this point while the tensor cores own them.
__device__ __forceinline__ void hold(u32 (&d)[16]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) asm volatile("" : "+r"(d[i])::"memory");
}
__device__ __forceinline__ void hold(float (&d)[SUMS]) {
#pragma unroll
  for (int i = 0; i < SUMS; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

template <int PENDING>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

#if FP8
// Two codes to a pair of bfloat16: sign at bit 15, exponent and mantissa from bit 10 down, times 2^120. Exact for all of them.
__device__ __forceinline__ u32 widened(u32 address) {
  u32 codes, pair;
  asm volatile("{\n.reg .u16 c;\nld.shared.u16 c, [%1];\ncvt.u32.u16 %0, c;\n}" : "=r"(codes) : "r"(address) : "memory");
  const u32 apart = __byte_perm(codes, 0, 0x1404);
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"((apart & 0x80008000u) | (apart >> 4 & 0x07f007f0u)), "r"(0x7b807b80u));
  return pair;
}
#endif

// A warp's 16 outputs by 64 of K as the left operands of four products. `strip`: their first row of a slot.
__device__ __forceinline__ void load_weights(u32 (&a)[16], u32 strip, int block, int lane) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#if FP8
    const u32 upper = strip + lane / 4 * 128 + (((block * 4 + j) ^ (lane / 4)) << 4) + lane % 4 * 2;
    a[4 * j] = widened(upper), a[4 * j + 1] = widened(upper + 1024);
    a[4 * j + 2] = widened(upper + 8), a[4 * j + 3] = widened(upper + 1032);
#else
    const u32 row = strip + lane % 16 * 128 + (((2 * j + lane / 16) ^ (lane % 8)) << 4);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[4 * j]), "=r"(a[4 * j + 1]), "=r"(a[4 * j + 2]), "=r"(a[4 * j + 3])
                 : "r"(row)
                 : "memory");
#endif
  }
}

// Rows in the 128-byte swizzle: eight of 64 of K are 1 KB.
__device__ __forceinline__ void multiply(float (&sums)[SUMS], const u32 (&a)[16], u32 rows, bool add) {
  const u64 b = 1ull << 62 | 64ull << 32 | 1ull << 16 | (rows & 0x3ffff) >> 4;
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int j = 0; j < 4; ++j)
    multiply_registers<TOKENS>(sums, a[4 * j], a[4 * j + 1], a[4 * j + 2], a[4 * j + 3], b + 2 * j, add || j > 0);
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Where in a ring a warp stands.
struct Place {
  u32 slot, parity;

  __device__ __forceinline__ void advance() {
    if (++slot == SLOTS) slot = 0, parity ^= 1;
  }
};

// A ring: its memory, and where its slots' barriers are.
struct Ring {
  u32 memory, barriers;

  __device__ __forceinline__ u32 full(u32 slot) const { return barriers + 8 * slot; }
  __device__ __forceinline__ u32 empty(u32 slot) const { return barriers + 8 * SLOTS + 8 * slot; }
  __device__ __forceinline__ void release(u32 slot, int lane) const {
    if (lane == 0) barrier_arrive(empty(slot));
  }
};

// All products of a thread's part of the sums.
__device__ __forceinline__ void multiply_all(float (&sums)[SUMS], const Ring &weights, const Ring &x, int steps, const float *scale,
                                             int warp, int lane) {
  const u32 strip = weights.memory + warp * (16 * 128);
  Place at = {0, 0};
  u32 a[2][16], before = 0;
#pragma unroll
  for (int i = 0; i < SUMS; ++i) sums[i] = 0.0f;
#pragma unroll
  for (int i = 0; i < 16; ++i) a[0][i] = a[1][i] = 0;
#if FP8
  float products[SUMS], factor = 0.0f;
#pragma unroll
  for (int i = 0; i < SUMS; ++i) products[i] = 0.0f;
  auto add_scaled = [&] {
    products_wait<0>();
    hold(a[0]), hold(a[1]), hold(products);
#pragma unroll
    for (int i = 0; i < SUMS; ++i) sums[i] += factor * products[i];
  };
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const float next = __ldg(scale + step);
    block_barrier_wait(weights.full(at.slot), at.parity);
    load_weights(a[0], strip + at.slot * WEIGHT_BYTES, 0, lane);
    if (ROOMY) {
      add_scaled();
      if (step > 0) x.release(before, lane);
    }
    factor = next;
    block_barrier_wait(x.full(at.slot), at.parity);
    multiply(products, a[0], x.memory + at.slot * X_BYTES, false);
    if (SECOND == 0) {
      products_wait<0>();
      hold(a[0]);
    }
    load_weights(a[SECOND], strip + at.slot * WEIGHT_BYTES, 1, lane);
    multiply(products, a[SECOND], x.memory + at.slot * X_BYTES + TOKENS * 128, true);
    weights.release(at.slot, lane);
    if (!ROOMY) {
      add_scaled();
      x.release(at.slot, lane);
    }
    before = at.slot;
    at.advance();
  }
  if (ROOMY) add_scaled();
#else
  auto multiply_slot = [&](int i, bool is_first) {
    block_barrier_wait(weights.full(at.slot), at.parity);
    load_weights(a[i], strip + at.slot * WEIGHT_BYTES, 0, lane);
    block_barrier_wait(x.full(at.slot), at.parity);
    multiply(sums, a[i], x.memory + at.slot * X_BYTES, true);
    weights.release(at.slot, lane);  // behind the products: their registers have been loaded
    products_wait<1>();
    hold(a[1 - i]);
    if (!is_first) x.release(before, lane);
    before = at.slot;
    at.advance();
  };
#pragma unroll 1
  for (int step = 0; step + 2 <= steps; step += 2) {
    multiply_slot(0, step == 0);
    multiply_slot(1, false);
  }
  if (steps % 2) multiply_slot(0, steps == 1);
  products_wait<0>();
  hold(a[0]), hold(a[1]), hold(sums);
#endif
}

// `steps`: slots of K that the weight has; `outputs`: of y, a multiple of 16; `scales`: of FP8, `steps` for each 128 outputs.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    many(const __grid_constant__ CUtensorMap weight, const __grid_constant__ CUtensorMap x, const u8 *__restrict__ residual,
         u8 *__restrict__ y, const float *__restrict__ scales, int rows, int outputs, int steps) {
  extern __shared__ __align__(1024) u8 memory[];
  __shared__ __align__(8) u64 barriers[4 * SLOTS + 1];
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int rank = RANKS > 1 ? blockIdx.x % RANKS : 0, group = blockIdx.x / RANKS;
  const u32 rings = shared_address(memory), first_barrier = shared_address(barriers);
  const Ring of_weights = {rings, first_barrier}, of_x = {rings + SLOTS * WEIGHT_BYTES, first_barrier + 16 * SLOTS};
  const u32 inbox = of_x.memory + SLOTS * X_BYTES, arrived = first_barrier + 32 * SLOTS;
  const int begin = rank * steps / RANKS, count = (rank + 1) * steps / RANKS - begin;
  const int live = (rows + 7) / 8;  // eights of rows that there are
  const bool asks_for_x = warp > WARPS;
  const Ring asked_for = asks_for_x ? of_x : of_weights;
  if (warp >= WARPS && lane == 0) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(asks_for_x ? &x : &weight) : "memory");
    for (int slot = 0; slot < SLOTS; ++slot)
      barrier_init(asked_for.full(slot), 1), barrier_init(asked_for.empty(slot), WARPS);
    if (asks_for_x) barrier_init(arrived, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    if (asks_for_x) barrier_expect(arrived, (live + RANKS - 1 - rank) / RANKS * (RANKS - 1) * PART_BYTES);
  }
  __syncthreads();
  if (RANKS > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");

  if (warp >= WARPS) {
    if (asks_for_x) asm volatile("griddepcontrol.wait;" ::: "memory");
    u64 policy;
    if (asks_for_x)  // all blocks read the rows, one block reads a weight
      asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    else
      asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    Place at = {0, 1};
#pragma unroll 1
    for (int step = 0; step < count; ++step) {
      if (RANKS > 1 && step == SLOTS) cluster_wait();  // long over: who empties slots has come past it
      const u32 full = asked_for.full(at.slot);
      if (lane == 0) {
        block_barrier_wait(asked_for.empty(at.slot), at.parity);
        if (!asks_for_x && step >= PACED && step < SLOTS) block_barrier_wait(asked_for.full(step - PACED), 0);
        if (asks_for_x) {
          barrier_expect(full, X_BYTES);
#pragma unroll
          for (int block = 0; block < BLOCKS; ++block)
            copy_box(asked_for.memory + at.slot * X_BYTES + block * TOKENS * 128, &x, ((begin + step) * BLOCKS + block) * 64, 0, full,
                     policy);
        } else {
          barrier_expect(full, WEIGHT_BYTES);
          copy_box(asked_for.memory + at.slot * WEIGHT_BYTES, &weight, (begin + step) * BLOCKS * 64, group * OUTPUTS, full,
                   policy);
        }
      }
      __syncwarp();
      at.advance();
    }
    if (RANKS > 1 && count <= SLOTS) cluster_wait();
    return;
  }

  // The others' barriers are there. Now, where nothing waits for it.
  if (RANKS > 1) cluster_wait();
  // A lane's pairs of outputs, transposed: of row lane / 4 of an eight, two neighbours, and the two eight behind them.
  const int strip = group * OUTPUTS + warp * 16;
  const int output = strip + lane % 4 * 2;
  const bool is_there = strip < outputs;
  asm volatile("griddepcontrol.wait;" ::: "memory");
  // Not before: what starts after a product may then read, ahead of its own wait, all that the product's input was made from.
  asm volatile("griddepcontrol.launch_dependents;");
  u32 added[OWN][2];
  auto load_added = [&] {
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      const int row = (i * RANKS + rank) * 8 + lane / 4;
      const u8 *place = residual + (size_t(row) * outputs + output) * 2;
      const bool is = residual != nullptr && row < rows && is_there;
      added[i][0] = is ? load_fresh(place) : 0, added[i][1] = is ? load_fresh(place + 16) : 0;
    }
  };
  if (ROOMY) load_added();
  float sums[SUMS];
  multiply_all(sums, of_weights, of_x, count, scales + size_t((group * OUTPUTS + warp / 4 * 64) / 128) * steps + begin, warp, lane);
  if (!ROOMY) load_added();

  // Eight rows belong to one rank, in turn: those of the others are sent to them, at this thread's place.
  float own[OWN][4];
#pragma unroll
  for (int i = 0; i < EIGHTS; ++i) {
    const int owner = i % RANKS;
    if (owner == rank) {
#pragma unroll
      for (int j = 0; j < 4; ++j) own[i / RANKS][j] = sums[4 * i + j];
    } else if (i < live) {
      const u32 part = inbox + ((rank - (rank > owner)) * OWN + i / RANKS) * PART_BYTES + threadIdx.x * 16;
      asm volatile(
          "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(at_rank(part, owner)),
          "f"(sums[4 * i]), "f"(sums[4 * i + 1]), "f"(sums[4 * i + 2]), "f"(sums[4 * i + 3]), "r"(at_rank(arrived, owner))
          : "memory");
    }
  }
  if (RANKS > 1) block_barrier_wait(arrived, 0);
#pragma unroll
  for (int i = 0; i < OWN; ++i) {
    if (i * RANKS + rank >= live) break;
    float4 sum = make_float4(own[i][0], own[i][1], own[i][2], own[i][3]);
    if (RANKS > 1) {
      const float4 mine = sum;
      sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int r = 0; r < RANKS; ++r) {
        float4 part = mine;
        if (r != rank)
          part = *reinterpret_cast<const float4 *>(memory + (inbox - rings) + ((r - (r > rank)) * OWN + i) * PART_BYTES +
                                                   threadIdx.x * 16);
        sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
      }
    }
    own[i][0] = sum.x, own[i][1] = sum.y, own[i][2] = sum.z, own[i][3] = sum.w;
  }
#pragma unroll
  for (int i = 0; i < OWN; ++i) {
    const int row = (i * RANKS + rank) * 8 + lane / 4;
    if (i * RANKS + rank >= live || !is_there) break;
    const u32 upper = transposed(added[i][0]), lower = transposed(added[i][1]);
    const float v[4] = {own[i][0] + low(upper), own[i][1] + high(upper), own[i][2] + low(lower), own[i][3] + high(lower)};
    const u32 first = transposed(to_bf16_pair(v[0], v[1])), second = transposed(to_bf16_pair(v[2], v[3]));
    u8 *place = y + (size_t(row) * outputs + output) * 2;
    if (row < rows) *reinterpret_cast<u32 *>(place) = first, *reinterpret_cast<u32 *>(place + 16) = second;
  }
}
