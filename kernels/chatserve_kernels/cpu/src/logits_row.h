// What drawing tokens and telling their probabilities have in common: one row of logits, looked at block by block.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <functional>
#include <limits>
#include <vector>

#include "common.h"
#include "threads.h"

namespace cs {

constexpr int64_t kBlock = 128;
constexpr double kLog2E = 1.4426950408889634;

inline int64_t blocks_of(int64_t columns) { return (columns + kBlock - 1) / kBlock; }

inline float largest(const float* x, int64_t count) {
  float best = -std::numeric_limits<float>::infinity();
#pragma omp simd reduction(max : best)
  for (int64_t i = 0; i < count; ++i) best = x[i] > best ? x[i] : best;
  return best;
}

// The largest logit of each block, and of the row.
inline float largest_of_blocks(const float* x, int64_t columns, float* maxima) {
  const int64_t blocks = blocks_of(columns);
  for (int64_t b = 0; b < blocks; ++b) maxima[b] = largest(x + b * kBlock, std::min(kBlock, columns - b * kBlock));
  return largest(maxima, blocks);
}

// f(i, scratch) for every i in [0, count), each thread with memory of its own, made for rows of `columns`.
template <class Scratch, class F>
void for_each_row(ThreadPool& pool, int64_t count, int64_t columns, const F& f) {
  const int threads = int(std::min<int64_t>(pool.size(), count));
  std::vector<Scratch> scratch(threads);
  for (Scratch& one : scratch) one.reserve(columns);
  std::atomic<int64_t> next{0};
  pool.run(threads, [&](int thread) {
    for (int64_t i; (i = next.fetch_add(1)) < count;) f(i, scratch[thread]);
  });
}

// What would stand at `index` in descending order goes there, nothing smaller before it.
inline void partition(float* values, int64_t index, int64_t count) {
  std::nth_element(values, values + index, values + count, std::greater<>());
}

// A logit that the best `count` of a row reach: that many blocks have a token there. `room` is as long as `maxima`.
inline float reached_by_best(const float* maxima, int64_t blocks, int64_t count, float* room) {
  if (count > blocks) return -std::numeric_limits<float>::infinity();
  std::copy_n(maxima, blocks, room);
  partition(room, count - 1, blocks);
  return room[count - 1];
}

constexpr float kSmallest = -126.0f;  // exponent of the smallest normal float32; lower weights count as 0

// 2^x for -126 ≤ x ≤ 0 to about 1e-7 relative, in operations that compilers turn into vectors everywhere.
inline float two_to(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 × 2^23: what is added to it is rounded to a whole number
  const float shifted = x + kRound;
  const float f = x - (shifted - kRound);
  float p = 1.5403530e-4f;
  p = p * f + 1.3333558e-3f;
  p = p * f + 9.6181291e-3f;
  p = p * f + 5.5504109e-2f;
  p = p * f + 2.4022651e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.0f;
  const uint32_t whole = std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(kRound);
  return p * std::bit_cast<float>((whole + 127) << 23);
}

// How one row weighs its logits: exp((logit - largest) / temperature), with `factor` = log2(e) / temperature.
struct Scale {
  float largest, factor;
  float lowest;  // exponent below which min-p, or else float32, makes the weight 0

  float exponent(float logit) const { return (logit - largest) * factor; }
  float weight(float logit) const {
    const float e = exponent(logit);
    return e >= lowest ? two_to(e) : 0.0f;
  }
  double mass(const float* logits, int64_t count) const {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; ++i) sum += weight(logits[i]);
    return sum;
  }
};

// Those of x[0…count) with an exponent from `least` up, and their ids, of which the first is `id`. Returns how many.
// Up to a vector of either is written beyond them. Compilers do not turn this loop into vectors by themselves.
inline int64_t select(const Scale& scale, float least, const float* x, int32_t id, int64_t count, float* values,
                      int32_t* ids) {
  int64_t selected = 0;
#if defined(CS_AVX512)
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (int64_t i = 0; i < count; i += kLanes) {
    const __mmask16 inside = count - i < kLanes ? __mmask16((1u << (count - i)) - 1) : __mmask16(0xffff);
    const __m512 value = _mm512_maskz_loadu_ps(inside, x + i);
    const __m512 above = _mm512_sub_ps(value, _mm512_set1_ps(scale.largest));
    const __m512 exponent = _mm512_mul_ps(above, _mm512_set1_ps(scale.factor));
    const __mmask16 reach = _mm512_mask_cmp_ps_mask(inside, exponent, _mm512_set1_ps(least), _CMP_GE_OQ);
    _mm512_storeu_ps(values + selected, _mm512_maskz_compress_ps(reach, value));
    const __m512i here = _mm512_add_epi32(lanes, _mm512_set1_epi32(id + int32_t(i)));
    _mm512_storeu_si512(ids + selected, _mm512_maskz_compress_epi32(reach, here));
    selected += std::popcount(uint32_t(reach));
  }
#else
  for (int64_t i = 0; i < count; ++i) {
    values[selected] = x[i];
    ids[selected] = id + int32_t(i);
    selected += scale.exponent(x[i]) >= least;
  }
#endif
  return selected;
}

// The same of a whole row, block by block; those whose largest does not reach `least` are not opened.
inline int64_t gather(const Scale& scale, float least, const float* x, int64_t columns, const float* maxima,
                      float* values, int32_t* ids) {
  const Scale own = scale;  // a copy, which no store can alias
  int64_t count = 0;
  for (int64_t b = 0; b < blocks_of(columns); ++b) {
    if (!(own.exponent(maxima[b]) >= least)) continue;
    const int64_t begin = b * kBlock;
    count += select(own, least, x + begin, int32_t(begin), std::min(kBlock, columns - begin), values + count,
                    ids + count);
  }
  return count;
}

}  // namespace cs
