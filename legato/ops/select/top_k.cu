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
//   2. every warp lists the scores of its part that are not below the lower one, and counts them in 256 bins
//   3. the blocks send their bins, added up, to every block (one hop: remote stores that signal an mbarrier), so all know the bin
//      of the k-th rank, and how many ranks of it and above it the blocks before them have
//   4. the ranks in that bin go to every block (second hop), which finds the k-th rank by counting
//   5. listed scores up to it are written in ascending position: offsets are sums of counts that every block now knows
// If the sample misled (fewer than k listed, a list too short, a bin too full), which all blocks see alike after the first
// hop, the row is done again in the exhaustive way, which assumes nothing:
//   1. a 4096-bin histogram of the top 12 bits of `order`, added up over the cluster
//   2. while the bin of the k-th rank holds more than CANDIDATES ranks, the next digit of those ranks is counted in the
//      same way: at last digits of the position, so the loop always ends
//   3. as 4 and 5 above
// Orders stay in shared memory while they fit; others are read again where the least order of a step can matter.

#include "../sm90.cuh"
typedef unsigned short u16;

#ifndef THREADS
#define THREADS 512
#endif
#ifndef LINES  // of 128 scores that a warp looks at in one go
#define LINES 4
#endif
#ifndef RING_LINES  // that a warp has under way in shared memory, whole LINES; 0: LINES of them in registers
#define RING_LINES 12
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

// A value that the compiler keeps instead of making it anew, which for the start of the shared memory and for special registers takes
// 30 cycles each time.
__device__ __forceinline__ u32 kept(u32 value) {
  asm volatile("" : "+r"(value));
  return value;
}
__device__ __forceinline__ unsigned char* own_memory() {
  extern __shared__ __align__(16) unsigned char memory[];
  return static_cast<unsigned char*>(__cvta_shared_to_generic(kept(shared_address(memory))));
}
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

__device__ __forceinline__ int read_int(const int* at) {
  int v;
  asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(v) : "l"(at));
  return v;
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
  float sampling;                     // this times the length: how many samples a group may have
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

__device__ __noinline__ void select_exhaustively(const Row r, u32 memory_bytes) {
  unsigned char* const memory = own_memory();
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

constexpr int QUICK_BINS = 256;  // half as many are sent sooner, but leave more ranks in the boundary bin
constexpr u32 PIECES = QUICK_BINS / 8;  // of 16 bytes, in which a block's bins are sent
constexpr int CROWD = 512;     // ranks of the boundary bin, over the whole row
constexpr int GROUPS = 64;     // of samples
constexpr int GROUP_BITS = 5;
constexpr int LONG_ROW = 1 << 18;  // from here on a group has 2^GROUP_BITS samples at most, before half as many
static_assert(GROUPS << GROUP_BITS <= 4 * THREADS, "a thread samples four scores at most");
constexpr int TOTAL_QUADS = PIECES + 2;  // more, so that threads that add up blocks read other banks

struct __align__(8) Listed {
  float score;
  u32 position;
};

struct Quick {
  Barriers barriers;
  u32 bins[QUICK_BINS];
  uint4 total[MAX_CLUSTER][TOTAL_QUADS];  // of each block: scores up to the end of each bin, two in a word
  u32 in_list[MAX_CLUSTER];               // of each block: how many scores it lists; 0x10000: more than it could
  uint4 group[GROUPS / 4];
  u64 crowd[CROWD];         // the ranks in the boundary bin, block by block
  u32 warp_of_mine[CROWD];  // of those that this block has, from 0: which of its warps has them
  u32 above_of_warp[32];
  u32 mine_count, too_short;
  u32 high, low;             // orders of two groups' bests
  u64 threshold;
  Row row;  // for the exhaustive way, so that the quick one need not keep it in registers
  u32 pages[PAGES];
};
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

// Which of the groups' bests, from 0, are beyond the k-th and before it, as good as always; of a row of which this portion is chosen.
__device__ __forceinline__ Places places_of(float portion, int group_bits) {
  // A group's best is among the chosen with this probability; so many groups' bests are, give or take.
  const float share = 1.0f - exp2f(__log2f(1.0f - portion) * static_cast<float>(1 << group_bits)), mean = GROUPS * share;
  float spread;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(spread) : "f"(mean * (1.0f - share)));
  const float high = min(GROUPS - 1.0f, ceilf(mean + 4.0f * spread)), low = min(floorf(mean - 3.5f * spread) - 1.0f, high - 4.0f);
  return {kept(static_cast<u32>(high)), kept(static_cast<u32>(max(0.0f, low))), mean < 3.0f ? 2.0f : mean < 10.0f ? 1.0f : 0.0f};
}

