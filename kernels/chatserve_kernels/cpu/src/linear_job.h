// One projection in progress, and what the two ways of multiplying offer to it.
#pragma once

#include "linear.h"
#include "vector.h"

namespace cs {

#if defined(CS_AVX2)
constexpr bool kWidens = true;  // 8-bit weights are multiplied in 16 bits
#else
constexpr bool kWidens = false;
#endif
constexpr int64_t kPrefetch = 4096;  // bytes ahead of the weights being multiplied (measured)

// What an RMS norm multiplies a row with, weights aside.
inline float norm_factor(const float* x, int64_t inputs, float eps) {
  float sum[16] = {};
  for (int64_t i = 0; i + 16 <= inputs; i += 16)
    for (int j = 0; j < 16; ++j) sum[j] += x[i + j] * x[i + j];
  for (int64_t i = inputs / 16 * 16; i < inputs; ++i) sum[i % 16] += x[i] * x[i];
  float total = 0.0f;
  for (int j = 0; j < 16; ++j) total += sum[j];
  return 1.0f / std::sqrt(total / float(inputs) + eps);
}

inline float silu(float x) { return x / (1.0f + std::exp(-x)); }

#if defined(CS_VECTORS)
inline Vec silu(Vec x) {
  // The exponent is kept below overflow: beyond 80 the sigmoid is 0 to float precision anyway.
  const Vec minus = smaller(spread(115.0f), scale_by(x, spread(-1.44269504f)));
  return scale_by(x, inverse(add(spread(1.0f), exp2(minus))));
}
#endif

// One row of one pair of weight tiles: 16 + 16 finished outputs.
struct Job {
  const Linear& linear;
  const Activation& activation;
  Epilogue epilogue;
  float* out;
  int64_t stride;

  void finish(int pair, int row, const float* first, const float* second) const {
    const int64_t begin = int64_t(pair) * 2 * kLanes;
    if (begin + 2 * kLanes > linear.outputs || linear.bias != nullptr) return finish_slowly(pair, row, first, second);
#if defined(CS_VECTORS)
    if (epilogue == Epilogue::kSiluMul) {
      float* target = out + row * stride + begin / 2;
      for (int i = 0; i < kLanes; i += kVec) store(target + i, scale_by(silu(load(first + i)), load(second + i)));
      return;
    }
    float* target = out + row * stride + begin;
    for (const float* half : {first, second})
      for (int i = 0; i < kLanes; i += kVec, target += kVec)
        store(target, epilogue == Epilogue::kAdd ? add(load(target), load(half + i)) : load(half + i));
#else
    finish_slowly(pair, row, first, second);
#endif
  }

 private:
  void finish_slowly(int pair, int row, const float* first, const float* second) const {
    const int64_t begin = int64_t(pair) * 2 * kLanes;
    if (epilogue == Epilogue::kSiluMul) {
      for (int i = 0; i < kLanes && begin + kLanes + i < linear.outputs; ++i) {
        float gate = first[i], up = second[i];
        if (linear.bias != nullptr) gate += linear.bias[begin + i], up += linear.bias[begin + kLanes + i];
        out[row * stride + begin / 2 + i] = silu(gate) * up;
      }
      return;
    }
    for (int i = 0; i < 2 * kLanes && begin + i < linear.outputs; ++i) {
      float y = i < kLanes ? first[i] : second[i - kLanes];
      if (linear.bias != nullptr) y += linear.bias[begin + i];
      float& target = out[row * stride + begin + i];
      target = epilogue == Epilogue::kAdd ? target + y : y;
    }
  }
};

// All rows of one pair of weight tiles.
void dot_pair(const Job& job, int pair);
void tile_pair(const Job& job, int pair);
void tile_pair_gated(const Job& job, int pair, Activation& gated);

// One row in 8 bits, times factor and (unless null) weight.
void quantise_row(Activation& activation, int row, const float* x, int64_t inputs, const float* weight, float factor);
// Up to 16 rows as a row tile, each times its factor and (unless null) weight; rows that are not there are zero.
void pack_rows(Activation& activation, int row_tile, const float* x, int64_t stride, int rows, int64_t inputs,
               const float* weight, const float* factor);

// Layout of bfloat16 weights and its size: see linear_bf16.cpp.
void pack_bf16(ThreadPool& pool, const uint16_t* rows, int64_t outputs, int64_t inputs, uint8_t* target);
int64_t bf16_bytes(int64_t outputs, int64_t inputs);
// Sums of what was packed of few rows, per row and group.
void sum_groups(Activation& activation);

}  // namespace cs
