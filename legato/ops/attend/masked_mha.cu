// Attention of a prompt's rows with keys and values of each head, over all tokens of their request: a bit per row and
// token says what a row's selection holds.
//
// A block takes 128 rows of a head, 64 in each of two warpgroups: S = Q K^T, 64 rows by the 128 tokens of a unit, then
// O = P V, 64 by 256, the weights in the registers in which the scores were. One thread of a third warpgroup has the copy
// engine fetch pieces of 16 KB into a ring, in the order in which both warpgroups use them: of a unit four columns of 64
// numbers of all keys (the last is the rope part, which heads share), then the values of four times 32 tokens. A place of
// the ring is refilled as soon as both have multiplied what it holds. Everything lies in the 128-byte swizzle: keys are
// K-major, values M-major.
//
// The warpgroups score in turn. So one's softmax stands beside the other's products, and the tensor cores always have some.
//
// Sums are scaled down only when a maximum has grown by more than 2^8: weights stay below 2^8, and nothing else changes.
//
// Macro: SHARED_BYTES: the shared memory, as the host counts it.

#include "hopper.cuh"
#include "products.cuh"

constexpr int THREADS = 384, COMPUTING = 256, ROWS = 128, UNIT = 128, WIDTH = 256, PLACE = 8;
constexpr int PIECE_BYTES = 16384, PIECES = 10;  // of the ring
constexpr int COLUMNS = 7, KEY_COLUMNS = 3;  // of 64 numbers, of a head's keys and values
constexpr int VALUE_TOKENS = 32, COLUMN_BYTES = VALUE_TOKENS * 128;
constexpr int Q_COLUMN = ROWS * 128;

constexpr int RING_AT = WIDTH / 64 * Q_COLUMN;
constexpr int FULL_AT = RING_AT + PIECES * PIECE_BYTES, EMPTY_AT = FULL_AT + PIECES * 8, QUERIES_AT = EMPTY_AT + PIECES * 8;
static_assert(SHARED_BYTES == QUERIES_AT + 8, "");
static_assert(SHARED_BYTES <= 227 * 1024, "");

// 64 numbers of a column of so many rows, as the map says.
__device__ __forceinline__ void copy_box(u32 target, const CUtensorMap *map, int column, int row, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
               " [%0], [%1, {%2, %3, %4}], [%5];"
               ::"r"(target), "l"(map), "r"(0), "r"(column), "r"(row), "r"(barrier)
               : "memory");
}
// A group's turn to score, which the other one passes on.
__device__ __forceinline__ void await_turn(int group) { asm volatile("bar.sync %0, 256;" ::"r"(group + 1) : "memory"); }
__device__ __forceinline__ void pass_turn(int group) { asm volatile("bar.arrive %0, 256;" ::"r"(2 - group) : "memory"); }

// Where both sides stand in the ring.
struct Cursor {
  int place;
  u32 parity;
  __device__ __forceinline__ void advance() {
    if (++place == PIECES) place = 0, parity ^= 1;
  }
};

struct Maps {
  const CUtensorMap *keys, *rope, *values;
};

// By one thread.
__device__ __forceinline__ void produce(u32 base, const Maps &maps, int head, int units) {
  Cursor at{0, 1};  // the first round finds every place empty
#pragma unroll 1
  for (int unit = 0; unit < units; ++unit)
#pragma unroll
    for (int piece = 0; piece < 8; ++piece) {
      const u32 full = base + FULL_AT + at.place * 8, to = base + RING_AT + at.place * PIECE_BYTES;
      barrier_wait(full + (EMPTY_AT - FULL_AT), at.parity);
      barrier_expect(full, PIECE_BYTES);
      if (piece < 4) {
        const bool rope = piece == KEY_COLUMNS;
        copy_box(to, rope ? maps.rope : maps.keys, rope ? 0 : head * COLUMNS + piece, unit * UNIT, full);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          copy_box(to + i * COLUMN_BYTES, maps.values, head * COLUMNS + KEY_COLUMNS + i,
                   unit * UNIT + (piece - 4) * VALUE_TOKENS, full);
      }
      at.advance();
    }
}

