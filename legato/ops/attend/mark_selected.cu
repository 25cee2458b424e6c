// Which tokens of a request its rows attend to, as bits, for rows that are computed together.
//
// A block takes ROWS rows, the last one what there is of them. masks: [place][unit of 128 tokens][half][row] of 64 bits, bit n: the row attends to token
// 128 unit + 64 half + n.
//
// Macros: ROWS.

typedef unsigned int u32;

extern "C" __global__ void __launch_bounds__(256)
    mark_selected(const int *__restrict__ slots, const int *__restrict__ counts, const int *__restrict__ page_places,
                  int slots_stride, int rows, int units, uint4 *masks) {
  extern __shared__ u32 bits[];  // [unit][half][row][2]
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const int words = units * 4 * ROWS;
  for (int i = threadIdx.x; i < words; i += 256) bits[i] = 0;
  __syncthreads();
  const int first = blockIdx.x * ROWS;
#pragma unroll
  for (int row = 0; row < ROWS; ++row) {
    const int *const of_row = slots + size_t(first + row) * slots_stride;
    const int count = first + row < rows ? counts[first + row] : 0;
    for (int i = threadIdx.x; i < count; i += 256) {
      const int slot = of_row[i];
      if (slot < 0) continue;
      const int token = page_places[slot / 64] * 64 + slot % 64;
      if (token >= 0 && token < units * 128)
        atomicOr(bits + ((token / 64 * ROWS + row) * 2 + token / 32 % 2), 1u << token % 32);
    }
  }
  __syncthreads();
  uint4 *const out = masks + size_t(blockIdx.x) * (words / 4);
  for (int i = threadIdx.x; i < words / 4; i += 256) out[i] = reinterpret_cast<const uint4 *>(bits)[i];
}
