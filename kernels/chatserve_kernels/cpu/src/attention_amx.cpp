// Attention in AMX tiles, for decodes and chunks alike.
//
// Up to 16 query rows are a tile, and 64 positions are attended to at a time, by all key/value heads of the task in turn:
// a block holds them side by side, so memory is read in long runs. The cache's words are what tiles want of their second
// operand, so keys are read as they lie. So are values for one tile of rows; several share a copy in tiles twice as high.
#include <utility>

#include "amx.h"
#include "attention_task.h"

namespace cs {

#if defined(CS_AMX)

namespace {

constexpr int kPositions = 64;          // at a time
constexpr int kRun = 16;                // positions of a tile of keys: they lie in one block
constexpr int kRuns = kPositions / kRun;
constexpr int kRowTile = 16;

// One task's scratch memory.
struct Scratch {
  float* scores;      // [kRuns][16 rows][16 positions]
  uint16_t* weights;  // [16 rows][64 positions]
  uint16_t* values;   // [2][D / 16] tiles of 32 positions
  // Of all heads, one after another:
  uint16_t* query;  // [row tiles][16][D]
  float* out;       // [row tiles][D / 16][16 rows][16]
  float* sums;      // [row tiles][16 rows][16], a sum in parts
  float* maxima;    // [row tiles][16 rows]
  int32_t* positions;  // [row tiles][16 rows]

  Scratch(int64_t row_tiles, int64_t heads, int64_t dim) {
    static thread_local Buffer<float> memory;
    const int64_t tiles = row_tiles * heads, values_size = 2 * dim / 16 * 256;
    float* at = memory.reserve(size_t(kPositions * 16 + 16 * kPositions / 2 + values_size +
                                      tiles * (16 * dim / 2 + 16 * dim + 256 + 32)));
    const auto take = [&at](int64_t floats) { return std::exchange(at, at + floats); };
    scores = take(kPositions * 16);
    weights = reinterpret_cast<uint16_t*>(take(16 * kPositions / 2));
    values = reinterpret_cast<uint16_t*>(take(values_size));
    query = reinterpret_cast<uint16_t*>(take(tiles * 16 * dim / 2));
    out = take(tiles * 16 * dim);
    sums = take(tiles * 256);
    maxima = take(tiles * 16);
    positions = reinterpret_cast<int32_t*>(take(tiles * 16));
  }
};

// One tile of rows of one head.
struct RowTile {
  uint16_t* query;
  float *out, *sums, *maxima;
  int32_t* positions;
  int rows;

  RowTile(const Scratch& scratch, int64_t index, int64_t dim, int rows)
      : query(scratch.query + index * 16 * dim),
        out(scratch.out + index * 16 * dim),
        sums(scratch.sums + index * 256),
        maxima(scratch.maxima + index * 16),
        positions(scratch.positions + index * 16),
        rows(rows) {}
};

// The largest of each of 16 vectors.
__m512 row_maxima(const __m512 v[16]) {
  __m512 u[8], w[4];
  for (int i = 0; i < 8; ++i)
    u[i] = _mm512_max_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
  for (int i = 0; i < 4; ++i) {
    const __m512d a = _mm512_castps_pd(u[2 * i]), b = _mm512_castps_pd(u[2 * i + 1]);
    w[i] = _mm512_max_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  const auto halves = [](__m512 a, __m512 b) {
    return _mm512_max_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  };
  return halves(halves(w[0], w[1]), halves(w[2], w[3]));
}

void begin_tile(const Call& call, const Task& task, int64_t first_row, const RowTile& tile) {
  const int64_t dim = call.paged.head_dim;
  for (int row = 0; row < tile.rows; ++row) {
    tile.positions[row] = int32_t(call.position(task, (first_row + row) / call.group()));
    const float* from = call.query_row(task, first_row + row);
    for (int64_t d = 0; d < dim; d += 32)
      _mm512_storeu_si512(tile.query + row * dim + d,
                          (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + d + 16), _mm512_loadu_ps(from + d)));
  }
  std::fill(tile.out, tile.out + 16 * dim, 0.0f);
  std::fill(tile.sums, tile.sums + 256, 0.0f);
  std::fill(tile.maxima, tile.maxima + 16, kHidden);
}

// Lanes of the 16 positions from `at` that a token sees.
struct Sight {
  __m512i end, window;  // of the task, and tokens of it

