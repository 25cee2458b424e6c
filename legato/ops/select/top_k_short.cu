// Rows so short that one block holds them in its registers: no sample, no list, no exchange between blocks. A kernel of its own. A
// thread has consecutive scores, and every step is one pass over them:
//   1. the least and the best score of the row, over all warps
//   2. scores counted in four bins for each thread between them; a lower score is never in a lower bin, no number is in the last one
//   3. every warp finds the bin of the k-th; the ranks in it are gathered, what lies before it is counted by warps
//   4. the k-th rank by counting; the chosen written in ascending position
// Counters are many, because each rank in the bin of the k-th costs more than reading a few more of them. A row with more than CROWD
// ranks in that bin is done again in the exhaustive way.

#ifndef THREADS
#define THREADS 512
#endif
#ifndef QUADS_EACH  // of four scores that a thread has
#define QUADS_EACH 2
#endif

#include "top_k_profile.cuh"

#include "top_k_exhaustive.cuh"

constexpr int EACH = 4 * QUADS_EACH;    // scores of a thread
constexpr int SHORT_BINS = 4 * THREADS;
constexpr int CROWD = 512;              // ranks of the bin of the k-th
constexpr int FEW = 32;                 // of them that each warp places by itself
static_assert(EACH < 32 && 64 % EACH == 0, "a thread's scores lie in one page, and have a bit each");

struct Short {
  uint4 bins[THREADS];  // at a multiple of their size: an address is `base | bin * 4`
  u64 crowd[CROWD];
  int best, least;      // as integers of the same order
  u32 in_part[WARPS];   // scores in the bins of each warp
  u32 before[32];       // of each warp: scores before the bin of the k-th
  u32 crowd_count;
  u64 threshold;
  u32 pages[THREADS * EACH / 64];
  int staged[WARPS][32 * EACH];  // a warp's chosen, side by side
};
static_assert(THREADS * static_cast<u64>(SHARED_BYTES) < 1u << 31, "the counter's address");
static_assert(sizeof(Short) + SHORT_BINS * 4 <= SHARED_BYTES, "SHARED_BYTES is what the launch reserves");

// A number as an integer of the same order, and back.
__device__ __forceinline__ int whole_of(float x) {
  const int bits = __float_as_int(x);
  return bits ^ (bits >> 31 & 0x7FFFFFFF);
}
__device__ __forceinline__ float number_of(int whole) { return __int_as_float(whole ^ (whole >> 31 & 0x7FFFFFFF)); }

// The score of the lowest of these bits. (Registers cannot be indexed: each is looked at.)
__device__ __forceinline__ float first_of(const float (&x)[EACH], u32 bits) {
  float score = x[EACH - 1];
#pragma unroll
  for (int i = EACH - 2; i >= 0; i--) score = bits >> i & 1 ? x[i] : score;
  return score;
}

// The sum of this lane's value and those of the lanes before it, of the first LANES.
template <int LANES>
__device__ __forceinline__ u32 add_up(u32 value) {
#pragma unroll
  for (u32 distance = 1; distance < LANES; distance *= 2)
    asm volatile("{\n.reg .pred p;\n.reg .b32 other;\nshfl.sync.up.b32 other|p, %0, %1, 0, 0xFFFFFFFF;\n@p add.u32 %0, %0, other;\n}"
                 : "+r"(value) : "r"(distance));
  return value;
}

// A place in the crowd for each lane that asks, one or two of a warp. `counter` must look different in each lane: otherwise the compiler
// lets one lane ask for all, which takes longer.
__device__ __forceinline__ u32 take_place(u32 counter) {
  u32 place;
  asm volatile("atom.shared.add.u32 %0, [%1], 1;" : "=r"(place) : "r"(counter) : "memory");
  return place;
}

