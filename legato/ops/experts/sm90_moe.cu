// y[t] = sum over a of weights[t, a] * w2[e] swiglu(w13[e] x[t]), e = ids[t, a], and a shared expert, in one launch.
//
// One block per multiprocessor, all resident. First half: a "unit" is eight features of one expert, their gate rows and
// their up rows together in one tile of 16 outputs, for up to eight rows of x that chose the expert (one tile of
// mma.m16n8k16; an expert with more rows is several "tiles"). The warps of a block share a unit's K, so after the sums have
// met in shared memory one lane has gate and up of a feature. Second half: a block owns up to STRIPS strips of 16 outputs
// of every expert, a warp takes an item, strips of one tile, at a time with all of their K, and the block adds up what the
// choices of its rows give, in their order, in float32.
//
// Nothing stands between the halves: eight features of a row are stored at once, over a value that no feature has, and
// whoever needs them loads until they are there. Two buffers take turns; each launch clears what the last one used. Units go
// round the blocks, so that the first experts' features are there long before the last ones', and the second half begins with
// those: no block waits for the slowest.
//
// Weights are packed (sm90_formats.cuh) so that whatever a warp reads lies in one piece. Each warp streams its own
// sequence of them through a ring of its own with bulk copies, across units and halves: the ring is full of the second
// half's weights while its features are computed. What the shared expert's units need is asked for before the launch's
// dependency is resolved, for nobody needs to know the routing for that; what else belongs to it goes to the L2 meanwhile.
//
// Who computes what follows from ids alone; every block works it out for itself. The order of every sum is fixed: it
// depends neither on who computes it nor on what other rows chose.
//
// Where x does not stay for the whole first half (more rows), a unit of which every warp of the block has a sixteenth of K is soon
// done, and what stands around its products (asking, adding up, storing) costs as much as half of them. So where K divides, groups
// of four warps have units of their own there ("quads"); what is left over all warps share. A warp of a quad computes four of the
// sixteen slices of K one after the other, and adds up their sums in the order in which the others' are added, for the same bits.
//
// Macros: FORMAT of the routed experts; SHARED: format of the shared one, or NONE (-1); HIDDEN, WIDTH: D and F, multiples
// of 128; GRID: blocks; WARPS; SLOTS of a ring, and steps of a slot: CHUNK, SHARED_CHUNK; DYNAMIC_BYTES of shared memory
// that the launch gives; BUFFERS in which sums meet: how far warps may part; SPAN: strips of an item, 1 or all; X_ROWS: rows
// of a tile, and of x that fit (up to so many rows of the launch stay for the whole first half, more are fetched tile by
// tile); CHOICES of a row; MOST_PAIRS: rows * choices; MOST_TILES; MOST_FEATURES: rows of a buffer of features; EXPERTS: how
// many there are; SHARERS: warps that share a unit, 16 or 4; TERMS_SHARED: 1 where what a block adds up fits the
// shared memory of the first half's rows.

#include "sm90_formats.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int SHARED_FORMAT = SHARED == NONE ? FORMAT : SHARED;
typedef Format<FORMAT> Routed;
typedef Format<SHARED_FORMAT> Shared;
constexpr int UNITS = WIDTH / 8;           // of one tile
constexpr int DEPTH = HIDDEN / 128;        // K of the first half, in 128
constexpr int STRIPS_ALL = HIDDEN / 16;
constexpr int STRIPS = (STRIPS_ALL + GRID - 1) / GRID;
constexpr int PIECE = WIDTH % 256 ? 128 : 256;  // of K that the second half holds of its rows in registers
constexpr int PIECES = WIDTH / PIECE;
constexpr int SLICE = (DEPTH + WARPS - 1) / WARPS;  // of K of a warp in the first half, at most, in 128
constexpr int GROUPS = WARPS / SHARERS;             // of warps that share units
constexpr bool QUADS = GROUPS > 1;
constexpr int X_PITCH = GROUPS * SLICE * 256 + 16;  // of a part of x, of which a block has SHARERS: rows start in different banks
constexpr int X_BYTES = X_ROWS * X_PITCH;
constexpr int PIECE_STEPS = PIECE / Routed::STEP_K, SHARED_PIECE_STEPS = PIECE / Shared::STEP_K;
constexpr int CHUNK_BYTES = CHUNK * Routed::BYTES, SHARED_CHUNK_BYTES = SHARED == NONE ? 0 : SHARED_CHUNK * Shared::BYTES;
constexpr int SLOT_BYTES = CHUNK_BYTES > SHARED_CHUNK_BYTES ? CHUNK_BYTES : SHARED_CHUNK_BYTES;
constexpr int RING_BYTES = SLOTS * SLOT_BYTES;
constexpr int COLUMN_PAIRS = (X_ROWS + 1) / 2;             // of a tile's eight columns, those that may be rows
constexpr int PARTIAL_FLOATS = 32 * COLUMN_PAIRS;          // of a warp's sums of a unit
constexpr int PARTIAL_BYTES = WARPS * PARTIAL_FLOATS * 4;  // of a buffer
static_assert(WARPS == 16, "the order of a sum is that of four groups of four warps");
constexpr size_t FEATURE_BYTES = size_t(MOST_FEATURES) * WIDTH * 2;
constexpr int WORDS = (MOST_PAIRS + 31) / 32;
constexpr int PAIRS_EACH = (MOST_PAIRS + THREADS - 1) / THREADS, EXPERTS_EACH = (EXPERTS + THREADS - 1) / THREADS;
constexpr int EXPERT_WARPS = (EXPERTS + 32 * EXPERTS_EACH - 1) / (32 * EXPERTS_EACH);  // that have some
constexpr bool RESIDENT = MOST_PAIRS / CHOICES <= X_ROWS;  // x stays for the whole first half
// Blocks that have STRIPS strips; the last ones have one less, and mostly a unit less: multiprocessors that end a launch last
// begin the next one last, as its last blocks.
constexpr int FULL_BLOCKS = STRIPS_ALL - (STRIPS - 1) * GRID;
// By how many blocks rounds of units but the first are shifted, where rounds are few. Where weights are widened, who has a unit of
// the shared expert should not also have one more of the others; in bfloat16, where bytes count, it should: its bytes come first.
constexpr int SHIFT = SHARED != NONE && X_ROWS <= 2 && FORMAT != BF16 ? UNITS % GRID : 0;
constexpr bool ONE_PIECE = PIECES == 1;  // a warp's second half is worked out item by item
// Runs of a warp that its lanes work out, at most: whether they do so once. Without pieces, runs are units only.
constexpr int MOST_RUNS = (MOST_TILES * UNITS + GRID - 1) / GRID + 2 +
                          (ONE_PIECE ? 0 : (MOST_TILES * STRIPS + WARPS - 1) / WARPS * PIECES * (SPAN > 1 ? STRIPS : 1));
