// Stored weights as operands of mma.m16n8k16: what 16 outputs by 64 or 128 of K look like in shared memory, and their
// product with 8 rows of x.
//
// A "step" is 16 outputs by STEP_K of K, packed once at load (sm90_packing.py) so that a lane's loads are 16 bytes wide
// and conflict-free. Lane 4 g + t holds, of outputs g and g + 8, sixteen consecutive columns per 64 of K: 16 t to 16 t +
// 15. Product j of a block of 64 takes columns 16 t + 4 j to + 3 of every lane; x is read in the same order, so which of
// the hardware's columns that is does not matter. A group of sixteen that shares an NVFP4 scale is one lane's, which
// therefore widens one scale per output and 64 of K instead of four.
//
// Every widened weight is exact in bfloat16; NVFP4's e2m1 times its e4m3 scale needs six bits. What the sums still lack
// is stated at each format.

#include "sm90_barriers.cuh"

constexpr int BF16 = 0, FP8 = 1, INT4 = 2, NVFP4 = 3, NONE = -1;

__device__ __forceinline__ u32 multiply_pairs(u32 a, u32 b) {
  u32 v;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
  return v;
}

__device__ __forceinline__ u32 subtract_pairs(u32 a, u32 b) {
  u32 v;
  asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
  return v;
}

__device__ __forceinline__ u32 rotate(u32 word, int left) { return __funnelshift_l(word, word, left); }

// From shared memory, which is named by a pointer or by its address. An address keeps the compiler from working it out anew.
__device__ __forceinline__ uint4 load16(const u8 *shared) { return *reinterpret_cast<const uint4 *>(shared); }
__device__ __forceinline__ uint4 load16(u32 shared) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(shared));
  return v;
}
__device__ __forceinline__ float2 load8(const u8 *shared) { return *reinterpret_cast<const float2 *>(shared); }
__device__ __forceinline__ float2 load8(u32 shared) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(shared));
  return v;
}
__device__ __forceinline__ u32 load4(const u8 *shared) { return *reinterpret_cast<const u32 *>(shared); }
__device__ __forceinline__ u32 load4(u32 shared) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(shared));
  return v;
}

// Two chains of dependent products: even and odd j.
typedef float Sums[2][4];

// A lane's part of a row of x for 64 of K.
struct Fragment {
  uint4 first, second;
};

// The four products of a block of 64: `upper` and `lower` are the pairs of outputs g and g + 8.
__device__ __forceinline__ void multiply_block(Sums &sums, const u32 (&upper)[8], const u32 (&lower)[8],
                                               const Fragment &x) {
  mma(sums[0], upper[0], lower[0], upper[1], lower[1], x.first.x, x.first.y);
  mma(sums[1], upper[2], lower[2], upper[3], lower[3], x.first.z, x.first.w);
  mma(sums[0], upper[4], lower[4], upper[5], lower[5], x.second.x, x.second.y);
  mma(sums[1], upper[6], lower[6], upper[7], lower[7], x.second.z, x.second.w);
}

// A format: K and bytes of a step; the pairs of outputs g and g + 8 that lane 4 g + t has of one block of 64 (`step` is the
// step's own address); and, where sums of a step still have to be multiplied by it, the scale of either output.
template <int KIND>
struct Format;

// Four pieces of 512 bytes: outputs g, columns 0..7 and 8..15 of each lane's sixteen, then outputs g + 8.
template <>
struct Format<BF16> {
  static constexpr int STEP_K = 64, BYTES = 2048;
  static constexpr bool SCALED = false;

  template <typename At>
  __device__ __forceinline__ static void load(u32 (&pairs)[8], At pieces) {
    const uint4 first = load16(pieces), second = load16(pieces + 512);
    pairs[0] = first.x, pairs[1] = first.y, pairs[2] = first.z, pairs[3] = first.w;
    pairs[4] = second.x, pairs[5] = second.y, pairs[6] = second.z, pairs[7] = second.w;
  }

  template <typename At>
  __device__ __forceinline__ static void widen(u32 (&upper)[8], u32 (&lower)[8], At step, int, int lane) {
    load(upper, step + lane * 16);
    load(lower, step + 1024 + lane * 16);
  }

  template <typename At>
  __device__ __forceinline__ static float2 scales(At, int) { return make_float2(1.0f, 1.0f); }
};

// e4m3, two blocks of 64 (of 512 bytes per eight outputs), then two float scales: of the first and the last eight outputs
// (gate and up may lie in different blocks of 128), and 8 bytes of nothing.
template <>
struct Format<FP8> {
  static constexpr int STEP_K = 128, BYTES = 2064;
  static constexpr bool SCALED = true;

  // Four codes to two pairs: sign at bit 15, exponent and mantissa from bit 10 down, times 2^120. Of the packed word the
  // first pair lies in place; of the second, exponents are four bits too high, mantissas four too low, signs a rotation by
  // four away.
  __device__ __forceinline__ static void widen_word(u32 *pairs, u32 word) {
    const u32 high = rotate(word, 28) & 0x87808780u;
    pairs[0] = multiply_pairs(word & 0x87f087f0u, 0x7b807b80u);
    pairs[1] = multiply_pairs(high | (word << 4 & 0x00700070u), 0x7b807b80u);
  }

