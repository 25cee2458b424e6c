// Exact, deterministic top-k of ragged float32 rows, with the page transform, on clusters of thread blocks.
//
// One cluster of C blocks (C = 1, 2, 4, 8, 16) owns a row; each block owns a contiguous slice of it, each warp a
// contiguous part of the slice, in steps of 128 scores. A score and its position form one integer, its *rank*:
//     rank = order(score) << bits | position,       order: descending scores, NaN last, -0.0 == +0.0
// No two ranks are equal, so "the k smallest ranks" is one set, whatever the bits and whatever the timing.
//
// The quick way reads the row once and keeps only what a sample says may be chosen:
//   1. every block reads the same sample of the row, and takes from it two orders, `low` and `high`, between which the
//      k-th most likely lies
//   2. every warp lists the ranks of its part that are not beyond `high`, and counts them in 256 bins from low to high
//   3. the blocks add their bins into every block's total (remote atomics that signal an mbarrier: one hop), so all know
//      the bin of the k-th rank
//   4. the ranks in that bin go to every block (second hop), which finds the k-th rank by counting
//   5. listed ranks up to it are written in ascending position: offsets are sums of counts that every block now knows
// If the sample misled (fewer than k listed, a list too short, a bin too full), which all blocks see alike after the
// first hop, the row is done again in the exhaustive way, which assumes nothing:
//   1. a 4096-bin histogram of the top 12 bits of `order`, added up over the cluster
//   2. while the bin of the k-th rank holds more than CANDIDATES ranks, the next digit of those ranks is counted in the
//      same way: at last digits of the position, so the loop always ends
//   3. as 4 and 5 above
// Orders stay in shared memory while they fit; others are read again where the least order of a step can matter.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

#ifndef THREADS
#define THREADS 512
#endif

constexpr int WARPS = THREADS / 32;
constexpr int WARP_BITS = WARPS == 8 ? 3 : WARPS == 16 ? 4 : 5;
static_assert(1 << WARP_BITS == WARPS, "256, 512 or 1024 threads");
constexpr int BITS = 12, BINS = 1 << BITS;  // a digit of the histogram that blocks exchange
constexpr int CANDIDATES = 2048;            // ranks of the boundary bin that a block resolves by itself
constexpr int FINE_BITS = 10, FINE = 1 << FINE_BITS;
constexpr int LAST = 64;
constexpr int STEP = 128, QUADS = 32;  // scores that a warp reads at once: a float4 in each lane
constexpr int LEASTS = 512;             // steps (or groups of steps) per warp whose least order is remembered
constexpr int PAGES = 1024;             // page table entries of a slice kept in shared memory
constexpr int MAX_CLUSTER = 16;
constexpr int POSITION_DIGIT = 11;      // 2^11 positions cannot hold more than CANDIDATES ranks
static_assert((1 << POSITION_DIGIT) <= CANDIDATES, "the last round must leave a bin that fits");
static_assert(BINS % THREADS == 0 && FINE % THREADS == 0, "bins divide over the threads");

struct Found {
  u32 bin, above, count;
};

struct Shared {
  u32 histogram[BINS];
  union {
    u32 total[BINS];
    u64 mine[CANDIDATES];
  };
  u64 all[CANDIDATES];
  u64 last[LAST];
  u32 fine[FINE];
  u32 pages[PAGES];
  u16 leasts[WARPS * LEASTS];
  u32 warp_sum[2][32];
  u32 above_of_warp[32], chosen_of_warp[32];
  u32 above_of_block[MAX_CLUSTER];
  Found found;
  u32 first_bin, mine_count, last_count, before, offset;
  u64 threshold;
};

static_assert(sizeof(Shared) <= SHARED_BYTES, "SHARED_BYTES is what the launch reserves before the kept orders");

__device__ __forceinline__ u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }
__device__ __forceinline__ u32 remote(u32 address, u32 block) {
  u32 mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(block));
  return mapped;
}
__device__ __forceinline__ void remote_add(u32 address, u32 value) {
  asm volatile("red.relaxed.cluster.shared::cluster.add.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
__device__ __forceinline__ void remote_store(u32 address, u32 value) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
__device__ __forceinline__ void remote_store(u32 address, u64 value) {
  asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(address), "l"(value) : "memory");
}
__device__ __forceinline__ u32 remote_load(u32 address) {
  u32 value;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}
__device__ __forceinline__ void cluster_arrive() {
  __syncwarp();  // the barrier is asked for by whole warps
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  __syncwarp();
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ u32 add_all(u32 value) { return __reduce_add_sync(0xFFFFFFFFu, value); }

// Descending order of a score as an ascending integer. x + 0.0f turns -0.0 into +0.0 and any NaN into 0x7FFFFFFF.
__device__ __forceinline__ u32 order_of(float score) {
  int bits = __float_as_int(score + 0.0f);
  u32 order = static_cast<u32>(bits ^ (~(bits >> 31) & 0x7FFFFFFF));
  return order < 0x007FFFFFu ? 0xFFFFFFFFu : order;
}

// Scores at `at` where `valid`, otherwise NaN. No branch: a branch would wait for its load before the next one starts.
__device__ __forceinline__ float4 read4(const float* at, bool valid) {
  float4 v;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n"
      "mov.b32 %0, 0x7FFFFFFF;\nmov.b32 %1, 0x7FFFFFFF;\nmov.b32 %2, 0x7FFFFFFF;\nmov.b32 %3, 0x7FFFFFFF;\n"
      "@p ld.global.nc.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];\n}"
      : "=&f"(v.x), "=&f"(v.y), "=&f"(v.z), "=&f"(v.w)
      : "l"(at), "r"(static_cast<u32>(valid)));
  return v;
}
__device__ __forceinline__ float read1(const float* at, bool valid) {
  float v;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\nmov.b32 %0, 0x7FFFFFFF;\n"
      "@p ld.global.nc.L1::no_allocate.f32 %0, [%1];\n}"
      : "=&f"(v)
      : "l"(at), "r"(static_cast<u32>(valid)));
  return v;
}

