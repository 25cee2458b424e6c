// The router: sigmoid(W x) in float32, the k best of it plus a bias, and their weights; one launch.
//
// A cluster of CLUSTER blocks has 16 experts, a block of it an eighth of K, so that its weights are few and there before the rows
// are: nobody waits for the preceding kernel to ask for them. W is a sum of TERMS bfloat16 matrices (one where the router was
// stored in bfloat16, else three, which make any float32): products are exact and sums float32. The warps of a block share its K;
// rows come eight at a time straight into registers. The cluster's sums meet in its first block, which stores the logits of 16
// experts over a value that no logit has; of every row one warp, in another block, loads all logits until they are there, and
// chooses. Two buffers take turns; each launch clears what the last one used. The order of every sum is fixed.
//
// Macros: HIDDEN, a multiple of 64; EXPERTS; GROUPS = ceil(EXPERTS / 16), the clusters; TERMS; MOST_ROWS.

#include "sm90_formats.cuh"

constexpr int CLUSTER = 8, WARPS = 4, THREADS = WARPS * 32;
constexpr int STEPS = HIDDEN / 64, STEP_BYTES = 2048;
constexpr int OWN_STEPS = (STEPS + CLUSTER - 1) / CLUSTER;       // of a block, at most
constexpr int SLICE = (OWN_STEPS + WARPS - 1) / WARPS;           // of a warp, at most
constexpr int PER_LANE = (EXPERTS + 31) / 32;
constexpr int ROW_GROUPS = (MOST_ROWS + 7) / 8;

__device__ __forceinline__ u32 address_in(u32 shared, u32 rank) {
  u32 target;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(target) : "r"(shared), "r"(rank));
  return target;
}

__device__ __forceinline__ uint4 load_fresh(const void *pointer) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(pointer));
  return v;
}

__device__ __forceinline__ u32 load_relaxed(const u32 *pointer) {
  u32 v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(pointer) : "memory");
  return v;
}

__device__ __forceinline__ bool cluster_barrier_passed(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n.reg .pred done;\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done;
}

