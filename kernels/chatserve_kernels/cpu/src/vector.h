// The vector operations that attention, bfloat16 products and what follows a product are written in, once for each
// instruction set.
//
// Operands of multiply() are 32-bit words: two bfloat16 numbers where the CPU multiplies those in pairs, else one
// float32. `kPack` numbers make a word. Nothing here knows what is multiplied.
#pragma once

#include "common.h"

#if defined(CS_AVX512) || defined(CS_AVX2)
#define CS_VECTORS 1

namespace cs {

#if defined(CS_AVX512)

using Vec = __m512;
constexpr int kVec = 16;  // lanes
#if defined(__AVX512BF16__)
constexpr int kPack = 2;
#else
constexpr int kPack = 1;
#endif

inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
inline Vec spread(float x) { return _mm512_set1_ps(x); }
inline Vec zero() { return _mm512_setzero_ps(); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec subtract(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec scale_by(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec larger(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec smaller(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline float largest(Vec v) { return _mm512_reduce_max_ps(v); }
inline float total(Vec v) { return _mm512_reduce_add_ps(v); }
inline Vec exp2(Vec v) { return exp2_ps(v); }

// A division costs as much as ten products; the estimate of 14 bits and one step of Newton's give 23.
inline Vec inverse(Vec v) {
  const __m512 estimate = _mm512_rcp14_ps(v);
  return _mm512_mul_ps(estimate, _mm512_fnmadd_ps(v, estimate, _mm512_set1_ps(2.0f)));
}

// Lanes first ≤ i < end as they are, the others `otherwise`.
inline Vec keep(Vec v, int64_t first, int64_t end, float otherwise) {
  const auto below = [](int64_t lane) { return (1u << std::clamp<int64_t>(lane, 0, kVec)) - 1; };
  return _mm512_mask_blend_ps(__mmask16(below(end) & ~below(first)), _mm512_set1_ps(otherwise), v);
}

// The word-wise dot product of `word` (the same in all lanes) and b, added to sum.
inline Vec multiply(Vec sum, Vec word, Vec b) {
#if defined(__AVX512BF16__)
  return _mm512_dpbf16_ps(sum, (__m512bh)word, (__m512bh)b);
#else
  return _mm512_fmadd_ps(word, b, sum);
#endif
}

// The two bfloat16 numbers of each 32-bit word.
inline Vec first_of_words(Vec words) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(words), 16)); }
inline Vec second_of_words(Vec words) {
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(words), _mm512_set1_epi32(int(0xffff0000))));
}

// 32 numbers as words: 16 or 32 of them.
inline void store_words(float* p, Vec a, Vec b) {
#if defined(__AVX512BF16__)
  _mm512_storeu_ps(p, (__m512)_mm512_cvtne2ps_pbh(b, a));
#else
  store(p, a);
  store(p + kVec, b);
#endif
}

#else  // AVX2

using Vec = __m256;
constexpr int kVec = 8, kPack = 1;

inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
inline Vec spread(float x) { return _mm256_set1_ps(x); }
inline Vec zero() { return _mm256_setzero_ps(); }
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec subtract(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
inline Vec scale_by(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec larger(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec smaller(Vec a, Vec b) { return _mm256_min_ps(a, b); }
inline Vec multiply(Vec sum, Vec word, Vec b) { return _mm256_fmadd_ps(word, b, sum); }

inline float largest(Vec v) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps(x, x, 1)));
}

inline float total(Vec v) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
}

inline Vec inverse(Vec v) { return _mm256_div_ps(_mm256_set1_ps(1.0f), v); }

// For x < 127.5; a NaN stays a NaN.
inline Vec exp2(Vec x) {
  x = _mm256_max_ps(_mm256_set1_ps(-126.0f), x);
  const __m256 whole = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m256 f = _mm256_sub_ps(x, whole);
  __m256 p = _mm256_set1_ps(1.5403530e-4f);
  for (const float c : {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f})
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(c));
  const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(p, _mm256_castsi256_ps(power));
}

inline Vec keep(Vec v, int64_t first, int64_t end, float otherwise) {
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const auto from = [&](int64_t lane) {
    return _mm256_cmpgt_epi32(lanes, _mm256_set1_epi32(int(std::clamp<int64_t>(lane, 0, kVec)) - 1));
  };
  const __m256i kept = _mm256_andnot_si256(from(end), from(first));
  return _mm256_blendv_ps(_mm256_set1_ps(otherwise), v, _mm256_castsi256_ps(kept));
}

inline Vec first_of_words(Vec words) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(words), 16)); }
inline Vec second_of_words(Vec words) {
  return _mm256_castsi256_ps(_mm256_and_si256(_mm256_castps_si256(words), _mm256_set1_epi32(int(0xffff0000))));
}

inline void store_words(float* p, Vec a, Vec b) {
  store(p, a);
  store(p + kVec, b);
}

#endif

// kVec words of two bfloat16 numbers as words of multiply(): at `first`, or where those are single numbers the other
// halves at `second`.
inline void split_words(const uint16_t* words, float* first, float* second) {
  const Vec both = load(reinterpret_cast<const float*>(words));
  if constexpr (kPack == 2) return store(first, both);
  store(first, first_of_words(both));
  store(second, second_of_words(both));
}

}  // namespace cs
#endif