#ifdef PROFILE
#define MARK(n) \
  if (threadIdx.x == 0) profile[(blockIdx.x) * 16 + (n)] = clock64();
#else
#define MARK(n)
#endif

// The bin of `counts` [N] in which the `rank`-th (from 1) count lies, the counts above it and its own, into s.found.
// Where all counts together are fewer, bin N - 1. Two barriers; `turn` alternates between two sets of partial sums.
template <int N>
__device__ __forceinline__ void find(Shared& s, const u32* counts, u32 rank, int turn) {
  constexpr int EACH = N / THREADS > 0 ? N / THREADS : 1;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u32 mine[EACH], sum = 0;
  if constexpr (EACH % 4 == 0) {
    const uint4* quads = reinterpret_cast<const uint4*>(counts) + threadIdx.x * (EACH / 4);
#pragma unroll
    for (int i = 0; i < EACH / 4; i++) {
      uint4 quad = quads[i];
      mine[4 * i] = quad.x, mine[4 * i + 1] = quad.y, mine[4 * i + 2] = quad.z, mine[4 * i + 3] = quad.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < EACH; i++) mine[i] = counts[threadIdx.x * EACH + i];
  }
#pragma unroll
  for (int i = 0; i < EACH; i++) sum += mine[i];
  u32 inclusive = sum;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    u32 other = __shfl_up_sync(0xFFFFFFFFu, inclusive, distance);
    if (lane >= distance) inclusive += other;
  }
  if (lane == 31) s.warp_sum[turn][warp] = inclusive;
  __syncthreads();
  u32 sums = lane < WARPS ? s.warp_sum[turn][lane] : 0;
  u32 above = add_all(lane < warp ? sums : 0) + inclusive - sum;
  if (above == 0 && sum) s.first_bin = threadIdx.x * EACH;
  bool crosses = above < rank && above + sum >= rank;
  if (threadIdx.x == THREADS - 1 && above + sum < rank) s.found = {N - 1, above + sum, 0};
  if (crosses) {
    u32 bin = threadIdx.x * EACH, count = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++)
      if (above < rank && above + mine[i] >= rank && count == 0) {
        bin = threadIdx.x * EACH + i, count = mine[i];
        break;
      } else {
        above += mine[i];
      }
    s.found = {bin, above, count};
  }
  __syncthreads();
}

struct Slice {
  const float* row;
  u32 length, first, steps;   // of the warp: steps [first, first + steps)
  u32 kept, group;            // how many of them stay in shared memory; steps per remembered least order beyond
};

// The four orders of one step in this lane. Beyond the row: 0xFFFFFFFF, which is never counted (see `within`).
__device__ __forceinline__ uint4 orders_of(float4 v) {
  return make_uint4(order_of(v.x), order_of(v.y), order_of(v.z), order_of(v.w));
}

// Four scores of a step. Those beyond the row, in its last four, are whatever is there: see `within`.
__device__ __forceinline__ float4 read_step(const Slice& w, u32 step) {
  const u32 position = step * STEP + threadIdx.x % 32 * 4;
  return read4(w.row + position, position < w.length);
}
__device__ __forceinline__ float4 within(const Slice& w, u32 step, float4 v) {
  const float nan = __int_as_float(0x7FFFFFFF);
  if ((step + 1) * STEP > w.length) {
    const u32 position = step * STEP + threadIdx.x % 32 * 4;
    if (position + 1 >= w.length) v.y = nan;
    if (position + 2 >= w.length) v.z = nan;
    if (position + 3 >= w.length) v.w = nan;
  }
  return v;
}

// Calls visit(order, position) for every score of the warp's part whose step can hold an order of top digit <= bin.
template <typename Visit>
__device__ __forceinline__ void for_each(const Slice& w, const uint4* kept, const u16* leasts, u32 bin, Visit visit) {
  const int lane = threadIdx.x % 32;
  for (u32 i = 0; i < w.steps; i++) {
    uint4 orders;
    if (i < w.kept) {
      orders = kept[i * QUADS + lane];
    } else {
      if (leasts[(i - w.kept) / w.group] > bin) continue;
      orders = orders_of(within(w, w.first + i, read_step(w, w.first + i)));
    }
    visit(orders, (w.first + i) * STEP + lane * 4);
  }
}

struct Row {
  const float* scores;
  const int* table;
  int* out;
  u32 length, k, rank, size, blocks;  // of the cluster: my rank, its size, and how many of its blocks have work
  int block_bits;                     // log2(blocks)
  u32 block_first, block_steps;       // steps of my slice
};

__device__ __forceinline__ Slice slice_of(const Row& r) {
  const int warp = threadIdx.x / 32;
  Slice w;
  w.row = r.scores, w.length = r.length;
  w.first = r.block_first + r.block_steps * warp / WARPS;
  w.steps = r.block_first + r.block_steps * (warp + 1) / WARPS - w.first;
  w.kept = w.group = 0;
  return w;
}

// The warp of my block to which a position of my slice belongs.
__device__ __forceinline__ u32 warp_of(const Row& r, u32 position) {
  return ((position / STEP - r.block_first + 1) * WARPS - 1) / r.block_steps;
}

