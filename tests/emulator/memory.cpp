// Loads, stores and atomic operations, each checked: inside of its memory, aligned, and in a block that still runs. Barriers in shared
// memory (mbarrier) are here too.
#include <cstdarg>
#include <cstdio>

#include "machine.h"

namespace {

enum Space : s32 { GLOBAL, SHARED, CLUSTER, LOCAL, GENERIC, PARAMETER };

template <class T> T load(const u8* at) {
  T v;
  memcpy(&v, at, sizeof(T));
  return v;
}

// Operands: space, address (-1: none), bytes of the address register, offset, bytes of an element, signed, how many, bytes of a register,
// then the registers. A register of -2 - n takes nothing.
struct Access {
  s32 space, address, address_bytes;
  s64 offset;
  s32 bytes, is_signed, count, register_bytes;
  const s32* registers;
};
Access access(const s32* o) {
  return {o[0], o[1], o[2], s64(u64(u32(o[4])) << 32 | u32(o[3])), o[5], o[6], o[7], o[8], o + 9};
}
constexpr s32 NO_OPERAND = INT32_MIN;

u64 address_of(Warp& w, const Access& a, u32 lane) {
  u64 base = 0;
  if (a.address != NO_OPERAND) base = a.address_bytes == 8 ? w.in<u64>(a.address)[lane] : w.in<u32>(a.address)[lane];
  return base + a.offset;
}
u8* place_of(Warp& w, const Access& a, u32 lane) {
  const u64 at = address_of(w, a, lane);
  const u32 bytes = a.bytes * a.count;
  switch (a.space) {
    case GLOBAL: return (at & WINDOW_MASK) == 0 ? global_at(w, at, bytes, bytes) : generic_at(w, lane, at, bytes, bytes);
    case SHARED: return shared_at(w, static_cast<u32>(at), bytes, bytes, true);
    case CLUSTER: return shared_at(w, static_cast<u32>(at), bytes, bytes, false);
    case LOCAL:
      if (at + bytes > w.block->run->program->local_bytes) fault(w, "lane %u: local address %llu is out of bounds", lane, (unsigned long long)at);
      return w.local.data() + lane * w.block->run->program->local_bytes + at;
    case PARAMETER:
      if (at + bytes > w.block->run->parameter_bytes) fault(w, "lane %u: parameter %llu is out of bounds", lane, (unsigned long long)at);
      return const_cast<u8*>(w.block->run->parameters) + at;
    default: return generic_at(w, lane, at, bytes, bytes);
  }
}
void put(Warp& w, s32 slot, u32 register_bytes, u32 lane, u64 v) {
  if (register_bytes == 4) w.in<u32>(slot)[lane] = static_cast<u32>(v);
  else if (register_bytes == 8) w.in<u64>(slot)[lane] = v;
  else w.in<u16>(slot)[lane] = static_cast<u16>(v);
}
u64 get(Warp& w, s32 slot, u32 register_bytes, u32 lane) {
  return register_bytes == 4 ? w.in<u32>(slot)[lane] : register_bytes == 8 ? w.in<u64>(slot)[lane] : w.in<u16>(slot)[lane];
}
u64 read(const u8* at, s32 bytes, bool is_signed) {
  switch (bytes) {
    case 1: return is_signed ? s64(load<s8>(at)) : load<u8>(at);
    case 2: return is_signed ? s64(load<s16>(at)) : load<u16>(at);
    case 4: return is_signed ? s64(load<s32>(at)) : load<u32>(at);
    default: return load<u64>(at);
  }
}

void load_lanes(Warp& w, const Instruction& i, u32 lanes) {
  const Access a = access(i.o);
  // Read first: the address may stand in a register that the result goes to.
  u64 made[16][32];
  each(lanes, [&](u32 l) {
    const u8* at = place_of(w, a, l);
    for (s32 k = 0; k < a.count; k++) made[k][l] = read(at + k * a.bytes, a.bytes, a.is_signed);
  });
  for (s32 k = 0; k < a.count; k++)
    if (a.registers[k] != NO_OPERAND) each(lanes, [&](u32 l) { put(w, a.registers[k], a.register_bytes, l, made[k][l]); });
}
void store_lanes(Warp& w, const Instruction& i, u32 lanes) {
  const Access a = access(i.o);
  bool changed = false;
  each(lanes, [&](u32 l) {
    u8* at = place_of(w, a, l);
    for (s32 k = 0; k < a.count; k++) {
      const u64 v = get(w, a.registers[k], a.register_bytes, l);
      changed = changed || memcmp(at + k * a.bytes, &v, a.bytes);
      memcpy(at + k * a.bytes, &v, a.bytes);
    }
  });
  w.block->run->events += changed;
}
// Others may be waited for: the warp gives way, and counts as waiting where nothing happens.
void load_and_look(Warp& w, const Instruction& i, u32 lanes) {
  load_lanes(w, i, lanes);
  w.looked = true;
}

enum Operation : s32 { ADD, MIN, MAX, AND, OR, XOR, EXCHANGE, SWAP, INCREMENT, DECREMENT, ADD_FLOAT, ADD_BF16X2, ADD_F16X2 };
u64 operate(s32 operation, s32 bytes, bool is_signed, u64 old, u64 v, u64 other) {
  switch (operation) {
    case ADD: return old + v;
    case MIN: return is_signed ? (bytes == 4 ? s32(old) < s32(v) : s64(old) < s64(v)) ? old : v : old < v ? old : v;
    case MAX: return is_signed ? (bytes == 4 ? s32(old) > s32(v) : s64(old) > s64(v)) ? old : v : old > v ? old : v;
    case AND: return old & v;
    case OR: return old | v;
    case XOR: return old ^ v;
    case EXCHANGE: return v;
    case SWAP: return old == v ? other : old;
    case INCREMENT: return old >= v ? 0 : old + 1;
    case DECREMENT: return old == 0 || old > v ? v : old - 1;
    case ADD_FLOAT: {
      float a, b;
      memcpy(&a, &old, 4), memcpy(&b, &v, 4), a += b;
      u32 r;
      memcpy(&r, &a, 4);
      return r;
    }
    default: return 0;
  }
}
// Operands as of a store, then: operation, value, other value, where the old value goes (or none). Lanes in a drawn order.
void atomic(Warp& w, const Instruction& i, u32 lanes) {
  const Access a = access(i.o);
  const s32 *rest = i.o + 9, operation = rest[0];
  Run& run = *w.block->run;
  if (operation > ADD_FLOAT) fault(w, "this atomic operation is not emulated");
  auto one = [&](u32 l) {
    u8* at = place_of(w, a, l);
    const u64 old = read(at, a.bytes, false), v = get(w, rest[1], a.register_bytes, l);
    const u64 made = operate(operation, a.bytes, a.is_signed, old, v, rest[2] == NO_OPERAND ? 0 : get(w, rest[2], a.register_bytes, l));
    run.events += memcmp(at, &made, a.bytes) != 0;
    memcpy(at, &made, a.bytes);
    if (rest[3] != NO_OPERAND) put(w, rest[3], a.register_bytes, l, old);
  };
  if (run.policy.in_order) return each(lanes, one);
  u32 order[32], count = 0;
  each(lanes, [&](u32 l) { order[count++] = l; });
  for (; count; count--) {
    const u32 k = run.random.below(count);
    one(order[k]);
    order[k] = order[count - 1];
  }
}

// ---- mbarriers. Operands: address, bytes of it, offset, then what the instruction has.
u32 barrier_address(Warp& w, const Instruction& i, u32 l) {
  const u64 base = i.o[0] == NO_OPERAND ? 0 : i.o[1] == 8 ? w.in<u64>(i.o[0])[l] : w.in<u32>(i.o[0])[l];
  return static_cast<u32>(base) + i.o[2];
}
void barrier_init(Warp& w, const Instruction& i, u32 lanes) {
  each(lanes, [&](u32 l) {
    Block& block = *w.block;
    const u32 count = w.in<u32>(i.o[3])[l], number = block.mbarriers.size();
    u8* at = shared_at(w, barrier_address(w, i, l), 8, 8, true);
    if (!count || count >= 1u << 20) fault(w, "lane %u: an mbarrier of %u arrivals", l, count);
    u32 mark, old;
    memcpy(&mark, at, 4), memcpy(&old, at + 4, 4);
    if (mark == MBARRIER_MARK && old < number && block.mbarriers[old].valid) fault(w, "lane %u: this mbarrier is in use: mbarrier.inval comes first", l);
    block.mbarriers.push_back({count, count, 0, 0, true});
    memcpy(at, &MBARRIER_MARK, 4), memcpy(at + 4, &number, 4);
    block.run->events++;
  });
}
void barrier_inval(Warp& w, const Instruction& i, u32 lanes) {
  each(lanes, [&](u32 l) {
    mbarrier_at(w, barrier_address(w, i, l), true).valid = false;
    memset(shared_at(w, barrier_address(w, i, l), 8, 8, true), POISON, 8);
  });
}
// + count (or none), bytes to expect (or none), own block only, where the state goes (or none)
void barrier_arrive(Warp& w, const Instruction& i, u32 lanes) {
  each(lanes, [&](u32 l) {
    Mbarrier& barrier = mbarrier_at(w, barrier_address(w, i, l), i.o[5]);
    if (i.o[6] != NO_OPERAND) w.in<u64>(i.o[6])[l] = barrier.phase;
    if (i.o[4] != NO_OPERAND) barrier.bytes += w.in<u32>(i.o[4])[l];
    mbarrier_arrive(w, barrier, i.o[3] == NO_OPERAND ? 1 : w.in<u32>(i.o[3])[l]);
  });
}
void barrier_expect(Warp& w, const Instruction& i, u32 lanes) {
  each(lanes, [&](u32 l) {
    mbarrier_at(w, barrier_address(w, i, l), i.o[5]).bytes += w.in<u32>(i.o[4])[l];
    w.block->run->events++;
  });
}
// + predicate, parity
void barrier_test(Warp& w, const Instruction& i, u32 lanes) {
  u32 passed = 0;
  each(lanes, [&](u32 l) {
    const u32 parity = w.in<u32>(i.o[4])[l];
    if (parity > 1) fault(w, "lane %u: a parity of %u", l, parity);
    if ((mbarrier_at(w, barrier_address(w, i, l), true).phase & 1) != parity) passed |= 1u << l;
  });
  w.set_predicate(i.o[3], lanes, passed);
  if ((passed & lanes) != lanes) w.looked = true;
}
void barrier_test_state(Warp& w, const Instruction& i, u32 lanes) {
  u32 passed = 0;
  each(lanes, [&](u32 l) {
    if (mbarrier_at(w, barrier_address(w, i, l), true).phase != static_cast<u32>(w.in<u64>(i.o[4])[l])) passed |= 1u << l;
  });
  w.set_predicate(i.o[3], lanes, passed);
  if ((passed & lanes) != lanes) w.looked = true;
}

}  // namespace

