// What the kernels for Hopper say to the hardware in the same words: barriers in shared memory, copies into it, pairs of bfloat16
// and the product of their fragments. Nothing here knows what is copied or multiplied. What a kernel's loads may not pass, and how it
// waits where other blocks arrive, each says itself. Source: PTX ISA, "mbarrier", "cp.async", "cp.async.bulk", "mma".
#pragma once

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

// What the host makes with `tensor_map`.
struct alignas(64) CUtensorMap {
  u64 opaque[16];
};

__device__ __forceinline__ u32 shared_address(const void *pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// For what this block's threads and the copy engine bring. Nothing waits longer than for a neighbour's work: a fault ends with an
// error here, not with a GPU that hangs.
__device__ __forceinline__ void block_barrier_wait(u32 barrier, u32 parity) {
#pragma unroll 1
  for (int i = 0; i < 4000000; ++i) {
    u32 done;
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    if (done) return;
  }
  asm volatile("trap;");
}

// One thread's copy of whole 16 bytes, which arrives at a barrier; `policy` says how long the L2 shall keep them.
__device__ __forceinline__ void copy_bulk(u32 target, const void *source, u32 bytes, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
          target),
      "l"(source), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Two bfloat16 side by side.
__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ u32 to_bf16_pair(float low, float high) {
  u32 v;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}

// A word of each lane's four, w[i] of lane t becomes w[t] of lane i of the quad.
__device__ __forceinline__ void transpose_quad(u32 (&w)[4], int t) {
  const bool odd = t & 1, high = t & 2;
  u32 a = __shfl_xor_sync(~0u, odd ? w[0] : w[1], 1), b = __shfl_xor_sync(~0u, odd ? w[2] : w[3], 1);
  if (odd)
    w[0] = a, w[2] = b;
  else
    w[1] = a, w[3] = b;
  a = __shfl_xor_sync(~0u, high ? w[0] : w[2], 2), b = __shfl_xor_sync(~0u, high ? w[1] : w[3], 2);
  if (high)
    w[0] = a, w[1] = b;
  else
    w[2] = a, w[3] = b;
}

__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