__device__ __noinline__ void select_exhaustively(const Row r, unsigned char* memory, u32 memory_bytes) {
  Shared& s = *reinterpret_cast<Shared*>(memory);
  uint4* keys = reinterpret_cast<uint4*>(memory + SHARED_BYTES);
  const u32 kept_per_warp = (memory_bytes - SHARED_BYTES) / (WARPS * STEP * 4);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const u32 length = r.length, k = r.k, rank = r.rank, size = r.size, blocks = r.blocks;
  const u32 block_first = r.block_first, block_steps = r.block_steps;
  const int* table = r.table;
  int* out = r.out;
  const bool shared_row = blocks > 1;
  const u32 parts = max(1u, WARPS / size);  // of the warps, for each block that they send to
  __syncthreads();  // the memory was the quick way's
  for (int i = threadIdx.x; i < BINS / 4; i += THREADS) {
    reinterpret_cast<uint4*>(s.histogram)[i] = make_uint4(0, 0, 0, 0);
    reinterpret_cast<uint4*>(s.total)[i] = make_uint4(0, 0, 0, 0);
  }
  for (int i = threadIdx.x; i < FINE / 4; i += THREADS) reinterpret_cast<uint4*>(s.fine)[i] = make_uint4(0, 0, 0, 0);
  if (threadIdx.x < 32) s.chosen_of_warp[threadIdx.x] = 0;
  if (threadIdx.x == 0) s.mine_count = s.last_count = s.before = s.first_bin = 0;
  __syncthreads();
  if (shared_row) cluster_arrive();  // my counters are zero: others may add to them

  // ---- 1. the row
  Slice w = slice_of(r);
  w.kept = min(w.steps, kept_per_warp);
  w.group = (w.steps - w.kept + LEASTS - 1) / LEASTS;
  uint4* kept = keys + warp * kept_per_warp * QUADS;
  u16* leasts = s.leasts + warp * LEASTS;
  const u32 first_page = block_first * STEP / 64, num_pages = min(block_steps * STEP / 64, (length + 63) / 64 - first_page);
  const bool pages_kept = num_pages <= PAGES;

  constexpr int AHEAD = 4;
  float4 next[AHEAD];
#pragma unroll
  for (int j = 0; j < AHEAD; j++)
    if (j < w.steps) next[j] = read_step(w, w.first + j);
  if (pages_kept)
    for (u32 i = threadIdx.x; i < num_pages; i += THREADS) s.pages[i] = table[first_page + i];
  for (u32 i = 0; i < w.steps; i += AHEAD) {
#pragma unroll
    for (int j = 0; j < AHEAD; j++) {
      if (i + j >= w.steps) break;
      const float4 now = next[j];
      if (i + j + AHEAD < w.steps) next[j] = read_step(w, w.first + i + j + AHEAD);
      const u32 step = w.first + i + j;
      const uint4 orders = orders_of(within(w, step, now));
      if ((step + 1) * STEP <= length) {
        atomicAdd(&s.histogram[orders.x >> (32 - BITS)], 1);
        atomicAdd(&s.histogram[orders.y >> (32 - BITS)], 1);
        atomicAdd(&s.histogram[orders.z >> (32 - BITS)], 1);
        atomicAdd(&s.histogram[orders.w >> (32 - BITS)], 1);
      } else {
        const u32 position = step * STEP + lane * 4;
        if (position < length) atomicAdd(&s.histogram[orders.x >> (32 - BITS)], 1);
        if (position + 1 < length) atomicAdd(&s.histogram[orders.y >> (32 - BITS)], 1);
        if (position + 2 < length) atomicAdd(&s.histogram[orders.z >> (32 - BITS)], 1);
        if (position + 3 < length) atomicAdd(&s.histogram[orders.w >> (32 - BITS)], 1);
      }
      if (i + j < w.kept) {
        kept[(i + j) * QUADS + lane] = orders;
      } else {
        u32 least = __reduce_min_sync(0xFFFFFFFFu, min(min(orders.x, orders.y), min(orders.z, orders.w))) >> (32 - BITS);
        u32 at = i + j - w.kept;
        if (lane == 0) leasts[at / w.group] = at % w.group ? min(static_cast<u32>(leasts[at / w.group]), least) : least;
      }
    }
  }
  __syncthreads();

  // ---- 2, 3. the bin of the k-th rank
  const u32 position_bits = 32 - __clz(length - 1);
  u32 remaining = 32 - BITS + position_bits;  // bits of a rank below those that are settled
  u32 wanted = k;                             // which of the ranks that share the settled bits
  u32 order_prefix = 0, position_prefix = 0, order_shift = 32 - BITS, position_shift = 31;
  u32 top_bin = BINS - 1, bin, count;
  bool again = false;
  do {
    if (again) {
      for (int i = threadIdx.x; i < BINS / 4; i += THREADS) {
        reinterpret_cast<uint4*>(s.histogram)[i] = make_uint4(0, 0, 0, 0);
        reinterpret_cast<uint4*>(s.total)[i] = make_uint4(0, 0, 0, 0);
      }
      if (threadIdx.x == 0) s.first_bin = 0;
      __syncthreads();
      if (shared_row) cluster_arrive();
      const u32 old_order_shift = order_shift;
      u32 width;
      if (order_shift) {
        width = min(order_shift, static_cast<u32>(BITS));
        order_shift -= width;
      } else {
        width = remaining - POSITION_DIGIT;
        position_shift = POSITION_DIGIT;
      }
      remaining -= width;
      for_each(w, kept, leasts, top_bin, [&](uint4 orders, u32 position) {
        const u32 four[4] = {orders.x, orders.y, orders.z, orders.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
          if (four[j] >> old_order_shift != order_prefix || position + j >= length) continue;
          u32 digit = old_order_shift ? (four[j] >> order_shift) & ((1u << width) - 1) : (position + j) >> position_shift;
          atomicAdd(&s.histogram[digit], 1);
        }
      });
      __syncthreads();
    }
    if (shared_row) {
      find<BINS>(s, s.histogram, wanted, 0);  // nothing beyond the bin where I alone have enough can matter
      const u32 first = s.first_bin, last = s.found.bin;
      cluster_wait();
      for (u32 target = warp % size; target < size; target += WARPS) {
        const u32 to = remote(shared_address(s.total), target);
        for (u32 i = first + warp / size * 32 + lane; i <= last; i += parts * 32) {
          const u32 value = s.histogram[i];
          if (value) remote_add(to + i * 4, value);
        }
      }
      cluster_arrive();
      cluster_wait();
      find<BINS>(s, s.total, wanted, 1);
    } else {
      find<BINS>(s, s.histogram, wanted, 1);
    }
    bin = s.found.bin, count = s.found.count;
    wanted -= s.found.above;
    if (position_shift < 31) {
      position_prefix = bin;
    } else {
      order_prefix = order_shift == 32 - BITS ? bin : order_prefix << (order_shift ? BITS : 32 - 2 * BITS) | bin;
    }
    if (!again) top_bin = bin;
    again = true;
  } while (count > CANDIDATES);

  // ---- 4. the ranks of the boundary bin, to every block
  if (shared_row && warp == 0) {
    const u32 held = lane < blocks ? remote_load(remote(shared_address(&s.histogram[bin]), lane)) : 0;
    const u32 offset = add_all(lane < rank ? held : 0);
    if (lane == 0) s.offset = offset;
  }
  u64* candidates = shared_row ? s.mine : s.all;
  u32 num_above = 0;
  for_each(w, kept, leasts, top_bin, [&](uint4 orders, u32 position) {
    const u32 four[4] = {orders.x, orders.y, orders.z, orders.w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const u32 prefix = four[j] >> order_shift;
      if (prefix > order_prefix || position + j >= length) continue;
      if (prefix < order_prefix) {
        num_above++;
        continue;
      }
      const u32 place = (position + j) >> position_shift;
      if (place < position_prefix) num_above++;
      if (place == position_prefix)
        candidates[atomicAdd(&s.mine_count, 1)] = static_cast<u64>(four[j]) << position_bits | (position + j);
    }
  });
  num_above = add_all(num_above);
  if (lane == 0) s.above_of_warp[warp] = num_above;
  __syncthreads();
  if (shared_row) {
    const u32 block_above = add_all(lane < WARPS ? s.above_of_warp[lane] : 0);
    for (u32 target = warp % size; target < size; target += WARPS) {
      const u32 to = remote(shared_address(s.all + s.offset), target);
      for (u32 i = warp / size * 32 + lane; i < s.mine_count; i += parts * 32) remote_store(to + i * 8, s.mine[i]);
      if (lane == 0) remote_store(remote(shared_address(&s.above_of_block[rank]), target), block_above);
    }
    cluster_arrive();
    cluster_wait();
  }

  // the k-th rank itself
  u64 prefix = order_shift == 0 && position_shift < 31 ? static_cast<u64>(order_prefix) << (position_bits - position_shift) | position_prefix
                                                       : order_prefix;
  u32 held = count;
  const u64* small = s.all;
  if (held > LAST) {
    int turn = 0;
    while (true) {
      const u32 width = min(remaining, static_cast<u32>(FINE_BITS)), shift = remaining - width;
      for (u32 i = threadIdx.x; i < count; i += THREADS)
        if (s.all[i] >> remaining == prefix) atomicAdd(&s.fine[(s.all[i] >> shift) & ((1u << width) - 1)], 1);
      __syncthreads();
      find<FINE>(s, s.fine, wanted, turn);
      turn ^= 1;
      wanted -= s.found.above, held = s.found.count;
      prefix = prefix << width | s.found.bin;
      remaining = shift;
      if (held <= LAST) break;
      for (int i = threadIdx.x; i < FINE / 4; i += THREADS) reinterpret_cast<uint4*>(s.fine)[i] = make_uint4(0, 0, 0, 0);
      __syncthreads();
    }
    for (u32 i = threadIdx.x; i < count; i += THREADS)
      if (s.all[i] >> remaining == prefix) s.last[atomicAdd(&s.last_count, 1)] = s.all[i];
    small = s.last;
    __syncthreads();
  }
  if (threadIdx.x < held) {
    const u64 own = small[threadIdx.x];
    u32 below = 0;
    for (u32 i = 0; i < held; i++) below += small[i] < own;
    if (below + 1 == wanted) s.threshold = own;
  }
  __syncthreads();
  const u64 threshold = s.threshold;

  // ---- 5. the chosen, in ascending position
  const u32 mask = (1u << position_bits) - 1, block_start = block_first * STEP, block_end = block_start + block_steps * STEP;
  for (u32 i = threadIdx.x; i < count; i += THREADS) {
    if (s.all[i] > threshold) continue;
    const u32 position = static_cast<u32>(s.all[i]) & mask;
    if (position < block_start) {
      atomicAdd(&s.before, 1);
    } else if (position < block_end) {
      atomicAdd(&s.chosen_of_warp[warp_of(r, position)], 1);
    }
  }
  __syncthreads();
  u32 base = lane < warp ? s.above_of_warp[lane] + s.chosen_of_warp[lane] : 0;
  if (shared_row && lane < rank) base += s.above_of_block[lane];
  base = add_all(base) + s.before;
  const u32 last_order = static_cast<u32>(threshold >> position_bits), last_position = static_cast<u32>(threshold) & mask;
  const u32 below_lane = (1u << lane) - 1;
  for_each(w, kept, leasts, top_bin, [&](uint4 orders, u32 position) {
    const u32 four[4] = {orders.x, orders.y, orders.z, orders.w};
    bool chosen[4];
    u32 votes[4], at = base;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      chosen[j] = four[j] < last_order || (four[j] == last_order && position + j <= last_position);
      votes[j] = __ballot_sync(0xFFFFFFFFu, chosen[j]);
      at += __popc(votes[j] & below_lane);
      base += __popc(votes[j]);
    }
    if (chosen[0] || chosen[1] || chosen[2] || chosen[3]) {
      const u32 page = position >> 6;
      const int physical = pages_kept ? static_cast<int>(s.pages[page - first_page]) : table[page];
#pragma unroll
      for (int j = 0; j < 4; j++)
        if (chosen[j]) out[at++] = physical << 6 | static_cast<int>((position + j) & 63);
    }
  });
}

