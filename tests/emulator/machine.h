// The machine that runs translated PTX: warps of 32 lanes whose registers are rows of 32 values, blocks with shared memory,
// clusters, and what is under way between them. A warp's lanes each have a place in the program; those at one place run together.
//
// alu.cpp, memory.cpp, copies.cpp and matrix.cpp say what instructions do, schedule.cpp who runs when; emulator.cpp is what Python calls.
#pragma once
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <vector>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int8_t s8;
typedef int16_t s16;
typedef int32_t s32;
typedef int64_t s64;

constexpr u32 ALL = 0xFFFFFFFFu;
// A shared address is a block's rank in its cluster and an offset, as on Hopper; the first kilobyte is the system's.
constexpr u32 SHARED_START = 1024, RANK_SHIFT = 24, OFFSET_MASK = (1u << RANK_SHIFT) - 1;
constexpr u64 SHARED_WINDOW = 0x51AEull << 48, LOCAL_WINDOW = 0x10CAull << 48, WINDOW_MASK = 0xFFFFull << 48;
constexpr u8 POISON = 0xFF;  // of every byte that nobody wrote: not a number, whatever the type

struct Warp;
struct Block;
struct Cluster;
struct Run;
struct Instruction;
typedef void (*Handler)(Warp&, const Instruction&, u32 lanes);

enum Kind : u8 { PLAIN, BRANCH, CALL, RETURN, EXIT, MEMBERS, ALIGNED, BARRIER, CLUSTER_ARRIVE, CLUSTER_WAIT, LOOK };

struct Instruction {
  Handler run;
  const s32 *o, *touched;  // operands: see `Warp::in`; registers that it reads or writes
  u32 num_touched;
  s32 guard;     // predicate * 2 + negated; -1: none
  u32 line;
  Kind kind;
  bool leader;  // a branch may lead here
};

struct Fault {
  std::string text;
};
[[noreturn]] void fault(const Warp& w, const char* format, ...) __attribute__((format(printf, 2, 3)));

// What a kernel was translated to.
struct Program {
  std::vector<Instruction> code;
  std::vector<s32> operands;
  std::vector<u8> constants;
  std::vector<s32> specials;  // pairs: which, slot
  u32 register_bytes, predicates, local_bytes, shared_bytes;
  s32 entry;
};

struct Range {
  u64 begin, end;
};

// One copy or store that lands later than it was issued.
struct Pending {
  enum What : u8 { COPY, BULK, TENSOR, STORE, ARRIVE, WRITE_BACK } what;
  Warp* warp;  // that issued it, by this instruction
  const Instruction* issued;
  u32 lanes;
  u32 bytes, source_bytes;
  u32 target[32], barrier[32];
  u64 source[32];
  u32 group[32];
  u8 value[32][16];
  u64 global;
  s32 coordinates[5];
  u32 at;  // its place among all that is under way
};

struct Matrix;  // an asynchronous product: matrix.cpp

struct Warp {
  u8* registers;
  u32* predicates;
  const u8* constants;
  Block* block;
  const Instruction* now;
  u32 id;
  u32 live, blocked, parked;  // lanes: not exited; that wait for others outside the warp; for lanes of the warp
  s32 pc[32];
  u32 cluster_arrived, cluster_phase[32];
  u32 committed[32], bulk_committed[32], products_committed;
  std::vector<Pending*> copies, write_backs;
  std::vector<Matrix*> products;
  std::vector<u8> local;
  u64 looks_since;  // how often it has looked for something since so many events
  u32 looks;
  bool queued, looked;

  // An operand of 32 values: of this warp's registers, or of the program's constants, which have negative numbers.
  template <class T> T* in(s32 o) { return reinterpret_cast<T*>(o >= 0 ? registers + o : const_cast<u8*>(constants) + ~o); }
  u32 predicate(s32 o) const { return predicates[o >> 1] ^ (o & 1 ? ALL : 0); }
  void set_predicate(s32 o, u32 lanes, u32 value) {
    if (o >= 0) predicates[o >> 1] = (predicates[o >> 1] & ~lanes) | (value & lanes);
  }
  u32 threads() const;
};

struct Barrier {
  u32 arrived = 0, expected = 0, popc = 0;
  bool any = false, all = true, counted = false;
  std::vector<std::pair<Warp*, u32>> waiting;
};

