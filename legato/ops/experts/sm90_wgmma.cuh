// The asynchronous tensor-core product of Hopper for bfloat16 with its left operand in registers: D[64, n] += A[64, 16] B[n, 16]^T.
// Nothing here knows what is multiplied. Source: PTX ISA, "wgmma.mma_async".
#pragma once

// All sums of a thread: 8 for every 16 columns. SUMS_n names the first 8 n operands behind the six of A, B and `add`.

#define SUMS_1 "%6, %7, %8, %9, %10, %11, %12, %13"
#define SUMS_2 SUMS_1 ", " "%14, %15, %16, %17, %18, %19, %20, %21"
#define SUMS_3 SUMS_2 ", " "%22, %23, %24, %25, %26, %27, %28, %29"
#define SUMS_4 SUMS_3 ", " "%30, %31, %32, %33, %34, %35, %36, %37"
#define SUMS_5 SUMS_4 ", " "%38, %39, %40, %41, %42, %43, %44, %45"
#define SUMS_6 SUMS_5 ", " "%46, %47, %48, %49, %50, %51, %52, %53"
#define SUMS_7 SUMS_6 ", " "%54, %55, %56, %57, %58, %59, %60, %61"
#define SUMS_8 SUMS_7 ", " "%62, %63, %64, %65, %66, %67, %68, %69"
#define SUMS_9 SUMS_8 ", " "%70, %71, %72, %73, %74, %75, %76, %77"
#define SUMS_10 SUMS_9 ", " "%78, %79, %80, %81, %82, %83, %84, %85"
#define SUMS_11 SUMS_10 ", " "%86, %87, %88, %89, %90, %91, %92, %93"
#define SUMS_12 SUMS_11 ", " "%94, %95, %96, %97, %98, %99, %100, %101"
#define SUMS_13 SUMS_12 ", " "%102, %103, %104, %105, %106, %107, %108, %109"
#define SUMS_14 SUMS_13 ", " "%110, %111, %112, %113, %114, %115, %116, %117"
#define SUMS_15 SUMS_14 ", " "%118, %119, %120, %121, %122, %123, %124, %125"
#define SUMS_16 SUMS_15 ", " "%126, %127, %128, %129, %130, %131, %132, %133"

#define EIGHT(d, i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define REGISTERS_1(d) EIGHT(d, 0)
#define REGISTERS_2(d) REGISTERS_1(d), EIGHT(d, 8)
#define REGISTERS_3(d) REGISTERS_2(d), EIGHT(d, 16)
#define REGISTERS_4(d) REGISTERS_3(d), EIGHT(d, 24)
#define REGISTERS_5(d) REGISTERS_4(d), EIGHT(d, 32)
#define REGISTERS_6(d) REGISTERS_5(d), EIGHT(d, 40)
#define REGISTERS_7(d) REGISTERS_6(d), EIGHT(d, 48)
#define REGISTERS_8(d) REGISTERS_7(d), EIGHT(d, 56)
#define REGISTERS_9(d) REGISTERS_8(d), EIGHT(d, 64)
#define REGISTERS_10(d) REGISTERS_9(d), EIGHT(d, 72)
#define REGISTERS_11(d) REGISTERS_10(d), EIGHT(d, 80)
#define REGISTERS_12(d) REGISTERS_11(d), EIGHT(d, 88)
#define REGISTERS_13(d) REGISTERS_12(d), EIGHT(d, 96)
#define REGISTERS_14(d) REGISTERS_13(d), EIGHT(d, 104)
#define REGISTERS_15(d) REGISTERS_14(d), EIGHT(d, 112)
#define REGISTERS_16(d) REGISTERS_15(d), EIGHT(d, 120)

template <int N>
__device__ __forceinline__ void multiply_registers(float (&d)[N / 2], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, u32 add);

// A and B stand before the sums, so that their numbers do not depend on how many there are; nothing is written to them.
#define MULTIPLY(n, columns)                                                                                         \
  template <>                                                                                                        \
  __device__ __forceinline__ void multiply_registers<columns>(float (&d)[columns / 2], u32 a0, u32 a1, u32 a2, u32 a3, \
                                                              u64 b, u32 add) {                                      \
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n"                                                         \
                 "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32.bf16.bf16 {" SUMS_##n                         \
                 "}, {%0, %1, %2, %3}, %4, p, 1, 1, 0;\n}"                                                           \
                 : "+r"(a0), "+r"(a1), "+r"(a2), "+r"(a3), "+l"(b), "+r"(add), REGISTERS_##n(d));                   \
  }
MULTIPLY(1, 16)
MULTIPLY(2, 32)
MULTIPLY(3, 48)
MULTIPLY(4, 64)
MULTIPLY(5, 80)
MULTIPLY(6, 96)
MULTIPLY(7, 112)
MULTIPLY(8, 128)
MULTIPLY(9, 144)
MULTIPLY(10, 160)
MULTIPLY(11, 176)
MULTIPLY(12, 192)
MULTIPLY(13, 208)
MULTIPLY(14, 224)
MULTIPLY(15, 240)
MULTIPLY(16, 256)
