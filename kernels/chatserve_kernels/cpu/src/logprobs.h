// Log-probabilities of tokens under rows of logits.
#pragma once

#include "threads.h"

namespace cs {

// Of which rows, of which token of each, and how many of each row's best beside it.
struct LogprobWishes {
  int64_t count;
  const int64_t* rows;
  const int32_t* tokens;
  int64_t top;  // in [0, columns]
};

// chosen[i] and, best first, top_ids and top_logprobs[i * top …] are of row wishes.rows[i] of logits [rows, columns],
// whose largest is finite. Equal logits are in order of their ids.
void logprobs(ThreadPool& pool, const float* logits, int64_t columns, const LogprobWishes& wishes, float* chosen,
              int32_t* top_ids, float* top_logprobs);

}  // namespace cs