  Sight(const Call& call, const Task& task)
      : end(_mm512_set1_epi32(int32_t(task.end))),
        window(_mm512_set1_epi32(int32_t(call.window > 0 ? call.window : int64_t(1) << 30))) {}

  __mmask16 of(int32_t position, int64_t at) const {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i there = _mm512_add_epi32(lanes, _mm512_set1_epi32(int32_t(at))), here = _mm512_set1_epi32(position);
    return _mm512_cmple_epi32_mask(there, here) & _mm512_cmplt_epi32_mask(there, end) &
           _mm512_cmplt_epi32_mask(_mm512_sub_epi32(here, there), window);
  }
};

// Scores of 32 or 64 positions from `from` on → weights, with what was summed so far faded where a row has a new maximum.
template <bool kMasked>
void weigh(const Call& call, const Sight& sight, int64_t from, int halves, const Scratch& scratch,
           const RowTile& tile) {
  const int64_t dim = call.paged.head_dim;
  const auto score = [&](int row, int run) { return _mm512_load_ps(scratch.scores + run * 256 + row * 16); };
  __mmask16 visible[16][kRuns];
  __m512 best[16];
  for (int row = 0; row < 16; ++row) best[row] = _mm512_set1_ps(kHidden);
  for (int row = 0; row < tile.rows; ++row)
    for (int run = 0; run < 2 * halves; ++run) {
      __m512 s = score(row, run);
      if constexpr (kMasked) {
        visible[row][run] = sight.of(tile.positions[row], from + run * kRun);
        s = _mm512_mask_mov_ps(_mm512_set1_ps(kHidden), visible[row][run], s);
      }
      best[row] = _mm512_max_ps(best[row], s);
    }
  const __m512 factor = _mm512_set1_ps(call.scale * kLog2e);
  const __m512 before = _mm512_load_ps(tile.maxima), maxima = _mm512_max_ps(before, row_maxima(best));
  const __mmask16 risen = _mm512_cmp_ps_mask(maxima, before, _CMP_NEQ_UQ);
  alignas(64) float most[16], fade[16];
  _mm512_store_ps(most, _mm512_mul_ps(maxima, factor));
  if (risen != 0) {
    _mm512_store_ps(fade, exp2_ps(_mm512_mul_ps(_mm512_sub_ps(before, maxima), factor)));
    _mm512_store_ps(tile.maxima, maxima);
    for (int row = 0; row < tile.rows; ++row) {
      if ((risen >> row & 1) == 0) continue;
      const __m512 by = _mm512_set1_ps(fade[row]);
      const auto scale = [by](float* at) { _mm512_store_ps(at, _mm512_mul_ps(_mm512_load_ps(at), by)); };
      scale(tile.sums + row * 16);
      for (int64_t part = 0; part < dim / 16; ++part) scale(tile.out + part * 256 + row * 16);
    }
  }
  for (int row = 0; row < tile.rows; ++row) {
    __m512 sum = _mm512_load_ps(tile.sums + row * 16);
    for (int half = 0; half < halves; ++half) {
      __m512 p[2];
      for (int i = 0; i < 2; ++i) {
        // A NaN may be no maximum here, but its own weight, and with it the sum, is one.
        p[i] = rough_exp2_ps(_mm512_fmsub_ps(score(row, half * 2 + i), factor, _mm512_set1_ps(most[row])));
        if constexpr (kMasked) p[i] = _mm512_maskz_mov_ps(visible[row][half * 2 + i], p[i]);
        sum = _mm512_add_ps(sum, p[i]);
      }
      _mm512_store_si512(scratch.weights + row * kPositions + half * 32, (__m512i)_mm512_cvtne2ps_pbh(p[1], p[0]));
    }
    _mm512_store_ps(tile.sums + row * 16, sum);
  }
}

// Where the keys and values of 64 positions lie.
struct Runs {
  const uint16_t *keys[kRuns], *values[kRuns];

