// What stands between the two products of attention and the selection, in one launch: every row's query absorbed and
// rotated, its latent, rope key and index key stored, its index queries rounded with their gates.
//
// Two kinds of blocks, four warps each. The first `multiplying` of them (heads * LATENT / 64 for every `group_rows` rows, or
// none where the caller multiplies) absorb: a warp holds 16 outputs of one head's W_UK in registers, all of it fetched
// before griddepcontrol.wait (weights depend on nothing), and takes 16 rows of the query at a time through mma.m16n8k16. The
// others share out small items, a warp each: per row the latent, the rope key, four heads of the query's rope part, and on
// layers with an indexer its key and two heads of its query at a time.
// No item depends on another, nothing is accumulated across warps, and no row meets another: a row's bits are the same
// whatever the number of rows.
//
// Values are rounded to bfloat16 where the reference rounds them. Macros: NOPE (N, a multiple of 32), LATENT (C, a multiple
// of 256), INDEXED, PACKED (the latent cache of 656 bytes per token; else bfloat16), INDEX_HEADS, WHOLE (nobody absorbs: queries
// are rotated where they lie). ROPE is 64, an index key has 128 numbers.

#include "../sm90.cuh"

constexpr int WARPS = 4;
constexpr int ROPE = 64, PAIRS = ROPE / 2;
constexpr int INDEX = 128;                     // X
constexpr int PAGE = 64, INDEX_PAGE_BYTES = PAGE * INDEX + 4 * PAGE;
constexpr int BLOCKS_K = NOPE / 32;            // of K, a lane has 16 bytes of each
constexpr int SLICE = 16;                      // outputs of a warp
constexpr int PIECES = LATENT / 256;           // of 16 bytes: a lane's part of a latent
constexpr int TOKEN_BYTES = PACKED ? LATENT + LATENT / 128 * 4 + 2 * ROPE : 2 * (LATENT + ROPE);
constexpr int ROPE_OFFSET = PACKED ? LATENT + LATENT / 128 * 4 : 2 * LATENT;
static_assert(NOPE % 32 == 0 && LATENT % 256 == 0, "a warp's loads are whole");
static_assert(!PACKED || LATENT == 512, "the 656-byte layout");

// Past the L1: a preceding kernel may still have been writing when this one began.
__device__ __forceinline__ uint4 load_fresh(const void *pointer) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(pointer) : "memory");
  return v;
}

__device__ __forceinline__ uint2 load_fresh_pair(const void *pointer) {
  uint2 v;
  asm volatile("ld.global.cg.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(pointer) : "memory");
  return v;
}

__device__ __forceinline__ u32 load_fresh_word(const void *pointer) {
  u32 v;
  asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(pointer) : "memory");
  return v;
}

__device__ __forceinline__ u32 load_fresh_half(const void *pointer) {
  unsigned short v;
  asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(v) : "l"(pointer) : "memory");
  return v;
}

// A weight. Not through ld.global.nc: those loads the assembler moves behind the wait, whatever the source says.
__device__ __forceinline__ uint4 load_weight(const void *pointer) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(pointer)
               : "memory");
  return v;
}

__device__ __forceinline__ uint2 load_weight_pair(const void *pointer) {
  uint2 v;
  asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(pointer) : "memory");
  return v;
}

// A branch around the store would let the assembler put the loads before it behind the branch.
__device__ __forceinline__ void store_where(bool wanted, void *pointer, u32 value) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %0, 0;\n@p st.global.u32 [%1], %2;\n}" ::"r"(u32(wanted)), "l"(pointer),
               "r"(value)
               : "memory");
}

// Four numbers, already divided by their scale, to e4m3; beyond 448 they saturate.
__device__ __forceinline__ u32 to_e4m3(float a, float b, float c, float d) {
  unsigned short first, second;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(first) : "f"(b), "f"(a));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(second) : "f"(d), "f"(c));
  return u32(first) | u32(second) << 16;
}

