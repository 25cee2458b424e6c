// What stands around the grouped products: which rows an expert has, their copies in order, and the sum of a row's choices.
//
// A pair is row * choices + choice. The sorted rows hold pairs by expert, an expert's from a multiple of 16 on, in any order: no
// bit of a row depends on its place. What lies between an expert's last row and the next multiple of 16 is computed and not
// read.
//
// Macros: EXPERTS.

#include "sm90_barriers.cuh"

constexpr int PLANNERS = 1024, AT_ONCE = 8;  // pairs that a thread has asked for before it counts one

// One block. place[pair]: its row; -1 where it has no expert. tiles: (first row, expert and, 16 bits up, rows as a multiple of 16,
// `most_columns` at most); totals: how many.
extern "C" __global__ void __launch_bounds__(PLANNERS, 1)
    plan_pairs(const int *__restrict__ ids, int pairs, int most_columns, int *place, uint2 *tiles, int *totals) {
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  __shared__ int counts[EXPERTS], starts[EXPERTS];
  for (int i = threadIdx.x; i < EXPERTS; i += PLANNERS) counts[i] = 0;
  __syncthreads();
  for (int first = threadIdx.x; first < pairs; first += AT_ONCE * PLANNERS) {
    int id[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int pair = first + i * PLANNERS;
      id[i] = pair < pairs ? ids[pair] : -1;
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
      if (first + i * PLANNERS < pairs)
        place[first + i * PLANNERS] = id[i] >= 0 && id[i] < EXPERTS ? atomicAdd(counts + id[i], 1) : -1;
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    const int lane = threadIdx.x;
    int rows = 0, found = 0;
    for (int first = 0; first < EXPERTS; first += 32) {
      const int expert = first + lane, total = expert < EXPERTS ? counts[expert] : 0;
      const int padded = (total + 15) / 16 * 16, pieces = (total + most_columns - 1) / most_columns;
      int row = padded, tile = pieces;
      for (int step = 1; step < 32; step *= 2) {
        const int r = __shfl_up_sync(0xffffffffu, row, step), p = __shfl_up_sync(0xffffffffu, tile, step);
        if (lane >= step) row += r, tile += p;
      }
      const int start = rows + row - padded, at = found + tile - pieces;
      if (expert < EXPERTS) {
        starts[expert] = start;
        const int columns = pieces ? ((total + pieces - 1) / pieces + 15) / 16 * 16 : 0;
        for (int i = 0; i < pieces; ++i)
          tiles[at + i] = make_uint2(start + i * columns, expert | min(columns, padded - i * columns) << 16);
      }
      rows += __shfl_sync(0xffffffffu, row, 31), found += __shfl_sync(0xffffffffu, tile, 31);
    }
    if (lane == 0) *totals = found;
  }
  __syncthreads();
  for (int first = threadIdx.x; first < pairs; first += AT_ONCE * PLANNERS) {
    int id[AT_ONCE], within[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int pair = first + i * PLANNERS;
      within[i] = pair < pairs ? place[pair] : -1, id[i] = pair < pairs ? ids[pair] : 0;
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
      if (within[i] >= 0) place[first + i * PLANNERS] = starts[id[i]] + within[i];
  }
}

// A block copies a row, or its part of it, to the places of its pairs, as the products read them: [K / 128][groups of 8 rows][2][8 rows][64], the
// 16-byte pieces of a row's 64 in the 128-byte swizzle. Piece c holds word c of each of the four lanes' eight.
extern "C" __global__ void __launch_bounds__(256)
    sort_rows(const u8 *__restrict__ x, const int *__restrict__ place, u8 *out, int choices, int halves, int groups,
              int x_stride) {
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  __shared__ int places[32];
  const int c = threadIdx.x % 8;
  if (threadIdx.x < choices) places[threadIdx.x] = place[size_t(blockIdx.x) * choices + threadIdx.x];
  __syncthreads();
  const u8 *const from = x + size_t(blockIdx.x) * x_stride * 2 + c * 4;
  for (int half = blockIdx.y * 32 + threadIdx.x / 8; half < halves; half += gridDim.y * 32) {
    const u32 *const at = reinterpret_cast<const u32 *>(from + half * 128);
    const uint4 piece = make_uint4(at[0], at[8], at[16], at[24]);
    u8 *const to = out + size_t(half / 2) * groups * 2048 + half % 2 * 1024;
    for (int choice = 0; choice < choices; ++choice) {
      const int row = places[choice];
      if (row >= 0) *reinterpret_cast<uint4 *>(to + size_t(row / 8) * 2048 + row % 8 * 128 + ((c ^ row % 8) << 4)) = piece;
    }
  }
}

// y[t] = the sum over a row's choices of weight times product, in their order, in float32; then plus `added`, where given.
extern "C" __global__ void __launch_bounds__(256)
    sum_choices(const u8 *__restrict__ products, const int *__restrict__ place, const float *__restrict__ weights,
                const u8 *__restrict__ added, u8 *y, int choices, int width) {
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const size_t row = blockIdx.x;
  for (int at = (blockIdx.y * 256 + threadIdx.x) * 8; at < width; at += gridDim.y * 2048) {
    float total[8] = {};
    auto add = [&](const u8 *from, float weight) {
      const uint4 four = *reinterpret_cast<const uint4 *>(from);
      const u32 pairs[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        total[2 * i] += weight * __uint_as_float(pairs[i] << 16);
        total[2 * i + 1] += weight * __uint_as_float(pairs[i] & 0xffff0000u);
      }
    };
#pragma unroll 8
    for (int choice = 0; choice < choices; ++choice) {
      const int from = place[row * choices + choice];
      if (from >= 0) add(products + (size_t(from) * width + at) * 2, weights[row * choices + choice]);
    }
    if (added != nullptr) add(added + (row * width + at) * 2, 1.0f);
    *reinterpret_cast<uint4 *>(y + (row * width + at) * 2) =
        make_uint4(to_bf16_pair(total[0], total[1]), to_bf16_pair(total[2], total[3]), to_bf16_pair(total[4], total[5]),
                   to_bf16_pair(total[6], total[7]));
  }
}
