// Tokens drawn from rows of logits.
#pragma once

#include "threads.h"

namespace cs {

// What to draw: see `Draws` in `chatserve_kernels.interface`.
struct Draws {
  int64_t count;
  const int64_t* rows;
  const double* temperature;
  const double* min_p;
  const int64_t* top_k;
  const double* top_p;
  const double* uniform;
};

// tokens[i] is drawn from logits[draws.rows[i]][0…columns), whatever else is drawn.
void draw(ThreadPool& pool, const float* logits, int64_t columns, const Draws& draws, int64_t* tokens);

}  // namespace cs