// 2^ceil(log2(max(largest, 1e-4) / 448)).
__device__ __forceinline__ float power_of_two_scale(float largest) {
  return __uint_as_float((__float_as_uint(__fdiv_rn(fmaxf(largest, 1e-4f), 448.0f)) + 0x007fffffu) & 0x7f800000u);
}

// 1 / scale, exactly: the exponent mirrored.
__device__ __forceinline__ float inverse(float scale) { return __uint_as_float(0x7f000000u - __float_as_uint(scale)); }

template <int LANES>
__device__ __forceinline__ float sum_over(float value) {
#pragma unroll
  for (int step = LANES / 2; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
  return value;
}

template <int LANES>
__device__ __forceinline__ float largest_over(float value) {
#pragma unroll
  for (int step = LANES / 2; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, step));
  return value;
}

// The pair (x, y) turned by an angle.
__device__ __forceinline__ u32 turned(u32 pair, float cosine, float sine) {
  const float x = low(pair), y = high(pair);
  return to_bf16_pair(x * cosine - y * sine, y * cosine + x * sine);
}

__device__ __forceinline__ float larger(float so_far, u32 pair) {
  return fmaxf(so_far, fmaxf(fabsf(low(pair)), fabsf(high(pair))));
}

struct Places {
  const u8 *qkv, *q;          // bfloat16 rows
  const float *cos, *sin;     // [T, 32]
  const int *slots;           // [T]
  int rows, heads, qkv_stride, q_stride, rank, group_rows;
};

__device__ __forceinline__ const u8 *element(const u8 *base, size_t row, int stride, int column) {
  return base + (row * stride + column) * 2;
}

// The next 8 * HALVES rows of one slice. Lanes without a row of their own repeat the last one: loads without conditions
// are in flight together.
template <int HALVES>
__device__ __forceinline__ void absorb_rows(const Places &at, const uint4 (&weights)[2][BLOCKS_K], u8 *absorbed, int head,
                                            int output, int first, int end, int lane) {
  uint4 x[HALVES][BLOCKS_K];
#pragma unroll
  for (int half = 0; half < HALVES; ++half) {
    const int row = min(first + half * 8 + lane / 4, end - 1);
    const u8 *own = element(at.q, row, at.q_stride, head * (NOPE + ROPE) + lane % 4 * 8);
#pragma unroll
    for (int k = 0; k < BLOCKS_K; ++k) x[half][k] = load_fresh(own + k * 64);
  }
  float sums[2][2][4] = {};
#pragma unroll
  for (int k = 0; k < BLOCKS_K; ++k) {
    const uint4 upper = x[0][k], lower = HALVES == 2 ? x[HALVES - 1][k] : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const uint4 w = weights[tile][k];
      mma(sums[tile][0], upper.x, lower.x, upper.y, lower.y, w.x, w.y);
      mma(sums[tile][1], upper.z, lower.z, upper.w, lower.w, w.z, w.w);
    }
  }
  // A lane's four outputs are neighbours: the packed order sees to it.
#pragma unroll
  for (int half = 0; half < HALVES; ++half) {
    const int row = first + half * 8 + lane / 4, i = half * 2;
    if (row >= end) continue;
    uint2 rounded;
    rounded.x = to_bf16_pair(sums[0][0][i] + sums[0][1][i], sums[0][0][i + 1] + sums[0][1][i + 1]);
    rounded.y = to_bf16_pair(sums[1][0][i] + sums[1][1][i], sums[1][0][i + 1] + sums[1][1][i + 1]);
    u8 *target = absorbed + ((size_t(row) * at.heads + head) * (LATENT + ROPE) + output + lane % 4 * 4) * 2;
    *reinterpret_cast<uint2 *>(target) = rounded;
  }
}

