// Products of 8-bit activations and stored weights, as integers per group of 32 inputs: exact up to the rounding of the
// activations. A row gets the same bits whatever rows are beside it.
#include "linear_job.h"

namespace cs {

namespace {

#if defined(CS_AVX512)
constexpr int kBatch = 8;  // rows that fill the registers
#else
constexpr int kBatch = 4;
#endif
constexpr int kBlock = 32;  // rows that a tile of weights is multiplied with while it is in the L1 cache

// y[r][16] = one tile of outputs for R rows from row0 on.
#if defined(CS_AVX512)
// sum += w · the four bytes at x, in every lane. The instruction spreads them itself, which GCC 12 would not let it do.
inline __m512i dot(__m512i sum, __m512i w, const int8_t* x) {
  struct Word {
    int8_t bytes[4];
  };
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(*reinterpret_cast<const Word*>(x)));
  return sum;
}

template <int R, bool kFourBit>
void dot_tile(const uint8_t* unit, const Activation& a, int row0, float (*y)[kLanes]) {
  const int groups = a.groups;
  const int64_t inputs = int64_t(groups) * kGroup;
  const int8_t* x = a.values.data() + row0 * inputs;
  const __m512i nibble = _mm512_set1_epi8(15);
  __m512 total[R];
  for (int r = 0; r < R; ++r) total[r] = _mm512_setzero_ps();
  for (int g = 0; g < groups; ++g, unit += unit_bytes(kFourBit ? kQ4_1 : kQ8_0), x += kGroup) {
    // Beyond what the hardware prefetchers run ahead: a tile is a stream of its own.
    if (row0 == 0)
      for (int64_t line = 0; line < unit_bytes(kFourBit ? kQ4_1 : kQ8_0); line += 64)
        _mm_prefetch(reinterpret_cast<const char*>(unit + kPrefetch + line), _MM_HINT_T0);
    __m512i sum[R];
    for (int r = 0; r < R; ++r)
      sum[r] = kFourBit ? _mm512_setzero_si512() : _mm512_set1_epi32(-128 * a.sum.data()[(row0 + r) * groups + g]);
    if constexpr (kFourBit) {
      for (int j = 0; j < 4; ++j) {
        const __m512i both = _mm512_load_si512(unit + 64 * j);
        const __m512i low = _mm512_and_si512(both, nibble);
        const __m512i high = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
        for (int r = 0; r < R; ++r) {
          sum[r] = dot(sum[r], low, x + r * inputs + 8 * j);
          sum[r] = dot(sum[r], high, x + r * inputs + 8 * j + 4);
        }
      }
    } else {
      for (int j = 0; j < 8; ++j) {
        const __m512i w = _mm512_loadu_si512(unit + 64 * j);
        for (int r = 0; r < R; ++r) sum[r] = dot(sum[r], w, x + r * inputs + 4 * j);
      }
    }
    const uint8_t* tail = unit + (kFourBit ? 256 : 512);
    const __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(tail)));
    for (int r = 0; r < R; ++r) {
      const __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(a.scale.data()[(row0 + r) * groups + g]));
      total[r] = _mm512_fmadd_ps(both, _mm512_cvtepi32_ps(sum[r]), total[r]);
    }
    if constexpr (kFourBit) {
      const __m512 minimum = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(tail + 32)));
      for (int r = 0; r < R; ++r)
        total[r] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(a.scaled_sum.data()[(row0 + r) * groups + g]), total[r]);
    }
  }
  for (int r = 0; r < R; ++r) _mm512_storeu_ps(y[r], total[r]);
}
#elif defined(CS_AVX2)
// A value in its place: without it GCC 12 computes all of a loop's terms before it adds them, and runs out of registers.
inline __m256i settled(__m256i value) {
  asm("" : "+x"(value));
  return value;
}

