// The router: sigmoid(W x) in float32, the k best of it plus a bias, and their weights; one launch.
//
// Blocks share experts and K: block b has 16 experts and an eighth of K, so that its weights are few and there before the rows
// are: nobody waits for the preceding kernel to ask for them. W is a sum of TERMS bfloat16 matrices (one where the router was
// stored in bfloat16, else three, which make any float32): products are exact and sums float32. Four warps of a block share its
// K; rows come eight at a time straight into registers. What they add up to goes to the L2 at once, over a value that no sum has.
// A fifth warp of a block per row loads all eight parts of all experts until they are there, adds them in their order, and
// chooses: parts meet once, and no block waits for another before that. Two buffers take turns; each launch clears what the last
// one used.
//
// Blocks are launched in clusters of PARTS and use nothing of each other: launched one by one they stand on more multiprocessors,
// and a layer takes 3 us more (NOTES.md).
//
// Macros: HIDDEN, a multiple of 64; EXPERTS; GROUPS = ceil(EXPERTS / 16); TERMS; MOST_ROWS.

#include "sm90_formats.cuh"

constexpr int PARTS = 8, WARPS = 4, THREADS = WARPS * 32 + 32;
constexpr int STEPS = HIDDEN / 64, STEP_BYTES = 2048;
constexpr int OWN_STEPS = (STEPS + PARTS - 1) / PARTS;  // of a block, at most
constexpr int SLICE = (OWN_STEPS + WARPS - 1) / WARPS;  // of a warp, at most
constexpr int PADDED = GROUPS * 16;
constexpr int QUADS = (PADDED + 127) / 128;  // of a lane of the choosing warp: four experts each
constexpr int PER_LANE = QUADS * 4;
constexpr int PITCH = 20;   // floats of a row's sums: rows start in different banks
constexpr int LISTED = 32;  // keys that are compared with each other, at most

__device__ __forceinline__ uint4 load_fresh(const void *pointer) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(pointer)
               : "memory");
  return v;
}

__device__ __forceinline__ uint4 load_relaxed(const void *pointer) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(pointer)
               : "memory");
  return v;
}

// A float's order as that of an unsigned integer; what does not exist is below everything.
__device__ __forceinline__ u32 ordered(float value) {
  const u32 bits = __float_as_uint(value);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// 1 / (1 + e^-v): the quotient within an ulp, and no branch.
__device__ __forceinline__ float sigmoid(float v) {
  const float d = 1.0f + expf(-v);
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(d));
  const float better = fmaf(r, fmaf(-d, r, 1.0f), r);
  return d < 1e37f ? better : d == d ? r : d;
}

