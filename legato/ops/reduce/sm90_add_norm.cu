// h = residual + sum of the partial sums of RANKS ranks, normed = rms_norm(h): one launch, one block per row, or a cluster of BLOCKS.
//
// Ranks push: each writes its partial sums into the inboxes of all others, then polls its own. There are no flags, fences or
// round trips: a word of an inbox that has not arrived is EMPTY, a pair of NaNs that no sender ever sends, so that each word
// announces itself and no order among words is needed. What is written crosses the link once.
//
// An inbox has three buffers, used in turn; call c takes buffer c % 3 and empties, in the shadow of its own wait, the one of
// call c - 1, which call c + 2 will use. No peer can write there too early: it enters call c + 2 only with this rank's sums
// of call c + 1, and those are sent after call c has ended here. The count of calls lives in the inbox, one for each row,
// because a call of few rows leaves the later rows' buffers as they are; all ranks make the same calls, so all count alike.
//
// Every rank adds in the order of ranks, in float32, the residual last: all get the same bits. h is rounded before it is
// normed.
//
// Among many ranks one block has too many words to send, to empty and to poll: 21 times a row of 12 KB with eight. So BLOCKS of them
// share the row, each its own stretch, and meet once, for the norm: every warp's sum of squares goes to every block of the cluster,
// which adds them as one block would that holds one piece in each thread: the same bits.
//
// Every wait ends. A block that has looked for `patience` nanoseconds marks the missing ranks in its inbox, in those of its
// peers and in host memory; from then on no call waits for anyone, and what it gives is NaN.
//
// Dependent launches are released at once: at that moment all blocks of this grid run, so that none that a peer waits for
// can be kept out by a block of the next kernel.
//
// Macros: RANKS (1: no exchange; 0: no partial sum either, h = residual and is not written); THREADS of a block; VECTORS:
// 16-byte pieces of a row that a thread holds; LOCAL: all ranks' partial sums are in this GPU's memory, nothing is exchanged;
// TWO_SHOT: each row is added by one rank, which sends it on; BLOCKS of a row, more than one with peers and one shot only.
// A row is BLOCKS * THREADS * VECTORS * 8 numbers wide.

#include "sm90_exchange.cuh"
#include "../sm90.cuh"

#define EXCHANGE (RANKS > 1 && !LOCAL)
#if TWO_SHOT && !EXCHANGE
#error "two shots need peers"
#endif
#if BLOCKS > 1 && (TWO_SHOT || !EXCHANGE)
#error "several blocks of a row need peers and one shot"
#endif

constexpr u32 CALLS = 3u << 30;  // the count starts over at a multiple of the buffers
constexpr int WARPS = THREADS / 32;
constexpr int STEP = THREADS * 16;  // bytes from a thread's piece to its next
constexpr int BLOCK_BYTES = VECTORS * STEP;
constexpr int ROW_BYTES = BLOCKS * BLOCK_BYTES;
static_assert(THREADS % 32 == 0 && THREADS <= 1024, "whole warps");

__device__ __forceinline__ uint4 load_fresh(const void *pointer) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(pointer));
  return v;
}

// Not through ld.global.nc: those loads the assembler moves behind the wait, whatever the source says.
__device__ __forceinline__ uint4 load_constant(const void *pointer) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(pointer)
               : "memory");
  return v;
}

__device__ __forceinline__ void store(void *pointer, uint4 v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(pointer), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

__device__ __forceinline__ u32 to_pair(float low, float high) {
  u32 v;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}

__device__ __forceinline__ void add(float (&sum)[8], uint4 v) {
  const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[2 * i] += low(words[i]);
    sum[2 * i + 1] += high(words[i]);
  }
}

__device__ __forceinline__ u32 full(u32 word) { return word == EMPTY ? 0x7fffffffu : word; }  // still two NaNs
__device__ __forceinline__ bool arrived(uint4 v) { return v.x != EMPTY && v.y != EMPTY && v.z != EMPTY && v.w != EMPTY; }
__device__ __forceinline__ uint4 nothing() { return make_uint4(EMPTY, EMPTY, EMPTY, EMPTY); }

