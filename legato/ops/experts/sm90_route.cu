// The router: sigmoid(W x) in float32, the k best of it plus a bias, and their weights; one cluster, one launch.
//
// Each of the cluster's RANKS blocks has 16 experts. All of their weights fit its shared memory, and nobody waits for the
// preceding kernel to ask for them. W is a sum of TERMS bfloat16 matrices (one where the router was stored in bfloat16,
// else three, which make any float32): products are exact and sums float32. The warps share K; rows come eight at a time
// straight into registers. The logits of a row go to one block's shared memory, where one warp chooses.
//
// Macros: HIDDEN, a multiple of 64; EXPERTS; RANKS = ceil(EXPERTS / 16); TERMS; MOST_ROWS.

#include "sm90_formats.cuh"

constexpr int WARPS = 8, THREADS = WARPS * 32;
constexpr int STEPS = HIDDEN / 64, STEP_BYTES = 2048;
constexpr int SLICE = (STEPS + WARPS - 1) / WARPS;  // of a warp, at most
constexpr int OWN_ROWS = (MOST_ROWS + RANKS - 1) / RANKS;
constexpr int PER_LANE = (EXPERTS + 31) / 32;

__device__ __forceinline__ u32 shared_address(const void *pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ uint4 load_fresh(const void *pointer) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(pointer));
  return v;
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

// A float's order as that of an unsigned integer; what does not exist is below everything.
__device__ __forceinline__ u32 ordered(float value) {
  const u32 bits = __float_as_uint(value);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    route(const u8 *__restrict__ weight, const u8 *__restrict__ x, const float *__restrict__ bias,
          int *__restrict__ ids, float *__restrict__ weights, int rows, int x_stride, int k, float scale) {
  extern __shared__ __align__(1024) u8 memory[];  // WARPS slices of 16 experts' weights
  __shared__ __align__(8) u64 full[WARPS];
  __shared__ float partial[WARPS][128];
  __shared__ float logits[OWN_ROWS][RANKS * 16];  // of this block's rows: written by all blocks

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int rank = blockIdx.x;
  const int begin = warp * STEPS / WARPS, steps = (warp + 1) * STEPS / WARPS - begin;
  u8 *const slice = memory + begin * STEP_BYTES;
  const u32 barrier = shared_address(&full[warp]);
  auto fetch = [&](int term) {
    const u8 *from = weight + ((size_t(term) * RANKS + rank) * STEPS + begin) * STEP_BYTES;
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(steps * STEP_BYTES)
                 : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            shared_address(slice)),
        "l"(from), "r"(steps * STEP_BYTES), "r"(barrier)
        : "memory");
  };
  if (lane == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    if (steps > 0) fetch(0);
  }
  asm volatile("griddepcontrol.launch_dependents;");
  __syncwarp();
  asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");  // all blocks run: their shared memory can be written

  u32 parity = 0;
  for (int first = 0; first < rows; first += 8) {
    uint4 own[SLICE][2];  // this lane's part of its row
    const u8 *row = x + (size_t(min(first + g, rows - 1)) * x_stride + begin * 64 + t * 16) * 2;
#pragma unroll
    for (int s = 0; s < SLICE; ++s) {
      own[s][0] = own[s][1] = make_uint4(0, 0, 0, 0);
      if (s < steps) own[s][0] = load_fresh(row + s * 128), own[s][1] = load_fresh(row + s * 128 + 16);
    }
    Sums sums = {};
    for (int term = 0; term < TERMS; ++term) {
      if (steps > 0 && (TERMS > 1 || first == 0)) {
        while (!barrier_passed(barrier, parity)) {
        }
        parity ^= 1;
      }
#pragma unroll
      for (int s = 0; s < SLICE; ++s)
        if (s < steps) {
          const u8 *step = slice + s * STEP_BYTES + lane * 16;
          const uint4 upper = load16(step), upper_more = load16(step + 512);
          const uint4 lower = load16(step + 1024), lower_more = load16(step + 1536);
          mma(sums[0], upper.x, lower.x, upper.y, lower.y, own[s][0].x, own[s][0].y);
          mma(sums[1], upper.z, lower.z, upper.w, lower.w, own[s][0].z, own[s][0].w);
          mma(sums[0], upper_more.x, lower_more.x, upper_more.y, lower_more.y, own[s][1].x, own[s][1].y);
          mma(sums[1], upper_more.z, lower_more.z, upper_more.w, lower_more.w, own[s][1].z, own[s][1].w);
        }
      __syncwarp();
      const bool last = first + 8 >= rows && term == TERMS - 1;
      if (TERMS > 1 && lane == 0 && steps > 0 && !last) fetch((term + 1) % TERMS);
    }
    // The warps' sums by lane: outputs g, g, g + 8, g + 8 of rows 2 t, 2 t + 1, 2 t, 2 t + 1.
#pragma unroll
    for (int i = 0; i < 4; ++i) partial[warp][(2 * t + i % 2) * 16 + g + i / 2 * 8] = sums[0][i] + sums[1][i];
    __syncthreads();
    for (int i = threadIdx.x; i < 128; i += THREADS) {
      const int place = first + i / 16;
      if (place >= rows) continue;
      float total = partial[0][i];
#pragma unroll
      for (int w = 1; w < WARPS; ++w) total += partial[w][i];
      u32 target;
      asm("mapa.shared::cluster.u32 %0, %1, %2;"
          : "=r"(target)
          : "r"(shared_address(&logits[place / RANKS][rank * 16 + i % 16])), "r"(place % RANKS));
      asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(target), "f"(total) : "memory");
    }
    __syncthreads();
  }
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");

  for (int own = warp; own * RANKS + rank < rows; own += WARPS) {
    float gate[PER_LANE];
    u32 key[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      const int expert = i * 32 + lane;
      gate[i] = 0.0f, key[i] = 0;
      if (expert < EXPERTS) {
        gate[i] = 1.0f / (1.0f + expf(-logits[own][expert]));
        key[i] = ordered(gate[i] + bias[expert]);
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
      const size_t at = size_t(own * RANKS + rank) * k + lane;
      ids[at] = chosen_id;
      weights[at] = chosen / (sum + 1e-20f) * scale;
    }
  }
}
