// Every rank's words on every rank: for what is small and needed at once (a token and its logit, not a row of logits).
//
// Ranks push as in sm90_add_norm.cu, but a word may hold any bits here, so each travels beside a tag: the number of the
// call. A word and its tag are one access of 8 bytes, which nothing tears. Two buffers are used in turn and need no emptying:
// what an older call left has an older tag. Waits end as in sm90_exchange.cuh; then the words are all ones.
//
// Macros: RANKS; THREADS of a block, which carries two words each.

#include "sm90_exchange.cuh"

constexpr u32 CALLS = 0xfffffffeu;  // the count starts over at a multiple of the buffers; no tag is EMPTY

struct Letter {
  u64 first, second;  // tag above, word below
};

__device__ __forceinline__ u64 tagged(u32 word, u32 tag) { return u64(tag) << 32 | word; }
__device__ __forceinline__ bool arrived(const Letter &letter, u32 tag) {
  return letter.first >> 32 == tag && letter.second >> 32 == tag;
}

__device__ __forceinline__ void send(void *pointer, const Letter &letter) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(pointer), "l"(letter.first), "l"(letter.second)
               : "memory");
}

__device__ __forceinline__ void poll(Letter &letter, const void *pointer, bool wanted) {
  asm volatile(
      "{\n.reg .pred wanted;\nsetp.ne.u32 wanted, %3, 0;\n"
      "@wanted ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];\n}"
      : "+l"(letter.first), "+l"(letter.second)
      : "l"(pointer), "r"(u32(wanted))
      : "memory");
}

extern "C" __global__ void __launch_bounds__(THREADS)
    all_gather(const u32 *words, u32 *gathered, int num_words, int most_words, Header *own, int rank) {
  const int at = (blockIdx.x * THREADS + threadIdx.x) * 2;  // of this thread's first word
  u8 *inboxes[RANKS];                                       // the words that rank + step receives
#pragma unroll
  for (int step = 0; step < RANKS; ++step) inboxes[step] = own->inboxes[(rank + step) % RANKS] + own->words;
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");

  const u32 call = load_fresh_word(&own->gathers[blockIdx.x]), tag = call + 1;
  Patience wait(own);
  if (at < num_words) {
    const bool is_pair = at + 1 < num_words;
    const u32 first = load_fresh_word(words + at), second = is_pair ? load_fresh_word(words + at + 1) : 0;
    const Letter mine = {tagged(first, tag), tagged(second, tag)};
    const size_t pitch = size_t(most_words) * 8, buffer = call % 2 * RANKS * pitch + size_t(at) * 8;
#pragma unroll
    for (int step = 1; step < RANKS; ++step) send(inboxes[step] + buffer + rank * pitch, mine);
    Letter got[RANKS];
#pragma unroll
    for (int sender = 0; sender < RANKS; ++sender) got[sender] = sender == rank ? mine : Letter{0, 0};
    while (true) {
      u32 absent = 0;
#pragma unroll
      for (int sender = 0; sender < RANKS; ++sender)
        poll(got[sender], inboxes[0] + buffer + sender * pitch, !arrived(got[sender], tag));
#pragma unroll
      for (int sender = 0; sender < RANKS; ++sender) absent |= arrived(got[sender], tag) ? 0 : 1u << sender;
      if (!absent || wait.is_over(absent, own, rank, RANKS, call)) break;
    }
    if (wait.missing && threadIdx.x == 0) tell_host(own, wait.missing);
#pragma unroll
    for (int sender = 0; sender < RANKS; ++sender) {
      u32 *to = gathered + size_t(sender) * num_words + at;
      to[0] = wait.missing ? EMPTY : u32(got[sender].first);
      if (is_pair) to[1] = wait.missing ? EMPTY : u32(got[sender].second);
    }
  }
  __syncthreads();  // all have read the count
  if (threadIdx.x == 0) own->gathers[blockIdx.x] = tag == CALLS ? 0 : tag;
}
