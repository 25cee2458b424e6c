// Arithmetic, logic, comparisons and moves. Sums and products in float32 are those of the hardware, bit for bit, and what is not a
// number is 0x7FFFFFFF as there; the `approx` functions are as exact as a float can be.
#include <cfenv>
#include <cmath>

#include "lanes.h"

namespace {

template <class T> T of_bits(u32 bits) {
  T v;
  memcpy(&v, &bits, 4);
  return v;
}
inline float canonical(float v) { return v != v ? of_bits<float>(0x7FFFFFFF) : v; }
inline double canonical(double v) { return v; }
inline float flushed(float v) { return std::fabs(v) < 1.17549435e-38f ? std::copysign(0.0f, v) : v; }
template <class T> T least(T a, T b) { return a < b ? a : b; }
template <class T> T most(T a, T b) { return a > b ? a : b; }
inline float fmost(float a, float b) {
  float r = a > b ? a : a < b ? b : std::signbit(a) ? b : a;
  r = a != a ? b : b != b ? a : r;
  return canonical(r);
}
inline float fleast(float a, float b) {
  float r = a < b ? a : a > b ? b : std::signbit(a) ? a : b;
  r = a != a ? b : b != b ? a : r;
  return canonical(r);
}
inline float either(float a, float b, float r) { return a != a || b != b ? of_bits<float>(0x7FFFFFFF) : r; }

inline u32 lookup3(u32 a, u32 b, u32 c, u32 table) {
  u32 r = 0;
  for (u32 k = 0; k < 8; k++)
    if (table >> k & 1) r |= (k & 4 ? a : ~a) & (k & 2 ? b : ~b) & (k & 1 ? c : ~c);
  return r;
}
void lop3(Warp& w, const Instruction& i, u32 lanes) {
  const u32 *a = w.in<u32>(i.o[1]), *b = w.in<u32>(i.o[2]), *c = w.in<u32>(i.o[3]);
  const u32 table = i.o[4];
  u32 made[32];
  for (int l = 0; l < 32; l++) made[l] = lookup3(a[l], b[l], c[l], table);
  keep(w.in<u32>(i.o[0]), made, lanes);
}
inline u32 permute(u32 a, u32 b, u32 selector) {
  const u64 both = static_cast<u64>(b) << 32 | a;
  u32 r = 0;
  for (int k = 0; k < 4; k++) {
    const u32 s = selector >> 4 * k & 15;
    u32 byte = both >> 8 * (s & 7) & 255;
    if (s & 8) byte = byte & 128 ? 255 : 0;
    r |= byte << 8 * k;
  }
  return r;
}
template <class T> T insert(T a, T b, u32 start, u32 length) {
  start &= 255, length &= 255;
  const u32 width = 8 * sizeof(T);
  if (start >= width || !length) return b;
  const T ones = length >= width ? ~T(0) : (T(1) << length) - 1;
  return (b & ~(ones << start)) | (a & ones) << start;
}
template <class T, class S> T extract(T a, u32 start, u32 length) {
  start &= 255, length &= 255;
  const u32 width = 8 * sizeof(T);
  if (!length) return 0;
  T v = start >= width ? (S(a) < 0 ? ~T(0) : 0) : T(S(a) >> start);
  if (length < width) v = T(S(v << (width - length)) >> (width - length));
  return v;
}
inline u32 find_top(u32 a, bool shift) { return !a ? ALL : shift ? __builtin_clz(a) : 31 - __builtin_clz(a); }
inline u32 reversed(u32 v) {
  v = (v >> 1 & 0x55555555u) | (v & 0x55555555u) << 1, v = (v >> 2 & 0x33333333u) | (v & 0x33333333u) << 2;
  v = (v >> 4 & 0x0F0F0F0Fu) | (v & 0x0F0F0F0Fu) << 4;
  return __builtin_bswap32(v);
}
// Towards minus infinity; volatile, since the compiler must not move it over the change of mode.
__attribute__((noinline)) float fma_down(float a, float b, float c) {
  volatile float x = a, y = b, z = c;
  std::fesetround(FE_DOWNWARD);
  volatile float r = __builtin_fmaf(x, y, z);
  std::fesetround(FE_TONEAREST);
  return canonical(r);
}

template <class T> void integers(const std::string& type) {
  const char size = '0' + sizeof(T);
  typedef std::make_unsigned_t<T> U;
  const std::string two{size, ':', size, size}, three{size, ':', size, size, size}, one{size, ':', size};
  define("add." + type, two.c_str(), binary<T, T, T, [](T a, T b) { return T(U(a) + U(b)); }>);
  define("sub." + type, two.c_str(), binary<T, T, T, [](T a, T b) { return T(U(a) - U(b)); }>);
  define("mul.lo." + type, two.c_str(), binary<T, T, T, [](T a, T b) { return T(u64(a) * u64(b)); }>);
  define("mad.lo." + type, three.c_str(), ternary<T, T, T, T, [](T a, T b, T c) { return T(u64(a) * u64(b) + u64(c)); }>);
  define("div." + type, two.c_str(), binary<T, T, T, [](T a, T b) -> T { return !b ? T(-1) : b == T(-1) && T(-1) < 0 ? T(U(0) - U(a)) : a / b; }>);
  define("rem." + type, two.c_str(), binary<T, T, T, [](T a, T b) -> T { return !b ? a : b == T(-1) && T(-1) < 0 ? T(0) : a % b; }>);
  define("min." + type, two.c_str(), binary<T, T, T, [](T a, T b) { return least(a, b); }>);
  define("max." + type, two.c_str(), binary<T, T, T, [](T a, T b) { return most(a, b); }>);
  define("neg." + type, one.c_str(), unary<T, T, [](T a) { return T(U(0) - U(a)); }>);
  define("abs." + type, one.c_str(), unary<T, T, [](T a) { return T(a < 0 ? U(0) - U(a) : U(a)); }>);
  const std::string shift{size, ':', size, '4'};
  define("shr." + type, shift.c_str(), binary<T, T, u32, [](T a, u32 by) { return by < 8 * sizeof(T) ? T(a >> by) : T(a < 0 ? -1 : 0); }>);
  const std::string test{'p', ':', size, size};
  auto cmp = [&](const char* name, Handler run) { define(std::string("setp.") + name + "." + type, test.c_str(), run); };
  cmp("eq", compare<T, [](T a, T b) { return a == b; }>), cmp("ne", compare<T, [](T a, T b) { return a != b; }>);
  cmp("lt", compare<T, [](T a, T b) { return a < b; }>), cmp("le", compare<T, [](T a, T b) { return a <= b; }>);
  cmp("gt", compare<T, [](T a, T b) { return (a > b); }>), cmp("ge", compare<T, [](T a, T b) { return (a >= b); }>);
}

template <class T> void bits(const std::string& type) {
  const char size = '0' + sizeof(T);
  const std::string two{size, ':', size, size}, one{size, ':', size}, shift{size, ':', size, '4'}, test{'p', ':', size, size};
  define("and." + type, two.c_str(), binary<T, T, T, [](T a, T b) { return T(a & b); }>);
  define("or." + type, two.c_str(), binary<T, T, T, [](T a, T b) { return T(a | b); }>);
  define("xor." + type, two.c_str(), binary<T, T, T, [](T a, T b) { return T(a ^ b); }>);
  define("not." + type, one.c_str(), unary<T, T, [](T a) { return T(~a); }>);
  define("mov." + type, one.c_str(), unary<T, T, [](T a) { return a; }>);
  define("shl." + type, shift.c_str(), binary<T, T, u32, [](T a, u32 by) { return by < 8 * sizeof(T) ? T(a << by) : T(0); }>);
  define("setp.eq." + type, test.c_str(), compare<T, [](T a, T b) { return a == b; }>);
  define("setp.ne." + type, test.c_str(), compare<T, [](T a, T b) { return a != b; }>);
  const std::string select{size, ':', size, size, 'p'};
  define("selp." + type, select.c_str(), [](Warp& w, const Instruction& i, u32 lanes) {
    T* d = w.in<T>(i.o[0]);
    const T *a = w.in<T>(i.o[1]), *b = w.in<T>(i.o[2]);
    const u32 p = w.predicate(i.o[3]);
    T made[32];
    for (int l = 0; l < 32; l++) made[l] = p >> l & 1 ? a[l] : b[l];
    keep(d, made, lanes);
  });
}

template <class T> void floats(const std::string& type) {
  const char size = '0' + sizeof(T);
  const std::string two{size, ':', size, size}, three{size, ':', size, size, size}, one{size, ':', size}, test{'p', ':', size, size};
  for (const std::string& rn : {std::string(), std::string("rn.")}) {
    define("add." + rn + type, two.c_str(), binary<T, T, T, [](T a, T b) { return canonical(a + b); }>);
    define("sub." + rn + type, two.c_str(), binary<T, T, T, [](T a, T b) { return canonical(a - b); }>);
    define("mul." + rn + type, two.c_str(), binary<T, T, T, [](T a, T b) { return canonical(a * b); }>);
  }
  for (const char* how : {"div.rn.", "div.full.", "div.approx."})
    define(how + type, two.c_str(), binary<T, T, T, [](T a, T b) { return canonical(a / b); }>);
  for (const char* how : {"rcp.rn.", "rcp.approx."}) define(how + type, one.c_str(), unary<T, T, [](T a) { return canonical(1 / a); }>);
  for (const char* how : {"sqrt.rn.", "sqrt.approx."})
    define(how + type, one.c_str(), unary<T, T, [](T a) { return canonical(std::sqrt(a)); }>);
  define("rsqrt.approx." + type, one.c_str(), unary<T, T, [](T a) { return canonical(1 / std::sqrt(a)); }>);
  define("neg." + type, one.c_str(), unary<T, T, [](T a) { return canonical(-a); }>);
  define("abs." + type, one.c_str(), unary<T, T, [](T a) { return canonical(std::fabs(a)); }>);
  define("fma.rn." + type, three.c_str(), ternary<T, T, T, T, [](T a, T b, T c) { return canonical(std::fma(a, b, c)); }>);
  auto cmp = [&](const char* name, Handler run) { define(std::string("setp.") + name + "." + type, test.c_str(), run); };
  cmp("eq", compare<T, [](T a, T b) { return a == b; }>), cmp("ne", compare<T, [](T a, T b) { return (a < b || a > b); }>);
  cmp("lt", compare<T, [](T a, T b) { return a < b; }>), cmp("le", compare<T, [](T a, T b) { return a <= b; }>);
  cmp("gt", compare<T, [](T a, T b) { return (a > b); }>), cmp("ge", compare<T, [](T a, T b) { return (a >= b); }>);
  cmp("equ", compare<T, [](T a, T b) { return !(a < b || a > b); }>), cmp("neu", compare<T, [](T a, T b) { return a != b; }>);
  cmp("ltu", compare<T, [](T a, T b) { return !(a >= b); }>), cmp("leu", compare<T, [](T a, T b) { return !(a > b); }>);
  cmp("gtu", compare<T, [](T a, T b) { return !(a <= b); }>), cmp("geu", compare<T, [](T a, T b) { return !(a < b); }>);
  cmp("num", compare<T, [](T a, T b) { return a == a && b == b; }>), cmp("nan", compare<T, [](T a, T b) { return a != a || b != b; }>);
}

template <auto F> void approximate(const std::string& name) {
  define(name + ".f32", "4:4", unary<float, float, [](float a) { return canonical(F(a)); }>);
  define(name + ".ftz.f32", "4:4", unary<float, float, [](float a) { return canonical(flushed(F(flushed(a)))); }>);
}

template <auto F> void on_predicates(const char* name, const char* signature = "p:pp") {
  define(name, signature, [](Warp& w, const Instruction& i, u32 lanes) {
    w.set_predicate(i.o[0], lanes, F(w.predicate(i.o[1]), w.predicate(i.o[2])));
  });
}

template <class W, class N> void wide(const char* type) {
  const std::string sizes{char('0' + sizeof(W)), ':', char('0' + sizeof(N)), char('0' + sizeof(N))};
  define(std::string("mul.wide.") + type, sizes.c_str(), binary<W, N, N, [](N a, N b) { return W(W(a) * W(b)); }>);
  define(std::string("mad.wide.") + type, (sizes + sizes[0]).c_str(),
         ternary<W, N, N, W, [](N a, N b, W c) { return W(std::make_unsigned_t<W>(W(a) * W(b)) + std::make_unsigned_t<W>(c)); }>);
}

}  // namespace

