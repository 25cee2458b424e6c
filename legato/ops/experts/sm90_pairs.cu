// What stands around the grouped products: which rows an expert has, their copies in order, and the sum of a row's choices.
//
// A pair is row * choices + choice. The sorted rows hold pairs by expert, an expert's in ascending order from a multiple of 16
// on: three launches count, add up and place them. What lies between an expert's last row and the next multiple of 16 is
// computed and not read.
//
// Macros: PART: pairs of a block, a multiple of 32, at most 1024; EXPERTS.

#include "sm90_barriers.cuh"

// counts[part][expert]
extern "C" __global__ void __launch_bounds__(PART)
    count_pairs(const int *__restrict__ ids, int pairs, int *counts) {
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  __shared__ int found[EXPERTS];
  for (int i = threadIdx.x; i < EXPERTS; i += PART) found[i] = 0;
  __syncthreads();
  const int pair = blockIdx.x * PART + threadIdx.x, id = pair < pairs ? ids[pair] : -1;
  if (id >= 0 && id < EXPERTS) atomicAdd(found + id, 1);
  __syncthreads();
  for (int i = threadIdx.x; i < EXPERTS; i += PART) counts[blockIdx.x * EXPERTS + i] = found[i];
}

// One block. Counts become where a part's first pair of an expert stands. tiles: (first row, expert and, 16 bits up, rows as a
// multiple of 16, `most_columns` at most); totals: how many.
extern "C" __global__ void __launch_bounds__(1024, 1)
    plan_pairs(int *counts, int parts, int most_columns, uint2 *tiles, int *totals) {
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  constexpr int SHARES = EXPERTS > 512 ? 1 : 1024 / EXPERTS < 8 ? 1024 / EXPERTS : 8;  // threads of an expert
  __shared__ int sums[SHARES][EXPERTS], starts[EXPERTS];
  const int lane = threadIdx.x % 32;
  for (int i = threadIdx.x; i < SHARES * EXPERTS; i += 1024) {
    const int expert = i % EXPERTS, share = i / EXPERTS;
    int total = 0;
#pragma unroll 8
    for (int part = share * parts / SHARES; part < (share + 1) * parts / SHARES; ++part)
      total += counts[part * EXPERTS + expert];
    sums[share][expert] = total;
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    int rows = 0, found = 0;
    for (int first = 0; first < EXPERTS; first += 32) {
      const int expert = first + lane;
      int total = 0;
      if (expert < EXPERTS)
#pragma unroll
        for (int share = 0; share < SHARES; ++share) total += sums[share][expert];
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
  for (int i = threadIdx.x; i < SHARES * EXPERTS; i += 1024) {
    const int expert = i % EXPERTS, share = i / EXPERTS;
    int at = starts[expert];
#pragma unroll
    for (int before = 0; before < SHARES; ++before) at += before < share ? sums[before][expert] : 0;
    for (int part = share * parts / SHARES; part < (share + 1) * parts / SHARES; ++part) {
      const int count = counts[part * EXPERTS + expert];
      counts[part * EXPERTS + expert] = at;
      at += count;
    }
  }
}

// place[pair]: its row; -1 where it has no expert.
extern "C" __global__ void __launch_bounds__(PART)
    place_pairs(const int *__restrict__ ids, const int *__restrict__ starts, int pairs, int *place) {
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  constexpr int WARPS = PART / 32;
  __shared__ int counts[WARPS][EXPERTS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int i = threadIdx.x; i < WARPS * EXPERTS; i += PART) (&counts[0][0])[i] = 0;
  const int pair = blockIdx.x * PART + threadIdx.x, id = pair < pairs ? ids[pair] : -1;
  const bool valid = id >= 0 && id < EXPERTS;
  const u32 same = __match_any_sync(0xffffffffu, valid ? id : -1 - lane);
  const int rank = __popc(same & ((1u << lane) - 1));
  __syncthreads();
  if (valid && rank == 0) counts[warp][id] = __popc(same);
  __syncthreads();
  for (int i = threadIdx.x; i < EXPERTS; i += PART) {
    int at = starts[blockIdx.x * EXPERTS + i];
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      const int count = counts[w][i];
      counts[w][i] = at;
      at += count;
    }
  }
  __syncthreads();
  if (pair < pairs) place[pair] = valid ? counts[warp][id] + rank : -1;
}

// A block copies a row to the places of its pairs, as the products read them: [K / 128][groups of 8 rows][2][8 rows][64], the
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
  for (int half = threadIdx.x / 8; half < halves; half += 32) {
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
  for (int at = threadIdx.x * 8; at < width; at += 2048) {
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
#pragma unroll 4
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