// `base`: where `s.bins` is; `counter`: of the crowd. Whether the row could be chosen from; the same answer in every warp.
__device__ __forceinline__ bool select_short(Short& s, u32 base, u32 counter, float (&x)[EACH], const Row& r PROFILE_PARAMETER) {
  const u32 all_lanes = 0xFFFFFFFFu;
  const u32 lane = kept(threadIdx.x % 32), warp = kept(threadIdx.x / 32), own_first = threadIdx.x * EACH, first = warp * 32 * EACH;
  const u32 num_own = min(max(r.length, own_first) - own_first, static_cast<u32>(EACH));
  const bool is_full = first + 32 * EACH <= r.length;  // this warp
  if (!is_full) {
#pragma unroll
    for (int i = 0; i < EACH; i++) x[i] = i < num_own ? x[i] : __int_as_float(0x7FFFFFFF);
  }

  // ---- 1. No number is neither the best nor the least.
  float most[EACH / 2], few[EACH / 2];
#pragma unroll
  for (int i = 0; i < EACH / 2; i++) most[i] = fmaxf(x[2 * i], x[2 * i + 1]), few[i] = fminf(x[2 * i], x[2 * i + 1]);
#pragma unroll
  for (int i = EACH / 4; i > 0; i /= 2)
#pragma unroll
    for (int j = 0; j < i; j++) most[j] = fmaxf(most[j], most[j + i]), few[j] = fminf(few[j], few[j + i]);
  // (The compiler lets one lane of a warp do it for all.)
  asm volatile("red.shared.max.s32 [%0], %1;" ::"r"(shared_address(&s.best)), "r"(whole_of(fmaxf(most[0], -__int_as_float(0x7F800000)))) : "memory");
  asm volatile("red.shared.min.s32 [%0], %1;" ::"r"(shared_address(&s.least)), "r"(whole_of(fminf(few[0], __int_as_float(0x7F800000)))) : "memory");
  __syncthreads();
  MARK(2)
  const float top = number_of(s.best), bottom = number_of(s.least);
  float scale;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(scale) : "f"(top - bottom));

  // ---- 2. Each operation, and its rounding, keeps the order. The addition leaves a quarter of a bin in the lowest bit; bins are counted
  // from the best down. Not a number is cut to 0 like the least. Where the range is nothing or too large, all are, and more than may be.
  u32 at[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const float part = __saturatef((x[i] - bottom) * scale);
    at[i] = (~__float_as_uint(fmaf(part, SHORT_BINS - 1.0f, 2097152.0f)) & (SHORT_BINS - 1) * 4) | base;
  }
  if (is_full) {
#pragma unroll
    for (int i = 0; i < EACH; i++) asm volatile("red.shared.add.u32 [%0], 1;" ::"r"(at[i]) : "memory");
  } else {
#pragma unroll
    for (int i = 0; i < EACH; i++)
      asm volatile("{\n.reg .pred p;\nsetp.gt.u32 p, %1, %2;\n@p red.shared.add.u32 [%0], 1;\n}" ::"r"(at[i]), "r"(num_own), "r"(i) : "memory");
  }
  __syncthreads();
  MARK(3)

  // ---- 3. In which warp's bins the k-th is, then in which thread's four, then in which of them.
  const uint4 mine = s.bins[threadIdx.x];
  const u32 in_part = add_all(mine.x + mine.y + mine.z + mine.w);
  if (lane == 0) s.in_part[warp] = in_part;
  __syncthreads();
  MARK(4)
  const u32 upto_part = add_up<WARPS>(lane < WARPS ? s.in_part[lane] : 0);
  const u32 part = __popc(__ballot_sync(all_lanes, lane < WARPS && upto_part < r.k));
  const uint4 four = s.bins[part * 32 + lane];
  const u32 above_part = __shfl_sync(all_lanes, upto_part, part - 1), own = four.x + four.y + four.z + four.w;
  const u32 upto = add_up<32>(own) + (part ? above_part : 0), above = upto - own;
  const u32 ends[3] = {above + four.x, above + four.x + four.y, upto - four.w};
  const u32 which_bin = (ends[0] < r.k) + (ends[1] < r.k) + (ends[2] < r.k);
  const u32 count = which_bin < 2 ? (which_bin ? four.y : four.x) : which_bin == 2 ? four.z : four.w;
  const u32 start = which_bin < 2 ? (which_bin ? ends[0] : above) : which_bin == 2 ? ends[1] : ends[2];
  const u32 source = __popc(__ballot_sync(all_lanes, upto < r.k));
  const u32 told = __shfl_sync(all_lanes, (part * 32 + lane) << 22 | which_bin << 20 | min(count, 1023u) << 10 | min(r.k - start, 1023u), source);
  asm volatile("cp.async.wait_all;" ::: "memory");  // the pages: neither may they come when the memory is the exhaustive way's
  if ((told >> 10 & 1023) > CROWD) return false;
  const u32 wanted = told & 1023, its_bin = told >> 20 << 2 | base;
  u32 chosen = 0, equal = 0;
