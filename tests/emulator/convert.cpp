// Conversions, bit for bit as PTX says them, and arithmetic in pairs of bfloat16 and float16.
#include <cfenv>
#include <cmath>
#include <limits>

#include "lanes.h"

namespace {

inline u32 bits_of(float v) {
  u32 b;
  memcpy(&b, &v, 4);
  return b;
}
inline float float_of(u32 b) {
  float v;
  memcpy(&v, &b, 4);
  return v;
}
inline u16 to_bf16(float v) {
  const u32 b = bits_of(v);
  return v != v ? u16(0x7FFF) : u16((b + 0x7FFF + (b >> 16 & 1)) >> 16);
}
inline u16 to_bf16_down(float v) { return v != v ? u16(0x7FFF) : u16(bits_of(v) >> 16); }
inline float from_bf16(u32 b) { return float_of(b << 16); }
inline u16 to_f16(float v) {
  if (v != v) return 0x7FFF;
  const _Float16 h = static_cast<_Float16>(v);
  u16 b;
  memcpy(&b, &h, 2);
  return b;
}
inline float from_f16(u16 b) {
  _Float16 h;
  memcpy(&h, &b, 2);
  return static_cast<float>(h);
}
// e4m3 with saturation: 448 is the greatest, a number beyond it becomes it.
inline u8 to_e4m3(float v) {
  if (v != v) return 0x7F;
  const u8 sign = std::signbit(v) ? 0x80 : 0;
  const float a = std::fabs(v);
  if (a >= 448.0f) return sign | 0x7E;
  int exponent;
  std::frexp(a, &exponent);
  exponent = std::max(exponent - 1, -6);
  const float steps = std::nearbyint(std::ldexp(a, 3 - exponent));  // of an eighth of the power of two
  u32 code = exponent == -6 ? static_cast<u32>(steps) : (static_cast<u32>(exponent + 7) << 3) + static_cast<u32>(steps) - 8;
  return sign | static_cast<u8>(std::min(code, 0x7Eu));
}
inline float from_e4m3(u8 code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  if ((code & 0x7F) == 0x7F) return float_of(0x7FFFFFFF);
  const float a = exponent ? std::ldexp(1.0f + mantissa / 8.0f, exponent - 7) : std::ldexp(mantissa / 8.0f, -6);
  return code & 0x80 ? -a : a;
}

template <class D, class S> void between(const char* d, const char* s) {
  const std::string sizes{char('0' + (sizeof(D) == 1 ? 2 : sizeof(D))), ':', char('0' + (sizeof(S) == 1 ? 2 : sizeof(S)))};
  typedef std::conditional_t<sizeof(D) == 1, std::conditional_t<std::is_signed_v<D>, s16, u16>, D> Slot;
  typedef std::conditional_t<sizeof(S) == 1, u16, S> From;
  define(std::string("cvt.") + d + "." + s, sizes.c_str(), unary<Slot, From, [](From v) { return Slot(D(S(v))); }>);
}
template <class D> void from_all(const char* d) {
  between<D, u8>(d, "u8"), between<D, s8>(d, "s8"), between<D, u16>(d, "u16"), between<D, s16>(d, "s16");
  between<D, u32>(d, "u32"), between<D, s32>(d, "s32"), between<D, u64>(d, "u64"), between<D, s64>(d, "s64");
}

// Out of range: the nearest there is. Not a number: 0, and the lowest of 64 bits.
template <class I, class F, int MODE> I rounded(F v) {
  if (v != v) return sizeof(I) == 8 ? I(u64(1) << 63) : I(0);
  const F r = MODE == 0 ? std::nearbyint(v) : MODE == 1 ? std::trunc(v) : MODE == 2 ? std::floor(v) : std::ceil(v);
  if (r >= std::ldexp(F(1), 8 * sizeof(I) - std::is_signed_v<I>)) return std::numeric_limits<I>::max();
  if (r < F(std::numeric_limits<I>::min())) return std::numeric_limits<I>::min();
  return static_cast<I>(r);
}
template <class I, class F> void to_integer(const std::string& types) {
  const std::string sizes{char('0' + sizeof(I)), ':', char('0' + sizeof(F))};
  define("cvt.rni." + types, sizes.c_str(), unary<I, F, [](F v) { return rounded<I, F, 0>(v); }>);
  define("cvt.rzi." + types, sizes.c_str(), unary<I, F, [](F v) { return rounded<I, F, 1>(v); }>);
  define("cvt.rmi." + types, sizes.c_str(), unary<I, F, [](F v) { return rounded<I, F, 2>(v); }>);
  define("cvt.rpi." + types, sizes.c_str(), unary<I, F, [](F v) { return rounded<I, F, 3>(v); }>);
}
template <class F> void to_whole(const std::string& type) {
  const std::string sizes{char('0' + sizeof(F)), ':', char('0' + sizeof(F))};
  define("cvt.rni." + type + "." + type, sizes.c_str(), unary<F, F, [](F v) { return std::nearbyint(v); }>);
  define("cvt.rzi." + type + "." + type, sizes.c_str(), unary<F, F, [](F v) { return std::trunc(v); }>);
  define("cvt.rmi." + type + "." + type, sizes.c_str(), unary<F, F, [](F v) { return std::floor(v); }>);
  define("cvt.rpi." + type + "." + type, sizes.c_str(), unary<F, F, [](F v) { return std::ceil(v); }>);
}
template <class F, class I> void from_integer(const std::string& types) {
  const std::string sizes{char('0' + sizeof(F)), ':', char('0' + sizeof(I))};
  define("cvt.rn." + types, sizes.c_str(), unary<F, I, [](I v) { return static_cast<F>(v); }>);
}

template <auto TO, auto FROM> void pairs(const std::string& type) {
  for (const std::string& rn : {std::string(), std::string("rn.")}) {
    define("add." + rn + type, "4:44", binary<u32, u32, u32, [](u32 a, u32 b) {
      return u32(TO(FROM(a & 65535) + FROM(b & 65535))) | u32(TO(FROM(a >> 16) + FROM(b >> 16))) << 16; }>);
    define("sub." + rn + type, "4:44", binary<u32, u32, u32, [](u32 a, u32 b) {
      return u32(TO(FROM(a & 65535) - FROM(b & 65535))) | u32(TO(FROM(a >> 16) - FROM(b >> 16))) << 16; }>);
    define("mul." + rn + type, "4:44", binary<u32, u32, u32, [](u32 a, u32 b) {
      return u32(TO(FROM(a & 65535) * FROM(b & 65535))) | u32(TO(FROM(a >> 16) * FROM(b >> 16))) << 16; }>);
  }
  // In float64 the product is exact and the sum rounded far below what is kept.
  define("fma.rn." + type, "4:444", ternary<u32, u32, u32, u32, [](u32 a, u32 b, u32 c) {
    const float low = float(double(FROM(a & 65535)) * FROM(b & 65535) + FROM(c & 65535));
    const float high = float(double(FROM(a >> 16)) * FROM(b >> 16) + FROM(c >> 16));
    return u32(TO(low)) | u32(TO(high)) << 16; }>);
}

}  // namespace

