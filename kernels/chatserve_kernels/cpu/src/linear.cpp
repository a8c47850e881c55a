#include "linear.h"

#include "amx.h"

namespace cs {

namespace {

int g_tile_threshold = 8;

constexpr int64_t kPrefetch = 4096;  // bytes ahead of the weights being multiplied (measured)

int64_t padded_outputs(int64_t outputs) { return (outputs + 31) / 32 * 32; }
int64_t group_pairs(int64_t inputs) { return (inputs / kGroup + 1) / 2; }

struct Block {
  uint8_t q[kGroup];  // 4-bit: 0…15, 8-bit: q + 128
  uint16_t scale, minimum;
};

int64_t block_bytes(int64_t kind) { return kind == kQ4_0 ? 18 : kind == kQ4_1 ? 20 : 34; }

Block read_block(int64_t kind, const uint8_t* bytes) {
  Block block{};
  std::memcpy(&block.scale, bytes, 2);
  if (kind == kQ8_0) {
    for (int i = 0; i < kGroup; ++i) block.q[i] = uint8_t(bytes[2 + i] + 128);
    return block;
  }
  if (kind == kQ4_1) std::memcpy(&block.minimum, bytes + 2, 2);
  else block.minimum = float_to_half(-8.0f * half_to_float(block.scale));
  const uint8_t* nibbles = bytes + (kind == kQ4_1 ? 4 : 2);
  for (int i = 0; i < 16; ++i) {
    block.q[i] = nibbles[i] & 15;
    block.q[i + 16] = nibbles[i] >> 4;
  }
  return block;
}

void put_dots(int64_t kind, const Block& block, int lane, uint8_t* unit) {
  if (kind == kQ8_0) {
    for (int i = 0; i < kGroup; ++i) unit[i / 4 * 64 + lane * 4 + i % 4] = block.q[i];
    std::memcpy(unit + 512 + 2 * lane, &block.scale, 2);
    return;
  }
  for (int j = 0; j < 4; ++j)
    for (int i = 0; i < 4; ++i)
      unit[j * 64 + lane * 4 + i] = uint8_t(block.q[j * 8 + i] | block.q[j * 8 + 4 + i] << 4);
  std::memcpy(unit + 256 + 2 * lane, &block.scale, 2);
  std::memcpy(unit + 288 + 2 * lane, &block.minimum, 2);
}

void put_tiles(int64_t kind, const Block& block, int lane, int half, uint8_t* unit) {
  if (kind == kQ8_0) {
    for (int i = 0; i < 16; ++i) {
      unit[lane * 64 + half * 16 + i] = uint8_t(block.q[i] - 128);
      unit[lane * 64 + 32 + half * 16 + i] = uint8_t(block.q[16 + i] - 128);
    }
    std::memcpy(unit + 1024 + half * 32 + 2 * lane, &block.scale, 2);
    return;
  }
  for (int i = 0; i < 16; ++i) unit[lane * 32 + half * 16 + i] = uint8_t(block.q[i] | block.q[i + 16] << 4);
  std::memcpy(unit + 512 + half * 32 + 2 * lane, &block.scale, 2);
  std::memcpy(unit + 576 + half * 32 + 2 * lane, &block.minimum, 2);
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

// ---------------------------------------------------------------------------------------------------------- dots

// y[r][16] = one tile of outputs for R rows from row0 on.
#if defined(CS_AVX512)
inline __m512i quad(const int8_t* bytes) {
  int32_t word;
  std::memcpy(&word, bytes, 4);
  return _mm512_set1_epi32(word);
}

template <int R, bool kFourBit>
void dot_tile(const uint8_t* unit, const Activation& a, int row0, float (*y)[kLanes]) {
  const int groups = a.groups;
  const int64_t inputs = int64_t(groups) * kGroup;
  const int8_t* x = a.values.data() + row0 * inputs;
  const __m512i nibble = _mm512_set1_epi8(15);
  __m512 total[R];
  for (int r = 0; r < R; ++r) total[r] = _mm512_setzero_ps();
  for (int g = 0; g < groups; ++g, unit += dots_unit(kFourBit ? kQ4_1 : kQ8_0), x += kGroup) {
    // Beyond what the hardware prefetchers run ahead: a tile is a stream of its own.
    for (int64_t line = 0; line < dots_unit(kFourBit ? kQ4_1 : kQ8_0); line += 64)
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
          sum[r] = _mm512_dpbusd_epi32(sum[r], low, quad(x + r * inputs + 8 * j));
          sum[r] = _mm512_dpbusd_epi32(sum[r], high, quad(x + r * inputs + 8 * j + 4));
        }
      }
    } else {
      for (int j = 0; j < 8; ++j) {
        const __m512i w = _mm512_loadu_si512(unit + 64 * j);
        for (int r = 0; r < R; ++r) sum[r] = _mm512_dpbusd_epi32(sum[r], w, quad(x + r * inputs + 4 * j));
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
template <int R, bool kFourBit>
void dot_tile(const uint8_t* unit, const Activation& a, int row0, float (*y)[kLanes]) {
  const int groups = a.groups;
  const int64_t inputs = int64_t(groups) * kGroup;
  const int8_t* x = a.values.data() + row0 * inputs;
  const __m256i nibble = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1), flip = _mm256_set1_epi8(-128);
  __m256 total[R][2];
  for (int r = 0; r < R; ++r) total[r][0] = total[r][1] = _mm256_setzero_ps();
  const auto load = [](const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); };
  const auto quad = [](const int8_t* bytes) {
    int32_t word;
    std::memcpy(&word, bytes, 4);
    return _mm256_set1_epi32(word);
  };
  for (int g = 0; g < groups; ++g, unit += dots_unit(kFourBit ? kQ4_1 : kQ8_0), x += kGroup) {
    const uint8_t* tail = unit + (kFourBit ? 256 : 512);
    for (int half = 0; half < 2; ++half) {
      __m256i sum[R];
      for (int r = 0; r < R; ++r) sum[r] = _mm256_setzero_si256();
      if constexpr (kFourBit) {
        for (int j = 0; j < 4; ++j) {
          const __m256i both = load(unit + 64 * j + 32 * half);
          const __m256i low = _mm256_and_si256(both, nibble);
          const __m256i high = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble);
          for (int r = 0; r < R; ++r) {
            // At most 4 × 15 × 127 in 16 bits: no saturation.
            const __m256i products = _mm256_add_epi16(_mm256_maddubs_epi16(low, quad(x + r * inputs + 8 * j)),
                                                      _mm256_maddubs_epi16(high, quad(x + r * inputs + 8 * j + 4)));
            sum[r] = _mm256_add_epi32(sum[r], _mm256_madd_epi16(products, ones));
          }
        }
      } else {
        for (int j = 0; j < 8; ++j) {
          const __m256i w = _mm256_xor_si256(load(unit + 64 * j + 32 * half), flip);
          const __m256i magnitude = _mm256_abs_epi8(w);
          for (int r = 0; r < R; ++r) {
            // |w| × (x with w's sign): pairs stay below 2 × 128 × 127.
            const __m256i products =
                _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(quad(x + r * inputs + 4 * j), w));
            sum[r] = _mm256_add_epi32(sum[r], _mm256_madd_epi16(products, ones));
          }
        }
      }
      const auto halves = [&](int offset) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(tail + offset + 16 * half)));
      };
      const __m256 scale = halves(0);
      for (int r = 0; r < R; ++r) {
        const __m256 both = _mm256_mul_ps(scale, _mm256_set1_ps(a.scale.data()[(row0 + r) * groups + g]));
        total[r][half] = _mm256_fmadd_ps(both, _mm256_cvtepi32_ps(sum[r]), total[r][half]);
      }
      if constexpr (kFourBit) {
        const __m256 minimum = halves(32);
        for (int r = 0; r < R; ++r)
          total[r][half] = _mm256_fmadd_ps(
              minimum, _mm256_set1_ps(a.scaled_sum.data()[(row0 + r) * groups + g]), total[r][half]);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int half = 0; half < 2; ++half) _mm256_storeu_ps(y[r] + 8 * half, total[r][half]);
}
#else
template <int R, bool kFourBit>
void dot_tile(const uint8_t* unit, const Activation& a, int row0, float (*y)[kLanes]) {
  const int groups = a.groups;
  const int64_t inputs = int64_t(groups) * kGroup;
  std::memset(y, 0, sizeof(float) * R * kLanes);
  for (int g = 0; g < groups; ++g, unit += dots_unit(kFourBit ? kQ4_1 : kQ8_0)) {
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

template <int R>
void dot_rows(const Job& job, int pair, int row0) {
  alignas(64) float y[2][R][kLanes];
  const int groups = job.linear.groups();
  const uint8_t* unit = job.linear.dots + int64_t(pair) * 2 * groups * dots_unit(job.linear.kind);
  for (int t = 0; t < 2; ++t, unit += int64_t(groups) * dots_unit(job.linear.kind)) {
    if (job.linear.four_bit()) dot_tile<R, true>(unit, job.activation, row0, y[t]);
    else dot_tile<R, false>(unit, job.activation, row0, y[t]);
  }
  for (int r = 0; r < R; ++r) job.finish(pair, row0 + r, y[0][r], y[1][r]);
}

void dot_pair(const Job& job, int pair) {
  int row = 0;
  for (; row + 8 <= job.activation.rows; row += 8) dot_rows<8>(job, pair, row);
  switch (job.activation.rows - row) {
    case 1: return dot_rows<1>(job, pair, row);
    case 2: return dot_rows<2>(job, pair, row);
    case 3: return dot_rows<3>(job, pair, row);
    case 4: return dot_rows<4>(job, pair, row);
    case 5: return dot_rows<5>(job, pair, row);
    case 6: return dot_rows<6>(job, pair, row);
    case 7: return dot_rows<7>(job, pair, row);
  }
}

// Quantise one row; scales say so when it is not finite, because 8-bit integers cannot.
void quantise_row(Activation& a, int row, const float* x, int64_t inputs, const float* weight, float factor) {
  const int groups = int(inputs / kGroup);
  for (int g = 0; g < groups; ++g) {
    float v[kGroup], largest = 0.0f, poison = 0.0f;
    for (int i = 0; i < kGroup; ++i)
      v[i] = x[g * kGroup + i] * factor * (weight == nullptr ? 1.0f : weight[g * kGroup + i]);
    for (int i = 0; i < kGroup; ++i) {
      largest = std::max(largest, std::fabs(v[i]));
      poison += v[i] * 0.0f;
    }
    const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
    const float scale = largest / 127.0f + poison;
    int8_t* q = a.values.data() + row * inputs + g * kGroup;
    int32_t sum = 0;
    for (int i = 0; i < kGroup; ++i) {
      const int32_t value = poison == 0.0f ? int32_t(std::nearbyint(v[i] * inverse)) : 0;
      q[i] = int8_t(value);
      sum += value;
    }
    const int64_t at = int64_t(row) * groups + g;
    a.scale.data()[at] = scale;
    a.scaled_sum.data()[at] = scale * float(sum);
    a.sum.data()[at] = sum;
  }
}

// --------------------------------------------------------------------------------------------------------- tiles

#if defined(CS_AMX)

// One (16 outputs, 64 inputs) unit → two tiles [16 outputs][32 inputs] bfloat16: (inputs 0…15 and 32…47), (16…31 and
// 48…63). prepare() packs activations in the same order.
void expand_4bit(const uint8_t* unit, uint16_t* tiles) {
  alignas(64) float scale[2][16], minimum[2][16];
  const auto halves = [&](int offset) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(unit + offset)));
  };
  _mm512_store_ps(scale[0], halves(512));
  _mm512_store_ps(scale[1], halves(544));
  _mm512_store_ps(minimum[0], halves(576));
  _mm512_store_ps(minimum[1], halves(608));
  const __m512 steps = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i nibble = _mm512_set1_epi16(15);
  const __m512i second = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
  for (int o = 0; o < 16; ++o) {
    // All 2 × 16 values this output's two blocks can hold; the nibbles then choose.
    const __m512 a = _mm512_fmadd_ps(steps, _mm512_set1_ps(scale[0][o]), _mm512_set1_ps(minimum[0][o]));
    const __m512 b = _mm512_fmadd_ps(steps, _mm512_set1_ps(scale[1][o]), _mm512_set1_ps(minimum[1][o]));
    const __m512i values = (__m512i)_mm512_cvtne2ps_pbh(b, a);
    const __m512i bytes = _mm512_cvtepu8_epi16(_mm256_load_si256(reinterpret_cast<const __m256i*>(unit + 32 * o)));
    const __m512i low = _mm512_ternarylogic_epi32(bytes, nibble, second, 0xea);  // (bytes & nibble) | second
    const __m512i high = _mm512_or_si512(_mm512_srli_epi16(bytes, 4), second);
    _mm512_store_si512(tiles + 32 * o, _mm512_permutexvar_epi16(low, values));
    _mm512_store_si512(tiles + 512 + 32 * o, _mm512_permutexvar_epi16(high, values));
  }
}