// An mbarrier; what stands in shared memory is a mark and the number of this, so that a store over it is found.
struct Mbarrier {
  u32 count, pending, phase;
  s64 bytes;
  bool valid;
};
constexpr u32 MBARRIER_MARK = 0xBA441E40u;

struct Block {
  Run* run;
  Cluster* cluster;
  u32 rank, x, y, z;
  u32 live_warps;
  bool exited = false;
  std::vector<u8> shared;
  std::vector<u8> registers;
  std::vector<u32> predicates;
  std::vector<Warp> warps;
  Barrier barriers[16];
  std::vector<Mbarrier> mbarriers;
  u32 under_way = 0;
};

struct Cluster {
  std::vector<Block*> blocks;
  u32 live_lanes = 0, arrived = 0, arrived_exited = 0, phase = 0, live_blocks = 0;
  std::vector<std::pair<Warp*, u32>> waiting;
};

struct Random {
  u64 state;
  u32 next() {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return static_cast<u32>((state * 0x2545F4914F6CDD1Dull) >> 32);
  }
  u32 below(u32 n) { return static_cast<u32>(static_cast<u64>(next()) * n >> 32); }
  bool chance(u32 of_65536) { return (next() >> 16) < of_65536; }
};

// How a run is drawn: 65536ths, and counts.
struct Policy {
  u32 land, split, explore, budget, window;
  bool in_order;
};

// What a copy of a box of a tensor must know; it stands where the hardware's descriptor of as many bytes would.
struct TensorMap {
  u64 base, strides[5], sizes[5];  // strides in bytes; the first dimension is the contiguous one
  u16 box[5];
  u8 dimensions, element_bytes;
  u32 swizzle, mark;
};
static_assert(sizeof(TensorMap) <= 128);
constexpr u32 TENSOR_MAP_MARK = 0x7E4503A9u;

struct Run {
  const Program* program;
  const u8* parameters;
  u32 parameter_bytes;
  u32 grid[3], block_size[3], cluster_size[3];
  u32 dynamic_shared, resident;
  std::vector<Range> ranges;
  Range last{0, 0};
  std::vector<u8> globals;
  Policy policy;
  Random random;
  std::vector<Cluster*> active;
  std::vector<Warp*> ready;
  std::vector<Pending*> pending;
  u64 events = 0, instructions = 0, slices = 0;
  u32 next_cluster = 0, clusters = 0;
  u64 limit = 0;
};

// ---- of memory.cpp
u8* shared_at(const Warp& w, u32 address, u32 bytes, u32 align, bool own);
u8* shared_of(const Warp& w, Block* block, u32 offset, u32 bytes, u32 align);
u8* global_at(const Warp& w, u64 address, u32 bytes, u32 align);
u8* generic_at(Warp& w, u32 lane, u64 address, u32 bytes, u32 align);
Mbarrier& mbarrier_at(const Warp& w, u32 address, bool own);
void mbarrier_settle(const Warp& w, Mbarrier& barrier);
void mbarrier_complete(const Warp& w, u32 address, u32 bytes);
void mbarrier_arrive(const Warp& w, Mbarrier& barrier, u32 count);
Block* block_of(const Warp& w, u32 address);

// ---- of copies.cpp
void land(Run& run, Pending* pending);  // and forgets it
void land_some(Run& run, u32 which);    // of those under way: whole, or some lanes of it

// ---- of matrix.cpp
void finish_products(Warp& w, u32 leave);
bool touches_products(const Warp& w, const Instruction& i);

// ---- of schedule.cpp
void release(Warp& w, u32 lanes, bool advance);
void run_all(Run& run);
std::string where(const Run& run);

// ---- the instructions
struct Entry {
  std::string signature;
  Handler run;
  Kind kind;
};
std::map<std::string, Entry>& table();
inline void define(const std::string& name, const char* signature, Handler run, Kind kind = PLAIN) {
  table()[name] = Entry{signature, run, kind};
}
void define_alu();
void define_convert();
void define_memory();
void define_copies();
void define_matrix();
void define_schedule();

template <class F> inline void each(u32 lanes, F f) {
  for (; lanes; lanes &= lanes - 1) f(static_cast<u32>(__builtin_ctz(lanes)));
}