// One slice of one head's outputs for one group of rows.
__device__ __forceinline__ void absorb(const Places &at, const u8 *w_uk, u8 *absorbed, int block, int warp, int lane) {
  constexpr int BLOCKS = LATENT / (SLICE * WARPS);
  const int slice = block % BLOCKS, head = block / BLOCKS % at.heads, group = block / BLOCKS / at.heads;
  const int output = (slice * WARPS + warp) * SLICE;
  uint4 weights[2][BLOCKS_K];
  const u8 *packed = w_uk + (size_t(head) * (LATENT / 8) + output / 8) * BLOCKS_K * 512 + lane * 16;
#pragma unroll
  for (int tile = 0; tile < 2; ++tile)
#pragma unroll
    for (int k = 0; k < BLOCKS_K; ++k) weights[tile][k] = load_weight(packed + (tile * BLOCKS_K + k) * 512);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const int end = min(at.rows, (group + 1) * at.group_rows);
  int first = group * at.group_rows;
  for (; end - first > 8; first += 16) absorb_rows<2>(at, weights, absorbed, head, output, first, end, lane);
  if (first < end) absorb_rows<1>(at, weights, absorbed, head, output, first, end, lane);
}

// RMSNorm of one latent, stored.
__device__ __forceinline__ void store_latent(const Places &at, const u8 *norm, float eps, u8 *cache, int row, int lane) {
  uint4 weight[PIECES], piece[PIECES];
#pragma unroll
  for (int p = 0; p < PIECES; ++p) weight[p] = load_weight(norm + (lane * PIECES + p) * 16);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const int slot = int(load_fresh_word(at.slots + row));
#pragma unroll
  for (int p = 0; p < PIECES; ++p)
    piece[p] = load_fresh(element(at.qkv, row, at.qkv_stride, at.rank + (lane * PIECES + p) * 8));
  float squares = 0;
  u32 values[PIECES * 4], weights[PIECES * 4];
#pragma unroll
  for (int p = 0; p < PIECES; ++p) {
    values[p * 4] = piece[p].x, values[p * 4 + 1] = piece[p].y, values[p * 4 + 2] = piece[p].z, values[p * 4 + 3] = piece[p].w;
    weights[p * 4] = weight[p].x, weights[p * 4 + 1] = weight[p].y, weights[p * 4 + 2] = weight[p].z,
                weights[p * 4 + 3] = weight[p].w;
  }
#pragma unroll
  for (int i = 0; i < PIECES * 4; ++i) squares += low(values[i]) * low(values[i]) + high(values[i]) * high(values[i]);
  const float factor = rsqrtf(sum_over<32>(squares) / LATENT + eps);
  float largest = 0;
#pragma unroll
  for (int i = 0; i < PIECES * 4; ++i) {
    values[i] = to_bf16_pair(low(values[i]) * factor * low(weights[i]), high(values[i]) * factor * high(weights[i]));
    largest = larger(largest, values[i]);
  }
  if (PACKED) largest = largest_over<8>(largest);  // before any lane leaves
  if (slot < 0) return;
  u8 *token = cache + size_t(slot) * TOKEN_BYTES;
  if (PACKED) {
    const float scale = power_of_two_scale(largest), over = inverse(scale);
    u32 codes[PIECES * 2];
#pragma unroll
    for (int i = 0; i < PIECES * 2; ++i)
      codes[i] = to_e4m3(low(values[2 * i]) * over, high(values[2 * i]) * over, low(values[2 * i + 1]) * over,
                         high(values[2 * i + 1]) * over);
#pragma unroll
    for (int p = 0; p < PIECES; ++p)
      *reinterpret_cast<uint2 *>(token + (lane * PIECES + p) * 8) = make_uint2(codes[2 * p], codes[2 * p + 1]);
    if (lane % 8 == 0) *reinterpret_cast<float *>(token + LATENT + lane / 8 * 4) = scale;
  } else {
#pragma unroll
    for (int p = 0; p < PIECES; ++p)
      *reinterpret_cast<uint4 *>(token + (lane * PIECES + p) * 16) =
          make_uint4(values[p * 4], values[p * 4 + 1], values[p * 4 + 2], values[p * 4 + 3]);
  }
}

