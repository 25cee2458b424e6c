// Absorbed attention of each row over its selected tokens of a bfloat16 cache, for up to 16 heads and more rows than a GPU has
// multiprocessors.
//
// Thread blocks stay and take one row after the other. A multiprocessor holds two of one warpgroup each, of which one works while
// the other waits for tokens; and a block waits for those of its next row no longer than for the next of the same. All blocks go
// through ascending selections at one pace, so that tokens come from memory once for several rows.
//
// A unit is 64 entries. As in sparse_mla_few.cu, tokens stand on the wide side of the products and heads on the narrow one,
// S^T = K q^T and O^T = V^T P^T, and keys and values are the same nine columns of 64 values in the 128-byte swizzle. Warp w scores
// tokens 16w to 16w + 15; then all sum 64 values of the unit at a time. Columns are refilled with the tokens of the next unit, of
// this row or the next, as soon as nobody reads them: rope when scores are made, others two by two when their values are summed.
//
// Entries that do not count are never read: their tokens are zeros, their scores minus infinity. A row without tokens is one such unit.
//
// Macros: HEADS (8 or 16); FIXED_BYTES: the shared memory, as the host counts it.

#include "hopper.cuh"
#include "products.cuh"
#include "softmax.cuh"

constexpr int THREADS = 128, UNIT = 64, LATENT = 512, COLUMNS = LATENT / 64, ROPE = COLUMNS, ROW_BYTES = 1152;
constexpr int COLUMN_BYTES = UNIT * 128;
constexpr int Q_COLUMN = HEADS * 128, Q_BYTES = 9 * Q_COLUMN;
constexpr int SUMS = HEADS / 2;

constexpr int Q_AT = 9 * COLUMN_BYTES;                  // of this row and of the next, in turn
constexpr int P_AT = Q_AT + 2 * Q_BYTES;                // weights of 64 tokens
constexpr int WARPS_AT = P_AT + HEADS * 128;            // each warp's maximum of each head
constexpr int WARP_SUMS_AT = WARPS_AT + 4 * HEADS * 4;  // and its sum of weights
static_assert(FIXED_BYTES == WARP_SUMS_AT + 4 * HEADS * 4, "");
constexpr u32 NOTHING = 0xffffffffu;

__device__ __forceinline__ u32 transposed(u32 pair) {  // of 8 x 8 numbers, two a lane
  u32 v;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(v) : "r"(pair));
  return v;
}

// This lane's part in fetching tokens: 16 bytes of each 128 of tokens 16 * warp + lane / 8 + 4i of a unit.
struct Fetch {
  const u8 *cache;  // at this lane's piece of token 0
  u32 targets[2];   // of even and of odd i, less i * 512, in column 0
  int found[4];     // slots of the unit that comes next
  u32 token[4];     // of the unit at hand, in units of 16 bytes

  __device__ __forceinline__ void look(const int *slots, int first, int count) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      found[i] = -1;
      if (first + 4 * i < count) found[i] = load_fresh(slots + first + 4 * i);
    }
  }
  __device__ __forceinline__ void take() {
#pragma unroll
    for (int i = 0; i < 4; ++i) token[i] = found[i] >= 0 ? u32(found[i]) * (ROW_BYTES / 16) : NOTHING;
  }
  __device__ __forceinline__ void columns(int first, int count) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool wanted = token[i] != NOTHING;
      const u8 *pointer = cache + size_t(wanted ? token[i] : 0) * 16;
      settle(pointer);