void expand_8bit(const uint8_t* unit, uint16_t* tiles) {
  alignas(64) float scale[2][16];
  for (int half = 0; half < 2; ++half)
    _mm512_store_ps(scale[half], _mm512_cvtph_ps(_mm256_loadu_si256(
                                     reinterpret_cast<const __m256i*>(unit + 1024 + 32 * half))));
  for (int o = 0; o < 16; ++o)
    for (int t = 0; t < 2; ++t) {
      const uint8_t* bytes = unit + 64 * o + 32 * t;
      const auto part = [&](int half) {
        const __m128i q = _mm_load_si128(reinterpret_cast<const __m128i*>(bytes + 16 * half));
        return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(q)), _mm512_set1_ps(scale[half][o]));
      };
      _mm512_store_si512(tiles + 512 * t + 32 * o, (__m512i)_mm512_cvtne2ps_pbh(part(1), part(0)));
    }
}

// C tiles hold [16 outputs][16 rows]; rows want their outputs side by side.
void finish_rows(const Job& job, int pair, int row0, int rows, float* c0, float* c1) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; ++i) {
    a[i] = _mm512_load_si512(c0 + 16 * i);
    b[i] = _mm512_load_si512(c1 + 16 * i);
  }
  transpose_16x16(a);
  transpose_16x16(b);
  for (int i = 0; i < 16; ++i) {
    _mm512_store_si512(c0 + 16 * i, a[i]);
    _mm512_store_si512(c1 + 16 * i, b[i]);
  }
  for (int r = 0; r < rows; ++r) job.finish(pair, row0 + r, c0 + 16 * r, c1 + 16 * r);
}