void define_alu() {
  integers<u16>("u16"), integers<s16>("s16"), integers<u32>("u32"), integers<s32>("s32"), integers<u64>("u64"), integers<s64>("s64");
  bits<u16>("b16"), bits<u32>("b32"), bits<u64>("b64");
  floats<float>("f32"), floats<double>("f64");
  wide<u32, u16>("u16"), wide<s32, s16>("s16"), wide<u64, u32>("u32"), wide<s64, s32>("s32");
  define("mul.hi.u32", "4:44", binary<u32, u32, u32, [](u32 a, u32 b) { return u32(u64(a) * b >> 32); }>);
  define("mul.hi.s32", "4:44", binary<u32, s32, s32, [](s32 a, s32 b) { return u32(s64(a) * b >> 32); }>);
  define("mul.hi.u64", "8:88", binary<u64, u64, u64, [](u64 a, u64 b) { return u64((unsigned __int128)(a) * b >> 64); }>);
  define("mul.hi.s64", "8:88", binary<u64, s64, s64, [](s64 a, s64 b) { return u64((__int128)(a) * b >> 64); }>);
  define("min.f32", "4:44", binary<float, float, float, [](float a, float b) { return fleast(a, b); }>);
  define("max.u16x2", "4:44", binary<u32, u32, u32, [](u32 a, u32 b) { return most(a & 0xFFFFu, b & 0xFFFFu) | most(a >> 16, b >> 16) << 16; }>);
  define("max.f32", "4:44", binary<float, float, float, [](float a, float b) { return fmost(a, b); }>);
  define("min.NaN.f32", "4:44", binary<float, float, float, [](float a, float b) { return either(a, b, fleast(a, b)); }>);
  define("max.NaN.f32", "4:44", binary<float, float, float, [](float a, float b) { return either(a, b, fmost(a, b)); }>);
  define("fma.rm.f32", "4:444", ternary<float, float, float, float, [](float a, float b, float c) { return fma_down(a, b, c); }>);
  define("copysign.f32", "4:44", binary<float, float, float, [](float a, float b) { return std::copysign(b, a); }>);
  approximate<[](float a) { return std::exp2(a); }>("ex2.approx");
  approximate<[](float a) { return std::log2(a); }>("lg2.approx");
  approximate<[](float a) { return 1 / a; }>("rcp.approx");
  approximate<[](float a) { return std::sqrt(a); }>("sqrt.approx");
  approximate<[](float a) { return 1 / std::sqrt(a); }>("rsqrt.approx");
  approximate<[](float a) { return std::sin(a); }>("sin.approx");
  approximate<[](float a) { return std::cos(a); }>("cos.approx");
  define("tanh.approx.f32", "4:4", unary<float, float, [](float a) { return canonical(std::tanh(a)); }>);
  define("lop3.b32", "4:444i", lop3);
  define("prmt.b32", "4:444", ternary<u32, u32, u32, u32, [](u32 a, u32 b, u32 c) { return permute(a, b, c); }>);
  define("shf.l.wrap.b32", "4:444", ternary<u32, u32, u32, u32, [](u32 a, u32 b, u32 c) { return u32(((u64(b) << 32 | a) << (c & 31)) >> 32); }>);
  define("shf.r.wrap.b32", "4:444", ternary<u32, u32, u32, u32, [](u32 a, u32 b, u32 c) { return u32((u64(b) << 32 | a) >> (c & 31)); }>);
  define("shf.l.clamp.b32", "4:444", ternary<u32, u32, u32, u32, [](u32 a, u32 b, u32 c) { return (c > 31 ? a : u32(((u64(b) << 32 | a) << c) >> 32)); }>);
  define("shf.r.clamp.b32", "4:444", ternary<u32, u32, u32, u32, [](u32 a, u32 b, u32 c) { return (c > 31 ? b : u32((u64(b) << 32 | a) >> c)); }>);
  define("popc.b32", "4:4", unary<u32, u32, [](u32 a) { return u32(__builtin_popcount(a)); }>);
  define("popc.b64", "4:8", unary<u32, u64, [](u64 a) { return u32(__builtin_popcountll(a)); }>);
  define("clz.b32", "4:4", unary<u32, u32, [](u32 a) { return a ? u32(__builtin_clz(a)) : 32u; }>);
  define("clz.b64", "4:8", unary<u32, u64, [](u64 a) { return a ? u32(__builtin_clzll(a)) : 64u; }>);
  define("brev.b32", "4:4", unary<u32, u32, [](u32 a) { return reversed(a); }>);
  define("bfind.u32", "4:4", unary<u32, u32, [](u32 a) { return find_top(a, false); }>);
  define("bfind.shiftamt.u32", "4:4", unary<u32, u32, [](u32 a) { return find_top(a, true); }>);
  for (const char* name : {"bfi.b32", "bfi.b64"}) {
    const bool is_wide = name[5] == '6';
    define(name, is_wide ? "8:8844" : "4:4444", is_wide ? Handler([](Warp& w, const Instruction& i, u32 lanes) {
      each(lanes, [&](u32 l) {
        w.in<u64>(i.o[0])[l] = insert(w.in<u64>(i.o[1])[l], w.in<u64>(i.o[2])[l], w.in<u32>(i.o[3])[l], w.in<u32>(i.o[4])[l]);
      });
    }) : Handler([](Warp& w, const Instruction& i, u32 lanes) {
      each(lanes, [&](u32 l) {
        w.in<u32>(i.o[0])[l] = insert(w.in<u32>(i.o[1])[l], w.in<u32>(i.o[2])[l], w.in<u32>(i.o[3])[l], w.in<u32>(i.o[4])[l]);
      });
    }));
  }
  define("bfe.u32", "4:444", ternary<u32, u32, u32, u32, [](u32 a, u32 b, u32 c) { return extract<u32, u32>(a, b, c); }>);
  define("bfe.s32", "4:444", ternary<u32, u32, u32, u32, [](u32 a, u32 b, u32 c) { return extract<u32, s32>(a, b, c); }>);
  define("bfe.u64", "8:844", ternary<u64, u64, u32, u32, [](u64 a, u32 b, u32 c) { return extract<u64, u64>(a, b, c); }>);
  define("dp2a.lo.u32.u32", "4:444", ternary<u32, u32, u32, u32, [](u32 a, u32 b, u32 c) { return c + (a & 65535) * (b & 255) + (a >> 16) * (b >> 8 & 255); }>);
  define("dp2a.hi.u32.u32", "4:444", ternary<u32, u32, u32, u32, [](u32 a, u32 b, u32 c) { return c + (a & 65535) * (b >> 16 & 255) + (a >> 16) * (b >> 24); }>);
  define("dp4a.u32.u32", "4:444", ternary<u32, u32, u32, u32, [](u32 a, u32 b, u32 c) { for (int k = 0; k < 32; k += 8) c += (a >> k & 255) * (b >> k & 255); return c; }>);
  define("dp4a.s32.s32", "4:444", ternary<u32, u32, u32, u32, [](u32 a, u32 b, u32 c) { for (int k = 0; k < 32; k += 8) c += u32(s8(a >> k) * s8(b >> k)); return c; }>);
  on_predicates<[](u32 a, u32 b) { return a & b; }>("and.pred");
  on_predicates<[](u32 a, u32 b) { return a | b; }>("or.pred");
  on_predicates<[](u32 a, u32 b) { return a ^ b; }>("xor.pred");
  define("not.pred", "p:p", [](Warp& w, const Instruction& i, u32 lanes) { w.set_predicate(i.o[0], lanes, ~w.predicate(i.o[1])); });
  define("mov.pred", "p:p", [](Warp& w, const Instruction& i, u32 lanes) { w.set_predicate(i.o[0], lanes, w.predicate(i.o[1])); });
  // Several registers as one and back; a result that nobody wants is -1.
  define("pack.4", "8:44", binary<u64, u32, u32, [](u32 a, u32 b) { return u64(b) << 32 | a; }>);
  define("pack.2", "4:22", binary<u32, u16, u16, [](u16 a, u16 b) { return u32(b) << 16 | a; }>);
  define("pack.2.4", "8:2222", [](Warp& w, const Instruction& i, u32 lanes) {
    each(lanes, [&](u32 l) {
      w.in<u64>(i.o[0])[l] = u64(w.in<u16>(i.o[4])[l]) << 48 | u64(w.in<u16>(i.o[3])[l]) << 32 | u32(w.in<u16>(i.o[2])[l]) << 16 | w.in<u16>(i.o[1])[l];
    });
  });
  define("unpack.4", "44:8", [](Warp& w, const Instruction& i, u32 lanes) {
    each(lanes, [&](u32 l) {
      const u64 v = w.in<u64>(i.o[2])[l];
      if (i.o[0] >= 0) w.in<u32>(i.o[0])[l] = u32(v);
      if (i.o[1] >= 0) w.in<u32>(i.o[1])[l] = u32(v >> 32);
    });
  });
  define("unpack.2", "22:4", [](Warp& w, const Instruction& i, u32 lanes) {
    each(lanes, [&](u32 l) {
      const u32 v = w.in<u32>(i.o[2])[l];
      if (i.o[0] >= 0) w.in<u16>(i.o[0])[l] = u16(v);
      if (i.o[1] >= 0) w.in<u16>(i.o[1])[l] = u16(v >> 16);
    });
  });
  define("unpack.2.4", "2222:8", [](Warp& w, const Instruction& i, u32 lanes) {
    each(lanes, [&](u32 l) {
      const u64 v = w.in<u64>(i.o[4])[l];
      for (int k = 0; k < 4; k++)
        if (i.o[k] >= 0) w.in<u16>(i.o[k])[l] = u16(v >> 16 * k);
    });
  });
}