// ---------------------------------------------------------------- the quick way

constexpr int QUICK_BINS = 256;
constexpr int CROWD = 128;       // ranks of the boundary bin, over the whole row
constexpr int BLOCK_CROWD = 128; // the same of one block: all of them may be in one
constexpr int MOST_SAMPLES = 4;  // of a thread
constexpr int GROUPS = 32;       // of samples

struct Quick {
  u64 arrived[2];  // mbarriers: the bins of all blocks, the boundary ranks of all blocks
  u32 bins[QUICK_BINS];
  uint4 total[QUICK_BINS / 8 + 1];  // two bins in a word; then one word that counts blocks whose lists are too short
  uint4 group[GROUPS / 4];
  u64 crowd[CROWD];                   // the ranks in the boundary bin, block by block
  u64 head[MAX_CLUSTER];              // of each block: ranks above the boundary bin << 32 | ranks in it
  u64 sent[MAX_CLUSTER][BLOCK_CROWD]; // of each block: its ranks in the boundary bin
  u64 mine[BLOCK_CROWD];
  u32 warp_of_mine[CROWD];
  u32 above_of_warp[32], chosen_of_warp[32];
  u32 mine_count, too_short, before, listed;
  float worst;       // the least score that is listed
  u32 low, scale;    // orders map to bins
  u32 bin, count, wanted;
  u64 threshold;
  u32 pages[PAGES];
};
static_assert(sizeof(Quick) <= QUICK_BYTES, "QUICK_BYTES is what the launch reserves before the lists");

