// Exact, deterministic top-k of ragged float32 rows, with the page transform, on clusters of thread blocks.
//
// One cluster of C blocks (C = 1, 2, 4, 8, 16) has a row; of them as many as its length is worth share it, and the others leave
// at once. With a plan, made once for all layers, a fixed number of clusters has all rows, each for as many neighbouring blocks
// as it is worth beside the others, and blocks go on to their next row. Each block owns a contiguous slice of a row, each warp a
// contiguous part of the slice, in steps of 128 scores. A score and its position form one integer, its *rank*:
//     rank = order(score) << bits | position,       order: descending scores, NaN last, -0.0 == +0.0
// No two ranks are equal, so "the k smallest ranks" is one set, whatever the bits and whatever the timing.
//
// The quick way reads the row once and keeps only what a sample says may be chosen:
//   1. every block reads the same sample of the row, and takes from it two scores between which the k-th most likely lies
//   2. every warp lists the scores of its part that are not below the lower one, and counts them in 256 bins
//   3. the blocks send their bins, added up, to every block (one hop: remote stores that signal an mbarrier), so all know the bin
//      of the k-th rank, and how many ranks of it and above it the blocks before them have
//   4. the ranks in that bin go to every block (second hop), which finds the k-th rank by counting
//   5. listed scores up to it are written in ascending position: offsets are sums of counts that every block now knows
// If the sample misled (fewer than k listed, a list too short, a bin too full), which all blocks see alike after the first
// hop, the row is done again in the exhaustive way, which assumes nothing:
//   1. a 4096-bin histogram of the top 12 bits of `order`, added up over the cluster
//   2. while the bin of the k-th rank holds more than CANDIDATES ranks, the next digit of those ranks is counted in the
//      same way: at last digits of the position, so the loop always ends
//   3. as 4 and 5 above
// Orders stay in shared memory while they fit; others are read again where the least order of a step can matter.
//
// Here are the kernels: which row a block takes, and which of its blocks. In the order in which they are best read:
//   top_k_rank.cuh          a score as an integer of the same order
//   top_k_row.cuh           a row, and how blocks and warps cut it up; rows that are taken whole
//   top_k_cluster.cuh       what blocks of a cluster say to one another
//   top_k_quick_memory.cuh  what the quick way keeps in shared memory
//   top_k_sample.cuh        its first step: two scores between which the k-th most likely lies
//   top_k_quick.cuh         its other steps
//   top_k_exhaustive.cuh    the exhaustive way
//   top_k_plan.cuh          the kernel that makes the plan
// Rows that one block holds in its registers have a kernel of their own: top_k_short.cu.

#ifndef THREADS
#define THREADS 512
#endif
#ifndef LINES  // of 128 scores that a warp looks at in one go
#define LINES 4
#endif
#ifndef RING_LINES  // that a warp has under way in shared memory, whole LINES; 0: LINES of them in registers
#define RING_LINES 12
#endif
#ifndef RESIDENT  // thread blocks that a multiprocessor must hold
#define RESIDENT 2
#endif

#include "top_k_profile.cuh"

#include "top_k_exhaustive.cuh"
#include "top_k_quick.cuh"

template <bool PLANNED>
__device__ __forceinline__ void select_row(const Row& r, unsigned char* memory, u32 memory_bytes, u32 size PROFILE_PARAMETER) {
  Quick& s = *reinterpret_cast<Quick*>(memory);
  if (!select_quickly<PLANNED>(r, memory, memory_bytes, size PROFILE_ARGUMENT)) {
    MARK(11)
    const Row again = s.row;
    select_exhaustively(again, memory_bytes);
    MARK(12)
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    top_k(const float* __restrict__ scores, const int* __restrict__ lengths, const int* __restrict__ page_table,
          const int* __restrict__ request, int* __restrict__ slots, int* __restrict__ counts, const int stride,
          const int table_stride, const int k, const int cluster_bits, const int memory_bytes, const int share,
          const float sampling PROFILE_PARAMETER) {
  unsigned char* const memory = own_memory();
  Quick& s = *reinterpret_cast<Quick*>(memory);
  Row r;
  const u32 size = 1u << cluster_bits, place = kept(blockIdx.x & (size - 1)), row = blockIdx.x >> cluster_bits;
  MARK(0)
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  // Addresses are there before the scores are.
  const int *length_at = lengths + row, *request_at = request + row;
  r.scores = scores + static_cast<u64>(row) * stride, r.out = slots + static_cast<u64>(row) * k, r.k = k;
  r.sampling = sampling;
  asm volatile("" : "+l"(length_at), "+l"(request_at), "+l"(r.scores));
  asm volatile("griddepcontrol.wait;" ::: "memory");
  MARK(1)
  const int length = read_int(length_at), owner = read_int(request_at);
  prepare(s, size, false);  // while they are under way
  r.length = max(length, 0);
  r.table = page_table + static_cast<u64>(owner) * table_stride;
  if (place == 0 && threadIdx.x == 0) counts[row] = min(r.length, r.k);
  const bool whole = r.length <= r.k;
  if (whole) take_all(r, place, size);
  r.block_bits = block_bits_of(r.length, share, cluster_bits);
  if (whole || place >> r.block_bits) {  // as many blocks as the row is worth
    if (size > 1) cluster_wait();
    return;
  }
  cut_row(r, place, size);
  select_row<false>(r, memory, memory_bytes, size PROFILE_ARGUMENT);
}

// ---------------------------------------------------------------------------------------------------------------------
// With a plan: {turns, -, -, -}, then for each turn and block {row (-1: none), log2 of the blocks that share it, length, request}.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    planned_top_k(const float* __restrict__ scores, const int4* __restrict__ plan, const int* __restrict__ page_table,
                  int* __restrict__ slots, int* __restrict__ counts, const int stride, const int table_stride, const int k,
                  const int cluster_bits, const int memory_bytes, const float sampling PROFILE_PARAMETER) {
  unsigned char* const memory = own_memory();
  Quick& s = *reinterpret_cast<Quick*>(memory);
  const u32 size = 1u << cluster_bits, place = blockIdx.x & (size - 1);
  MARK(0)
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  prepare(s, size, false);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  MARK(1)
  if (threadIdx.x == 0) s.barriers.turn = 0, s.barriers.turns = plan[0].x;
  for (u32 turn = 0;;) {
    const int4 task = plan[1 + turn * gridDim.x + blockIdx.x];  // row, block bits, length, request
    Row r;
    r.k = k, r.length = task.z, r.block_bits = task.y, r.sampling = sampling;
    r.table = page_table + static_cast<u64>(task.w) * table_stride;
    r.out = slots + static_cast<u64>(task.x) * k;
    r.scores = scores + static_cast<u64>(task.x) * stride;
    cut_row(r, place, size);
    if (task.x >= 0 && r.rank == 0 && threadIdx.x == 0) counts[task.x] = min(r.length, r.k);
    if (task.x >= 0 && r.length > r.k) {
      select_row<true>(r, memory, memory_bytes, size PROFILE_ARGUMENT);
    } else {
      if (task.x >= 0) take_all(r, 0, 1);
      if (size > 1) cluster_wait();
    }
    __syncthreads();
    turn = s.barriers.turn + 1;
    if (turn >= s.barriers.turns) return;
    if (size > 1) {  // nobody still writes into a block that goes on
      asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
      cluster_wait();
    }
    __syncthreads();
    if (threadIdx.x == 0) s.barriers.turn = turn;
    prepare(s, size, true);
  }
}

#include "top_k_plan.cuh"