#pragma unroll
  for (int i = 0; i < EACH; i++) chosen |= at[i] < its_bin ? 1u << i : 0, equal |= at[i] == its_bin ? 1u << i : 0;
  equal &= ~(~0u << num_own);
  auto rank_of = [&](u32 bits) { return static_cast<u64>(order_of(first_of(x, bits))) << 32 | (own_first + __ffs(bits) - 1); };
  u64 own_rank = 0;  // of the first of my scores in the bin
  if (__any_sync(all_lanes, equal)) {
    own_rank = rank_of(equal);
    if (equal) s.crowd[take_place(counter)] = own_rank;
#pragma unroll 1
    for (u32 left = equal & (equal - 1); __any_sync(all_lanes, left); left &= left - 1)
      if (left) s.crowd[take_place(counter)] = rank_of(left);
  }
  const u32 num_before = __popc(chosen), with_own = add_up<32>(num_before);  // in this warp
  u32 place = with_own - num_before, of_warp = __shfl_sync(all_lanes, with_own, 31);
  if (lane == 31) s.before[warp] = with_own;
  __syncthreads();
  MARK(5)

  // ---- 4. A lane has one rank of the bin and counts those that are smaller.
  const u32 all = s.crowd_count;
  u32 out = add_all(lane < warp ? s.before[lane] : 0);
  u64 threshold, one = s.crowd[lane];
  if (all <= FEW) {
    u32 smaller = 1;
#pragma unroll 1
    for (u32 i = 0; i < all; i += 4) {
#pragma unroll
      for (u32 j = 0; j < 4; j++) smaller += s.crowd[i + j] < one;
    }
    threshold = s.crowd[__ffs(__ballot_sync(all_lanes, lane < all && smaller == wanted)) - 1];
    out += __popc(__ballot_sync(all_lanes, one <= threshold && static_cast<u32>(one) < first));
  } else {  // a warp places one of them among all
    for (u32 which = warp; which < all; which += WARPS) {
      const u64 its_rank = s.crowd[which];
      u32 smaller = 1;
      for (u32 i = 0; i < all; i += 32) smaller += __popc(__ballot_sync(all_lanes, i + lane < all && s.crowd[i + lane] < its_rank));
      if (lane == 0 && smaller == wanted) s.threshold = its_rank;
    }
    __syncthreads();
    threshold = s.threshold;
    for (u32 i = 0; i < all; i += 32) {
      one = s.crowd[i + lane];
      out += __popc(__ballot_sync(all_lanes, i + lane < all && one <= threshold && static_cast<u32>(one) < first));
    }
  }
  const int slot = static_cast<int>(s.pages[own_first >> 6]) << 6 | static_cast<int>(own_first & 63);
  if (__any_sync(all_lanes, equal)) {
    auto choose = [&](u32 bits, bool is) {
      if (is) chosen |= bits & -bits;
      const u32 votes = __ballot_sync(all_lanes, is);
      place += __popc(votes & ((1u << lane) - 1)), of_warp += __popc(votes);
    };
    choose(equal, equal && own_rank <= threshold);
#pragma unroll 1
    for (u32 left = equal & (equal - 1); __any_sync(all_lanes, left); left &= left - 1) choose(left, left && rank_of(left) <= threshold);
  }
  u32 into = shared_address(&s.staged[warp][place]);
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    asm volatile("{\n.reg .pred p;\n.reg .b32 bit;\nand.b32 bit, %2, %3;\nsetp.ne.u32 p, bit, 0;\n@p st.shared.s32 [%0], %1;\n@p add.u32 %0, %0, 4;\n}"
                 : "+r"(into) : "r"(slot + i), "r"(chosen), "r"(1u << i) : "memory");
  }
  __syncwarp();
  int* const to = r.out + out + lane;
  const int* const from = &s.staged[warp][lane];
  const int left_over = static_cast<int>(of_warp) - static_cast<int>(lane);
