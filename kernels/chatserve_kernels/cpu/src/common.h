// Number formats, aligned growing memory and the few vector helpers that all kernels share.
//
// Knows the instruction sets by the compiler's own macros: the library is compiled once per instruction set, on the
// machine it runs on, so there is no dispatch at run time. Knows nothing of models.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <type_traits>
#include <utility>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && \
    defined(__AVX512VNNI__)
#define CS_AVX512 1
#include <immintrin.h>
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define CS_AVX2 1
#include <immintrin.h>
#endif

#if defined(CS_AVX512) && defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define CS_AMX 1
#endif

namespace cs {

constexpr int kLanes = 16;  // outputs of one weight tile, rows of one activation tile
constexpr int kGroup = 32;  // inputs that share one scale

// An integer that is known when a template is.
template <int N>
using Constant = std::integral_constant<int, N>;

// f(Constant<0>()) … f(Constant<N - 1>()): loops that are gone before the compiler decides which arrays are registers,
// which GCC does before it unrolls.
template <int N, class F>
inline __attribute__((always_inline)) void unrolled(const F& f) {
  [&]<int... I>(std::integer_sequence<int, I...>) { (f(Constant<I>()), ...); }(std::make_integer_sequence<int, N>());
}

inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float bf16_to_float(uint16_t value) { return bits_to_float(uint32_t(value) << 16); }

// Round to nearest, ties to even; NaN stays NaN.
inline uint16_t float_to_bf16(float value) {
  const uint32_t bits = float_to_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t((bits >> 16) | 0x40);
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float half_to_float(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000) << 16, exponent = (half >> 10) & 31, fraction = half & 0x3ff;
  if (exponent == 0) {
    const float value = float(fraction) * 5.9604644775390625e-8f;  // 2^-24: subnormals
    return sign ? -value : value;
  }
  if (exponent == 31) return bits_to_float(sign | 0x7f800000u | fraction << 13);
  return bits_to_float(sign | (exponent + 112) << 23 | fraction << 13);
}

// Only for values that a half holds exactly or nearly (a scale times a power of two); rounds to nearest.
inline uint16_t float_to_half(float value) {
  const uint32_t bits = float_to_bits(value);
  const uint16_t sign = uint16_t((bits >> 16) & 0x8000);
  const float magnitude = std::fabs(value);
  if (!(magnitude < 65520.0f)) return uint16_t(sign | (magnitude == magnitude ? 0x7c00 : 0x7e00));
  if (magnitude < 6.103515625e-5f) return uint16_t(sign | uint16_t(std::nearbyint(magnitude * 16777216.0f)));
  const uint32_t rounded = (bits & 0x7fffffffu) + 0xfff + ((bits >> 13) & 1);
  return uint16_t(sign | ((rounded >> 13) - (112u << 10)));
}

inline float half_at(const uint8_t* bytes) {
  uint16_t half;
  std::memcpy(&half, bytes, 2);
  return half_to_float(half);
}

// 64-byte aligned memory that only grows. Contents are lost when it does.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(data_); }

  T* reserve(size_t count) {
    if (count > capacity_) {
      std::free(data_);
      capacity_ = 0;  // whatever comes of the next line
      const size_t bytes = (count * sizeof(T) + 4095) / 4096 * 4096;
      data_ = static_cast<T*>(std::aligned_alloc(4096, bytes));
      if (data_ == nullptr) throw std::bad_alloc();
      capacity_ = count;
    }
    return data_;
  }
  T* data() const { return data_; }

 private:
  T* data_ = nullptr;
  size_t capacity_ = 0;
};

#if defined(CS_AVX512)
// 2^x by a polynomial of the fraction, coefficients from the highest power on; below -126 as at -126, a NaN stays one.
template <class... Rest>
inline __m512 exp2_by(__m512 x, float first, Rest... rest) {
  x = _mm512_max_ps(_mm512_set1_ps(-126.0f), x);  // max returns its second operand for a NaN
  const __m512 whole = _mm512_roundscale_ps(x, 8), f = _mm512_sub_ps(x, whole);
  __m512 p = _mm512_set1_ps(first);
  ((p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(rest))), ...);
  return _mm512_scalef_ps(p, whole);
}

// To about 1e-7 relative.
inline __m512 exp2_ps(__m512 x) {
  return exp2_by(x, 1.5403530e-4f, 1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f);
}

// To about 3e-6 relative, for what is rounded to bfloat16.
inline __m512 rough_exp2_ps(__m512 x) {
  return exp2_by(x, 9.5828529e-3f, 5.5906425e-2f, 2.4024099e-1f, 6.9312419e-1f, 1.0f);
}
#endif

}  // namespace cs
