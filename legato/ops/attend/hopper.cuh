// What the sparse_mla kernels say to the hardware: copies, barriers, pushes into another block's shared memory,
// conversions.
#pragma once

#include "../sm90.cuh"

#define NO_SCORE __int_as_float(0xff800000)

__device__ __forceinline__ int load_fresh(const int *pointer) {
  int v;
  asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(v) : "l"(pointer));
  return v;
}
__device__ __forceinline__ uint2 load_fresh(const uint2 *pointer) {
  uint2 v;
  asm volatile("ld.global.cg.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(pointer));
  return v;
}
__device__ __forceinline__ uint4 load_fresh(const uint4 *pointer) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(pointer));
  return v;
}
// Where the compiler shall add nothing up again: what is behind an address is a constant behind it in the instruction.
__device__ __forceinline__ void settle(u32 &address) { asm volatile("" : "+r"(address)); }
__device__ __forceinline__ void settle(const u8 *&pointer) { asm volatile("" : "+l"(pointer)); }
// 16 bytes, or as many zeros.
__device__ __forceinline__ void copy_async(u32 target, const void *source, bool wanted) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(wanted ? 16 : 0)
               : "memory");
}
// What ordinary stores wrote becomes visible to the tensor cores.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void group_barrier(int group) {
  asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
}
// "This block runs, its barriers are there": orders nothing else, where an arrival that hands over data first waits for all
// that is under way.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }
__device__ __forceinline__ bool barrier_passed(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, "
      "p;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done;
}
// For what other blocks of the cluster bring too: acquires from their threads, and empties the L1 each time.
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
#pragma unroll 1
  for (int i = 0; i < 4000000; ++i)
    if (barrier_passed(barrier, parity)) return;
  asm volatile("trap;");
}
__device__ __forceinline__ u32 remote(u32 address, u32 block) {
  u32 v;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(v) : "r"(address), "r"(block));
  return v;
}
__device__ __forceinline__ void push(u32 target, float first, float second, u32 barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(target),
               "f"(first), "f"(second), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void push(u32 target, float a, float b, float c, float d, u32 barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(target),
      "f"(a), "f"(b), "f"(c), "f"(d), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void prefetch(const void *pointer) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(pointer));
}
__device__ __forceinline__ float exp2_fast(float x) {
  float v;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(v) : "f"(x));
  return v;
}
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
  u32 v;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}
__device__ __forceinline__ u32 pack_f16(float low, float high) {
  u32 v;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}
__device__ __forceinline__ u32 multiply_pair(u32 a, u32 b) {
  u32 v;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
  return v;
}
// Four e4m3 to float16.
__device__ __forceinline__ void widen_both(u32 codes, u32 &first, u32 &second) {
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high;\n}"
      : "=r"(first), "=r"(second)
      : "r"(codes));
}
__device__ __forceinline__ void store_matrices_transposed(u32 address, u32 first, u32 second) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(first), "r"(second)
               : "memory");
}
__device__ __forceinline__ float2 read_pair(const u8 *at) { return *reinterpret_cast<const float2 *>(at); }