inline __m256i load(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline __m256 load_halves(const uint8_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }

// The four bytes at x, in every lane.
inline __m256i spread_word(const void* x) {
  int32_t word;
  std::memcpy(&word, x, 4);
  return _mm256_set1_epi32(word);
}

template <int R, bool kFourBit>
void dot_tile(const uint8_t* unit, const Activation& a, int row0, float (*y)[kLanes]) {
  const int groups = a.groups;
  const int64_t inputs = int64_t(groups) * kGroup;
  const int8_t* x = a.values.data() + row0 * inputs;
  const float* scales = a.scale.data() + row0 * groups;
  const float* sums = a.scaled_sum.data() + row0 * groups;
  const int16_t* wide = kFourBit ? nullptr : a.wide.data() + row0 * inputs;
  const int32_t* whole_sums = a.sum.data() + row0 * groups;
  const __m256i nibble = _mm256_set1_epi8(15), low = _mm256_set1_epi16(255), ones = _mm256_set1_epi16(1);
  __m256 total[R][2];
  unrolled<R>([&](auto r) { total[r][0] = total[r][1] = _mm256_setzero_ps(); });
  for (int g = 0; g < groups; ++g, unit += unit_bytes(kFourBit ? kQ4_1 : kQ8_0), x += kGroup) {
    if (row0 == 0)
      for (int64_t line = 0; line < unit_bytes(kFourBit ? kQ4_1 : kQ8_0); line += 64)
        _mm_prefetch(reinterpret_cast<const char*>(unit + kPrefetch + line), _MM_HINT_T0);
    __m256i sum[R][2];
    if constexpr (kFourBit) {
      // In 16 bits: at most 8 × 2 × 15 × 127, which fits.
      const auto add_products = [&](auto i, __m256i first, __m256i second) {
        unrolled<R>([&](auto r) {
          const __m256i values = spread_word(x + r * inputs + 4 * i);
          const __m256i products[2] = {_mm256_maddubs_epi16(first, values), _mm256_maddubs_epi16(second, values)};
          unrolled<2>([&](auto half) {
            if constexpr (i == 0) sum[r][half] = settled(products[half]);
            else sum[r][half] = settled(_mm256_add_epi16(sum[r][half], products[half]));
          });
        });
      };
      unrolled<4>([&](auto j) {
        const __m256i first = load(unit + 64 * j), second = load(unit + 64 * j + 32);
        add_products(Constant<2 * j>(), _mm256_and_si256(first, nibble), _mm256_and_si256(second, nibble));
        add_products(Constant<2 * j + 1>(), _mm256_and_si256(_mm256_srli_epi16(first, 4), nibble),
                     _mm256_and_si256(_mm256_srli_epi16(second, 4), nibble));
      });
      unrolled<R>([&](auto r) {
        unrolled<2>([&](auto half) { sum[r][half] = settled(_mm256_madd_epi16(sum[r][half], ones)); });
      });
    } else {
      // In 16 bits, where pairs of 8-bit products overflow: of each four weights the even ones, then the odd ones.
      unrolled<R>([&](auto r) { sum[r][0] = sum[r][1] = _mm256_set1_epi32(-128 * whole_sums[r * groups + g]); });
      const auto add_products = [&](int at, __m256i first, __m256i second) {
        unrolled<R>([&](auto r) {
          const __m256i values = spread_word(wide + r * inputs + g * kGroup + at);
          sum[r][0] = settled(_mm256_add_epi32(sum[r][0], _mm256_madd_epi16(first, values)));
          sum[r][1] = settled(_mm256_add_epi32(sum[r][1], _mm256_madd_epi16(second, values)));
        });
      };
      unrolled<8>([&](auto j) {
        const __m256i first = load(unit + 64 * j), second = load(unit + 64 * j + 32);
        add_products(4 * j, _mm256_and_si256(first, low), _mm256_and_si256(second, low));
        add_products(4 * j + 2, _mm256_srli_epi16(first, 8), _mm256_srli_epi16(second, 8));
      });
    }
    const uint8_t* tail = unit + (kFourBit ? 256 : 512);
    unrolled<2>([&](auto half) {
      const __m256 scale = load_halves(tail + 16 * half);
      const __m256 minimum = kFourBit ? load_halves(tail + 32 + 16 * half) : _mm256_setzero_ps();
      unrolled<R>([&](auto r) {
        const __m256 both = _mm256_mul_ps(scale, _mm256_set1_ps(scales[r * groups + g]));
        total[r][half] = _mm256_fmadd_ps(both, _mm256_cvtepi32_ps(sum[r][half]), total[r][half]);
        if constexpr (kFourBit)
          total[r][half] = _mm256_fmadd_ps(minimum, _mm256_set1_ps(sums[r * groups + g]), total[r][half]);
      });
    });
  }
  unrolled<R>([&](auto r) {
    unrolled<2>([&](auto half) { _mm256_storeu_ps(y[r] + 8 * half, total[r][half]); });
  });
}
#else
template <int R, bool kFourBit>
void dot_tile(const uint8_t* unit, const Activation& a, int row0, float (*y)[kLanes]) {
  const int groups = a.groups;
  const int64_t inputs = int64_t(groups) * kGroup;
  std::memset(y, 0, sizeof(float) * R * kLanes);
  for (int g = 0; g < groups; ++g, unit += unit_bytes(kFourBit ? kQ4_1 : kQ8_0)) {
    const uint8_t* tail = unit + (kFourBit ? 256 : 512);
    for (int r = 0; r < R; ++r) {
      const int8_t* x = a.values.data() + (row0 + r) * inputs + g * kGroup;
      int32_t sum[kLanes] = {};
      for (int i = 0; i < kGroup; ++i)
        for (int o = 0; o < kLanes; ++o) {
          const int w = kFourBit ? (unit[i / 8 * 64 + o * 4 + i % 4] >> (i % 8 / 4 * 4)) & 15
                                 : int(unit[i / 4 * 64 + o * 4 + i % 4]) - 128;
          sum[o] += w * x[i];
        }
      const int64_t at = int64_t(row0 + r) * groups + g;
      for (int o = 0; o < kLanes; ++o) {
        y[r][o] += half_at(tail + 2 * o) * a.scale.data()[at] * float(sum[o]);
        if (kFourBit) y[r][o] += half_at(tail + 32 + 2 * o) * a.scaled_sum.data()[at];
      }
    }
  }
}
#endif

// One tile of outputs for up to R rows.
template <int R>
void dot_up_to(const Job& job, const uint8_t* unit, int row0, int rows, float (*y)[kLanes]) {
  if constexpr (R > 1)
    if (rows < R) return dot_up_to<R - 1>(job, unit, row0, rows, y);
  if (job.linear.four_bit()) dot_tile<R, true>(unit, job.activation, row0, y);
  else dot_tile<R, false>(unit, job.activation, row0, y);
}

}  // namespace