// Expands a pair of weight tiles once and multiplies all rows with it, 32 at a time.
void tile_pair(const Job& job, int pair) {
  static thread_local Buffer<uint16_t> scratch;
  const Linear& linear = job.linear;
  const Activation& a = job.activation;
  const int units = int(group_pairs(linear.inputs));
  const int64_t unit_bytes = tiles_unit(linear.kind);
  const uint8_t* first = linear.tiles + int64_t(pair) * 2 * units * unit_bytes;
  const uint8_t* second = first + units * unit_bytes;
  uint16_t* expanded = scratch.reserve(size_t(units) * 2048);
  alignas(64) float c[4][256];
  const auto expand = [&](int u) {
    if (linear.four_bit()) {
      expand_4bit(first + u * unit_bytes, expanded + u * 2048);
      expand_4bit(second + u * unit_bytes, expanded + u * 2048 + 1024);
    } else {
      expand_8bit(first + u * unit_bytes, expanded + u * 2048);
      expand_8bit(second + u * unit_bytes, expanded + u * 2048 + 1024);
    }
  };
  for (int row0 = 0; row0 < a.rows; row0 += 32) {
    const bool two = a.rows - row0 > 16;
    const uint16_t* x0 = a.packed.data() + int64_t(row0 / 16) * units * 1024;
    const uint16_t* x1 = x0 + int64_t(units) * 1024;
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    if (row0 == 0) expand(0);
    for (int u = 0; u < units; ++u) {
      // One unit ahead, so that the tile loads find their stores completed.
      if (row0 == 0 && u + 1 < units) {
        for (int64_t line = 0; line < unit_bytes; line += 64) {
          _mm_prefetch(reinterpret_cast<const char*>(first + (u + 1) * unit_bytes + kPrefetch + line), _MM_HINT_T0);
          _mm_prefetch(reinterpret_cast<const char*>(second + (u + 1) * unit_bytes + kPrefetch + line), _MM_HINT_T0);
        }
        expand(u + 1);
      }
      for (int t = 0; t < 2; ++t) {
        TILE_LOAD(4, expanded + u * 2048 + t * 512, 64);
        TILE_LOAD(5, expanded + u * 2048 + 1024 + t * 512, 64);
        TILE_LOAD(6, x0 + (u * 2 + t) * 512, 64);
        TILE_MULTIPLY(0, 4, 6);
        TILE_MULTIPLY(1, 5, 6);
        if (two) {
          TILE_LOAD(7, x1 + (u * 2 + t) * 512, 64);
          TILE_MULTIPLY(2, 4, 7);
          TILE_MULTIPLY(3, 5, 7);
        }
      }
    }
    TILE_STORE(0, c[0], 64);
    TILE_STORE(1, c[1], 64);
    finish_rows(job, pair, row0, std::min(16, a.rows - row0), c[0], c[1]);
    if (two) {
      TILE_STORE(2, c[2], 64);
      TILE_STORE(3, c[3], 64);
      finish_rows(job, pair, row0 + 16, std::min(16, a.rows - row0 - 16), c[2], c[3]);
    }
  }
}