__device__ __forceinline__ float score_of(u32 order) {
  return __uint_as_float(order < 0x80000000u ? order ^ 0x7FFFFFFFu : order);
}

// From the best of each group of samples: which of them bound what is listed, into s.high and s.low. A warp places some of the groups
// among all, which its lanes hold.
__device__ __forceinline__ void cut(Quick& s, Places places) {
  static_assert(GROUPS == 64 && GROUPS % WARPS == 0, "a lane holds two groups, a warp places as many as every other");
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const u32* groups = reinterpret_cast<const u32*>(s.group);
  const u32 first = groups[lane] & ~(GROUPS - 1u) | lane, second = groups[lane + 32] & ~(GROUPS - 1u) | (lane + 32);  // no two alike
#pragma unroll
  for (u32 i = 0; i < GROUPS / WARPS; i++) {
    const u32 which = warp * (GROUPS / WARPS) + i, own = __shfl_sync(0xFFFFFFFFu, which < 32 ? first : second, which % 32);
    const u32 place = __popc(__ballot_sync(0xFFFFFFFFu, first < own)) + __popc(__ballot_sync(0xFFFFFFFFu, second < own));
    if (lane == 0 && place == places.high) s.high = own | (GROUPS - 1);
    if (lane == 0 && place == places.low) s.low = own & ~(GROUPS - 1u);
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
__device__ __forceinline__ bool select_quickly(const Row& r, unsigned char* memory, u32 memory_bytes, u32 size PROFILE_PARAMETER) {
  const bool cluster = size > 1;
  Quick& s = *reinterpret_cast<Quick*>(memory);
  const int lane = kept(threadIdx.x % 32), warp = kept(threadIdx.x / 32);
  const u32 below_lane = kept((1u << lane) - 1);
  const bool shared_row = r.blocks > 1;
#if RING_LINES
  // Lines in flight, and then, in their place, what is listed. Before it is listed: quads of which one score may be.
  constexpr int STAGES = RING_LINES / LINES, RING_BYTES = WARPS * RING_LINES * STEP * 4;
  float4* const ring = reinterpret_cast<float4*>(memory + QUICK_BYTES) + warp * RING_LINES * QUADS + lane;
  constexpr u32 list_length = RING_LINES * STEP / 2;
  Listed* const list = reinterpret_cast<Listed*>(memory + QUICK_BYTES) + warp * list_length;
  const u32 most_quads = (memory_bytes - QUICK_BYTES - RING_BYTES) / (WARPS * 20) & ~31u;
  float4* const quads = reinterpret_cast<float4*>(memory + QUICK_BYTES + RING_BYTES) + warp * most_quads;
  u32* const places = reinterpret_cast<u32*>(memory + QUICK_BYTES + RING_BYTES + WARPS * most_quads * 16) + warp * most_quads;
#else
  constexpr int RING_BYTES = 0;
  const u32 list_length = (memory_bytes - QUICK_BYTES) / (WARPS * 8);
  Listed* const list = reinterpret_cast<Listed*>(memory + QUICK_BYTES) + warp * list_length;
#endif

  // ---- 1. the sample, in groups that lie all over the row, and my first scores
  int group_bits = (__float_as_int(static_cast<float>(r.length) * r.sampling) >> 23) - 127;
  group_bits = max(0, min(group_bits, r.length < LONG_ROW ? GROUP_BITS - 1 : GROUP_BITS));
  // Four neighbours at once: a line of the cache for each, not for each score. At uneven distances: even ones that are powers of two
  // would wait for the same part of the memory.
  const u32 quad_bits = max(group_bits - 2, 0), num_samples = GROUPS << quad_bits;
  const u32 place = (threadIdx.x << (26 - quad_bits)) + (threadIdx.x * 0x9E3779B1u >> (6 + quad_bits));  // in 2^32ths of the row
  float4* const sample = reinterpret_cast<float4*>(memory + QUICK_BYTES + RING_BYTES) + threadIdx.x;  // where lists will be
  asm volatile("{\n.reg .pred p;\nsetp.lt.u32 p, %2, %3;\n@p cp.async.cg.shared.global [%0], [%1], 16;\n}" ::"r"(shared_address(sample)),
               "l"(r.scores + 4 * __umulhi(place, r.length >> 2)), "r"(threadIdx.x), "r"(num_samples)
               : "memory");
  asm volatile("cp.async.commit_group;" ::: "memory");
  const u32 block_start = r.block_first * STEP, block_end = min(r.length, (r.block_first + r.block_steps) * STEP);
  const u32 block_length = max(block_end, block_start) - block_start;
  // A warp has consecutive lines of 128 scores, a lane four consecutive ones of each.
  const u32 first_line = r.block_steps * warp / WARPS;
  const int num_lines = r.block_steps * (warp + 1) / WARPS - first_line;
  const u32 own_start = block_start + first_line * STEP + lane * 4;
  const float* at = r.scores + own_start;
#if RING_LINES
  // Lines of which something is the row's in this lane: every line, but perhaps the row's last one.
  const int own_lines = num_lines - (own_start + (num_lines - 1) * STEP >= block_end);
  // A lane fetches what it reads itself: nobody waits for anyone.
  auto fetch = [&](u32 into, int line) {
    asm volatile("{\n.reg .pred p;\nsetp.lt.s32 p, %2, %3;\n@p cp.async.cg.shared.global [%0], [%1], 16;\n}" ::"r"(shared_address(ring + into * QUADS)),
                 "l"(at + line * STEP), "r"(line), "r"(own_lines)
                 : "memory");
  };
  // A short slice is dealt in pieces of 32 scores, so that all warps have some.
  const bool is_short = r.block_steps <= WARPS;
  constexpr int MOST_PIECES = 4;
  const u32 pieces = (block_length + 31) / 32, first_piece = pieces * warp / WARPS, num_pieces = pieces * (warp + 1) / WARPS - first_piece;
  const u32 own_score = block_start + first_piece * 32 + lane;
  float* const own_words = reinterpret_cast<float*>(ring - lane) + lane;
  if (is_short) {
#pragma unroll
    for (int j = 0; j < MOST_PIECES; j++)
      asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n@p cp.async.ca.shared.global [%0], [%1], 4;\n}" ::"r"(shared_address(own_words + j * 32)),
                   "l"(r.scores + own_score + j * 32), "r"(static_cast<u32>(j < num_pieces && own_score + j * 32 < block_end))
                   : "memory");
  } else {
#pragma unroll
    for (int j = 0; j < RING_LINES; j++) {
      fetch(j, j);
      if (j % LINES == LINES - 1 && j + 1 < RING_LINES) asm volatile("cp.async.commit_group;" ::: "memory");
    }
  }
#else
  float held[4 * LINES];
  auto read_line = [&](int into, int line) {
    const float4 quad = read4(at + line * STEP, line < num_lines && own_start + line * STEP < block_end);
    held[4 * into] = quad.x, held[4 * into + 1] = quad.y, held[4 * into + 2] = quad.z, held[4 * into + 3] = quad.w;
  };
#pragma unroll
  for (int j = 0; j < LINES; j++) read_line(j, j);
#endif
  const u32 first_page = r.block_first * (STEP / 64);
  const u32 num_pages = (block_length + 63) / 64;
  const bool pages_kept = num_pages <= PAGES;
  if (pages_kept)
#pragma unroll 1
    for (u32 i = threadIdx.x; i < num_pages; i += THREADS)
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(&s.pages[i])), "l"(r.table + first_page + i) : "memory");
  asm volatile("cp.async.commit_group;" ::: "memory");
  if (threadIdx.x == THREADS - 1) {
    s.row = r;
    // The barrier of the bins was made for the whole cluster.
    if (r.blocks < size) arrive(shared_address(&s.barriers.arrived[0]), size - r.blocks);
  }
  const float portion = __fdividef(static_cast<float>(r.k), static_cast<float>(r.length));
  const Places bounds = places_of(portion, group_bits);
  if (cluster) cluster_wait();  // every block's barriers are ready
