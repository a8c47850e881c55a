// Attention in plain C++, one row after another: for any CPU and any head size.
#include "attention_task.h"

namespace cs {

void attend_portable(const Call& call, const Task& task) {
  const int64_t dim = call.paged.head_dim;
  static thread_local Buffer<float> memory;
  constexpr int kStep = 32;
  float* acc = memory.reserve(size_t(dim));
  for (int64_t row = 0; row < call.rows(task); ++row) {
    const int64_t last = call.position(task, row / call.group());
    const int64_t first = call.window > 0 ? std::max(task.begin, last - call.window + 1) : task.begin;
    const float* q = call.query_row(task, row);
    float maximum = kHidden, sum = 0.0f;
    std::fill(acc, acc + dim, 0.0f);
    for (int64_t from = first; from < std::min(task.end, last + 1); from += kStep) {
      const int64_t count = std::min<int64_t>(kStep, std::min(task.end, last + 1) - from);
      float score[kStep], highest = maximum;
      for (int64_t i = 0; i < count; ++i) {
        const uint16_t* k = call.tile(task, from + i, 0);
        const int64_t slot = (from + i) % call.paged.block_size;
        float dot = 0.0f;
#pragma omp simd reduction(+ : dot)
        for (int64_t d = 0; d < dim; ++d) dot += q[d] * bf16_to_float(k[call.paged.key_index(slot, d)]);
        score[i] = dot * call.scale;
        if (!(score[i] <= highest)) highest = score[i];  // a NaN becomes the maximum and stays
      }
      const float shrink = std::exp(maximum - highest);
      sum *= shrink;
      for (int64_t d = 0; d < dim; ++d) acc[d] *= shrink;
      for (int64_t i = 0; i < count; ++i) {
        const float p = std::exp(score[i] - highest);
        const uint16_t* v = call.tile(task, from + i, 1);
        const int64_t slot = (from + i) % call.paged.block_size;
        sum += p;
        for (int64_t d = 0; d < dim; ++d) acc[d] += p * bf16_to_float(v[call.paged.value_index(slot, d)]);
      }
      maximum = highest;
    }
    if (task.record >= 0) {
      std::copy(acc, acc + dim, call.record(task.record + row));
      call.set_record(task, row, maximum * kLog2e, sum);
      continue;
    }
    float* out = call.out_row(task, row);
    for (int64_t d = 0; d < dim; ++d) out[d] = acc[d] / sum;
  }
}

}  // namespace cs
