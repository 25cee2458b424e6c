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
//   2. every warp lists the scores of its part that are not below the lower one, and counts them in 256 bins; a slice of one
//      line a warp stays in registers instead
//   3. the blocks send their bins to every block (one hop: remote stores that signal an mbarrier), so all know the bin of the
//      k-th rank, and how many ranks of it and above it the blocks before them have
//   4. the ranks in that bin go to every block (second hop), which finds the k-th rank by counting
//   5. listed scores up to it are written in ascending position: offsets are sums of counts that every block now knows
// If the sample misled (fewer than k listed, a list too short, a bin too full), which all blocks see alike after the first
// hop, the row is done again in the exhaustive way, which assumes nothing:
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
#ifndef LINES  // of 128 scores that a warp has in flight
#define LINES 4
#endif
#ifndef SHORT_LINES  // that stay in registers
#define SHORT_LINES 1
#endif
#ifndef RESIDENT  // thread blocks that a multiprocessor must hold
#define RESIDENT 2
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

// What both ways keep at the start of the shared memory.
struct Barriers {
  u64 arrived[2];  // the quick way: the bins of all blocks, the boundary ranks of all blocks
  u64 met;         // the exhaustive way: all blocks that share the row
  u32 turn, turns;  // of a plan: which row of mine this is, and how many there are
};

struct Shared {
  Barriers barriers;
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
__device__ __forceinline__ float4 read4(const float* at) {
  float4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(at));
  return v;
}
__device__ __forceinline__ float read1(const float* at) {
  float v;
  asm volatile("ld.global.nc.L1::no_allocate.f32 %0, [%1];" : "=f"(v) : "l"(at));
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

// Blocks that share a row meet at a barrier of their own: the cluster's other blocks are gone.
struct Meeting {
  u32 barrier, first, blocks, arrivals, parity;

  // What my block wrote before is there for whoever waits.
  __device__ __forceinline__ void arrive() const {
    __syncthreads();
    if (threadIdx.x < blocks)
      asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0], %1;" ::"r"(remote(barrier, first + threadIdx.x)), "r"(arrivals)
                   : "memory");
  }
  __device__ __forceinline__ void wait() {
    u32 done;
    do {
      asm volatile(
          "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
          : "=r"(done)
          : "r"(barrier), "r"(parity)
          : "memory");
    } while (!done);
    parity ^= 1;
  }
};

struct Row {
  const float* scores;
  const int* table;
  int* out;
  u32 length, k, rank, blocks;  // how many blocks share the row, neighbours in a cluster, and my rank among them
  int block_bits;               // log2(blocks)
  u32 arrivals;                 // how often a block arrives at `met`, which was made for the whole cluster
  u32 block_first, block_steps;       // steps of my slice
};

// The first of the blocks that share the row, as a block of the cluster.
__device__ __forceinline__ u32 first_of(const Row& r) {
  u32 place;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(place));
  return place - r.rank;
}

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
  const u32 length = r.length, k = r.k, rank = r.rank, blocks = r.blocks;
  const u32 block_first = r.block_first, block_steps = r.block_steps;
  const int* table = r.table;
  int* out = r.out;
  const bool shared_row = blocks > 1;
  const u32 leader = first_of(r);  // of those that share the row
  Meeting meeting = {shared_address(&s.barriers.met), leader, blocks, r.arrivals, 0};
  const u32 parts = max(1u, WARPS >> r.block_bits);  // of the warps, for each block that they send to
  __syncthreads();  // the memory was the quick way's
  for (int i = threadIdx.x; i < BINS / 4; i += THREADS) {
    reinterpret_cast<uint4*>(s.histogram)[i] = make_uint4(0, 0, 0, 0);
    reinterpret_cast<uint4*>(s.total)[i] = make_uint4(0, 0, 0, 0);
  }
  for (int i = threadIdx.x; i < FINE / 4; i += THREADS) reinterpret_cast<uint4*>(s.fine)[i] = make_uint4(0, 0, 0, 0);
  if (threadIdx.x < 32) s.chosen_of_warp[threadIdx.x] = 0;
  if (threadIdx.x == 0) s.mine_count = s.last_count = s.before = s.first_bin = 0;
  __syncthreads();
  if (shared_row) meeting.arrive();  // my counters are zero: others may add to them

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
      if (shared_row) meeting.arrive();
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
      meeting.wait();
      for (u32 target = warp % blocks; target < blocks; target += WARPS) {
        const u32 to = remote(shared_address(s.total), leader + target);
        for (u32 i = first + warp / blocks * 32 + lane; i <= last; i += parts * 32) {
          const u32 value = s.histogram[i];
          if (value) remote_add(to + i * 4, value);
        }
      }
      meeting.arrive();
      meeting.wait();
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
    const u32 held = lane < blocks ? remote_load(remote(shared_address(&s.histogram[bin]), leader + lane)) : 0;
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
    for (u32 target = warp % blocks; target < blocks; target += WARPS) {
      const u32 to = remote(shared_address(s.all + s.offset), leader + target);
      for (u32 i = warp / blocks * 32 + lane; i < s.mine_count; i += parts * 32) remote_store(to + i * 8, s.mine[i]);
      if (lane == 0) remote_store(remote(shared_address(&s.above_of_block[rank]), leader + target), block_above);
    }
    meeting.arrive();
    meeting.wait();
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

