// Attention in AMX tiles. Keys are read as they lie; what has to be turned is queries and values.
#include "amx.h"
#include "attention_task.h"

namespace cs {

#if defined(CS_AMX)

namespace {

// Everything is transposed: a tile's 16 columns are query rows, so that maxima, sums and rescaling are plain vectors.
//   scores[32 positions][16 rows] = K[32][D] · Qᵀ[D][16];  out[D][16] += Vᵀ[D][32] · P[32][16]
void attend_many(const Call& call, const Task& task) {
  const int64_t dim = call.paged.head_dim, group = call.group(), rows = call.rows(task);
  const int64_t tiles = (rows + 15) / 16, steps = dim / 32, parts = dim / 16;
  static thread_local Buffer<uint16_t> half_memory;
  static thread_local Buffer<float> float_memory;
  uint16_t* q_tiles = half_memory.reserve(size_t(tiles * steps * 512 + parts * 512 + 512));
  uint16_t* v_tiles = q_tiles + tiles * steps * 512;  // [parts][16 of D][32 positions]
  uint16_t* p_tile = v_tiles + parts * 512;           // [16 pairs of positions][16 rows][2]
  float* out_tiles = float_memory.reserve(size_t(tiles * (dim + 2) * 16 + 512));  // [tiles][D][16]
  float* maxima = out_tiles + tiles * dim * 16;
  float* sums = maxima + tiles * 16;
  float* scores = sums + tiles * 16;  // [32][16]

  for (int64_t tile = 0; tile < tiles; ++tile)
    for (int64_t s = 0; s < steps; ++s) {
      __m512i q[16];
      for (int64_t i = 0; i < 16; ++i) {
        q[i] = _mm512_setzero_si512();
        if (tile * 16 + i < rows) {
          const float* row = call.query_row(task, tile * 16 + i) + s * 32;
          q[i] = (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(row + 16), _mm512_loadu_ps(row));
        }
      }
      transpose_16x16(q);
      for (int i = 0; i < 16; ++i) _mm512_store_si512(q_tiles + (tile * steps + s) * 512 + 32 * i, q[i]);
    }
  std::fill(out_tiles, out_tiles + tiles * dim * 16, 0.0f);
  std::fill(maxima, maxima + tiles * 16, kHidden);
  std::fill(sums, sums + tiles * 16, 0.0f);

  const __m512 factor = _mm512_set1_ps(call.scale * kLog2e);
  const int64_t first_position = call.position(task, 0), last_position = call.position(task, task.count - 1);
  const TileScope scope;
  for (int64_t from = task.begin; from < task.end; from += 32) {
    call.prefetch(task, from + 32, 32);
    const bool second_half = from + 16 < task.end;
    const uint16_t* keys[2] = {call.kv(task, from, 0), nullptr};
    const uint16_t* values[2] = {call.kv(task, from, 1), nullptr};
    keys[1] = second_half ? call.kv(task, from + 16, 0) : keys[0];
    values[1] = second_half ? call.kv(task, from + 16, 1) : values[0];
    for (int64_t part = 0; part < parts; ++part) {
      __m512i v[16];
      for (int pair = 0; pair < 16; ++pair) {
        const uint16_t* row = values[pair / 8] + (pair % 8) * 2 * dim + part * 16;
        const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row));
        const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + dim));
        v[pair] = interleave(_mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1));
      }
      transpose_16x16(v);
      for (int d = 0; d < 16; ++d) _mm512_store_si512(v_tiles + part * 512 + 32 * d, v[d]);
    }
    const bool masked = from + 31 > first_position || from + 32 > task.end ||
                        (call.window > 0 && from <= last_position - call.window);
    for (int64_t tile = 0; tile < tiles; ++tile) {
      TILE_ZERO(0);
      TILE_ZERO(1);
      for (int64_t s = 0; s < steps; ++s) {
        TILE_LOAD(4, keys[0] + s * 32, dim * 2);
        TILE_LOAD(5, keys[1] + s * 32, dim * 2);
        TILE_LOAD(6, q_tiles + (tile * steps + s) * 512, 64);
        TILE_MULTIPLY(0, 4, 6);
        TILE_MULTIPLY(1, 5, 6);
      }
      TILE_STORE(0, scores, 64);
      TILE_STORE(1, scores + 256, 64);
      if (masked) {
        alignas(64) int32_t positions[16];
        for (int i = 0; i < 16; ++i)
          positions[i] = int32_t(call.position(task, std::min(rows - 1, tile * 16 + i) / group));
        const __m512i limit = _mm512_load_si512(positions);
        const __m512i floor = _mm512_sub_epi32(limit, _mm512_set1_epi32(int32_t(call.window)));
        for (int t = 0; t < 32; ++t) {
          const __m512i at = _mm512_set1_epi32(int32_t(from + t));
          __mmask16 visible = _mm512_cmple_epi32_mask(at, limit);
          if (call.window > 0) visible &= _mm512_cmpgt_epi32_mask(at, floor);
          if (from + t >= task.end) visible = 0;
          const __m512 s = _mm512_load_ps(scores + 16 * t);
          _mm512_store_ps(scores + 16 * t, _mm512_mask_blend_ps(visible, _mm512_set1_ps(kHidden), s));
        }
      }
      const __m512 before = _mm512_load_ps(maxima + tile * 16);
      __m512 highest = before;
      for (int t = 0; t < 32; ++t) highest = _mm512_max_ps(highest, _mm512_load_ps(scores + 16 * t));
      __m512 sum = _mm512_load_ps(sums + tile * 16);
      float* out = out_tiles + tile * dim * 16;
      if (_mm512_cmp_ps_mask(highest, before, _CMP_NEQ_UQ) != 0) {
        const __m512 shrink = exp2_ps(_mm512_mul_ps(_mm512_sub_ps(before, highest), factor));
        sum = _mm512_mul_ps(sum, shrink);
        for (int64_t d = 0; d < dim; ++d)
          _mm512_store_ps(out + 16 * d, _mm512_mul_ps(_mm512_load_ps(out + 16 * d), shrink));
        _mm512_store_ps(maxima + tile * 16, highest);
      }
      // Subtracted before scaling: for hidden scores the product would round away from the maximum's.
      const auto weight = [&](int t) {
        return exp2_ps(_mm512_mul_ps(_mm512_sub_ps(_mm512_load_ps(scores + 16 * t), highest), factor));
      };
      for (int pair = 0; pair < 16; ++pair) {
        const __m512 a = weight(2 * pair), b = weight(2 * pair + 1);
        sum = _mm512_add_ps(sum, _mm512_add_ps(a, b));
        _mm512_store_si512(p_tile + 32 * pair, interleave((__m512i)_mm512_cvtne2ps_pbh(b, a)));
      }
      _mm512_store_ps(sums + tile * 16, sum);
      TILE_LOAD(6, p_tile, 64);
      for (int64_t part = 0; part < parts; ++part) {
        TILE_LOAD(0, out + part * 256, 64);
        TILE_LOAD(4, v_tiles + part * 512, 64);
        TILE_MULTIPLY(0, 4, 6);
        TILE_STORE(0, out + part * 256, 64);
      }
    }
  }
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t count = std::min<int64_t>(16, rows - tile * 16);
    float* out = out_tiles + tile * dim * 16;
    const bool whole = task.record < 0;
    const __m512 factor_of_sum = whole ? _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_load_ps(sums + tile * 16))
                                       : _mm512_set1_ps(1.0f);
    for (int64_t part = 0; part < parts; ++part) {
      __m512i v[16];
      for (int d = 0; d < 16; ++d)
        v[d] = _mm512_castps_si512(_mm512_mul_ps(_mm512_load_ps(out + part * 256 + 16 * d), factor_of_sum));
      transpose_16x16(v);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t row = tile * 16 + i;
        float* target = whole ? call.out_row(task, row) : call.record(task.record + row);
        _mm512_storeu_si512(target + part * 16, v[i]);
      }
    }
    for (int64_t i = 0; !whole && i < count; ++i)
      call.set_record(task, tile * 16 + i, maxima[tile * 16 + i] * call.scale * kLog2e, sums[tile * 16 + i]);
  }
}

