// Selection as public kernels of 2026 do it, written anew for comparison: see sm90_clusters.py and sm90_blocks.py. Not exact.
//
// A cluster of CLUSTER blocks has a row. Scores are rounded to float16; the upper KEY_BITS bits of that, ordered, are a bin.
//   1. each block counts the bins of its part; the blocks add up a share of the bins each and tell all, so all find the bin of the k-th
//   2. each block reads its part again: what is above the bin is chosen and written at once, at places that the block reserves;
//      what is in it goes to a buffer of block 0, which holds TIES and drops the others
//   3. block 0 chooses among them: by rank where they are no more than FEW, by digits of the float32 score otherwise, the last
//      of which takes equal scores in the order of their arrival
// The result is in no order.
#include <cuda_fp16.h>
#include "../sm90.cuh"

constexpr int THREADS = 1024, BINS = 1 << KEY_BITS, MOST = 2048;
static_assert(BINS <= THREADS, "a thread has one bin at most");

struct Tie {
  float score;
  u32 position;
};
struct Shared {
  u32 bins[THREADS];                    // of my part; digits of ties
  u32 total[CLUSTER > 1 ? THREADS : 1];  // of the row
  u32 chosen[MOST];
  u32 own_ties[CLUSTER > 1 ? TIES : 1];  // positions
  Tie ties[TIES];                        // of the row, in block 0
  u32 num_chosen, num_own_ties, chosen_before, ties_before;
  u32 all_chosen, num_ties;  // of the row, in block 0
  u32 above, digit, taken;
  u32 warp_sum[32];
};

__device__ __forceinline__ u32 in_block(u32 address, u32 block) {
  u32 mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(block));
  return mapped;
}
__device__ __forceinline__ u32 remote_add(u32 address, u32 value) {
  u32 before;
  asm volatile("atom.relaxed.cluster.shared::cluster.add.u32 %0, [%1], %2;" : "=r"(before) : "r"(address), "r"(value) : "memory");
  return before;
}
__device__ __forceinline__ void remote_store(u32 address, u32 value) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
__device__ __forceinline__ u32 remote_load(u32 address) {
  u32 value;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Larger scores have smaller bins.
__device__ __forceinline__ u32 bin_of(float score) {
  const u32 bits = __half_as_ushort(__float2half_rn(score));
  return (bits & 0x8000 ? bits : 0x7FFF - bits) >> (16 - KEY_BITS);
}
__device__ __forceinline__ u32 order_of(float score) {
  const u32 bits = __float_as_uint(score);
  return bits & 0x80000000u ? bits : 0x7FFFFFFFu - bits;
}

// The first of `COUNT` counters at which the sum reaches `wanted`: into s.digit, and how many are before it into s.above.
template <int COUNT> __device__ __forceinline__ void find(Shared& s, const u32* counters, u32 wanted) {
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, own = threadIdx.x < COUNT ? counters[threadIdx.x] : 0;
  u32 upto = own;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const u32 other = __shfl_up_sync(0xFFFFFFFFu, upto, distance);
    if (lane >= distance) upto += other;
  }
  if (lane == 31) s.warp_sum[warp] = upto;
  __syncthreads();
  upto += __reduce_add_sync(0xFFFFFFFFu, lane < warp ? s.warp_sum[lane] : 0);
  if (threadIdx.x < COUNT && upto >= wanted && upto - own < wanted) s.digit = threadIdx.x, s.above = upto - own;
  __syncthreads();
}

__device__ __forceinline__ void choose_among_ties(Shared& s, u32 wanted) {
  const u32 count = min(s.num_ties, static_cast<u32>(TIES));
  if (count <= FEW) {
    for (u32 i = threadIdx.x; i < count; i += THREADS) {
      const Tie own = s.ties[i];
      u32 place = 0;
      for (u32 j = 0; j < count; j++)
        place += s.ties[j].score > own.score || (s.ties[j].score == own.score && s.ties[j].position < own.position);
      if (place < wanted) s.chosen[place] = own.position;
    }
    return;
  }
  u32 prefix = 0;
  if (threadIdx.x == 0) s.taken = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    if (threadIdx.x < 256) s.bins[threadIdx.x] = 0;
    __syncthreads();
    for (u32 i = threadIdx.x; i < count; i += THREADS) {
      const u32 order = order_of(s.ties[i].score);
      if (shift == 24 || order >> (shift + 8) == prefix) atomicAdd(&s.bins[order >> shift & 255], 1);
    }
    __syncthreads();
    find<256>(s, s.bins, wanted);
    for (u32 i = threadIdx.x; i < count; i += THREADS) {
      const u32 order = order_of(s.ties[i].score);
      const bool here = shift == 24 || order >> (shift + 8) == prefix;
      const u32 digit = order >> shift & 255;
      if (here && (digit < s.digit || (shift == 0 && digit == s.digit))) {
        const u32 place = atomicAdd(&s.taken, 1);
        if (place < MOST) s.chosen[place] = s.ties[i].position;
      }
    }
    wanted -= s.above;
    prefix = prefix << 8 | s.digit;
    __syncthreads();
  }
}

