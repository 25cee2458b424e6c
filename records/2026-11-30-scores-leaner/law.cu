// How fast arithmetic of one or two warpgroups runs beside FP8 products of another, and how much it holds those up.
#include "../../legato/ops/score/wgmma.cuh"

enum { NOTHING, ADDITION, SATURATION, MAXIMUM };

extern "C" __global__ void __launch_bounds__(384, 1) law(int multiplying, int adding, int rounds, int loops, float* out, long long* clocks) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const unsigned shared = (unsigned)__cvta_generic_to_shared(memory);
    for (int i = threadIdx.x; i < 49152 / 4; i += 384) ((unsigned*)memory)[i] = 0x30343833u + (i * 2654435761u >> 8 & 0x07070707u);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    const int group = threadIdx.x >> 7;
    long long* mine = clocks + blockIdx.x * 4;
    if (group == 0) {
        if (!multiplying) return;
        float d0[64], d1[32];
#pragma unroll
        for (int i = 0; i < 64; i++) d0[i] = 0, d1[i / 2] = 0;
        const unsigned a = lower_word(shared), b = lower_word(shared + 8192);
        const long long start = clock64();
#pragma unroll 1
        for (int count = 0; count < loops; count++) {
            hold(d0);
            hold(d1);
            multiply_fence();
#pragma unroll
            for (int step = 0; step < 4; step++) multiply<128>(d0, descriptor(a + 2 * step), descriptor(b + 2 * step), step);
#pragma unroll
            for (int step = 0; step < 4; step++) multiply<64>(d1, descriptor(a + 2 * step), descriptor(b + 1024 + 2 * step), step);
            multiply_commit();
            multiply_wait<0>();
            hold(d0);
            hold(d1);
        }
        const long long stop = clock64();
        float sum = 0;
#pragma unroll
        for (int i = 0; i < 64; i++) sum += d0[i] + d1[i / 2];
        out[blockIdx.x * 384 + threadIdx.x] = sum;
        if (threadIdx.x == 0) mine[0] = stop - start;
    } else if (group <= adding) {
        float x[32], gate[32], sum[8];
#pragma unroll
        for (int i = 0; i < 32; i++) x[i] = out[i + threadIdx.x], gate[i] = out[i + 64 + threadIdx.x];
#pragma unroll
        for (int i = 0; i < 8; i++) sum[i] = 0;
        const long long start = clock64();
#pragma unroll 1
        for (int round = 0; round < rounds; round++) {
#pragma unroll
            for (int i = 0; i < 32; i++) {
                // Written over, so that no round can be left out.
                if constexpr (RECTIFY == ADDITION) asm volatile("{.reg .f32 y; abs.f32 y, %0; add.f32 %0, %0, y;}" : "+f"(x[i]));
                if constexpr (RECTIFY == SATURATION) asm volatile("mul.sat.f32 %0, %0, 0f33000000;" : "+f"(x[i]));
                if constexpr (RECTIFY == MAXIMUM) asm volatile("max.f32 %0, %0, 0f00000000;" : "+f"(x[i]));
                if constexpr (MULTIPLY) asm volatile("fma.rn.f32 %0, %1, %2, %0;" : "+f"(sum[i % 8]) : "f"(gate[i / 2]), "f"(x[i]));
            }
        }
        const long long stop = clock64();
        float total = 0;
#pragma unroll
        for (int i = 0; i < 8; i++) total += sum[i];
#pragma unroll
        for (int i = 0; i < 32; i++) total += x[i];
        out[blockIdx.x * 384 + threadIdx.x] = total;
        if (threadIdx.x == 128) mine[2] = stop - start;
    }
}