// One rotated rope key, stored; a lane has a pair.
__device__ __forceinline__ void store_rope_key(const Places &at, u8 *cache, int row, int lane) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const int slot = int(load_fresh_word(at.slots + row));
  const u32 pair = load_fresh_word(element(at.qkv, row, at.qkv_stride, at.rank + LATENT + lane * 2));
  const float cosine = __uint_as_float(load_fresh_word(at.cos + row * PAIRS + lane));
  const float sine = __uint_as_float(load_fresh_word(at.sin + row * PAIRS + lane));
  store_where(slot >= 0, cache + size_t(max(slot, 0)) * TOKEN_BYTES + ROPE_OFFSET + lane * 4, turned(pair, cosine, sine));
}

// Eight numbers turned by the angles 4i .. 4i + 3.
__device__ __forceinline__ uint4 turned_piece(const Places &at, uint4 piece, int row, int i) {
  const uint4 c = load_fresh(at.cos + row * PAIRS + i * 4), s = load_fresh(at.sin + row * PAIRS + i * 4);
  return make_uint4(turned(piece.x, __uint_as_float(c.x), __uint_as_float(s.x)),
                    turned(piece.y, __uint_as_float(c.y), __uint_as_float(s.y)),
                    turned(piece.z, __uint_as_float(c.z), __uint_as_float(s.z)),
                    turned(piece.w, __uint_as_float(c.w), __uint_as_float(s.w)));
}

// The rope part of four heads of one query.
__device__ __forceinline__ void rotate_query(const Places &at, u8 *absorbed, int row, int quad, int lane) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const int head = quad * 4 + lane / 8, i = lane % 8;
  if (head >= at.heads) return;
  const uint4 piece = load_fresh(element(at.q, row, at.q_stride, head * (NOPE + ROPE) + NOPE + i * 8));
  const size_t there = WHOLE ? size_t(row) * at.q_stride + head * (NOPE + ROPE) + NOPE
                             : (size_t(row) * at.heads + head) * (LATENT + ROPE) + LATENT;
  u8 *target = absorbed + (there + i * 8) * 2;
  *reinterpret_cast<uint4 *>(target) = turned_piece(at, piece, row, i);
}

#if INDEXED
struct Indexer {
  const u8 *norm_weight, *norm_bias;  // bfloat16 [128]
  u8 *cache, *q;                      // pages of 8448 bytes; e4m3 [T, INDEX_HEADS, 128]
  float *gates;                       // [T, INDEX_HEADS]
  float eps, gate_scale;
};

// LayerNorm and rotation of one index key, stored with its scale.
__device__ __forceinline__ void store_index_key(const Places &at, const Indexer &index, int row, int lane) {
  const uint2 weight = load_weight_pair(index.norm_weight + lane * 8), bias = load_weight_pair(index.norm_bias + lane * 8);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const int slot = int(load_fresh_word(at.slots + row));
  const uint2 key = load_fresh_pair(element(at.qkv, row, at.qkv_stride, at.rank + LATENT + ROPE + lane * 4));
  const int pair = lane % 16 * 2;
  const uint2 c = load_fresh_pair(at.cos + row * PAIRS + pair), s = load_fresh_pair(at.sin + row * PAIRS + pair);
  const float x[4] = {low(key.x), high(key.x), low(key.y), high(key.y)};
  const float mean = sum_over<32>(x[0] + x[1] + x[2] + x[3]) / INDEX;
  const float d[4] = {x[0] - mean, x[1] - mean, x[2] - mean, x[3] - mean};
  const float factor = rsqrtf(sum_over<32>(d[0] * d[0] + d[1] * d[1] + d[2] * d[2] + d[3] * d[3]) / INDEX + index.eps);
  u32 first = to_bf16_pair(d[0] * factor * low(weight.x) + low(bias.x), d[1] * factor * high(weight.x) + high(bias.x));
  u32 second = to_bf16_pair(d[2] * factor * low(weight.y) + low(bias.y), d[3] * factor * high(weight.y) + high(bias.y));
  const u32 turned_first = turned(first, __uint_as_float(c.x), __uint_as_float(s.x));
  const u32 turned_second = turned(second, __uint_as_float(c.y), __uint_as_float(s.y));
  first = lane < 16 ? turned_first : first, second = lane < 16 ? turned_second : second;
  const float scale = power_of_two_scale(largest_over<32>(larger(larger(0, first), second))), over = inverse(scale);
  if (slot < 0) return;
  u8 *page = index.cache + size_t(slot / PAGE) * INDEX_PAGE_BYTES;
  *reinterpret_cast<u32 *>(page + slot % PAGE * INDEX + lane * 4) =
      to_e4m3(low(first) * over, high(first) * over, low(second) * over, high(second) * over);
  if (lane == 0) *reinterpret_cast<float *>(page + PAGE * INDEX + slot % PAGE * 4) = scale;
}