constexpr bool ONE_BATCH = RESIDENT && MOST_RUNS < 32;
constexpr int SINGLE_TILES = 1;  // the last one, of which each strip is an item: no warp is busy long after the others
constexpr int ITEMS = SLOTS < 4 ? 4 : 16;  // that a warp may have asked for and not done: one a slot, and the present one
static_assert(SLOTS < ITEMS, "items do not overtake themselves");
static_assert(SPAN == 1 || SPAN >= STRIPS, "an item is a strip of a tile or all of them");
static_assert(SHARED == NONE || SHARED_CHUNK == 1 || SHARED_CHUNK == 128 / Shared::STEP_K, "a copy is within 128 of K");
constexpr int DOWN_CHUNK = CHUNK < PIECE_STEPS ? CHUNK : PIECE_STEPS;  // steps of a copy of the second half: of one strip
static_assert(PIECE_STEPS % DOWN_CHUNK == 0, "copies end with strips");
static_assert(SHARERS == 16 || SHARERS == 4, "all warps share a unit, or four");
// Whether all copies of the first half are of CHUNK steps.
constexpr bool EVEN = DEPTH % WARPS == 0 && SLICE * (128 / Routed::STEP_K) % CHUNK == 0;
constexpr bool SHARED_EVEN = SHARED == NONE || (DEPTH % WARPS == 0 && SLICE * (128 / Shared::STEP_K) % SHARED_CHUNK == 0);
static_assert(!QUADS || (!RESIDENT && EVEN && SHARED_EVEN && UNITS % GROUPS == 0), "slices are alike, and copies end with them");
// Bytes of a copy of the second half, and of the shared expert's.
constexpr int DOWN_COPY = DOWN_CHUNK * Routed::BYTES, SHARED_COPY = SHARED_CHUNK * Shared::BYTES;
// Bytes of a run, and of its copies but perhaps the last, in one word; 0: there is none.
__device__ __forceinline__ u32 run_word(int bytes, int copy) { return u32(bytes) / 16 | u32(copy) / 16 << 16; }
// Few pairs: which experts are named is known to every warp as soon as the ids are.
constexpr bool NAMED_AT_ONCE = RESIDENT && MOST_PAIRS <= 64 && EXPERTS <= 1024;
constexpr int NAMED_WORDS = (EXPERTS + 31) / 32;
constexpr int TERM_PITCH = STRIPS * 16 + 4;  // floats
// Entries of the tables of tiles and pairs. Of many pairs they are as small as they may be, for rows of a tile take their room: a
// pair's row is worked out then.
constexpr bool LEAN = MOST_PAIRS > 512;
template <bool>
struct Entries {
  typedef int Expert, Count, Pair;
};
template <>
struct Entries<true> {
  typedef short Expert;
  typedef u8 Count;
  typedef unsigned short Pair;
};
typedef Entries<LEAN> Entry;
constexpr int UNROLLED = LEAN ? 8 : WORDS;  // words of an expert's pairs
constexpr int COLUMNS = LEAN ? 4 : 2;      // of a row of y that a thread adds up at a time
struct alignas(COLUMNS * 4) Columns {
  float at[COLUMNS];
};
// Of many rows the shared expert has many tiles: a block's units of it are in a row there, so that few tiles' rows are fetched.
constexpr bool IN_ROWS = QUADS && LEAN && SHARED != NONE;
static_assert(SLOT_BYTES % 16 == 0 && X_BYTES % 16 == 0, "copies are aligned");
static_assert(WARPS * RING_BYTES + SHARERS * X_BYTES + BUFFERS * PARTIAL_BYTES == DYNAMIC_BYTES,
              "the launch counts as this does");
static_assert(HIDDEN % 128 == 0 && (WIDTH % 256 == 0 || WIDTH == 128), "K comes in steps and pieces");

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  while (!barrier_passed(barrier, parity)) {
  }
}

// Past the L1: others write these bytes in this launch or the one before.
__device__ __forceinline__ void copy16(u32 target, const void *source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
}

__device__ __forceinline__ bool elected() {
  u32 is;
  asm volatile("{\n.reg .pred is;\nelect.sync _|is, 0xffffffff;\nselp.u32 %0, 1, 0, is;\n}" : "=r"(is));
  return is;
}

// What all lanes have, said so that the compiler knows, who guards every shuffle and loop else. Where x stays it knows without.
__device__ __forceinline__ u32 uniform(u32 value) { return RESIDENT ? value : __reduce_or_sync(0xffffffffu, value); }
__device__ __forceinline__ int uniform(int value) { return int(uniform(u32(value))); }
__device__ __forceinline__ const u8 *uniform(const u8 *pointer) {
  const u64 v = reinterpret_cast<u64>(pointer);
  return reinterpret_cast<const u8 *>(u64(uniform(u32(v >> 32))) << 32 | uniform(u32(v)));
}

__device__ __forceinline__ void prefetch_bulk(const void *source, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(source), "r"(bytes) : "memory");
}

__device__ __forceinline__ void copy4(u32 target, const void *source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(target), "l"(source) : "memory");
}

__device__ __forceinline__ uint4 load_relaxed(const u8 *pointer) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(pointer)
               : "memory");
  return v;
}

__device__ __forceinline__ void store_relaxed(u8 *pointer, uint4 v) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(pointer), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}

// What no feature is: the conversion to bfloat16 makes one NaN, and this is another.
constexpr u32 MISSING = 0xffffffffu;

// An item of the second half: all of the block's strips of a tile; or one, where SPAN is 1, of the last tile and of a shared
// expert's, whose weights may be four times as many bytes: no warp is busy when all others are done. Items go round the warps.
struct Item {
  int tile, strip, strips;
};

// number / count, where count is `most` or one less: no division by what only the block knows.
template <int MOST>
__device__ __forceinline__ int divide(int number, int count) {
  return count == MOST ? number / MOST : number / (MOST > 1 ? MOST - 1 : 1);
}

