#include "attention.h"

#include <vector>

#include "amx.h"

namespace cs {

namespace {

constexpr float kHidden = -1e30f;   // finite, so that a fully hidden part has weights instead of NaN; they vanish later
constexpr int kMaxTaskRows = 96;    // query rows of one task: six tiles share each block's transposed values
constexpr int64_t kMinSplit = 128;  // tokens of past that are worth a task of their own

struct Task {
  int64_t sequence, head;       // key/value head
  int64_t first, count;         // query tokens, counted within the sequence's part of the step
  int64_t begin, end;           // past positions to attend to
  int64_t partial;              // index of the partial result, or -1
};

// Softmax maxima, sums and unnormalised outputs of one task's rows: [rows], [rows], [head_dim][rows].
struct Partial {
  std::vector<float> maximum, sum, output;
};

struct Call {
  const Paged& paged;
  int64_t layer, num_heads;
  const float* query;
  int64_t query_stride;
  float scale;
  int64_t window;
  float* out;
  int64_t out_stride;

  int64_t group() const { return num_heads / paged.kv_heads; }
  int64_t query_len(int64_t s) const { return paged.query_start[s + 1] - paged.query_start[s]; }
  int64_t position(const Task& t, int64_t token) const {
    return paged.seq_lens[t.sequence] - query_len(t.sequence) + t.first + token;
  }
  const float* query_row(const Task& t, int64_t row) const {
    const int64_t token = paged.query_start[t.sequence] + t.first + row / group();
    return query + token * query_stride + (t.head * group() + row % group()) * paged.head_dim;
  }
  float* out_row(const Task& t, int64_t row) const {
    const int64_t token = paged.query_start[t.sequence] + t.first + row / group();
    return out + token * out_stride + (t.head * group() + row % group()) * paged.head_dim;
  }
  const uint16_t* kv(const Task& t, int64_t position, int64_t part) const {
    const int64_t block = paged.block_tables[t.sequence * paged.table_stride + position / paged.block_size];
    return paged.row(block, layer, part, t.head, position % paged.block_size);
  }
};

std::vector<Task> make_tasks(const Call& call, int threads, int64_t* num_partials) {
  const Paged& paged = call.paged;
  std::vector<Task> tasks;
  const int64_t tokens_per_task = std::max<int64_t>(1, kMaxTaskRows / call.group());
  *num_partials = 0;
  const bool few = paged.num_sequences * paged.kv_heads < 4 * threads;
  for (int64_t s = 0; s < paged.num_sequences; ++s) {
    const int64_t query_len = call.query_len(s), past = paged.seq_lens[s] - query_len;
    for (int64_t first = 0; first < query_len; first += tokens_per_task) {
      const int64_t count = std::min(tokens_per_task, query_len - first);
      const int64_t end = past + first + count;
      int64_t begin = call.window > 0 ? std::max<int64_t>(0, past + first - call.window + 1) : 0;
      begin = begin / 32 * 32;
      int64_t splits = 1;
      if (few && query_len <= tokens_per_task && threads > 1)
        splits = std::clamp<int64_t>((end - begin) / kMinSplit, 1, 2 * threads);
      const int64_t length = ((end - begin + splits - 1) / splits + 31) / 32 * 32;
      for (int64_t head = 0; head < paged.kv_heads; ++head)
        for (int64_t from = begin; from < end; from += length) {
          const bool whole = from == begin && from + length >= end;
          tasks.push_back({s, head, first, count, from, std::min(end, from + length),
                           whole ? -1 : (*num_partials)++});
        }
    }
  }
  // Longest first: a long prompt's last chunk must not start when everybody else is done.
  if (tasks.size() > 1)
    std::stable_sort(tasks.begin(), tasks.end(), [](const Task& a, const Task& b) {
      return (a.end - a.begin) * a.count > (b.end - b.begin) * b.count;
    });
  return tasks;
}

// ------------------------------------------------------------------------------------------------------ portable

void attend_portable(const Call& call, const Task& task, Partial* partial) {
  const int64_t dim = call.paged.head_dim, group = call.group(), rows = task.count * group;
  static thread_local Buffer<float> memory;
  constexpr int kStep = 32;
  float* key = memory.reserve(size_t(2 * dim));
  float* acc = key + dim;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t last = call.position(task, row / group);
    const int64_t first = call.window > 0 ? std::max(task.begin, last - call.window + 1) : task.begin;
    const float* q = call.query_row(task, row);
    float maximum = kHidden, sum = 0.0f;
    std::fill(acc, acc + dim, 0.0f);
    for (int64_t from = first; from < std::min(task.end, last + 1); from += kStep) {
      const int64_t count = std::min<int64_t>(kStep, std::min(task.end, last + 1) - from);
      float score[kStep], highest = maximum;
      for (int64_t i = 0; i < count; ++i) {
        const uint16_t* k = call.kv(task, from + i, 0);
        float dot = 0.0f;
#pragma omp simd reduction(+ : dot)
        for (int64_t d = 0; d < dim; ++d) dot += q[d] * bf16_to_float(k[d]);
        score[i] = dot * call.scale;
        if (!(score[i] <= highest)) highest = score[i];  // a NaN becomes the maximum and stays
      }
      const float shrink = std::exp(maximum - highest);
      sum *= shrink;
      for (int64_t d = 0; d < dim; ++d) acc[d] *= shrink;
      for (int64_t i = 0; i < count; ++i) {
        const float p = std::exp(score[i] - highest);
        const uint16_t* v = call.kv(task, from + i, 1);
        sum += p;
        for (int64_t d = 0; d < dim; ++d) acc[d] += p * bf16_to_float(v[d]);
      }
      maximum = highest;
    }
    if (partial == nullptr) {
      float* out = call.out_row(task, row);
      for (int64_t d = 0; d < dim; ++d) out[d] = acc[d] / sum;
      continue;
    }
    partial->maximum[size_t(row)] = maximum;
    partial->sum[size_t(row)] = sum;
    for (int64_t d = 0; d < dim; ++d) partial->output[size_t(d * rows + row)] = acc[d];
  }
}

// ----------------------------------------------------------------------------------------------------------- AMX

#if defined(CS_AMX)

inline __m512i interleave(__m512i low_then_high) {
  alignas(64) static const uint16_t order[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                 8,  24, 9,  25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(order), low_then_high);
}

// Fetch the keys and values of up to `count` positions from `from` on: blocks lie far apart, so the hardware cannot
// guess where the next one is.
inline void prefetch(const Call& call, const Task& task, int64_t from, int64_t count) {
  const int64_t bytes = 16 * call.paged.head_dim * 2;
  for (int64_t at = from; at < std::min(task.end, from + count); at += 16)
    for (int part = 0; part < 2; ++part) {
      const char* piece = reinterpret_cast<const char*>(call.kv(task, at, part));
      for (int64_t line = 0; line < bytes; line += 64) _mm_prefetch(piece + line, _MM_HINT_T0);
    }
}

// Everything is transposed: a tile's 16 columns are query rows, so that maxima, sums and rescaling are plain vectors.
//   scores[32 positions][16 rows] = K[32][D] · Qᵀ[D][16];  out[D][16] += Vᵀ[D][32] · P[32][16]
void attend_amx(const Call& call, const Task& task, Partial* partial) {
  const int64_t dim = call.paged.head_dim, group = call.group(), rows = task.count * group;
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

  const __m512 factor = _mm512_set1_ps(call.scale * 1.44269504f);
  const int64_t first_position = call.position(task, 0), last_position = call.position(task, task.count - 1);
  const TileScope scope;
  for (int64_t from = task.begin; from < task.end; from += 32) {
    prefetch(call, task, from + 32, 32);
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
    if (partial != nullptr) {
      for (int64_t i = 0; i < count; ++i) {
        partial->maximum[size_t(tile * 16 + i)] = maxima[tile * 16 + i] * call.scale;
        partial->sum[size_t(tile * 16 + i)] = sums[tile * 16 + i];
        for (int64_t d = 0; d < dim; ++d) partial->output[size_t(d * rows + tile * 16 + i)] = out[16 * d + i];
      }
      continue;
    }
    const __m512 inverse = _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_load_ps(sums + tile * 16));
    for (int64_t part = 0; part < parts; ++part) {
      __m512i v[16];
      for (int d = 0; d < 16; ++d)
        v[d] = _mm512_castps_si512(_mm512_mul_ps(_mm512_load_ps(out + part * 256 + 16 * d), inverse));
      transpose_16x16(v);
      for (int64_t i = 0; i < count; ++i)
        _mm512_storeu_si512(call.out_row(task, tile * 16 + i) + part * 16, v[i]);
    }
  }
}