  Runs(const Call& call, const Task& task, int64_t from) {
    const Paged& paged = call.paged;
    for (int run = 0; run < kRuns; ++run) {
      // Beyond the end anything finite will do.
      const int64_t at = from + run * kRun < task.end ? from + run * kRun : from, slot = at % paged.block_size;
      const uint16_t* tile = call.tile(task, at, 0);
      keys[run] = tile + slot * 2;
      values[run] = tile + paged.kv_heads * paged.block_size * paged.head_dim + slot * paged.head_dim;
    }
  }
};

// Scores of a tile of rows.
void multiply_keys(const Call& call, const Runs& runs, int halves, const Scratch& scratch, const RowTile& tile) {
  const int64_t dim = call.paged.head_dim, stride = call.paged.block_size * 4;  // bytes between pairs of elements
  for (int run = 0; run < 2 * halves; run += 2) {
    TILE_ZERO(0);
    TILE_ZERO(1);
    for (int64_t d = 0; d < dim; d += 32) {
      TILE_LOAD(4, tile.query + d, dim * 2);
      TILE_LOAD(5, runs.keys[run] + d * call.paged.block_size, stride);
      TILE_LOAD(6, runs.keys[run + 1] + d * call.paged.block_size, stride);
      TILE_MULTIPLY(0, 4, 5);
      TILE_MULTIPLY(1, 4, 6);
    }
    TILE_STORE(0, scratch.scores + run * 256, 64);
    TILE_STORE(1, scratch.scores + run * 256 + 256, 64);
  }
}

// out += weights · values, from the cache: tiles of 16 positions.
void multiply_values(const Call& call, const Runs& runs, int halves, const Scratch& scratch, const RowTile& tile) {
  const int64_t parts = call.paged.head_dim / 16, stride = call.paged.head_dim * 4;
  for (int64_t part = 0; part < parts; part += 2) {
    float* out = tile.out + part * 256;
    TILE_LOAD(0, out, 64);
    TILE_LOAD(1, out + 256, 64);
    for (int run = 0; run < 2 * halves; ++run) {
      TILE_LOAD(7, scratch.weights + run * kRun, kPositions * 2);
      TILE_LOAD(2, runs.values[run] + part * 32, stride);
      TILE_LOAD(3, runs.values[run] + part * 32 + 32, stride);
      TILE_MULTIPLY(0, 7, 2);
      TILE_MULTIPLY(1, 7, 3);
    }
    TILE_STORE(0, out, 64);
    TILE_STORE(1, out + 256, 64);
  }
}

// Values of 64 positions as tiles of 32: rows of the cache's, of two runs one after another.
void copy_values(const Call& call, const Runs& runs, uint16_t* target) {
  const int64_t parts = call.paged.head_dim / 16;
  for (int run = 0; run < kRuns; ++run)
    for (int64_t pair = 0; pair < kRun / 2; ++pair)
      for (int64_t part = 0; part < parts; ++part)
        _mm512_store_si512(target + (run / 2 * parts + part) * 512 + (run % 2 * 8 + pair) * 32,
                           _mm512_loadu_si512(runs.values[run] + pair * call.paged.head_dim * 2 + part * 32));
}

// out += weights · values, from such tiles.
void multiply_copied_values(const Call& call, int halves, const Scratch& scratch, const RowTile& tile) {
  const int64_t parts = call.paged.head_dim / 16;
  for (int64_t part = 0; part < parts; part += 2) {
    float* out = tile.out + part * 256;
    TILE_LOAD(0, out, 64);
    TILE_LOAD(1, out + 256, 64);
    for (int half = 0; half < halves; ++half) {
      TILE_LOAD(7, scratch.weights + half * 32, kPositions * 2);
      TILE_LOAD(2, scratch.values + (half * parts + part) * 512, 64);
      TILE_LOAD(3, scratch.values + (half * parts + part + 1) * 512, 64);
      TILE_MULTIPLY(0, 7, 2);
      TILE_MULTIPLY(1, 7, 3);
    }
    TILE_STORE(0, out, 64);
    TILE_STORE(1, out + 256, 64);
  }
}

void end_tile(const Call& call, const Task& task, int64_t first_row, const RowTile& tile) {
  const int64_t dim = call.paged.head_dim;
  for (int r = 0; r < tile.rows; ++r) {
    const int64_t row = first_row + r;
    const float sum = _mm512_reduce_add_ps(_mm512_load_ps(tile.sums + r * 16));
    const bool whole = task.record < 0;
    float* target = whole ? call.out_row(task, row) : call.record(task.record + row);
    const __m512 inverse = _mm512_set1_ps(whole ? 1.0f / sum : 1.0f);
    for (int64_t d = 0; d < dim; d += 16)
      _mm512_storeu_ps(target + d, _mm512_mul_ps(_mm512_load_ps(tile.out + d * 16 + r * 16), inverse));
    if (!whole) call.set_record(task, row, tile.maxima[r] * call.scale * kLog2e, sum);
  }
}

}  // namespace

bool can_attend_tiles(const Paged& paged) { return paged.block_size % kRun == 0 && paged.head_dim % 32 == 0; }

void attend_tiles(const Call& call, const Task& task) {
  const int64_t dim = call.paged.head_dim, rows = call.rows(task), tiles = (rows + kRowTile - 1) / kRowTile;
  const bool several = tiles > 1;
  const Scratch scratch(tiles, task.heads, dim);
  const auto row_tile = [&](int64_t head, int64_t index) {
    return RowTile(scratch, head * tiles + index, dim, int(std::min<int64_t>(kRowTile, rows - index * kRowTile)));
  };
  const auto for_tiles = [&](const auto& body) {
    for (int64_t head = 0; head < task.heads; ++head) {
      const Task one = call.one_head(task, head);
      for (int64_t index = 0; index < tiles; ++index) body(one, index * kRowTile, row_tile(head, index));
    }
  };
  for_tiles([&](const Task& one, int64_t row, const RowTile& tile) { begin_tile(call, one, row, tile); });
  // 0 and 1 hold results, 2 and 3 values, 4 queries, 5 and 6 keys, 7 weights; fewer rows take less time.
  const uint8_t height = several ? 16 : uint8_t(rows), pairs = several ? 16 : 8;
  const uint16_t weight_bytes = several ? 64 : 32;
  const TileScope scope({{height, height, pairs, pairs, height, 16, 16, height}, {64, 64, 64, 64, 64, 64, 64, weight_bytes}});
  const Sight sight(call, task);
  for (int64_t from = task.begin; from < task.end; from += kPositions)
    for (int64_t head = 0; head < task.heads; ++head) {
      const Runs runs(call, call.one_head(task, head), from);
      if (several) copy_values(call, runs, scratch.values);
      for (int64_t index = 0; index < tiles; ++index) {
        const RowTile tile = row_tile(head, index);
        // Tokens come in order: the first of a tile sees least, the last most.
        const int64_t first = tile.positions[0], end = std::min<int64_t>(task.end, tile.positions[tile.rows - 1] + 1);
        if (end <= from) continue;
        const int halves = end <= from + kPositions / 2 ? 1 : 2;
        multiply_keys(call, runs, halves, scratch, tile);
        const bool all_see_all = std::min(task.end, first + 1) >= from + kPositions &&
                                 (call.window == 0 || from > tile.positions[tile.rows - 1] - call.window);
        (all_see_all ? weigh<false> : weigh<true>)(call, sight, from, halves, scratch, tile);
        if (several) multiply_copied_values(call, halves, scratch, tile);
        else multiply_values(call, runs, halves, scratch, tile);
      }
    }
  for_tiles([&](const Task& one, int64_t row, const RowTile& tile) { end_tile(call, one, row, tile); });
}

#else

bool can_attend_tiles(const Paged&) { return false; }
void attend_tiles(const Call&, const Task&) {}

#endif

}  // namespace cs