// Two heads of one index query, with their gates.
__device__ __forceinline__ void round_index_query(const Places &at, const Indexer &index, int row, int two, int lane) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const int head = two * 2 + lane / 16, i = lane % 16;
  uint4 piece = load_fresh(element(at.q, row, at.q_stride, at.heads * (NOPE + ROPE) + head * INDEX + i * 8));
  const float gate =
      low(load_fresh_half(element(at.qkv, row, at.qkv_stride, at.rank + LATENT + ROPE + INDEX + head))) * index.gate_scale;
  const uint4 rotated = turned_piece(at, piece, row, i % 8);
  if (i < 8) piece = rotated;
  const float largest = larger(larger(larger(larger(0, piece.x), piece.y), piece.z), piece.w);
  const float scale = power_of_two_scale(largest_over<16>(largest)), over = inverse(scale);
  const size_t place = size_t(row) * INDEX_HEADS + head;
  *reinterpret_cast<uint2 *>(index.q + place * INDEX + i * 8) = make_uint2(
      to_e4m3(low(piece.x) * over, high(piece.x) * over, low(piece.y) * over, high(piece.y) * over),
      to_e4m3(low(piece.z) * over, high(piece.z) * over, low(piece.w) * over, high(piece.w) * over));
  if (i == 0) index.gates[place] = gate * scale;
}
#endif

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    attention_inputs(const u8 *__restrict__ qkv, const u8 *__restrict__ q, const u8 *__restrict__ w_uk,
                     const u8 *__restrict__ norm, const float *__restrict__ cos, const float *__restrict__ sin,
                     const int *__restrict__ slots, u8 *__restrict__ latent_cache, u8 *__restrict__ absorbed, int rows,
                     int heads, int rank, int qkv_stride, int q_stride, int group_rows, int multiplying, float eps
#if INDEXED
                     ,
                     const u8 *__restrict__ index_weight, const u8 *__restrict__ index_bias, u8 *__restrict__ index_cache,
                     u8 *__restrict__ index_q, float *__restrict__ gates, float index_eps, float gate_scale
#endif
    ) {
  asm volatile("griddepcontrol.launch_dependents;");
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Places at = {qkv, q, cos, sin, slots, rows, heads, qkv_stride, q_stride, rank, group_rows};
  if (int(blockIdx.x) < multiplying) {
    absorb(at, w_uk, absorbed, blockIdx.x, warp, lane);
    return;
  }
  const int quads = (heads + 3) / 4;
  const int per_row = 2 + quads + (INDEXED ? 1 + INDEX_HEADS / 2 : 0);
  const int item = (blockIdx.x - multiplying) * WARPS + warp, row = item / per_row;
  int what = item % per_row;
  if (row >= rows) return;
  if (what == 0) {
    store_latent(at, norm, eps, latent_cache, row, lane);
  } else if (what == 1) {
    store_rope_key(at, latent_cache, row, lane);
  } else if (what < 2 + quads) {
    rotate_query(at, absorbed, row, what - 2, lane);
  }
#if INDEXED
  else {
    const Indexer index = {index_weight, index_bias, index_cache, index_q, gates, index_eps, gate_scale};
    what -= 2 + quads;
    if (what == 0)
      store_index_key(at, index, row, lane);
    else
      round_index_query(at, index, row, what - 1, lane);
  }
#endif
}