// One token with at most four query heads per key: scores are turned so that a vector holds one head's positions, and
// values stay as they lie: out[heads][D] += P[heads][32] · V[32][D].
void attend_amx_decode(const Call& call, const Task& task, Partial* partial) {
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

  const float factor = call.scale * 1.44269504f;
  const int64_t position = call.position(task, 0);
  const int64_t begin = std::max(task.begin, call.window > 0 ? position - call.window + 1 : 0);
  const TileScope scope(rows);
  for (int64_t from = task.begin; from < task.end; from += kStep) {
    prefetch(call, task, from + kStep, kStep);
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
    for (int64_t part = 0; part < parts; ++part) {
      const __m512 value = _mm512_load_ps(out + (part * kMaxHeads + r) * 16);
      if (partial == nullptr) {
        _mm512_storeu_ps(call.out_row(task, r) + part * 16, _mm512_div_ps(value, _mm512_set1_ps(sum)));
      } else {
        alignas(64) float lanes[16];
        _mm512_store_ps(lanes, value);
        for (int d = 0; d < 16; ++d) partial->output[size_t((part * 16 + d) * rows + r)] = lanes[d];
      }
    }
    if (partial != nullptr) {
      partial->maximum[size_t(r)] = maxima[r] * call.scale;
      partial->sum[size_t(r)] = sum;
    }
  }
}
#endif

