// RMSNorm of rows of bfloat16, of embeddings, and the MTP layer's input, two of them side by side: a block per row, which it holds in
// registers, 16 bytes per thread and piece. SwiGLU: a thread per 16 bytes. Macros: THREADS of a block; PIECES that a thread
// holds of a row.

#include "../sm90.cuh"
typedef long long i64;

struct Pieces {
  uint4 of[PIECES];
};

// Past the L1: a preceding kernel may still have been writing when this one began.
__device__ __forceinline__ uint4 load_fresh(const void *pointer) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(pointer)
               : "memory");
  return v;
}

// A weight, before the wait. Not through ld.global.nc: those loads the assembler moves behind it, whatever the source says.
__device__ __forceinline__ uint4 load_weight(const void *pointer) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(pointer)
               : "memory");
  return v;
}

__device__ __forceinline__ float squares(uint4 v) {
  const u32 pairs[4] = {v.x, v.y, v.z, v.w};
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) sum = fmaf(low(pairs[i]), low(pairs[i]), fmaf(high(pairs[i]), high(pairs[i]), sum));
  return sum;
}

__device__ __forceinline__ u32 scaled(u32 pair, u32 weight, float factor) {
  u32 v;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;"
      : "=r"(v)
      : "f"(high(pair) * factor * high(weight)), "f"(low(pair) * factor * low(weight)));
  return v;
}

__device__ __forceinline__ Pieces load_weights(const u8 *weight, int pieces) {
  Pieces own;
#pragma unroll
  for (int p = 0; p < PIECES; ++p)
    own.of[p] = load_weight(weight + min(p * THREADS + int(threadIdx.x), pieces - 1) * 16);
  return own;
}