u32 Warp::threads() const { return block->run->block_size[0] * block->run->block_size[1] * block->run->block_size[2]; }

Block* block_of(const Warp& w, u32 address) {
  const u32 rank = address >> RANK_SHIFT;
  Cluster& cluster = *w.block->cluster;
  if (rank >= cluster.blocks.size()) fault(w, "shared address 0x%x: block %u of a cluster of %zu", address, rank, cluster.blocks.size());
  return cluster.blocks[rank];
}
u8* shared_of(const Warp& w, Block* block, u32 offset, u32 bytes, u32 align) {
  if (block->exited) fault(w, "shared memory of block %u of the cluster, which has exited", block->rank);
  if (offset < SHARED_START || offset - SHARED_START + bytes > block->shared.size())
    fault(w, "shared memory out of bounds: %u bytes at %d of %zu", bytes, static_cast<s32>(offset - SHARED_START), block->shared.size());
  if (offset % align) fault(w, "misaligned: %u bytes of shared memory at %u", align, offset - SHARED_START);
  return block->shared.data() + (offset - SHARED_START);
}
u8* shared_at(const Warp& w, u32 address, u32 bytes, u32 align, bool own) {
  Block* block = block_of(w, address);
  if (own && block != w.block) fault(w, "shared address 0x%x is of another block: it needs .shared::cluster", address);
  return shared_of(w, block, address & OFFSET_MASK, bytes, align);
}
u8* global_at(const Warp& w, u64 address, u32 bytes, u32 align) {
  Run& run = *w.block->run;
  if (address < run.last.begin || address + bytes > run.last.end) {
    bool found = false;
    for (const Range& range : run.ranges)
      if (address >= range.begin && address + bytes <= range.end) {
        run.last = range, found = true;
        break;
      }
    if (!found) fault(w, "global memory out of bounds: %u bytes at 0x%llx lie in no argument", bytes, (unsigned long long)address);
  }
  if (address % align) fault(w, "misaligned: %u bytes of global memory at 0x%llx", align, (unsigned long long)address);
  return reinterpret_cast<u8*>(address);
}
u8* generic_at(Warp& w, u32 lane, u64 address, u32 bytes, u32 align) {
  if ((address & WINDOW_MASK) == SHARED_WINDOW) return shared_at(w, static_cast<u32>(address), bytes, align, false);
  if ((address & WINDOW_MASK) == LOCAL_WINDOW) {
    const u32 size = w.block->run->program->local_bytes, at = static_cast<u32>(address);
    if (at + bytes > size) fault(w, "lane %u: local address %u is out of bounds", lane, at);
    return w.local.data() + lane * size + at;
  }
  return global_at(w, address, bytes, align);
}
Mbarrier& mbarrier_at(const Warp& w, u32 address, bool own) {
  const u8* at = shared_at(w, address, 8, 8, own);
  u32 mark, number;
  memcpy(&mark, at, 4), memcpy(&number, at + 4, 4);
  Block* block = block_of(w, address);
  if (mark != MBARRIER_MARK || number >= block->mbarriers.size() || !block->mbarriers[number].valid)
    fault(w, "no mbarrier at %u of block %u: never made, or written over", (address & OFFSET_MASK) - SHARED_START, block->rank);
  return block->mbarriers[number];
}
void mbarrier_settle(const Warp& w, Mbarrier& barrier) {
  w.block->run->events++;
  if (!barrier.pending && !barrier.bytes) barrier.phase++, barrier.pending = barrier.count;
}
void mbarrier_arrive(const Warp& w, Mbarrier& barrier, u32 count) {
  if (count > barrier.pending) fault(w, "an mbarrier of %u arrivals gets more in one phase", barrier.count);
  barrier.pending -= count;
  mbarrier_settle(w, barrier);
}
void mbarrier_complete(const Warp& w, u32 address, u32 bytes) {
  Mbarrier& barrier = mbarrier_at(w, address, false);
  barrier.bytes -= bytes;
  mbarrier_settle(w, barrier);
}

