// Absorbed attention of each row over its selected tokens, for more than 32 heads: heads fill a product's 64 rows.
//
// S = q K^T, 64 heads by 64 tokens, then O = P V, 64 heads by 256 values in each of two warpgroups. A row is shared by
// a cluster; block r takes units of 128 tokens r, r + C, ... Warpgroup w scores the w-th 64 tokens of a unit for all
// heads, the weights of both go through shared memory (where the rope keys were, which are dead by then), and then each
// sums half of the values over all 128 tokens. A third warpgroup fetches: every token once, in nine columns of 64
// values in the 128-byte swizzle, which the tensor cores read as K-major keys and as M-major values; FP8 tokens are
// widened to float16 on the way. Half of a tile is refilled as soon as its values are summed.
//
// Sums are scaled down only when a maximum has grown by more than 2^8: weights stay below 2^8, and nothing else
// changes. At the end each block pushes its normalised sums, as float16, into the shared memory of the blocks that own
// the values, which add them up in order: that is where the queries were. Latents beyond 65504 would overflow there.
//
// Macros: FP8: the cache's layout; FIXED_BYTES: the shared memory, as the host counts it.

#include "hopper.cuh"
#include "products.cuh"

constexpr int THREADS = 384, COMPUTING = 256, HEADS = 64, UNIT = 128, TILE = 64;
constexpr int LATENT = 512;
constexpr int ROW_BYTES = FP8 ? 656 : 1152;
constexpr int COLUMN_BYTES = TILE * 128;  // 64 tokens by 64 values
constexpr int TILE_BYTES = 9 * COLUMN_BYTES;
constexpr int Q_COLUMN = HEADS * 128;
constexpr int MOST_BLOCKS = 16;
constexpr int PRODUCER_REGISTERS = FP8 ? 104 : 40, COMPUTE_REGISTERS = FP8 ? 200 : 232;

constexpr int SHARES_AT = 0;                       // [senders][HEADS]: where the tokens were
constexpr int STAGE_AT = MOST_BLOCKS * HEADS * 4;  // there too: what goes to each block
constexpr int Q_AT = 2 * TILE_BYTES;
constexpr int INBOX_AT = Q_AT;                             // [senders][HEADS][values of the block] float16
constexpr int MAXIMA_AT = Q_AT + 9 * Q_COLUMN;             // of each head over each tile
constexpr int TOTALS_AT = MAXIMA_AT + 2 * HEADS * 4;       // sums of weights of each tile
constexpr int FACTORS_AT = TOTALS_AT + 2 * HEADS * 4;      // of each head's scores
constexpr int COUNTED_AT = FACTORS_AT + HEADS * 4;         // a bit per token
constexpr int BARRIERS_AT = COUNTED_AT + 16;  // full (half, half), empty (half, half) of each tile; weights, sums
constexpr int WEIGHTS_AT = BARRIERS_AT + 80;  // (maximum, sum of weights) by sender
constexpr int GRANULE = 32;                   // values are shared out among a cluster's blocks in such steps
static_assert(FIXED_BYTES == WEIGHTS_AT + MOST_BLOCKS * HEADS * 8, "");
static_assert(FIXED_BYTES <= 227 * 1024, "");
constexpr u32 NOTHING = 0xffffffffu;