// The sum over all threads of the block, in a fixed order.
__device__ __forceinline__ float sum_row(float v) {
#pragma unroll
  for (int step = 16; step; step /= 2) v += __shfl_xor_sync(0xffffffffu, v, step);
  if (WARPS == 1) return v;
  __shared__ float warps[WARPS];
  const int lane = threadIdx.x % 32;
  if (lane == 0) warps[threadIdx.x / 32] = v;
  __syncthreads();
  v = lane < WARPS ? warps[lane] : 0;
#pragma unroll
  for (int step = 16; step; step /= 2) v += __shfl_xor_sync(0xffffffffu, v, step);
  return v;
}

#if BLOCKS > 1
static_assert(BLOCKS <= 8 && BLOCKS * WARPS <= 32, "a warp holds the sums of all warps of a row");

__device__ __forceinline__ u32 remote(u32 address, u32 block) {
  u32 v;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(v) : "r"(address), "r"(block));
  return v;
}

// Where the blocks of a row meet. No block leaves before all have sent it their sums, so none sends to one that has left.
struct Meeting {
  u32 block;           // of the row
  u32 warps, barrier;  // in shared memory: the sums of all warps of the row; when all are there

  __device__ __forceinline__ Meeting() {
    __shared__ float all_warps[BLOCKS * WARPS];
    __shared__ u64 all_there;
    asm("mov.u32 %0, %cluster_ctarank;" : "=r"(block));
    warps = shared_address(all_warps), barrier = shared_address(&all_there);
    if (threadIdx.x == 0) {
      barrier_init(barrier, 1);
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      barrier_expect(barrier, sizeof(all_warps));
    }
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  }

  // The sum over all threads of the row, in the order of one block.
  __device__ __forceinline__ float sum_row(float v) const {
#pragma unroll
    for (int step = 16; step; step /= 2) v += __shfl_xor_sync(0xffffffffu, v, step);
    const u32 lane = threadIdx.x % 32, place = warps + (block * WARPS + threadIdx.x / 32) * 4;
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");  // all blocks of the row have begun
    if (lane < BLOCKS)
      asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(remote(place, lane)),
                   "r"(__float_as_uint(v)), "r"(remote(barrier, lane))
                   : "memory");
    u32 done;
    do {
      asm volatile(
          "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;\nselp.u32 %0, 1, 0, p;\n}"
          : "=r"(done)
          : "r"(barrier)
          : "memory");
    } while (!done);
    v = 0;
    if (lane < BLOCKS * WARPS) asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(warps + lane * 4) : "memory");
#pragma unroll
    for (int step = 16; step; step /= 2) v += __shfl_xor_sync(0xffffffffu, v, step);
    return v;
  }
};
#else
// One block: it has the row for itself.
struct Meeting {
  static constexpr u32 block = 0;
  __device__ __forceinline__ float sum_row(float v) const { return ::sum_row(v); }
};
#endif

// h: the sums and the residual, rounded.
__device__ __forceinline__ uint4 round_piece(float (&sums)[8], uint4 residual) {
  add(sums, residual);
  return make_uint4(to_pair(sums[0], sums[1]), to_pair(sums[2], sums[3]), to_pair(sums[4], sums[5]), to_pair(sums[6], sums[7]));
}

#if EXCHANGE
// Where one thread's pieces of a call stand in every rank's inbox: those of sender s in buffer b begin
// (b * RANKS + s) * rows * ROW_BYTES bytes behind the header.
struct Place {
  size_t pitch;   // from a sender to the next
  size_t buffer;  // of this call
  size_t former;  // of the call before

  // `piece`: the thread's first one, in bytes from the first row.
  __device__ __forceinline__ Place(size_t rows, u32 call, size_t piece)
      : pitch(rows * ROW_BYTES), buffer(call % 3 * RANKS * pitch + piece), former((call + 2) % 3 * RANKS * pitch + piece) {}
};

