// The asynchronous tensor-core product of Hopper for bfloat16 and float16: D[64, N] += A[64, 16] B[N, 16]^T, A in
// shared memory or in registers, B in shared memory, sums in float32. Nothing here knows what is multiplied. Source:
// PTX ISA, "wgmma.mma_async".
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;

__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// The compiler must neither read nor move these registers across this point while the tensor cores own them.
template <int COUNT>
__device__ __forceinline__ void hold(float (&d)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(d[i])::"memory");
}

// Blocks of 8 rows of 128 bytes in the 128-byte swizzle, 1024 bytes from one block to the next. Whether the rows are
// rows of the operand (K-major) or its K (M-major, "transposed") the instruction says.
__device__ __forceinline__ u64 swizzled(u32 address) {
  return (1ull << 62) | (64ull << 32) | (1ull << 16) | ((address & 0x3FFFF) >> 4);
}
// What `swizzled` describes, `bytes` behind a matrix whose description has the lower half `from`: an addition each, where masks
// and shifts for all of them would be several hundred instructions.
__device__ __forceinline__ u32 lower_half(u32 address) { return u32(swizzled(address)); }
__device__ __forceinline__ u64 matrix(u32 from, int bytes) { return swizzled(0) & ~0xffffffffull | (from + (bytes >> 4)); }

// A K-major in shared memory (TRANSPOSED: M-major), B K-major in shared memory. A thread's part of D: rows g and g + 8
// of its warp's 16, columns 2t and 2t + 1 of each 8.
template <int N, int TRANSPOSED>
struct Products;

#define SHARED_PRODUCT(TYPE)                                                                                           \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " I2                                                                  \
               ", 0;\n"                                                                                                \
               "wgmma.mma_async.sync.aligned." SHAPE ".f32." TYPE "." TYPE " " D_LIST ", " I0 ", " I1 ", p, 1, 1, " I3 \
               ", 0;\n}\n"                                                                                             \
               : D_ARGUMENTS                                                                                           \
               : "l"(a), "l"(b), "r"(accumulate), "n"(TRANSPOSED))
#define REGISTER_PRODUCT(TYPE)                                                                                         \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " I5                                                                  \
               ", 0;\n"                                                                                                \
               "wgmma.mma_async.sync.aligned." SHAPE ".f32." TYPE "." TYPE " " D_LIST ", {" I0 ", " I1 ", " I2 ", " I3 \
               "}, " I4 ", p, 1, 1, 0;\n}\n"                                                                           \
               : D_ARGUMENTS                                                                                           \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate))
#define PRODUCTS(N)                                                                                            \
  template <int TRANSPOSED>                                                                                    \
  struct Products<N, TRANSPOSED> {                                                                             \
    static __device__ __forceinline__ void bf16(float (&d)[N / 2], u64 a, u64 b, int accumulate) {             \
      SHARED_PRODUCT("bf16");                                                                                  \
    }                                                                                                          \
    static __device__ __forceinline__ void f16(float (&d)[N / 2], u64 a, u64 b, int accumulate) {              \
      SHARED_PRODUCT("f16");                                                                                   \
    }                                                                                                          \
    static __device__ __forceinline__ void bf16(float (&d)[N / 2], const u32 (&a)[4], u64 b, int accumulate) { \
      REGISTER_PRODUCT("bf16");                                                                                \
    }                                                                                                          \
    static __device__ __forceinline__ void f16(float (&d)[N / 2], const u32 (&a)[4], u64 b, int accumulate) {  \
      REGISTER_PRODUCT("f16");                                                                                 \
    }                                                                                                          \
  };

#define SHAPE "m64n8k16"
#define D_LIST "{%0, %1, %2, %3}"
#define D_ARGUMENTS "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define I0 "%4"
#define I1 "%5"
#define I2 "%6"
#define I3 "%7"
#define I4 "%8"
#define I5 "%9"
PRODUCTS(8)
#undef SHAPE
#undef D_LIST
#undef D_ARGUMENTS
#undef I0
#undef I1
#undef I2
#undef I3
#undef I4
#undef I5

