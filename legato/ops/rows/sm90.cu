// The bookkeeping of an iteration between the model's layers: one small launch each, every one a few microseconds of PyTorch
// operators otherwise. Meanings are those of the references. All integers of the table are 64 bits wide, as PyTorch indexes.
//
// Every kernel starts early and waits for its predecessor before it touches memory; none runs longer than a launch takes.

typedef long long i64;

__device__ __forceinline__ void begin() {
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ i64 least(i64 a, i64 b, i64 c) {
  const i64 two = a < b ? a : b;
  return two < c ? two : c;
}

__device__ __forceinline__ void angles(float *cosine, float *sine, const float *frequencies, int half, i64 row,
                                       i64 position) {
  for (int i = threadIdx.x; i < half; i += blockDim.x) {
    const float angle = __fmul_rn((float)position, frequencies[i]);
    cosine[row * half + i] = cosf(angle);
    sine[row * half + i] = sinf(angle);
  }
}

// One block per row.
extern "C" __global__ void decode_rows(const i64 *places, const i64 *tokens, const i64 *lengths,
                                       const unsigned char *done, const i64 *num_drafts, const i64 *drafted,
                                       const int *page_table, const float *frequencies, i64 *ids, i64 *positions, int *request, int *visible,
                                       int *slots, float *cosine, float *sine, i64 *base, i64 *offered, int width,
                                       int token_stride, int table_width, int half) {
  begin();
  const int row = blockIdx.x, b = row / width;
  const i64 owner = places[b], place = owner ? owner : places[0];
  // Behind the drafts that are offered, the request's first row once more.
  const bool is_repeated = row % width > least(num_drafts[place], drafted[place], width - 1);
  const int depth = is_repeated ? 0 : row % width;
  const i64 position = lengths[place] + depth;
  angles(cosine, sine, frequencies, half, row, position);
  if (threadIdx.x) return;
  ids[row] = tokens[place * token_stride + depth];
  positions[row] = position;
  request[row] = (int)place;
  visible[row] = (int)(position + 1);
  int slot = -1;
  if (!done[owner] && !is_repeated && position >= 0 && position < (i64)table_width * 64) {
    const int page = page_table[place * table_width + position / 64];
    if (page >= 0) slot = page * 64 + (int)(position % 64);
  }
  slots[row] = slot;
  if (row % width) return;
  base[b] = lengths[owner];
  offered[b] = least(num_drafts[owner], drafted[owner], width - 1);
}

// One block per row of the chain, step by step.
extern "C" __global__ void chain_rows(const i64 *places, const i64 *base, const i64 *counts, const float *frequencies,
                                      i64 *positions, int *request, int *visible, int *slots, float *cosine,
                                      float *sine, int requests, int half) {
  begin();
  const int row = blockIdx.x, b = row % requests, step = row / requests + 1;
  const i64 last = counts[b] - 1, position = base[b] + (last > 0 ? last : 0) + step;
  angles(cosine, sine, frequencies, half, row, position);
  if (threadIdx.x) return;
  positions[row] = position;
  request[row] = (int)places[b];
  visible[row] = (int)(position + 1);
  slots[row] = -1;
}

// One thread per request.
extern "C" __global__ void accept_rows(const i64 *sampled, const i64 *drafts, const i64 *num_drafts, const i64 *rows,
                                       const i64 *base, const i64 *max_lengths, const i64 *capacity,
                                       const i64 *stop_ids, const unsigned char *done, i64 *accepted, i64 *counts,
                                       unsigned char *ended, unsigned char *live, int requests, int width,
                                       int draft_stride, int stops) {
  begin();
  for (int b = blockIdx.x * blockDim.x + threadIdx.x; b < requests; b += gridDim.x * blockDim.x) {
    const i64 row = rows[b], *mine = sampled + (i64)b * width;
    int agreed = 0;
    while (agreed < width - 1 && agreed < num_drafts[b] && mine[agreed] == drafts[(i64)b * draft_stride + agreed])
      ++agreed;
    int first_stop = width;
    for (int r = 0; r <= agreed && first_stop == width; ++r)
      for (int s = 0; s < stops; ++s)
        if (mine[r] == stop_ids[row * stops + s]) first_stop = r;
    i64 count = agreed + 1;
    const i64 limit = max_lengths[row] - base[b] - 1, room = capacity[row] - base[b];
    const i64 least = limit < room ? limit : room;
    if (count > first_stop + 1) count = first_stop + 1;
    if (count > least) count = least > 0 ? least : 0;
    const bool ends = count >= limit || (first_stop < width && count == first_stop + 1);
    const bool lives = !done[row];
    accepted[b] = agreed;
    counts[b] = lives ? count : 0;
    ended[b] = ends || !lives;
    live[b] = lives;
  }
}

// One thread per row, and the first threads one request each.
extern "C" __global__ void extend_rows(const i64 *sampled, const i64 *counts, const i64 *row_index,
                                       const i64 *sampler_of, const i64 *offset, const i64 *next_ids, const int *slots,
                                       i64 *following, int *stored, i64 *seed, int total, int requests, int width) {
  begin();
  const int first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
  for (int row = first; row < total; row += step) {
    const i64 request = sampler_of[row], r = offset[row];
    following[row] = request < 0 ? next_ids[row] : sampled[request * width + r];
    stored[row] = request >= 0 && r >= counts[request] ? -1 : slots[row];
  }
  for (int b = first; b < requests; b += step) {
    const i64 last = counts[b] - 1;
    seed[b] = row_index[(i64)b * width + (last > 0 ? last : 0)];
  }
}

// Row seed[y] of three tables: a thread for every 16 bytes of the first two, one behind the other.
extern "C" __global__ void seed_rows(const uint4 *hidden, const uint4 *slots, const int *counts, const i64 *seed,
                                     uint4 *chosen_hidden, uint4 *chosen_slots, int *chosen_counts, int hidden_pieces,
                                     int slot_pieces) {
  begin();
  const i64 row = seed[blockIdx.y], b = blockIdx.y;
  const int piece = blockIdx.x * blockDim.x + threadIdx.x, beyond = piece - hidden_pieces;
  if (piece < hidden_pieces)
    chosen_hidden[b * hidden_pieces + piece] = hidden[row * hidden_pieces + piece];
  else if (beyond < slot_pieces)
    chosen_slots[b * slot_pieces + beyond] = slots[row * slot_pieces + beyond];
  if (!piece) chosen_counts[b] = counts[row];
}

// One thread per request. Places that hold row 0 write it alike.
extern "C" __global__ void advance_rows(i64 *tokens, i64 *lengths, unsigned char *done, i64 *drafted, const i64 *rows,
                                        const i64 *base, const i64 *sampled, const i64 *counts,
                                        const unsigned char *ended, const i64 *drafts, const float *likely,
                                        float threshold, int requests, int width, int token_stride, int num_drafts) {
  begin();
  for (int b = blockIdx.x * blockDim.x + threadIdx.x; b < requests; b += gridDim.x * blockDim.x) {
    const i64 row = rows[b], count = counts[b];
    if (count > 0) {
      tokens[row * token_stride] = sampled[(i64)b * width + count - 1];
      for (int k = 0; k < num_drafts; ++k) tokens[row * token_stride + 1 + k] = drafts[(i64)b * num_drafts + k];
      int made = num_drafts;
      if (likely) {
        float together = 1;
        for (made = 0; made < num_drafts; ++made)
          if (!((together *= likely[(i64)b * num_drafts + made]) >= threshold)) break;
      }
      drafted[row] = made;
    }
    lengths[row] = base[b] + count;
    done[row] = ended[b];
  }
}

// One block.
extern "C" __global__ void write_letter(i64 *letters, i64 *number, const i64 *sampled, const i64 *drafts,
                                        const i64 *counts, const i64 *accepted, const i64 *offered,
                                        const unsigned char *ended, const unsigned char *live, int ring, int requests,
                                        int width, int num_drafts) {
  begin();
  const i64 now = number[0] + 1;
  __syncthreads();
  if (!threadIdx.x) number[0] = now;
  const int facts = width + num_drafts, line = facts + 6;
  i64 *letter = letters + (now % ring) * requests * line;
  for (int i = threadIdx.x; i < requests * line; i += blockDim.x) {
    const int b = i / line, column = i % line;
    i64 value = now;
    if (column < width) value = sampled[(i64)b * width + column];
    else if (column < facts) value = drafts[(i64)b * num_drafts + column - width];
    else if (column == facts) value = counts[b];
    else if (column == facts + 1) value = accepted[b];
    else if (column == facts + 2) value = offered[b];
    else if (column == facts + 3) value = ended[b];
    else if (column == facts + 4) value = live[b];
    letter[i] = value;
  }
}
