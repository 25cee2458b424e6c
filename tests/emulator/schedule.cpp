// Who runs when. A turn is one warp's, for a drawn number of instructions; within a warp the lanes at the lowest place go first, so that
// they meet again, but for turns where a drawn group goes, and now and then a group is cut in two. What is under way lands in between.
// In order (seed 0): nothing is drawn, and copies land at once.
#include <cstdarg>
#include <cstdio>

#include "machine.h"

namespace {

constexpr s32 NO_OPERAND = INT32_MIN;
enum Outcome { DONE, WAITS, LOOKED, STOPPED };

void requeue(Warp& w) {
  if (!w.queued) w.queued = true, w.block->run->ready.push_back(&w);
}

// ---- blocks
void start_cluster(Run& run) {
  const Program& program = *run.program;
  Cluster* cluster = new Cluster;
  const u32* c = run.cluster_size;
  const u32 size = c[0] * c[1] * c[2], number = run.next_cluster++;
  const u32 across[2] = {run.grid[0] / c[0], run.grid[1] / c[1]};
  const u32 at[3] = {number % across[0], number / across[0] % across[1], number / across[0] / across[1]};
  const u32 threads = run.block_size[0] * run.block_size[1] * run.block_size[2], warps = (threads + 31) / 32;
  run.active.push_back(cluster);
  run.events++;
  cluster->live_blocks = size, cluster->live_lanes = size * threads;
  for (u32 rank = 0; rank < size; rank++) {
    Block* b = new Block;
    cluster->blocks.push_back(b);
    b->run = &run, b->cluster = cluster, b->rank = rank, b->live_warps = warps;
    const u32 in[3] = {rank % c[0], rank / c[0] % c[1], rank / c[0] / c[1]};
    b->x = at[0] * c[0] + in[0], b->y = at[1] * c[1] + in[1], b->z = at[2] * c[2] + in[2];
    b->shared.assign(program.shared_bytes + run.dynamic_shared, POISON);
    b->registers.assign(static_cast<size_t>(warps) * program.register_bytes + 64, POISON);
    b->predicates.assign(warps * program.predicates, 0xA5A5A5A5u);
    b->warps.resize(warps);
    u8* first = reinterpret_cast<u8*>((reinterpret_cast<u64>(b->registers.data()) + 63) & ~63ull);
    for (u32 n = 0; n < warps; n++) {
      Warp& w = b->warps[n];
      w.registers = first + static_cast<size_t>(n) * program.register_bytes, w.predicates = b->predicates.data() + n * program.predicates;
      w.constants = program.constants.data(), w.block = b, w.id = n, w.now = nullptr;
      w.live = threads - n * 32 >= 32 ? ALL : (1u << (threads - n * 32)) - 1;
      w.blocked = w.parked = w.cluster_arrived = w.products_committed = 0, w.queued = w.looked = false, w.looks_since = ~0ull, w.looks = 0;
      w.predicates[0] = 0;  // of instructions that have `false` where a predicate stands
      for (u32 l = 0; l < 32; l++) w.pc[l] = program.entry, w.committed[l] = w.bulk_committed[l] = w.cluster_phase[l] = 0;
      w.local.assign(static_cast<size_t>(32) * program.local_bytes, POISON);
      for (size_t k = 0; k < program.specials.size(); k += 2)
        for (u32 l = 0; l < 32; l++) {
          const u32 t = n * 32 + l, *s = run.block_size;
          const u32 values[] = {t % s[0], t / s[0] % s[1], t / s[0] / s[1], s[0], s[1], s[2], b->x, b->y, b->z,
                                run.grid[0], run.grid[1], run.grid[2], l, n, rank, size, at[0], at[1], at[2],
                                run.grid[0] / c[0], run.grid[1] / c[1], run.grid[2] / c[2], in[0], in[1], in[2], c[0], c[1], c[2],
                                1u << l, (1u << l) - 1, (2u << l) - 1, ~((2u << l) - 1), ~((1u << l) - 1), number * size + rank, warps,
                                run.dynamic_shared, static_cast<u32>(b->shared.size())};
          w.in<u32>(program.specials[k + 1])[l] = values[program.specials[k]];
        }
      requeue(w);
    }
  }
}

void finish_cluster(Run& run, Cluster* cluster) {
  for (size_t k = 0; k < run.active.size(); k++)
    if (run.active[k] == cluster) {
      run.active[k] = run.active.back(), run.active.pop_back();
      break;
    }
  for (Block* b : cluster->blocks) delete b;
  delete cluster;
}

// ---- barriers
u32 live_warps_as_threads(const Block& b) { return b.live_warps * 32; }
void settle(Block& b, Barrier& barrier) {
  const u32 expected = barrier.counted ? barrier.expected : live_warps_as_threads(b);
  if (!barrier.arrived || barrier.arrived < expected) return;
  std::vector<std::pair<Warp*, u32>> waiting;
  waiting.swap(barrier.waiting);
  const Barrier was = barrier;
  barrier = Barrier();
  b.run->events++;
  for (auto [w, lanes] : waiting) {
    const Instruction& i = b.run->program->code[w->pc[__builtin_ctz(lanes)]];
    if (i.o[3] == 2) each(lanes, [&, w = w](u32 l) { w->in<u32>(i.o[4])[l] = was.popc; });
    if (i.o[3] > 2) w->set_predicate(i.o[4], lanes, (i.o[3] == 3 ? was.all : was.any) ? ALL : 0);
    release(*w, lanes, true);
  }
}
// o: aligned, barrier, threads (or none), mode (0 sync, 1 arrive, 2 popc, 3 and, 4 or), result, predicate
void arrive_at_barrier(Warp& w, const Instruction& i, u32 lanes) {
  const u32 first = __builtin_ctz(lanes), number = w.in<u32>(i.o[1])[first];
  if (number > 15) fault(w, "barrier %u: there are 16", number);
  Barrier& barrier = w.block->barriers[number];
  if (i.o[2] != NO_OPERAND) {
    const u32 threads = w.in<u32>(i.o[2])[first];
    if (threads % 32 || !threads) fault(w, "barrier %u for %u threads: whole warps", number, threads);
    if (barrier.arrived && barrier.counted && barrier.expected != threads)
      fault(w, "barrier %u: for %u threads here, for %u elsewhere", number, threads, barrier.expected);
    barrier.counted = true, barrier.expected = threads;
  }
  barrier.arrived += i.o[0] ? 32 : __builtin_popcount(lanes);
  if (barrier.counted && barrier.arrived > barrier.expected) fault(w, "barrier %u for %u threads: more arrive", number, barrier.expected);
  if (i.o[3] > 1) {
    const u32 votes = w.predicate(i.o[5]) & lanes;
    barrier.popc += __builtin_popcount(votes), barrier.any |= votes != 0, barrier.all &= votes == lanes;
  }
  w.block->run->events++;
  if (i.o[3] != 1) {
    w.blocked |= lanes;
    barrier.waiting.emplace_back(&w, lanes);
  }
  settle(*w.block, barrier);
}

void settle_cluster(Run& run, Cluster& cluster) {
  if (!cluster.arrived || cluster.arrived != cluster.live_lanes + cluster.arrived_exited) return;
  cluster.arrived = cluster.arrived_exited = 0, cluster.phase++;
  run.events++;
  std::vector<std::pair<Warp*, u32>> waiting;
  waiting.swap(cluster.waiting);
  for (auto [w, lanes] : waiting) {
    w->cluster_arrived &= ~lanes;
    release(*w, lanes, true);
  }
}
void arrive_at_cluster(Warp& w, const Instruction&, u32 lanes) {
  Cluster& cluster = *w.block->cluster;
  if (w.cluster_arrived & lanes) fault(w, "barrier.cluster.arrive a second time without a wait");
  w.cluster_arrived |= lanes;
  each(lanes, [&](u32 l) { w.cluster_phase[l] = cluster.phase; });
  cluster.arrived += __builtin_popcount(lanes);
  w.block->run->events++;
  settle_cluster(*w.block->run, cluster);
}
void wait_for_cluster(Warp& w, const Instruction&, u32 lanes) {
  Cluster& cluster = *w.block->cluster;
  if (lanes & ~w.cluster_arrived) fault(w, "barrier.cluster.wait without an arrival");
  u32 waits = 0;
  each(lanes, [&](u32 l) { waits |= u32(w.cluster_phase[l] == cluster.phase) << l; });
  w.cluster_arrived &= ~(lanes & ~waits);
  if (waits) w.blocked |= waits, cluster.waiting.emplace_back(&w, waits);
}

void exit_lanes(Warp& w, u32 lanes) {
  Block& b = *w.block;
  Run& run = *b.run;
  Cluster& cluster = *b.cluster;
  w.live &= ~lanes;
  run.events++;
  const u32 count = __builtin_popcount(lanes);
  u32 in_phase = 0;
  each(lanes & w.cluster_arrived, [&](u32 l) { in_phase += w.cluster_phase[l] == cluster.phase; });
  cluster.live_lanes -= count, cluster.arrived_exited += in_phase;
  if (!w.live) {
    finish_products(w, 0);
    if (!--b.live_warps) b.exited = true, cluster.live_blocks--;
    for (Barrier& barrier : b.barriers) settle(b, barrier);
  }
  settle_cluster(run, cluster);
}

// ---- a warp's turn
struct Turn {
  Warp& w;
  Run& run;
  const Instruction* code;
  s32 pc;
  u32 lanes;