void define_convert() {
  from_all<u8>("u8"), from_all<s8>("s8"), from_all<u16>("u16"), from_all<s16>("s16");
  from_all<u32>("u32"), from_all<s32>("s32"), from_all<u64>("u64"), from_all<s64>("s64");
  to_integer<s32, float>("s32.f32"), to_integer<u32, float>("u32.f32"), to_integer<s64, float>("s64.f32"), to_integer<u64, float>("u64.f32");
  to_integer<s32, double>("s32.f64"), to_integer<u32, double>("u32.f64"), to_integer<s64, double>("s64.f64"), to_integer<u64, double>("u64.f64");
  to_integer<u16, float>("u16.f32"), to_integer<s16, float>("s16.f32");
  to_whole<float>("f32"), to_whole<double>("f64");
  from_integer<float, s32>("f32.s32"), from_integer<float, u32>("f32.u32"), from_integer<float, s64>("f32.s64"), from_integer<float, u64>("f32.u64");
  from_integer<float, u16>("f32.u16"), from_integer<float, s16>("f32.s16"), from_integer<double, s32>("f64.s32"), from_integer<double, u32>("f64.u32");
  from_integer<double, s64>("f64.s64"), from_integer<double, u64>("f64.u64");
  define("cvt.f64.f32", "8:4", unary<double, float, [](float v) { return static_cast<double>(v); }>);
  define("cvt.rn.f32.f64", "4:8", unary<float, double, [](double v) { return static_cast<float>(v); }>);
  define("cvt.sat.f32.f32", "4:4", unary<float, float, [](float v) { return v != v ? 0.0f : v < 0 ? 0.0f : v < 1 ? v : 1.0f; }>);
  define("cvt.f32.f16", "4:2", unary<float, u16, [](u16 v) { return from_f16(v); }>);
  define("cvt.f32.bf16", "4:2", unary<float, u16, [](u16 v) { return from_bf16(v); }>);
  define("cvt.rn.f16.f32", "2:4", unary<u16, float, [](float v) { return to_f16(v); }>);
  define("cvt.rn.bf16.f32", "2:4", unary<u16, float, [](float v) { return to_bf16(v); }>);
  define("cvt.rz.bf16.f32", "2:4", unary<u16, float, [](float v) { return to_bf16_down(v); }>);
  define("cvt.rn.bf16x2.f32", "4:44", binary<u32, float, float, [](float a, float b) { return u32(to_bf16(a)) << 16 | to_bf16(b); }>);
  define("cvt.rz.bf16x2.f32", "4:44", binary<u32, float, float, [](float a, float b) { return u32(to_bf16_down(a)) << 16 | to_bf16_down(b); }>);
  define("cvt.rn.f16x2.f32", "4:44", binary<u32, float, float, [](float a, float b) { return u32(to_f16(a)) << 16 | to_f16(b); }>);
  define("cvt.rn.satfinite.e4m3x2.f32", "2:44", binary<u16, float, float, [](float a, float b) { return u16(u32(to_e4m3(a)) << 8 | to_e4m3(b)); }>);
  define("cvt.rn.f16x2.e4m3x2", "4:2", unary<u32, u16, [](u16 v) {
    return u32(to_f16(from_e4m3(v >> 8))) << 16 | to_f16(from_e4m3(v & 255)); }>);
  pairs<[](float v) { return to_bf16(v); }, [](u32 b) { return from_bf16(b); }>("bf16x2");
  pairs<[](float v) { return to_f16(v); }, [](u32 b) { return from_f16(u16(b)); }>("f16x2");
}