// Parts of one task's past (their natural-scale maxima, sums, outputs) → the finished rows.
void merge(const Call& call, const Task& task, const std::vector<const Partial*>& parts) {
  const int64_t dim = call.paged.head_dim, rows = task.count * call.group();
  for (int64_t row = 0; row < rows; ++row) {
    float highest = kHidden;
    for (const Partial* p : parts)
      if (!(p->maximum[size_t(row)] <= highest)) highest = p->maximum[size_t(row)];
    float total = 0.0f;
    float* out = call.out_row(task, row);
    std::fill(out, out + dim, 0.0f);
    for (const Partial* p : parts) {
      const float weight = std::exp(p->maximum[size_t(row)] - highest);
      total += weight * p->sum[size_t(row)];
      for (int64_t d = 0; d < dim; ++d) out[d] += weight * p->output[size_t(d * rows + row)];
    }
    for (int64_t d = 0; d < dim; ++d) out[d] /= total;
  }
}

void run_task(const Call& call, const Task& task, Partial* partial) {
#if defined(CS_AMX)
  if (amx_granted() && call.paged.block_size % 16 == 0 && call.paged.head_dim % 32 == 0) {
    if (task.count == 1 && call.group() <= 4) return attend_amx_decode(call, task, partial);
    return attend_amx(call, task, partial);
  }
#endif
  attend_portable(call, task, partial);
}

}  // namespace

void attend(ThreadPool& pool, const Paged& paged, int64_t layer, int64_t num_heads, const float* query,
            int64_t query_stride, float scale, int64_t window, float* out, int64_t out_stride) {
  const Call call{paged, layer, num_heads, query, query_stride, scale, window, out, out_stride};
  int64_t num_partials = 0;
  const std::vector<Task> tasks = make_tasks(call, pool.size(), &num_partials);
  auto partials = std::vector<Partial>(size_t(num_partials));
  for (const Task& task : tasks)
    if (task.partial >= 0) {
      const size_t rows = size_t(task.count * call.group());
      Partial& partial = partials[size_t(task.partial)];
      partial.maximum.resize(rows);
      partial.sum.resize(rows);
      partial.output.resize(rows * size_t(paged.head_dim));
    }
  pool.run(int(tasks.size()), [&](int i) {
    const Task& task = tasks[size_t(i)];
    run_task(call, task, task.partial < 0 ? nullptr : &partials[size_t(task.partial)]);
  });
  // The parts of one (sequence, head) have consecutive numbers, in order of the past.
  auto by_partial = std::vector<const Task*>(size_t(num_partials));
  for (const Task& task : tasks)
    if (task.partial >= 0) by_partial[size_t(task.partial)] = &task;
  for (size_t i = 0; i < by_partial.size();) {
    const Task& task = *by_partial[i];
    std::vector<const Partial*> parts;
    for (; i < by_partial.size() && by_partial[i]->sequence == task.sequence && by_partial[i]->head == task.head; ++i)
      parts.push_back(&partials[i]);
    merge(call, task, parts);
  }
}

}  // namespace cs