  template <typename At>
  __device__ __forceinline__ static void widen(u32 (&upper)[8], u32 (&lower)[8], At step, int block, int lane) {
    const uint4 first = load16(step + block * 1024 + lane * 16), second = load16(step + block * 1024 + 512 + lane * 16);
    widen_word(upper, first.x), widen_word(upper + 2, first.y);
    widen_word(upper + 4, first.z), widen_word(upper + 6, first.w);
    widen_word(lower, second.x), widen_word(lower + 2, second.y);
    widen_word(lower + 4, second.z), widen_word(lower + 6, second.w);
  }

  template <typename At>
  __device__ __forceinline__ static float2 scales(At step, int) {
    return load8(step + 2048);
  }
};

// Nibbles of offset 8, two blocks of 64 (512 bytes: a lane's sixteen of output g, then of output g + 8), then the scales
// of outputs g and g + 8 as pairs of bfloat16. A group of 128 is one step.
template <>
struct Format<INT4> {
  static constexpr int STEP_K = 128, BYTES = 1056;
  static constexpr bool SCALED = true;

  // 128 + nibble is a bfloat16 whose last four bits are the nibble.
  __device__ __forceinline__ static void widen_word(u32 *pairs, u32 word) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      u32 both;  // (word >> 4 i & mask) | 128, in one instruction
      asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(both) : "r"(word >> (4 * i)), "r"(0x000f000fu), "r"(0x43004300u));
      pairs[i] = subtract_pairs(both, 0x43084308u);
    }
  }

  template <typename At>
  __device__ __forceinline__ static void widen(u32 (&upper)[8], u32 (&lower)[8], At step, int block, int lane) {
    const uint4 codes = load16(step + block * 512 + lane * 16);
    widen_word(upper, codes.x), widen_word(upper + 4, codes.y);
    widen_word(lower, codes.z), widen_word(lower + 4, codes.w);
  }

  template <typename At>
  __device__ __forceinline__ static float2 scales(At step, int lane) {
    const u32 both = load4(step + 1024 + lane / 4 * 4);
    return make_float2(__uint_as_float(both << 16), __uint_as_float(both & 0xffff0000u));
  }
};

// e2m1, two blocks of 64 (512 bytes: a lane's sixteen of output g in two words, then of output g + 8), then four bytes of
// scales per lane: outputs g and g + 8 of the first block and of the second. Sums are 2^-8 of the true ones, and lack the
// global scale.
template <>
struct Format<NVFP4> {
  static constexpr int STEP_K = 128, BYTES = 1152;
  static constexpr bool SCALED = false;

  // A scale's byte is its e4m3 number with five bits of exponent and three of mantissa: in bfloat16, times 2^118, that is
  // the byte four bits up, under three ones. Where a code stands in bits 8 to 6 (exponent, mantissa) and 15 (sign), it is
  // the e2m1 number times 2^-126, zero and one half included.
  // The bits of a code, {15, 8, 7, 6}, tile a word three times under rotations by {0, 4, 10} or {2, 6, 12}; what these
  // leave of two words makes one more that holds two more pairs: 16 codes in 16 integer instructions.
  __device__ __forceinline__ static void widen_words(u32 (&pairs)[8], u32 first, u32 second, u32 scales, int byte) {
    const u32 scale = __byte_perm(scales, 0, byte | 0x40 | byte << 8 | 0x4000) * 16 + 0x70007000u;
    const u32 mask = 0x81c081c0u;
    u32 both;  // these bits of the first word, the others of the second
    asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(both) : "r"(0x06030603u), "r"(first), "r"(second));
    pairs[0] = multiply_pairs(first & mask, scale);
    pairs[1] = multiply_pairs(first << 4 & mask, scale);
    pairs[2] = multiply_pairs(rotate(first, 10) & mask, scale);
    pairs[3] = multiply_pairs(second << 2 & mask, scale);
    pairs[4] = multiply_pairs(second << 6 & mask, scale);
    pairs[5] = multiply_pairs(rotate(second, 12) & mask, scale);
    pairs[6] = multiply_pairs(rotate(both, 8) & mask, scale);
    pairs[7] = multiply_pairs(rotate(both, 14) & mask, scale);
  }

  template <typename At>
  __device__ __forceinline__ static void widen(u32 (&upper)[8], u32 (&lower)[8], At step, int block, int lane) {
    const u32 scales = load4(step + 1024 + lane * 4);
    const uint4 codes = load16(step + block * 512 + lane * 16);
    widen_words(upper, codes.x, codes.y, scales, block * 2);
    widen_words(lower, codes.z, codes.w, scales, block * 2 + 1);
  }

  template <typename At>
  __device__ __forceinline__ static float2 scales(At, int) { return make_float2(1.0f, 1.0f); }
};

// sums += a step times 8 rows of x: x(block) is this lane's part of its row for a block of 64 of the step.
template <int KIND, typename Rows>
__device__ __forceinline__ void multiply(Sums &sums, const u8 *step, int lane, Rows x) {
  typedef Format<KIND> F;
  Sums products = {};
#pragma unroll
  for (int block = 0; block < F::STEP_K / 64; ++block) {
    u32 upper[8], lower[8];
    const Fragment rows = x(block);
    F::widen(upper, lower, step, block, lane);
    multiply_block(F::SCALED ? products : sums, upper, lower, rows);
  }
  if (F::SCALED) {
    const float2 scale = F::scales(step, lane);
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[0][i] += (i < 2 ? scale.x : scale.y) * (products[0][i] + products[1][i]);
  }
}