__device__ __forceinline__ void remote_arrive(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void async_add(u32 address, u32 value, u32 barrier) {
  asm volatile("red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%0], %1, [%2];" ::"r"(address),
               "r"(value), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void async_store(u32 address, u32 value, u32 barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address), "r"(value),
               "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void async_store(u32 address, u64 value, u32 barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(address), "l"(value),
               "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void wait_for(u32 barrier) {
  u32 done;
  do {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;\nselp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier)
        : "memory");
  } while (!done);
}

struct Places {
  u32 high, low;
};

// Which of the groups' bests, from 0, are beyond the k-th and before it, as good as always.
__device__ __forceinline__ Places places_of(float chosen_in_group) {
  // A group's best is among the chosen with this probability; so many groups' bests are, give or take.
  const float share = 1.0f - exp2f(-1.442695f * chosen_in_group), mean = GROUPS * share;
  const float spread = __fsqrt_rn(mean * (1.0f - share));
  return {static_cast<u32>(min(GROUPS - 1.0f, ceilf(mean + 4.0f * spread))),
          static_cast<u32>(max(0.0f, floorf(mean - 3.5f * spread) - 1.0f))};
}

// From the best of each group of samples: which scores to list, and how their orders map to bins. One warp.
__device__ __forceinline__ void cut(Quick& s, Places places, bool list_all) {
  const u32 lane = threadIdx.x % 32;
  const u32 own = reinterpret_cast<const u32*>(s.group)[lane] & ~31u | lane;  // no two alike
  u32 place = 0;
#pragma unroll
  for (int i = 0; i < GROUPS / 4; i++) {
    const uint4 v = s.group[i];
    place += ((v.x & ~31u | 4 * i) < own) + ((v.y & ~31u | 4 * i + 1) < own) + ((v.z & ~31u | 4 * i + 2) < own) +
             ((v.w & ~31u | 4 * i + 3) < own);
  }
  const u32 high = __reduce_max_sync(0xFFFFFFFFu, place == places.high ? own | 31 : 0);
  const u32 low = __reduce_max_sync(0xFFFFFFFFu, place == places.low ? own & ~31u : 0);
  if (lane == 0) {
    s.worst = list_all ? __int_as_float(0xFF800000) : __uint_as_float(high < 0x80000000u ? high ^ 0x7FFFFFFFu : high);
    s.low = low;
    s.scale = high - low < QUICK_BINS - 2
                  ? 0
                  : __float2uint_rz(__fdividef(4294967296.0f * (QUICK_BINS - 2), static_cast<float>(high - low) * 1.000001f + 1.0f));
  }
}