// One token with at most four query heads per key: scores are turned so that a vector holds one head's positions, and
// values stay as they lie: out[heads][D] += P[heads][32] · V[32][D].
void attend_token(const Call& call, const Task& task) {
  constexpr int kMaxHeads = 4, kStep = 64;
  const int64_t dim = call.paged.head_dim, steps = dim / 32, parts = dim / 16;
  const int rows = int(call.group());
  static thread_local Buffer<uint16_t> half_memory;
  static thread_local Buffer<float> float_memory;
  uint16_t* q_tiles = half_memory.reserve(size_t(steps * 512 + 4 * 512));
  uint16_t* v_tiles = q_tiles + steps * 512;  // two of [16 pairs of positions][16 of D][2]
  uint16_t* p_tiles = v_tiles + 2 * 512;      // two of [heads][32 positions]
  float* out = float_memory.reserve(size_t(parts * kMaxHeads * 16 + kStep * 16));  // [parts][heads][16]
  float* scores = out + parts * kMaxHeads * 16;                                   // [64][16]

  for (int64_t s = 0; s < steps; ++s) {
    __m512i q[16];
    for (int i = 0; i < 16; ++i) {
      q[i] = _mm512_setzero_si512();
      if (i < rows) {
        const float* row = call.query_row(task, i) + s * 32;
        q[i] = (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(row + 16), _mm512_loadu_ps(row));
      }
    }
    transpose_16x16(q);
    for (int i = 0; i < 16; ++i) _mm512_store_si512(q_tiles + s * 512 + 32 * i, q[i]);
  }
  std::fill(out, out + parts * kMaxHeads * 16, 0.0f);
  float maxima[kMaxHeads];
  __m512 sums[kMaxHeads];
  for (int r = 0; r < rows; ++r) maxima[r] = kHidden, sums[r] = _mm512_setzero_ps();

  const float factor = call.scale * kLog2e;
  const int64_t position = call.position(task, 0);
  const int64_t begin = std::max(task.begin, call.window > 0 ? position - call.window + 1 : 0);
  const TileScope scope(rows);
  for (int64_t from = task.begin; from < task.end; from += kStep) {
    call.prefetch(task, from + kStep, kStep);
    const uint16_t *keys[4], *values[4];
    for (int j = 0; j < 4; ++j) {
      const int64_t at = from + 16 * j < task.end ? from + 16 * j : from;
      keys[j] = call.kv(task, at, 0);
      values[j] = call.kv(task, at, 1);
    }
    for (int j = 0; j < 4; j += 2) {
      TILE_ZERO(0);
      TILE_ZERO(1);
      for (int64_t s = 0; s < steps; ++s) {
        TILE_LOAD(4, q_tiles + s * 512, 64);
        TILE_LOAD(2, keys[j] + s * 32, dim * 2);
        TILE_LOAD(3, keys[j + 1] + s * 32, dim * 2);
        TILE_MULTIPLY(0, 2, 4);
        TILE_MULTIPLY(1, 3, 4);
      }
      TILE_STORE(0, scores + 256 * j, 64);
      TILE_STORE(1, scores + 256 * j + 256, 64);
    }
    __m512 s[kMaxHeads][4];
    for (int j = 0; j < 4; ++j) {
      __m512 z[4];
      for (int i = 0; i < 4; ++i) {
        const float* at = scores + (16 * j + i) * 16;
        z[i] = _mm512_castps128_ps512(_mm_load_ps(at));
        z[i] = _mm512_insertf32x4(z[i], _mm_load_ps(at + 4 * 16), 1);
        z[i] = _mm512_insertf32x4(z[i], _mm_load_ps(at + 8 * 16), 2);
        z[i] = _mm512_insertf32x4(z[i], _mm_load_ps(at + 12 * 16), 3);
      }
      const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(z[0], z[1]));
      const __m512d b = _mm512_castps_pd(_mm512_unpackhi_ps(z[0], z[1]));
      const __m512d c = _mm512_castps_pd(_mm512_unpacklo_ps(z[2], z[3]));
      const __m512d d = _mm512_castps_pd(_mm512_unpackhi_ps(z[2], z[3]));
      s[0][j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
      s[1][j] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
      s[2][j] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
      s[3][j] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
    }
    if (from < begin || from + kStep > task.end) {
      const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
      for (int j = 0; j < 4; ++j) {
        const __m512i at = _mm512_add_epi32(lanes, _mm512_set1_epi32(int32_t(from + 16 * j)));
        const __mmask16 hidden = _mm512_cmplt_epi32_mask(at, _mm512_set1_epi32(int32_t(begin))) |
                                 _mm512_cmpge_epi32_mask(at, _mm512_set1_epi32(int32_t(task.end)));
        for (int r = 0; r < rows; ++r) s[r][j] = _mm512_mask_blend_ps(hidden, s[r][j], _mm512_set1_ps(kHidden));
      }
    }
    for (int r = 0; r < rows; ++r) {
      const __m512 pairwise = _mm512_max_ps(_mm512_max_ps(s[r][0], s[r][1]), _mm512_max_ps(s[r][2], s[r][3]));
      const float highest = std::max(maxima[r], _mm512_reduce_max_ps(pairwise));
      if (highest != maxima[r]) {
        const __m512 shrink =
            exp2_ps(_mm512_mul_ps(_mm512_set1_ps(maxima[r] - highest), _mm512_set1_ps(factor)));
        sums[r] = _mm512_mul_ps(sums[r], shrink);
        for (int64_t part = 0; part < parts; ++part) {
          float* row = out + (part * kMaxHeads + r) * 16;
          _mm512_store_ps(row, _mm512_mul_ps(_mm512_load_ps(row), shrink));
        }
        maxima[r] = highest;
      }
      __m512 p[4];
      for (int j = 0; j < 4; ++j) {
        // A NaN is no maximum here, but its own weight, and with it the sum, is one.
        p[j] = exp2_ps(_mm512_mul_ps(_mm512_sub_ps(s[r][j], _mm512_set1_ps(highest)), _mm512_set1_ps(factor)));
        sums[r] = _mm512_add_ps(sums[r], p[j]);
      }
      _mm512_store_si512(p_tiles + 32 * r, (__m512i)_mm512_cvtne2ps_pbh(p[1], p[0]));
      _mm512_store_si512(p_tiles + 512 + 32 * r, (__m512i)_mm512_cvtne2ps_pbh(p[3], p[2]));
    }
    TILE_LOAD(6, p_tiles, 64);
    TILE_LOAD(7, p_tiles + 512, 64);
    for (int64_t part = 0; part < parts; ++part) {
      for (int pair = 0; pair < 32; ++pair) {
        const uint16_t* row = values[pair / 8] + (pair % 8) * 2 * dim + part * 16;
        const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row));
        const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + dim));
        _mm512_store_si512(v_tiles + 32 * pair, interleave(_mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1)));
      }
      TILE_LOAD(5, out + part * kMaxHeads * 16, 64);
      TILE_LOAD(2, v_tiles, 64);
      TILE_LOAD(3, v_tiles + 512, 64);
      TILE_MULTIPLY(5, 6, 2);
      TILE_MULTIPLY(5, 7, 3);
      TILE_STORE(5, out + part * kMaxHeads * 16, 64);
    }
  }
  for (int r = 0; r < rows; ++r) {
    const float sum = _mm512_reduce_add_ps(sums[r]);
    const bool whole = task.record < 0;
    float* target = whole ? call.out_row(task, r) : call.record(task.record + r);
    const __m512 divisor = _mm512_set1_ps(whole ? sum : 1.0f);
    for (int64_t part = 0; part < parts; ++part)
      _mm512_storeu_ps(target + part * 16, _mm512_div_ps(_mm512_load_ps(out + (part * kMaxHeads + r) * 16), divisor));
    if (!whole) call.set_record(task, r, maxima[r] * factor, sum);
  }
}

}  // namespace

bool can_attend_tiles(const Paged& paged) { return paged.block_size % 16 == 0 && paged.head_dim % 32 == 0; }

void attend_tiles(const Call& call, const Task& task) {
  if (task.count == 1 && call.group() <= 4) attend_token(call, task);
  else attend_many(call, task);
}

#else

bool can_attend_tiles(const Paged&) { return false; }
void attend_tiles(const Call&, const Task&) {}

#endif

}  // namespace cs
