// The best entry of each row of logits.
#pragma once

#include "threads.h"

namespace cs {

// best[r] = index of the largest of x[r][0…columns), the first of equals; of the first NaN where there is one.
void argmax(ThreadPool& pool, const float* x, int64_t rows, int64_t columns, int32_t* best);

}  // namespace cs