// The bin of the k-th among the summed bins, into s.bin, s.count (0xFFFFFFFF: none, or the lists cannot be trusted) and
// s.wanted (its place in the bin). One warp.
__device__ __forceinline__ void find_bin(Quick& s, bool packed, u32 k, u32 too_short) {
  const u32 lane = threadIdx.x % 32;
  u32 upto[8];  // counts up to each of my bins
  if (packed) {
    const uint4 words = s.total[lane];
    upto[0] = words.x & 0xFFFF, upto[1] = words.x >> 16, upto[2] = words.y & 0xFFFF, upto[3] = words.y >> 16;
    upto[4] = words.z & 0xFFFF, upto[5] = words.z >> 16, upto[6] = words.w & 0xFFFF, upto[7] = words.w >> 16;
  } else {
    const uint4* bins = reinterpret_cast<const uint4*>(s.bins);
    const uint4 first = bins[2 * lane], second = bins[2 * lane + 1];
    upto[0] = first.x, upto[1] = first.y, upto[2] = first.z, upto[3] = first.w;
    upto[4] = second.x, upto[5] = second.y, upto[6] = second.z, upto[7] = second.w;
  }
#pragma unroll
  for (int distance = 1; distance < 8; distance *= 2)
#pragma unroll
    for (int i = 7; i >= distance; i--) upto[i] += upto[i - distance];
  u32 above = upto[7];
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const u32 other = __shfl_up_sync(0xFFFFFFFFu, above, distance);
    if (lane >= distance) above += other;
  }
  if (lane == 31 && (above < k || too_short)) s.count = 0xFFFFFFFFu;
  const u32 after = above;
  above -= upto[7];
  if (!too_short && above < k && after >= k) {
    u32 passed = 0, last = above, next = after;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const u32 reached = above + upto[i];
      passed += reached < k;
      last = max(last, reached < k ? reached : 0);
      next = min(next, reached < k ? 0xFFFFFFFFu : reached);
    }
    s.bin = lane * 8 + passed, s.count = next - last, s.wanted = k - last;
  }
}

#ifdef PROFILE
#define PROFILE_PARAMETER , long long* profile
#define PROFILE_ARGUMENT , profile
#else
#define PROFILE_PARAMETER
#define PROFILE_ARGUMENT
#endif

