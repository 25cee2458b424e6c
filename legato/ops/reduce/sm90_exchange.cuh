// How ranks reach each other's memory, and how a wait for them ends: what the kernels of an exchange share.
//
// An inbox is device memory of one rank that its peers have mapped. It begins with a Header; two regions follow: sums for
// sm90_add_norm.cu, words for sm90_all_gather.cu. inbox.py has the same layout.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned char u8;

constexpr u32 EMPTY = 0xffffffffu;  // what an inbox is filled with at first
constexpr int HEADER_BYTES = 4096;

struct Header {
  u8 *inboxes[8];         // of all ranks, as mapped here
  u32 *alarm;             // in host memory: missing ranks, the rank that noticed + 1, call, block
  u64 patience;           // nanoseconds that a wait lasts at most
  u64 words;              // where the region of words begins, in bytes from the start of the inbox
  u32 rows;               // that a buffer of sums holds
  u32 missing;            // ranks that someone has given up on, as bits
  u32 gathers[64];        // calls of each block of all_gather
  u32 sums[936];          // calls of each block of add_norm
};
static_assert(sizeof(Header) == HEADER_BYTES, "as inbox.py has it");

// Past the L1: a preceding kernel may still have been writing when this one began.
__device__ __forceinline__ u32 load_fresh_word(const u32 *pointer) {
  u32 v;
  asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(pointer) : "memory");
  return v;
}

// Of memory that peers write.
__device__ __forceinline__ u32 load_shared_word(const u32 *pointer) {
  u32 v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(pointer) : "memory");
  return v;
}

__device__ __forceinline__ void send(void *pointer, uint4 v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(pointer), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

// Loads where `wanted`, without a branch: loads of several peers are in flight together.
__device__ __forceinline__ void poll(uint4 &v, const void *pointer, bool wanted) {
  asm volatile(
      "{\n.reg .pred wanted;\nsetp.ne.u32 wanted, %5, 0;\n"
      "@wanted ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
      : "l"(pointer), "r"(u32(wanted))
      : "memory");
}

__device__ __forceinline__ u64 nanoseconds() {
  u64 v;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(v));
  return v;
}

// A peer has given up: the host of this rank must know too.
__device__ __noinline__ void tell_host(Header *own, u32 missing) {
  volatile u32 *alarm = own->alarm;
  if (alarm[0] == 0) alarm[0] = missing;
  __threadfence_system();
}

// Tells this rank's later calls, the peers and the host.
__device__ __noinline__ void give_up(Header *own, u32 missing, int rank, int ranks, u32 call) {
  if (atomicOr(&own->missing, missing) == 0) {
    volatile u32 *alarm = own->alarm;
    alarm[1] = rank + 1;
    alarm[2] = call;
    alarm[3] = blockIdx.x;
    __threadfence_system();
    alarm[0] = missing;
  }
  for (int peer = 0; peer < ranks; ++peer)
    if (peer != rank) atomicOr_system(&reinterpret_cast<Header *>(own->inboxes[peer])->missing, missing);
  __threadfence_system();
}

// One wait of one thread. After every fruitless look, `is_over(absent)` says whether to stop; `missing` then says why. Who waits
// for a rank that itself waits for others has the patience for `waits` of them: the rank that is missing shall be named, not
// the one that waits for it.
struct Patience {
  u32 missing;  // ranks that are given up on
  u32 looks = 0;
  u64 began = 0;
  const u32 waits;

  __device__ __forceinline__ explicit Patience(Header *own, u32 waits = 1)
      : missing(load_shared_word(&own->missing)), waits(waits) {}

  __device__ __forceinline__ bool is_over(u32 absent, Header *own, int rank, int ranks, u32 call) {
    if (missing) return true;
    if (++looks % 256) return false;
    if (began == 0) began = nanoseconds();
    missing = load_shared_word(&own->missing);
    if (!missing && nanoseconds() - began > waits * own->patience) {
      give_up(own, absent, rank, ranks, call);
      missing = absent;
    }
    return missing != 0;
  }
};
