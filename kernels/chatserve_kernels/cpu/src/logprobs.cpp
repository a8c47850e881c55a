// A row is read twice, for the largest logit of every block and for the sum of the weights. The best tokens are then
// among the few that reach the k-th largest of the blocks' largest: k blocks have one that does.
#include "logprobs.h"

#include <numeric>

#include "logits_row.h"

namespace cs {

namespace {

// Memory for one row.
struct Scratch {
  Buffer<float> maxima, values;
  Buffer<int32_t> ids, order;

  void reserve(int64_t columns) {
    maxima.reserve(blocks_of(columns));
    values.reserve(columns + kLanes);
    ids.reserve(columns + kLanes);
    order.reserve(columns);
  }
};

constexpr Scale kPlain{0.0f, 1.0f, 0.0f};  // an exponent is the logit itself

void best(const float* x, int64_t columns, int64_t top, double normaliser, Scratch& scratch, int32_t* top_ids,
          float* top_logprobs) {
  float* values = scratch.values.data();
  const float* maxima = scratch.maxima.data();
  const float least = reached_by_best(maxima, blocks_of(columns), top, values);
  const int64_t count = gather(kPlain, least, x, columns, maxima, values, scratch.ids.data());
  int32_t* order = scratch.order.data();
  std::iota(order, order + count, 0);
  const int64_t kept = std::min(top, count);  // fewer only where logits are no numbers
  std::partial_sort(order, order + kept, order + count, [values](int32_t a, int32_t b) {
    return values[a] > values[b] || (values[a] == values[b] && a < b);
  });
  for (int64_t i = 0; i < top; ++i) {
    top_ids[i] = i < kept ? scratch.ids.data()[order[i]] : 0;
    top_logprobs[i] = float(x[top_ids[i]] - normaliser);
  }
}

}  // namespace

void logprobs(ThreadPool& pool, const float* logits, int64_t columns, const LogprobWishes& wishes, float* chosen,
              int32_t* top_ids, float* top_logprobs) {
  for_each_row<Scratch>(pool, wishes.count, columns, [&](int64_t i, Scratch& scratch) {
    const float* x = logits + wishes.rows[i] * columns;
    const Scale scale{largest_of_blocks(x, columns, scratch.maxima.data()), float(kLog2E), kSmallest};
    const double normaliser = scale.largest + std::log(scale.mass(x, columns));
    chosen[i] = float(x[wishes.tokens[i]] - normaliser);
    const int64_t top = wishes.top;
    if (top) best(x, columns, top, normaliser, scratch, top_ids + i * top, top_logprobs + i * top);
  });
}

}  // namespace cs