// Arrives once this thread's copies so far are complete.
__device__ __forceinline__ void barrier_arrive_with_copies(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void computing_barrier() { asm volatile("bar.sync 1, 256;" ::: "memory"); }
__device__ __forceinline__ u32 pack_p(float low, float high) {
  return FP8 ? pack_f16(low, high) : pack_bf16(low, high);
}

__device__ __forceinline__ u32 larger_pair(u32 a, u32 b) {
  u32 v;
  asm("max.u16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
  return v;
}
__device__ __forceinline__ u32 multiply_pair_bf16(u32 a, u32 b) {
  u32 v;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
  return v;
}
__device__ __forceinline__ void copies_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// The first value that a block owns.
__device__ __forceinline__ int first_owned(int block, int blocks) {
  return (block * (LATENT / GRANULE) + blocks - 1) / blocks * GRANULE;
}

struct Row {
  const int *slots;
  int count, width, units, rank, blocks;
};

// Tokens 16 * warp + lane / 8 + 4i of a tile, 16 bytes of a piece of 128 in a lane.
__device__ __forceinline__ void produce(u8 *shared, u32 base, const u8 *cache, const Row &row, int warp, int lane) {
  const int first = warp * 16 + lane / 8;
  int found[2][4];
  auto read = [&](int unit) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = unit * UNIT + tile * TILE + first + 4 * i;
        found[tile][i] = -1;
        if (at < row.width) found[tile][i] = load_fresh(row.slots + at);
      }
  };
#if FP8
  // A half: 256 values of a tile, codes in the columns behind the two that its first values will take, scales in the first.
  auto fetch = [&](const u32 (&token)[4], int half, int turn) {
    if (turn) barrier_wait(base + BARRIERS_AT + half / 2 * 32 + 16 + half % 2 * 8, (turn - 1) & 1);
    const u32 to = base + half / 2 * TILE_BYTES + half % 2 * 4 * COLUMN_BYTES + first * 128;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 from = token[i];
      const bool wanted = from != NOTHING;
      const u8 *const source = cache + (wanted ? size_t(from) * 16 : 0);
      const u32 place = to + i * 512 + (lane % 8 * 16 ^ lane / 8 % 2 * 64);
      copy_async(place + 2 * COLUMN_BYTES, source + half % 2 * 256 + lane % 8 * 16, wanted);
      copy_async(place + 3 * COLUMN_BYTES, source + half % 2 * 256 + 128 + lane % 8 * 16, wanted);
      if (lane % 8 == 0) copy_async(to + i * 512 + lane / 8 * 16, source + 512, wanted);
      const u32 rope = base + half / 2 * TILE_BYTES + 8 * COLUMN_BYTES + (first + 4 * i) * 128;
      if (half % 2) copy_async(rope + ((lane ^ (first + 4 * i)) & 7) * 16, source + 528 + lane % 8 * 16, wanted);
    }
  };
  auto widen = [&](int half) {
    __syncwarp();
    // Eight lanes hold four pieces of an even and of an odd token: so neither these loads nor the stores meet in a bank.
    const int token = lane / 16 * 2 + lane / 4 % 2, part = lane / 8 % 2, own = warp * 16 + token;
    u8 *const to = shared + half / 2 * TILE_BYTES + half % 2 * 4 * COLUMN_BYTES + own * 128;
    uint4 codes[4][2];
    float2 scales[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j)
        codes[i][j] = *reinterpret_cast<const uint4 *>(to + (2 + j) * COLUMN_BYTES + i * 512 +
                                                       (lane % 4 + (part ^ token % 2) * 4) * 16);
      scales[i] = read_pair(to + i * 512 + token * 16 + half % 2 * 8);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = own + 4 * i;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float f = j ? scales[i].y : scales[i].x;
        const u32 scale = pack_f16(f, f);
        u32 v[8];
        widen_both(codes[i][j].x, v[0], v[1]), widen_both(codes[i][j].y, v[2], v[3]);
        widen_both(codes[i][j].z, v[4], v[5]), widen_both(codes[i][j].w, v[6], v[7]);
#pragma unroll
        for (int k = 0; k < 8; ++k) v[k] = multiply_pair(v[k], scale);
        u8 *const column = to + i * 512 + (j * 2 + part) * COLUMN_BYTES;
        const int piece = lane % 4 * 2;
        *reinterpret_cast<uint4 *>(column + ((piece ^ r) & 7) * 16) = make_uint4(v[0], v[1], v[2], v[3]);
        *reinterpret_cast<uint4 *>(column + (((piece + 1) ^ r) & 7) * 16) = make_uint4(v[4], v[5], v[6], v[7]);
      }
    }
  };
#endif
  read(row.rank);
  int turn = 0;
  for (int unit = row.rank; unit < row.units; unit += row.blocks, ++turn) {
    u32 token[2][4], counted[2] = {0, 0};
#pragma unroll
    for (int tile = 0; tile < 2; ++tile)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool counts = found[tile][i] >= 0 && unit * UNIT + tile * TILE + first + 4 * i < row.count;
        token[tile][i] = counts ? u32(found[tile][i]) * (ROW_BYTES / 16) : NOTHING;
        const u32 votes = __ballot_sync(~0u, counts);
        counted[tile] |= ((votes & 1) | (votes >> 7 & 2) | (votes >> 14 & 4) | (votes >> 21 & 8)) << (4 * i);
      }
    if (unit + row.blocks < row.units) read(unit + row.blocks);