#pragma unroll
      for (int k = first; k < first + count; ++k)
        copy_async(targets[i % 2] + i * 512 + k * COLUMN_BYTES, pointer + k * 128, wanted);
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    sparse_mla(const u8 *q, const u8 *cache, const int *slots, const int *counts, u8 *out, int heads, int width,
               int slots_stride, int q_stride, float scale, int rows) {
  extern __shared__ __align__(1024) u8 shared[];
  const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0), g = lane / 4, t = lane % 4;
  const u32 base = shared_address(shared);
  const int my_token = warp * 16 + lane / 8;
  const u32 target = base + my_token * 128 + ((lane ^ my_token) & 7) * 16;
  Fetch fetch = {cache + lane % 8 * 16, {target, target ^ 64}};
  const u32 keys_at = lower_half(base), weights_at = lower_half(base + P_AT);

  int count;
  auto open = [&](int row) { count = min(load_fresh(counts + row), width); };
  auto look = [&](int row, int unit) { fetch.look(slots + size_t(row) * slots_stride, unit * UNIT + my_token, count); };
  auto fetch_queries = [&](int row, int buffer) {
    const u8 *const from = q + size_t(row) * q_stride * 2;
#pragma unroll
    for (int at = threadIdx.x; at < HEADS * 72; at += THREADS) {
      const int head = at / 72, piece = at % 72;
      copy_async(base + Q_AT + buffer * Q_BYTES + piece / 8 * Q_COLUMN + head * 128 + (((piece ^ head) & 7) << 4),
                 from + (head < heads ? at : 0) * 16, head < heads);
    }
  };

  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  int row = blockIdx.x, unit = 0, buffer = 0;
  open(row), look(row, 0), fetch.take();
  int units = max((count + UNIT - 1) / UNIT, 1);
  fetch_queries(row, 0), fetch.columns(ROPE, 1), copies_commit();
#pragma unroll
  for (int m = 0; m < COLUMNS; m += 2) fetch.columns(m, 2), copies_commit();

  float o[COLUMNS][SUMS], maximum[HEADS / 4], sum[HEADS / 4];  // of heads 8j + 2t and the next
  while (true) {
    const bool starts = unit == 0, ends = unit + 1 == units;
    const int next_row = ends ? row + int(gridDim.x) : row, next_unit = ends ? 0 : unit + 1;
    const bool more = next_row < rows;
    if (starts) {
#pragma unroll
      for (int m = 0; m < COLUMNS; ++m)
#pragma unroll
        for (int j = 0; j < SUMS; ++j) o[m][j] = 0;
#pragma unroll
      for (int j = 0; j < HEADS / 4; ++j) maximum[j] = NO_SCORE, sum[j] = 0;
    }
    bool counted[2];  // this lane's tokens g and g + 8
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const u32 low = __shfl_sync(~0u, fetch.token[2 * i], g % 4 * 8);
      const u32 high = __shfl_sync(~0u, fetch.token[2 * i + 1], g % 4 * 8);
      counted[i] = (g < 4 ? low : high) != NOTHING;
    }
    if (more) {
      if (ends) open(next_row);
      look(next_row, next_unit);
    }

    const u32 queries_at = lower_half(base + Q_AT + buffer * Q_BYTES);
    float s[SUMS];
#pragma unroll
    for (int j = 0; j < SUMS; ++j) s[j] = 0;
    auto score = [&](int k) {
#pragma unroll
      for (int kk = 0; kk < 4; ++kk)
        Products<HEADS, 0>::bf16(s, matrix(keys_at, k * COLUMN_BYTES + kk * 32),
                                 matrix(queries_at, k * Q_COLUMN + kk * 32), 1);
    };
#pragma unroll
    for (int m = -2; m < COLUMNS; m += 2) {
      if (m == -2) copies_wait<4>();
      if (m == 0) copies_wait<3>();
      if (m == 2) copies_wait<2>();
      if (m == 4) copies_wait<1>();
      if (m == 6) copies_wait<0>();
      fence_async();
      __syncthreads();
      products_begin();
      if (m < 0)
        score(ROPE);
      else
        score(m), score(m + 1);
      products_commit();
    }
    products_wait<0>();
    hold(s);

    // The largest score of each head over the unit.
