// Products with bfloat16 weights: in AMX tiles, in vectors, or in plain C++, all from one layout.
//
// Activations lie in tiles of 16 rows and 32 inputs: rounded to bfloat16 where the CPU multiplies such numbers, else as
// they are. Each way adds up a row's inputs in an order that depends on no other row, and tiles are as fast as vectors
// for a single row (measured: memory is the limit), so a machine needs but one way.
#include "amx.h"
#include "linear_job.h"
#include "vector.h"

namespace cs {

namespace {

// Layout of weights, in units of (16 outputs, 32 inputs): [16 pairs of inputs][16 outputs][2], the right factor of a
// tile product as well as a run of vectors of 16 outputs. Inputs and outputs are padded with zeros to multiples of 32.
constexpr int64_t kUnit = 1024;
constexpr int kTile = kLanes * kGroup;  // numbers of (16 rows, 32 inputs)

int64_t groups_of(int64_t inputs) { return (inputs + kGroup - 1) / kGroup; }

// The first inputs of a row; the next are a tile further on.
Number* row_of(const Activation& a, int row) {
  return a.numbers.data() + (int64_t(row / kLanes) * a.groups * kLanes + row % kLanes) * kGroup;
}

// One row, times factor and (unless null) weight.
void place_row(Activation& a, int row, const float* x, int64_t inputs, const float* weight, float factor) {
  Number* target = row_of(a, row);
  const auto place = [&](const float* values, const float* weights) {
    alignas(64) float scaled[kGroup];
    for (int i = 0; i < kGroup; ++i) scaled[i] = values[i] * factor;
    if (weights != nullptr)
      for (int i = 0; i < kGroup; ++i) scaled[i] *= weights[i];
#if defined(CS_VECTORS)
    for (int i = 0; i < kGroup; i += 2 * kVec)
      store_words(reinterpret_cast<float*>(target + i), load(scaled + i), load(scaled + i + kVec));
#else
    std::memcpy(target, scaled, sizeof(scaled));
#endif
    target += kTile;
  };
  int64_t at = 0;
  for (; at + kGroup <= inputs; at += kGroup) place(x + at, weight == nullptr ? nullptr : weight + at);
  if (at < inputs) {
    float last[kGroup] = {}, last_weights[kGroup] = {};
    std::copy(x + at, x + inputs, last);
    if (weight != nullptr) std::copy(weight + at, weight + inputs, last_weights);
    place(last, weight == nullptr ? nullptr : last_weights);
  }
}

#if defined(CS_VECTORS)

constexpr int kBatch = kVec == kLanes ? 8 : 4;  // rows that fill the registers, with two vectors of outputs each

// y_a and y_b [R rows][stride 16] = kVec outputs each of the weights at a and b.
template <int R>
void multiply_columns(const uint8_t* a, const uint8_t* b, const Number* x, int units, float* y_a, float* y_b) {
  Vec sum_a[R], sum_b[R];
  for (int r = 0; r < R; ++r) sum_a[r] = sum_b[r] = zero();
  for (int u = 0; u < units; ++u, a += kUnit, b += kUnit, x += kTile) {
    for (int pair = 0; pair < kGroup / 2; ++pair) {
      _mm_prefetch(reinterpret_cast<const char*>(a + kPrefetch + 64 * pair), _MM_HINT_T0);
      if (kVec == kLanes) _mm_prefetch(reinterpret_cast<const char*>(b + kPrefetch + 64 * pair), _MM_HINT_T0);
      const Vec w_a = load(reinterpret_cast<const float*>(a + 64 * pair));
      const Vec w_b = load(reinterpret_cast<const float*>(b + 64 * pair));
      const auto add_products = [&](int first, Vec part_a, Vec part_b) {
        for (int r = 0; r < R; ++r) {
          float word;
          std::memcpy(&word, x + r * kGroup + first, sizeof(word));
          sum_a[r] = multiply(sum_a[r], spread(word), part_a);
          sum_b[r] = multiply(sum_b[r], spread(word), part_b);
        }
      };
      if constexpr (kPack == 2) {
        add_products(2 * pair, w_a, w_b);
      } else {
        add_products(2 * pair, first_of_words(w_a), first_of_words(w_b));
        add_products(2 * pair + 1, second_of_words(w_a), second_of_words(w_b));
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    store(y_a + r * kLanes, sum_a[r]);
    store(y_b + r * kLanes, sum_b[r]);
  }
}

template <int R>
void multiply_rows(const uint8_t* first, const uint8_t* second, const Number* x, int units, float (*y)[R][kLanes]) {
  if constexpr (kVec == kLanes) {
    multiply_columns<R>(first, second, x, units, y[0][0], y[1][0]);
  } else {
    multiply_columns<R>(first, first + 4 * kVec, x, units, y[0][0], y[0][0] + kVec);
    multiply_columns<R>(second, second + 4 * kVec, x, units, y[1][0], y[1][0] + kVec);
  }
}

#else

constexpr int kBatch = 4;

template <int R>
void multiply_rows(const uint8_t* first, const uint8_t* second, const Number* x, int units, float (*y)[R][kLanes]) {
  std::memset(y, 0, sizeof(float) * 2 * R * kLanes);
  for (int u = 0; u < units; ++u, x += kTile)
    for (int half = 0; half < 2; ++half) {
      const uint8_t* unit = (half == 0 ? first : second) + u * kUnit;
      for (int i = 0; i < kGroup; i += 2) {
        uint32_t words[kLanes];
        float even[kLanes], odd[kLanes];
        std::memcpy(words, unit + 32 * i, sizeof(words));
        for (int o = 0; o < kLanes; ++o) {
          even[o] = bits_to_float(words[o] << 16);
          odd[o] = bits_to_float(words[o] & 0xffff0000u);
        }
        for (int r = 0; r < R; ++r)
          for (int o = 0; o < kLanes; ++o)
            y[half][r][o] += even[o] * x[r * kGroup + i] + odd[o] * x[r * kGroup + i + 1];
      }
    }
}

#endif

// Up to R rows from `row` on.
template <int R>
void multiply_up_to(const Job& job, int pair, int row) {
  if constexpr (R > 1)
    if (job.activation.rows - row < R) return multiply_up_to<R - 1>(job, pair, row);
  alignas(64) float y[2][R][kLanes];
  const int units = job.activation.groups;
  const uint8_t* first = job.linear.units + int64_t(pair) * 2 * units * kUnit;
  multiply_rows<R>(first, first + units * kUnit, row_of(job.activation, row), units, y);
  for (int r = 0; r < R; ++r) job.finish(pair, row + r, y[0][r], y[1][r]);
}

void multiply_in_vectors(const Job& job, int pair) {
  for (int row = 0; row < job.activation.rows; row += kBatch) multiply_up_to<kBatch>(job, pair, row);
}

#if defined(CS_AMX)

// Of activations and of weights that stay in the L2 cache together, where many rows are wide (measured).
constexpr int64_t kRowBytes = 512 << 10, kWeightBytes = 1024 << 10;

// Rows [begin, end), 32 at a time. What lies beyond the last row is multiplied too, and dropped.
void multiply_in_tiles(const Job& job, int pair, int begin, int end) {
  const int units = job.activation.groups;
  const uint8_t* first = job.linear.units + int64_t(pair) * 2 * units * kUnit;
  const uint8_t* second = first + units * kUnit;
  alignas(64) float c[4][kLanes * kLanes];
  for (int row0 = begin; row0 < end; row0 += 2 * kLanes) {
    const bool two = end - row0 > kLanes;
    const Number* x0 = row_of(job.activation, row0);
    const Number* x1 = x0 + int64_t(units) * kTile;
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    for (int u = 0; u < units; ++u) {
      if (row0 == 0)
        for (int64_t line = 0; line < kUnit; line += 64) {
          _mm_prefetch(reinterpret_cast<const char*>(first + u * kUnit + kPrefetch + line), _MM_HINT_T0);
          _mm_prefetch(reinterpret_cast<const char*>(second + u * kUnit + kPrefetch + line), _MM_HINT_T0);
        }
      TILE_LOAD(4, first + u * kUnit, 64);
      TILE_LOAD(5, second + u * kUnit, 64);
      TILE_LOAD(6, x0 + u * kTile, 64);
      TILE_MULTIPLY(0, 6, 4);
      TILE_MULTIPLY(1, 6, 5);
      if (!two) continue;
      TILE_LOAD(7, x1 + u * kTile, 64);
      TILE_MULTIPLY(2, 7, 4);
      TILE_MULTIPLY(3, 7, 5);
    }
    TILE_STORE(0, c[0], 64);
    TILE_STORE(1, c[1], 64);
    TILE_STORE(2, c[2], 64);
    TILE_STORE(3, c[3], 64);
    for (int r = 0; r < std::min(2 * kLanes, end - row0); ++r) {
      const float* y = c[r / kLanes * 2] + r % kLanes * kLanes;
      job.finish(pair, row0 + r, y, y + kLanes * kLanes);
    }
  }
}

#endif

}  // namespace

int64_t bf16_bytes(int64_t outputs, int64_t inputs) {
  return (outputs + 2 * kLanes - 1) / (2 * kLanes) * 2 * groups_of(inputs) * kUnit;
}

void pack_bf16(ThreadPool& pool, const uint16_t* rows, int64_t outputs, int64_t inputs, uint8_t* target) {
  const int64_t units = groups_of(inputs);
  pool.run(int((outputs + 2 * kLanes - 1) / (2 * kLanes)) * 2, [&](int tile) {
    uint16_t* unit = reinterpret_cast<uint16_t*>(target + tile * units * kUnit);
    std::memset(unit, 0, size_t(units * kUnit));
    for (int64_t lane = 0; lane < kLanes && tile * kLanes + lane < outputs; ++lane) {
      const uint16_t* row = rows + (tile * kLanes + lane) * inputs;
      for (int64_t i = 0; i < inputs; ++i) unit[i / 2 * 2 * kLanes + lane * 2 + i % 2] = row[i];
    }
  });
}

void project_bf16(ThreadPool& pool, const Linear& linear, Activation& a, bool amx, const float* x, int64_t x_stride,
                  int rows, const float* norm_weight, float eps, Epilogue epilogue, float* out, int64_t out_stride) {
  const int row_tiles = (rows + kLanes - 1) / kLanes;
  a.rows = rows;
  a.groups = int(groups_of(linear.inputs));
  a.numbers.reserve(size_t(row_tiles) * size_t(a.groups) * kTile);
  pool.run(row_tiles, [&](int tile) {
    for (int row = tile * kLanes; row < std::min(rows, (tile + 1) * kLanes); ++row) {
      const float* begin = x + row * x_stride;
      const float factor = norm_weight == nullptr ? 1.0f : norm_factor(begin, linear.inputs, eps);
      place_row(a, row, begin, linear.inputs, norm_weight, factor);
    }
  });
  const Job job{linear, a, epilogue, out, out_stride};
  // Chunks large enough to be worth a claim, small enough that nobody waits long for the last one.
  const int pairs = linear.pairs();
  int step = std::clamp(pairs / (pool.size() * 6), 1, 16);
#if defined(CS_AMX)
  const int64_t row_bytes = 2 * kGroup * int64_t(a.groups);
  const int rows_at_once = int(std::max<int64_t>(1, kRowBytes / row_bytes / (2 * kLanes))) * 2 * kLanes;
  if (rows > rows_at_once) step = int(std::clamp<int64_t>(kWeightBytes / (2 * kLanes * row_bytes), 1, step));
#endif
  pool.run_ranges((pairs + step - 1) / step, [&](int chunk) {
    const int end = std::min(pairs, (chunk + 1) * step);
#if defined(CS_AMX)
    if (amx) {
      const TileScope scope({});
      for (int row = 0; row < rows; row += rows_at_once)
        for (int pair = chunk * step; pair < end; ++pair)
          multiply_in_tiles(job, pair, row, std::min(rows, row + rows_at_once));
      return;
    }
#endif
    for (int pair = chunk * step; pair < end; ++pair) multiply_in_vectors(job, pair);
  });
}

}  // namespace cs