// Visits the scores of a part, four at a time.
template <typename Visit> __device__ __forceinline__ void each(const float* row, u32 begin, u32 end, u32 length, Visit visit) {
#pragma unroll 4
  for (u32 i = begin + threadIdx.x; i < end; i += THREADS) {
    const float4 v = __ldg(reinterpret_cast<const float4*>(row) + i);
    visit(v.x, i * 4);
    if (i * 4 + 1 < length) visit(v.y, i * 4 + 1);
    if (i * 4 + 2 < length) visit(v.z, i * 4 + 2);
    if (i * 4 + 3 < length) visit(v.w, i * 4 + 3);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    float16_topk(const float* __restrict__ scores, const int* __restrict__ lengths, const int* __restrict__ page_table,
                 const int* __restrict__ request, int* __restrict__ slots, int* __restrict__ counts, int stride, int table_stride, int k) {
  __shared__ Shared s;
  const u32 row = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER;
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  s.bins[threadIdx.x] = 0;
  if (threadIdx.x == 0) s.num_chosen = s.num_own_ties = s.all_chosen = s.num_ties = s.chosen_before = 0;
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const u32 length = max(lengths[row], 0), wanted = k;
  const int* table = page_table + static_cast<size_t>(request[row]) * table_stride;
  const float* own = scores + static_cast<size_t>(row) * stride;
  int* out = slots + static_cast<size_t>(row) * k;
  auto slot_of = [&](u32 position) { return table[position >> 6] << 6 | static_cast<int>(position & 63); };
  if (rank == 0 && threadIdx.x == 0) counts[row] = min(length, wanted);
  if (length <= wanted) {
    if (rank == 0)
      for (u32 i = threadIdx.x; i < wanted; i += THREADS) out[i] = i < length ? slot_of(i) : -1;
    return;
  }
  const u32 quads = (length + 3) / 4, begin = static_cast<u32>(static_cast<unsigned long long>(quads) * rank / CLUSTER),
            end = static_cast<u32>(static_cast<unsigned long long>(quads) * (rank + 1) / CLUSTER);
  __syncthreads();
  each(own, begin, end, length, [&](float score, u32) { atomicAdd(&s.bins[bin_of(score)], 1); });
  if constexpr (CLUSTER > 1) {
    cluster_sync();
    constexpr u32 SHARE = BINS / CLUSTER;
    if (threadIdx.x < SHARE) {
      const u32 its_bin = rank * SHARE + threadIdx.x;
      u32 sum = 0;
#pragma unroll
      for (u32 block = 0; block < CLUSTER; block++) sum += remote_load(in_block(shared_address(&s.bins[its_bin]), block));
#pragma unroll
      for (u32 block = 0; block < CLUSTER; block++) remote_store(in_block(shared_address(&s.total[its_bin]), block), sum);
    }
    cluster_sync();
    find<BINS>(s, s.total, wanted);
  } else {
    __syncthreads();
    find<BINS>(s, s.bins, wanted);
  }
  const u32 bin = s.digit, above = s.above;
  each(own, begin, end, length, [&](float score, u32 position) {
    const u32 its_bin = bin_of(score);
    if (its_bin < bin) {
      s.chosen[atomicAdd(&s.num_chosen, 1)] = position;
    } else if (its_bin == bin) {
      const u32 place = atomicAdd(CLUSTER > 1 ? &s.num_own_ties : &s.num_ties, 1);
      if (place >= TIES) return;
      if constexpr (CLUSTER > 1) {
        s.own_ties[place] = position;
      } else {
        s.ties[place] = {score, position};
      }
    }
  });
  __syncthreads();
  if constexpr (CLUSTER > 1) {
    if (threadIdx.x == 0) s.chosen_before = remote_add(in_block(shared_address(&s.all_chosen), 0), s.num_chosen);
    if (threadIdx.x == 32) s.ties_before = remote_add(in_block(shared_address(&s.num_ties), 0), s.num_own_ties);
    __syncthreads();
    for (u32 i = threadIdx.x; i < min(s.num_own_ties, static_cast<u32>(TIES)); i += THREADS) {
      const u32 place = s.ties_before + i, to = in_block(shared_address(&s.ties[0]), 0) + place * 8;
      if (place >= TIES) break;
      remote_store(to, __float_as_uint(own[s.own_ties[i]]));
      remote_store(to + 4, s.own_ties[i]);
    }
  }
  for (u32 i = threadIdx.x; i < s.num_chosen; i += THREADS) out[s.chosen_before + i] = slot_of(s.chosen[i]);
  if constexpr (CLUSTER > 1) {
    cluster_sync();
    if (rank) return;
  } else {
    __syncthreads();
  }
  choose_among_ties(s, wanted - above);
  __syncthreads();
  for (u32 i = threadIdx.x; i < wanted - above; i += THREADS) out[above + i] = slot_of(s.chosen[i]);
}
