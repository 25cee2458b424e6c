// out[t, h] = W[h] x[t, h]: each head's rows times that head's own matrix, for few rows bound by the bytes of W.
//
// A warp holds 16 outputs by its part of K in registers, all of it fetched before griddepcontrol.wait (weights depend on
// nothing), and takes 16 rows at a time through mma.m16n8k16; SPLIT warps share K and meet in shared memory, always in the
// same order. Rows never meet: a row's bits are the same whatever their number. The packed order is described in
// sm90_heads.py. Macros: INPUTS (K, a multiple of 32 * SPLIT), SPLIT (1, 2 or 4).

#include "../sm90.cuh"

constexpr int WARPS = 4;
constexpr int SLICE = 16;                       // outputs of a warp
constexpr int OUTPUTS = SLICE * WARPS / SPLIT;  // of a block
constexpr int BLOCKS_K = INPUTS / 32;           // a lane has 16 bytes of each
constexpr int OWN_K = BLOCKS_K / SPLIT;         // of a warp
constexpr int PITCH = SLICE + 4;
static_assert(BLOCKS_K % SPLIT == 0, "warps have equal parts of K");

// Past the L1: a preceding kernel may still have been writing when this one began.
__device__ __forceinline__ uint4 load_fresh(const void *pointer) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(pointer) : "memory");
  return v;
}

// A weight. Not through ld.global.nc: those loads the assembler moves behind the wait, whatever the source says.
__device__ __forceinline__ uint4 load_weight(const void *pointer) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(pointer)
               : "memory");
  return v;
}

struct Rows {
  const u8 *x;  // at this warp's part of K and this lane's place in a block of it
  u8 *y;        // at this head's and block's outputs
  int x_stride, y_stride, end;
};

// The next 8 * HALVES rows. Lanes without a row of their own repeat the last one: loads without conditions are in flight
// together.
template <int HALVES>
__device__ __forceinline__ void multiply(const Rows &rows, const uint4 (&weights)[2][OWN_K], int first, int warp, int lane) {
  __shared__ float partial[WARPS][8 * HALVES][PITCH];
  uint4 x[HALVES][OWN_K];
#pragma unroll
  for (int half = 0; half < HALVES; ++half) {
    const u8 *own = rows.x + size_t(min(first + half * 8 + lane / 4, rows.end - 1)) * rows.x_stride * 2;
#pragma unroll
    for (int k = 0; k < OWN_K; ++k) x[half][k] = load_fresh(own + k * 64);
  }
  float sums[2][2][4] = {};
#pragma unroll
  for (int k = 0; k < OWN_K; ++k) {
    const uint4 upper = x[0][k], lower = HALVES == 2 ? x[HALVES - 1][k] : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const uint4 w = weights[tile][k];
      mma(sums[tile][0], upper.x, lower.x, upper.y, lower.y, w.x, w.y);
      mma(sums[tile][1], upper.z, lower.z, upper.w, lower.w, w.z, w.w);
    }
  }
  // A lane's four outputs are neighbours: the packed order sees to it.
#pragma unroll
  for (int half = 0; half < HALVES; ++half) {
    const int i = half * 2, row = first + half * 8 + lane / 4;
    const float4 own = make_float4(sums[0][0][i] + sums[0][1][i], sums[0][0][i + 1] + sums[0][1][i + 1],
                                   sums[1][0][i] + sums[1][1][i], sums[1][0][i + 1] + sums[1][1][i + 1]);
    if (SPLIT > 1)
      *reinterpret_cast<float4 *>(&partial[warp][half * 8 + lane / 4][lane % 4 * 4]) = own;
    else if (row < rows.end)
      *reinterpret_cast<uint2 *>(rows.y + (size_t(row) * rows.y_stride + warp * SLICE + lane % 4 * 4) * 2) =
          make_uint2(to_bf16_pair(own.x, own.y), to_bf16_pair(own.z, own.w));
  }
  if (SPLIT == 1) return;
  __syncthreads();
#pragma unroll 1
  for (int item = threadIdx.x; item < 8 * HALVES * OUTPUTS / 4; item += WARPS * 32) {
    const int token = item / (OUTPUTS / 4), quad = item % (OUTPUTS / 4), owner = quad / 4 * SPLIT;
    if (first + token >= rows.end) continue;
    float4 sum = *reinterpret_cast<const float4 *>(&partial[owner][token][quad % 4 * 4]);
#pragma unroll
    for (int w = 1; w < SPLIT; ++w) {
      const float4 more = *reinterpret_cast<const float4 *>(&partial[owner + w][token][quad % 4 * 4]);
      sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
    }
    *reinterpret_cast<uint2 *>(rows.y + (size_t(first + token) * rows.y_stride + quad * 4) * 2) =
        make_uint2(to_bf16_pair(sum.x, sum.y), to_bf16_pair(sum.z, sum.w));
  }
  __syncthreads();
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    linear_heads(const u8 *__restrict__ x, const u8 *__restrict__ weight, u8 *__restrict__ y, int rows, int heads,
                 int outputs, int row_stride, int head_stride, int group_rows) {
  asm volatile("griddepcontrol.launch_dependents;");
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int slices = outputs / OUTPUTS;
  const int slice = blockIdx.x % slices, head = blockIdx.x / slices % heads, group = blockIdx.x / slices / heads;
  const int part = warp % SPLIT, output = slice * OUTPUTS + warp / SPLIT * SLICE;
  uint4 weights[2][OWN_K];
  const u8 *packed = weight + ((size_t(head) * (outputs / 8) + output / 8) * BLOCKS_K + part * OWN_K) * 512 + lane * 16;
#pragma unroll
  for (int tile = 0; tile < 2; ++tile)
#pragma unroll
    for (int k = 0; k < OWN_K; ++k) weights[tile][k] = load_weight(packed + (tile * BLOCKS_K + k) * 512);
  const Rows own = {x + (size_t(head) * head_stride + part * OWN_K * 32 + lane % 4 * 8) * 2,
                    y + (size_t(head) * outputs + slice * OUTPUTS) * 2, row_stride, heads * outputs,
                    min(rows, (group + 1) * group_rows)};
  asm volatile("griddepcontrol.wait;" ::: "memory");
  int first = group * group_rows;
  for (; own.end - first > 8; first += 16) multiply<2>(own, weights, first, warp, lane);
  if (first < own.end) multiply<1>(own, weights, first, warp, lane);
}
