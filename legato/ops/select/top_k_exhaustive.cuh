// The exhaustive way, for rows that the sample misled: it assumes nothing of the scores, and ends whatever they are.
#pragma once

#include "top_k_rank.cuh"
#include "top_k_row.cuh"

constexpr int BITS = 12, BINS = 1 << BITS;  // a digit of the histogram that blocks exchange
constexpr int CANDIDATES = 2048;            // ranks of the boundary bin that a block resolves by itself
constexpr int FINE_BITS = 10, FINE = 1 << FINE_BITS;
constexpr int LAST = 64;
constexpr int LEASTS = 512;                 // steps (or groups of steps) per warp whose least order is remembered
constexpr int POSITION_DIGIT = 11;          // 2^11 positions cannot hold more than CANDIDATES ranks
static_assert((1 << POSITION_DIGIT) <= CANDIDATES, "the last round must leave a bin that fits");
static_assert(BINS % THREADS == 0 && FINE % THREADS == 0, "bins divide over the threads");

struct Found {
  u32 bin, above, count;
};

// In shared memory, before the kept orders.
struct Exhaustive {
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
static_assert(sizeof(Exhaustive) <= SHARED_BYTES, "SHARED_BYTES is what the launch reserves before the kept orders");

// The bin of `counts` [N] in which the `rank`-th (from 1) count lies, the counts above it and its own, into s.found.
// Where all counts together are fewer, bin N - 1. Two barriers; `turn` alternates between two sets of partial sums.
template <int N>
__device__ __forceinline__ void find(Exhaustive& s, const u32* counts, u32 rank, int turn) {
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

__device__ __noinline__ void select_exhaustively(const Row r, u32 memory_bytes) {
  unsigned char* const memory = own_memory();
  Exhaustive& s = *reinterpret_cast<Exhaustive*>(memory);
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