#if FP8
    // As they are stored, into a corner of where they will stand widened that no other warp uses.
#pragma unroll
    for (int half = 0; half < 4; ++half) {
      fetch(token[half / 2], half, turn);
      copies_commit();
    }
#pragma unroll 1
    for (int half = 0; half < 4; ++half) {
      if (half == 0) copies_wait<3>();
      if (half == 1) copies_wait<2>();
      if (half == 2) copies_wait<1>();
      if (half == 3) copies_wait<0>();
      widen(half);
      const u32 full = base + BARRIERS_AT + half / 2 * 32 + half % 2 * 8;
      if (half % 2 && lane == 0) {
        *reinterpret_cast<unsigned short *>(shared + COUNTED_AT + half / 2 * 8 + warp * 2) = counted[0];
        barrier_arrive(full);
        counted[0] = counted[1];
      }
      fence_async();
      barrier_arrive(full);
    }
#else
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const u32 full = base + BARRIERS_AT + tile * 32, empty = full + 16;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (turn) barrier_wait(empty + half * 8, (turn - 1) & 1);
        if (half == 1 && lane == 0) {
          *reinterpret_cast<unsigned short *>(shared + COUNTED_AT + tile * 8 + warp * 2) = counted[tile];
          barrier_arrive(full + 8);
        }
        const u32 to = base + tile * TILE_BYTES + first * 128 + ((lane ^ first) & 7) * 16;
#pragma unroll
        for (int column = half * 4; column < (half ? 9 : 4); ++column)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const u32 from = token[tile][i];
            const u8 *const source = cache + (from == NOTHING ? 0 : size_t(from) * 16) + column * 128 + lane % 8 * 16;
            copy_async((to ^ (i % 2 * 64)) + column * COLUMN_BYTES + i * 512, source, from != NOTHING);
          }
        barrier_arrive_with_copies(full + half * 8);
      }
    }
#endif
  }
  copies_wait_all();
}

// The row's queries in nine columns of 64, FP8: as float16 divided by a power of two for each head, so that nothing
// overflows.
__device__ __forceinline__ void read_queries(u8 *shared, u32 base, const u8 *q, int own_heads, float scale) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#if FP8
  constexpr int WARPS = COMPUTING / 32;
  constexpr u32 MAGNITUDES = 0x7fff7fffu;
  // A lane copies pieces lane, lane + 32 and (of rope) lane + 64 of a head as they are, and then changes them where they lie.
  auto place = [&](int head, int piece) {
    return Q_AT + piece / 8 * Q_COLUMN + head * 128 + ((piece ^ head) & 7) * 16;
  };
#pragma unroll
  for (int turn = 0; turn < HEADS / WARPS; ++turn) {
    const int head = turn * WARPS + warp;
#pragma unroll
    for (int i = 0; i < 3; ++i)
      if (i < 2 || lane < 8)
        copy_async(base + place(head, lane + i * 32), q + (head * 72 + lane + i * 32) * 16, head < own_heads);
    if (turn % 2) copies_commit();
  }
#pragma unroll 1
  for (int turn = 0; turn < HEADS / WARPS; ++turn) {
    if (turn == 0) copies_wait<3>();
    if (turn == 2) copies_wait<2>();
    if (turn == 4) copies_wait<1>();
    if (turn == 6) copies_wait<0>();
    const int head = turn * WARPS + warp;
    uint4 part[3];
    u32 most = 0;  // of magnitudes, in both halves: their bits are ordered as they are
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      part[i] = make_uint4(0, 0, 0, 0);
      if (i < 2 || lane < 8) part[i] = *reinterpret_cast<const uint4 *>(shared + place(head, lane + i * 32));
      most = larger_pair(most, larger_pair(part[i].x & MAGNITUDES, part[i].y & MAGNITUDES));
      most = larger_pair(most, larger_pair(part[i].z & MAGNITUDES, part[i].w & MAGNITUDES));
    }
