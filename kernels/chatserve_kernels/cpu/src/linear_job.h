// One projection in progress, and what the two ways of multiplying offer to it.
#pragma once

#include "linear.h"

namespace cs {

constexpr int64_t kPrefetch = 4096;  // bytes ahead of the weights being multiplied (measured)

inline int64_t group_pairs(int64_t inputs) { return (inputs / kGroup + 1) / 2; }

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
#if defined(CS_AVX512)
    const __m512 a = _mm512_loadu_ps(first), b = _mm512_loadu_ps(second);
    if (epilogue == Epilogue::kSiluMul) {
      const __m512 one = _mm512_set1_ps(1.0f);
      // The exponent is kept below overflow: beyond 80 the sigmoid is 0 to float precision anyway.
      const __m512 minus = _mm512_min_ps(_mm512_set1_ps(115.0f), _mm512_mul_ps(a, _mm512_set1_ps(-1.44269504f)));
      const __m512 gated = _mm512_div_ps(a, _mm512_add_ps(one, exp2_ps(minus)));
      _mm512_storeu_ps(out + row * stride + begin / 2, _mm512_mul_ps(gated, b));
      return;
    }
    float* target = out + row * stride + begin;
    if (epilogue == Epilogue::kAdd) {
      _mm512_storeu_ps(target, _mm512_add_ps(_mm512_loadu_ps(target), a));
      _mm512_storeu_ps(target + 16, _mm512_add_ps(_mm512_loadu_ps(target + 16), b));
    } else {
      _mm512_storeu_ps(target, a);
      _mm512_storeu_ps(target + 16, b);
    }
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

// One row in 8 bits, times factor and (unless null) weight.
void quantise_row(Activation& activation, int row, const float* x, int64_t inputs, const float* weight, float factor);
// Up to 16 rows as tiles, each times its factor.
void pack_rows(Activation& activation, int tile, const float* x, int64_t stride, int rows, int64_t inputs,
               const float* weight, const float* factor);

// Layout of bfloat16 weights and its size: see linear_bf16.cpp.
void pack_bf16(ThreadPool& pool, const uint16_t* rows, int64_t outputs, int64_t inputs, uint8_t* target);
int64_t bf16_bytes(int64_t outputs, int64_t inputs);

}  // namespace cs
