// The quick way: the row is read once, and only what a sample says may be chosen is kept; its steps are told in top_k.cu. One function,
// since taken apart it is compiled to other code. RING_LINES: lines wait in shared memory, many at once, which needs a
// multiprocessor for each block; without, in registers.
#pragma once

#include "top_k_sample.cuh"

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
