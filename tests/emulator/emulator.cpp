// What Python calls: the table of instructions, a program of them, and runs.
#include <cstdio>

#include "machine.h"

std::map<std::string, Entry>& table() {
  static std::map<std::string, Entry> entries;
  return entries;
}

namespace {
void define_all() {
  if (!table().empty()) return;
  define_alu(), define_convert(), define_memory(), define_copies(), define_matrix(), define_schedule();
}
}  // namespace

extern "C" {

// The names of all instructions and their signatures, one a line.
const char* emulator_instructions() {
  define_all();
  static std::string listed;
  if (listed.empty())
    for (auto& [name, entry] : table()) listed += name + " " + entry.signature + "\n";
  return listed.c_str();
}

// `names`: one a line, as `code` numbers them. `code`: of each instruction name, guard, line, leader, first operand, first touched
// register and how many.
Program* emulator_program(const char* names, const s32* code, s64 instructions, const s32* operands, s64 num_operands, const u8* constants,
                          s64 constant_bytes, const s32* specials, s64 num_specials, const s64* sizes) {
  define_all();
  std::vector<const Entry*> entries;
  for (const char* at = names; *at;) {
    const char* end = strchr(at, '\n');
    auto found = table().find(std::string(at, end));
    if (found == table().end()) return nullptr;
    entries.push_back(&found->second);
    at = end + 1;
  }
  Program* p = new Program;
  p->operands.assign(operands, operands + num_operands);
  p->constants.assign(constants, constants + constant_bytes);
  p->specials.assign(specials, specials + num_specials);
  p->register_bytes = sizes[0], p->predicates = sizes[1], p->local_bytes = sizes[2], p->shared_bytes = sizes[3], p->entry = sizes[4];
  for (s64 k = 0; k < instructions; k++) {
    const s32* c = code + 7 * k;
    const Entry& entry = *entries[c[0]];
    p->code.push_back({entry.run, p->operands.data() + c[4], p->operands.data() + c[5], static_cast<u32>(c[6]), c[1], static_cast<u32>(c[2]),
                       entry.kind, c[3] != 0});
  }
  return p;
}

// `shape`: grid 3, block 3, cluster 3, dynamic shared memory, blocks that run at once. `policy`: land, split, explore, budget, window,
// in order, seed, most instructions. `counts`: gets instructions and turns. Returns 0, or 1 with what went wrong in `error`.
int emulator_run(const Program* program, const u8* parameters, s64 parameter_bytes, const u8* globals, s64 global_bytes, const u64* ranges,
                 s64 num_ranges, const s64* shape, const u64* policy, u64* counts, char* error, s64 error_bytes) {
  Run run;
  run.program = program, run.parameters = parameters, run.parameter_bytes = parameter_bytes;
  run.globals.assign(globals, globals + global_bytes);
  for (int k = 0; k < 3; k++) run.grid[k] = shape[k], run.block_size[k] = shape[3 + k], run.cluster_size[k] = shape[6 + k];
  run.dynamic_shared = shape[9], run.resident = shape[10];
  for (s64 k = 0; k < num_ranges; k++) run.ranges.push_back({ranges[2 * k], ranges[2 * k + 1]});
  run.ranges.push_back({reinterpret_cast<u64>(parameters), reinterpret_cast<u64>(parameters) + parameter_bytes});
  run.ranges.push_back({reinterpret_cast<u64>(run.globals.data()), reinterpret_cast<u64>(run.globals.data()) + global_bytes});
  run.policy = {static_cast<u32>(policy[0]), static_cast<u32>(policy[1]), static_cast<u32>(policy[2]), static_cast<u32>(policy[3]),
                static_cast<u32>(policy[4]), policy[5] != 0};
  run.random.state = policy[6] * 0x9E3779B97F4A7C15ull + 0x1234567;
  run.limit = policy[7];
  int failed = 0;
  try {
    run_all(run);
  } catch (const Fault& f) {
    snprintf(error, error_bytes, "%s", f.text.c_str());
    failed = 1;
    for (Pending* p : run.pending) delete p;
    for (Cluster* cluster : run.active) {
      for (Block* b : cluster->blocks) delete b;
      delete cluster;
    }
  }
  counts[0] = run.instructions, counts[1] = run.slices;
  return failed;
}
}
