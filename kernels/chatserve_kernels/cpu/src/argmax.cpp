#include "argmax.h"

#include <algorithm>
#include <limits>

namespace cs {

namespace {

constexpr int64_t kRun = 256;

// First index at which `wanted` holds. A run is tested as a whole, which compilers turn into vectors.
template <class F>
int64_t first(const float* x, int64_t columns, const F& wanted) {
  for (int64_t begin = 0; begin < columns; begin += kRun) {
    const int64_t end = std::min(columns, begin + kRun);
    int any = 0;
#pragma omp simd reduction(| : any)
    for (int64_t i = begin; i < end; ++i) any |= wanted(x[i]);
    if (any)
      for (int64_t i = begin; i < end; ++i)
        if (wanted(x[i])) return i;
  }
  return 0;
}

int64_t argmax(const float* x, int64_t columns) {
  float largest = -std::numeric_limits<float>::infinity();
  int nan = 0;
#pragma omp simd reduction(max : largest) reduction(| : nan)
  for (int64_t i = 0; i < columns; ++i) {
    largest = x[i] > largest ? x[i] : largest;
    nan |= x[i] != x[i];
  }
  if (nan) return first(x, columns, [](float value) { return value != value; });
  return first(x, columns, [largest](float value) { return value == largest; });
}

}  // namespace

void argmax(ThreadPool& pool, const float* x, int64_t rows, int64_t columns, int32_t* best) {
  pool.run(int(rows), [&](int row) { best[row] = int32_t(argmax(x + row * columns, columns)); });
}

}  // namespace cs