// The first `count` of 32 bits.
__device__ __forceinline__ u32 first_bits(int count) { return count <= 0 ? 0 : ~0u >> (32 - min(count, 32)); }

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    masked_mha(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap key_map,
               const __grid_constant__ CUtensorMap rope_map, const __grid_constant__ CUtensorMap value_map,
               const int *lengths, const uint2 *masks, u8 *out, int rows, int tokens, int mask_units, float scale) {
  extern __shared__ __align__(1024) u8 shared[];
  const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const int head = blockIdx.x, heads = gridDim.x;
  // The last rows have most tokens, and begin first.
  const int first_row = (gridDim.y - 1 - blockIdx.y) * ROWS;
  const u32 base = shared_address(shared), queries_in = base + QUERIES_AT;
  if (threadIdx.x == 0) {
#pragma unroll
    for (int place = 0; place < PIECES; ++place)
      barrier_init(base + FULL_AT + place * 8, 1), barrier_init(base + EMPTY_AT + place * 8, COMPUTING / 32);
    barrier_init(queries_in, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const int places = (rows + PLACE - 1) / PLACE, last_place = min((first_row + ROWS) / PLACE, places) - 1;
  const int units = __shfl_sync(~0u, (min(load_fresh(lengths + last_place), tokens) + UNIT - 1) / UNIT, 0);

  if (warp >= COMPUTING / 32) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (warp == COMPUTING / 32 && lane == 0) {
      barrier_expect(queries_in, RING_AT);
#pragma unroll
      for (int column = 0; column < 4; ++column)
        copy_box(base + column * Q_COLUMN, &q_map, head * 4 + column, first_row, queries_in);
      produce(base, Maps{&key_map, &rope_map, &value_map}, head, units);
    }
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
  const int group = warp / 4, g = lane / 4, t = lane % 4;
  const int row = first_row + warp * 16 + g;  // and row + 8, of the next place
  const u32 queries = lower_half(base + group * (Q_COLUMN / 2)), keys = lower_half(base + RING_AT);
  const u32 values = u32(swizzled_columns(base + RING_AT, COLUMN_BYTES));
  auto release = [&](int place) {
    if (lane == 0) barrier_arrive(base + EMPTY_AT + place * 8);
  };
  // Rows beyond the last see nothing.
  int length[2];
  const uint2 *seen_by[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int place = (first_row + warp * 16) / PLACE + i, there = min(place, places - 1);
    length[i] = place == there ? min(load_fresh(lengths + there), tokens) : 0;
    seen_by[i] = masks + size_t(there) * mask_units * (2 * PLACE) + g;
  }
  float o[128];  // of octet j of the values: o[4j], o[4j + 1] of `row`, o[4j + 2], o[4j + 3] of row + 8
#pragma unroll
  for (int j = 0; j < 128; ++j) o[j] = 0;
  float maximum[2] = {NO_SCORE, NO_SCORE}, sum[2] = {0, 0};
  block_barrier_wait(queries_in, 0);

  Cursor at{0, 0};
#pragma unroll 1
  for (int unit = 0; unit < units; ++unit) {
    u32 seen[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint2 low = load_fresh(seen_by[i]), high = load_fresh(seen_by[i] + PLACE);
      seen[i][0] = low.x, seen[i][1] = low.y, seen[i][2] = high.x, seen[i][3] = high.y;
      seen_by[i] += 2 * PLACE;
    }
    if (group || unit) await_turn(group);
    float s[64];
    int before = 0;
#pragma unroll
    for (int column = 0; column < 4; ++column) {
      block_barrier_wait(base + FULL_AT + at.place * 8, at.parity);
      products_begin();
#pragma unroll
      for (int k = 0; k < 4; ++k)
        Products<128, 0>::bf16(s, matrix(queries, column * Q_COLUMN + k * 32),
                               matrix(keys + at.place * (PIECE_BYTES >> 4), k * 32), column + k);
      products_commit();
      if (column) products_wait<1>(), release(before);
      before = at.place;
      at.advance();
    }
    products_wait<0>();
    hold(s);
    release(before);
    if (group == 0 || unit + 1 < units) pass_turn(group);
    float most[2] = {NO_SCORE, NO_SCORE};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if ((unit + 1) * UNIT > length[i]) {
#pragma unroll
        for (int w = 0; w < 4; ++w) seen[i][w] &= first_bits(length[i] - unit * UNIT - w * 32);
      }
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const u32 bits = seen[i][w] >> (2 * t);
#pragma unroll
        for (int j = 4 * w; j < 4 * w + 4; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float &score = s[4 * j + 2 * i + e];
            score = bits >> (j % 4 * 8 + e) & 1 ? score : NO_SCORE;
            most[i] = fmaxf(most[i], score);
          }
      }
    }
    float shrink[2], from[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      most[i] = fmaxf(most[i], __shfl_xor_sync(~0u, most[i], 1));
      most[i] = fmaxf(most[i], __shfl_xor_sync(~0u, most[i], 2)) * scale;
      shrink[i] = 1;
      if (most[i] > maximum[i] + 8) shrink[i] = exp2_fast(maximum[i] - most[i]), maximum[i] = most[i];
      from[i] = maximum[i] == NO_SCORE ? 0 : maximum[i];
      sum[i] *= shrink[i];
    }
    u32 p[8][4];  // of 16 tokens, as a left operand
#pragma unroll
    for (int j = 0; j < 16; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float p0 = exp2_fast(fmaf(s[4 * j + 2 * i], scale, -from[i]));
        const float p1 = exp2_fast(fmaf(s[4 * j + 2 * i + 1], scale, -from[i]));
        sum[i] += p0 + p1;
        p[j / 2][j % 2 * 2 + i] = pack_bf16(p0, p1);
      }
    if (unit && __any_sync(~0u, shrink[0] != 1 || shrink[1] != 1)) {
#pragma unroll
      for (int j = 0; j < 128; ++j) o[j] *= shrink[j / 2 % 2];
    }
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      block_barrier_wait(base + FULL_AT + at.place * 8, at.parity);
      products_begin();
#pragma unroll
      for (int k = 0; k < 2; ++k)
        multiply_values_bf16(o, p[2 * part + k], matrix(values + at.place * (PIECE_BYTES >> 4), k * 2048));
      products_commit();
      if (part) products_wait<1>(), release(before);
      before = at.place;
      at.advance();
    }
    products_wait<0>();
    hold(o);
    release(before);
  }

  float inverse[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    sum[i] += __shfl_xor_sync(~0u, sum[i], 1);
    sum[i] += __shfl_xor_sync(~0u, sum[i], 2);
    inverse[i] = sum[i] > 0 ? 1 / sum[i] : 0;
  }
#pragma unroll
  for (int j = 0; j < 32; j += 4)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      u32 words[4];
#pragma unroll
      for (int k = 0; k < 4; ++k)
        words[k] = pack_bf16(o[4 * (j + k) + 2 * i] * inverse[i], o[4 * (j + k) + 2 * i + 1] * inverse[i]);
      transpose_quad(words, t);
      if (row + 8 * i < rows)
        *reinterpret_cast<uint4 *>(out + ((size_t(row + 8 * i) * heads + head) * WIDTH + (j + t) * 8) * 2) =
            make_uint4(words[0], words[1], words[2], words[3]);
    }
}
