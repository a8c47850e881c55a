// Products in AMX tiles of bfloat16: activations times weights unpacked in the L1 cache.
//
// A tile of weights is one unit of the layout: 16 outputs × 32 inputs, as [16 pairs of inputs][16 outputs][2]. Few rows:
// it holds the stored integers, which bfloat16 holds exactly, and sums are scaled group by group. Many rows: it holds
// the weights themselves, rounded to bfloat16, and sums run through; that costs more per unit and less per row.
#include "amx.h"
#include "linear_job.h"

namespace cs {

#if defined(CS_AMX)

namespace {

constexpr int kTile = 512;          // values of a tile
constexpr int kGroupsAtOnce = 9;    // units unpacked before rows are multiplied with them: 9 KB for each weight tile
constexpr float kIntegerBias = 128.0f;  // 0x4300 | q is 128 + q in bfloat16

// What a pair of inputs has in common in the layout: they lie at the same place in the two halves of a dword. Activations
// are packed in this order of each 8.
alignas(64) constexpr uint16_t kOrder[32] = {0,  2,  4,  6,  1,  3,  5,  7,  8,  10, 12, 14, 9,  11, 13, 15,
                                             16, 18, 20, 22, 17, 19, 21, 23, 24, 26, 28, 30, 25, 27, 29, 31};

__m512 halves(const uint8_t* bytes) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes)));
}

void prefetch_unit(const uint8_t* unit, int64_t bytes) {
  for (int64_t line = 0; line < bytes; line += 64)
    _mm_prefetch(reinterpret_cast<const char*>(unit + kPrefetch + line), _MM_HINT_T0);
}

// 4-bit unit → 128 + q.
void unpack_integers(const uint8_t* unit, uint16_t* tile) {
  const __m512i bias = _mm512_set1_epi16(0x4300), nibble = _mm512_set1_epi16(15);
  for (int j = 0; j < 4; ++j) {
    const __m512i bytes = _mm512_loadu_si512(unit + 64 * j);
    const auto put = [&](int n, __m512i shifted) {
      _mm512_store_si512(tile + 128 * j + 32 * n, _mm512_ternarylogic_epi32(shifted, nibble, bias, 0xea));
    };
    put(0, bytes);
    put(1, _mm512_srli_epi16(bytes, 4));
    put(2, _mm512_srli_epi16(bytes, 8));
    put(3, _mm512_srli_epi16(bytes, 12));
  }
}

// Two vectors of floats → one of pairs, rounded to bfloat16.
void put_pairs(uint16_t* target, __m512 first, __m512 second) {
  const __m512i half = _mm512_set1_epi32(0x8000);
  const __m512i low = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(first), half), 16);
  const __m512i high = _mm512_add_epi32(_mm512_castps_si512(second), half);
  _mm512_store_si512(target, _mm512_mask_blend_epi16(0xaaaaaaaa, low, high));
}

// Bits at `mask`, read as an integer above 2²³, times scale plus offset: no conversion, and one rounding.
__m512 weight(__m512i bits, int mask, __m512 scale, __m512 offset) {
  const __m512i number = _mm512_ternarylogic_epi32(bits, _mm512_set1_epi32(mask), _mm512_set1_epi32(0x4b000000), 0xea);
  return _mm512_fmadd_ps(_mm512_castsi512_ps(number), scale, offset);
}

void unpack_4bit(const uint8_t* unit, uint16_t* tile) {
  const __m512 scale = halves(unit + 256), minimum = halves(unit + 288);
  __m512 scales[3], offsets[3];  // of nibbles at bits 8, 12 and 16
  for (int i = 0; i < 3; ++i) {
    scales[i] = _mm512_mul_ps(scale, _mm512_set1_ps(1.0f / float(256 << 4 * i)));
    offsets[i] = _mm512_fnmadd_ps(_mm512_set1_ps(8388608.0f), scales[i], minimum);
  }
  for (int j = 0; j < 4; ++j) {
    const __m512i middle = _mm512_loadu_si512(unit + 64 * j);
    const __m512i up = _mm512_slli_epi32(middle, 8), down = _mm512_srli_epi32(middle, 12);
    const auto value = [&](__m512i bits, int place) {
      return weight(bits, 0xf00 << 4 * place, scales[place], offsets[place]);
    };
    uint16_t* target = tile + 128 * j;
    put_pairs(target, value(up, 0), value(middle, 2));
    put_pairs(target + 32, value(up, 1), value(down, 0));
    put_pairs(target + 64, value(middle, 0), value(down, 1));
    put_pairs(target + 96, value(middle, 1), value(down, 2));
  }
}