  u32 others() const { return w.live & ~w.blocked & ~w.parked & ~lanes; }
  void leave(u32 some) {
    each(some, [&](u32 l) { w.pc[l] = pc; });
  }
  // A group of those that can run: at the lowest place, or a drawn one.
  bool choose(u32 among, bool any = false) {
    if (!among) return false;
    s32 at = INT32_MAX;
    if (any || (!run.policy.in_order && run.random.chance(run.policy.explore))) {
      u32 skip = run.random.below(__builtin_popcount(among)), rest = among;
      while (skip--) rest &= rest - 1;
      at = w.pc[__builtin_ctz(rest)];
    } else {
      each(among, [&](u32 l) { at = w.pc[l] < at ? w.pc[l] : at; });
    }
    pc = at, lanes = 0;
    each(among, [&](u32 l) { lanes |= u32(w.pc[l] == at) << l; });
    return true;
  }
  bool choose() {
    lanes = 0;
    return choose(others());
  }
  void meet() {
    const u32 rest = others();
    each(rest, [&](u32 l) { lanes |= u32(w.pc[l] == pc) << l; });
    if (others()) leave(lanes), choose(others() | lanes);
    part();
  }
  // Now and then some lanes go ahead.
  void part() {
    if (!(lanes & (lanes - 1)) || !run.random.chance(run.policy.split)) return;
    const u32 some = lanes & run.random.next();
    if (some && some != lanes) leave(lanes & ~some), lanes = some;
  }
  Outcome outcome() const { return w.live ? WAITS : DONE; }