// What no sum is: sums make one NaN, and this is another.
constexpr u32 MISSING = 0xffffffffu;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    route(const u8 *__restrict__ weight, const u8 *__restrict__ x, const float *bias, int *__restrict__ ids,
          float *__restrict__ weights, u32 *both_parts, uint4 *state, int rows, int x_stride, int k, float scale) {
  extern __shared__ __align__(1024) u8 memory[];  // weights: by term, by step
  __shared__ __align__(8) u64 full;
  __shared__ __align__(16) float partial[2][WARPS][8 * PITCH];
  __shared__ uint4 state_seen;  // which buffer's turn it is; rows used of each
  __shared__ __align__(16) float gates[QUADS * 128];
  __shared__ __align__(16) u64 list[LISTED];
  __shared__ __align__(16) float chosen[32];

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int part = blockIdx.x % PARTS, group = blockIdx.x / PARTS;
  const int first_step = part * STEPS / PARTS, own_steps = (part + 1) * STEPS / PARTS - first_step;
  if (threadIdx.x == 0) {
    const u32 barrier = shared_address(&full);
    barrier_init(barrier, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    barrier_expect(barrier, TERMS * own_steps * STEP_BYTES);
    for (int term = 0; term < TERMS; ++term)
      if (own_steps > 0)
        copy_bulk(shared_address(memory + term * OWN_STEPS * STEP_BYTES),
                  weight + ((size_t(term) * GROUPS + group) * STEPS + first_step) * STEP_BYTES, own_steps * STEP_BYTES, barrier);
  }
  asm volatile("griddepcontrol.launch_dependents;");

  if (warp < WARPS) {
    const int begin = first_step + warp * own_steps / WARPS, steps = first_step + (warp + 1) * own_steps / WARPS - begin;
    const int row_groups = (rows + 7) / 8;
    uint4 own[SLICE][2] = {};  // this lane's part of its row
    u32 turn = 0;
#pragma unroll 1
    for (int number = 0; number < row_groups; ++number) {
      if (number == 0) {
        asm volatile("bar.sync 1, %0;" ::"n"(WARPS * 32) : "memory");
        asm volatile("griddepcontrol.wait;" ::: "memory");
        if (threadIdx.x == 0) state_seen = load_fresh(state);
        const u8 *row = x + (size_t(min(g, rows - 1)) * x_stride + begin * 64 + t * 16) * 2;
#pragma unroll
        for (int s = 0; s < SLICE; ++s)
          if (s < steps) own[s][0] = load_fresh(row + s * 128), own[s][1] = load_fresh(row + s * 128 + 16);
        while (!barrier_passed(shared_address(&full), 0)) {
        }
      }
      Sums sums = {};
#pragma unroll 1
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
      float *const here = partial[number & 1][0];
#pragma unroll
      for (int i = 0; i < 4; ++i) here[warp * 8 * PITCH + (2 * t + i % 2) * PITCH + g + i / 2 * 8] = sums[0][i] + sums[1][i];
      if (number == 0)
        __syncthreads();  // with the choosing warp, which wants to know whose turn it is
      else
        asm volatile("bar.sync 1, %0;" ::"n"(WARPS * 32) : "memory");
      if (number == 0) turn = state_seen.x;
      if (warp == 0) {
        const int row = number * 8 + g;  // and experts 4 t to 4 t + 3
        const float4 *const from = reinterpret_cast<const float4 *>(here + g * PITCH + t * 4);
        float4 total = from[0];
#pragma unroll
        for (int w = 1; w < WARPS; ++w) {
          const float4 one = from[w * (8 * PITCH / 4)];
          total.x += one.x, total.y += one.y, total.z += one.z, total.w += one.w;
        }
        if (row < rows)
          asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(
                           both_parts + ((size_t(turn) * MOST_ROWS + row) * PARTS + part) * PADDED + group * 16 + t * 4),
                       "f"(total.x), "f"(total.y), "f"(total.z), "f"(total.w)
                       : "memory");
      }
      if (number + 1 < row_groups) {
        const u8 *row = x + (size_t(min(number * 8 + 8 + g, rows - 1)) * x_stride + begin * 64 + t * 16) * 2;
#pragma unroll
        for (int s = 0; s < SLICE; ++s)
          if (s < steps) own[s][0] = load_fresh(row + s * 128), own[s][1] = load_fresh(row + s * 128 + 16);
      }
    }
    // What the last launch left in the other buffer.
    if (warp > 0) {
      const u32 used = (turn ? state_seen.y : state_seen.z) * (PARTS * PADDED / 4);
      uint4 *const other = reinterpret_cast<uint4 *>(both_parts + size_t(turn ^ 1) * MOST_ROWS * PARTS * PADDED);
#pragma unroll 1
      for (u32 at = blockIdx.x * (WARPS - 1) * 32 + threadIdx.x - 32; at < used; at += GROUPS * PARTS * (WARPS - 1) * 32)
        other[at] = make_uint4(MISSING, MISSING, MISSING, MISSING);
    }
    return;
  }

  // Rows go round the blocks. Expert i of a lane is the one whose number `expert(i)` says.
  auto expert = [&](int i) { return i / 4 * 128 + lane * 4 + i % 4; };
  const u32 lower_lanes = (1u << lane) - 1;
  float own_bias[PER_LANE];
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    own_bias[i] = 0.0f;
    if (expert(i) < EXPERTS && int(blockIdx.x) < rows)
      asm volatile("ld.global.f32 %0, [%1];" : "=f"(own_bias[i]) : "l"(bias + expert(i)) : "memory");
  }
  asm volatile("griddepcontrol.wait;" ::: "memory");
  __syncthreads();