#define SHAPE "m64n16k16"
#define D_LIST "{%0, %1, %2, %3, %4, %5, %6, %7}"
#define D_ARGUMENTS "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define I0 "%8"
#define I1 "%9"
#define I2 "%10"
#define I3 "%11"
#define I4 "%12"
#define I5 "%13"
PRODUCTS(16)
#undef SHAPE
#undef D_LIST
#undef D_ARGUMENTS
#undef I0
#undef I1
#undef I2
#undef I3
#undef I4
#undef I5

#define SHAPE "m64n32k16"
#define D_LIST "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}"
#define D_ARGUMENTS                                                                                           \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), \
      "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define I0 "%16"
#define I1 "%17"
#define I2 "%18"
#define I3 "%19"
#define I4 "%20"
#define I5 "%21"
PRODUCTS(32)
#undef SHAPE
#undef D_LIST
#undef D_ARGUMENTS
#undef I0
#undef I1
#undef I2
#undef I3
#undef I4
#undef I5

#define SHAPE "m64n64k16"
#define D_LIST                                                                                           \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21," \
  " %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define D_ARGUMENTS                                                                                           \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), \
      "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),  \
      "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), \
      "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define I0 "%32"
#define I1 "%33"
#define I2 "%34"
#define I3 "%35"
#define I4 "%36"
#define I5 "%37"
PRODUCTS(64)
#undef SHAPE
#undef D_LIST
#undef D_ARGUMENTS
#undef I0
#undef I1
#undef I2
#undef I3
#undef I4
#undef I5

#define SHAPE "m64n128k16"
#define D_LIST                                                                                                     \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21,"           \
  " %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43," \
  " %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"
#define D_ARGUMENTS                                                                                           \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),             \
      "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),   \
      "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
      "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), \
      "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), \
      "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), \
      "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), \
      "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define I0 "%64"
#define I1 "%65"
#define I2 "%66"
#define I3 "%67"
#define I4 "%68"
#define I5 "%69"
PRODUCTS(128)
#undef SHAPE
#undef D_LIST
#undef D_ARGUMENTS
#undef I0
#undef I1
#undef I2
#undef I3
#undef I4
#undef I5

// A K-major in shared memory or in registers, B M-major in shared memory: D[64, 256] += A[64, 16] B[16, 256].
#define VALUES_LIST                                                                                      \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21," \
  " %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41," \
  " %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61," \
  " %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81," \
  " %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %10" \
  "1, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %" \
  "118, %119, %120, %121, %122, %123, %124, %125, %126, %127}"
#define VALUES_ARGUMENTS                                                                                              \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),         \
      "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),          \
      "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),         \
      "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),         \
      "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),         \
      "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),         \
      "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),         \
      "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]), "+f"(d[64]),         \
      "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), "+f"(d[72]),         \
      "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), "+f"(d[80]),         \
      "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), "+f"(d[88]),         \
      "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), "+f"(d[96]),         \
      "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]), "+f"(d[104]),    \
      "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]), "+f"(d[112]), \
      "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), "+f"(d[120]), \
      "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
__device__ __forceinline__ void multiply_values_bf16(float (&d)[128], u64 a, u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 " VALUES_LIST ", %128, %129, 1, 1, 1, 0, 1;\n"
               : VALUES_ARGUMENTS
               : "l"(a), "l"(b));
}
__device__ __forceinline__ void multiply_values_bf16(float (&d)[128], const u32 (&a)[4], u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 " VALUES_LIST
               ", {%128, %129, %130, %131}, %132, 1, 1, 1, 1;\n"
               : VALUES_ARGUMENTS
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void multiply_values_f16(float (&d)[128], u64 a, u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 " VALUES_LIST ", %128, %129, 1, 1, 1, 0, 1;\n"
               : VALUES_ARGUMENTS
               : "l"(a), "l"(b));
}
// As `swizzled`, with so many bytes between blocks of 64 of an operand's rows ("M-major" only).
__device__ __forceinline__ u64 swizzled_columns(u32 address, u32 stride) {
  return (1ull << 62) | (64ull << 32) | (u64(stride >> 4) << 16) | ((address & 0x3FFFF) >> 4);
}