#pragma unroll
    for (int step = 16; step; step /= 2) most = larger_pair(most, __shfl_xor_sync(~0u, most, step));
    const int exponent = min(max(int(max(most >> 16, most & 0xffffu) >> 7) - 127, -100), 100);
    if (lane == 0)
      *reinterpret_cast<float *>(shared + FACTORS_AT + head * 4) = scale * __uint_as_float(u32(127 + exponent) << 23);
    const u32 shrink = u32(127 - exponent) * 0x00800080u;
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      u32 pairs[4] = {part[i].x, part[i].y, part[i].z, part[i].w};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        pairs[k] = multiply_pair_bf16(pairs[k], shrink);
        if (i < 2) pairs[k] = pack_f16(__uint_as_float(pairs[k] << 16), __uint_as_float(pairs[k] & 0xffff0000u));
      }
      if (i < 2 || lane < 8)
        *reinterpret_cast<uint4 *>(shared + place(head, lane + i * 32)) =
            make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
  }
#else
  for (int at = threadIdx.x; at < HEADS * 72; at += COMPUTING) {
    const int head = at / 72, piece = at % 72;
    copy_async(base + Q_AT + piece / 8 * Q_COLUMN + head * 128 + (((piece ^ head) & 7) << 4), q + at * 16,
               head < own_heads);
  }
  copies_commit();
  copies_wait<0>();
#endif
  fence_async();
}

__device__ __forceinline__ void push_words(u32 target, const u32 (&w)[4], u32 barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(target),
      "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void store_matrices(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}
__device__ __forceinline__ float2 unpack_f16(u32 pair) {
  float2 v;
  asm("{\n.reg .f16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}"
      : "=f"(v.x), "=f"(v.y)
      : "r"(pair));
  return v;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    sparse_mla(const u8 *q, const u8 *cache, const int *slots, const int *counts, u8 *out, int heads, int width,
               int slots_stride, int q_stride, float scale) {
  extern __shared__ __align__(1024) u8 shared[];
  const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  u32 blocks, rank;
  asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(blocks));
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  const int row = blockIdx.x / blocks, first_head = blockIdx.y * HEADS;
  const u32 base = shared_address(shared), weights_in = base + BARRIERS_AT + 64, sums_in = weights_in + 8;
  if (threadIdx.x == 0) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const u32 at = base + BARRIERS_AT + tile * 32;
      barrier_init(at, 128), barrier_init(at + 8, 128 + 4);
      barrier_init(at + 16, 4), barrier_init(at + 24, 4);
    }
    barrier_init(weights_in, 1), barrier_init(sums_in, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (blocks > 1) cluster_arrive_relaxed();
  slots += size_t(row) * slots_stride;
  q += size_t(row) * q_stride * 2 + first_head * 1152;
  // Where the selection is older than the preceding kernel, this brings it closer; where not, it costs nothing.
  if (threadIdx.x < 4 && int(rank * UNIT + threadIdx.x * 32) < width) prefetch(slots + rank * UNIT + threadIdx.x * 32);
  if (threadIdx.x == 4) prefetch(counts + row);
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const int count = min(load_fresh(counts + row), width), units = (count + UNIT - 1) / UNIT;
  const bool works = int(rank) < units;

  if (warp >= COMPUTING / 32) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
    produce(shared, base, cache, Row{slots, count, width, units, int(rank), int(blocks)}, warp - COMPUTING / 32, lane);
    if (blocks > 1) cluster_wait(), cluster_arrive(), cluster_wait();
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COMPUTE_REGISTERS));
  const int group = warp / 4, g = lane / 4, t = lane % 4;
  const int own_heads = min(heads - first_head, HEADS), head = warp % 4 * 16 + g;  // and head + 8
  if (works) read_queries(shared, base, q, own_heads, scale);
  float o[128];  // of octet j of the group's values: o[4j], o[4j + 1] of `head`, o[4j + 2], o[4j + 3] of head + 8
