// A token's weight is exp((logit - largest) / temperature): 1 for the best. As a rule a row is read twice: for the
// largest logit of every block, and for the sum of every block's weights, which top-k spares. Inversion then opens one
// block; top-k and top-p open those whose largest logit can matter, and choose among the few candidates in them. In a
// row that is nearly flat all tokens are candidates.
#include "draw.h"

#include <limits>

#include "logits_row.h"
#include "philox.h"

namespace cs {

namespace {

constexpr float kStep = 3.0f;  // top-p looks at weights down to 2^-6 first, then 2^-9, and so on

// Memory for one row.
struct Scratch {
  Buffer<float> maxima, values, order;
  Buffer<double> sums;
  Buffer<int32_t> ids;

  void reserve(int64_t columns) {
    maxima.reserve(blocks_of(columns));
    sums.reserve(blocks_of(columns));
    values.reserve(columns + kLanes);
    order.reserve(columns);
    ids.reserve(columns + kLanes);
  }
};

struct Place {
  int64_t index;
  double before;  // sum of the weights before it
};

// The first whose running sum exceeds `target`; where rounding leaves none, the last that has weight.
template <class T>
Place invert(const T* weights, int64_t count, double target) {
  Place place{0, 0};
  double running = 0;
  for (int64_t i = 0; i < count && running <= target; ++i) {
    if (!(weights[i] > 0)) continue;
    place = {i, running};
    running += weights[i];
  }
  return place;
}

class Row {
 public:
  Row(const float* x, int64_t columns, double temperature, double min_p, Scratch& scratch)
      : x_(x), columns_(columns), blocks_(blocks_of(columns)), scratch_(scratch) {
    scale_.largest = largest_of_blocks(x, columns, scratch.maxima.data());
    scale_.factor = float(std::min<double>(kLog2E / temperature, std::numeric_limits<float>::max()));
    scale_.lowest = std::max(kSmallest, float(std::log2(min_p)));
  }

  // A row without has no distribution, and nothing can be drawn from it.
  bool has_finite_largest() const { return std::isfinite(scale_.largest); }

  int64_t draw(double uniform) const {
    const double target = uniform * sum_blocks();
    const Place place = invert(scratch_.sums.data(), blocks_, target);
    float weights[kBlock];
    const int64_t count = size(place.index);
    for (int64_t i = 0; i < count; ++i) weights[i] = scale_.weight(block(place.index)[i]);
    return place.index * kBlock + invert(weights, count, target - place.before).index;
  }

  // top_k in [1, columns], top_p in (0, 1].
  int64_t draw_restricted(int64_t top_k, double top_p, double uniform) const {
    int64_t count, kept;
    double mass;
    float* order = scratch_.order.data();
    if (top_k < columns_) {
      count = gather(bound(top_k));
      kept = std::min(top_k, count);
      std::copy_n(scratch_.values.data(), count, order);
      partition(order, kept - 1, count);
      mass = scale_.mass(order, kept);
    } else {
      mass = sum_blocks();
      for (float depth = 2 * kStep;; depth += kStep) {
        count = gather(-depth);
        if (-depth <= scale_.lowest || scale_.mass(scratch_.values.data(), count) >= top_p * mass) break;
      }
      kept = count;
      std::copy_n(scratch_.values.data(), count, order);
    }
    if (top_p < 1.0) kept = nucleus(order, kept, top_p * mass);
    const float threshold = order[kept - 1];
    return draw_above(count, threshold, std::count(order, order + kept, threshold), uniform);
  }

 private:
  int64_t size(int64_t b) const { return std::min(kBlock, columns_ - b * kBlock); }
  const float* block(int64_t b) const { return x_ + b * kBlock; }

  // The weights of every block, and of the row.
  double sum_blocks() const {
    double total = 0;
    for (int64_t b = 0; b < blocks_; ++b) {
      const bool weighs = scale_.exponent(scratch_.maxima.data()[b]) >= scale_.lowest;
      total += scratch_.sums.data()[b] = weighs ? scale_.mass(block(b), size(b)) : 0.0;
    }
    return total;
  }

  // An exponent that the best `count` of the row reach if they have weight at all.
  float bound(int64_t count) const {
    return scale_.exponent(reached_by_best(scratch_.maxima.data(), blocks_, count, scratch_.order.data()));
  }

  // Candidates, in order of their ids: all that have weight and an exponent from `least` up. Returns their number.
  int64_t gather(float least) const {
    return cs::gather(scale_, std::max(least, scale_.lowest), x_, columns_, scratch_.maxima.data(),
                      scratch_.values.data(), scratch_.ids.data());
  }

  // How many of the best of `order` it takes to reach `wanted`; that many then stand first, the least of them last.
  // Halves what is in question each time, so the whole takes about two passes.
  int64_t nucleus(float* order, int64_t count, double wanted) const {
    int64_t begin = 0, end = count;
    while (end - begin > 1) {
      const int64_t middle = begin + (end - begin) / 2;
      partition(order + begin, middle - begin, end - begin);
      const double mass = scale_.mass(order + begin, middle - begin);
      if (mass >= wanted) {
        end = middle;
      } else {
        wanted -= mass;
        begin = middle;
      }
    }
    return end;
  }

  // From the candidates above `threshold` and the first `ties` that are equal to it.
  int64_t draw_above(int64_t count, float threshold, int64_t ties, double uniform) const {
    const float* values = scratch_.values.data();
    float* weights = scratch_.order.data();
    const Scale scale = scale_;
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) weights[i] = values[i] >= threshold ? scale.weight(values[i]) : 0.0f;
    for (int64_t i = 0; i < count; ++i)
      if (values[i] == threshold && ties-- <= 0) weights[i] = 0.0f;
    double total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < count; ++i) total += weights[i];
    return scratch_.ids.data()[invert(weights, count, uniform * total).index];
  }

  const float* x_;
  int64_t columns_, blocks_;
  Scratch& scratch_;
  Scale scale_;
};

}  // namespace

void draw(ThreadPool& pool, const float* logits, int64_t columns, const Draws& draws, int32_t* tokens) {
  for_each_row<Scratch>(pool, draws.count, columns, [&](int64_t i, Scratch& scratch) {
    const auto [temperature, min_p, most, top_p] = draws.options[i];
    const Row row(logits + draws.rows[i] * columns, columns, temperature, min_p, scratch);
    const int64_t top_k = most > 0 ? int64_t(std::min(most, double(columns))) : columns;
    const double uniform =
        draws.uniform ? draws.uniform[i] : cs::uniform(draws.seeds[i], draws.positions[i] + draws.steps);
    if (!row.has_finite_largest()) tokens[i] = 0;
    else if (top_k < columns || top_p < 1.0) tokens[i] = int32_t(row.draw_restricted(top_k, top_p, uniform));
    else tokens[i] = int32_t(row.draw(uniform));
  });
}

}  // namespace cs