#pragma unroll
  for (int i = 0; i < EACH; i++)
    if (left_over > 32 * i) to[32 * i] = from[32 * i];
  MARK(6)
  return true;
}

// One block a row, of a table no wider than EACH * THREADS scores. Scores are asked for before the length is known.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    top_k_short(const float* __restrict__ scores, const int* __restrict__ lengths, const int* __restrict__ page_table,
                const int* __restrict__ request, int* __restrict__ slots, int* __restrict__ counts, const int stride,
                const int table_stride, const int k, const int width, const int memory_bytes PROFILE_PARAMETER) {
  unsigned char* const memory = own_memory();
  const u32 start = shared_address(memory), base = kept((start + SHORT_BINS * 4 - 1) & ~(SHORT_BINS * 4 - 1u));
  Short& s = *reinterpret_cast<Short*>(memory + (base - start));
  MARK(0)
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  const u32 row = blockIdx.x, pages = (width + 63) / 64;
  s.bins[threadIdx.x] = make_uint4(0, 0, 0, 0);
  if (threadIdx.x < FEW) s.crowd[threadIdx.x] = ~0ull;
  if (threadIdx.x == THREADS - 1) s.crowd_count = 0, s.best = 0x80000000, s.least = 0x7FFFFFFF;
  const int *length_at = lengths + row, *request_at = request + row;
  Row r;
  r.scores = scores + static_cast<u64>(row) * stride, r.out = slots + static_cast<u64>(row) * k, r.k = k;
  const float* at = r.scores + threadIdx.x * EACH;
  const u32 counter = kept(shared_address(&s.crowd_count) + (threadIdx.x * static_cast<u32>(memory_bytes) >> 31));  // nothing, but who knows?
  const int within = width - static_cast<int>(threadIdx.x) * EACH;
  asm volatile("" : "+l"(length_at), "+l"(request_at), "+l"(at), "+l"(r.out));
  __syncthreads();
  asm volatile("griddepcontrol.wait;" ::: "memory");
  MARK(1)
  float x[EACH];
#pragma unroll
  for (int j = 0; j < QUADS_EACH; j++) {
    const float4 quad = read4(at + 4 * j, 4 * j < within);
    x[4 * j] = quad.x, x[4 * j + 1] = quad.y, x[4 * j + 2] = quad.z, x[4 * j + 3] = quad.w;
  }
  const int length = read_int(length_at), owner = read_int(request_at);
  r.table = page_table + static_cast<u64>(owner) * table_stride;
#pragma unroll 1
  for (u32 i = threadIdx.x; i < pages; i += THREADS)
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(&s.pages[i])), "l"(r.table + i) : "memory");
  r.length = min(max(length, 0), width);
  if (threadIdx.x == 0) counts[row] = min(r.length, r.k);
  if (r.length <= r.k) {
    take_all(r, 0, 1);
    asm volatile("cp.async.wait_all;" ::: "memory");
    return;
  }
  r.block_bits = 0;
  cut_row(r, 0, 1);
  if (select_short(s, base, counter, x, r PROFILE_ARGUMENT)) return;
  MARK(11)
  select_exhaustively(r, memory_bytes);
}
