// The first step of the quick way: which two of a sample's scores the k-th most likely lies between.
#pragma once

#include "top_k_quick_memory.cuh"

struct Places {
  u32 high, low;
  float beyond;  // how far the bins reach above the best sample, in ranges: few samples may all miss the chosen
};

// Which of the groups' bests, from 0, are beyond the k-th and before it, as good as always; of a row of which this portion is chosen.
__device__ __forceinline__ Places places_of(float portion, int group_bits) {
  // A group's best is among the chosen with this probability; so many groups' bests are, give or take.
  const float share = 1.0f - exp2f(__log2f(1.0f - portion) * static_cast<float>(1 << group_bits)), mean = GROUPS * share;
  float spread;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(spread) : "f"(mean * (1.0f - share)));
  const float high = min(GROUPS - 1.0f, ceilf(mean + 4.0f * spread)), low = min(floorf(mean - 3.5f * spread) - 1.0f, high - 4.0f);
  return {kept(static_cast<u32>(high)), kept(static_cast<u32>(max(0.0f, low))), mean < 3.0f ? 2.0f : mean < 10.0f ? 1.0f : 0.0f};
}

// From the best of each group of samples: which of them bound what is listed, into s.high and s.low. A warp places some of the groups
// among all, which its lanes hold.
__device__ __forceinline__ void cut(Quick& s, Places places) {
  static_assert(GROUPS == 64 && GROUPS % WARPS == 0, "a lane holds two groups, a warp places as many as every other");
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const u32* groups = reinterpret_cast<const u32*>(s.group);
  const u32 first = groups[lane] & ~(GROUPS - 1u) | lane, second = groups[lane + 32] & ~(GROUPS - 1u) | (lane + 32);  // no two alike
#pragma unroll
  for (u32 i = 0; i < GROUPS / WARPS; i++) {
    const u32 which = warp * (GROUPS / WARPS) + i, own = __shfl_sync(0xFFFFFFFFu, which < 32 ? first : second, which % 32);
    const u32 place = __popc(__ballot_sync(0xFFFFFFFFu, first < own)) + __popc(__ballot_sync(0xFFFFFFFFu, second < own));
    if (lane == 0 && place == places.high) s.high = own | (GROUPS - 1);
    if (lane == 0 && place == places.low) s.low = own & ~(GROUPS - 1u);
  }
}