// Whether the quick way could choose; the same answer in every block of the cluster.
__device__ __forceinline__ bool select_quickly(const Row& r, unsigned char* memory, u32 memory_bytes, bool cluster PROFILE_PARAMETER) {
  Quick& s = *reinterpret_cast<Quick*>(memory);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const u32 below_lane = (1u << lane) - 1;
  const bool shared_row = r.blocks > 1;
  const u32 list_length = (memory_bytes - QUICK_BYTES) / (WARPS * 8);
  uint2* list = reinterpret_cast<uint2*>(memory + QUICK_BYTES) + warp * list_length;

  // ---- 1. the sample, and my first scores. A group is one lane of `group` samples, which lie all over the row.
  const float portion = __fdividef(static_cast<float>(r.k), static_cast<float>(r.length));
  int group_bits = (__float_as_int(__fdividef(0.4f, portion)) >> 23) - 127;
  group_bits = max(0, min(group_bits, WARP_BITS + 2));
  float sampled[MOST_SAMPLES];
#pragma unroll
  for (int i = 0; i < MOST_SAMPLES; i++) {
    const u32 index = (i * WARPS + warp) * 32 + lane;
    sampled[i] = read1(r.scores + __umulhi(index << (27 - group_bits), r.length), i * WARPS + warp < 1 << group_bits);
  }
  // My part of the row: lines of 32 scores, one in each lane.
  const u32 block_lines = min(r.block_steps * (STEP / 32), (r.length + 31) / 32 - r.block_first * (STEP / 32));
  const u32 first_line = r.block_first * (STEP / 32) + block_lines * warp / WARPS;
  const u32 num_lines = r.block_first * (STEP / 32) + block_lines * (warp + 1) / WARPS - first_line;
  u32 position = first_line * 32 + lane;
  const float* at = r.scores + position;
  int left = static_cast<int>(min(r.length, (first_line + num_lines) * 32)) - static_cast<int>(position);
  constexpr int AHEAD = 16;
  float next[AHEAD];
#pragma unroll
  for (int j = 0; j < AHEAD; j++) next[j] = read1(at + j * 32, j * 32 < left);
  const u32 first_page = r.block_first * (STEP / 64);
  const u32 num_pages = min(r.block_steps * (STEP / 64), (r.length + 63) / 64 - first_page);
  const bool pages_kept = num_pages <= PAGES;
  if (pages_kept)
    for (u32 i = threadIdx.x; i < num_pages; i += THREADS) s.pages[i] = r.table[first_page + i];
  if (cluster) cluster_wait();  // every block's counters are zero and its barriers are ready
  if (warp < 1 << group_bits) {
    u32 best = order_of(sampled[0]);
#pragma unroll
    for (int i = 1; i < MOST_SAMPLES; i++) best = min(best, order_of(sampled[i]));
    atomicMin(reinterpret_cast<u32*>(s.group) + lane, best);
  }
  const float chosen_in_group = portion * (1 << group_bits);
  const Places places = places_of(chosen_in_group);
  __syncthreads();
  MARK(2)
  // Where a third or more is chosen all are listed: the sample's end would be too close to the k-th.
  if (warp == 0) cut(s, places, chosen_in_group > 0.41f);
  __syncthreads();
  MARK(3)
  const float worst = s.worst;
  const u32 low = s.low, scale = s.scale;
  auto bin_of = [&](u32 order) -> u32 {
    const u32 offset = order - low;
    return order < low ? 0 : min(1 + (scale ? __umulhi(offset, scale) : offset), static_cast<u32>(QUICK_BINS - 1));
  };

  // ---- 2. the row, once
  u32 listed = 0;
  for (u32 i = 0; i < num_lines; i += AHEAD) {
#pragma unroll
    for (int j = 0; j < AHEAD; j++) {
      const float score = next[j];
      next[j] = read1(at + (AHEAD + j) * 32, (AHEAD + j) * 32 < left);
      const bool take = score >= worst;
      const u32 votes = __ballot_sync(0xFFFFFFFFu, take);
      if (votes) {
        const u32 place = listed + __popc(votes & below_lane);
        if (take && place < list_length) list[place] = make_uint2(__float_as_uint(score), position + j * 32);
        listed += __popc(votes);
      }
    }
    at += AHEAD * 32, position += AHEAD * 32, left -= AHEAD * 32;
  }
  __syncwarp();
  if (lane == 0) atomicAdd(&s.listed, listed);
  if (listed > list_length) {
    s.too_short = 1;
    listed = 0;
  }
  for (u32 i = lane; i < listed; i += 32) {
    const u32 order = order_of(__uint_as_float(list[i].x));
    list[i].x = order;
    atomicAdd(&s.bins[bin_of(order)], 1);
  }
  __syncthreads();
  MARK(4)

  // ---- 3. the bin of the k-th. Each warp sends to one block (or each second one): all of it, or one of `parts` parts.
  const u32 part = warp >> r.block_bits, parts = max(1, WARPS >> r.block_bits);
  if (shared_row) {
    for (u32 to = warp & (r.blocks - 1); to < r.blocks; to += WARPS) {
      const u32 total = remote(shared_address(s.total), to), barrier = remote(shared_address(&s.arrived[0]), to);
      u32 sent = 0;
#pragma unroll 4
      for (u32 i = part * 32 + lane; i < QUICK_BINS / 2; i += parts * 32) {
        const uint2 pair = reinterpret_cast<const uint2*>(s.bins)[i];
        const u32 word = pair.x | pair.y << 16;
        if (word) async_add(total + i * 4, word, barrier);
        sent += __popc(__ballot_sync(0xFFFFFFFFu, word != 0));
      }
      if (lane == 0) {
        // The halves of a word must hold the sums of all blocks.
        const bool unsound = part == 0 && (s.too_short || s.listed > 0xFFFFu >> r.block_bits);
        if (unsound) async_add(total + QUICK_BINS * 2, 1, barrier);
        remote_arrive(barrier, (sent + unsound) * 4);
      }
    }
  }
  if (warp == 0) {
    if (shared_row) wait_for(shared_address(&s.arrived[0]));
    MARK(5)
    find_bin(s, shared_row, r.k, shared_row ? s.total[QUICK_BINS / 8].x : s.too_short);
  }
  __syncthreads();
  MARK(6)
  const u32 bin = s.bin, count = s.count, wanted = s.wanted;
  if (count > CROWD) return false;

  // ---- 4. the k-th
  u32 num_above = 0;
  for (u32 i = lane; i < listed; i += 32) {
    const uint2 own = list[i];
    const u32 its_bin = bin_of(own.x);
    num_above += its_bin < bin;
    if (its_bin == bin) {
      const u32 place = atomicAdd(&s.mine_count, 1);
      (shared_row ? s.mine : s.crowd)[place] = static_cast<u64>(own.x) << 32 | own.y;
      s.warp_of_mine[place] = warp;
    }
  }
  num_above = add_all(num_above);
  if (lane == 0) s.above_of_warp[warp] = num_above;
  __syncthreads();
  MARK(7)
  const u32 mine_count = s.mine_count;
  u32 offset = 0, blocks_above = 0;
  if (shared_row) {
    const u32 block_above = add_all(lane < WARPS ? s.above_of_warp[lane] : 0);
    for (u32 to = warp & (r.blocks - 1); to < r.blocks; to += WARPS) {
      const u32 barrier = remote(shared_address(&s.arrived[1]), to), sent = remote(shared_address(s.sent[r.rank]), to);
      u32 bytes = 0;
      for (u32 i = part * 32; i < mine_count; i += parts * 32) {
        if (i + lane < mine_count) async_store(sent + (i + lane) * 8, s.mine[i + lane], barrier);
        bytes += min(32u, mine_count - i) * 8;
      }
      if (lane == 0) {
        if (part == 0)
          async_store(remote(shared_address(&s.head[r.rank]), to), static_cast<u64>(block_above) << 32 | mine_count, barrier);
        remote_arrive(barrier, bytes + (part == 0) * 8);
      }
    }
    wait_for(shared_address(&s.arrived[1]));
    // The ranks of all blocks side by side; where mine are among them, and how many above the bin are before mine.
    const u64 head = lane < r.blocks ? s.head[lane] : 0;
    const u32 held = static_cast<u32>(head);
    u32 upto = held;
#pragma unroll
    for (int distance = 1; distance < MAX_CLUSTER; distance *= 2) {
      const u32 other = __shfl_up_sync(0xFFFFFFFFu, upto, distance);
      if (lane >= distance) upto += other;
    }
    offset = __shfl_sync(0xFFFFFFFFu, upto - held, r.rank);
    blocks_above = add_all(lane < r.rank ? static_cast<u32>(head >> 32) : 0);
    for (u32 from = warp & (r.blocks - 1); from < r.blocks; from += WARPS) {
      const u32 its_offset = __shfl_sync(0xFFFFFFFFu, upto - held, from), its_count = __shfl_sync(0xFFFFFFFFu, held, from);
      for (u32 i = part * 32 + lane; i < its_count; i += parts * 32) s.crowd[its_offset + i] = s.sent[from][i];
    }
    __syncthreads();
  }
  MARK(8)
  constexpr u32 SHARE = THREADS / CROWD;  // threads that rank one candidate
  if (warp * 32 / SHARE < count) {
    const u32 candidate = threadIdx.x / SHARE;
    const bool valid = candidate < count;
    const u64 own = valid ? s.crowd[candidate] : 0;
    u32 place = 0;
#pragma unroll 4
    for (u32 i = threadIdx.x % SHARE; i < count; i += SHARE) place += s.crowd[i] < own;
#pragma unroll
    for (int distance = 1; distance < SHARE; distance *= 2) place += __shfl_xor_sync(0xFFFFFFFFu, place, distance);
    const bool chosen = valid && place < wanted && threadIdx.x % SHARE == 0;
    if (chosen && place + 1 == wanted) s.threshold = own;
    const u32 before = __popc(__ballot_sync(0xFFFFFFFFu, chosen && candidate < offset));
    if (lane == 0 && before) atomicAdd(&s.before, before);
    if (chosen && candidate - offset < mine_count) atomicAdd(&s.chosen_of_warp[s.warp_of_mine[candidate - offset]], 1);
  }
  __syncthreads();
  MARK(9)

  // ---- 5. the chosen, in ascending position
  const u64 threshold = s.threshold;
  u32 base = lane < warp ? s.above_of_warp[lane] + s.chosen_of_warp[lane] : 0;
  base = add_all(base) + blocks_above + s.before;
  for (u32 i = 0; i < listed; i += 32) {
    const uint2 own = i + lane < listed ? list[i + lane] : make_uint2(0xFFFFFFFFu, 0xFFFFFFFFu);
    const bool chosen = (static_cast<u64>(own.x) << 32 | own.y) <= threshold;
    const u32 votes = __ballot_sync(0xFFFFFFFFu, chosen);
    if (chosen) {
      const u32 page = own.y >> 6;
      const int physical = pages_kept ? static_cast<int>(s.pages[page - first_page]) : r.table[page];
      r.out[base + __popc(votes & below_lane)] = physical << 6 | static_cast<int>(own.y & 63);
    }
    base += __popc(votes);
  }
  MARK(10)
  return true;
}

