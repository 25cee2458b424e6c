// What the quick way keeps in shared memory before its lists, and how it starts there.
#pragma once

#include "top_k_rank.cuh"
#include "top_k_row.cuh"

constexpr int QUICK_BINS = 256;  // half as many are sent sooner, but leave more ranks in the boundary bin
constexpr u32 PIECES = QUICK_BINS / 8;  // of 16 bytes, in which a block's bins are sent
constexpr int CROWD = 512;     // ranks of the boundary bin, over the whole row
constexpr int GROUPS = 64;     // of samples
constexpr int GROUP_BITS = 5;
constexpr int LONG_ROW = 1 << 18;  // from here on a group has 2^GROUP_BITS samples at most, before half as many
static_assert(GROUPS << GROUP_BITS <= 4 * THREADS, "a thread samples four scores at most");
constexpr int TOTAL_QUADS = PIECES + 2;  // more, so that threads that add up blocks read other banks

struct __align__(8) Listed {
  float score;
  u32 position;
};

struct Quick {
  Barriers barriers;
  u32 bins[QUICK_BINS];
  uint4 total[MAX_CLUSTER][TOTAL_QUADS];  // of each block: scores up to the end of each bin, two in a word
  u32 in_list[MAX_CLUSTER];               // of each block: how many scores it lists; 0x10000: more than it could
  uint4 group[GROUPS / 4];
  u64 crowd[CROWD];         // the ranks in the boundary bin, block by block
  u32 warp_of_mine[CROWD];  // of those that this block has, from 0: which of its warps has them
  u32 above_of_warp[32];
  u32 mine_count, too_short;
  u32 high, low;             // orders of two groups' bests
  u64 threshold;
  Row row;  // for the exhaustive way, so that the quick one need not keep it in registers
  u32 pages[PAGES];
};
static_assert(sizeof(Quick) <= QUICK_BYTES, "QUICK_BYTES is what the launch reserves before the lists");

// Counters and barriers for a row. Reads nothing of the kernels before. `again`: the barriers have been used.
__device__ __forceinline__ void prepare(Quick& s, u32 size, bool again) {
  if (threadIdx.x < QUICK_BINS / 4) reinterpret_cast<uint4*>(s.bins)[threadIdx.x] = make_uint4(0, 0, 0, 0);
  if (threadIdx.x < GROUPS) reinterpret_cast<u32*>(s.group)[threadIdx.x] = 0xFFFFFFFFu;
  if (threadIdx.x == THREADS - 1) {
    s.mine_count = s.too_short = 0;
    const u32 barriers[3] = {shared_address(&s.barriers.arrived[0]), shared_address(&s.barriers.arrived[1]), shared_address(&s.barriers.met)};
#pragma unroll
    for (int i = 0; i < 3; i++) {
      if (again) asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(barriers[i]) : "memory");
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barriers[i]), "r"(i == 1 ? 1 : size) : "memory");
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (size > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
