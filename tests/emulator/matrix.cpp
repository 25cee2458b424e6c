// What the lanes of a warp do together: exchanges, votes, matrices. Products add in ascending k, each with one rounding (fma), where
// the hardware's order and rounding are its own. An asynchronous product (wgmma) reads shared memory when it is done, which is at the
// latest when it is waited for; a warp has sixteen of its rows, and does them by itself.
#include <bit>
#include <cmath>

#include "machine.h"

struct Matrix {
  const Instruction* issued;
  u32 group, columns, type;
  bool accumulates, from_registers, transposed_a, transposed_b;
  float scale_a, scale_b;
  u64 a, b;
  u32 held[4][32];
  const s32* sums;
};

namespace {

constexpr s32 NO_OPERAND = INT32_MIN;
enum Type : s32 { BF16, F16, E4M3 };

float of_bits(u32 b) {
  float v;
  memcpy(&v, &b, 4);
  return v;
}
float number(u32 bits, u32 type) {
  if (type == BF16) return of_bits(bits << 16);
  if (type == F16) {
    _Float16 h;
    const u16 b = bits;
    memcpy(&h, &b, 2);
    return h;
  }
  if ((bits & 0x7F) == 0x7F) return of_bits(0x7FFFFFFF);
  const s32 exponent = bits >> 3 & 15, mantissa = bits & 7;
  const float a = exponent ? std::ldexp(1.0f + mantissa / 8.0f, exponent - 7) : std::ldexp(mantissa / 8.0f, -6);
  return bits & 0x80 ? -a : a;
}
const float* e4m3() {
  static float table[256];
  static const bool made = [] {
    for (u32 k = 0; k < 256; k++) table[k] = number(k, E4M3);
    return true;
  }();
  (void)made;
  return table;
}

// o: members, destination, predicate (or none), value, by, clamp, mode
void shuffle(Warp& w, const Instruction& i, u32 lanes) {
  const u32 *value = w.in<u32>(i.o[3]), *by = w.in<u32>(i.o[4]), *clamp = w.in<u32>(i.o[5]);
  u32 made[32], valid = 0;
  each(lanes, [&](u32 l) {
    const s32 b = by[l] & 31, c = clamp[l] & 31, mask = clamp[l] >> 8 & 31, lane = l;
    const s32 last = (lane & mask) | (c & ~mask & 31), first = lane & mask;
    s32 j = i.o[6] == 0 ? lane - b : i.o[6] == 1 ? lane + b : i.o[6] == 2 ? lane ^ b : first | (b & ~mask & 31);
    const bool is = i.o[6] == 0 ? j >= last : j <= last;
    if (!is) j = lane;
    valid |= u32(is) << l;
    made[l] = lanes >> j & 1 ? value[j] : 0xFFFFFFFFu;  // of a lane that takes no part: anything
  });
  each(lanes, [&](u32 l) { w.in<u32>(i.o[1])[l] = made[l]; });
  w.set_predicate(i.o[2], lanes, valid);
}
// o: members, destination (a register, or a predicate), predicate, mode
void vote(Warp& w, const Instruction& i, u32 lanes) {
  const u32 votes = w.predicate(i.o[2]) & lanes;
  const bool is = i.o[3] == 1 ? votes != 0 : i.o[3] == 2 ? votes == lanes : votes == 0 || votes == lanes;
  if (i.o[3] == 0) each(lanes, [&](u32 l) { w.in<u32>(i.o[1])[l] = votes; });
  else w.set_predicate(i.o[1], lanes, is ? ALL : 0);
}
// o: members, destination, value, mode
void reduce(Warp& w, const Instruction& i, u32 lanes) {
  const u32* a = w.in<u32>(i.o[2]);
  u32 r = a[std::countr_zero(lanes)];
  each(lanes & (lanes - 1), [&](u32 l) {
    switch (i.o[3]) {
      case 0: r += a[l]; break;
      case 1: r = a[l] < r ? a[l] : r; break;
      case 2: r = a[l] > r ? a[l] : r; break;
      case 3: r = s32(a[l]) < s32(r) ? a[l] : r; break;
      case 4: r = s32(a[l]) > s32(r) ? a[l] : r; break;
      case 5: r &= a[l]; break;
      case 6: r |= a[l]; break;
      default: r ^= a[l];
    }
  });
  each(lanes, [&](u32 l) { w.in<u32>(i.o[1])[l] = r; });
}
// o: members, destination, predicate (or none), value, its bytes, all
void match(Warp& w, const Instruction& i, u32 lanes) {
  u64 a[32];
  each(lanes, [&](u32 l) { a[l] = i.o[4] == 8 ? w.in<u64>(i.o[3])[l] : w.in<u32>(i.o[3])[l]; });
  u32 made[32], alike = 0;
  each(lanes, [&](u32 l) {
    made[l] = 0;
    each(lanes, [&](u32 other) { made[l] |= u32(a[l] == a[other]) << other; });
    if (made[l] == lanes) alike |= 1u << l;
    else if (i.o[5]) made[l] = 0;
  });
  each(lanes, [&](u32 l) { w.in<u32>(i.o[1])[l] = made[l]; });
  w.set_predicate(i.o[2], lanes, alike);
}
// o: members, destination (or none), predicate
void elect(Warp& w, const Instruction& i, u32 lanes) {
  const u32 first = std::countr_zero(lanes);
  if (i.o[1] != NO_OPERAND) each(lanes, [&](u32 l) { w.in<u32>(i.o[1])[l] = first; });
  w.set_predicate(i.o[2], lanes, 1u << first);
}

// o: type, how many registers of A and of B; destination 4, A, B, C 4
void multiply(Warp& w, const Instruction& i, u32) {
  const s32 type = i.o[0], k16 = i.o[1] / 2;  // halves of 8 (16-bit) or 16 (8-bit) columns
  const u32 each_of = type == E4M3 ? 4 : 2, depth = 4 * each_of * k16;
  const s32 *d = i.o + 3, *a = d + 4, *b = a + i.o[1], *c = b + i.o[2];
  float A[16][32], B[32][8], C[16][8];
  const float* table = e4m3();
  auto one = [&](u32 word, u32 e) { return type == E4M3 ? table[word >> 8 * e & 255] : number(word >> 16 * e & 65535, type); };
  for (u32 l = 0; l < 32; l++) {
    const u32 g = l >> 2, t = l & 3;
    for (s32 h = 0; h < k16; h++)
      for (u32 e = 0; e < each_of; e++) {
        const u32 k = h * 4 * each_of + t * each_of + e;
        A[g][k] = one(w.in<u32>(a[2 * h])[l], e), A[g + 8][k] = one(w.in<u32>(a[2 * h + 1])[l], e);
        B[k][g] = one(w.in<u32>(b[h])[l], e);
      }
    for (u32 e = 0; e < 2; e++) C[g][2 * t + e] = w.in<float>(c[e])[l], C[g + 8][2 * t + e] = w.in<float>(c[2 + e])[l];
  }
  for (int m = 0; m < 16; m++)
    for (u32 k = 0; k < depth; k++)
      for (int n = 0; n < 8; n++) C[m][n] = __builtin_fmaf(A[m][k], B[k][n], C[m][n]);
  for (u32 l = 0; l < 32; l++) {
    const u32 g = l >> 2, t = l & 3;
    for (u32 e = 0; e < 2; e++) w.in<float>(d[e])[l] = C[g][2 * t + e], w.in<float>(d[2 + e])[l] = C[g + 8][2 * t + e];
  }
}

// o: address, offset, how many, transposed, registers
void load_matrices(Warp& w, const Instruction& i, u32) {
  u32 made[4][32];
  for (s32 k = 0; k < i.o[2]; k++) {
    u16 rows[8][8];
    for (u32 r = 0; r < 8; r++) memcpy(rows[r], shared_at(w, w.in<u32>(i.o[0])[8 * k + r] + i.o[1], 16, 16, true), 16);
    for (u32 l = 0; l < 32; l++) {
      const u32 g = l >> 2, t = 2 * (l & 3);
      made[k][l] = i.o[3] ? u32(rows[t + 1][g]) << 16 | rows[t][g] : u32(rows[g][t + 1]) << 16 | rows[g][t];
    }
  }
  for (s32 k = 0; k < i.o[2]; k++) memcpy(w.in<u32>(i.o[4 + k]), made[k], 128);
}
void store_matrices(Warp& w, const Instruction& i, u32) {
  for (s32 k = 0; k < i.o[2]; k++) {
    u16 rows[8][8];
    for (u32 l = 0; l < 32; l++) {
      const u32 g = l >> 2, t = 2 * (l & 3), v = w.in<u32>(i.o[4 + k])[l];
      (i.o[3] ? rows[t][g] : rows[g][t]) = v, (i.o[3] ? rows[t + 1][g] : rows[g][t + 1]) = v >> 16;
    }
    for (u32 r = 0; r < 8; r++) memcpy(shared_at(w, w.in<u32>(i.o[0])[8 * k + r] + i.o[1], 16, 16, true), rows[r], 16);
  }
  w.block->run->events++;
}
void transpose(Warp& w, const Instruction& i, u32) {
  u16 rows[8][8];
  for (u32 l = 0; l < 32; l++) {
    const u32 v = w.in<u32>(i.o[1])[l];
    rows[l >> 2][2 * (l & 3)] = v, rows[l >> 2][2 * (l & 3) + 1] = v >> 16;
  }
  for (u32 l = 0; l < 32; l++) w.in<u32>(i.o[0])[l] = u32(rows[2 * (l & 3) + 1][l >> 2]) << 16 | rows[2 * (l & 3)][l >> 2];
}

// ---- asynchronous products
// An operand in shared memory, as its descriptor says: where element (row, k) lies. Source: PTX ISA, "Matrix descriptor".
struct Tile {
  u32 start, leading, stride, swizzle;
  bool transposed;
  Tile(u64 d, bool transposed) : transposed(transposed) {
    start = (d & 0x3FFF) << 4, leading = (d >> 16 & 0x3FFF) << 4, stride = (d >> 32 & 0x3FFF) << 4;
    const u32 mode = d >> 62;
    swizzle = mode == 1 ? 128 : mode == 2 ? 64 : mode == 3 ? 32 : 16;
  }
  u32 at(u32 row, u32 k, u32 bytes) const {
    u32 a;
    if (!transposed) {  // 8 rows of `swizzle` bytes lie together
      const u32 byte = k * bytes;
      a = start + row / 8 * stride + row % 8 * swizzle + byte % swizzle + byte / swizzle * leading;
    } else {
      const u32 byte = row * bytes;
      a = start + k / 8 * (swizzle == 16 ? leading : stride) + k % 8 * swizzle + byte % swizzle + byte / swizzle * (swizzle == 16 ? stride : leading);
    }
    return a ^ (swizzle == 128 ? (a >> 7 & 7) << 4 : swizzle == 64 ? (a >> 7 & 3) << 4 : swizzle == 32 ? (a >> 7 & 1) << 4 : 0);
  }
};

float element(const Warp& w, const Tile& tile, u32 row, u32 k, u32 type, const float* table) {
  const u32 bytes = type == E4M3 ? 1 : 2;
  const u8* at = shared_of(w, w.block, tile.at(row, k, bytes), bytes, bytes);
  if (type == E4M3) return table[*at];
  u16 v;
  memcpy(&v, at, 2);
  return number(v, type);
}

void finish(Warp& w, Matrix& m) {
  const u32 depth = m.type == E4M3 ? 32 : 16, first = w.id % 4 * 16;
  const float* table = e4m3();
  alignas(32) static float A[16][32], B[32][256], C[16][256];
  const Instruction* now = w.now;
  w.now = m.issued;
  if (m.from_registers) {
    const u32 each_of = m.type == E4M3 ? 4 : 2;
    for (u32 l = 0; l < 32; l++)
      for (u32 h = 0; h < 4; h++)
        for (u32 e = 0; e < each_of; e++) {
          const u32 word = m.held[h][l];
          A[(l >> 2) + 8 * (h & 1)][(h >> 1) * 4 * each_of + (l & 3) * each_of + e] =
              m.scale_a * (m.type == E4M3 ? table[word >> 8 * e & 255] : number(word >> 16 * e & 65535, m.type));
        }
  } else {
    const Tile tile(m.a, m.transposed_a);
    for (u32 r = 0; r < 16; r++)
      for (u32 k = 0; k < depth; k++) A[r][k] = m.scale_a * element(w, tile, first + r, k, m.type, table);
  }
  const Tile tile(m.b, m.transposed_b);
  for (u32 n = 0; n < m.columns; n++)
    for (u32 k = 0; k < depth; k++) B[k][n] = m.scale_b * element(w, tile, n, k, m.type, table);
  for (u32 l = 0; l < 32; l++)
    for (u32 j = 0; j < m.columns / 2; j++)
      C[(l >> 2) + (j & 2 ? 8 : 0)][j / 4 * 8 + 2 * (l & 3) + (j & 1)] = m.accumulates ? w.in<float>(m.sums[j])[l] : 0.0f;
  for (int r = 0; r < 16; r++)
    for (u32 k = 0; k < depth; k++)
      for (u32 n = 0; n < m.columns; n += 8)
        for (u32 e = 0; e < 8; e++) C[r][n + e] = __builtin_fmaf(A[r][k], B[k][n + e], C[r][n + e]);
  for (u32 l = 0; l < 32; l++)
    for (u32 j = 0; j < m.columns / 2; j++) w.in<float>(m.sums[j])[l] = C[(l >> 2) + (j & 2 ? 8 : 0)][j / 4 * 8 + 2 * (l & 3) + (j & 1)];
  w.now = now;
  w.block->run->events++;
}

// o: columns, type, A from registers, scale A, scale B, transposed A, transposed B, predicate (or 1: accumulate, as a number -1/-2),
// A (4 registers or 1 descriptor), B, sums
void issue(Warp& w, const Instruction& i, u32) {
  Matrix* m = new Matrix;
  m->issued = &i, m->group = w.products_committed;
  m->columns = i.o[0], m->type = i.o[1], m->from_registers = i.o[2], m->scale_a = i.o[3], m->scale_b = i.o[4];
  m->transposed_a = i.o[5], m->transposed_b = i.o[6];
  const s32* rest = i.o + 8;
  m->accumulates = w.predicate(i.o[7]) & 1;
  if (w.predicate(i.o[7]) != 0 && w.predicate(i.o[7]) != ALL) fault(w, "wgmma: lanes differ in whether it adds");
  auto uniform = [&](s32 o) {
    const u64* d = w.in<u64>(o);
    for (int l = 1; l < 32; l++)
      if (d[l] != d[0]) fault(w, "wgmma: lanes differ in the descriptor");
    return d[0];
  };
  if (m->from_registers) {
    for (int k = 0; k < 4; k++) memcpy(m->held[k], w.in<u32>(rest[k]), 128);
    rest += 4;
  } else {
    m->a = uniform(*rest++);
  }
  m->b = uniform(*rest++), m->sums = rest;
  w.products.push_back(m);
  if (w.block->run->policy.land >= 65536) finish_products(w, 0);
}
void commit(Warp& w, const Instruction&, u32) { w.products_committed++; }
void wait(Warp& w, const Instruction& i, u32) {
  while (!w.products.empty() && w.products.front()->group + i.o[0] < w.products_committed) finish_products(w, w.products.size() - 1);
}

}  // namespace