void define_memory() {
  define("ld", "", load_lanes), define("st", "", store_lanes), define("ld.look", "", load_and_look, LOOK), define("atom", "", atomic);
  define("mbarrier.init", "", barrier_init), define("mbarrier.inval", "", barrier_inval), define("mbarrier.arrive", "", barrier_arrive);
  define("mbarrier.expect_tx", "", barrier_expect);
  define("mbarrier.test.parity", "", barrier_test, LOOK), define("mbarrier.test.state", "", barrier_test_state, LOOK);
  // Addresses: a block's own shared memory has the block's rank in its upper bits.
  define("address.shared.8", "8:i", [](Warp& w, const Instruction& i, u32 lanes) {
    each(lanes, [&](u32 l) { w.in<u64>(i.o[0])[l] = (w.block->rank << RANK_SHIFT) + SHARED_START + i.o[1]; });
  });
  define("address.shared.4", "4:i", [](Warp& w, const Instruction& i, u32 lanes) {
    each(lanes, [&](u32 l) { w.in<u32>(i.o[0])[l] = (w.block->rank << RANK_SHIFT) + SHARED_START + i.o[1]; });
  });
  define("address.parameter", "8:i", [](Warp& w, const Instruction& i, u32 lanes) {
    each(lanes, [&](u32 l) { w.in<u64>(i.o[0])[l] = reinterpret_cast<u64>(w.block->run->parameters) + i.o[1]; });
  });
  define("address.global", "8:i", [](Warp& w, const Instruction& i, u32 lanes) {
    each(lanes, [&](u32 l) { w.in<u64>(i.o[0])[l] = reinterpret_cast<u64>(w.block->run->globals.data()) + i.o[1]; });
  });
  define("cvta.shared", "8:8", [](Warp& w, const Instruction& i, u32 lanes) {
    each(lanes, [&](u32 l) { w.in<u64>(i.o[0])[l] = SHARED_WINDOW | static_cast<u32>(w.in<u64>(i.o[1])[l]); });
  });
  define("cvta.local", "8:8", [](Warp& w, const Instruction& i, u32 lanes) {
    each(lanes, [&](u32 l) { w.in<u64>(i.o[0])[l] = LOCAL_WINDOW | static_cast<u32>(w.in<u64>(i.o[1])[l]); });
  });
  define("cvta.to.window", "8:8", [](Warp& w, const Instruction& i, u32 lanes) {
    each(lanes, [&](u32 l) { w.in<u64>(i.o[0])[l] = static_cast<u32>(w.in<u64>(i.o[1])[l]); });
  });
  define("mapa.4", "4:44", [](Warp& w, const Instruction& i, u32 lanes) {
    // A block that is not there is found when its memory is used: the compiler makes addresses ahead of a branch.
    each(lanes, [&](u32 l) { w.in<u32>(i.o[0])[l] = w.in<u32>(i.o[2])[l] << RANK_SHIFT | (w.in<u32>(i.o[1])[l] & OFFSET_MASK); });
  });
}
