// Copies and stores that land later than they are issued: they read their source and write their target when they land, which is at a
// drawn time, and at the latest when somebody waits for them.
#include <algorithm>

#include "machine.h"

namespace {

constexpr s32 NO_OPERAND = INT32_MIN;

u64 value(Warp& w, s32 o, s32 bytes, u32 l) { return bytes == 8 ? w.in<u64>(o)[l] : w.in<u32>(o)[l]; }

Pending* issue(Warp& w, const Instruction& i, Pending::What what, u32 lanes) {
  Run& run = *w.block->run;
  Pending* p = new Pending;
  p->what = what, p->warp = &w, p->issued = &i, p->lanes = lanes;
  p->at = run.pending.size();
  run.pending.push_back(p);
  w.block->under_way++;
  run.events++;
  return p;
}
void issued(Warp& w, Pending* p) {
  Run& run = *w.block->run;
  if (run.policy.land >= 65536) land(run, p);
}

// Operands of all: target, its bytes, its offset; source, its bytes, its offset; then what the instruction has.
u64 target(Warp& w, const Instruction& i, u32 l) { return value(w, i.o[0], i.o[1], l) + i.o[2]; }
u64 source(Warp& w, const Instruction& i, u32 l) { return value(w, i.o[3], i.o[4], l) + i.o[5]; }

// + bytes, bytes of the source (or none), ignore the source (a predicate, or none)
void copy(Warp& w, const Instruction& i, u32 lanes) {
  Pending* p = issue(w, i, Pending::COPY, lanes);
  p->bytes = i.o[6];
  each(lanes, [&](u32 l) {
    p->target[l] = static_cast<u32>(target(w, i, l)), p->source[l] = source(w, i, l);
    u32 taken = i.o[7] == NO_OPERAND ? p->bytes : w.in<u32>(i.o[7])[l];
    if (i.o[8] != NO_OPERAND && w.predicate(i.o[8]) >> l & 1) taken = 0;
    if (taken > p->bytes) fault(w, "lane %u: cp.async of %u bytes from a source of %u", l, p->bytes, taken);
    p->barrier[l] = taken, p->group[l] = w.committed[l];
    shared_at(w, p->target[l], p->bytes, p->bytes, true);
    if (taken) global_at(w, p->source[l], taken, p->bytes);
  });
  w.copies.push_back(p);
  issued(w, p);
}
void commit(Warp& w, const Instruction&, u32 lanes) {
  each(lanes, [&](u32 l) { w.committed[l]++; });
}
void land_groups(Warp& w, std::vector<Pending*>& held, u32 lanes, const u32* committed, u32 leave, bool everything) {
  for (size_t k = 0; k < held.size();) {
    Pending* p = held[k];
    bool due = false;
    each(p->lanes & lanes, [&](u32 l) { due = due || everything || p->group[l] + leave < committed[l]; });
    if (due) land(*w.block->run, p);
    else k++;
  }
}
void wait_group(Warp& w, const Instruction& i, u32 lanes) { land_groups(w, w.copies, lanes, w.committed, i.o[0], false); }
void wait_all(Warp& w, const Instruction&, u32 lanes) { land_groups(w, w.copies, lanes, w.committed, 0, true); }
// Target: the mbarrier. Arrives when all that the lane has issued before is there.
void arrive_after(Warp& w, const Instruction& i, u32 lanes) {
  Pending* p = issue(w, i, Pending::ARRIVE, lanes);
  each(lanes, [&](u32 l) {
    p->barrier[l] = static_cast<u32>(target(w, i, l));
    Mbarrier& barrier = mbarrier_at(w, p->barrier[l], true);
    if (!i.o[6]) barrier.pending++;  // without .noinc
  });
  issued(w, p);
}

// A copy to several blocks of the cluster lands in each at a time of its own, at the same place, and tells the mbarrier there.
template <class Each> void for_targets(Warp& w, u32 l, s32 blocks, u32 target, u32 barrier, Each each_target) {
  if (blocks == NO_OPERAND) return each_target(target, barrier);
  const u32 mask = w.in<u16>(blocks)[l];
  for (u32 rank = 0; rank < 16; rank++)
    if (mask >> rank & 1) each_target(rank << RANK_SHIFT | (target & OFFSET_MASK), rank << RANK_SHIFT | (barrier & OFFSET_MASK));
}
// + bytes, mbarrier, its offset, whether the source is shared memory, blocks (or none)
void bulk(Warp& w, const Instruction& i, u32 lanes) {
  each(lanes, [&](u32 l) {
    const u32 bytes = w.in<u32>(i.o[6])[l];
    const u64 from = source(w, i, l);
    if (bytes % 16 || !bytes) fault(w, "lane %u: a bulk copy of %u bytes: whole 16 bytes", l, bytes);
    if (i.o[9]) shared_at(w, static_cast<u32>(from), bytes, 16, true);
    else global_at(w, from, bytes, 16);
    for_targets(w, l, i.o[10], static_cast<u32>(target(w, i, l)), w.in<u32>(i.o[7])[l] + i.o[8], [&](u32 to, u32 barrier) {
      shared_at(w, to, bytes, 16, false), mbarrier_at(w, barrier, false);
      if (block_of(w, barrier) != block_of(w, to)) fault(w, "lane %u: a bulk copy and its mbarrier in different blocks", l);
      Pending* p = issue(w, i, Pending::BULK, 1u << l);
      p->bytes = bytes, p->target[l] = to, p->source[l] = from, p->barrier[l] = barrier, p->group[l] = i.o[9];
      issued(w, p);
    });
  });
}
// + mbarrier, its offset, blocks (or none), how many coordinates, coordinates. The source is the tensor map.
void tensor(Warp& w, const Instruction& i, u32 lanes) {
  each(lanes, [&](u32 l) {
    const u64 from = source(w, i, l), first = reinterpret_cast<u64>(w.block->run->parameters);
    if (from < first || from + 128 > first + w.block->run->parameter_bytes) fault(w, "lane %u: no parameter is this tensor map", l);
    TensorMap map;
    memcpy(&map, reinterpret_cast<const void*>(from), sizeof map);
    if (map.mark != TENSOR_MAP_MARK) fault(w, "lane %u: this parameter is no tensor map", l);
    if (map.dimensions != i.o[9]) fault(w, "lane %u: %d coordinates for a tensor of %u dimensions", l, i.o[9], map.dimensions);
    for_targets(w, l, i.o[8], static_cast<u32>(target(w, i, l)), w.in<u32>(i.o[6])[l] + i.o[7], [&](u32 to, u32 barrier) {
      Pending* p = issue(w, i, Pending::TENSOR, 1u << l);
      p->target[l] = to, p->source[l] = from, p->barrier[l] = barrier, p->bytes = map.element_bytes;
      for (s32 k = 0; k < i.o[9]; k++) p->coordinates[k] = w.in<s32>(i.o[10 + k])[l], p->bytes *= map.box[k];
      shared_at(w, to, p->bytes, map.swizzle ? map.swizzle * 8 : 128, false), mbarrier_at(w, barrier, false);
      issued(w, p);
    });
  });
}
// Source: the mbarrier. + bytes of an element, how many, bytes of a register, registers
void store(Warp& w, const Instruction& i, u32 lanes) {
  Pending* p = issue(w, i, Pending::STORE, lanes);
  p->bytes = i.o[6] * i.o[7];
  each(lanes, [&](u32 l) {
    p->target[l] = static_cast<u32>(target(w, i, l)), p->barrier[l] = static_cast<u32>(source(w, i, l));
    for (s32 k = 0; k < i.o[7]; k++) {
      const u64 v = value(w, i.o[9 + k], i.o[8], l);
      memcpy(p->value[l] + k * i.o[6], &v, i.o[6]);
    }
    shared_at(w, p->target[l], p->bytes, p->bytes, false), mbarrier_at(w, p->barrier[l], false);
    if (block_of(w, p->barrier[l]) != block_of(w, p->target[l])) fault(w, "lane %u: st.async and its mbarrier in different blocks", l);
  });
  issued(w, p);
}
// From shared to global memory. + bytes
void write_back(Warp& w, const Instruction& i, u32 lanes) {
  each(lanes, [&](u32 l) {
    Pending* p = issue(w, i, Pending::WRITE_BACK, 1u << l);
    p->bytes = w.in<u32>(i.o[6])[l], p->source[l] = target(w, i, l), p->target[l] = static_cast<u32>(source(w, i, l));
    p->group[l] = w.bulk_committed[l];
    if (p->bytes % 16 || !p->bytes) fault(w, "lane %u: a bulk copy of %u bytes: whole 16 bytes", l, p->bytes);
    shared_at(w, p->target[l], p->bytes, 16, true), global_at(w, p->source[l], p->bytes, 16);
    w.write_backs.push_back(p);
    issued(w, p);
  });
}
void bulk_commit(Warp& w, const Instruction&, u32 lanes) {
  each(lanes, [&](u32 l) { w.bulk_committed[l]++; });
}
void bulk_wait(Warp& w, const Instruction& i, u32 lanes) { land_groups(w, w.write_backs, lanes, w.bulk_committed, i.o[0], false); }

u64 swizzled(u64 address, u32 swizzle) {
  return swizzle == 128 ? address ^ (address >> 7 & 7) << 4 : swizzle == 64 ? address ^ (address >> 7 & 3) << 4 : swizzle == 32 ? address ^ (address >> 7 & 1) << 4 : address;
}
void land_box(Warp& w, Pending* p, u32 l) {
  TensorMap map;
  memcpy(&map, reinterpret_cast<const void*>(p->source[l]), sizeof map);
  Block* block = block_of(w, p->target[l]);
  const u32 elements = p->bytes / map.element_bytes, start = p->target[l] & OFFSET_MASK;
  shared_of(w, block, start, p->bytes, 1);
  for (u32 e = 0; e < elements; e++) {
    u64 at = map.base;
    bool inside = true;
    for (u32 k = 0, rest = e; k < map.dimensions; k++) {
      const s64 where = s64(p->coordinates[k]) + rest % map.box[k];
      rest /= map.box[k];
      inside = inside && where >= 0 && static_cast<u64>(where) < map.sizes[k];
      at += where * map.strides[k];
    }
    const u32 to = swizzled(start + e * map.element_bytes, map.swizzle) - SHARED_START;
    if (inside) memcpy(block->shared.data() + to, global_at(w, at, map.element_bytes, map.element_bytes), map.element_bytes);
    else memset(block->shared.data() + to, 0, map.element_bytes);
  }
}
void land_lane(Warp& w, Pending* p, u32 l) {
  switch (p->what) {
    case Pending::COPY: {
      if (w.block->exited) return;
      u8* to = shared_at(w, p->target[l], p->bytes, p->bytes, true);
      const u32 taken = p->barrier[l];
      if (taken) memcpy(to, reinterpret_cast<const u8*>(p->source[l]), taken);
      memset(to + taken, 0, p->bytes - taken);
      return;
    }
    case Pending::BULK:
      memcpy(shared_at(w, p->target[l], p->bytes, 16, false),
             p->group[l] ? shared_at(w, static_cast<u32>(p->source[l]), p->bytes, 16, true) : reinterpret_cast<const u8*>(p->source[l]), p->bytes);
      return mbarrier_complete(w, p->barrier[l], p->bytes);
    case Pending::TENSOR:
      land_box(w, p, l);
      return mbarrier_complete(w, p->barrier[l], p->bytes);
    case Pending::STORE:
      memcpy(shared_at(w, p->target[l], p->bytes, p->bytes, false), p->value[l], p->bytes);
      return mbarrier_complete(w, p->barrier[l], p->bytes);
    case Pending::ARRIVE: return mbarrier_arrive(w, mbarrier_at(w, p->barrier[l], true), 1);
    case Pending::WRITE_BACK:
      memcpy(reinterpret_cast<u8*>(p->source[l]), shared_at(w, p->target[l], p->bytes, 16, true), p->bytes);
      return;
  }
}
void land_lanes(Run& run, Pending* p, u32 lanes) {
  Warp& w = *p->warp;
  if (p->what == Pending::ARRIVE) land_groups(w, w.copies, lanes, w.committed, 0, true);  // what was copied before is there before
  const Instruction* now = w.now;
  w.now = p->issued;
  each(lanes, [&](u32 l) { land_lane(w, p, l); });
  w.now = now;
  run.events++;
}

}  // namespace

