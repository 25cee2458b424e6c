// A weight of e4m3 with one scale per 128 x 128 to bfloat16, for products of so many rows that the library is faster.
//
// A thread block has one such block: thread t has 16 codes in each of 4 rows. K is a multiple of 16; rows and blocks of K may end
// inside.

typedef unsigned int u32;
typedef unsigned char u8;

// Two codes to a pair of bfloat16: both are exact as halves, and are rounded once, after the scale.
__device__ __forceinline__ u32 pair(u32 codes, float scale) {
  u32 halves, v;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<unsigned short>(codes)));
  float low, high;
  asm("{.reg .f16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;}" : "=f"(low), "=f"(high) : "r"(halves));
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high * scale), "f"(low * scale));
  return v;
}

extern "C" __global__ void __launch_bounds__(256)
    widen(const u8 *__restrict__ weight, const float *__restrict__ scales, u8 *__restrict__ wide, int outputs, int inputs) {
  const int column = blockIdx.x * 128 + threadIdx.x % 8 * 16;
  if (column >= inputs) return;
  const float scale = scales[size_t(blockIdx.y) * ((inputs + 127) / 128) + blockIdx.x];
  const int top = blockIdx.y * 128 + threadIdx.x / 8;
  uint4 codes[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)  // rows that there are not repeat the last: loads without conditions are in flight together
    codes[i] = *reinterpret_cast<const uint4 *>(weight + size_t(min(top + i * 32, outputs - 1)) * inputs + column);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = top + i * 32;
    if (row >= outputs) break;
    uint4 *to = reinterpret_cast<uint4 *>(wide + (size_t(row) * inputs + column) * 2);
    const uint4 c = codes[i];
    to[0] = make_uint4(pair(c.x & 0xffff, scale), pair(c.x >> 16, scale), pair(c.y & 0xffff, scale), pair(c.y >> 16, scale));
    to[1] = make_uint4(pair(c.z & 0xffff, scale), pair(c.z >> 16, scale), pair(c.w & 0xffff, scale), pair(c.w >> 16, scale));
  }
}