__device__ __forceinline__ Item item_of(int number, int live, int shared_tiles, int num_tiles) {
  if (live == 0) return {num_tiles, 0, 0};
  const int rest = number - shared_tiles * live;
  if (SHARED != NONE && rest < 0) {
    const int tile = divide<STRIPS>(number, live);
    return {tile, number - tile * live, 1};
  }
  const int whole = SPAN == 1 ? 0 : ONE_PIECE ? max(0, num_tiles - shared_tiles - SINGLE_TILES) : num_tiles;
  if (rest < whole) return {shared_tiles + rest, 0, live};
  const int tile = divide<STRIPS>(rest - whole, live);
  return {shared_tiles + whole + tile, rest - whole - tile * live, 1};
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    moe(const u8 *__restrict__ w13, const u8 *__restrict__ w2, const float *__restrict__ factors,
        const u8 *__restrict__ shared13, const u8 *__restrict__ shared2, const u8 *__restrict__ x, const int *ids,
        const float *weights, u8 *__restrict__ y, u8 *both_features, float *terms_global, u64 *state, int rows,
        int x_stride) {
  extern __shared__ __align__(128) u8 memory[];
  // Of slots that are full, warp by warp; of sums that have met and of buffers that are free again; of the first half, which
  // all warps have done; and of rows of x that are there, warp by warp.
  __shared__ __align__(8) u64 barriers[WARPS * SLOTS + 2 * BUFFERS * GROUPS + (QUADS ? BUFFERS : 0) + 1 + (RESIDENT ? WARPS : 0)];
  __shared__ Entry::Expert expert_of[MOST_TILES];  // -1: the shared expert
  __shared__ Entry::Count count_of[MOST_TILES];    // rows of a tile
  // row * choices + choice (the shared expert's follow), and, where it has room, the row 16 bits up
  __shared__ Entry::Pair pair_of[MOST_TILES][X_ROWS];
  __shared__ Entry::Expert id_of[MOST_PAIRS];
  __shared__ float weight_of[LEAN ? 1 : MOST_PAIRS];
  __shared__ float factors_of[FORMAT == NVFP4 ? EXPERTS * 3 : 1];
  __shared__ u32 items_of[WARPS][ITEMS];  // that a warp has asked for: tile, first strip 16 bits up, strips 24 bits up
  __shared__ int tiles_of_warp[WARPS];
  __shared__ u32 named_experts[NAMED_AT_ONCE ? NAMED_WORDS : 1];  // one bit each

  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int block = blockIdx.x, pairs = rows * CHOICES;
  auto pair_at = [&](int tile, int place) { return pair_of[tile][place] & 0xffff; };
  auto row_at = [&](int tile, int place) {
    const int pair = pair_of[tile][place];
    return !LEAN ? pair >> 16 : pair < pairs ? pair / CHOICES : pair - pairs;
  };
  u8 *const ring = memory + warp * RING_BYTES;
  float *const partial = reinterpret_cast<float *>(memory + WARPS * RING_BYTES);
  u8 *const x_all = memory + WARPS * RING_BYTES + BUFFERS * PARTIAL_BYTES;
  // A group of warps that share units; where it is all of them, there is one. `member`: which part of x, and of a quad's K, a warp
  // has.
  const int group = warp / SHARERS, member = warp % SHARERS;
  u8 *const x_own = x_all + member * X_BYTES;
  float *const terms = TERMS_SHARED ? reinterpret_cast<float *>(x_all)
                                    : terms_global + size_t(block) * (pairs + rows) * TERM_PITCH;
  // Which pairs name an expert, one bit each; then the expert's first tile. This room is free as yet.
  u32 *const named = RESIDENT ? reinterpret_cast<u32 *>(partial) : reinterpret_cast<u32 *>(x_all);
  static_assert(EXPERTS * WORDS * 4 <= (RESIDENT ? BUFFERS * PARTIAL_BYTES : SHARERS * X_BYTES), "bits have room");
  const u32 ring_at = shared_address(ring), barriers_at = __shfl_sync(0xffffffffu, shared_address(barriers), 0);
  const u32 full = barriers_at + warp * SLOTS * 8, halves = barriers_at + (WARPS * SLOTS + (2 * GROUPS + QUADS) * BUFFERS) * 8;
  const u32 x_there = halves + 8 + warp * 8;
  auto met_at = [&](int buffer, int of) { return barriers_at + (WARPS * SLOTS + of * BUFFERS + buffer) * 8; };
  // A unit that all warps share has a barrier of its own: groups may be at different units, and a group that is a whole turn of the
  // buffers behind would look as if its sums were there.
  auto all_met_at = [&](int buffer) { return barriers_at + (WARPS * SLOTS + 2 * GROUPS * BUFFERS + buffer) * 8; };
  auto free_at = [&](int buffer, int of) { return barriers_at + (WARPS * SLOTS + (GROUPS + of) * BUFFERS + buffer) * 8; };
  u64 once;  // most weights are read by one block only
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));

  // This warp's slice of K in the first half, and this block's strips in the second.
  const int slice_number = member * GROUPS + group;
  const int slice_begin = slice_number * DEPTH / WARPS;
  const int slice = DEPTH % WARPS == 0 ? SLICE : (slice_number + 1) * DEPTH / WARPS - slice_begin;
  const int strip_begin = block * (STRIPS - 1) + min(block, FULL_BLOCKS), live = STRIPS - 1 + (block < FULL_BLOCKS);

  // The shared expert's tiles stand first. Units go round the blocks; where x does not stay, routed ones only in a row.
  const int shared_tiles = SHARED == NONE ? 0 : (rows + X_ROWS - 1) / X_ROWS;
  const int shared_all = shared_tiles * UNITS;
  const int shifted = block >= SHIFT ? block - SHIFT : block - SHIFT + GRID;
  auto round_unit = [&](int round) { return round == 0 ? block : round * GRID + shifted; };
  auto rounds_below = [&](int units) { return int(block < units) + max(0, (units - shifted + GRID - 1) / GRID - 1); };
  // Where its tiles are many, the shared expert's units are in a row too.
  auto shared_before = [&](int blocks) { return blocks * shared_all / GRID; };
  const int shared_first = shared_before(block), shared_in_row = shared_before(block + 1) - shared_first;
  // How many rounds of quads the first tile of units in a row has, of units that all warps share behind them, of quads behind those,
  // and of all.
  struct Rounds {
    int quads, singles, more, all;
  };
  auto rounds_of = [&](int first, int count) {
    const int of_first = min(count, UNITS - first % UNITS), others = count - of_first;
    Rounds made = {of_first / GROUPS, of_first % GROUPS, others / GROUPS, 0};
    made.all = made.quads + made.singles + made.more + others % GROUPS;
    return made;
  };
  [[maybe_unused]] Rounds of_shared = {}, of_routed = {};
  if (IN_ROWS) of_shared = rounds_of(shared_first, shared_in_row);
  const int shared_units = IN_ROWS ? of_shared.all : rounds_below(shared_all);
  int routed_first = 0, routed_units = 0, num_tiles = shared_tiles;
  struct Turn {
    int unit;
    bool quad;
  };
  auto turn_at = [&](int index) {
    const bool is_shared = index < shared_units;
    if (RESIDENT || (!IN_ROWS && is_shared)) return Turn{round_unit(index), false};
    if (!IN_ROWS || !is_shared) index -= shared_units;
    const int first = IN_ROWS && is_shared ? shared_first : shared_all + routed_first;
    if (!QUADS) return Turn{first + index, false};
    const Rounds rounds = IN_ROWS && is_shared ? of_shared : of_routed;
    if (index < rounds.quads) return Turn{first + index * GROUPS + group, true};
    index -= rounds.quads;
    if (index < rounds.singles) return Turn{first + rounds.quads * GROUPS + index, false};
    index -= rounds.singles;
    const int rest = first + rounds.quads * GROUPS + rounds.singles;
    if (index < rounds.more) return Turn{rest + index * GROUPS + group, true};
    return Turn{rest + rounds.more * GROUPS + index - rounds.more, false};
  };

  // What this warp reads, in order, are runs: units of the shared expert, routed units, then strips of tiles (all of an item
  // where K is one piece; else piece by piece, strip by strip). Lane i works out run i of 32; lane 0 asks for them.
  const u8 *run_source = nullptr;
  u32 run_bytes = 0;  // none: there is no such run, or it is not known yet
  auto prepare = [&](int first, bool known) {
    int number = first + lane;
    run_bytes = 0;
    // A warp without K in the first half has none of its runs.
    const int units = slice > 0 ? shared_units + routed_units : 0;
    if (number < units) {
      const Turn turn = turn_at(number);
      const u32 unit = turn.unit;
      const int begin = turn.quad ? member * GROUPS * SLICE : slice_begin, length = turn.quad ? GROUPS * SLICE : slice;
      if (number < shared_units) {
        run_bytes = run_word(length * (128 / Shared::STEP_K) * Shared::BYTES, SHARED_COPY);
        run_source = shared13 + size_t(u32(unit % UNITS * DEPTH + begin)) * u32(128 / Shared::STEP_K * Shared::BYTES);
      } else {
        run_bytes = run_word(length * (128 / Routed::STEP_K) * Routed::BYTES, CHUNK_BYTES);
        run_source = w13 + size_t(u32((expert_of[unit / UNITS] * UNITS + unit % UNITS) * DEPTH + begin)) *
                               u32(128 / Routed::STEP_K * Routed::BYTES);
      }
      return;
    }
    if (ONE_PIECE || !known) return;
    number -= units;
    if (live == 0) return;
    // Items of the shared expert come first; each has one strip.
    const int of_shared = shared_tiles * live, shared_items = of_shared > warp ? (of_shared - warp + WARPS - 1) / WARPS : 0;
    int item_number = warp, piece = 0, strip = 0;
    if (SPAN == 1 || number < shared_items * PIECES) {
      item_number += number / PIECES * WARPS, piece = number % PIECES;
    } else {
      const int rest = number - shared_items * PIECES, at = rest / PIECES, item = divide<STRIPS>(at, live);
      const int within = rest - item * live * PIECES;
      item_number += (shared_items + item) * WARPS;
      piece = divide<STRIPS>(within, live), strip = within - piece * live;
    }
    const Item item = item_of(item_number, live, shared_tiles, num_tiles);
    if (item.tile >= num_tiles) return;
    const int expert = expert_of[item.tile];
    strip += strip_begin + item.strip;
    if (SHARED != NONE && expert < 0) {
      run_bytes = run_word(SHARED_PIECE_STEPS * Shared::BYTES, SHARED_COPY);
      run_source = shared2 + size_t(u32(strip * PIECES + piece)) * u32(SHARED_PIECE_STEPS * Shared::BYTES);
    } else {
      run_bytes = run_word(PIECE_STEPS * Routed::BYTES, DOWN_COPY);
      run_source = w2 + size_t(u32((expert * STRIPS_ALL + strip) * PIECES + piece)) * u32(PIECE_STEPS * Routed::BYTES);
    }
  };
  const u8 *source = nullptr;
  int left_bytes = 0, copy_most = 0, run = 0, fetch_slot = 0, in_flight = 0, asked = 0;
  // The next item of this warp in the second half.
  auto open_item = [&]() {
    const Item item = item_of(warp + asked * WARPS, live, shared_tiles, num_tiles);
    if (item.tile >= num_tiles) return false;
    if (elected()) items_of[warp][asked % ITEMS] = item.tile | item.strip << 16 | item.strips << 24;
    ++asked;
    const int expert = uniform(expert_of[item.tile]), strip = strip_begin + item.strip;
    if (SHARED != NONE && expert < 0) {
      left_bytes = SHARED_PIECE_STEPS * Shared::BYTES, copy_most = SHARED_COPY;
      source = shared2 + size_t(u32(strip)) * u32(SHARED_PIECE_STEPS * Shared::BYTES);
    } else {
      left_bytes = PIECE_STEPS * Routed::BYTES * item.strips, copy_most = DOWN_COPY;
      source = w2 + size_t(u32(expert * STRIPS_ALL + strip)) * u32(PIECE_STEPS * Routed::BYTES);
    }
    return true;
  };
  // One more chunk into the next slot; false where nothing is left, or nothing is known yet.
  auto fetch = [&](bool known) {
    if (left_bytes == 0) {
      if (ONE_PIECE && known && run >= (slice > 0 ? shared_units + routed_units : 0)) {
        if (!open_item()) return false;
      } else {
        if (!ONE_BATCH && run > 0 && run % 32 == 0) prepare(run, known);
        const u32 word = uniform(__shfl_sync(0xffffffffu, run_bytes, u32(run) % 32));
        if (word == 0) return false;
        left_bytes = (word & 0xffff) * 16, copy_most = (word >> 16) * 16;
        source = uniform(
            reinterpret_cast<const u8 *>(__shfl_sync(0xffffffffu, reinterpret_cast<u64>(run_source), u32(run) % 32)));
        ++run;
      }
    }
    const int bytes = min(left_bytes, copy_most);
    if (elected()) {
      barrier_expect(full + fetch_slot * 8, bytes);
      copy_bulk(ring_at + fetch_slot * SLOT_BYTES, source, bytes, full + fetch_slot * 8, once);
    }
    source += bytes, left_bytes -= bytes;
    if (++fetch_slot == SLOTS) fetch_slot = 0;
    return true;
  };

  if (lane == 0) {
    for (int slot = 0; slot < SLOTS; ++slot) barrier_init(full + slot * 8, 1);
    if (RESIDENT) barrier_init(x_there, 1);
    if (warp == 0) {
      for (int i = 0; i < BUFFERS * GROUPS; ++i) {
        barrier_init(met_at(i, 0), SHARERS);
        barrier_init(free_at(i, 0), 1);
      }
      if (QUADS)
        for (int i = 0; i < BUFFERS; ++i) barrier_init(all_met_at(i), WARPS);
      barrier_init(halves, WARPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncwarp();
  if (shared_units > 0) {
    prepare(0, false);
#pragma unroll 1
    while (in_flight < SLOTS && fetch(false)) ++in_flight;
  }
  // The rest of the shared expert's weights to the L2, while nobody knows the routing.
  constexpr u32 all = u32(UNITS) * DEPTH * (128 / Shared::STEP_K) * Shared::BYTES, each = (all / GRID + 127) / 128 * 128;
  if (SHARED != NONE && all < (12u << 20) && threadIdx.x == THREADS - 32) {
    const u32 from = u32(block) * each;
    if (from < all) prefetch_bulk(shared13 + from, min(each, all - from));
    constexpr u32 strip_bytes = PIECES * SHARED_PIECE_STEPS * Shared::BYTES;
    if (live > 0) prefetch_bulk(shared2 + size_t(strip_begin) * strip_bytes, live * strip_bytes);
  }
  if (FORMAT == NVFP4)
#pragma unroll 1
    for (int i = threadIdx.x; i < EXPERTS * 3; i += THREADS) copy4(shared_address(factors_of + i), factors + i);
#pragma unroll 1
  for (int i = threadIdx.x; i < EXPERTS * WORDS; i += THREADS) named[i] = 0;
  if (NAMED_AT_ONCE && threadIdx.x < NAMED_WORDS) named_experts[threadIdx.x] = 0;
#pragma unroll 1
  for (int i = threadIdx.x; i < shared_tiles * X_ROWS; i += THREADS) pair_of[i / X_ROWS][i % X_ROWS] = pairs + i | i << 16;
  if (threadIdx.x < shared_tiles)
    expert_of[threadIdx.x] = -1, count_of[threadIdx.x] = min(X_ROWS, rows - int(threadIdx.x) * X_ROWS);
  __syncthreads();
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");

  // All that the preceding kernels wrote is asked for before any of it is used.
  int own_ids[PAIRS_EACH];
  float own_weights[PAIRS_EACH];
#pragma unroll
  for (int i = 0; i < PAIRS_EACH; ++i) {
    const int pair = threadIdx.x + i * THREADS;
    own_ids[i] = -1, own_weights[i] = 0.0f;
    if (pair < pairs) own_ids[i] = __ldcg(ids + pair), own_weights[i] = LEAN ? 0.0f : __ldcg(weights + pair);
  }
  const u64 finished = __ldcg(reinterpret_cast<unsigned long long *>(state));
  const u64 used_bytes[2] = {__ldcg(reinterpret_cast<unsigned long long *>(state) + 1),
                             __ldcg(reinterpret_cast<unsigned long long *>(state) + 2)};
  auto stage_row = [&](int slot, int row) {
    const u8 *from = x + (size_t(row) * x_stride + slice_begin * 128) * 2;
    const u32 to = shared_address(x_own) + slot * X_PITCH + group * SLICE * 256;
    for (int at = lane * 16; at < slice * 256; at += 512) copy16(to + at, from + at);
  };
  if (RESIDENT && slice > 0 && elected()) {
    const u32 bytes = slice * 256;
    barrier_expect(x_there, rows * bytes);
    const u8 *from = x + slice_begin * 256;
#pragma unroll 1
    for (int row = 0; row < rows; ++row) {
      copy_bulk(shared_address(x_own) + row * X_PITCH, from, bytes, x_there);
      from += size_t(x_stride) * 2;
    }
  }
  copies_commit();
  // What this warp computes of the first half, and its first copies.
  auto begin = [&]() {
    if (RESIDENT) {
      routed_units = rounds_below(num_tiles * UNITS) - shared_units;
    } else {
      // So many in a row that all blocks need about the same time, with what they have of the shared expert.
      const float all = float(num_tiles - shared_tiles) * UNITS;
      // Widening bounds the four-bit formats: there a unit of the shared expert, which is read ahead, costs about as one of
      // theirs in spite of its bytes.
      constexpr float by_bytes = float(128 / Shared::STEP_K * Shared::BYTES) / (128 / Routed::STEP_K * Routed::BYTES);
      constexpr float ratio = SHARED == NONE ? 0.0f : FORMAT == NVFP4 || FORMAT == INT4 ? 1.0f : by_bytes;
      const int more = shared_all % GRID, least = shared_all / GRID;  // `more` blocks have one unit of it more than `least`
      const float fair = (all + shared_all * ratio) / GRID;
      const float with_more = more == 0 ? 0.0f : fmaxf(0.0f, fair - (least + 1) * ratio);
      const float without = (all - more * with_more) / (GRID - more);
      auto boundary = [&](int b) {
        if (b == GRID) return int(all);
        // What its units of the shared expert leave of its share of all, as long as they do in every block.
        if (IN_ROWS) return int(fair < (least + 1) * ratio ? __fmul_rn(b, all / GRID) : __fmaf_rn(b, fair, -ratio * shared_before(b)));
        return int(b < more ? b * with_more : more * with_more + (b - more) * without);
      };
      routed_first = uniform(boundary(block));
      routed_units = uniform(boundary(block + 1)) - routed_first;
      if (QUADS) {
        of_routed = rounds_of(routed_first, routed_units);
        routed_units = of_routed.all;
      }
    }
    prepare(run / 32 * 32, true);
    // Slots that its units do not fill stay empty for now: what others need first comes first.
    const int own_units = slice > 0 ? shared_units + routed_units : 0;
#pragma unroll 1
    while (in_flight < SLOTS && (!ONE_PIECE || left_bytes != 0 || run < own_units || own_units == 0) && fetch(true))
      ++in_flight;
  };
  bool asked_early = false;
  if (NAMED_AT_ONCE) {
    // Tiles go by expert, so that the number of experts named below one is its tile, as long as none has more pairs than a tile
    // has rows: as long as no row chooses an expert twice. Every warp finds that out for itself (all write the same to the same
    // places), and asks for its weights; the tables of rows follow while these are under way.
    if (warp * 32 < MOST_PAIRS) {
      if (own_ids[0] >= EXPERTS) own_ids[0] = -1;
      if (own_ids[0] >= 0) atomicOr(&named_experts[own_ids[0] / 32], 1u << own_ids[0] % 32);
      if (threadIdx.x < MOST_PAIRS) id_of[threadIdx.x] = own_ids[0];
    }
    __syncthreads();
    constexpr int EACH = (MOST_PAIRS + 31) / 32;
    int id[EACH];
    bool twice = false;
#pragma unroll
    for (int i = 0; i < EACH; ++i) id[i] = lane + 32 * i < pairs ? id_of[lane + 32 * i] : -1;
    const u32 word = lane < NAMED_WORDS ? named_experts[lane] : 0;
    int below = __popc(word);
#pragma unroll
    for (int step = 1; step < NAMED_WORDS; step *= 2) {
      const int more = __shfl_up_sync(0xffffffffu, below, step);
      if (lane >= step) below += more;
    }
    const int all_named = __shfl_sync(0xffffffffu, below, NAMED_WORDS - 1);
    below -= __popc(word);
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int at = max(id[i], 0), before = __shfl_sync(0xffffffffu, below, at / 32);
      const u32 of_word = __shfl_sync(0xffffffffu, word, at / 32);
      if (id[i] >= 0) expert_of[shared_tiles + before + __popc(of_word & ((1u << at % 32) - 1))] = id[i];
    }
    if (pairs - all_named >= X_ROWS) {
#pragma unroll
      for (int i = 0; i < EACH; ++i)
#pragma unroll 1
        for (int other = lane + 32 * i - (lane + 32 * i) % CHOICES; other < lane + 32 * i; ++other)
          twice |= id[i] >= 0 && id_of[other] == id[i];
    }
    __syncwarp();
    if (!__any_sync(0xffffffffu, twice)) {
      num_tiles = shared_tiles + all_named;
      begin();
      asked_early = true;
    }
  }
#pragma unroll
  for (int i = 0; i < PAIRS_EACH; ++i) {
    const int pair = threadIdx.x + i * THREADS;
    if (own_ids[i] >= EXPERTS) own_ids[i] = -1;
    if (own_ids[i] >= 0) atomicOr(&named[own_ids[i] * WORDS + pair / 32], 1u << pair % 32);
    if (pair < pairs && !LEAN) weight_of[pair] = own_weights[i];
    if (!NAMED_AT_ONCE && pair < pairs) id_of[pair] = own_ids[i];
  }
  __syncthreads();

  // The tiles, by expert; an expert's pairs in ascending order, X_ROWS to a tile.
  int ranks[PAIRS_EACH], totals[EXPERTS_EACH], own_tiles = 0;
#pragma unroll
  for (int i = 0; i < PAIRS_EACH; ++i) {
    const int pair = threadIdx.x + i * THREADS;
    ranks[i] = 0;
    if (own_ids[i] >= 0)
#pragma unroll UNROLLED
      for (int w = 0; w < WORDS; ++w)
        if (w <= pair / 32)
          ranks[i] += __popc(named[own_ids[i] * WORDS + w] & (w < pair / 32 ? ~0u : (1u << pair % 32) - 1));
  }
#pragma unroll
  for (int i = 0; i < EXPERTS_EACH; ++i) totals[i] = 0;
  if (warp < EXPERT_WARPS) {
#pragma unroll
    for (int i = 0; i < EXPERTS_EACH; ++i) {
      const int expert = threadIdx.x * EXPERTS_EACH + i;
      if (expert < EXPERTS)
#pragma unroll UNROLLED
        for (int w = 0; w < WORDS; ++w) totals[i] += __popc(named[expert * WORDS + w]);
      own_tiles += (totals[i] + X_ROWS - 1) / X_ROWS;
    }
  }
  int tiles_before = own_tiles;
  if (warp < EXPERT_WARPS) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int below = __shfl_up_sync(0xffffffffu, tiles_before, step);
      if (lane >= step) tiles_before += below;
    }
  }
  if (lane == 31) tiles_of_warp[warp] = tiles_before;
  tiles_before -= own_tiles;
  __syncthreads();
  const int of_warp = lane < WARPS ? tiles_of_warp[lane] : 0;
  num_tiles = shared_tiles + __reduce_add_sync(0xffffffffu, of_warp);
  if (warp < EXPERT_WARPS) {
    tiles_before += __reduce_add_sync(0xffffffffu, lane < warp ? of_warp : 0);
    int tile = shared_tiles + tiles_before;
#pragma unroll
    for (int i = 0; i < EXPERTS_EACH; ++i) {
      const int expert = threadIdx.x * EXPERTS_EACH + i;
      if (totals[i] > 0) named[expert * WORDS] = tile;
      for (int left = totals[i]; left > 0; left -= X_ROWS, ++tile)
        expert_of[tile] = expert, count_of[tile] = min(left, X_ROWS);
    }
  }
  __syncthreads();

  if (!asked_early) begin();