void unpack_8bit(const uint8_t* unit, uint16_t* tile) {
  const __m512 scale = _mm512_mul_ps(halves(unit + 512), _mm512_set1_ps(1.0f / 256.0f));
  const __m512 offset = _mm512_mul_ps(scale, _mm512_set1_ps(-8388608.0f - 256.0f * 128.0f));
  for (int j = 0; j < 4; ++j)
    for (int half = 0; half < 2; ++half) {
      const __m512i bytes = _mm512_loadu_si512(unit + 128 * j + 64 * half);
      const auto value = [&](__m512i bits) { return weight(bits, 0xff00, scale, offset); };
      uint16_t* target = tile + 128 * j + 32 * half;
      put_pairs(target, value(_mm512_slli_epi32(bytes, 8)), value(_mm512_srli_epi32(bytes, 8)));
      put_pairs(target + 64, value(bytes), value(_mm512_srli_epi32(bytes, 16)));
    }
}

// The 16 outputs of one weight tile for up to kRows ≤ 16 rows → totals [kRows][16].
template <int kRows>
void scale_sums(const Linear& linear, const Activation& a, const uint8_t* units, float* totals) {
  constexpr int kSlots = 4;
  alignas(64) uint16_t tiles[kSlots * kTile];
  alignas(64) float products[kSlots][256];
  const int groups = a.groups;
  const int64_t bytes = unit_bytes(linear.kind);
  const auto unpack = [&](int g) {
    if (g >= groups) return;
    prefetch_unit(units + g * bytes, bytes);
    unpack_integers(units + g * bytes, tiles + g % kSlots * kTile);
  };
  const auto multiply = [&](int g) {
    if (g >= groups) return;
    TILE_ZERO(5);
    TILE_LOAD(6, a.tile(0) + g * kTile, 64);
    TILE_LOAD(4, tiles + g % kSlots * kTile, 64);
    TILE_MULTIPLY(5, 6, 4);
    TILE_STORE(5, products[g % kSlots], 64);
  };
  __m512 total[kRows];
  for (int r = 0; r < kRows; ++r) total[r] = _mm512_setzero_ps();
  // Each stage a group ahead of the next, so that loads find their stores completed.
  unpack(0);
  unpack(1);
  multiply(0);
  for (int g = 0; g < groups; ++g) {
    unpack(g + 2);
    multiply(g + 1);
    const uint8_t* tail = units + g * bytes + 256;
    const __m512 scale = halves(tail);
    const __m512 minimum = _mm512_fnmadd_ps(_mm512_set1_ps(kIntegerBias), scale, halves(tail + 32));
    for (int r = 0; r < kRows; ++r) {
      total[r] = _mm512_fmadd_ps(scale, _mm512_load_ps(products[g % kSlots] + 16 * r), total[r]);
      total[r] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(a.packed_sum.data()[g * 16 + r]), total[r]);
    }
  }
  for (int r = 0; r < kRows; ++r) _mm512_store_ps(totals + 16 * r, total[r]);
}

void clear_sums() {
  TILE_ZERO(0);
  TILE_ZERO(1);
  TILE_ZERO(2);
  TILE_ZERO(3);
}

void load_sums(const float* c) {
  TILE_LOAD(0, c, 64);
  TILE_LOAD(1, c + 256, 64);
  TILE_LOAD(2, c + 512, 64);
  TILE_LOAD(3, c + 768, 64);
}

void store_sums(float* c) {
  TILE_STORE(0, c, 64);
  TILE_STORE(1, c + 256, 64);
  TILE_STORE(2, c + 512, 64);
  TILE_STORE(3, c + 768, 64);
}

// Tiles 0…3 += 16 or 32 rows (second is null for 16) × a pair of weight tiles.
void multiply_tiles(const uint16_t* first_rows, const uint16_t* second_rows, const uint16_t* weights) {
  TILE_LOAD(4, weights, 64);
  TILE_LOAD(5, weights + kTile, 64);
  TILE_LOAD(6, first_rows, 64);
  TILE_MULTIPLY(0, 6, 4);
  TILE_MULTIPLY(1, 6, 5);
  if (second_rows == nullptr) return;
  TILE_LOAD(7, second_rows, 64);
  TILE_MULTIPLY(2, 7, 4);
  TILE_MULTIPLY(3, 7, 5);
}

