// The plan, from the lengths. Once per forward, one block, a thread for each row. Rows stand in descending order of length, so that
// blocks that share one are neighbours of one cluster, and every second turn deals from the other end, so that who had the longest
// rows has the shortest.
#pragma once

#include "top_k_row.cuh"

constexpr int PLANNERS = 1024;

extern "C" __global__ void __launch_bounds__(PLANNERS, 1)
    plan_top_k(const int* __restrict__ lengths, const int* __restrict__ request, const int rows, const int k, const int cluster_bits,
               const int blocks, const int share, int* __restrict__ plan) {
  __shared__ int2 all[PLANNERS];  // of each row: length, blocks
  __shared__ u32 sums[PLANNERS / 32];
  asm volatile("griddepcontrol.launch_dependents;\n griddepcontrol.wait;" ::: "memory");
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row = threadIdx.x, length = row < rows ? max(lengths[row], 0) : -1;
  const u32 work = add_all(length > k ? length : 0);
  if (lane == 0) sums[warp] = work;
  __syncthreads();
  const u32 total = add_all(sums[lane]);
  __syncthreads();
  // An equal portion of all scores for every block, and a quarter more, so that rows about as long as that keep one to themselves.
  const u32 portion = max(static_cast<u32>(share), total / 4 / blocks * 5);
  const int bits = length > k ? block_bits_of(length, portion, cluster_bits) : 0;
  all[row] = make_int2(length, row < rows ? 1 << bits : 0);
  const u32 mine = add_all(all[row].y);
  if (lane == 0) sums[warp] = mine;
  __syncthreads();
  const int wanted = add_all(sums[lane]), rounds = max((wanted + blocks - 1) / blocks, 1);
  const int size = 1 << cluster_bits;
  int4* tasks = reinterpret_cast<int4*>(plan) + 1;
  auto dealt = [&](int turn) {  // to which entry, where blocks are dealt in turn
    const int round = turn / blocks, block = turn % blocks;
    return round * blocks + (round % 2 ? blocks - size - block / size * size + block % size : block);
  };
  if (row < rows) {
    int turn = 0;
    for (int other = 0; other < rows; other++)
      if (all[other].x > length || (all[other].x == length && other < row)) turn += all[other].y;
    const int owner = request[row];
    for (int i = 0; i < all[row].y; i++) tasks[dealt(turn + i)] = make_int4(row, bits, length, owner);
  }
  for (int turn = wanted + row; turn < rounds * blocks; turn += PLANNERS) tasks[dealt(turn)] = make_int4(-1, 0, 0, 0);
  if (row == 0) plan[0] = rounds;
}