  Outcome take(s32 budget) {
    static const Handler store = table()["st"].run;
    if (!choose(others(), w.looked)) return outcome();  // what a group waits for, another of the warp may have to do
    w.looked = false;
    for (;;) {
      const Instruction& i = code[pc];
      if (i.leader && lanes != w.live) {
        meet();
        if (code + pc != &i) continue;
      } else if (i.leader && run.policy.split) {
        part();
      }
      if (--budget < 0) {
        leave(lanes);
        return STOPPED;
      }
      run.instructions++;
      w.now = &i;
      if (i.run == store && run.policy.split) part();  // so that lanes which do not wait for a neighbour's store miss it
      u32 some = lanes;
      if (i.guard >= 0) some &= w.predicate(i.guard);
      if (!w.products.empty() && some && touches_products(w, i)) finish_products(w, 0);
      switch (i.kind) {
        case PLAIN:
          if (some) i.run(w, i, some);
          pc++;
          continue;
        case LOOK:
          if (some) i.run(w, i, some);
          pc++;
          if (w.looked) {
            leave(lanes);
            return LOOKED;
          }
          continue;
        case BRANCH: {
          if (!some) {
            pc++;
            continue;
          }
          const u32 rest = lanes & ~some;
          if (rest) {
            each(some, [&](u32 l) { w.pc[l] = i.o[0]; });
            pc++;
            leave(rest);
            choose(others() | lanes);
          } else {
            pc = i.o[0];
          }
          continue;
        }
        default: break;
      }
      if (!some) {
        pc++;
        continue;
      }
      if (some != lanes) {  // those whose guard says no go on; the others are a group of their own
        const u32 rest = lanes & ~some;
        pc++;
        leave(rest);
        pc--;
        lanes = some;
      }
      if (i.kind == MEMBERS || (i.kind != CALL && i.kind != RETURN && i.kind != EXIT && (i.kind == ALIGNED || i.o[0]))) {
        u32 needed = w.live;
        if (i.kind == MEMBERS) {
          const u32* members = w.in<u32>(i.o[0]);
          needed = members[__builtin_ctz(lanes)] & w.live;
          u32 alike = 0;
          each(lanes, [&](u32 l) {
            if (!(members[l] >> l & 1)) fault(w, "lane %u is not among the lanes 0x%x that it names", l, members[l]);
            alike |= u32((members[l] & w.live) == needed) << l;
          });
          if (alike != lanes) leave(lanes & ~alike), lanes = alike;
        }
        u32 here = lanes;
        each(w.parked & needed, [&](u32 l) { here |= u32(w.pc[l] == pc) << l; });
        if (needed & ~here) {
          leave(lanes);
          w.parked |= lanes;
          if (!choose()) return outcome();
          continue;
        }
        w.parked &= ~needed;
        lanes = needed;
      }
      switch (i.kind) {
        case BARRIER:
        case CLUSTER_WAIT:
          leave(lanes);
          i.run(w, i, lanes);
          lanes &= ~w.blocked;
          // Whoever need not wait is past it already (`release`), or goes on now.
          if (i.kind == CLUSTER_WAIT || i.o[3] == 1) {
            if (lanes) {
              pc++;
              leave(lanes);
            }
          }
          if (!choose()) return outcome();
          continue;
        case CALL:
          for (s32 k = 0; k < i.o[2]; k++)
            each(lanes, [&](u32 l) {
              u8* own = w.local.data() + static_cast<size_t>(l) * run.program->local_bytes;
              memmove(own + i.o[4 + 3 * k], own + i.o[3 + 3 * k], i.o[5 + 3 * k]);
            });
          each(lanes, [&](u32 l) { w.in<s32>(i.o[1])[l] = pc + 1; });
          pc = i.o[0];
          continue;
        case RETURN:
          if (i.o[0] != NO_OPERAND) {
            const u32 back = lanes;
            each(lanes, [&](u32 l) { w.pc[l] = w.in<s32>(i.o[0])[l]; });
            lanes = 0;
            choose(back | others());
            continue;
          }
          [[fallthrough]];
        case EXIT:
          exit_lanes(w, lanes);
          if (!choose()) return outcome();
          continue;
        default:
          i.run(w, i, lanes);
          pc++;
      }
    }
  }
};

}  // namespace

