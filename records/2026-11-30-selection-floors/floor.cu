typedef unsigned int u32; typedef unsigned long long u64;
#ifndef LINES
#define LINES 4
#endif
__device__ __forceinline__ u32 sa(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ u32 remote(u32 a, u32 b) { u32 m; asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(m) : "r"(a), "r"(b)); return m; }
__device__ __forceinline__ float4 read4(const float* at, bool valid) {
  float4 v;
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
      "@p ld.global.nc.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];\n}" : "=&f"(v.x), "=&f"(v.y), "=&f"(v.z), "=&f"(v.w) : "l"(at), "r"((u32)valid));
  return v;
}
__device__ __forceinline__ void st_async(u32 a, uint4 v, u32 bar) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(a), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(bar) : "memory");
}
__device__ __forceinline__ bool wait_for(u32 barrier) {
  u32 done; int n = 0;
  do { asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(done) : "r"(barrier) : "memory"); } while (!done && ++n < 2000);
  return done;
}
__device__ __forceinline__ long long gt() { long long t; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)); return t; }
#define MARK(n) if (profile && threadIdx.x == 0) profile[blockIdx.x * 16 + (n)] = clock64();
// way: 0 nothing, 1 lines into registers, 2 bulk copies to shared
extern "C" __global__ void __launch_bounds__(THREADS, 1)
floor_k(const float* scores, const int* lengths, int* out, int stride, int bits, int needs_length, int way, int samples, int hops, int payload, long long* profile) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ __align__(16) u64 bars[4];
  __shared__ u32 group[32];
  uint4* inbox = (uint4*)(memory + 65536);  // per hop 16 * payload
  const u32 size = 1u << bits, rank = blockIdx.x & (size - 1), row = blockIdx.x >> bits;
  if (profile && threadIdx.x == 0) profile[blockIdx.x * 16 + 14] = gt();
  MARK(0)
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  if (threadIdx.x < 32) { group[threadIdx.x] = ~0u;
    if (threadIdx.x < 4) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(sa(&bars[threadIdx.x])) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
  __syncthreads();
  if (threadIdx.x == 0)
    for (int h = 0; h < hops; h++) asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(sa(&bars[h])), "r"(size * payload * 16) : "memory");
  if (size > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  MARK(1)
  u32 length = needs_length ? (u32)max(lengths[row], 0) : stride;
  MARK(2)
  const u32 block_first = (u64)length * rank >> bits & ~127u, block_end = (rank + 1 == size ? length : (u32)((u64)length * (rank + 1) >> bits & ~127u));
  const float* base = scores + (u64)row * stride;
  float sum = 0;
  float sampled = 0;
  for (int i = threadIdx.x; i < samples; i += THREADS) sampled += base[(u64)i * length / samples];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  constexpr int WARPS = THREADS / 32;
  const u32 steps = (block_end - block_first) / 128, first_line = steps * warp / WARPS;
  const int num = steps * (warp + 1) / WARPS - first_line;
  const float* at = base + block_first + first_line * 128 + lane * 4;
  if (way == 1) {
    float4 held[LINES];
#pragma unroll
    for (int j = 0; j < LINES; j++) held[j] = read4(at + j * 128, j < num);
    if (samples) { atomicMin(&group[lane], __float_as_uint(sampled)); __syncthreads(); MARK(3) }
    for (int i = 0; i < num; i += LINES) {
#pragma unroll
      for (int j = 0; j < LINES; j++) {
        float4 now = held[j];
        held[j] = read4(at + (i + j + LINES) * 128, i + j + LINES < num);
        sum += fmaxf(fmaxf(now.x, now.y), fmaxf(now.z, now.w));
      }
    }
  } else if (way == 2) {  // up to 64 KB at once, whole slice in pieces of a warp
    const u32 bytes = num * 512;
    if (bytes && bytes <= 65536 / WARPS) {
    }
    if (threadIdx.x == 0) {
      u32 total = (block_end - block_first) * 4;
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(sa(&bars[3])), "r"(total) : "memory");
      for (u32 done = 0; done < total; done += 4096) {
        u32 n = min(4096u, total - done);
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(sa(memory + done)), "l"((const char*)(base + block_first) + done), "r"(n), "r"(sa(&bars[3])) : "memory");
      }
    }
    wait_for(sa(&bars[3]));
    for (int j = 0; j < num; j++) { float4 now = ((float4*)memory)[(first_line + j) * 32 + lane]; sum += fmaxf(fmaxf(now.x, now.y), fmaxf(now.z, now.w)); }
  }
  if (__syncthreads_or(sum == 1.2345f)) out[1] = 1;
  MARK(4)
  if (size > 1) { __syncwarp(); asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
  MARK(5)
  for (int h = 0; h < hops; h++) {
    uint4* in = inbox + h * 16 * payload;
    for (u32 i = threadIdx.x; i < size * payload; i += THREADS) {
      const u32 to = i / payload;
      st_async(remote(sa(in + rank * payload + i % payload), to), make_uint4(i, 0, 0, 0), remote(sa(&bars[h]), to));
    }
    bool ok = wait_for(sa(&bars[h]));
    if (!ok) out[2] = 1;
    __syncthreads();
    MARK(6 + h)
  }
  if (threadIdx.x == 0) out[16 + blockIdx.x] = length;
  MARK(8)
  if (profile && threadIdx.x == 0) profile[blockIdx.x * 16 + 15] = gt();
}
// straight-line code: how long instructions take that nobody has fetched yet
extern "C" __global__ void __launch_bounds__(THREADS, 1) fetch_k(int* out, int stride, long long* profile) {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  float x = threadIdx.x, y = stride, z = 1;
#pragma unroll 1
  for (int pass = 0; pass < 3; pass++) {
    if (profile && threadIdx.x == 0) profile[blockIdx.x * 16 + pass * 2] = clock64();
#pragma unroll
    for (int i = 0; i < 500; i++) { x = fmaf(x, 1.0001f, y); z = fmaf(z, 0.9999f, x); }
    __syncthreads();
    if (profile && threadIdx.x == 0) profile[blockIdx.x * 16 + pass * 2 + 1] = clock64();
  }
  if (x + z == 1.2345f) out[0] = 1;
}
