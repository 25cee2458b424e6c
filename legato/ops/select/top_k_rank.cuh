// A score as an integer of the same order, and scores as they are read. Knows nothing of rows, blocks or lists.
#pragma once

#include "../sm90.cuh"

// Descending order of a score as an ascending integer. x + 0.0f turns -0.0 into +0.0 and any NaN into 0x7FFFFFFF.
__device__ __forceinline__ u32 order_of(float score) {
  int bits = __float_as_int(score + 0.0f);
  u32 order = static_cast<u32>(bits ^ (~(bits >> 31) & 0x7FFFFFFF));
  return order < 0x007FFFFFu ? 0xFFFFFFFFu : order;
}

// The score of an order: the way back, but for NaN and -0.0.
__device__ __forceinline__ float score_of(u32 order) {
  return __uint_as_float(order < 0x80000000u ? order ^ 0x7FFFFFFFu : order);
}

// Loads are plain ones: what is said to be read-only (ld.global.nc) the compiler may ask for before griddepcontrol.wait.
__device__ __forceinline__ int read_int(const int* at) {
  int v;
  asm volatile("ld.global.b32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
  return v;
}

// Scores at `at` where `valid`, otherwise NaN. No branch: a branch would wait for its load before the next one starts.
__device__ __forceinline__ float4 read4(const float* at, bool valid) {
  float4 v;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n"
      "mov.b32 %0, 0x7FFFFFFF;\nmov.b32 %1, 0x7FFFFFFF;\nmov.b32 %2, 0x7FFFFFFF;\nmov.b32 %3, 0x7FFFFFFF;\n"
      "@p ld.global.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];\n}"
      : "=&f"(v.x), "=&f"(v.y), "=&f"(v.z), "=&f"(v.w)
      : "l"(at), "r"(static_cast<u32>(valid))
      : "memory");
  return v;
}
__device__ __forceinline__ float4 read4(const float* at) {
  float4 v;
  asm volatile("ld.global.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(at) : "memory");
  return v;
}
