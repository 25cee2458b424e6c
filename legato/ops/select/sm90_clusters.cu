// Selection as the fastest public kernel of 2026 does it, written anew for comparison: see sm90_clusters.py. Not exact.
//
// A cluster of eight blocks has a row. Scores are rounded to float16; the upper 10 bits of that, ordered, are a bin.
//   1. each block counts the bins of its part; the counts are added up in block 0, which finds the bin of the k-th
//   2. each block reads its part again: what is above the bin is chosen, what is in it goes to a buffer of block 0, which
//      holds 2048 and drops the others
//   3. block 0 chooses among them: by rank where they are few, by digits of the float32 score otherwise, the last of which
//      takes equal scores in the order of their arrival
//   4. block 0 looks up the pages. The result is in no order.
#include <cuda_fp16.h>

typedef unsigned int u32;

constexpr int THREADS = 1024, CLUSTER = 8, BINS = 1024, TIES = 2048, FEW = 128, MOST = 2048;

struct Tie {
  float score;
  u32 position;
};
struct Shared {
  u32 bins[BINS];
  u32 chosen[MOST];
  Tie ties[TIES];
  u32 num_chosen, num_ties, bin, above, digit, wanted, taken;
  u32 warp_sum[32];
};

__device__ __forceinline__ u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }
__device__ __forceinline__ u32 in_first(u32 address) {
  u32 mapped;
  asm("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(mapped) : "r"(address));
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
  return (bits & 0x8000 ? bits : 0x7FFF - bits) >> 6;
}
__device__ __forceinline__ u32 order_of(float score) {
  const u32 bits = __float_as_uint(score);
  return bits & 0x80000000u ? bits : 0x7FFFFFFFu - bits;
}

// The first of `COUNT` counters at which the sum reaches `wanted`: into s.digit, and how many are before it into s.above.
template <int COUNT> __device__ __forceinline__ void find(Shared& s, u32 wanted) {
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, own = threadIdx.x < COUNT ? s.bins[threadIdx.x] : 0;
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
      if (place < wanted) s.chosen[s.num_chosen + place] = own.position;
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
    find<256>(s, wanted);
    for (u32 i = threadIdx.x; i < count; i += THREADS) {
      const u32 order = order_of(s.ties[i].score);
      const bool here = shift == 24 || order >> (shift + 8) == prefix;
      const u32 digit = order >> shift & 255;
      if (here && (digit < s.digit || (shift == 0 && digit == s.digit))) {
        const u32 place = atomicAdd(&s.taken, 1);
        if (s.num_chosen + place < MOST) s.chosen[s.num_chosen + place] = s.ties[i].position;
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
    cluster_topk(const float* __restrict__ scores, const int* __restrict__ lengths, const int* __restrict__ page_table,
                 const int* __restrict__ request, int* __restrict__ slots, int* __restrict__ counts, int stride, int table_stride, int k) {
  __shared__ Shared s;
  const u32 row = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER;
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  s.bins[threadIdx.x] = 0;
  if (threadIdx.x == 0) s.num_chosen = s.num_ties = 0;
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const u32 length = max(lengths[row], 0), wanted = k;
  const int* table = page_table + static_cast<size_t>(request[row]) * table_stride;
  const float* own = scores + static_cast<size_t>(row) * stride;
  int* out = slots + static_cast<size_t>(row) * k;
  if (rank == 0 && threadIdx.x == 0) counts[row] = min(length, wanted);
  if (length <= wanted) {
    if (rank == 0)
      for (u32 i = threadIdx.x; i < wanted; i += THREADS) out[i] = i < length ? table[i >> 6] << 6 | static_cast<int>(i & 63) : -1;
    return;
  }
  const u32 quads = (length + 3) / 4, begin = static_cast<u32>(static_cast<unsigned long long>(quads) * rank / CLUSTER),
            end = static_cast<u32>(static_cast<unsigned long long>(quads) * (rank + 1) / CLUSTER);
  __syncthreads();
  each(own, begin, end, length, [&](float score, u32) { atomicAdd(&s.bins[bin_of(score)], 1); });
  cluster_sync();
  if (rank && s.bins[threadIdx.x]) remote_add(in_first(shared_address(&s.bins[threadIdx.x])), s.bins[threadIdx.x]);
  cluster_sync();
  if (rank == 0) find<BINS>(s, wanted);
  cluster_sync();
  const u32 bin = remote_load(in_first(shared_address(&s.digit))), above = remote_load(in_first(shared_address(&s.above)));
  each(own, begin, end, length, [&](float score, u32 position) {
    const u32 its_bin = bin_of(score);
    if (its_bin < bin) {
      const u32 place = remote_add(in_first(shared_address(&s.num_chosen)), 1);
      remote_store(in_first(shared_address(&s.chosen[0])) + place * 4, position);
    } else if (its_bin == bin) {
      const u32 place = remote_add(in_first(shared_address(&s.num_ties)), 1), to = in_first(shared_address(&s.ties[0])) + place * 8;
      if (place < TIES) {
        remote_store(to, __float_as_uint(score));
        remote_store(to + 4, position);
      }
    }
  });
  cluster_sync();
  if (rank) return;
  choose_among_ties(s, wanted - above);
  __syncthreads();
  for (u32 i = threadIdx.x; i < wanted; i += THREADS) {
    const u32 position = s.chosen[i];
    out[i] = table[position >> 6] << 6 | static_cast<int>(position & 63);
  }
}
