// How the kernels of the experts look at a barrier and copy in bulk, beside what all kernels share. Nothing here knows what is
// copied. Source: PTX ISA, "mbarrier", "cp.async.bulk".
#pragma once

#include "../sm90.cuh"

__device__ __forceinline__ bool barrier_passed(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n.reg .pred done;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done;
}

// One thread's copy of whole 16 bytes, which arrives at a barrier.
__device__ __forceinline__ void copy_bulk(u32 target, const void *source, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
               "l"(source), "r"(bytes), "r"(barrier)
               : "memory");
}

__device__ __forceinline__ float silu(float v) { return v / (1.0f + __expf(-v)); }
