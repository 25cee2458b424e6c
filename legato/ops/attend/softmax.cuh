// The softmax of sparse_mla_few.cu and sparse_mla_rows.cu, unit by unit, in registers.
//
// A warp has the scores of its 16 tokens as the tensor cores leave them: a lane those of tokens g and g + 8 (g = lane / 4) with heads
// 8j + 2t and the next (t = lane % 4), in s[4j] to s[4j + 3]. Sums of values lie likewise, values in the place of tokens.
#pragma once

#include "hopper.cuh"

// Scores of group j times `factor`; of tokens that do not count, minus infinity.
template <int COUNT>
__device__ __forceinline__ void count_scores(float (&s)[COUNT], int j, const bool (&counted)[2], float2 factor) {
  s[4 * j] = counted[0] ? s[4 * j] * factor.x : NO_SCORE, s[4 * j + 1] = counted[0] ? s[4 * j + 1] * factor.y : NO_SCORE;
  s[4 * j + 2] = counted[1] ? s[4 * j + 2] * factor.x : NO_SCORE,
            s[4 * j + 3] = counted[1] ? s[4 * j + 3] * factor.y : NO_SCORE;
}
// The largest over the warp's tokens, in all lanes of the heads.
template <int COUNT>
__device__ __forceinline__ float2 largest_scores(const float (&s)[COUNT], int j) {
  float x = fmaxf(s[4 * j], s[4 * j + 2]), y = fmaxf(s[4 * j + 1], s[4 * j + 3]);
#pragma unroll
  for (int step = 4; step < 32; step *= 2) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
    y = fmaxf(y, __shfl_xor_sync(~0u, y, step));
  }
  return make_float2(x, y);
}
// The sums over the lanes that have the same heads.
__device__ __forceinline__ float2 summed_over_tokens(float x, float y) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2) {
    x += __shfl_xor_sync(~0u, x, step);
    y += __shfl_xor_sync(~0u, y, step);
  }
  return make_float2(x, y);
}
// Scores of group j become weights, whose sum and that of the values go on from earlier units (`again`) at the new maximum.
template <int COUNT, int HEAD_PAIRS, int VALUES>
__device__ __forceinline__ void weigh(float (&s)[COUNT], int j, float2 largest, float (&maximum)[HEAD_PAIRS],
                                      float (&sum)[HEAD_PAIRS], float (&o)[VALUES][COUNT], bool again) {
  const float from_x = largest.x == NO_SCORE ? 0 : largest.x, from_y = largest.y == NO_SCORE ? 0 : largest.y;
  if (again) {
    const float shrink_x = exp2_fast(maximum[2 * j] - from_x), shrink_y = exp2_fast(maximum[2 * j + 1] - from_y);
    sum[2 * j] *= shrink_x, sum[2 * j + 1] *= shrink_y;
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
      o[i][4 * j] *= shrink_x, o[i][4 * j + 1] *= shrink_y;
      o[i][4 * j + 2] *= shrink_x, o[i][4 * j + 3] *= shrink_y;
    }
  }
  maximum[2 * j] = largest.x, maximum[2 * j + 1] = largest.y;
  s[4 * j] = exp2_fast(s[4 * j] - from_x), s[4 * j + 1] = exp2_fast(s[4 * j + 1] - from_y);
  s[4 * j + 2] = exp2_fast(s[4 * j + 2] - from_x), s[4 * j + 3] = exp2_fast(s[4 * j + 3] - from_y);
  sum[2 * j] += s[4 * j] + s[4 * j + 2], sum[2 * j + 1] += s[4 * j + 1] + s[4 * j + 3];
}