// A float's order as that of an unsigned integer; what does not exist is below everything.
__device__ __forceinline__ u32 ordered(float value) {
  const u32 bits = __float_as_uint(value);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// What no logit is: sums make one NaN, and this is another.
constexpr u32 MISSING = 0xffffffffu;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    route(const u8 *__restrict__ weight, const u8 *__restrict__ x, const float *__restrict__ bias,
          int *__restrict__ ids, float *__restrict__ weights, u32 *both_logits, u64 *state, int rows, int x_stride, int k,
          float scale) {
  extern __shared__ __align__(1024) u8 memory[];  // weights: by term, by step
  __shared__ __align__(8) u64 full, met;
  __shared__ float partial[WARPS][128];
  __shared__ float sums_of[ROW_GROUPS][CLUSTER][128];  // in the first block of a cluster

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int rank = blockIdx.x % CLUSTER, group = blockIdx.x / CLUSTER;
  const int first_step = rank * STEPS / CLUSTER, own_steps = (rank + 1) * STEPS / CLUSTER - first_step;
  const int begin = first_step + warp * own_steps / WARPS, steps = first_step + (warp + 1) * own_steps / WARPS - begin;
  const int row_groups = (rows + 7) / 8;
  if (threadIdx.x == 0) {
    const u32 barrier = shared_address(&full);
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&met)), "r"(row_groups * CLUSTER * WARPS)
                 : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                 "r"(TERMS * own_steps * STEP_BYTES)
                 : "memory");
    for (int term = 0; term < TERMS; ++term)
      if (own_steps > 0)
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                shared_address(memory + term * OWN_STEPS * STEP_BYTES)),
            "l"(weight + ((size_t(term) * GROUPS + group) * STEPS + first_step) * STEP_BYTES), "r"(own_steps * STEP_BYTES),
            "r"(barrier)
            : "memory");
  }
  __syncthreads();
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");

  // Launches take turns with two buffers of logits. The first word of `state` counts blocks that have finished, this one not
  // yet among them; the others say how many rows of a buffer were used.
  const u64 finished = __ldcg(reinterpret_cast<unsigned long long *>(state));
  const u64 used_rows[2] = {__ldcg(reinterpret_cast<unsigned long long *>(state) + 1),
                            __ldcg(reinterpret_cast<unsigned long long *>(state) + 2)};
  uint4 own[SLICE][2];  // this lane's part of its row
  auto load_rows = [&](int first) {
    const u8 *row = x + (size_t(min(first + g, rows - 1)) * x_stride + begin * 64 + t * 16) * 2;
#pragma unroll
    for (int s = 0; s < SLICE; ++s) {
      own[s][0] = own[s][1] = make_uint4(0, 0, 0, 0);
      if (s < steps) own[s][0] = load_fresh(row + s * 128), own[s][1] = load_fresh(row + s * 128 + 16);
    }
  };
  load_rows(0);
  const int turn = finished / (GROUPS * CLUSTER) & 1;
  u32 *const logits = both_logits + turn * MOST_ROWS * GROUPS * 16;
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");  // all blocks run: their shared memory can be written
  while (!cluster_barrier_passed(shared_address(&full), 0)) {
  }

  for (int number = 0; number < row_groups; ++number) {
    if (number > 0) load_rows(number * 8);
    Sums sums = {};
    for (int term = 0; term < TERMS; ++term)
#pragma unroll
      for (int s = 0; s < SLICE; ++s)
        if (s < steps) {
          const u8 *step = memory + (term * OWN_STEPS + begin - first_step + s) * STEP_BYTES + lane * 16;
          const uint4 upper = load16(step), upper_more = load16(step + 512);
          const uint4 lower = load16(step + 1024), lower_more = load16(step + 1536);
          mma(sums[0], upper.x, lower.x, upper.y, lower.y, own[s][0].x, own[s][0].y);
          mma(sums[1], upper.z, lower.z, upper.w, lower.w, own[s][0].z, own[s][0].w);
          mma(sums[0], upper_more.x, lower_more.x, upper_more.y, lower_more.y, own[s][1].x, own[s][1].y);
          mma(sums[1], upper_more.z, lower_more.z, upper_more.w, lower_more.w, own[s][1].z, own[s][1].w);
        }
    // The warps' sums by lane: outputs g, g, g + 8, g + 8 of rows 2 t, 2 t + 1, 2 t, 2 t + 1.
#pragma unroll
    for (int i = 0; i < 4; ++i) partial[warp][(2 * t + i % 2) * 16 + g + i / 2 * 8] = sums[0][i] + sums[1][i];
    __syncthreads();
    float total = partial[0][threadIdx.x];
#pragma unroll
    for (int w = 1; w < WARPS; ++w) total += partial[w][threadIdx.x];
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address_in(shared_address(&sums_of[number][rank][threadIdx.x]), 0)),
                 "f"(total)
                 : "memory");
    __syncthreads();  // the partial sums were read, and the lanes' stores stand before the arrival
    if (lane == 0)
      asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(
                       address_in(shared_address(&met), 0))
                   : "memory");
  }
  // What the last launch left in the other buffer.
  for (u64 at = u64(blockIdx.x) * THREADS + threadIdx.x; at < (turn ? used_rows[0] : used_rows[1]) * GROUPS * 16;
       at += GROUPS * CLUSTER * THREADS)
    both_logits[(turn ^ 1) * MOST_ROWS * GROUPS * 16 + at] = MISSING;
  if (blockIdx.x == 0 && threadIdx.x == 0) state[1 + turn] = rows;

  if (rank == 0) {
    while (!cluster_barrier_passed(shared_address(&met), 0)) {
    }
    for (int number = 0; number < row_groups; ++number) {
      const int row = number * 8 + threadIdx.x / 16;
      float total = sums_of[number][0][threadIdx.x];
#pragma unroll
      for (int r = 1; r < CLUSTER; ++r) total += sums_of[number][r][threadIdx.x];
      if (row < rows)
        asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(logits + (row * GROUPS + group) * 16 + threadIdx.x % 16),
                     "r"(__float_as_uint(total))
                     : "memory");
    }
  } else {
    // Rows go round the clusters, then round the other blocks of each, then round their warps.
    for (int row = ((warp * (CLUSTER - 1)) + rank - 1) * GROUPS + group; row < rows; row += GROUPS * (CLUSTER - 1) * WARPS) {
      float own_bias[PER_LANE];
#pragma unroll
      for (int i = 0; i < PER_LANE; ++i) own_bias[i] = i * 32 + lane < EXPERTS ? bias[i * 32 + lane] : 0.0f;
      u32 logit[PER_LANE];
      bool missing;
      do {
        missing = false;
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
          const int expert = i * 32 + lane;
          logit[i] = expert < EXPERTS ? load_relaxed(logits + row * GROUPS * 16 + expert) : 0;
          missing |= logit[i] == MISSING;
        }
      } while (__any_sync(0xffffffffu, missing));
      float gate[PER_LANE];
      u32 key[PER_LANE];
#pragma unroll
      for (int i = 0; i < PER_LANE; ++i) {
        gate[i] = 0.0f, key[i] = 0;
        if (i * 32 + lane < EXPERTS) {
          gate[i] = 1.0f / (1.0f + expf(-__uint_as_float(logit[i])));
          key[i] = ordered(gate[i] + own_bias[i]);
        }
      }
      // Lane c ends up with choice c: ties to the lowest id.
      int chosen_id = 0;
      float chosen = 0.0f, sum = 0.0f;
      for (int choice = 0; choice < k; ++choice) {
        u32 best = 0;
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) best = max(best, key[i]);
        const u32 most = __reduce_max_sync(0xffffffffu, best);
        int id = EXPERTS;
#pragma unroll
        for (int i = PER_LANE - 1; i >= 0; --i)
          if (key[i] == most && i * 32 + lane < EXPERTS) id = i * 32 + lane;
        id = __reduce_min_sync(0xffffffffu, id);
        float value = 0.0f;
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i)
          if (i * 32 + lane == id) value = gate[i], key[i] = 0;
        value = __shfl_sync(0xffffffffu, value, id % 32);
        sum += value;
        if (lane == choice) chosen_id = id, chosen = value;
      }
      if (lane < k) {
        ids[row * k + lane] = chosen_id;
        weights[row * k + lane] = chosen / (sum + 1e-20f) * scale;
      }
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) atomicAdd(reinterpret_cast<unsigned long long *>(state), 1ull);
}