void land(Run& run, Pending* p) {
  run.pending[p->at] = run.pending.back();
  run.pending[p->at]->at = p->at;
  run.pending.pop_back();
  Warp& w = *p->warp;
  for (std::vector<Pending*>* held : {&w.copies, &w.write_backs}) {
    auto found = std::find(held->begin(), held->end(), p);
    if (found != held->end()) held->erase(found);
  }
  w.block->under_way--;
  land_lanes(run, p, p->lanes);
  delete p;
}
void land_some(Run& run, u32 which) {
  Pending* p = run.pending[which];
  const u32 some = p->lanes & run.random.next() & run.random.next();
  if (p->what != Pending::STORE || run.policy.in_order || run.random.chance(32768) || !some || some == p->lanes) return land(run, p);
  land_lanes(run, p, some);
  p->lanes &= ~some;
}

void define_copies() {
  define("cp.async", "", copy), define("cp.async.commit_group", "", commit), define("cp.async.wait_group", "i", wait_group);
  define("cp.async.wait_all", "", wait_all), define("cp.async.mbarrier.arrive", "", arrive_after);
  define("cp.async.bulk", "", bulk), define("cp.async.bulk.tensor", "", tensor), define("st.async", "", store);
  define("cp.async.bulk.store", "", write_back), define("cp.async.bulk.commit_group", "", bulk_commit);
  define("cp.async.bulk.wait_group", "i", bulk_wait);
}