__device__ __forceinline__ void make_sendable(uint4 (&mine)[VECTORS]) {
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) mine[v] = make_uint4(full(mine[v].x), full(mine[v].y), full(mine[v].z), full(mine[v].w));
}

// Empties the buffer of the call before.
__device__ __forceinline__ void empty_former(u8 *received, const Place &place, int rank) {
#pragma unroll
  for (int v = 0; v < VECTORS; ++v)
#pragma unroll
    for (int step = 1; step < RANKS; ++step)
      store(received + place.former + (rank + step) % RANKS * place.pitch + v * STEP, nothing());
}

// Adds what all ranks sent, in their order. Where a wait was given up, `wait.missing` says so and sums are NaN.
__device__ __forceinline__ void add_all(float (&sums)[VECTORS][8], const uint4 (&mine)[VECTORS], const u8 *received, Header *own,
                                        const Place &place, int rank, u32 call, Patience &wait) {
  uint4 got[RANKS][VECTORS];
#pragma unroll
  for (int sender = 0; sender < RANKS; ++sender)
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) got[sender][v] = sender == rank ? mine[v] : nothing();
  while (true) {
    u32 absent = 0;
#pragma unroll
    for (int sender = 0; sender < RANKS; ++sender)
#pragma unroll
      for (int v = 0; v < VECTORS; ++v)
        poll(got[sender][v], received + place.buffer + sender * place.pitch + v * STEP, !arrived(got[sender][v]));
#pragma unroll
    for (int sender = 0; sender < RANKS; ++sender)
#pragma unroll
      for (int v = 0; v < VECTORS; ++v) absent |= arrived(got[sender][v]) ? 0 : 1u << sender;
    if (!absent || wait.is_over(absent, own, rank, RANKS, call)) break;
  }
  if (wait.missing) {  // the buffers hold what they hold: nothing of it may pass for a result
    if (threadIdx.x == 0) tell_host(own, wait.missing);
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) got[0][v] = nothing();
  }
#pragma unroll
  for (int sender = 0; sender < RANKS; ++sender)
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) add(sums[v], got[sender][v]);
}
#endif

#if TWO_SHOT
// What `owner` sent; NaN where the wait was given up.
__device__ __forceinline__ void receive(uint4 (&row)[VECTORS], const u8 *received, Header *own, const Place &place, int rank,
                                        int owner, u32 call, Patience &wait) {
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) row[v] = nothing();
  while (true) {
    bool all = true;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v)
      poll(row[v], received + place.buffer + owner * place.pitch + v * STEP, !arrived(row[v]));
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) all &= arrived(row[v]);
    if (all || wait.is_over(1u << owner, own, rank, RANKS, call)) break;
  }
  if (!wait.missing) return;
  if (threadIdx.x == 0) tell_host(own, wait.missing);
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) row[v] = nothing();
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS)
    add_norm(const u8 *residual, const u8 *__restrict__ weight, u8 *h, u8 *normed, float eps, const u8 *partial
#if LOCAL
             , const u8 *partial1, const u8 *partial2, const u8 *partial3, const u8 *partial4, const u8 *partial5,
             const u8 *partial6, const u8 *partial7
#elif EXCHANGE
             , Header *own, int rank
#endif
    ) {
  const Meeting meeting;
  const size_t at = size_t(blockIdx.x) * BLOCK_BYTES + threadIdx.x * 16;
  const u32 row_number = blockIdx.x / BLOCKS;

  uint4 gain[VECTORS];
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) gain[v] = load_constant(weight + (meeting.block * BLOCK_BYTES + threadIdx.x * 16 + v * STEP));
#if EXCHANGE
  const size_t rows = own->rows;
  u8 *inboxes[RANKS];  // the sums that rank + step receives
#pragma unroll
  for (int step = 0; step < RANKS; ++step) inboxes[step] = own->inboxes[(rank + step) % RANKS] + HEADER_BYTES;
#endif
#if TWO_SHOT
  const int owner = blockIdx.x % RANKS;
  u8 *const owners = own->inboxes[owner] + HEADER_BYTES;