extern "C" __global__ void __launch_bounds__(THREADS, THREADS == 1024 ? 1 : 2)
    top_k(const float* __restrict__ scores, const int* __restrict__ lengths, const int* __restrict__ page_table,
          const int* __restrict__ request, int* __restrict__ slots, int* __restrict__ counts, const int stride,
          const int table_stride, const int k, const int cluster_bits, const int memory_bytes, const int alone PROFILE_PARAMETER) {
  extern __shared__ __align__(16) unsigned char memory[];
  Quick& s = *reinterpret_cast<Quick*>(memory);
  Row r;
  r.size = 1u << cluster_bits, r.rank = blockIdx.x & (r.size - 1), r.k = k;
  const u32 row = blockIdx.x >> cluster_bits;
  const bool cluster = r.size > 1;
  MARK(0)
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  // What reads nothing of the kernels before.
  for (int i = threadIdx.x; i < QUICK_BINS; i += THREADS) s.bins[i] = 0;
  if (threadIdx.x < 32) {  // what other blocks add to or signal is prepared by one warp, which alone needs the fence
    s.total[threadIdx.x] = make_uint4(0, 0, 0, 0);
    s.chosen_of_warp[threadIdx.x] = 0;
    reinterpret_cast<u32*>(s.group)[threadIdx.x] = 0xFFFFFFFFu;
    if (threadIdx.x == 0) {
      s.total[QUICK_BINS / 8] = make_uint4(0, 0, 0, 0);
      s.mine_count = s.too_short = s.before = s.listed = 0;
      const u32 senders = max(static_cast<u32>(WARPS), r.size);
      for (int i = 0; i < 2; i++)
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&s.arrived[i])), "r"(senders) : "memory");
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
    if (cluster) asm volatile("fence.acq_rel.cluster;" ::: "memory");
  }
  __syncthreads();
  if (cluster) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  MARK(1)
  r.length = max(lengths[row], 0);
  r.table = page_table + static_cast<u64>(request[row]) * table_stride;
  r.out = slots + static_cast<u64>(row) * k;
  r.scores = scores + static_cast<u64>(row) * stride;
  if (r.rank == 0 && threadIdx.x == 0) counts[row] = min(r.length, r.k);
  if (r.length <= r.k) {  // every position, whatever its score
    for (u32 i = r.rank * THREADS + threadIdx.x; i < r.k; i += r.size * THREADS)
      r.out[i] = i < r.length ? r.table[i >> 6] << 6 | static_cast<int>(i & 63) : -1;
    if (cluster) cluster_wait();
    return;
  }
  r.block_bits = r.length <= static_cast<u32>(alone) ? 0 : cluster_bits;
  r.blocks = 1u << r.block_bits;
  if (r.rank >= r.blocks) {
    if (cluster) cluster_wait();
    return;
  }
  const u32 steps = (r.length + STEP - 1) / STEP;
  r.block_first = steps * r.rank >> r.block_bits;
  r.block_steps = (steps * (r.rank + 1) >> r.block_bits) - r.block_first;
  if (!select_quickly(r, memory, memory_bytes, cluster PROFILE_ARGUMENT)) {
    MARK(11)
    select_exhaustively(r, memory, memory_bytes);
    MARK(12)
  }
}