void release(Warp& w, u32 lanes, bool advance) {
  w.blocked &= ~lanes;
  if (advance) each(lanes, [&](u32 l) { w.pc[l]++; });
  requeue(w);
}

void fault(const Warp& w, const char* format, ...) {
  char text[600];
  va_list list;
  va_start(list, format);
  vsnprintf(text, sizeof text, format, list);
  va_end(list);
  char at[200];
  snprintf(at, sizeof at, "block (%u, %u, %u) warp %u, PTX line %u: ", w.block->x, w.block->y, w.block->z, w.id, w.now ? w.now->line : 0);
  throw Fault{std::string(at) + text};
}

// Whether nothing has happened since everybody who could run has looked for it, often.
bool all_look(const Run& run) {
  for (const Warp* w : run.ready)
    if (w->looks_since != run.events || w->looks < 40) return false;
  return true;
}

// Where everybody stands, for a run that cannot go on: the warps that stand alike on one line.
std::string where(const Run& run) {
  std::map<std::string, std::vector<std::string>> alike;
  for (const Cluster* cluster : run.active)
    for (const Block* b : cluster->blocks)
      for (const Warp& w : b->warps) {
        std::map<s32, u32> groups;
        each(w.live, [&](u32 l) { groups[w.pc[l]] |= 1u << l; });
        std::string stands;
        char text[160];
        for (auto [pc, lanes] : groups) {
          snprintf(text, sizeof text, "lanes 0x%08x at PTX line %u%s; ", lanes, run.program->code[pc].line,
                   lanes & w.blocked ? " (a barrier)" : lanes & w.parked ? " (for lanes of the warp)" : "");
          stands += text;
        }
        if (stands.empty()) continue;
        snprintf(text, sizeof text, "(%u,%u,%u)/%u", b->x, b->y, b->z, w.id);
        alike[stands].push_back(text);
      }
  std::string all;
  for (auto& [stands, warps] : alike) {
    all += "\n  " + stands + std::to_string(warps.size()) + " warps (block/warp):";
    for (size_t k = 0; k < warps.size() && k < 6; k++) all += " " + warps[k];
    if (warps.size() > 6) all += " ...";
  }
  return all;
}

