// A row is read twice, for the largest logit of every block and for the sum of the weights. The best tokens are then
// among the few that reach the k-th largest of the blocks' largest: k blocks have one that does.
#include "logprobs.h"

#include <atomic>
#include <numeric>
#include <vector>

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

// All tokens with a logit from `least` up, in order of their ids. Returns their number.
int64_t gather(const float* x, int64_t columns, float least, Scratch& scratch) {
  constexpr Scale kPlain{0.0f, 1.0f, 0.0f};  // an exponent is the logit itself
  int64_t count = 0;
  for (int64_t b = 0; b < blocks_of(columns); ++b) {
    if (!(scratch.maxima.data()[b] >= least)) continue;
    const int64_t begin = b * kBlock;
    count += select(kPlain, least, x + begin, int32_t(begin), std::min(kBlock, columns - begin),
                    scratch.values.data() + count, scratch.ids.data() + count);
  }
  return count;
}

void best(const float* x, int64_t columns, int64_t top, double normaliser, Scratch& scratch, int32_t* top_ids,
          float* top_logprobs) {
  const int64_t blocks = blocks_of(columns);
  float least = -std::numeric_limits<float>::infinity();
  if (top <= blocks) {
    std::copy_n(scratch.maxima.data(), blocks, scratch.values.data());
    partition(scratch.values.data(), top - 1, blocks);
    least = scratch.values.data()[top - 1];
  }
  const int64_t count = gather(x, columns, least, scratch);
  const float* values = scratch.values.data();
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
  const int threads = int(std::min<int64_t>(pool.size(), wishes.count));
  std::vector<Scratch> scratch(threads);
  for (Scratch& one : scratch) one.reserve(columns);
  std::atomic<int64_t> next{0};
  pool.run(threads, [&](int thread) {
    for (int64_t i; (i = next.fetch_add(1)) < wishes.count;) {
      const float* x = logits + wishes.rows[i] * columns;
      const Scale scale{largest_of_blocks(x, columns, scratch[thread].maxima.data()), float(kLog2E), kSmallest};
      const double normaliser = scale.largest + std::log(scale.mass(x, columns));
      chosen[i] = float(x[wishes.tokens[i]] - normaliser);
      const int64_t top = wishes.top;
      if (top) best(x, columns, top, normaliser, scratch[thread], top_ids + i * top, top_logprobs + i * top);
    }
  });
}

}  // namespace cs