#if RING_LINES
  if (is_short)
    asm volatile("cp.async.wait_group 1;" ::: "memory");
  else
#endif
    asm volatile("cp.async.wait_group %0;" ::"n"(RING_LINES ? RING_LINES / LINES : 1) : "memory");
  if (threadIdx.x < num_samples) {
    const float4 quad = *sample;
    float best = quad.x;  // fewer where a group has fewer; not a number is less than any
    if (group_bits > 0) best = fmaxf(best, quad.y);
    if (group_bits > 1) best = fmaxf(best, fmaxf(quad.z, quad.w));
    atomicMin(reinterpret_cast<u32*>(s.group) + threadIdx.x % GROUPS, order_of(best));
  }
  __syncthreads();
  MARK(2)
  cut(s, bounds);
  __syncthreads();
  MARK(3)
  // The least score that is listed, and how scores map to bins. Where a third or more is chosen all are listed: the sample's end
  // would be too close to the k-th.
  const float least = score_of(min(s.high, 0xFFFFFFFEu)), low = score_of(s.low), top = low + bounds.beyond * (low - least);
  const float worst = portion > 0.41f ? __int_as_float(0xFF800000) : least;
  float scale;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(scale) : "f"(top - least));
  scale = top > least ? scale * (QUICK_BINS - 2.0f) : 1.0f;
  // Never a lower bin for a lower score: each operation, and its rounding, keeps the order. The last addition leaves the
  // nearest integer in the low bits. Not a number (from infinities) becomes bin 0.
  auto bin_of = [&](float score) -> u32 {
    const float bin = fminf(fmaxf(fmaf(top - score, scale, 1.0f), 0.0f), QUICK_BINS - 1.0f);
    return __float_as_uint(bin + 8388608.0f) & (QUICK_BINS - 1);
  };

  // ---- 2. the row, once
  const float nan = __int_as_float(0x7FFFFFFF);
  u32 listed = 0;
  bool full = false;
  const u32 list_at = shared_address(list);
  auto store = [&](u32 place, float score, u32 position) {
    asm volatile("{\n.reg .pred p;\nsetp.ge.f32 p, %1, %3;\n@p st.shared.v2.b32 [%0], {%1, %2};\n}" ::"r"(list_at + place * 8), "f"(score), "r"(position), "f"(worst)
                 : "memory");
  };
  // Four scores of each lane, in order of position.
  auto list_all = [&](const float (&now)[4], u32 from) {
    u32 votes[4], place = listed;
    full = full || listed + STEP > list_length;
#pragma unroll
    for (int e = 0; e < 4; e++) votes[e] = __ballot_sync(0xFFFFFFFFu, now[e] >= worst);
#pragma unroll
    for (int e = 0; e < 4; e++) place += __popc(votes[e] & below_lane), listed += __popc(votes[e]);
    if (full) return;
#pragma unroll
    for (int e = 0; e < 4; e++) {
      store(place, now[e], from + e);
      place += now[e] >= worst;
    }
  };