void finish_products(Warp& w, u32 leave) {
  while (w.products.size() > leave) {
    Matrix* m = w.products.front();
    finish(w, *m);
    delete m;
    w.products.erase(w.products.begin());
  }
}
// Whether an instruction reads or writes sums that are under way: the assembler waits for them there by itself.
bool touches_products(const Warp& w, const Instruction& i) {
  for (const Matrix* m : w.products)
    for (u32 t = 0; t < i.num_touched; t++)
      for (u32 j = 0; j < m->columns / 2; j++)
        if (i.touched[t] == m->sums[j]) return true;
  return false;
}

void define_matrix() {
  define("shfl", "", shuffle, MEMBERS), define("vote", "", vote, MEMBERS), define("redux", "", reduce, MEMBERS);
  define("match", "", match, MEMBERS), define("elect", "", elect, MEMBERS);
  define("bar.warp.sync", "", [](Warp&, const Instruction&, u32) {}, MEMBERS);
  define("mma", "", multiply, ALIGNED), define("ldmatrix", "", load_matrices, ALIGNED), define("stmatrix", "", store_matrices, ALIGNED);
  define("movmatrix", "4:4", transpose, ALIGNED);
  define("wgmma", "", issue, ALIGNED), define("wgmma.commit", "", commit, ALIGNED), define("wgmma.wait", "i", wait, ALIGNED);
  define("activemask", "4:", [](Warp& w, const Instruction& i, u32 lanes) { each(lanes, [&](u32 l) { w.in<u32>(i.o[0])[l] = lanes; }); });
}
