// Every rank's words on every rank: for what is small and needed at once, such as a few rows of logits.
//
// Ranks push as in sm90_add_norm.cu, but a word may hold any bits here, so each travels beside a tag: the number of the
// call. A word and its tag are one access of 8 bytes, which nothing tears. Two buffers are used in turn and need no emptying:
// what an older call left has an older tag. Waits end as in sm90_exchange.cuh; then the words of all other ranks are all ones.
//
// How many blocks share the words follows from their number alone, so that a block's words are the same block's on all ranks.
// A shard of more words than a buffer takes comes in pieces, one launch each: rank r's words go to gathered[r * pitch ...].
//
// `gather_local`: what all ranks send is in this GPU's memory already.
//
// Macros: RANKS; THREADS of a block, each of which carries two words at a time.

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
    all_gather(const u32 *words, u32 *gathered, int num_words, int pitch, int most_words, Header *own, int rank) {
  const int begin = (blockIdx.x * THREADS + threadIdx.x) * 2, stride = gridDim.x * THREADS * 2;  // of this thread's words
  u8 *inboxes[RANKS];  // the words that rank + step receives
#pragma unroll
  for (int step = 0; step < RANKS; ++step) inboxes[step] = own->inboxes[(rank + step) % RANKS] + own->words;
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");

  const u32 call = load_fresh_word(&own->gathers[blockIdx.x]), tag = call + 1;
  const size_t each = size_t(most_words) * 8, buffer = call % 2 * RANKS * each;  // bytes: of a rank's words, before them
  Patience wait(own);
  for (int at = begin; at < num_words; at += stride) {
    const bool is_pair = at + 1 < num_words;
    const u32 first = load_fresh_word(words + at), second = is_pair ? load_fresh_word(words + at + 1) : 0;
    const Letter mine = {tagged(first, tag), tagged(second, tag)};
#pragma unroll
    for (int step = 1; step < RANKS; ++step) send(inboxes[step] + buffer + rank * each + size_t(at) * 8, mine);
    u32 *to = gathered + size_t(rank) * pitch + at;
    to[0] = first;
    if (is_pair) to[1] = second;
  }
  for (int at = begin; at < num_words; at += stride) {
    Letter got[RANKS];  // got[step]: from rank + step
    u32 absent;
#pragma unroll
    for (int step = 1; step < RANKS; ++step) got[step] = {0, 0};
    do {
      absent = 0;
#pragma unroll
      for (int step = 1; step < RANKS; ++step)
        poll(got[step], inboxes[0] + buffer + (rank + step) % RANKS * each + size_t(at) * 8, !arrived(got[step], tag));
#pragma unroll
      for (int step = 1; step < RANKS; ++step)
        absent |= arrived(got[step], tag) ? 0 : 1u << (rank + step) % RANKS;
    } while (absent && !wait.is_over(absent, own, rank, RANKS, call));
#pragma unroll
    for (int step = 1; step < RANKS; ++step) {
      u32 *to = gathered + size_t((rank + step) % RANKS) * pitch + at;
      to[0] = wait.missing ? EMPTY : u32(got[step].first);
      if (at + 1 < num_words) to[1] = wait.missing ? EMPTY : u32(got[step].second);
    }
  }
  if (wait.missing) tell_host(own, wait.missing);
  __syncthreads();  // all have read the count
  if (threadIdx.x == 0) own->gathers[blockIdx.x] = tag == CALLS ? 0 : tag;
}

// blockIdx.y: whose words.
extern "C" __global__ void __launch_bounds__(THREADS) gather_local(
    const u32 *part0, const u32 *part1, const u32 *part2, const u32 *part3, const u32 *part4, const u32 *part5,
    const u32 *part6, const u32 *part7, u32 *gathered, int num_words) {
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const u32 *mine = part0;
  switch (blockIdx.y) {
    case 1: mine = part1; break;
    case 2: mine = part2; break;
    case 3: mine = part3; break;
    case 4: mine = part4; break;
    case 5: mine = part5; break;
    case 6: mine = part6; break;
    case 7: mine = part7; break;
  }
  for (int at = blockIdx.x * THREADS + threadIdx.x; at < num_words; at += gridDim.x * THREADS)
    gathered[size_t(blockIdx.y) * num_words + at] = load_fresh_word(mine + at);
}