void dot_pair(const Job& job, int pair) {
  const int64_t tile_bytes = job.linear.groups() * unit_bytes(job.linear.kind);
  const uint8_t* units = job.linear.units + int64_t(pair) * 2 * tile_bytes;
  alignas(64) float y[2][kBlock][kLanes];
  for (int begin = 0; begin < job.activation.rows; begin += kBlock) {
    const int rows = std::min(kBlock, job.activation.rows - begin);
    for (int t = 0; t < 2; ++t)
      for (int r = 0; r < rows; r += kBatch)
        dot_up_to<kBatch>(job, units + t * tile_bytes, begin + r, rows - r, y[t] + r);
    for (int r = 0; r < rows; ++r) job.finish(pair, begin + r, y[0][r], y[1][r]);
  }
}

// Scales say so when a row is not finite, because 8-bit integers cannot.
void quantise_row(Activation& a, int row, const float* x, int64_t inputs, const float* weight, float factor) {
  const int groups = int(inputs / kGroup);
  for (int g = 0; g < groups; ++g) {
    int8_t* q = a.values.data() + row * inputs + g * kGroup;
    float largest, poison;
    int32_t sum = 0;
#if defined(CS_AVX512)
    const auto part = [&](int64_t at) {
      const __m512 v = _mm512_mul_ps(_mm512_loadu_ps(x + at), _mm512_set1_ps(factor));
      return weight == nullptr ? v : _mm512_mul_ps(v, _mm512_loadu_ps(weight + at));
    };
    const __m512 low = part(g * kGroup), high = part(g * kGroup + 16);
    constexpr int kNotFinite = 0x99;
    const bool finite = (_mm512_fpclass_ps_mask(low, kNotFinite) | _mm512_fpclass_ps_mask(high, kNotFinite)) == 0;
    poison = finite ? 0.0f : std::nanf("");
    largest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(low), _mm512_abs_ps(high)));
    const __m512 inverse = _mm512_set1_ps(finite && largest > 0.0f ? 127.0f / largest : 0.0f);
    const __m512i a0 = _mm512_cvtps_epi32(_mm512_mul_ps(low, inverse));
    const __m512i a1 = _mm512_cvtps_epi32(_mm512_mul_ps(high, inverse));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(q), _mm512_cvtepi32_epi8(a0));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(q + 16), _mm512_cvtepi32_epi8(a1));
    sum = finite ? _mm512_reduce_add_epi32(_mm512_add_epi32(a0, a1)) : 0;