#pragma unroll
  for (int i = 0; i < PAIRS_EACH; ++i) {
    const int pair = threadIdx.x + i * THREADS;
    if (own_ids[i] >= 0)
      pair_of[named[own_ids[i] * WORDS] + ranks[i] / X_ROWS][ranks[i] % X_ROWS] = pair | pair / CHOICES << 16;
  }
  // Launches take turns with two buffers of features; each clears what the one before it used. The first word of `state`
  // counts blocks that have finished, this one not yet among them; the others say how many bytes of a buffer were used.
  const int turn = finished / GRID & 1;
  u8 *const features = both_features + turn * FEATURE_BYTES;
  {
    u8 *const used = both_features + (turn ^ 1) * FEATURE_BYTES;
    const u64 bytes = turn ? used_bytes[0] : used_bytes[1];
#pragma unroll 1
    for (u64 at = (u64(block) * THREADS + threadIdx.x) * 16; at < bytes; at += u64(GRID) * THREADS * 16)
      *reinterpret_cast<uint4 *>(used + at) = make_uint4(MISSING, MISSING, MISSING, MISSING);
    if (block == 0 && threadIdx.x == 0) state[1 + turn] = u64(pairs + rows) * WIDTH * 2;
  }
  int slot = 0;
  u32 parity = 0;
  auto next_slot = [&]() {
    // What the lanes have read of the slot comes before what the copy writes there.
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
    fetch(true);
    if (++slot == SLOTS) slot = 0, parity ^= 1;
  };

  // First half.
  copies_wait<0>();
  __syncthreads();
  if (RESIDENT && slice > 0) barrier_wait(x_there, 0);
  int staged = -1;
  [[maybe_unused]] u32 turns = 0;  // of quads and of other units: how often each buffer has been used, modulo 2
  const int units = shared_units + routed_units;
  // Of the warps that read the same part of x, one of each group.
  auto readers_sync = [&]() {
    if (QUADS)
      asm volatile("bar.sync %0, %1;" ::"r"(1 + member), "n"(GROUPS * 32) : "memory");
    else
      __syncwarp();
  };
  auto compute = [&](int index) {
    const bool is_shared = SHARED != NONE && index < shared_units;
    const Turn turn = turn_at(index);
    const u32 unit = turn.unit;
    const int tile = unit / UNITS, count = uniform(count_of[tile]);
    auto row_of = [&](int place) { return row_at(tile, place); };
    if (!RESIDENT && tile != staged) {
      readers_sync();
#pragma unroll 1
      for (int place = 0; place < count; ++place) stage_row(place, row_of(place));
      copies_commit();
      copies_wait<0>();
      readers_sync();
      staged = tile;
    }
    const int place = g < count ? g : 0;  // columns beyond the tile's rows are computed and not read
    const u8 *x_lane = x_own + (RESIDENT ? row_of(place) : place) * X_PITCH + t * 32;
    if (!turn.quad) x_lane += group * SLICE * 256;
    const int chunk = is_shared ? SHARED_CHUNK : CHUNK;
    float4 own = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
    for (int slices = turn.quad ? GROUPS : 1; slices > 0; --slices) {
      Sums sums = {};
#pragma unroll 1
      for (int left = slice * (128 / (is_shared ? Shared::STEP_K : Routed::STEP_K)); left > 0; left -= chunk) {
        barrier_wait(full + slot * 8, parity);
        if (is_shared) {
#pragma unroll
          for (int s = 0; s < SHARED_CHUNK; ++s)
            if (SHARED_EVEN || s < left)
              multiply<SHARED_FORMAT>(sums, ring + slot * SLOT_BYTES + s * Shared::BYTES, lane, [&](int b) {
                const u8 *at = x_lane + s * Shared::STEP_K * 2 + b * 128;
                return Fragment{load16(at), load16(at + 16)};
              });
          x_lane += SHARED_CHUNK * Shared::STEP_K * 2;
        } else {
#pragma unroll
          for (int s = 0; s < CHUNK; ++s)
            if (EVEN || s < left)
              multiply<FORMAT>(sums, ring + slot * SLOT_BYTES + s * Routed::BYTES, lane, [&](int b) {
                const u8 *at = x_lane + s * Routed::STEP_K * 2 + b * 128;
                return Fragment{load16(at), load16(at + 16)};
              });
          x_lane += CHUNK * Routed::STEP_K * 2;
        }
        next_slot();
      }
      if (QUADS) {  // no sum is -0
        own.x += sums[0][0] + sums[1][0], own.y += sums[0][1] + sums[1][1];
        own.z += sums[0][2] + sums[1][2], own.w += sums[0][3] + sums[1][3];
      } else {
        own = make_float4(sums[0][0] + sums[1][0], sums[0][1] + sums[1][1], sums[0][2] + sums[1][2],
                          sums[0][3] + sums[1][3]);
      }
    }
    // The warps' sums meet in one of a few buffers; one warp after the other adds them up.
    const int buffer = index % BUFFERS;
    if (index >= BUFFERS) barrier_wait(free_at(buffer, group), (index / BUFFERS - 1) & 1);
    const bool few = COLUMN_PAIRS == 1 || count <= 2;  // all in the lanes of t = 0
    float4 *const here = reinterpret_cast<float4 *>(partial + buffer * (PARTIAL_BYTES / 4) + warp * PARTIAL_FLOATS);
    if (few ? t == 0 : t < COLUMN_PAIRS) here[few ? g : g * COLUMN_PAIRS + t] = own;
    __syncwarp();
    if (lane == 0) barrier_arrive(QUADS && !turn.quad ? all_met_at(buffer) : met_at(buffer, group));
    if (QUADS) turns ^= 1u << (turn.quad ? buffer : BUFFERS + buffer);
  };
  // Of a unit that this warp has computed, and of which the buffer is not free again.
  auto all_met = [&](int index) {
    const int buffer = index % BUFFERS;
    const bool quad = turn_at(index).quad;
    const u32 phase = QUADS ? ~turns >> (quad ? buffer : BUFFERS + buffer) & 1 : index / BUFFERS & 1;
    const bool passed = barrier_passed(QUADS && !quad ? all_met_at(buffer) : met_at(buffer, group), phase);
    return bool(__all_sync(0xffffffffu, passed));
  };
  auto add_up = [&](int index) {
    const int buffer = index % BUFFERS;
    const Turn turn = turn_at(index);
    while (!all_met(index)) {
    }
    const u32 unit = turn.unit;
    const int tile = unit / UNITS, feature = unit % UNITS * 8, count = count_of[tile];
    const bool few = COLUMN_PAIRS == 1 || count <= 2;
    float gate_factor = 1.0f, up_factor = 1.0f;
    if (FORMAT == NVFP4 && index >= shared_units) {
      gate_factor = factors_of[expert_of[tile] * 3];
      up_factor = factors_of[expert_of[tile] * 3 + 1];
    }
    const float *const here = partial + buffer * (PARTIAL_BYTES / 4);
    // Four groups of four warps, whoever adds them: of one or two rows eight lanes a group, else every lane all of its place.
    auto group_sum = [&](int number, int place_of) {
      // In quads a member's sum is there already, or its four slices are those of the groups' warps.
      const int first = !QUADS ? number * 4 : turn.quad ? group * SHARERS + number : number;
      const float4 *from = reinterpret_cast<const float4 *>(here + first * PARTIAL_FLOATS) + place_of;
      float4 sum = from[0];
      if (QUADS && turn.quad) return sum;
#pragma unroll
      for (int w = 1; w < 4; ++w) {
        const float4 one = from[w * (QUADS ? SHARERS : 1) * (PARTIAL_FLOATS / 4)];
        sum.x += one.x, sum.y += one.y, sum.z += one.z, sum.w += one.w;
      }
      return sum;
    };
    float4 total;
    if (few) {
      total = group_sum(lane / 8, lane % 8);
#pragma unroll
      for (int step = 8; step <= 16; step *= 2) {
        total.x += __shfl_xor_sync(0xffffffffu, total.x, step), total.y += __shfl_xor_sync(0xffffffffu, total.y, step);
        total.z += __shfl_xor_sync(0xffffffffu, total.z, step), total.w += __shfl_xor_sync(0xffffffffu, total.w, step);
      }
    } else {
      const int place_of = g * COLUMN_PAIRS + min(t, COLUMN_PAIRS - 1);
      const float4 a = group_sum(0, place_of), b = group_sum(1, place_of);
      const float4 c = group_sum(2, place_of), d = group_sum(3, place_of);
      total = make_float4((a.x + b.x) + (c.x + d.x), (a.y + b.y) + (c.y + d.y), (a.z + b.z) + (c.z + d.z),
                          (a.w + b.w) + (c.w + d.w));
    }
    __syncwarp();
    if (!QUADS || turn.quad ? lane == 0 : lane < GROUPS) barrier_arrive(free_at(buffer, QUADS && !turn.quad ? lane : group));
    const u32 both = to_bf16_pair(silu(total.x * gate_factor) * (total.z * up_factor),
                                  silu(total.y * gate_factor) * (total.w * up_factor));
    // Lane n writes row n's eight features at once: their presence says that they are there. In a block of 64, lanes'
    // first eight columns stand before their last eight.
    u32 part[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int from = few ? 2 * i : 8 * i + lane / 2 % 4;
      const u32 first = __shfl_sync(0xffffffffu, both, from);
      const u32 second = __shfl_sync(0xffffffffu, both, from + (few ? 1 : 4));
      part[i] = __byte_perm(first, second, lane % 2 ? 0x7632 : 0x5410);
    }
    const int column = feature / 64 * 64 + feature / 8 % 2 * 32 + feature / 16 % 4 * 8;
    if (lane < count)
      store_relaxed(features + (size_t(pair_at(tile, lane)) * WIDTH + column) * 2,
                    make_uint4(part[0], part[1], part[2], part[3]));
  };
  int pending = -1;  // a unit whose sums this warp adds up: at once where all are there, else behind the next unit