constexpr int QUICK_BITS = 8, QUICK_BINS = 1 << QUICK_BITS;
constexpr int CROWD = 512;       // ranks of the boundary bin, over the whole row
constexpr int GROUPS = 32;       // of samples
constexpr int GROUP_BITS = 5;    // log2 of a group's samples, at most: with fewer, one row of 1M in a hundred is misled
constexpr int SAMPLES = (GROUPS << GROUP_BITS) / THREADS > 1 ? (GROUPS << GROUP_BITS) / THREADS : 1;  // of a thread
constexpr int SHORT = SHORT_LINES;         // lines of 128 scores that a warp of a short slice has at most: they stay in registers

constexpr int TOTAL_QUADS = QUICK_BINS / 8 + 2;  // two more, so that threads that add up blocks read other banks

struct __align__(8) Listed {
  float score;
  u32 position;
};

struct Quick {
  Barriers barriers;
  u32 bins[QUICK_BINS];
  uint4 total[MAX_CLUSTER][TOTAL_QUADS];  // of each block: its bins, two in a word
  u32 unsound[MAX_CLUSTER];                  // of each block: whether its bins cannot be trusted
  uint4 group[GROUPS / 4];
  u64 crowd[CROWD];         // the ranks in the boundary bin, block by block
  u32 warp_of_mine[CROWD];  // of those that this block has, from 0: which of its warps has them
  u32 above_of_warp[32], chosen_of_warp[32];
  u32 mine_count, too_short, before;
  u32 blocks_above, offset;  // in the blocks before mine: ranks above the boundary bin, and in it
  u32 high, low;             // orders of two groups' bests
  u32 bin, count, wanted;
  u64 threshold;
  Row row;  // for the exhaustive way, so that the quick one need not keep it in registers
  u32 pages[PAGES];
};
static_assert(SHORT <= LINES, "a short slice is in registers");
static_assert(sizeof(Quick) <= QUICK_BYTES, "QUICK_BYTES is what the launch reserves before the lists");

__device__ __forceinline__ void remote_arrive(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void arrive(u32 barrier, u32 times) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(times) : "memory");
}
__device__ __forceinline__ void async_store(u32 address, u32 value, u32 barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address), "r"(value),
               "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void async_store(u32 address, uint4 value, u32 barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
               "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(barrier)
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
  float beyond;  // how far the bins reach above the best sample, in ranges: few samples may all miss the chosen
};

// Which of the groups' bests, from 0, are beyond the k-th and before it, as good as always.
__device__ __forceinline__ Places places_of(float chosen_in_group) {
  // A group's best is among the chosen with this probability; so many groups' bests are, give or take.
  const float share = 1.0f - exp2f(-1.442695f * chosen_in_group), mean = GROUPS * share;
  const float spread = __fsqrt_rn(mean * (1.0f - share));
  return {static_cast<u32>(min(GROUPS - 1.0f, ceilf(mean + 4.0f * spread))),
          static_cast<u32>(max(0.0f, floorf(mean - 3.5f * spread) - 1.0f)), mean < 2.0f ? 2.0f : mean < 4.0f ? 1.0f : 0.0f};
}

