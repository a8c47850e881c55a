// Products in AMX tiles: weights expanded to bfloat16 in the L1 cache, times bfloat16 activations.
#include "amx.h"
#include "linear_job.h"

namespace cs {

#if defined(CS_AMX)

namespace {

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

}  // namespace

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

#else

void tile_pair(const Job&, int) {}
void pack_rows(Activation&, int, const float*, int64_t, int, int64_t, const float*, const float*) {}

#endif

}  // namespace cs