// 16 rows of activations → [inputs / 32][16 pairs][16 rows][2] bfloat16, in the order of expand_4bit.
void pack_rows(Activation& a, int tile, const float* x, int64_t stride, int rows, int64_t inputs,
               const float* weight, const float* factor) {
  const int units = int(group_pairs(inputs));
  uint16_t* target = a.packed.data() + int64_t(tile) * units * 1024;
  const auto load = [&](int r, int64_t at) {
    if (r >= rows || at >= inputs) return _mm512_setzero_ps();
    __m512 v = _mm512_mul_ps(_mm512_loadu_ps(x + r * stride + at), _mm512_set1_ps(factor[r]));
    return weight == nullptr ? v : _mm512_mul_ps(v, _mm512_loadu_ps(weight + at));
  };
  for (int u = 0; u < units; ++u)
    for (int t = 0; t < 2; ++t) {
      __m512i v[16];
      for (int r = 0; r < 16; ++r) {
        const int64_t at = int64_t(u) * 64 + t * 16;
        v[r] = (__m512i)_mm512_cvtne2ps_pbh(load(r, at + 32), load(r, at));
      }
      transpose_16x16(v);
      for (int p = 0; p < 16; ++p) _mm512_store_si512(target + (u * 2 + t) * 512 + 32 * p, v[p]);
    }
}
#endif

