// Choosing tokens from rows of logits: the best one, or a draw under temperature, top_k, top_p and min_p. No sort.
//
// A cluster of CLUSTER blocks owns a row; each block keeps a contiguous slice of it in shared memory. A filter is a threshold on
// the ordered bits of a number: it is found digit by digit, four bits at a time, from sums over all that share the digits
// before (of ones for top_k, of probabilities in fixed point for top_p). The sums are integers, so that their order changes
// nothing; the blocks exchange 16 of them per digit. Equal numbers at the threshold are kept from the lowest id on. What a filter
// removes becomes -inf, as in the reference. The draw adds Gumbel noise of Philox4x32-10 and takes the best.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr int WARPS = THREADS / 32;
constexpr int DIGITS = 16;
#define NOTHING __int_as_float(0xFF800000)  // -inf

struct Exchange {
  u64 sums[2][CLUSTER][DIGITS];
  u64 mine[WARPS][DIGITS];
  u64 total[DIGITS];
  int cut;
};

__device__ __forceinline__ u32 rank_in_cluster() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ void store_to(u64 *mine, u32 rank, u64 value) {
  u32 there, here = (u32)__cvta_generic_to_shared(mine);
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
  asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(there), "l"(value) : "memory");
}

// Ascending in the order of numbers: -0 equals +0, every NaN is above +inf.
__device__ __forceinline__ u32 ordered(float value) {
  if (value != value) return 0xFFFFFFFFu;
  const u32 bits = __float_as_uint(value + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The number that `ordered` made this of.
__device__ __forceinline__ float number_of(u32 key) { return __uint_as_float(key & 0x80000000u ? key & 0x7FFFFFFFu : ~key); }

__device__ __forceinline__ u64 better(float value, u32 id) { return (u64)ordered(value) << 32 | (u32)~id; }

__device__ __forceinline__ u64 larger(u64 a, u64 b) { return a > b ? a : b; }

// What this block has of a row.
struct Slice {
  int row, start, count;
};

// Once all blocks of the cluster have started, so that they may be written to, and the logits are there.
__device__ __forceinline__ Slice begin(int width, int slice) {
  cluster_barrier();
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const int start = rank_in_cluster() * slice;
  return {int(blockIdx.x) / CLUSTER, start, max(0, min(slice, width - start))};
}

// The largest of all blocks' numbers, in every thread. `turn` alternates between calls.
__device__ u64 largest(u64 value, Exchange &exchange, int &turn) {
  for (int offset = 16; offset; offset /= 2) value = larger(value, __shfl_xor_sync(~0u, value, offset));
  if (threadIdx.x % 32 == 0) exchange.mine[threadIdx.x / 32][0] = value;
  __syncthreads();
  if (threadIdx.x < CLUSTER) {
    for (int warp = 0; warp < WARPS; ++warp) value = larger(value, exchange.mine[warp][0]);
    store_to(&exchange.sums[turn][rank_in_cluster()][0], threadIdx.x, value);
  }
  cluster_barrier();
  for (int rank = 0; rank < CLUSTER; ++rank) value = larger(value, exchange.sums[turn][rank][0]);
  turn ^= 1;
  return value;
}

// Sums of 16 numbers over all threads of all blocks, in `exchange.total`; the blocks' own ones stay in sums[turn before].
__device__ void add_up(u64 (&sums)[DIGITS], Exchange &exchange, int &turn) {
#pragma unroll
  for (int digit = 0; digit < DIGITS; ++digit) {
    const u64 part = sums[digit];
    u64 sum = 0;
    if (__any_sync(~0u, part != 0)) {  // the hardware adds 32 bits: three pieces that cannot overflow
      sum = __reduce_add_sync(~0u, (u32)part & 0xFFFFu);
      sum += (u64)__reduce_add_sync(~0u, (u32)part >> 16) << 16;
      sum += (u64)__reduce_add_sync(~0u, (u32)(part >> 32)) << 32;
    }
    if (threadIdx.x % 32 == 0) exchange.mine[threadIdx.x / 32][digit] = sum;
  }
  __syncthreads();
  if (threadIdx.x < CLUSTER * DIGITS) {
    const int digit = threadIdx.x % DIGITS;
    u64 sum = 0;
    for (int warp = 0; warp < WARPS; ++warp) sum += exchange.mine[warp][digit];
    store_to(&exchange.sums[turn][rank_in_cluster()][digit], threadIdx.x / DIGITS, sum);
  }
  cluster_barrier();
  if (threadIdx.x < DIGITS) {
    u64 sum = 0;
    for (int rank = 0; rank < CLUSTER; ++rank) sum += exchange.sums[turn][rank][threadIdx.x];
    exchange.total[threadIdx.x] = sum;
  }
  __syncthreads();
  turn ^= 1;
}

// Weights for top_k: `wanted` numbers are kept.
struct Ones {
  int wanted;
  __device__ __forceinline__ u64 operator()(float) const { return 1; }
  __device__ __forceinline__ u64 target(u64) const { return wanted; }
};

// Weights for top_p: exp(value - most) in steps of 2^-32; `wanted` is the share of all of them that is kept.
struct Masses {
  float most, wanted;
  __device__ __forceinline__ u64 operator()(float value) const {
    return __float2ull_rn(expf(value - most) * 4294967296.0f);
  }
  __device__ __forceinline__ u64 target(u64 all) const {
    const double least = ceil((double)wanted * (double)all);
    return least < 1 ? 1 : (u64)least;
  }
};

// Which of eight stretches below the best number a number lies in; those further away share the last one.
__device__ __forceinline__ int stretch(float value, float most) { return (int)fminf((most - value) * 0.5f, 7.0f); }

// Keeps the best numbers until their weights reach the target: the last one kept is the first with which they do.
template <class Weight>
__device__ void keep_best(float *values, int count, float most, const Weight &weigh, Exchange &exchange, int &turn) {
  // A first look, so that the digits are counted over few numbers: the stretch in which the threshold lies, at the latest.
  u64 sums[DIGITS] = {};
  for (int i = threadIdx.x; i < count; i += THREADS) {
    const float value = values[i];
    const u64 weight = weigh(value);
    const int mine = stretch(value, most);
#pragma unroll
    for (int digit = 0; digit < 8; ++digit) sums[digit] += digit == mine ? weight : 0;
  }
  add_up(sums, exchange, turn);
  u64 all = 0, reached = 0;
  for (int digit = 0; digit < 8; ++digit) all += exchange.total[digit];
  const u64 target = weigh.target(all);
  int far = 0;
  for (; far < 7; ++far)
    if ((reached += exchange.total[far]) >= target) break;
  u32 found = 0;
  u64 above = 0, tied = 0;
  int last = 0;
  for (int shift = 28; shift >= 0; shift -= 4) {
#pragma unroll
    for (int digit = 0; digit < DIGITS; ++digit) sums[digit] = 0;
    for (int i = threadIdx.x; i < count; i += THREADS) {
      const float value = values[i];
      const u32 key = ordered(value);
      if (stretch(value, most) > far || (shift < 28 && (key ^ found) >> (shift + 4))) continue;
      const u64 weight = weigh(value);
      const int mine = key >> shift & (DIGITS - 1);
#pragma unroll
      for (int digit = 0; digit < DIGITS; ++digit) sums[digit] += digit == mine ? weight : 0;
    }
    add_up(sums, exchange, turn);
    int digit = DIGITS - 1;
    for (; digit > 0 && above + exchange.total[digit] < target; --digit) above += exchange.total[digit];
    tied = exchange.total[digit];
    last = digit;
    found |= (u32)digit << shift;
  }
  // How many of those at the threshold: for weights that are all alike.
  u64 one = 0;
  one = weigh(number_of(found));
  const u64 wanted = one && target > above ? (target - above + one - 1) / one : 1;
  const u64 ties = one ? tied / one : 0;
  int cut = count;  // places in the slice at which a tie is still kept
  if (one && ties > wanted) {
    u64 before = 0;
    const u32 rank = rank_in_cluster();
    for (u32 r = 0; r < rank; ++r) before += exchange.sums[turn ^ 1][r][last] / one;
    const u64 own = exchange.sums[turn ^ 1][rank][last] / one;
    if (before >= wanted) cut = 0;
    else if (before + own > wanted) {
      if (threadIdx.x < 32) {
        u64 left = wanted - before;
        int first = 0;
        for (;; first += 32) {
          const int i = first + threadIdx.x;
          const u32 hits = __ballot_sync(~0u, i < count && ordered(values[i]) == found);
          const u32 number = __popc(hits);
          if (number >= left) {
            // The left-th set bit.
            u32 rest = hits;
            for (u64 n = 1; n < left; ++n) rest &= rest - 1;
            if (!threadIdx.x) exchange.cut = first + __ffs(rest);
            break;
          }
          left -= number;
        }
      }
      __syncthreads();
      cut = exchange.cut;
    }
  }
  for (int i = threadIdx.x; i < count; i += THREADS) {
    const u32 key = ordered(values[i]);
    if (key < found || (key == found && i >= cut)) values[i] = NOTHING;
  }
  __syncthreads();
}

__device__ __forceinline__ void philox(u32 (&c)[4], u32 k0, u32 k1) {
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const u64 first = (u64)c[0] * 0xD2511F53u, second = (u64)c[2] * 0xCD9E8D57u;
    const u32 c1 = c[1], c3 = c[3];
    c[0] = (u32)(second >> 32) ^ c1 ^ k0;
    c[1] = (u32)second;
    c[2] = (u32)(first >> 32) ^ c3 ^ k1;
    c[3] = (u32)first;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
}

__device__ __forceinline__ float gumbel(u32 word) {
  const float u = ((float)(word >> 9) + 0.5f) * 1.1920928955078125e-07f;
  return -logf(-logf(u));
}

// tokens[row]; logits rows `stride` apart; `slice` (a multiple of 4) numbers for each block.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    sample(const float *logits, const float *temperature, const int *top_k, const float *top_p, const float *min_p,
           const i64 *seed, const i64 *position, i64 *tokens, int width, i64 stride, int slice) {
  extern __shared__ float4 memory[];
  float *values = (float *)memory;
  __shared__ Exchange exchange;
  const auto [row, start, count] = begin(width, slice);
  const float heat = temperature[row];
  const float *mine = logits + row * stride + start;
  u64 best = 0;
  for (int i = threadIdx.x; i < count; i += THREADS) {
    const float value = heat > 0 ? __fdiv_rn(mine[i], heat) : mine[i];
    values[i] = value;
    best = larger(best, better(value, start + i));
  }
  int turn = 0;
  best = largest(best, exchange, turn);
  if (heat > 0) {
    const float most = number_of(best >> 32);
    const int k = top_k[row];
    const float p = top_p[row], least = min_p[row];
    if (most > NOTHING && (k > 0 || p < 1 || least > 0)) {
      if (k > 0 && k < width) keep_best(values, count, most, Ones{k}, exchange, turn);
      if (p < 1) keep_best(values, count, most, Masses{most, p}, exchange, turn);
      if (least > 0)
        for (int i = threadIdx.x; i < count; i += THREADS)
          if (expf(values[i] - most) < least) values[i] = NOTHING;
      __syncthreads();
    }
    best = 0;
    const u64 where = (u64)position[row], key = (u64)seed[row];
    for (int group = threadIdx.x; group * 4 < count; group += THREADS) {
      const int first = group * 4;
      u32 words[4] = {(u32)(start / 4 + group), 0, (u32)where, (u32)(where >> 32)};
      bool any = false;
      for (int i = first; i < min(first + 4, count); ++i) any |= values[i] > NOTHING || values[i] != values[i];
      if (any) philox(words, (u32)key, (u32)(key >> 32));
      for (int i = first; i < min(first + 4, count); ++i)
        best = larger(best, better(any ? values[i] + gumbel(words[i - first]) : NOTHING, start + i));
    }
    best = largest(best, exchange, turn);
  }
  if (!threadIdx.x && !rank_in_cluster()) tokens[row] = (i64)(u32)~(u32)best;
  cluster_barrier();  // no block leaves while another may still write to it
}

// Four numbers of a row from `i` on.
__device__ __forceinline__ float4 four_of(const float *mine, int i) { return *(const float4 *)(mine + i); }
__device__ __forceinline__ float4 four_of(const unsigned short *mine, int i) {
  const uint2 pairs = *(const uint2 *)(mine + i);
  return make_float4(__uint_as_float(pairs.x << 16), __uint_as_float(pairs.x & 0xFFFF0000u), __uint_as_float(pairs.y << 16),
                     __uint_as_float(pairs.y & 0xFFFF0000u));
}
__device__ __forceinline__ float one_of(const float *mine, int i) { return mine[i]; }
__device__ __forceinline__ float one_of(const unsigned short *mine, int i) { return __uint_as_float((u32)mine[i] << 16); }

// The best of each row alone, ties to the lowest id: of each row the token, or (KEYS) a key that orders the bests of ranks, whose
// tokens are numbered from `first` on. Number: float, or the bits of a bfloat16.
template <bool KEYS, typename Number>
__device__ __forceinline__ void find_best(const Number *logits, i64 *found, int width, i64 stride, int slice, int first) {
  __shared__ Exchange exchange;
  const auto [row, start, count] = begin(width, slice);
  const Number *mine = logits + row * stride + start;
  u64 best = 0;
  int turn = 0;
  if (stride % 4 == 0 && (u64)logits % (4 * sizeof(Number)) == 0) {
#pragma unroll 4
    for (int i = 4 * threadIdx.x; i + 3 < count; i += 4 * THREADS) {
      const float4 four = four_of(mine, i);
      best = larger(best, larger(larger(better(four.x, start + i), better(four.y, start + i + 1)),
                                 larger(better(four.z, start + i + 2), better(four.w, start + i + 3))));
    }
    for (int i = count / 4 * 4 + threadIdx.x; i < count; i += THREADS)
      best = larger(best, better(one_of(mine, i), start + i));
  } else {
    for (int i = threadIdx.x; i < count; i += THREADS) best = larger(best, better(one_of(mine, i), start + i));
  }
  best = largest(best, exchange, turn);
  if (!threadIdx.x && !rank_in_cluster()) {
    const u32 id = ~(u32)best;
    if (KEYS) found[row] = (i64)((width > 0 ? best >> 32 << 32 | (u32)~(id + first) : 0) ^ 1ull << 63);
    else found[row] = (i64)id;
  }
  cluster_barrier();
}

extern "C" __global__ void __launch_bounds__(THREADS)
    greedy(const float *logits, i64 *tokens, int width, i64 stride, int slice) {
  find_best<false>(logits, tokens, width, stride, slice, 0);
}
extern "C" __global__ void __launch_bounds__(THREADS)
    greedy_bf16(const unsigned short *logits, i64 *tokens, int width, i64 stride, int slice) {
  find_best<false>(logits, tokens, width, stride, slice, 0);
}
extern "C" __global__ void __launch_bounds__(THREADS)
    greedy_keys(const float *logits, i64 *keys, int width, i64 stride, int slice, int first) {
  find_best<true>(logits, keys, width, stride, slice, first);
}
extern "C" __global__ void __launch_bounds__(THREADS)
    greedy_keys_bf16(const unsigned short *logits, i64 *keys, int width, i64 stride, int slice, int first) {
  find_best<true>(logits, keys, width, stride, slice, first);
}

// One thread per row; a rank's keys are `stride` numbers apart.
extern "C" __global__ void best_of_keys(const i64 *keys, i64 *tokens, int ranks, int rows, int stride) {
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  for (int row = blockIdx.x * blockDim.x + threadIdx.x; row < rows; row += gridDim.x * blockDim.x) {
    i64 best = keys[row];
    for (int rank = 1; rank < ranks; ++rank) best = max(best, keys[(i64)rank * stride + row]);
    tokens[row] = (i64)(u32)~(u32)best;
  }
}

// exp(logit of the row's token - most) / sum of exp(logit - most).
extern "C" __global__ void __launch_bounds__(THREADS)
    likelihood(const float *logits, const i64 *tokens, float *found, int width, i64 stride, int slice) {
  __shared__ Exchange exchange;
  const auto [row, start, count] = begin(width, slice);
  const float *mine = logits + row * stride + start;
  u64 best = 0;
  int turn = 0;
  for (int i = threadIdx.x; i < count; i += THREADS) best = larger(best, better(mine[i], start + i));
  best = largest(best, exchange, turn);
  const float most = number_of(best >> 32);
  float sum = 0;
  for (int i = threadIdx.x; i < count; i += THREADS) sum += expf(mine[i] - most);
  for (int offset = 16; offset; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
  if (threadIdx.x % 32 == 0) exchange.mine[threadIdx.x / 32][1] = __float_as_uint(sum);
  __syncthreads();
  if (!threadIdx.x) {
    sum = 0;
    for (int warp = 0; warp < WARPS; ++warp) sum += __uint_as_float((u32)exchange.mine[warp][1]);
    store_to(&exchange.sums[turn][rank_in_cluster()][1], 0, __float_as_uint(sum));
  }
  cluster_barrier();
  if (!threadIdx.x && !rank_in_cluster()) {
    sum = 0;
    for (int rank = 0; rank < CLUSTER; ++rank) sum += __uint_as_float((u32)exchange.sums[turn][rank][1]);
    found[row] = expf(logits[row * stride + tokens[row]] - most) / sum;
  }
}