__device__ __forceinline__ float score_of(u32 order) {
  return __uint_as_float(order < 0x80000000u ? order ^ 0x7FFFFFFFu : order);
}

// From the best of each group of samples: which of them bound what is listed, into s.high and s.low. All threads call; others than one
// warp would wait for it.
__device__ __forceinline__ void cut(Quick& s, Places places) {
  constexpr u32 SHARE = THREADS / GROUPS, EACH = GROUPS / SHARE;  // threads that rank one group, others that one compares it with
  const u32* groups = reinterpret_cast<const u32*>(s.group);
  const u32 which = threadIdx.x / SHARE, from = threadIdx.x % SHARE * EACH;
  const u32 own = groups[which] & ~31u | which;  // no two alike
  u32 place = 0;
#pragma unroll
  for (u32 i = 0; i < EACH; i++) place += (groups[from + i] & ~31u | from + i) < own;
#pragma unroll
  for (u32 distance = 1; distance < SHARE; distance *= 2) place += __shfl_xor_sync(0xFFFFFFFFu, place, distance);
  if (threadIdx.x % SHARE == 0) {
    if (place == places.high) s.high = own | 31;
    if (place == places.low) s.low = own & ~31u;
  }
}

// The bin of the k-th among the summed bins, into s.bin, s.count (0xFFFFFFFF: none, or the lists cannot be trusted) and
// s.wanted (its place in the bin); and what the blocks before mine have up to there. All threads call: so many share two bins.
__device__ __forceinline__ void find_bin(Quick& s, u32 blocks, u32 rank, u32 k) {
  constexpr u32 WORDS = QUICK_BINS / 2, SHARE = THREADS / WORDS;
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, word = threadIdx.x / SHARE;
  u32 low, high, before = 0;  // in all blocks; in those before mine, two in a word
  bool unsound;
  if (blocks > 1) {
    const u32* bins = reinterpret_cast<const u32*>(s.total) + word;
    u32 both = 0;
#pragma unroll
    for (u32 i = 0; i < MAX_CLUSTER / SHARE; i++) {
      const u32 block = threadIdx.x % SHARE + i * SHARE;
      const u32 more = block < blocks ? bins[block * TOTAL_QUADS * 4] : 0;
      both += more;
      before += block < rank ? more : 0;
    }
#pragma unroll
    for (u32 distance = 1; distance < SHARE; distance *= 2) {
      both += __shfl_xor_sync(0xFFFFFFFFu, both, distance);
      before += __shfl_xor_sync(0xFFFFFFFFu, before, distance);
    }
    low = both & 0xFFFF, high = both >> 16;
    unsound = __any_sync(0xFFFFFFFFu, lane < blocks && s.unsound[lane % MAX_CLUSTER]);
  } else {
    low = s.bins[2 * word], high = s.bins[2 * word + 1];
    unsound = s.too_short;
  }
  u32 upto = low + high, before_upto = (before & 0xFFFF) + (before >> 16);
#pragma unroll
  for (u32 distance = SHARE; distance < 32; distance *= 2) {
    const u32 other = __shfl_up_sync(0xFFFFFFFFu, upto, distance), other_before = __shfl_up_sync(0xFFFFFFFFu, before_upto, distance);
    if (lane >= distance) upto += other, before_upto += other_before;
  }
  if (lane == 31) s.above_of_warp[warp] = upto, s.chosen_of_warp[warp] = before_upto;
  __syncthreads();
  const u32 warps_upto = lane < warp ? s.above_of_warp[lane] : 0, warps_before = lane < warp ? s.chosen_of_warp[lane] : 0;
  upto += add_all(warps_upto), before_upto += add_all(warps_before);
  const u32 start = upto - low - high;
  if (!unsound && upto >= k && start < k && threadIdx.x % SHARE == 0) {
    const bool second = start + low < k;
    s.bin = 2 * word + second, s.count = second ? high : low, s.wanted = k - start - (second ? low : 0);
    s.offset = second ? before >> 16 : before & 0xFFFF;
    s.blocks_above = before_upto - (before >> 16) - (second ? 0 : before & 0xFFFF);
  }
}