#pragma unroll 1
  for (int row = blockIdx.x; row < rows; row += GROUPS * PARTS) {
    uint4 v[PARTS][QUADS];
    const u32 *const from = both_parts + (size_t(state_seen.x & 1) * MOST_ROWS + row) * PARTS * PADDED + lane * 4;
#pragma unroll
    for (int p = 0; p < PARTS; ++p)
#pragma unroll
      for (int q = 0; q < QUADS; ++q)
        v[p][q].x = q * 128 + lane * 4 < PADDED ? MISSING : 0, v[p][q].y = v[p][q].z = v[p][q].w = 0;
    bool missing;
    do {
      missing = false;
#pragma unroll
      for (int p = 0; p < PARTS; ++p)
#pragma unroll
        for (int q = 0; q < QUADS; ++q)
          if (v[p][q].x == MISSING) v[p][q] = load_relaxed(from + p * PADDED + q * 128);
#pragma unroll
      for (int p = 0; p < PARTS; ++p)
#pragma unroll
        for (int q = 0; q < QUADS; ++q) missing |= v[p][q].x == MISSING;
    } while (__any_sync(0xffffffffu, missing));
    float gate[PER_LANE];
    u32 key[PER_LANE];
#pragma unroll
    for (int q = 0; q < QUADS; ++q) {
      float4 total = *reinterpret_cast<const float4 *>(&v[0][q]);
#pragma unroll
      for (int p = 1; p < PARTS; ++p) {
        const float4 one = *reinterpret_cast<const float4 *>(&v[p][q]);
        total.x += one.x, total.y += one.y, total.z += one.z, total.w += one.w;
      }
      gate[q * 4] = sigmoid(total.x), gate[q * 4 + 1] = sigmoid(total.y);
      gate[q * 4 + 2] = sigmoid(total.z), gate[q * 4 + 3] = sigmoid(total.w);
      *reinterpret_cast<float4 *>(gates + q * 128 + lane * 4) =
          make_float4(gate[q * 4], gate[q * 4 + 1], gate[q * 4 + 2], gate[q * 4 + 3]);
    }
    u32 best = 0;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      key[i] = expert(i) < EXPERTS ? ordered(gate[i] + own_bias[i]) : 0;
      best = max(best, key[i]);
    }
    chosen[lane] = 0.0f;
    // Eight disjoint sets of lanes each have a key that is no less than the least of their best ones: of up to eight choices none
    // lies below that, in either of two ways to cut the lanes.
    u32 bound;
    {
      u32 a = max(best, __shfl_xor_sync(0xffffffffu, best, 1)), b = max(best, __shfl_xor_sync(0xffffffffu, best, 8));
      a = max(a, __shfl_xor_sync(0xffffffffu, a, 2)), b = max(b, __shfl_xor_sync(0xffffffffu, b, 16));
      bound = max(max(__reduce_min_sync(0xffffffffu, a), __reduce_min_sync(0xffffffffu, b)), 1);
    }
    int own_count = 0;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) own_count += key[i] >= bound;
    const int count = __reduce_add_sync(0xffffffffu, own_count);
    const u32 ones = __ballot_sync(0xffffffffu, own_count & 1), twos = __ballot_sync(0xffffffffu, own_count & 2);
    const bool many = __any_sync(0xffffffffu, own_count > 3) || count > LISTED || k > 8 || count < k;
    int place = LISTED, id = 0;
    float value = 0.0f;
    if (!many) {
      int at = __popc(ones & lower_lanes) + 2 * __popc(twos & lower_lanes);
#pragma unroll
      for (int i = 0; i < PER_LANE; ++i)
        if (key[i] >= bound) list[at++] = u64(key[i]) << 32 | u32(EXPERTS - 1 - expert(i));  // ties to the lowest id
      if (lane >= count) list[lane] = 0;
      __syncwarp();
      const u64 own = list[lane];
      if (lane < count) {
        place = 0, id = EXPERTS - 1 - int(u32(own));
        value = gates[id];
      }
#pragma unroll 1
      for (int first = 0; first < count; first += 8)
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
          const ulonglong2 two = *reinterpret_cast<const ulonglong2 *>(list + first + i);
          place += (two.x > own) + (two.y > own);
        }
    } else {
      // Lane c ends up with choice c.
      __syncwarp();
#pragma unroll 1
      for (int choice = 0; choice < k; ++choice) {
        u32 most = 0;
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) most = max(most, key[i]);
        most = __reduce_max_sync(0xffffffffu, most);
        int lowest = EXPERTS;
#pragma unroll
        for (int i = PER_LANE - 1; i >= 0; --i)
          if (key[i] == most && expert(i) < EXPERTS) lowest = expert(i);
        lowest = __reduce_min_sync(0xffffffffu, lowest);
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i)
          if (expert(i) == lowest) key[i] = 0;
        if (lane == choice) place = choice, id = lowest, value = gates[lowest];
      }
    }
    if (place < k) chosen[place] = value;
    __syncwarp();
    float sum = 0.0f;
#pragma unroll 1
    for (int first = 0; first < k; first += 8) {
      const float4 a = *reinterpret_cast<const float4 *>(chosen + first);
      const float4 b = *reinterpret_cast<const float4 *>(chosen + first + 4);
      sum = sum + a.x + a.y + a.z + a.w + b.x + b.y + b.z + b.w;
    }
    if (place < k) {
      ids[row * k + place] = id;
      weights[row * k + place] = value / (sum + 1e-20f) * scale;
    }
    __syncwarp();
  }
  // All blocks have seen the state when the first row's parts are there.
  if (blockIdx.x == 0 && lane == 0) {
    const uint4 seen = state_seen;
    *state = make_uint4(seen.x ^ 1, seen.x ? seen.y : rows, seen.x ? rows : seen.z, 0);
  }
}