#if RING_LINES
  u32 num_quads = 0;
  auto list_line = [&](const float (&now)[4], u32 from) {
    const bool passes = fmaxf(fmaxf(now[0], now[1]), fmaxf(now[2], now[3])) >= worst;
    const u32 votes = __ballot_sync(0xFFFFFFFFu, passes);
    if (!votes) return;
    const u32 place = num_quads + __popc(votes & below_lane);
    num_quads += __popc(votes);
    if (passes && place < most_quads) quads[place] = make_float4(now[0], now[1], now[2], now[3]), places[place] = from;
  };
  if (is_short) {
    asm volatile("cp.async.wait_all;" ::: "memory");
    float held[MOST_PIECES];
#pragma unroll
    for (int j = 0; j < MOST_PIECES; j++) held[j] = j < num_pieces && own_score + j * 32 < block_end ? own_words[j * 32] : nan;
    __syncwarp();  // the list stands where the scores were
#pragma unroll
    for (int j = 0; j < MOST_PIECES; j++) {
      if (j >= num_pieces) break;
      const u32 votes = __ballot_sync(0xFFFFFFFFu, held[j] >= worst);
      store(listed + __popc(votes & below_lane), held[j], own_score + j * 32);
      listed += __popc(votes);
    }
  } else {
    int from_line = 0;
    u32 stage = 0;
    const bool cut_short = block_start + (first_line + num_lines) * STEP > block_end;  // the row's last line, if it is mine
    const int full_lines = num_lines - cut_short;
    auto arrived = [&] { asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory"); };
    for (; from_line + LINES < full_lines; from_line += LINES) {
      arrived();
#pragma unroll
      for (int j = 0; j < LINES; j++) {
        const float4 quad = ring[(stage * LINES + j) * QUADS];
        const float now[4] = {quad.x, quad.y, quad.z, quad.w};
        list_line(now, own_start + (from_line + j) * STEP);
      }
#pragma unroll
      for (int j = 0; j < LINES; j++) fetch(stage * LINES + j, from_line + j + RING_LINES);
      asm volatile("cp.async.commit_group;" ::: "memory");
      stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    arrived();
    float4 last[LINES];
#pragma unroll
    for (int j = 0; j < LINES; j++)
      if (from_line + j < full_lines) last[j] = ring[(stage * LINES + j) * QUADS];
    float4 cut_line;
    if (cut_short) {
      asm volatile("cp.async.wait_all;" ::: "memory");
      cut_line = ring[full_lines % RING_LINES * QUADS];
    }
    __syncwarp();  // the list stands where the lines were
    for (u32 i = 0; i < min(num_quads, most_quads); i += 32) {
      const float4 quad = i + lane < num_quads ? quads[i + lane] : make_float4(nan, nan, nan, nan);
      const float four[4] = {quad.x, quad.y, quad.z, quad.w};
      list_all(four, places[i + lane]);
    }
    full = full || num_quads > most_quads;
#pragma unroll
    for (int j = 0; j < LINES; j++) {
      if (from_line + j >= full_lines) break;
      const float now[4] = {last[j].x, last[j].y, last[j].z, last[j].w};
      list_all(now, own_start + (from_line + j) * STEP);
    }
    if (cut_short) {  // what lies beyond the row is nothing
      float now[4] = {cut_line.x, cut_line.y, cut_line.z, cut_line.w};
#pragma unroll
      for (int e = 0; e < 4; e++)
        if (own_start + full_lines * STEP + e >= block_end) now[e] = nan;
      list_all(now, own_start + full_lines * STEP);
    }
  }
#else
  auto mask_tail = [&](int from, int line) {  // what lies beyond the row is nothing
#pragma unroll
    for (int e = 0; e < 4; e++)
      if (own_start + line * STEP + e >= block_end) held[4 * from + e] = nan;
  };
  int i = 0;
  // The last line of a row may be cut short; it is among the last ones, which are looked at more carefully.
  for (; i + 2 * LINES < num_lines; i += LINES) {
#pragma unroll
    for (int j = 0; j < LINES; j++) {
      const float now[4] = {held[4 * j], held[4 * j + 1], held[4 * j + 2], held[4 * j + 3]};
      const float4 quad = read4(at + (i + j + LINES) * STEP);
      held[4 * j] = quad.x, held[4 * j + 1] = quad.y, held[4 * j + 2] = quad.z, held[4 * j + 3] = quad.w;
      list_all(now, own_start + (i + j) * STEP);
    }
  }
  for (; i < num_lines; i += LINES) {
#pragma unroll
    for (int j = 0; j < LINES; j++) {
      if (i + j >= num_lines) break;
      if (own_start + (i + j) * STEP + 4 > block_end) mask_tail(j, i + j);
      const float now[4] = {held[4 * j], held[4 * j + 1], held[4 * j + 2], held[4 * j + 3]};
      read_line(j, i + j + LINES);
      list_all(now, own_start + (i + j) * STEP);
    }
  }
#endif
  __syncwarp();
  if (full) {
    s.too_short = 1;
    listed = 0;
  }
  auto count_bin = [&](u32 its_bin) { asm volatile("red.shared.add.u32 [%0], 1;" ::"r"(shared_address(&s.bins[its_bin])) : "memory"); };
  // The first 32 of the list stay in registers: mostly there are no more.
  const Listed mine = lane < listed ? list[lane] : Listed{nan, 0};
  const u32 my_bin = bin_of(mine.score);
  if (lane < listed) count_bin(my_bin);
  for (u32 i = lane + 32; i < listed; i += 32) count_bin(bin_of(list[i].score));
  __syncthreads();
  MARK(4)

  // ---- 3. the bin of the k-th. A warp sends how many scores there are up to the end of each bin, two in a word, to each block whose
  // number it has (modulo WARPS).
  for (u32 block = warp; block < r.blocks; block += WARPS) {
    const u32 piece = lane % PIECES;
    const uint4 first = reinterpret_cast<const uint4*>(s.bins)[2 * piece], second = reinterpret_cast<const uint4*>(s.bins)[2 * piece + 1];
    u32 upto[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
#pragma unroll
    for (int i = 1; i < 8; i++) upto[i] += upto[i - 1];
    u32 sum = upto[7];
#pragma unroll
    for (u32 distance = 1; distance < PIECES; distance *= 2) {
      const u32 other = __shfl_up_sync(0xFFFFFFFFu, sum, distance, PIECES);
      if (piece >= distance) sum += other;
    }
    const u32 before = sum - upto[7];
    // More than half a word holds: nobody can trust the sums.
    const u32 total = __shfl_sync(0xFFFFFFFFu, sum, PIECES - 1), in_list = s.too_short ? 0x10000u : min(total, 0x10000u);
    uint4 packed;
    packed.x = (upto[0] + before) | (upto[1] + before) << 16, packed.y = (upto[2] + before) | (upto[3] + before) << 16;
    packed.z = (upto[4] + before) | (upto[5] + before) << 16, packed.w = (upto[6] + before) | (upto[7] + before) << 16;
    if (shared_row) {
      const u32 to = PLANNED ? first_of(r) + block : block, barrier = remote(shared_address(&s.barriers.arrived[0]), to);
      if (lane < PIECES) async_store(remote(shared_address(&s.total[r.rank][piece]), to), packed, barrier);
      if (lane == 0) {
        async_store(remote(shared_address(&s.in_list[r.rank]), to), in_list, barrier);
        remote_arrive(barrier, QUICK_BINS * 2 + 4);
      }
    } else {
      s.total[0][piece] = packed;
      if (lane == 0) s.in_list[0] = in_list;
    }
  }
  if (shared_row)
    wait_for(shared_address(&s.barriers.arrived[0]));
  else
    __syncthreads();
  MARK(5)
  // So many threads add up two bins. The bins of which all blocks together have fewer than k lie before that of the k-th.
  constexpr u32 SHARE = THREADS / (QUICK_BINS / 2);
  const u32 part = threadIdx.x % SHARE;
  const u32* const two_bins = reinterpret_cast<const u32*>(s.total) + threadIdx.x / SHARE;
  u32 upto = 0;
#pragma unroll
  for (u32 i = 0; i < MAX_CLUSTER; i += SHARE) upto += part + i < r.blocks ? two_bins[(part + i) * TOTAL_QUADS * 4] : 0;
#pragma unroll
  for (u32 distance = 1; distance < SHARE; distance *= 2) upto += __shfl_xor_sync(0xFFFFFFFFu, upto, distance);
  const u32 bin = __syncthreads_count(part < 2 && (part ? upto >> 16 : upto & 0xFFFF) < r.k);
  // Every warp: what each block has before the bin and (upper half) in it.
  u32 of_block = 0, in_lists = 0;
  if (lane < r.blocks && bin < QUICK_BINS) {
    const u16* const bins = reinterpret_cast<const u16*>(s.total) + lane * TOTAL_QUADS * 8 + bin;
    const u32 before = bin ? bins[-1] : 0;
    of_block = before | (bins[0] - before) << 16;
    in_lists = s.in_list[lane];
  }
  const u32 in_all = add_all(of_block), in_earlier = add_all(lane < r.rank ? of_block : 0);
  const u32 count = in_all >> 16, wanted = r.k - (in_all & 0xFFFF), offset = in_earlier >> 16, blocks_above = in_earlier & 0xFFFF;
  const u32 num_mine = __shfl_sync(0xFFFFFFFFu, of_block, r.rank) >> 16;  // of the bin's, in my block
  MARK(6)
  asm volatile("cp.async.wait_all;" ::: "memory");  // the pages
  if (bin >= QUICK_BINS || add_all(in_lists) > 0xFFFF || count > CROWD) return false;

  // ---- 4. the k-th. The ranks of its bin go to every block at once: the bins say how many are before mine.
  if (shared_row && threadIdx.x == 0) expect(shared_address(&s.barriers.arrived[1]), count * 8);
  u32 num_above = 0;
  const u32 first = PLANNED ? first_of(r) : 0;
  auto send = [&](bool some, const Listed& own, u32 its_bin) {
    num_above += __popc(__ballot_sync(0xFFFFFFFFu, some && its_bin < bin));
    const bool is = some && its_bin == bin;
    u32 votes = __ballot_sync(0xFFFFFFFFu, is), place = 0;
    if (!votes) return;
    const u64 its_rank = static_cast<u64>(order_of(own.score)) << 32 | own.position;
    if (is) {
      place = atomicAdd(&s.mine_count, 1);
      s.warp_of_mine[place] = warp;
      if (!shared_row) s.crowd[place] = its_rank;
    }
    if (!shared_row) return;
    for (; votes; votes &= votes - 1) {  // a lane sends to the block of its number
      const int from = __ffs(votes) - 1;
      const u64 sent = __shfl_sync(0xFFFFFFFFu, its_rank, from);
      const u32 at = shared_address(&s.crowd[offset + __shfl_sync(0xFFFFFFFFu, place, from)]);
      if (lane < r.blocks) async_store(remote(at, first + lane), sent, remote(shared_address(&s.barriers.arrived[1]), first + lane));
    }
  };
  send(lane < listed, mine, my_bin);
#pragma unroll 1
  for (u32 i = 32; i < listed; i += 32) {
    const Listed own = i + lane < listed ? list[i + lane] : Listed{nan, 0};
    send(i + lane < listed, own, bin_of(own.score));
  }
  if (lane == 0) s.above_of_warp[warp] = num_above;
  __syncthreads();
  MARK(7)
  auto slot_of = [&](u32 position) {
    const u32 page = position >> 6;
    const int physical = pages_kept ? static_cast<int>(s.pages[page - first_page]) : r.table[page];
    return physical << 6 | static_cast<int>(position & 63);
  };
  const int my_slot = lane < listed ? slot_of(mine.position) : -1;
  if (shared_row) wait_for(shared_address(&s.barriers.arrived[1]));
  MARK(8)
  // A warp places one of them among all: its lanes hold the others.
  const u64 one = lane < count ? s.crowd[lane] : ~0ull, another = lane + 32 < count ? s.crowd[lane + 32] : ~0ull;
  for (u32 which = warp; which < count; which += WARPS) {
    const u64 own = s.crowd[which];
    u32 place = __popc(__ballot_sync(0xFFFFFFFFu, one < own)) + __popc(__ballot_sync(0xFFFFFFFFu, another < own));
    for (u32 i = lane + 64; i < count + lane; i += 32) place += __popc(__ballot_sync(0xFFFFFFFFu, i < count && s.crowd[i] < own));
    if (lane == 0 && place + 1 == wanted) s.threshold = own;
  }
  __syncthreads();
  MARK(9)

  // ---- 5. the chosen, in ascending position. Before mine: what is above the bin, and of it what earlier blocks and warps have.
  const u64 threshold = s.threshold;
  u32 base = add_all(lane < warp ? s.above_of_warp[lane] : 0) + blocks_above;
  for (u32 i = lane; i < count + lane; i += 32) {
    const u32 here = i - offset;
    const bool ours = here < num_mine, chosen = i < count && s.crowd[i] <= threshold;
    const u32 its_warp = ours ? s.warp_of_mine[here] : 0;
    base += __popc(__ballot_sync(0xFFFFFFFFu, chosen && (i < offset || (ours && its_warp < warp))));
  }
  const float last_score = score_of(static_cast<u32>(threshold >> 32));
  const u32 last_position = static_cast<u32>(threshold);
  auto is_chosen = [&](const Listed& own) { return own.score > last_score || (own.score == last_score && own.position <= last_position); };
  u32 votes = __ballot_sync(0xFFFFFFFFu, is_chosen(mine));
  if (votes >> lane & 1) r.out[base + __popc(votes & below_lane)] = my_slot;
#pragma unroll 1
  for (u32 i = 32; i < listed; i += 32) {
    base += __popc(votes);
    const Listed own = i + lane < listed ? list[i + lane] : Listed{nan, 0};
    votes = __ballot_sync(0xFFFFFFFFu, is_chosen(own));
    if (votes >> lane & 1) r.out[base + __popc(votes & below_lane)] = slot_of(own.position);
  }
  MARK(10)
  return true;
}

// Counters and barriers for a row. Reads nothing of the kernels before. `again`: the barriers have been used.
__device__ __forceinline__ void prepare(Quick& s, u32 size, bool again) {
  if (threadIdx.x < QUICK_BINS / 4) reinterpret_cast<uint4*>(s.bins)[threadIdx.x] = make_uint4(0, 0, 0, 0);
  if (threadIdx.x < GROUPS) reinterpret_cast<u32*>(s.group)[threadIdx.x] = 0xFFFFFFFFu;
  if (threadIdx.x == THREADS - 1) {
    s.mine_count = s.too_short = 0;
    const u32 barriers[3] = {shared_address(&s.barriers.arrived[0]), shared_address(&s.barriers.arrived[1]), shared_address(&s.barriers.met)};
#pragma unroll
    for (int i = 0; i < 3; i++) {
      if (again) asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(barriers[i]) : "memory");
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barriers[i]), "r"(i == 1 ? 1 : size) : "memory");
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (size > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

// How many blocks share a row (log2): so many that each has more than half of `share` scores, since more would wait for one another
// longer than they read. (Comparisons, which wait for nothing; a division takes 60 instructions between the length and the loads.)
__device__ __forceinline__ int block_bits_of(u32 length, u32 share, int most) {
  int bits = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) bits += length > share << i;
  return min(most, bits);
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
  if (!select_quickly<PLANNED>(r, memory, memory_bytes, size PROFILE_ARGUMENT)) {
    MARK(11)
    const Row again = s.row;
    select_exhaustively(again, memory_bytes);
    MARK(12)
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    top_k(const float* __restrict__ scores, const int* __restrict__ lengths, const int* __restrict__ page_table,
          const int* __restrict__ request, int* __restrict__ slots, int* __restrict__ counts, const int stride,
          const int table_stride, const int k, const int cluster_bits, const int memory_bytes, const int share,
          const float sampling PROFILE_PARAMETER) {
  unsigned char* const memory = own_memory();
  Quick& s = *reinterpret_cast<Quick*>(memory);
  Row r;
  const u32 size = 1u << cluster_bits, place = kept(blockIdx.x & (size - 1)), row = blockIdx.x >> cluster_bits;
  MARK(0)
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  // Addresses are there before the scores are.
  const int *length_at = lengths + row, *request_at = request + row;
  r.scores = scores + static_cast<u64>(row) * stride, r.out = slots + static_cast<u64>(row) * k, r.k = k;
  r.sampling = sampling;
  asm volatile("" : "+l"(length_at), "+l"(request_at), "+l"(r.scores));
  asm volatile("griddepcontrol.wait;" ::: "memory");
  MARK(1)
  const int length = read_int(length_at), owner = read_int(request_at);
  prepare(s, size, false);  // while they are under way
  r.length = max(length, 0);
  r.table = page_table + static_cast<u64>(owner) * table_stride;
  if (place == 0 && threadIdx.x == 0) counts[row] = min(r.length, r.k);
  const bool whole = r.length <= r.k;
  if (whole) take_all(r, place, size);
  r.block_bits = block_bits_of(r.length, share, cluster_bits);
  if (whole || place >> r.block_bits) {  // as many blocks as the row is worth
    if (size > 1) cluster_wait();
    return;
  }
  cut_row(r, place, size);
  select_row<false>(r, memory, memory_bytes, size PROFILE_ARGUMENT);
}

// ---------------------------------------------------------------------------------------------------------------------
// With a plan: {turns, -, -, -}, then for each turn and block {row (-1: none), log2 of the blocks that share it, length, request}.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    planned_top_k(const float* __restrict__ scores, const int4* __restrict__ plan, const int* __restrict__ page_table,
                  int* __restrict__ slots, int* __restrict__ counts, const int stride, const int table_stride, const int k,
                  const int cluster_bits, const int memory_bytes, const float sampling PROFILE_PARAMETER) {
  unsigned char* const memory = own_memory();
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
    r.k = k, r.length = task.z, r.block_bits = task.y, r.sampling = sampling;
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
