// Cycles of a block at its steps, for whoever compiles with PROFILE; otherwise nothing.
#pragma once

#ifdef PROFILE  // cycles of a block at MARK(n), 16 words a block
#define MARK(n) \
  if (threadIdx.x == 0) profile[(blockIdx.x) * 16 + (n)] = clock64();
#define PROFILE_PARAMETER , long long* profile
#define PROFILE_ARGUMENT , profile
#else
#define MARK(n)
#define PROFILE_PARAMETER
#define PROFILE_ARGUMENT
#endif