float norm_factor(const float* x, int64_t inputs, float eps) {
  float sum[16] = {};
  for (int64_t i = 0; i + 16 <= inputs; i += 16)
    for (int j = 0; j < 16; ++j) sum[j] += x[i + j] * x[i + j];
  float total = 0.0f;
  for (int j = 0; j < 16; ++j) total += sum[j];
  return 1.0f / std::sqrt(total / float(inputs) + eps);
}

}  // namespace

int tile_threshold() { return g_tile_threshold; }
void set_tile_threshold(int rows) { g_tile_threshold = rows; }

int64_t dots_bytes(int64_t kind, int64_t outputs, int64_t inputs) {
  return padded_outputs(outputs) / kLanes * (inputs / kGroup) * dots_unit(kind);
}

int64_t tiles_bytes(int64_t kind, int64_t outputs, int64_t inputs) {
  return padded_outputs(outputs) / kLanes * group_pairs(inputs) * tiles_unit(kind);
}

void pack(ThreadPool& pool, int64_t kind, const uint8_t* blocks, int64_t outputs, int64_t inputs, uint8_t* dots,
          uint8_t* tiles) {
  const int64_t groups = inputs / kGroup, units = group_pairs(inputs);
  pool.run(int(padded_outputs(outputs) / kLanes), [&](int tile) {
    uint8_t* dot_row = dots + tile * groups * dots_unit(kind);
    uint8_t* tile_row = tiles == nullptr ? nullptr : tiles + tile * units * tiles_unit(kind);
    std::memset(dot_row, 0, size_t(groups * dots_unit(kind)));
    if (tile_row != nullptr) std::memset(tile_row, 0, size_t(units * tiles_unit(kind)));
    for (int lane = 0; lane < kLanes && tile * kLanes + lane < outputs; ++lane) {
      const uint8_t* row = blocks + (int64_t(tile) * kLanes + lane) * groups * block_bytes(kind);
      for (int64_t g = 0; g < groups; ++g) {
        const Block block = read_block(kind, row + g * block_bytes(kind));
        put_dots(kind, block, lane, dot_row + g * dots_unit(kind));
        if (tile_row != nullptr) put_tiles(kind, block, lane, int(g % 2), tile_row + g / 2 * tiles_unit(kind));
      }
    }
  });
}