#endif
  asm volatile("griddepcontrol.launch_dependents;");
  // The residual stream is older than what is added to it, and may have left the L2 since.
#pragma unroll
  for (int v = 0; v < VECTORS; ++v)
    if (threadIdx.x % 8 == 0) asm volatile("prefetch.global.L2 [%0];" ::"l"(residual + at + v * STEP));
  asm volatile("griddepcontrol.wait;" ::: "memory");

#if EXCHANGE
  const u32 call = load_fresh_word(&own->sums[row_number]);
#if TWO_SHOT
  Patience wait(own, owner == rank ? 1 : 2);
#else
  Patience wait(own);
#endif
#endif
  uint4 stream[VECTORS];
  float sums[VECTORS][8] = {};
#if LOCAL
  const u8 *const all[8] = {partial, partial1, partial2, partial3, partial4, partial5, partial6, partial7};
  uint4 got[RANKS][VECTORS];
#pragma unroll
  for (int sender = 0; sender < RANKS; ++sender)
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) got[sender][v] = load_fresh(all[sender] + at + v * STEP);
#elif RANKS > 0
  uint4 mine[VECTORS];
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) mine[v] = load_fresh(partial + at + v * STEP);
#endif
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) stream[v] = load_fresh(residual + at + v * STEP);

#if LOCAL
#pragma unroll
  for (int sender = 0; sender < RANKS; ++sender)
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) add(sums[v], got[sender][v]);
#elif EXCHANGE
  const Place place(rows, call, at);
  make_sendable(mine);
#if TWO_SHOT
  if (rank != owner)
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) send(owners + place.buffer + rank * place.pitch + v * STEP, mine[v]);
  empty_former(inboxes[0], place, rank);
  if (rank == owner) add_all(sums, mine, inboxes[0], own, place, rank, call, wait);
#else
#pragma unroll
  for (int v = 0; v < VECTORS; ++v)
#pragma unroll
    for (int step = 1; step < RANKS; ++step) send(inboxes[step] + place.buffer + rank * place.pitch + v * STEP, mine[v]);
  empty_former(inboxes[0], place, rank);
  add_all(sums, mine, inboxes[0], own, place, rank, call, wait);
#endif
#elif RANKS == 1
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) add(sums[v], mine[v]);
#endif

  uint4 row[VECTORS];
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) row[v] = round_piece(sums[v], stream[v]);
#if TWO_SHOT
  if (rank != owner) {
    receive(row, inboxes[0], own, place, rank, owner, call, wait);
  } else if (!wait.missing) {  // a rounded NaN is 0x7fff: no pair is EMPTY
#pragma unroll
    for (int v = 0; v < VECTORS; ++v)
#pragma unroll
      for (int step = 1; step < RANKS; ++step) send(inboxes[step] + place.buffer + rank * place.pitch + v * STEP, row[v]);
  }
#endif
  float squares = 0;
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    const u32 words[4] = {row[v].x, row[v].y, row[v].z, row[v].w};
    if (RANKS > 0) store(h + at + v * STEP, row[v]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums[v][2 * i] = low(words[i]);
      sums[v][2 * i + 1] = high(words[i]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) squares += sums[v][i] * sums[v][i];
  }
  const float scale = rsqrtf(meeting.sum_row(squares) / float(ROW_BYTES / 2) + eps);
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    const u32 words[4] = {gain[v].x, gain[v].y, gain[v].z, gain[v].w};
    u32 out[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      out[i] = to_pair(sums[v][2 * i] * scale * low(words[i]), sums[v][2 * i + 1] * scale * high(words[i]));
    store(normed + at + v * STEP, make_uint4(out[0], out[1], out[2], out[3]));
  }
#if EXCHANGE
  // All threads of the row have read the count: they met in sum_row.
  if (meeting.block == 0 && threadIdx.x == 0) own->sums[row_number] = call + 1 == CALLS ? 0 : call + 1;
#endif
}
