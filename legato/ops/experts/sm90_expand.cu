// Packed experts back to rows of numbers, for products of many rows by the library: w[e, n, k] times its global factor,
// rounded once to bfloat16 (or float32, where WIDE).
//
// A warp takes one step. Where GATED, a tile's first eight outputs are gate rows and its last eight up rows, F further on.
//
// Macros: FORMAT; GATED; WIDE.

#include "sm90_formats.cuh"

typedef Format<FORMAT> F;

extern "C" __global__ void __launch_bounds__(256)
    expand(const u8 *__restrict__ packed, const float *__restrict__ factors, u8 *__restrict__ out, int outputs,
           int inputs, u64 steps_in_all) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const u64 index = u64(blockIdx.x) * 8 + warp;
  if (index >= steps_in_all) return;
  const int steps = inputs / F::STEP_K;
  const u64 tile = index / steps;
  const int column = int(index % steps) * F::STEP_K + t * 16;
  const u64 expert = tile / (outputs / 16);
  const int within = int(tile % (outputs / 16));
  const u8 *step = packed + index * F::BYTES;
  const float2 scale = F::scales(step, lane);
  const int rows[2] = {GATED ? within * 8 + g : within * 16 + g,
                       GATED ? outputs / 2 + within * 8 + g : within * 16 + g + 8};
  float by[2] = {scale.x, scale.y};
  if (factors != nullptr) {  // gate, up, down
    by[0] *= factors[expert * 3 + (GATED ? 0 : 2)];
    by[1] *= factors[expert * 3 + (GATED ? 1 : 2)];
  }
#pragma unroll
  for (int block = 0; block < F::STEP_K / 64; ++block) {
    u32 pairs[2][8];
    F::widen(pairs[0], pairs[1], step, block, lane);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float values[16];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        values[2 * i] = __uint_as_float(pairs[half][i] << 16) * by[half];
        values[2 * i + 1] = __uint_as_float(pairs[half][i] & 0xffff0000u) * by[half];
      }
      const u64 at = (expert * outputs + rows[half]) * inputs + column + block * 64;
#if WIDE
#pragma unroll
      for (int i = 0; i < 4; ++i)
        reinterpret_cast<float4 *>(out + at * 4)[i] =
            make_float4(values[4 * i], values[4 * i + 1], values[4 * i + 2], values[4 * i + 3]);
#else
#pragma unroll
      for (int i = 0; i < 2; ++i)
        reinterpret_cast<uint4 *>(out + at * 2)[i] =
            make_uint4(to_bf16_pair(values[8 * i], values[8 * i + 1]), to_bf16_pair(values[8 * i + 2], values[8 * i + 3]),
                       to_bf16_pair(values[8 * i + 4], values[8 * i + 5]),
                       to_bf16_pair(values[8 * i + 6], values[8 * i + 7]));
#endif
    }
  }
}
