// The prologue as a chain of small kernels, one for each step of the formulas and none for two: what the fused kernel is
// measured against. Every value is rounded to bfloat16 between kernels. A warp has one row, or one head of a row; 128
// numbers of it are four per lane.

#include <cuda_bf16.h>
#include <cuda_fp8.h>

typedef unsigned char u8;
typedef __nv_bfloat16 bf16;

constexpr int WARPS = 4;
constexpr int INDEX = 128, PAGE = 64, INDEX_PAGE_BYTES = PAGE * INDEX + 4 * PAGE;

__device__ __forceinline__ int item() { return blockIdx.x * WARPS + threadIdx.x / 32; }

__device__ __forceinline__ float sum(float v) {
  for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(0xffffffffu, v, step);
  return v;
}

__device__ __forceinline__ float largest(float v) {
  for (int step = 16; step > 0; step /= 2) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, step));
  return v;
}

// y[row] = RMSNorm of `width` numbers at x + row * stride.
extern "C" __global__ void norm_rows(const bf16 *x, const bf16 *weight, bf16 *y, int rows, int width, int stride, float eps) {
  const int row = item(), lane = threadIdx.x % 32;
  if (row >= rows) return;
  float squares = 0;
  for (int i = lane; i < width; i += 32) squares += float(x[size_t(row) * stride + i]) * float(x[size_t(row) * stride + i]);
  const float factor = rsqrtf(sum(squares) / width + eps);
  for (int i = lane; i < width; i += 32)
    y[size_t(row) * width + i] = float(x[size_t(row) * stride + i]) * factor * float(weight[i]);
}

// LayerNorm of one index key per row, in place.
extern "C" __global__ void norm_keys(bf16 *keys, const bf16 *weight, const bf16 *bias, int rows, float eps) {
  const int row = item(), lane = threadIdx.x % 32;
  if (row >= rows) return;
  bf16 *key = keys + size_t(row) * INDEX;
  float v[4], total = 0, squares = 0;
  for (int i = 0; i < 4; ++i) total += v[i] = key[lane * 4 + i];
  const float mean = sum(total) / INDEX;
  for (int i = 0; i < 4; ++i) squares += (v[i] - mean) * (v[i] - mean);
  const float factor = rsqrtf(sum(squares) / INDEX + eps);
  for (int i = 0; i < 4; ++i)
    key[lane * 4 + i] = (v[i] - mean) * factor * float(weight[lane * 4 + i]) + float(bias[lane * 4 + i]);
}

// 64 numbers of each head of each row turned pairwise, in place; a lane has a pair.
extern "C" __global__ void rotate(bf16 *x, const float *cos, const float *sin, int rows, int heads, int row_stride,
                                  int head_stride) {
  const int at = item(), lane = threadIdx.x % 32, row = at / heads;
  if (row >= rows) return;
  bf16 *pair = x + size_t(row) * row_stride + at % heads * head_stride + lane * 2;
  const float a = pair[0], b = pair[1], c = cos[row * 32 + lane], s = sin[row * 32 + lane];
  pair[0] = a * c - b * s, pair[1] = b * c + a * s;
}

// The 128-point Hadamard transform times 128^-1/2 of each of `count` vectors, in place.
extern "C" __global__ void hadamard(bf16 *x, int count) {
  const int at = item(), lane = threadIdx.x % 32;
  if (at >= count) return;
  bf16 *own = x + size_t(at) * INDEX + lane * 4;
  float v[4];
  for (int i = 0; i < 4; ++i) v[i] = own[i];
  const float a = v[0] + v[1], b = v[0] - v[1], c = v[2] + v[3], d = v[2] - v[3];
  v[0] = a + c, v[1] = b + d, v[2] = a - c, v[3] = b - d;
  for (int step = 1; step < 32; step *= 2)
    for (int i = 0; i < 4; ++i) {
      const float other = __shfl_xor_sync(0xffffffffu, v[i], step);
      v[i] = lane & step ? other - v[i] : v[i] + other;
    }
  for (int i = 0; i < 4; ++i) own[i] = v[i] * 0.08838834764831845f;
}

// Each of `count` vectors of 128 to e4m3 with one power-of-two scale.
extern "C" __global__ void quantize(const bf16 *x, u8 *codes, float *scales, int count) {
  const int at = item(), lane = threadIdx.x % 32;
  if (at >= count) return;
  float v[4], most = 0;
  for (int i = 0; i < 4; ++i) most = fmaxf(most, fabsf(v[i] = x[size_t(at) * INDEX + lane * 4 + i]));
  const float ratio = fmaxf(largest(most), 1e-4f) / 448.0f;
  const float scale = __uint_as_float((__float_as_uint(ratio) + 0x007fffffu) & 0x7f800000u);
  for (int i = 0; i < 4; ++i)
    codes[size_t(at) * INDEX + lane * 4 + i] = __nv_cvt_float_to_fp8(v[i] / scale, __NV_SATFINITE, __NV_E4M3);
  if (lane == 0) scales[at] = scale;
}

// gates * constant * scale of the head's query.
extern "C" __global__ void scale_gates(const bf16 *raw, const float *scales, float *gates, int count, float constant) {
  const int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at < count) gates[at] = float(raw[at]) * constant * scales[at];
}

extern "C" __global__ void store_keys(const u8 *codes, const float *scales, const int *slots, u8 *cache, int rows) {
  const int row = item(), lane = threadIdx.x % 32;
  if (row >= rows || slots[row] < 0) return;
  u8 *page = cache + size_t(slots[row] / PAGE) * INDEX_PAGE_BYTES;
  for (int i = 0; i < 4; ++i) page[slots[row] % PAGE * INDEX + lane * 4 + i] = codes[size_t(row) * INDEX + lane * 4 + i];
  if (lane == 0) *reinterpret_cast<float *>(page + PAGE * INDEX + slots[row] % PAGE * 4) = scales[row];
}

// A latent of 512 and a rope key of 64 into a bfloat16 cache.
extern "C" __global__ void store_latents(const bf16 *latent, const bf16 *rope, const int *slots, bf16 *cache, int rows,
                                         int rope_stride) {
  const int row = item(), lane = threadIdx.x % 32;
  if (row >= rows || slots[row] < 0) return;
  bf16 *token = cache + size_t(slots[row]) * 576;
  for (int i = lane; i < 512; i += 32) token[i] = latent[size_t(row) * 512 + i];
  for (int i = lane; i < 64; i += 32) token[512 + i] = rope[size_t(row) * rope_stride + i];
}