// The sums of a pair of weight tiles for all rows: finish(row tile, sums [2 weight tiles][16 rows][16 outputs]).
template <class F>
void multiply_pair(const Job& job, int pair, const F& finish) {
  static thread_local Buffer<float> memory;
  const Linear& linear = job.linear;
  const Activation& a = job.activation;
  const int64_t bytes = unit_bytes(linear.kind);
  const uint8_t* units[2] = {linear.units + int64_t(pair) * 2 * a.groups * bytes, nullptr};
  units[1] = units[0] + a.groups * bytes;
  const int row_tiles = a.row_tiles();
  float* sums = memory.reserve(size_t(row_tiles + 1) / 2 * 1024);
  if (scales_sums(linear, a)) {
    const auto each = a.rows > 12 ? scale_sums<16> : a.rows > 8 ? scale_sums<12> : scale_sums<8>;
    for (int t = 0; t < 2; ++t) each(linear, a, units[t], sums + t * 256);
    return finish(0, sums);
  }
  // As many groups as the L1 cache holds beside the rows that stream by; the sums wait in the L2 cache meanwhile.
  alignas(64) uint16_t weights[kGroupsAtOnce * 2 * kTile];
  const auto unpack = linear.four_bit() ? unpack_4bit : unpack_8bit;
  const int turns = (a.groups + kGroupsAtOnce - 1) / kGroupsAtOnce;
  for (int turn = 0; turn < turns; ++turn) {
    const int begin = a.groups * turn / turns, end = a.groups * (turn + 1) / turns;
    for (int g = begin; g < end; ++g)
      for (int t = 0; t < 2; ++t) {
        prefetch_unit(units[t] + g * bytes, bytes);
        unpack(units[t] + g * bytes, weights + ((g - begin) * 2 + t) * kTile);
      }
    for (int tile = 0; tile < row_tiles; tile += 2) {
      const bool two = tile + 1 < row_tiles;
      float* c = sums + tile * 512;
      if (turn == 0) clear_sums();
      else load_sums(c);
      for (int g = begin; g < end; ++g)
        multiply_tiles(a.tile(tile) + g * kTile, two ? a.tile(tile + 1) + g * kTile : nullptr,
                       weights + (g - begin) * 2 * kTile);
      store_sums(c);
      if (turn + 1 < turns) continue;
      finish(tile, c);
      if (two) finish(tile + 1, c + 512);
    }
  }
}

}  // namespace

void tile_pair(const Job& job, int pair) {
  multiply_pair(job, pair, [&](int tile, const float* c) {
    const int rows = std::min(16, job.activation.rows - tile * 16);
    for (int r = 0; r < rows; ++r) job.finish(pair, tile * 16 + r, c + 16 * r, c + 256 + 16 * r);
  });
}

void tile_pair_gated(const Job& job, int pair, Activation& gated) {
  // Where these 16 units lie in a group of 32 inputs of the next projection.
  const __m256i order = _mm256_load_si256(reinterpret_cast<const __m256i*>(kOrder));
  multiply_pair(job, pair, [&](int tile, const float* c) {
    uint16_t* target = gated.tile(tile) + pair / 2 * kTile + pair % 2 * 16;
    for (int r = 0; r < 16; ++r) {
      const __m512 units = _mm512_mul_ps(silu(_mm512_load_ps(c + 16 * r)), _mm512_load_ps(c + 256 + 16 * r));
      _mm256_store_si256(reinterpret_cast<__m256i*>(target + 32 * r),
                         _mm256_permutexvar_epi16(order, (__m256i)_mm512_cvtneps_pbh(units)));
    }
  });
}

void pack_rows(Activation& a, int tile, const float* x, int64_t stride, int rows, int64_t inputs,
               const float* weight, const float* factor) {
  const __m512i order = _mm512_load_si512(kOrder);
  for (int r = 0; r < 16; ++r) {
    uint16_t* target = a.tile(tile) + 32 * r;
    const auto load = [&](int64_t at) {
      const __m512 v = _mm512_mul_ps(_mm512_loadu_ps(x + r * stride + at), _mm512_set1_ps(factor[r]));
      return weight == nullptr ? v : _mm512_mul_ps(v, _mm512_loadu_ps(weight + at));
    };
    for (int64_t at = 0; at < inputs; at += kGroup, target += kTile) {
      const __m512i values =
          r < rows ? (__m512i)_mm512_cvtne2ps_pbh(load(at + 16), load(at)) : _mm512_setzero_si512();
      _mm512_store_si512(target, _mm512_permutexvar_epi16(order, values));
    }
  }
}

void sum_groups(Activation& a) {
  const __m512i high = _mm512_set1_epi32(int32_t(0xffff0000));
  for (int i = 0; i < a.groups * 16; ++i) {
    const __m512i values = _mm512_load_si512(a.tile(0) + i * 32);
    const __m512 sum = _mm512_add_ps(_mm512_castsi512_ps(_mm512_slli_epi32(values, 16)),
                                     _mm512_castsi512_ps(_mm512_and_si512(values, high)));
    a.packed_sum.data()[i] = _mm512_reduce_add_ps(sum);
  }
}

#else

void tile_pair(const Job&, int) {}
void tile_pair_gated(const Job&, int, Activation&) {}
void pack_rows(Activation&, int, const float*, int64_t, int, int64_t, const float*, const float*) {}
void sum_groups(Activation&) {}

#endif

}  // namespace cs
