// The router's choice for many rows, from logits that the library computed: s = sigmoid(logit); the k largest of s + bias, the
// lower id where equal; weights s / (sum of the chosen s + 1e-20) * scale. A warp takes a row, a lane every 32nd expert.
//
// Macro: EXPERTS.

typedef unsigned int u32;

constexpr int HELD = (EXPERTS + 31) / 32;

extern "C" __global__ void __launch_bounds__(256)
    choose_rows(const float *__restrict__ logits, const float *__restrict__ bias, int *ids, float *weights, int rows, int k,
                float scale) {
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const int row = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= rows) return;
  float gates[HELD], ranks[HELD];
#pragma unroll
  for (int i = 0; i < HELD; ++i) {
    const int expert = i * 32 + lane;
    const bool there = expert < EXPERTS;
    gates[i] = there ? 1.0f / (1.0f + expf(-logits[size_t(row) * EXPERTS + expert])) : 0.0f;
    ranks[i] = there ? gates[i] + bias[expert] : __int_as_float(0xff800000);
  }
  float own_gate = 0.0f, sum = 0.0f;  // lane n keeps choice n
  int own_id = 0;
  for (int choice = 0; choice < k; ++choice) {
    float best = ranks[0], gate = gates[0];
    int id = lane;
#pragma unroll
    for (int i = 1; i < HELD; ++i)
      if (ranks[i] > best) best = ranks[i], gate = gates[i], id = i * 32 + lane;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      const float other = __shfl_xor_sync(0xffffffffu, best, step), other_gate = __shfl_xor_sync(0xffffffffu, gate, step);
      const int other_id = __shfl_xor_sync(0xffffffffu, id, step);
      if (other > best || (other == best && other_id < id)) best = other, gate = other_gate, id = other_id;
    }
    if (lane == choice) own_gate = gate, own_id = id;
    sum += gate;
#pragma unroll
    for (int i = 0; i < HELD; ++i)
      if (i * 32 + lane == id) ranks[i] = __int_as_float(0xff800000);
  }
  if (lane < k) {
    ids[size_t(row) * k + lane] = own_id;
    weights[size_t(row) * k + lane] = own_gate / (sum + 1e-20f) * scale;
  }
}
