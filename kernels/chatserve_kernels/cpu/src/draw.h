// Tokens drawn from rows of logits.
#pragma once

#include "threads.h"

namespace cs {

struct DrawOptions {
  double temperature, min_p, top_k, top_p;
};

// What to draw: see `Draws` in `chatserve_kernels.interface`.
struct Draws {
  int64_t count;
  const int64_t* rows;
  const DrawOptions* options;
  const uint64_t* seeds;
  const uint64_t* positions;
  uint64_t steps;  // since the positions were noted
  const double* uniform;  // or null
};

// tokens[i] is drawn from logits[draws.rows[i]][0…columns), whatever else is drawn.
void draw(ThreadPool& pool, const float* logits, int64_t columns, const Draws& draws, int32_t* tokens);

}  // namespace cs