#ifdef PROFILE
#define PROFILE_PARAMETER , long long* profile
#define PROFILE_ARGUMENT , profile
#else
#define PROFILE_PARAMETER
#define PROFILE_ARGUMENT
#endif

// Whether the quick way could choose; the same answer in every block that shares the row. PLANNED: the row's blocks need not be the
// cluster's first.
template <bool PLANNED>
__device__ __forceinline__ bool select_quickly(const Row& r, unsigned char* memory, u32 memory_bytes, bool cluster PROFILE_PARAMETER) {
  Quick& s = *reinterpret_cast<Quick*>(memory);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const u32 below_lane = (1u << lane) - 1;
  const bool shared_row = r.blocks > 1;
  const u32 list_length = (memory_bytes - QUICK_BYTES) / (WARPS * 8);
  Listed* list = reinterpret_cast<Listed*>(memory + QUICK_BYTES) + warp * list_length;

  // ---- 1. the sample, and my first scores. A group is one lane of the samples, which lie all over the row.
  const float portion = __fdividef(static_cast<float>(r.k), static_cast<float>(r.length));
  int group_bits = (__float_as_int(__fdividef(0.4f, portion)) >> 23) - 127;
  group_bits = max(0, min(group_bits, GROUP_BITS));
  float sampled[SAMPLES];
#pragma unroll
  for (int i = 0; i < SAMPLES; i++) {
    const u32 sample = threadIdx.x + i * THREADS;
    sampled[i] = read1(r.scores + __umulhi(sample << (27 - group_bits), r.length), sample < static_cast<u32>(GROUPS << group_bits));
  }
  const u32 block_start = r.block_first * STEP, block_end = min(r.length, (r.block_first + r.block_steps) * STEP);
  const u32 block_length = max(block_end, block_start) - block_start;
  // A warp has consecutive lines of 128 scores, a lane four consecutive ones of each. The lines of a short slice stay in
  // registers; of a long one, what may be chosen is listed as the lines come in.
  const bool is_short = r.block_steps <= SHORT * WARPS;
  const u32 first_line = r.block_steps * warp / WARPS;
  const int num_lines = r.block_steps * (warp + 1) / WARPS - first_line;
  const u32 own_start = block_start + first_line * STEP + lane * 4;
  const float* at = r.scores + own_start;
  float held[4 * LINES];
  auto read_line = [&](int into, int line) {
    const float4 quad = read4(at + line * STEP, line < num_lines && own_start + line * STEP < block_end);
    held[4 * into] = quad.x, held[4 * into + 1] = quad.y, held[4 * into + 2] = quad.z, held[4 * into + 3] = quad.w;
  };
#pragma unroll
  for (int j = 0; j < LINES; j++) read_line(j, j);
  const u32 first_page = r.block_first * (STEP / 64);
  const u32 num_pages = (block_length + 63) / 64;
  const bool pages_kept = num_pages <= PAGES;
  if (pages_kept)
    for (u32 i = threadIdx.x; i < num_pages; i += THREADS) s.pages[i] = r.table[first_page + i];
  const float chosen_in_group = portion * (1 << group_bits);
  const Places places = places_of(chosen_in_group);
  if (cluster) cluster_wait();  // every block's barriers are ready
#pragma unroll
  for (int i = 0; i < SAMPLES; i++)
    if (threadIdx.x + i * THREADS < static_cast<u32>(GROUPS << group_bits))
      atomicMin(reinterpret_cast<u32*>(s.group) + lane, order_of(sampled[i]));
  __syncthreads();
  MARK(2)
  cut(s, places);
  __syncthreads();
  MARK(3)
  // The least score that is listed, and how scores map to bins. Where a third or more is chosen all are listed: the sample's end
  // would be too close to the k-th.
  const float least = score_of(min(s.high, 0xFFFFFFFEu)), low = score_of(s.low), top = low + places.beyond * (low - least);
  const float worst = chosen_in_group > 0.41f ? __int_as_float(0xFF800000) : least;
  const float scale = top > least ? __fdividef(QUICK_BINS - 2.0f, top - least) : 1.0f;
  // Never a lower bin for a lower score: each operation, and its rounding, keeps the order. The last addition leaves the
  // nearest integer in the low bits. Not a number (from infinities) becomes bin 0.
  auto bin_of = [&](float score) -> u32 {
    const float bin = fminf(fmaxf(fmaf(top - score, scale, 1.0f), 0.0f), QUICK_BINS - 1.0f);
    return __float_as_uint(bin + 8388608.0f) & (QUICK_BINS - 1);
  };

  // ---- 2. the row, once
  auto mask_tail = [&](int from, int line) {  // what lies beyond the row is nothing
#pragma unroll
    for (int e = 0; e < 4; e++)
      if (own_start + line * STEP + e >= block_end) held[4 * from + e] = __int_as_float(0x7FFFFFFF);
  };
  u32 listed = 0;
  if (is_short) {
#pragma unroll
    for (int j = 0; j < SHORT; j++)
      if (j < num_lines) {
        if (own_start + j * STEP + 4 > block_end) mask_tail(j, j);
#pragma unroll
        for (int e = 0; e < 4; e++)
          if (held[4 * j + e] >= worst) atomicAdd(&s.bins[bin_of(held[4 * j + e])], 1);
      }
  } else {
    auto list_line = [&](const float (&now)[4], u32 from) {
      u32 votes[4], place = listed;
#pragma unroll
      for (int e = 0; e < 4; e++) votes[e] = __ballot_sync(0xFFFFFFFFu, now[e] >= worst);
      if (!(votes[0] | votes[1] | votes[2] | votes[3])) return;
#pragma unroll
      for (int e = 0; e < 4; e++) place += __popc(votes[e] & below_lane), listed += __popc(votes[e]);
#pragma unroll
      for (int e = 0; e < 4; e++)
        if (now[e] >= worst) {
          if (place < list_length) list[place] = {now[e], from + e};
          place++;
        }
    };
    int i = 0;
    // The last line of a row may be cut short; it is among the last ones, which are looked at more carefully.
    for (; i + 2 * LINES < num_lines; i += LINES) {
#pragma unroll
      for (int j = 0; j < LINES; j++) {
        const float now[4] = {held[4 * j], held[4 * j + 1], held[4 * j + 2], held[4 * j + 3]};
        const float4 quad = read4(at + (i + j + LINES) * STEP);
        held[4 * j] = quad.x, held[4 * j + 1] = quad.y, held[4 * j + 2] = quad.z, held[4 * j + 3] = quad.w;
        list_line(now, own_start + (i + j) * STEP);
      }
    }
    for (; i < num_lines; i += LINES) {
#pragma unroll
      for (int j = 0; j < LINES; j++) {
        if (i + j >= num_lines) break;
        if (own_start + (i + j) * STEP + 4 > block_end) mask_tail(j, i + j);
        const float now[4] = {held[4 * j], held[4 * j + 1], held[4 * j + 2], held[4 * j + 3]};
        read_line(j, i + j + LINES);
        list_line(now, own_start + (i + j) * STEP);
      }
    }
    __syncwarp();
    if (listed > list_length) {
      s.too_short = 1;
      listed = 0;
    }
#pragma unroll 2
    for (u32 i = lane; i < listed; i += 32) atomicAdd(&s.bins[bin_of(list[i].score)], 1);
  }
  __syncthreads();
  MARK(4)

  // ---- 3. the bin of the k-th. A warp sends the bins, two in a word, to each block whose number it has (modulo WARPS).
  if (shared_row && warp < r.blocks) {
    const uint4 first = reinterpret_cast<const uint4*>(s.bins)[2 * lane], second = reinterpret_cast<const uint4*>(s.bins)[2 * lane + 1];
    const u32 most = max(max(max(first.x, first.y), max(first.z, first.w)), max(max(second.x, second.y), max(second.z, second.w)));
    // Half a word must hold the sum of all blocks.
    const u32 unsound = __any_sync(0xFFFFFFFFu, most > 0xFFFFu >> r.block_bits) || s.too_short;
    for (u32 block = warp; block < r.blocks; block += WARPS) {
      const u32 to = PLANNED ? first_of(r) + block : block, barrier = remote(shared_address(&s.barriers.arrived[0]), to);
      async_store(remote(shared_address(&s.total[r.rank][lane]), to),
                  make_uint4(first.x | first.y << 16, first.z | first.w << 16, second.x | second.y << 16, second.z | second.w << 16),
                  barrier);
      if (lane == 0) {
        async_store(remote(shared_address(&s.unsound[r.rank]), to), unsound, barrier);
        remote_arrive(barrier, QUICK_BINS * 2 + 4);
      }
    }
  }
  if (shared_row) wait_for(shared_address(&s.barriers.arrived[0]));
  MARK(5)
  find_bin(s, r.blocks, r.rank, r.k);
  __syncthreads();
  MARK(6)
  const u32 bin = s.bin, count = s.count, wanted = s.wanted;
  if (count > CROWD) return false;

  // ---- 4. the k-th. The ranks of its bin go to every block at once: the bins say how many are before mine.
  const u32 offset = shared_row ? s.offset : 0;
  if (shared_row && threadIdx.x == 0) expect(shared_address(&s.barriers.arrived[1]), count * 8);
  u32 num_above = 0;
  const u32 first = PLANNED ? first_of(r) : 0;
  // The whole warp calls. A lane sends to the block of its number.
  auto place = [&](bool listed_here, float score, u32 its_position) {
    const u32 its_bin = bin_of(score);
    num_above += listed_here && its_bin < bin;
    const bool is = listed_here && its_bin == bin;
    u32 votes = __ballot_sync(0xFFFFFFFFu, is), mine = 0;
    if (!votes) return;
    const u64 its_rank = static_cast<u64>(order_of(score)) << 32 | its_position;
    if (is) {
      mine = atomicAdd(&s.mine_count, 1);
      s.warp_of_mine[mine] = warp;
      if (!shared_row) s.crowd[mine] = its_rank;
    }
    if (!shared_row) return;
    for (; votes; votes &= votes - 1) {
      const int from = __ffs(votes) - 1;
      const u64 sent = __shfl_sync(0xFFFFFFFFu, its_rank, from);
      const u32 at = shared_address(&s.crowd[offset + __shfl_sync(0xFFFFFFFFu, mine, from)]);
      if (lane < r.blocks) async_store(remote(at, first + lane), sent, remote(shared_address(&s.barriers.arrived[1]), first + lane));
    }
  };
  if (is_short) {
#pragma unroll
    for (int j = 0; j < SHORT; j++)
      if (j < num_lines)
#pragma unroll
        for (int e = 0; e < 4; e++) place(held[4 * j + e] >= worst, held[4 * j + e], own_start + j * STEP + e);
  } else {
#pragma unroll 2
    for (u32 i = 0; i < listed; i += 32) {
      const Listed own = i + lane < listed ? list[i + lane] : Listed{0.0f, 0};
      place(i + lane < listed, own.score, own.position);
    }
  }
  num_above = add_all(num_above);
  if (lane == 0) s.above_of_warp[warp] = num_above, s.chosen_of_warp[warp] = 0;
  __syncthreads();
  MARK(7)
  if (shared_row) wait_for(shared_address(&s.barriers.arrived[1]));
  MARK(8)
  // Eight threads rank one candidate.
  constexpr u32 SHARE = 8, AT_ONCE = THREADS / SHARE;
  for (u32 from = 0; from < count; from += AT_ONCE) {
    if (from + warp * (32 / SHARE) >= count) break;
    const u32 which = from + threadIdx.x / SHARE;
    const u64 own = which < count ? s.crowd[which] : ~0ull;
    u32 place = 0;
#pragma unroll 4
    for (u32 i = threadIdx.x % SHARE; i < count; i += SHARE) place += s.crowd[i] < own;
#pragma unroll
    for (int distance = 1; distance < SHARE; distance *= 2) place += __shfl_xor_sync(0xFFFFFFFFu, place, distance);
    const bool chosen = which < count && place < wanted && threadIdx.x % SHARE == 0;
    if (chosen && place + 1 == wanted) s.threshold = own;
    const u32 before = __popc(__ballot_sync(0xFFFFFFFFu, chosen && which < offset));
    if (lane == 0 && before) atomicAdd(&s.before, before);
    if (chosen && which - offset < s.mine_count) atomicAdd(&s.chosen_of_warp[s.warp_of_mine[which - offset]], 1);
  }
  __syncthreads();
  MARK(9)

  // ---- 5. the chosen, in ascending position
  const u64 threshold = s.threshold;
  u32 base = lane < warp ? s.above_of_warp[lane] + s.chosen_of_warp[lane] : 0;
  base = add_all(base) + s.before + (shared_row ? s.blocks_above : 0);
  auto write = [&](u32 place, u32 its_position) {
    const u32 page = its_position >> 6;
    const int physical = pages_kept ? static_cast<int>(s.pages[page - first_page]) : r.table[page];
    r.out[place] = physical << 6 | static_cast<int>(its_position & 63);
  };
  const float last_score = score_of(static_cast<u32>(threshold >> 32));
  const u32 last_position = static_cast<u32>(threshold);
  if (is_short) {
#pragma unroll
    for (int j = 0; j < SHORT; j++) {
      if (j >= num_lines) break;
      const u32 position = own_start + j * STEP;
      u32 votes[4], to = base;
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const float score = held[4 * j + e];
        votes[e] = __ballot_sync(0xFFFFFFFFu, score > last_score || (score == last_score && position + e <= last_position));
        to += __popc(votes[e] & below_lane);
        base += __popc(votes[e]);
      }
#pragma unroll
      for (int e = 0; e < 4; e++)
        if (votes[e] >> lane & 1) write(to++, position + e);
    }
  } else {
    for (u32 i = 0; i < listed; i += 32) {
      const Listed own = i + lane < listed ? list[i + lane] : Listed{__int_as_float(0x7FFFFFFF), 0};
      const bool chosen = own.score > last_score || (own.score == last_score && own.position <= last_position);
      const u32 votes = __ballot_sync(0xFFFFFFFFu, chosen);
      if (chosen) write(base + __popc(votes & below_lane), own.position);
      base += __popc(votes);
    }
  }
  MARK(10)
  return true;
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    top_k(const float* __restrict__ scores, const int* __restrict__ lengths, const int* __restrict__ page_table,
          const int* __restrict__ request, int* __restrict__ slots, int* __restrict__ counts, const int stride,
          const int table_stride, const int k, const int cluster_bits, const int memory_bytes, const int share PROFILE_PARAMETER) {
  extern __shared__ __align__(16) unsigned char memory[];
  Quick& s = *reinterpret_cast<Quick*>(memory);
  Row r;
  const u32 size = 1u << cluster_bits;
  r.rank = blockIdx.x & (size - 1), r.k = k;
  const u32 row = blockIdx.x >> cluster_bits;
  const bool cluster = size > 1;
  MARK(0)
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  // What reads nothing of the kernels before.
  for (int i = threadIdx.x; i < QUICK_BINS; i += THREADS) s.bins[i] = 0;
  if (threadIdx.x < 32) {
    s.chosen_of_warp[threadIdx.x] = 0;
    reinterpret_cast<u32*>(s.group)[threadIdx.x] = 0xFFFFFFFFu;
    if (threadIdx.x == 0) {
      s.mine_count = s.too_short = s.before = 0, s.count = 0xFFFFFFFFu;
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&s.barriers.arrived[0])), "r"(size) : "memory");
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&s.barriers.arrived[1])), "r"(1) : "memory");
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&s.barriers.met)), "r"(size) : "memory");
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
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
    for (u32 i = r.rank * THREADS + threadIdx.x; i < r.k; i += size * THREADS)
      r.out[i] = i < r.length ? r.table[i >> 6] << 6 | static_cast<int>(i & 63) : -1;
    if (cluster) cluster_wait();
    return;
  }
  // As many blocks as have `share` scores each: more would wait for one another longer than they read.
  const u32 shares = (r.length - 1) / static_cast<u32>(share);
  r.block_bits = min(cluster_bits, shares ? 32 - __clz(shares) : 0);
  r.blocks = 1u << r.block_bits, r.arrivals = size >> r.block_bits;
  if (r.rank >= r.blocks) {
    if (cluster) cluster_wait();
    return;
  }
  // The barrier of the bins was made for the whole cluster.
  if (threadIdx.x == 0 && r.blocks < size) arrive(shared_address(&s.barriers.arrived[0]), size - r.blocks);
  const u32 steps = (r.length + STEP - 1) / STEP;
  r.block_first = steps * r.rank >> r.block_bits;
  r.block_steps = (steps * (r.rank + 1) >> r.block_bits) - r.block_first;
  if (threadIdx.x == 0) s.row = r;
  if (!select_quickly<false>(r, memory, memory_bytes, cluster PROFILE_ARGUMENT)) {
    MARK(11)
    const Row again = s.row;
    select_exhaustively(again, memory, memory_bytes);
    MARK(12)
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Counters and barriers for a row. Reads nothing of the kernels before. `again`: the barriers have been used.
__device__ __forceinline__ void prepare(Quick& s, u32 size, bool again) {
  for (int i = threadIdx.x; i < QUICK_BINS; i += THREADS) s.bins[i] = 0;
  if (threadIdx.x < 32) {
    s.chosen_of_warp[threadIdx.x] = 0;
    reinterpret_cast<u32*>(s.group)[threadIdx.x] = 0xFFFFFFFFu;
    if (threadIdx.x == 0) {
      s.mine_count = s.too_short = s.before = 0, s.count = 0xFFFFFFFFu;
      const u32 barriers[3] = {shared_address(&s.barriers.arrived[0]), shared_address(&s.barriers.arrived[1]), shared_address(&s.barriers.met)};
#pragma unroll
      for (int i = 0; i < 3; i++) {
        if (again) asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(barriers[i]) : "memory");
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barriers[i]), "r"(i == 1 ? 1 : size) : "memory");
      }
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
  }
  __syncthreads();
  if (size > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

// How many blocks share a row (log2): as many as have `share` scores each, since more would wait for one another longer than they
// read.
__device__ __forceinline__ int block_bits_of(u32 length, u32 share, int most) {
  const u32 shares = (length - 1) / share;
  return min(most, shares ? 32 - __clz(shares) : 0);
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

template <bool PLANNED>
__device__ __forceinline__ void select_row(const Row& r, unsigned char* memory, u32 memory_bytes, u32 size PROFILE_PARAMETER) {
  Quick& s = *reinterpret_cast<Quick*>(memory);
  // The barrier of the bins was made for the whole cluster.
  if (threadIdx.x == 0 && r.blocks < size) arrive(shared_address(&s.barriers.arrived[0]), size - r.blocks);
  if (threadIdx.x == 0) s.row = r;
  if (!select_quickly<PLANNED>(r, memory, memory_bytes, size > 1 PROFILE_ARGUMENT)) {
    MARK(11)
    const Row again = s.row;
    select_exhaustively(again, memory, memory_bytes);
    MARK(12)
  }
}

// With a plan: {turns, -, -, -}, then for each turn and block {row (-1: none), log2 of the blocks that share it, length, request}.

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    planned_top_k(const float* __restrict__ scores, const int4* __restrict__ plan, const int* __restrict__ page_table,
                  int* __restrict__ slots, int* __restrict__ counts, const int stride, const int table_stride, const int k,
                  const int cluster_bits, const int memory_bytes PROFILE_PARAMETER) {
  extern __shared__ __align__(16) unsigned char memory[];
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
    r.k = k, r.length = task.z, r.block_bits = task.y;
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

// ---------------------------------------------------------------------------------------------------------------------
// The plan, from the lengths. Once per forward, one block, a thread for each row. Rows stand in descending order of length, so that
// blocks that share one are neighbours of one cluster, and every second turn deals from the other end, so that who had the longest
// rows has the shortest.

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