#pragma unroll
  for (int j = 0; j < 128; ++j) o[j] = 0;
  float maximum[2] = {NO_SCORE, NO_SCORE}, sum[2] = {0, 0};  // sum: over this group's tokens only
  if (blocks > 1) cluster_wait();
  computing_barrier();

  const u32 tokens = base + group * TILE_BYTES, own_p = tokens + 8 * COLUMN_BYTES;
  const u32 full = base + BARRIERS_AT + group * 32;
  int turn = 0;
  for (int unit = rank; unit < units; unit += blocks, ++turn) {
    float s[32];
#pragma unroll
    for (int j = 0; j < 32; ++j) s[j] = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      barrier_wait(full + half * 8, turn & 1);
      fence_async();
      products_begin();
#pragma unroll
      for (int column = half * 4; column < (half ? 9 : 4); ++column)
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const u64 a = swizzled(base + Q_AT + column * Q_COLUMN + k * 32),
                    b = swizzled(tokens + column * COLUMN_BYTES + k * 32);
          if (FP8 && column < 8)
            Products<64, 0>::f16(s, a, b, column + k);
          else
            Products<64, 0>::bf16(s, a, b, column + k);
        }
      products_commit();
    }
    const uint2 counted = *reinterpret_cast<const uint2 *>(shared + COUNTED_AT + group * 8);
    float2 factors = make_float2(scale, scale);
    if (FP8) {
      factors.x = *reinterpret_cast<const float *>(shared + FACTORS_AT + head * 4);
      factors.y = *reinterpret_cast<const float *>(shared + FACTORS_AT + head * 4 + 32);
    }
    products_wait<0>();
    hold(s);
    float most[2] = {NO_SCORE, NO_SCORE};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const u32 bits = (j < 4 ? counted.x : counted.y) >> (j % 4 * 8 + 2 * t);
      s[4 * j] = bits & 1 ? s[4 * j] * factors.x : NO_SCORE,
            s[4 * j + 1] = bits & 2 ? s[4 * j + 1] * factors.x : NO_SCORE;
      s[4 * j + 2] = bits & 1 ? s[4 * j + 2] * factors.y : NO_SCORE,
                s[4 * j + 3] = bits & 2 ? s[4 * j + 3] * factors.y : NO_SCORE;
      most[0] = fmaxf(most[0], fmaxf(s[4 * j], s[4 * j + 1])),
      most[1] = fmaxf(most[1], fmaxf(s[4 * j + 2], s[4 * j + 3]));
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      most[i] = fmaxf(most[i], __shfl_xor_sync(~0u, most[i], 1));
      most[i] = fmaxf(most[i], __shfl_xor_sync(~0u, most[i], 2));
      if (t == 0) *reinterpret_cast<float *>(shared + MAXIMA_AT + (group * HEADS + head + 8 * i) * 4) = most[i];
    }
    computing_barrier();                                              // maxima are there, and keys dead
    if (blocks > 1 && unit + int(blocks) >= units) cluster_arrive();  // so are the queries
    float shrink[2], from[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float other =
          *reinterpret_cast<const float *>(shared + MAXIMA_AT + ((group ^ 1) * HEADS + head + 8 * i) * 4);
      most[i] = fmaxf(most[i], other);
      shrink[i] = 1;
      if (most[i] > maximum[i] + 8) shrink[i] = exp2_fast(maximum[i] - most[i]), maximum[i] = most[i];
      from[i] = maximum[i] == NO_SCORE ? 0 : maximum[i];
      sum[i] *= shrink[i];
    }
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      u32 words[4];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const float p0 = exp2_fast(s[4 * (j + k)] - from[0]), p1 = exp2_fast(s[4 * (j + k) + 1] - from[0]);
        const float p2 = exp2_fast(s[4 * (j + k) + 2] - from[1]), p3 = exp2_fast(s[4 * (j + k) + 3] - from[1]);
        sum[0] += p0 + p1, sum[1] += p2 + p3;
        words[2 * k] = pack_p(p0, p1), words[2 * k + 1] = pack_p(p2, p3);
      }
      const int r = warp % 4 * 16 + lane % 16, piece = j + lane / 16;
      store_matrices(own_p + r * 128 + ((piece ^ r) & 7) * 16, words[0], words[1], words[2], words[3]);
    }
    fence_async();
    computing_barrier();
    if (turn && __any_sync(~0u, shrink[0] != 1 || shrink[1] != 1)) {
#pragma unroll
      for (int j = 0; j < 128; ++j) o[j] *= shrink[j / 2 % 2];
    }
    products_begin();
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const u64 a = swizzled(base + tile * TILE_BYTES + 8 * COLUMN_BYTES + k * 32);
        const u64 b = swizzled_columns(base + tile * TILE_BYTES + group * 4 * COLUMN_BYTES + k * 2048, COLUMN_BYTES);
        if (FP8)
          multiply_values_f16(o, a, b);
        else
          multiply_values_bf16(o, a, b);
      }
      products_commit();
    }
    products_wait<1>();
    if (lane == 0) barrier_arrive(base + BARRIERS_AT + 16 + group * 8);
    products_wait<0>();
    hold(o);
    if (lane == 0) barrier_arrive(base + BARRIERS_AT + 32 + 16 + group * 8);
  }

  // Maxima are the same in both groups; sums of weights are to be added.
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    sum[i] += __shfl_xor_sync(~0u, sum[i], 1);
    sum[i] += __shfl_xor_sync(~0u, sum[i], 2);
    if (t == 0) *reinterpret_cast<float *>(shared + TOTALS_AT + (group * HEADS + head + 8 * i) * 4) = sum[i];
    if (t == 0 && group == 0) *reinterpret_cast<float *>(shared + MAXIMA_AT + (head + 8 * i) * 4) = maximum[i];
  }
  if (blocks > 1 && !works) cluster_arrive();
  computing_barrier();
  const float *const totals = reinterpret_cast<const float *>(shared + TOTALS_AT);
  float inverse[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float all = totals[head + 8 * i] + totals[HEADS + head + 8 * i];
    inverse[i] = all > 0 ? 1 / all : 0;
  }
  if (blocks == 1) {
#pragma unroll
    for (int j = 0; j < 32; j += 4)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        u32 words[4];
#pragma unroll
        for (int k = 0; k < 4; ++k)
          words[k] = pack_bf16(o[4 * (j + k) + 2 * i] * inverse[i], o[4 * (j + k) + 2 * i + 1] * inverse[i]);
        transpose_quad(words, t);
        if (head + 8 * i < own_heads)
          *reinterpret_cast<uint4 *>(
              out + ((size_t(row) * heads + first_head + head + 8 * i) * LATENT + group * 256 + (j + t) * 8) * 2) =
              make_uint4(words[0], words[1], words[2], words[3]);
      }
    return;
  }

  const bool even = !(blocks & (blocks - 1));  // all own as many values
  const int firsts = first_owned(min(lane, int(blocks)), blocks);  // of the block that this lane stands for
  const int own_first = __shfl_sync(~0u, firsts, rank), owned = __shfl_sync(~0u, firsts, rank + 1) - own_first;
  const int senders = min(int(blocks), units), chunk = HEADS * owned * 2;  // bytes from one block to this one
  if (threadIdx.x == 0) barrier_expect(weights_in, senders * HEADS * 8), barrier_expect(sums_in, senders * chunk);
  if (works) {
#pragma unroll
    for (int j = 0; j < 32; j += 4) {
      const int value = group * 256 + j * 8;
      const int owner = value / GRANULE * int(blocks) / (LATENT / GRANULE);
      const int start = __shfl_sync(~0u, firsts, owner), wide = __shfl_sync(~0u, firsts, owner + 1) - start;
      u8 *const to = shared + STAGE_AT + (HEADS * start + head * wide + value - start + t * 8) * 2;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        u32 words[4];
#pragma unroll
        for (int k = 0; k < 4; ++k)
          words[k] = pack_f16(o[4 * (j + k) + 2 * i] * inverse[i], o[4 * (j + k) + 2 * i + 1] * inverse[i]);
        transpose_quad(words, t);
        *reinterpret_cast<uint4 *>(to + i * 8 * wide * 2) = make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
    computing_barrier();
  }
  cluster_wait();
  if (works) {
    // Each block begins with another receiver, so that none has to take from all at once.
    for (int at = threadIdx.x; at < HEADS * int(blocks); at += COMPUTING) {
      const int of = at % HEADS;
      u32 owner = at / HEADS + rank;
      if (owner >= blocks) owner -= blocks;
      push(remote(base + WEIGHTS_AT + (rank * HEADS + of) * 8, owner),
           *reinterpret_cast<const float *>(shared + MAXIMA_AT + of * 4), totals[of] + totals[HEADS + of],
           remote(weights_in, owner));
    }
    if (even) {
      const int shift = __ffs(chunk) - 1;
#pragma unroll 4
      for (int at = threadIdx.x * 16; at < HEADS * LATENT * 2; at += COMPUTING * 16) {
        const int owner = ((at >> shift) + rank) & (blocks - 1), offset = at & (chunk - 1);
        const uint4 v = *reinterpret_cast<const uint4 *>(shared + STAGE_AT + owner * chunk + offset);
        const u32 words[4] = {v.x, v.y, v.z, v.w};
        push_words(remote(base + INBOX_AT + rank * chunk + offset, owner), words, remote(sums_in, owner));
      }
    } else {
      for (int step = 0; step < int(blocks); ++step) {
        const u32 owner = (step + rank) % blocks;
        const int start = first_owned(owner, blocks), bytes = (first_owned(owner + 1, blocks) - start) * HEADS * 2;
        const u32 to = remote(base + INBOX_AT + rank * bytes, owner), signal = remote(sums_in, owner);
#pragma unroll 2
        for (int offset = threadIdx.x * 16; offset < bytes; offset += COMPUTING * 16) {
          const uint4 v = *reinterpret_cast<const uint4 *>(shared + STAGE_AT + start * HEADS * 2 + offset);
          const u32 words[4] = {v.x, v.y, v.z, v.w};
          push_words(to + offset, words, signal);
        }
      }
    }
  }
  // Each sender's share of the row, while the sums are on their way.
  barrier_wait(weights_in, 0);
  {
    const int of = threadIdx.x % HEADS, first = threadIdx.x / HEADS;  // of every fourth sender
    const u8 *const weights = shared + WEIGHTS_AT + of * 8;
    float2 weight[MOST_BLOCKS];
    float most = NO_SCORE, all = 0;
#pragma unroll
    for (int c = 0; c < MOST_BLOCKS; ++c)
      weight[c] = c < senders ? read_pair(weights + c * HEADS * 8) : make_float2(NO_SCORE, 0);
#pragma unroll
    for (int c = 0; c < MOST_BLOCKS; ++c) most = fmaxf(most, weight[c].x);
    if (most == NO_SCORE) most = 0;
#pragma unroll
    for (int c = 0; c < MOST_BLOCKS; ++c) weight[c].x = exp2_fast(weight[c].x - most) * weight[c].y, all += weight[c].x;
    const float share = all > 0 ? 1 / all : 0;
#pragma unroll
    for (int c = 0; c < MOST_BLOCKS; ++c)
      if (c % 4 == first && c < senders)
        *reinterpret_cast<float *>(shared + SHARES_AT + (c * HEADS + of) * 4) = weight[c].x * share;
  }
  computing_barrier();
  barrier_wait(sums_in, 0);
  // Eight values of a head per step.
  for (int at = threadIdx.x; at < HEADS * owned / 8; at += COMPUTING) {
    const int of = at / (owned / 8), octet = at % (owned / 8);
    const u8 *const inbox = shared + INBOX_AT + (of * owned + octet * 8) * 2;
    const float *const shares = reinterpret_cast<const float *>(shared + SHARES_AT) + of;
    float v[8] = {0, 0, 0, 0, 0, 0, 0, 0};
#pragma unroll
    for (int c = 0; c < MOST_BLOCKS; ++c) {
      if (c >= senders) continue;
      const uint4 words = *reinterpret_cast<const uint4 *>(inbox + c * HEADS * owned * 2);
      const float share = shares[c * HEADS];
      const u32 w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float2 pair = unpack_f16(w[k]);
        v[2 * k] += share * pair.x, v[2 * k + 1] += share * pair.y;
      }
    }
    if (of < own_heads)
      *reinterpret_cast<uint4 *>(out +
                                 ((size_t(row) * heads + first_head + of) * LATENT + own_first + octet * 8) * 2) =
          make_uint4(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
  }
}