// y = x / sqrt(mean(x^2) + eps) * weight for one row; `present`: whether there is a row, or zeros in its place.
__device__ __forceinline__ void norm_row(const u8 *x, bool present, const Pieces &weight, u8 *y, int pieces, float eps) {
  __shared__ float sums[THREADS / 32];
  Pieces own;
#pragma unroll
  for (int p = 0; p < PIECES; ++p) own.of[p] = load_fresh(x + min(p * THREADS + int(threadIdx.x), pieces - 1) * 16);
  float sum = 0;
#pragma unroll
  for (int p = 0; p < PIECES; ++p)
    if (p * THREADS + int(threadIdx.x) < pieces) sum += squares(own.of[p]);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  float total = sums[0];
#pragma unroll
  for (int w = 1; w < THREADS / 32; ++w) total += sums[w];
  const float factor = present ? rsqrtf(total / (pieces * 8) + eps) : 0.0f;
#pragma unroll
  for (int p = 0; p < PIECES; ++p) {
    const int piece = p * THREADS + threadIdx.x;
    const uint4 v = own.of[p], w = weight.of[p];
    const uint4 normed = present ? make_uint4(scaled(v.x, w.x, factor), scaled(v.y, w.y, factor), scaled(v.z, w.z, factor),
                                              scaled(v.w, w.w, factor))
                                 : make_uint4(0, 0, 0, 0);
    if (piece < pieces) *reinterpret_cast<uint4 *>(y + piece * 16) = normed;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    rms_norm(const u8 *x, const u8 *weight, u8 *y, int pieces, int row_stride, float eps) {
  asm volatile("griddepcontrol.launch_dependents;");
  const Pieces weights = load_weights(weight, pieces);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  norm_row(x + size_t(blockIdx.x) * row_stride * 2, true, weights, y + size_t(blockIdx.x) * pieces * 16, pieces, eps);
}

// The embedding of each row's token, and the same normed.
extern "C" __global__ void __launch_bounds__(THREADS)
    embed_norm(const i64 *ids, const u8 *embed, const u8 *weight, u8 *h, u8 *y, int pieces, float eps) {
  asm volatile("griddepcontrol.launch_dependents;");
  const Pieces weights = load_weights(weight, pieces);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  i64 id;
  asm volatile("ld.global.cg.s64 %0, [%1];" : "=l"(id) : "l"(ids + blockIdx.x) : "memory");
  const u8 *x = embed + size_t(id) * pieces * 16;
#pragma unroll
  for (int p = 0; p < PIECES; ++p) {
    const int piece = p * THREADS + threadIdx.x;
    if (piece < pieces) *reinterpret_cast<uint4 *>(h + (size_t(blockIdx.x) * pieces + piece) * 16) = load_fresh(x + piece * 16);
  }
  norm_row(x, true, weights, y + size_t(blockIdx.x) * pieces * 16, pieces, eps);
}

// Blocks 2t and 2t + 1: the normed embedding of row t's token (zeros at position 0), and its normed hidden state.
extern "C" __global__ void __launch_bounds__(THREADS)
    mtp_inputs(const i64 *ids, const i64 *positions, const u8 *hidden, const u8 *embed, const u8 *enorm, const u8 *hnorm,
               u8 *y, int pieces, int hidden_stride, float eps) {
  asm volatile("griddepcontrol.launch_dependents;");
  const int row = blockIdx.x / 2, half = blockIdx.x % 2;
  const Pieces weights = load_weights(half ? hnorm : enorm, pieces);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  i64 id = 0, position = 1;
  const u8 *x = hidden + size_t(row) * hidden_stride * 2;
  if (!half) {
    asm volatile("ld.global.cg.s64 %0, [%1];" : "=l"(id) : "l"(ids + row) : "memory");
    asm volatile("ld.global.cg.s64 %0, [%1];" : "=l"(position) : "l"(positions + row) : "memory");
    x = embed + size_t(id) * pieces * 16;
  }
  norm_row(x, position > 0, weights, y + (size_t(row) * 2 + half) * pieces * 16, pieces, eps);
}

// Blocks 2t and 2t + 1: the table's row of row t's token (zeros at position 0), and the normed hidden state.
extern "C" __global__ void __launch_bounds__(THREADS)
    mtp_looked_up(const i64 *ids, const i64 *positions, const u8 *hidden, const u8 *table, const u8 *hnorm, u8 *part,
                  u8 *normed, int pieces, int part_pieces, int hidden_stride, float eps) {
  asm volatile("griddepcontrol.launch_dependents;");
  const int row = blockIdx.x / 2;
  const Pieces weights = load_weights(hnorm, pieces);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (blockIdx.x % 2) {
    norm_row(hidden + size_t(row) * hidden_stride * 2, true, weights, normed + size_t(row) * pieces * 16, pieces, eps);
    return;
  }
  i64 id, position;
  asm volatile("ld.global.cg.s64 %0, [%1];" : "=l"(id) : "l"(ids + row) : "memory");
  asm volatile("ld.global.cg.s64 %0, [%1];" : "=l"(position) : "l"(positions + row) : "memory");
  for (int piece = threadIdx.x; piece < part_pieces; piece += THREADS)
    *reinterpret_cast<uint4 *>(part + (size_t(row) * part_pieces + piece) * 16) =
        position > 0 ? load_weight(table + (size_t(id) * part_pieces + piece) * 16) : make_uint4(0, 0, 0, 0);
}

__device__ __forceinline__ float gated(float gate, float up) { return gate / (1.0f + expf(-gate)) * up; }

__device__ __forceinline__ u32 gated_pair(u32 gate, u32 up) {
  u32 v;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(gated(high(gate), high(up))), "f"(gated(low(gate), low(up))));
  return v;
}

// y [T, 8 * pieces] = silu(gate) * up of rows that hold both, one behind the other.
extern "C" __global__ void __launch_bounds__(THREADS) swiglu(const u8 *gate_up, u8 *y, int pieces, int row_stride) {
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const int piece = blockIdx.x * THREADS + threadIdx.x;
  if (piece >= pieces) return;
  const u8 *row = gate_up + size_t(blockIdx.y) * row_stride * 2 + piece * 16;
  const uint4 gate = load_fresh(row), up = load_fresh(row + size_t(pieces) * 16);
  *reinterpret_cast<uint4 *>(y + (size_t(blockIdx.y) * pieces + piece) * 16) = make_uint4(
      gated_pair(gate.x, up.x), gated_pair(gate.y, up.y), gated_pair(gate.z, up.z), gated_pair(gate.w, up.w));
}
