// A row and its cut: how many blocks share it, which steps of 128 scores are whose; and rows so short that all of them is chosen.
#pragma once

#include "top_k_cluster.cuh"

typedef unsigned short u16;

constexpr int WARPS = THREADS / 32;
static_assert(WARPS == 8 || WARPS == 16 || WARPS == 32, "256, 512 or 1024 threads");
constexpr int STEP = 128, QUADS = 32;  // scores that a warp reads at once: a float4 in each lane
constexpr int PAGES = 1024;            // page table entries of a slice kept in shared memory
constexpr int MAX_CLUSTER = 16;

// What both ways keep at the start of the shared memory.
struct Barriers {
  u64 arrived[2];  // the quick way: the bins of all blocks, the boundary ranks of all blocks
  u64 met;         // the exhaustive way: all blocks that share the row
  u32 turn, turns;  // of a plan: which row of mine this is, and how many there are
};

struct Row {
  const float* scores;
  const int* table;
  int* out;
  u32 length, k, rank, blocks;  // how many blocks share the row, neighbours in a cluster, and my rank among them
  int block_bits;               // log2(blocks)
  u32 arrivals;                 // how often a block arrives at `met`, which was made for the whole cluster
  u32 block_first, block_steps;       // steps of my slice
  float sampling;                     // this times the length: how many samples a group may have
};

// The first of the blocks that share the row, as a block of the cluster.
__device__ __forceinline__ u32 first_of(const Row& r) {
  u32 place;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(place));
  return place - r.rank;
}

// How many blocks share a row (log2): so many that each has more than half of `share` scores, since more would wait for one another
// longer than they read. (Comparisons, which wait for nothing; a division takes 60 instructions between the length and the loads.)
__device__ __forceinline__ int block_bits_of(u32 length, u32 share, int most) {
  int bits = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) bits += length > share << i;
  return min(most, bits);
}

__device__ __forceinline__ void cut_row(Row& r, u32 place, u32 size) {
  r.blocks = 1u << r.block_bits, r.rank = place & (r.blocks - 1), r.arrivals = size >> r.block_bits;
  const u32 steps = (r.length + STEP - 1) / STEP;
  r.block_first = steps * r.rank >> r.block_bits;
  r.block_steps = (steps * (r.rank + 1) >> r.block_bits) - r.block_first;
}

// A row that no more than k scores long is taken whole: every position, whatever its score.
__device__ __forceinline__ void take_all(const Row& r, u32 rank, u32 blocks) {
  for (u32 i = rank * THREADS + threadIdx.x; i < r.k; i += blocks * THREADS)
    r.out[i] = i < r.length ? r.table[i >> 6] << 6 | static_cast<int>(i & 63) : -1;
}