#elif defined(CS_AVX2)
    Vec v[4], highest = zero(), not_finite = zero();
    for (int i = 0; i < 4; ++i) {
      const int64_t at = g * kGroup + i * kVec;
      v[i] = scale_by(load(x + at), spread(factor));
      if (weight != nullptr) v[i] = scale_by(v[i], load(weight + at));
      highest = larger(highest, _mm256_andnot_ps(spread(-0.0f), v[i]));
      not_finite = add(not_finite, subtract(v[i], v[i]));  // zero, or a NaN
    }
    poison = total(not_finite);
    largest = cs::largest(highest);
    const bool finite = poison == 0.0f;
    const Vec inverse = spread(finite && largest > 0.0f ? 127.0f / largest : 0.0f);
    __m256i whole[4], sums = _mm256_setzero_si256();
    for (int i = 0; i < 4; ++i) {
      whole[i] = finite ? _mm256_cvtps_epi32(scale_by(v[i], inverse)) : _mm256_setzero_si256();
      sums = _mm256_add_epi32(sums, whole[i]);
    }
    const __m256i words[2] = {_mm256_packs_epi32(whole[0], whole[1]), _mm256_packs_epi32(whole[2], whole[3])};
    if (a.widened)
      for (int i = 0; i < 2; ++i) {
        const __m256i swapped = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(words[i], 0xd8), 0xd8);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(a.wide.data() + row * inputs + g * kGroup + i * 16),
                            _mm256_permute4x64_epi64(swapped, 0xd8));
      }
    // Packing interleaves halves of vectors: [0 2 4 6 1 3 5 7] in words of four bytes.
    const __m256i packed = _mm256_packs_epi16(words[0], words[1]);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(q),
                        _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
    const __m128i pairs = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    const __m128i one = _mm_add_epi32(pairs, _mm_shuffle_epi32(pairs, 0x4e));
    sum = _mm_cvtsi128_si32(_mm_add_epi32(one, _mm_shuffle_epi32(one, 0xb1)));
#else
    float v[kGroup];
    largest = poison = 0.0f;
    for (int i = 0; i < kGroup; ++i)
      v[i] = x[g * kGroup + i] * factor * (weight == nullptr ? 1.0f : weight[g * kGroup + i]);
    for (int i = 0; i < kGroup; ++i) {
      largest = std::max(largest, std::fabs(v[i]));
      poison += v[i] * 0.0f;
    }
    const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
    for (int i = 0; i < kGroup; ++i) {
      const int32_t value = poison == 0.0f ? int32_t(std::nearbyint(v[i] * inverse)) : 0;
      q[i] = int8_t(value);
      sum += value;
    }
#endif
    const float scale = largest / 127.0f + poison;
    const int64_t at = int64_t(row) * groups + g;
    a.scale.data()[at] = scale;
    a.scaled_sum.data()[at] = scale * float(sum);
    a.sum.data()[at] = sum;
  }
}

}  // namespace cs
