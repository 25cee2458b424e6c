// What the blocks of a cluster say to one another: where another block's shared memory is, stores there that signal an mbarrier, and
// meetings of those blocks that share a row. Knows nothing of scores. Source: PTX ISA, "mapa", "st.async", "mbarrier", "barrier.cluster".
#pragma once

#include "../sm90.cuh"

// A value that the compiler keeps instead of making it anew, which for the start of the shared memory and for special registers takes
// 30 cycles each time.
__device__ __forceinline__ u32 kept(u32 value) {
  asm volatile("" : "+r"(value));
  return value;
}
__device__ __forceinline__ unsigned char* own_memory() {
  extern __shared__ __align__(16) unsigned char memory[];
  return static_cast<unsigned char*>(__cvta_shared_to_generic(kept(shared_address(memory))));
}
__device__ __forceinline__ u32 add_all(u32 value) { return __reduce_add_sync(0xFFFFFFFFu, value); }

__device__ __forceinline__ u32 remote(u32 address, u32 block) {
  u32 mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(block));
  return mapped;
}
__device__ __forceinline__ void remote_add(u32 address, u32 value) {
  asm volatile("red.relaxed.cluster.shared::cluster.add.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
__device__ __forceinline__ void remote_store(u32 address, u32 value) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
__device__ __forceinline__ void remote_store(u32 address, u64 value) {
  asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(address), "l"(value) : "memory");
}
__device__ __forceinline__ u32 remote_load(u32 address) {
  u32 value;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}
__device__ __forceinline__ void cluster_wait() {
  __syncwarp();
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Stores that a barrier of the same block counts, and what it is told to expect.
__device__ __forceinline__ void remote_arrive(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void arrive(u32 barrier, u32 times) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(times) : "memory");
}
__device__ __forceinline__ void async_store(u32 address, u32 value, u32 barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address), "r"(value),
               "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void async_store(u32 address, uint4 value, u32 barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
               "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void async_store(u32 address, u64 value, u32 barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(address), "l"(value),
               "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void wait_for(u32 barrier) {
  u32 done;
  do {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;\nselp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier)
        : "memory");
  } while (!done);
}

// Blocks that share a row meet at a barrier of their own: the cluster's other blocks are gone.
struct Meeting {
  u32 barrier, first, blocks, arrivals, parity;

  // What my block wrote before is there for whoever waits.
  __device__ __forceinline__ void arrive() const {
    __syncthreads();
    if (threadIdx.x < blocks)
      asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0], %1;" ::"r"(remote(barrier, first + threadIdx.x)), "r"(arrivals)
                   : "memory");
  }
  __device__ __forceinline__ void wait() {
    u32 done;
    do {
      asm volatile(
          "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
          : "=r"(done)
          : "r"(barrier), "r"(parity)
          : "memory");
    } while (!done);
    parity ^= 1;
  }
};
