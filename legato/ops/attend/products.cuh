// The asynchronous tensor-core product of Hopper for bfloat16 and float16: D[64, HEADS] += A[64, 16] B[HEADS, 16]^T, B and
// D as the including file's HEADS says, A in shared memory or in registers. Source: PTX ISA, "wgmma.mma_async".
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;

__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// The compiler must neither read nor move these registers across this point while the tensor cores own them.
template <int COUNT> __device__ __forceinline__ void hold(float (&d)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(d[i])::"memory");
}

// Blocks of 8 rows of 128 bytes in the 128-byte swizzle, 1024 bytes from one block to the next. Whether the rows are rows
// of the operand (K-major) or its K (M-major, "transposed") the instruction says.
__device__ __forceinline__ u64 swizzled(u32 address) {
  return (1ull << 62) | (64ull << 32) | (1ull << 16) | ((address & 0x3FFFF) >> 4);
}

#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)
#if HEADS == 8
#define D_LIST "{%0, %1, %2, %3}"
#define D_ARGUMENTS "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define I0 "%4"
#define I1 "%5"
#define I2 "%6"
#define I3 "%7"
#define I4 "%8"
#define I5 "%9"
#elif HEADS == 16
#define D_LIST "{%0, %1, %2, %3, %4, %5, %6, %7}"
#define D_ARGUMENTS \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define I0 "%8"
#define I1 "%9"
#define I2 "%10"
#define I3 "%11"
#define I4 "%12"
#define I5 "%13"
#elif HEADS == 32
#define D_LIST "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}"
#define D_ARGUMENTS \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), \
      "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define I0 "%16"
#define I1 "%17"
#define I2 "%18"
#define I3 "%19"
#define I4 "%20"
#define I5 "%21"
#elif HEADS == 64
#define D_LIST \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31}"
#define D_ARGUMENTS \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), \
      "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), \
      "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), \
      "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define I0 "%32"
#define I1 "%33"
#define I2 "%34"
#define I3 "%35"
#define I4 "%36"
#define I5 "%37"
#else
#error "HEADS is 8, 16, 32 or 64"
#endif

constexpr int SUMS = HEADS / 2;  // of D in a thread: rows g and g + 8 of its warp's 16, columns 2t and 2t + 1 of each 8

// A K-major in shared memory (TRANSPOSED: M-major), B K-major in shared memory.
template <int TRANSPOSED>
__device__ __forceinline__ void multiply_shared(float (&d)[SUMS], u64 a, u64 b, int accumulate) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " I2 ", 0;\n"
               "wgmma.mma_async.sync.aligned.m64n" TEXT(HEADS) "k16.f32.bf16.bf16 " D_LIST ", " I0 ", " I1
               ", p, 1, 1, " I3 ", 0;\n}\n"
               : D_ARGUMENTS
               : "l"(a), "l"(b), "r"(accumulate), "n"(TRANSPOSED));
}

// A in registers as bfloat16 or as float16.
__device__ __forceinline__ void multiply_bf16(float (&d)[SUMS], const u32 (&a)[4], u64 b, int accumulate) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " I5 ", 0;\n"
               "wgmma.mma_async.sync.aligned.m64n" TEXT(HEADS) "k16.f32.bf16.bf16 " D_LIST ", {" I0 ", " I1 ", " I2
               ", " I3 "}, " I4 ", p, 1, 1, 0;\n}\n"
               : D_ARGUMENTS
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

__device__ __forceinline__ void multiply_f16(float (&d)[SUMS], const u32 (&a)[4], u64 b, int accumulate) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " I5 ", 0;\n"
               "wgmma.mma_async.sync.aligned.m64n" TEXT(HEADS) "k16.f32.f16.f16 " D_LIST ", {" I0 ", " I1 ", " I2
               ", " I3 "}, " I4 ", p, 1, 1, 0;\n}\n"
               : D_ARGUMENTS
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}