#pragma unroll
    for (int j = 0; j < HEADS / 8; ++j) {
      count_scores(s, j, counted, make_float2(scale, scale));
      const float2 most = largest_scores(s, j);
      if (g == 0) *reinterpret_cast<float2 *>(shared + WARPS_AT + (warp * HEADS + 8 * j + 2 * t) * 4) = most;
    }
    __syncthreads();
    if (more) {  // all scores are made
      fetch.take();
      if (ends) fetch_queries(next_row, buffer ^ 1);
      fetch.columns(ROPE, 1), copies_commit();
    }
#pragma unroll
    for (int j = 0; j < HEADS / 8; ++j) {
      float x = maximum[2 * j], y = maximum[2 * j + 1];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float2 v = read_pair(shared + WARPS_AT + (w * HEADS + 8 * j + 2 * t) * 4);
        x = fmaxf(x, v.x), y = fmaxf(y, v.y);
      }
      weigh(s, j, make_float2(x, y), maximum, sum, o, !starts);
      const int head = 8 * j + lane % 8, piece = warp * 2 + lane / 8 % 2;
      store_matrices_transposed(base + P_AT + head * 128 + ((piece ^ head) & 7) * 16, pack_bf16(s[4 * j], s[4 * j + 1]),
                                pack_bf16(s[4 * j + 2], s[4 * j + 3]));
      if (ends) {
        const float2 all = summed_over_tokens(sum[2 * j], sum[2 * j + 1]);
        if (g == 0) *reinterpret_cast<float2 *>(shared + WARP_SUMS_AT + (warp * HEADS + 8 * j + 2 * t) * 4) = all;
      }
    }
    fence_async();
    __syncthreads();

    // The weighted sums, 64 values a column.
    products_begin();
#pragma unroll
    for (int m = 0; m < COLUMNS; ++m) {
#pragma unroll
      for (int k = 0; k < 4; ++k)
        Products<HEADS, 1>::bf16(o[m], matrix(keys_at, m * COLUMN_BYTES + k * 2048), matrix(weights_at, k * 32), 1);
      if (m % 2) products_commit();
    }
    float share[HEADS / 4];
#pragma unroll
    for (int j = 0; j < HEADS / 8; ++j) {
      float x = 0, y = 0;
      if (ends) {
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const float2 v = read_pair(shared + WARP_SUMS_AT + (w * HEADS + 8 * j + 2 * t) * 4);
          x += v.x, y += v.y;
        }
      }
      share[2 * j] = x > 0 ? 1 / x : 0, share[2 * j + 1] = y > 0 ? 1 / y : 0;
    }
#pragma unroll
    for (int m = 0; m < COLUMNS; m += 2) {
      if (m == 0) products_wait<3>();
      if (m == 2) products_wait<2>();
      if (m == 4) products_wait<1>();
      if (m == 6) products_wait<0>();
      if (more) {
        __syncthreads();
        fetch.columns(m, 2), copies_commit();
      }
      hold(o[m]), hold(o[m + 1]);
      if (ends) {
#pragma unroll
        for (int i = m; i < m + 2; ++i)
#pragma unroll
          for (int j = 0; j < HEADS / 8; ++j) {
            // Two neighbouring values of one head a lane, of eight values and of the next eight.
            const u32 low = transposed(pack_bf16(o[i][4 * j] * share[2 * j], o[i][4 * j + 1] * share[2 * j + 1]));
            const u32 high = transposed(pack_bf16(o[i][4 * j + 2] * share[2 * j], o[i][4 * j + 3] * share[2 * j + 1]));
            const int head = 8 * j + g, value = i * 64 + warp * 16 + 2 * t;
            if (head < heads) {
              u8 *const to = out + ((size_t(row) * heads + head) * LATENT + value) * 2;
              *reinterpret_cast<u32 *>(to) = low, *reinterpret_cast<u32 *>(to + 16) = high;
            }
          }
      }
    }
    if (!more) break;
    if (ends) buffer ^= 1, units = max((count + UNIT - 1) / UNIT, 1);
    row = next_row, unit = next_unit;
  }
}