#pragma unroll 1
  for (int index = 0; index <= units; ++index) {
    if (index < units) {
      compute(index);
      if (QUADS && turn_at(index).quad ? member == index % SHARERS : warp == index % WARPS) pending = index;
    }
    if (pending >= 0 && (pending < index || all_met(pending))) {
      add_up(pending);
      pending = -1;
    }
  }

  // What a block adds up lies where its rows of x were.
  __syncwarp();
  if (lane == 0) barrier_arrive(halves);

  // Second half. A lane holds its part of its row for a piece of K, and asks for the next where it takes the last.
  auto row_of_tile = [&](int tile, int piece) {
    const int place = g < count_of[tile] ? g : 0;
    return features + (size_t(pair_at(tile, place)) * WIDTH + piece * PIECE) * 2 + t * 16;
  };
  Fragment held[PIECE / 64];
  const u8 *row = nullptr;
  auto load_row = [&](int b) { held[b] = {load_relaxed(row + b * 128), load_relaxed(row + b * 128 + 64)}; };
  // Other blocks may still be computing them.
  auto await_row = [&]() {
    auto missing = [&]() {
      bool any = false;
#pragma unroll
      for (int b = 0; b < PIECE / 64; ++b) any |= held[b].first.x == MISSING || held[b].second.x == MISSING;
      return any;
    };
    while (__any_sync(0xffffffffu, missing())) {
#pragma unroll
      for (int b = 0; b < PIECE / 64; ++b) load_row(b);
    }
  };
  auto take = [&](int b, bool reload) {
    const Fragment now = held[b];
    if (reload) load_row(b);
    return now;
  };
  bool parted = true;
  auto leave = [&](const Sums &sums, int tile, int count, int strip, float factor) {
    if (parted) {  // where x was, that other warps may have been reading
      barrier_wait(halves, 0);
      parted = false;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (2 * t + i % 2 < count)
        terms[size_t(pair_at(tile, 2 * t + i % 2)) * TERM_PITCH + strip * 16 + g + i / 2 * 8] =
            (sums[0][i] + sums[1][i]) * factor;
  };
  if (ONE_PIECE) {
    bool reloaded = false;
    for (int taken = 0; taken < asked; ++taken) {
      __syncwarp();
      const u32 item_now = items_of[warp][taken % ITEMS];
      const int first_strip = item_now >> 16 & 0xff, strips = item_now >> 24;
      const int tile = item_now & 0xffff, count = count_of[tile], expert = expert_of[tile];
      const bool is_shared = SHARED != NONE && expert < 0;
      const float factor = FORMAT == NVFP4 && !is_shared ? factors_of[expert * 3 + 2] : 1.0f;
      if (!reloaded) {
        row = row_of_tile(tile, 0);
#pragma unroll
        for (int b = 0; b < PIECE / 64; ++b) load_row(b);
      }
      await_row();
      // Where this lane's sums of the columns 2 t and 2 t + 1 go, if these are rows.
      const bool some[2] = {2 * t < count, 2 * t + 1 < count};
      float *to[2];
#pragma unroll
      for (int i = 0; i < 2; ++i)
        to[i] = terms + (some[i] ? pair_at(tile, 2 * t + i) * TERM_PITCH : 0) + first_strip * 16 + g;
      auto leave_strip = [&](const Sums &sums) {
        if (parted) {  // where x was, that other warps may have been reading
          barrier_wait(halves, 0);
          parted = false;
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (some[i]) {
            to[i][0] = (sums[0][i] + sums[1][i]) * factor;
            to[i][8] = (sums[0][i + 2] + sums[1][i + 2]) * factor;
          }
          to[i] += 16;
        }
      };
      if (is_shared) {
        Sums sums = {};
#pragma unroll
        for (int k = 0; k < SHARED_PIECE_STEPS; ++k) {
          if (k % SHARED_CHUNK == 0) barrier_wait(full + slot * 8, parity);
          multiply<SHARED_FORMAT>(sums, ring + slot * SLOT_BYTES + k % SHARED_CHUNK * Shared::BYTES, lane,
                                  [&](int b) { return take(k * (Shared::STEP_K / 64) + b, false); });
          if (k % SHARED_CHUNK == SHARED_CHUNK - 1 || k == SHARED_PIECE_STEPS - 1) next_slot();
        }
        leave_strip(sums);
        reloaded = false;
        continue;
      }
#pragma unroll 1
      for (int s = 0; s < strips; ++s) {
        const bool last = s == strips - 1;
        if (last) {
          __syncwarp();
          reloaded = taken + 1 < asked;
          if (reloaded) row = row_of_tile(items_of[warp][(taken + 1) % ITEMS] & 0xffff, 0);
        }
        const bool reload = last && reloaded;
        Sums sums = {};
#pragma unroll
        for (int c = 0; c < PIECE_STEPS / DOWN_CHUNK; ++c) {
          barrier_wait(full + slot * 8, parity);
#pragma unroll
          for (int j = 0; j < DOWN_CHUNK; ++j)
            multiply<FORMAT>(sums, ring + slot * SLOT_BYTES + j * Routed::BYTES, lane,
                             [&](int b) { return take((c * DOWN_CHUNK + j) * (Routed::STEP_K / 64) + b, reload); });
          next_slot();
        }
        leave_strip(sums);
      }
    }
  } else {
    auto item_at = [&](int number) { return item_of(number, live, shared_tiles, num_tiles); };
    auto part_at = [&](int number, int piece) { return row_of_tile(min(item_at(number).tile, num_tiles - 1), piece); };
    if (item_at(warp).tile < num_tiles) {
      row = part_at(warp, 0);
#pragma unroll
      for (int b = 0; b < PIECE / 64; ++b) load_row(b);
    }
#pragma unroll 1
    for (int number = warp;; number += WARPS) {
      const Item item = item_at(number);
      if (item.tile >= num_tiles) break;
      const int tile = item.tile, strips = item.strips, expert = expert_of[tile];
      const bool is_shared = SHARED != NONE && expert < 0;
      const float factor = FORMAT == NVFP4 && !is_shared ? factors_of[expert * 3 + 2] : 1.0f;
      Sums sums[SPAN] = {};
#pragma unroll 1
      for (int piece = 0; piece < PIECES; ++piece) {
        await_row();
        row = piece + 1 < PIECES ? part_at(number, piece + 1) : part_at(number + WARPS, 0);
        if (is_shared) {
#pragma unroll
          for (int k = 0; k < SHARED_PIECE_STEPS; ++k) {
            if (k % SHARED_CHUNK == 0) barrier_wait(full + slot * 8, parity);
            multiply<SHARED_FORMAT>(sums[0], ring + slot * SLOT_BYTES + k % SHARED_CHUNK * Shared::BYTES, lane,
                                    [&](int b) { return take(k * (Shared::STEP_K / 64) + b, true); });
            if (k % SHARED_CHUNK == SHARED_CHUNK - 1 || k == SHARED_PIECE_STEPS - 1) next_slot();
          }
        } else {
#pragma unroll
          for (int s = 0; s < SPAN; ++s)
#pragma unroll
            for (int k = 0; k < PIECE_STEPS; ++k) {
              if (s >= strips) break;
              if (k % CHUNK == 0) barrier_wait(full + slot * 8, parity);
              multiply<FORMAT>(sums[s], ring + slot * SLOT_BYTES + k % CHUNK * Routed::BYTES, lane,
                               [&](int b) { return take(k * (Routed::STEP_K / 64) + b, s == strips - 1); });
              if (k % CHUNK == CHUNK - 1 || k == PIECE_STEPS - 1) next_slot();
            }
        }
      }
#pragma unroll
      for (int s = 0; s < SPAN; ++s)
        if (s < strips) leave(sums[s], tile, count_of[tile], item.strip + s, factor);
    }
  }
  __syncthreads();

  // Each row's choices in their order, then the shared expert.
#pragma unroll 1
  for (int i = threadIdx.x; i < rows * live * (16 / COLUMNS); i += THREADS) {
    const int row = divide<STRIPS>(i / (16 / COLUMNS), live), column = (i - row * live * (16 / COLUMNS)) * COLUMNS;
    auto term_of = [&](int pair) { return *reinterpret_cast<const Columns *>(terms + size_t(pair) * TERM_PITCH + column); };
    Columns total = {};
#pragma unroll
    for (int choice = 0; choice < CHOICES; ++choice) {
      const int pair = row * CHOICES + choice;
      if (id_of[pair] < 0) continue;
      const Columns term = term_of(pair);
      const float weight = LEAN ? __ldcg(weights + pair) : weight_of[pair];
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) total.at[c] += weight * term.at[c];
    }
    if (SHARED != NONE) {
      const Columns term = term_of(pairs + row);
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) total.at[c] += term.at[c];
    }
    u32 *const to = reinterpret_cast<u32 *>(y + (size_t(row) * HIDDEN + strip_begin * 16 + column) * 2);
#pragma unroll
    for (int c = 0; c < COLUMNS; c += 2) to[c / 2] = to_bf16_pair(total.at[c], total.at[c + 1]);
  }
  if (threadIdx.x == 0) atomicAdd(reinterpret_cast<unsigned long long *>(state), 1ull);
}
