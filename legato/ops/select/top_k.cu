// Exact, deterministic top-k of ragged float32 rows, with the page transform, on clusters of thread blocks.
//
// One cluster of C blocks (C = 1, 2, 4, 8, 16) has a row; of them as many as its length is worth share it, and the others leave
// at once. Each block owns a contiguous slice, each warp a
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
  u64 unused;
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
// The warps that have bins meet.
__device__ __forceinline__ void count_up(int threads) { asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory"); }
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
  u32 barrier, blocks, arrivals, parity;

  // What my block wrote before is there for whoever waits.
  __device__ __forceinline__ void arrive() const {
    __syncthreads();
    if (threadIdx.x < blocks)
      asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0], %1;" ::"r"(remote(barrier, threadIdx.x)), "r"(arrivals)
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
  u32 length, k, rank, blocks;  // my rank in the cluster, and how many of its blocks have work
  int block_bits;               // log2(blocks)
  u32 arrivals;                 // how often a block arrives at `met`, which was made for the whole cluster
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
  const u32 length = r.length, k = r.k, rank = r.rank, blocks = r.blocks;
  const u32 block_first = r.block_first, block_steps = r.block_steps;
  const int* table = r.table;
  int* out = r.out;
  const bool shared_row = blocks > 1;
  Meeting meeting = {shared_address(&s.barriers.met), blocks, r.arrivals, 0};
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
        const u32 to = remote(shared_address(s.total), target);
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
    for (u32 target = warp % blocks; target < blocks; target += WARPS) {
      const u32 to = remote(shared_address(s.all + s.offset), target);
      for (u32 i = warp / blocks * 32 + lane; i < s.mine_count; i += parts * 32) remote_store(to + i * 8, s.mine[i]);
      if (lane == 0) remote_store(remote(shared_address(&s.above_of_block[rank]), target), block_above);
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
constexpr int GROUP_BITS = 4;    // log2 of a group's samples, at most
constexpr int SAMPLES = (GROUPS << GROUP_BITS) / THREADS > 1 ? (GROUPS << GROUP_BITS) / THREADS : 1;  // of a thread
constexpr int SHORT = SHORT_LINES;         // lines of 128 scores that a warp of a short slice has at most: they stay in registers

struct __align__(8) Listed {
  float score;
  u32 position;
};

struct Quick {
  Barriers barriers;
  u32 bins[QUICK_BINS];
  uint4 total[MAX_CLUSTER][QUICK_BINS / 8];  // of each block: its bins, two in a word
  u32 unsound[MAX_CLUSTER];                  // of each block: whether its bins cannot be trusted
  uint4 group[GROUPS / 4];
  u64 crowd[CROWD];         // the ranks in the boundary bin, block by block
  u32 warp_of_mine[CROWD];  // of those that this block has, from 0: which of its warps has them
  u32 above_of_warp[32], chosen_of_warp[32];
  u32 mine_count, too_short, before;
  u32 blocks_above, offset;  // in the blocks before mine: ranks above the boundary bin, and in it
  float worst, top, scale;  // the least score that is listed; how scores map to bins
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
    const float least = score_of(min(high, 0xFFFFFFFEu)), best = score_of(low) + places.beyond * (score_of(low) - least);
    s.worst = list_all ? __int_as_float(0xFF800000) : least;
    s.top = best;
    s.scale = best > least ? __fdividef(QUICK_BINS - 2.0f, best - least) : 1.0f;
  }
}

// The bin of the k-th among the summed bins, into s.bin, s.count (0xFFFFFFFF: none, or the lists cannot be trusted) and
// s.wanted (its place in the bin); and what the blocks before mine have up to there. A thread has one bin; all threads call.
__device__ __forceinline__ void find_bin(Quick& s, u32 blocks, u32 rank, u32 k) {
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  constexpr u32 BIN_WARPS = QUICK_BINS / 32;
  u32 count = 0, before = 0;  // in all blocks, in those before mine
  if (warp < BIN_WARPS) {
    if (blocks > 1) {
      const u16* bins = reinterpret_cast<const u16*>(s.total) + threadIdx.x;
#pragma unroll
      for (u32 block = 0; block < MAX_CLUSTER; block++) {
        const u32 more = block < blocks ? bins[block * QUICK_BINS] : 0;
        count += more;
        before += block < rank ? more : 0;
      }
    } else {
      count = s.bins[threadIdx.x];
    }
    u32 upto = count, before_upto = before;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const u32 other = __shfl_up_sync(0xFFFFFFFFu, upto, distance), other_before = __shfl_up_sync(0xFFFFFFFFu, before_upto, distance);
      if (lane >= distance) upto += other, before_upto += other_before;
    }
    if (lane == 31) s.above_of_warp[warp] = upto, s.chosen_of_warp[warp] = before_upto;
    count_up(BIN_WARPS * 32);
    const bool unsound = blocks > 1 ? __any_sync(0xFFFFFFFFu, lane < blocks && s.unsound[lane]) : s.too_short;
    const u32 warps_upto = lane < warp ? s.above_of_warp[lane] : 0, warps_before = lane < warp ? s.chosen_of_warp[lane] : 0;
    upto += add_all(warps_upto), before_upto += add_all(warps_before);
    if (!unsound && upto >= k && upto - count < k) {
      s.bin = threadIdx.x, s.count = count, s.wanted = k - (upto - count);
      s.blocks_above = before_upto - before, s.offset = before;
    }
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
  // Where a third or more is chosen all are listed: the sample's end would be too close to the k-th.
  if (warp == 0) cut(s, places, chosen_in_group > 0.41f);
  __syncthreads();
  MARK(3)
  const float worst = s.worst, top = s.top, scale = s.scale;
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
    for (u32 to = warp; to < r.blocks; to += WARPS) {
      const u32 barrier = remote(shared_address(&s.barriers.arrived[0]), to);
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
  auto place = [&](float score, u32 its_position) {
    const u32 its_bin = bin_of(score);
    num_above += its_bin < bin;
    if (its_bin != bin) return;
    const u32 mine = atomicAdd(&s.mine_count, 1);
    const u64 its_rank = static_cast<u64>(order_of(score)) << 32 | its_position;
    s.warp_of_mine[mine] = warp;
    if (!shared_row) {
      s.crowd[mine] = its_rank;
      return;
    }
    const u32 to = shared_address(&s.crowd[offset + mine]), barrier = shared_address(&s.barriers.arrived[1]);
    for (u32 block = 0; block < r.blocks; block++) async_store(remote(to, block), its_rank, remote(barrier, block));
  };
  if (is_short) {
#pragma unroll
    for (int j = 0; j < SHORT; j++)
      if (j < num_lines)
#pragma unroll
        for (int e = 0; e < 4; e++)
          if (held[4 * j + e] >= worst) place(held[4 * j + e], own_start + j * STEP + e);
  } else {
#pragma unroll 2
    for (u32 i = lane; i < listed; i += 32) place(list[i].score, list[i].position);
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
  if (!select_quickly(r, memory, memory_bytes, cluster PROFILE_ARGUMENT)) {
    MARK(11)
    const Row again = s.row;
    select_exhaustively(again, memory, memory_bytes);
    MARK(12)
  }
}