void prepare(ThreadPool& pool, Activation& a, bool tiled, const float* x, int64_t stride, int rows, int64_t inputs,
             const float* norm_weight, float eps) {
  a.rows = rows;
  a.groups = int(inputs / kGroup);
  a.tiled = tiled;
#if defined(CS_AMX)
  if (tiled) {
    const int row_tiles = (rows + 15) / 16;
    a.packed.reserve(size_t(row_tiles) * size_t(group_pairs(inputs)) * 1024);
    pool.run(row_tiles, [&](int tile) {
      const int count = std::min(16, rows - tile * 16);
      const float* begin = x + int64_t(tile) * 16 * stride;
      float factor[16];
      for (int r = 0; r < count; ++r)
        factor[r] = norm_weight == nullptr ? 1.0f : norm_factor(begin + r * stride, inputs, eps);
      pack_rows(a, tile, begin, stride, count, inputs, norm_weight, factor);
    });
    return;
  }
#endif
  a.values.reserve(size_t(rows) * size_t(inputs));
  a.scale.reserve(size_t(rows) * size_t(a.groups));
  a.scaled_sum.reserve(size_t(rows) * size_t(a.groups));
  a.sum.reserve(size_t(rows) * size_t(a.groups));
  const auto quantise = [&](int row) {
    const float* begin = x + row * stride;
    const float factor = norm_weight == nullptr ? 1.0f : norm_factor(begin, inputs, eps);
    quantise_row(a, row, begin, inputs, norm_weight, factor);
  };
  // A row costs less than waking another thread for it.
  if (rows <= 8)
    for (int row = 0; row < rows; ++row) quantise(row);
  else pool.run(rows, quantise);
}

void multiply(ThreadPool& pool, const Linear& linear, const Activation& activation, Epilogue epilogue, float* out,
              int64_t stride) {
  const Job job{linear, activation, epilogue, out, stride};
  // Chunks large enough to be worth a claim, small enough that nobody waits long for the last one.
  const int pairs = linear.pairs();
  const int step = std::clamp(pairs / (pool.size() * 6), 1, 16);
  pool.run((pairs + step - 1) / step, [&](int chunk) {
    const int end = std::min(pairs, (chunk + 1) * step);
#if defined(CS_AMX)
    if (activation.tiled) {
      const TileScope scope;
      for (int pair = chunk * step; pair < end; ++pair) tile_pair(job, pair);
      return;
    }
#endif
    for (int pair = chunk * step; pair < end; ++pair) dot_pair(job, pair);
  });
}

}  // namespace cs