void run_all(Run& run) {
  const u32 blocks = run.cluster_size[0] * run.cluster_size[1] * run.cluster_size[2];
  run.clusters = run.grid[0] * run.grid[1] * run.grid[2] / blocks;
  u32 most = run.resident / blocks ? run.resident / blocks : 1, window = run.policy.window < most ? run.policy.window : most;
  u64 seen = 0, quiet = 0, turn = 0;
  for (;;) {
    while (run.active.size() < window && run.next_cluster < run.clusters) start_cluster(run);
    if (run.active.empty()) break;
    if (!run.pending.empty() && run.random.chance(run.policy.land)) land_some(run, run.random.below(run.pending.size()));
    const u64 patience = 2 * run.ready.size() + 16;
    if (run.ready.empty() || quiet > patience) {
      bool products = false;
      for (Warp* w : run.ready)
        if (!w->products.empty()) finish_products(*w, w->products.size() - 1), products = true;
      if (products) {
      } else if (!run.pending.empty()) {  // all wait: some of it is due
        for (size_t n = run.pending.size() / 4 + 1; n && !run.pending.empty(); n--) land_some(run, run.random.below(run.pending.size()));
      } else if (window < most && run.next_cluster < run.clusters) {
        window++;
      } else if (run.ready.empty() || all_look(run)) {
        throw Fault{"deadlock: no thread can go on" + where(run)};
      }
      if (run.ready.empty()) continue;
    }
    const u32 which = run.policy.in_order ? turn++ % run.ready.size() : run.random.below(run.ready.size());
    Warp& w = *run.ready[which];
    if (!w.products.empty() && run.random.chance(run.policy.land)) finish_products(w, w.products.size() - 1);
    Turn t{w, run, run.program->code.data(), 0, 0};
    const Outcome outcome = t.take(run.policy.in_order ? 1 << 20 : 1 + run.random.below(run.policy.budget));
    run.slices++;
    if (run.instructions > run.limit) throw Fault{"more instructions than this emulation may take" + where(run)};
    if (outcome == DONE || outcome == WAITS) {
      // A warp may have been released while it ran: it is still in the list then, and stays.
      if (!(w.live & ~w.blocked & ~w.parked)) {
        w.queued = false;
        for (size_t k = which;; k++)
          if (run.ready[k] == &w) {
            run.ready[k] = run.ready.back(), run.ready.pop_back();
            break;
          }
      }
    }
    if (run.events != seen) quiet = 0, seen = run.events;
    else quiet++;
    if (outcome == LOOKED) {
      if (w.looks_since != run.events) w.looks_since = run.events, w.looks = 0;
      w.looks++;
    }
    if (outcome == DONE) {
      Cluster* cluster = w.block->cluster;
      u32 under_way = 0;
      for (Block* b : cluster->blocks) under_way += b->under_way;
      if (!cluster->live_blocks) {
        for (size_t k = 0; under_way && k < run.pending.size();)
          if (run.pending[k]->warp->block->cluster == cluster) under_way--, land(run, run.pending[k]);
          else k++;
        finish_cluster(run, cluster);
      }
    }
  }
}

void define_schedule() {
  define("bra", "", nullptr, BRANCH), define("call", "", nullptr, CALL), define("ret", "", nullptr, RETURN), define("exit", "", nullptr, EXIT);
  define("barrier", "", arrive_at_barrier, BARRIER);
  define("barrier.cluster.arrive", "", arrive_at_cluster, CLUSTER_ARRIVE), define("barrier.cluster.wait", "", wait_for_cluster, CLUSTER_WAIT);
  define("trap", "", [](Warp& w, const Instruction&, u32) { fault(w, "trap"); });
  define("nothing", "", [](Warp&, const Instruction&, u32) {});
  define("nanosleep", "", [](Warp& w, const Instruction&, u32) { w.looked = true; }, LOOK);
  define("clock.8", "8:", [](Warp& w, const Instruction& i, u32 lanes) {
    each(lanes, [&](u32 l) { w.in<u64>(i.o[0])[l] = w.block->run->instructions; });
  });
  define("clock.4", "4:", [](Warp& w, const Instruction& i, u32 lanes) {
    each(lanes, [&](u32 l) { w.in<u32>(i.o[0])[l] = static_cast<u32>(w.block->run->instructions); });
  });
}
