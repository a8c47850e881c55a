// Attention in vector registers (AVX-512 with bfloat16 products, AVX-512, AVX2), for decodes and chunks alike.
//
// Scores and outputs are the same product: of a few rows of words, each spread over a vector, and a matrix of words, in
// which lanes are positions (keys) or elements (values). The cache is such a matrix, in pieces. Where a block is smaller
// than a piece, or many rows would take the same words apart, 64 positions are laid out first for all rows of the task.
// What a row gets does not depend on what the rows beside it hold, nor, in a fixed plan, on how many there are.
#include "attention_task.h"
#include "vector.h"

namespace cs {

#if defined(CS_VECTORS)

namespace {

constexpr int kPiece = 16;     // positions side by side in memory
constexpr int kLongStep = 64;  // positions at a time
// Where they are read as they lie: a piece, whose heads lie side by side, is read in one run, which is faster on AVX2
// (measured). Wider vectors take more at a time, for their sums to be many enough.
constexpr int kCachedStep = kVec == 16 ? kLongStep : kPiece;
constexpr int kRows = 6;  // rows at a time

// Columns (in vectors) at a time: sums fill the registers but for a column and the rows' words.
constexpr int columns_of(int rows) { return kVec == 16 ? 4 : rows == 1 ? 8 : rows <= 3 ? 4 : 2; }

// Words that are multiplied with a row's: two numbers each, as they lie in the cache, or what multiply() takes.
enum class Words { kCached, kLaidOut };

// C columns of a matrix of words whose rows are `stride` apart, and what will be read in their place next.
template <int C>
struct Columns {
  const float* at[C];
  const float* ahead[C];
  int64_t stride;
};

// sum[R][C] += a[R][words] · b[words][C vectors].
template <int R, int C, Words kind>
void add_products(Vec (&sum)[R][C], const float* a, int64_t a_stride, int64_t words, const Columns<C>& b) {
  const auto add_row = [&](int64_t at, const auto& part_of) {
    // The fewer of both stay in registers meanwhile.
    if constexpr (R < C) {
      Vec word[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) word[r] = spread(a[r * a_stride + at]);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        const Vec part = part_of(c);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) sum[r][c] = multiply(sum[r][c], word[r], part);
      }
    } else {
      Vec part[C];
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) part[c] = part_of(c);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const Vec word = spread(a[r * a_stride + at]);
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) sum[r][c] = multiply(sum[r][c], word, part[c]);
      }
    }
  };
  for (int64_t w = 0; w < words; ++w) {
    // Into the L2 cache: with two runs of a block's head at a time, Zen's own prefetchers come too late (measured).
    if constexpr (kind == Words::kCached)
#pragma GCC unroll 8
      for (int c = 0; c < C; c += kPiece / kVec)
        _mm_prefetch(reinterpret_cast<const char*>(b.ahead[c] + w * b.stride), _MM_HINT_T1);
    const auto word = [&](int c) { return load(b.at[c] + w * b.stride); };
    if constexpr (kPack == 2 || kind == Words::kLaidOut) {
      add_row(w, word);
    } else {
      add_row(2 * w, [&](int c) { return first_of_words(word(c)); });
      add_row(2 * w + 1, [&](int c) { return second_of_words(word(c)); });
    }
  }
}

// The keys and values of kStep positions, in pieces of kPiece: keys [dim words][kPiece] with key_stride between rows,
// values [kPiece words][dim].
template <Words kind, int kStep>
struct Past {
  struct Pieces {
    const float* keys[kStep / kPiece];
    const float* values[kStep / kPiece];
  };
  Pieces here, next;
  int64_t key_stride, dim;

  // Numbers in a word of kind, and words that hold so many.
  static constexpr int64_t kNumbers = kind == Words::kCached ? 2 : kPack;
  static int64_t words(int64_t numbers) { return (numbers + kNumbers - 1) / kNumbers; }

  // scores[R][kStep] = query[R][dim] · keys.
  template <int R, int C>
  void score(const float* query, int64_t query_stride, float* scores) const {
    for (int64_t at = 0; at < kStep; at += C * kVec) {
      Columns<C> columns{{}, {}, key_stride};
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        const int64_t piece = (at + c * kVec) / kPiece, offset = (at + c * kVec) % kPiece;
        columns.at[c] = here.keys[piece] + offset;
        columns.ahead[c] = next.keys[piece] + offset;
      }
      Vec sum[R][C];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) sum[r][c] = zero();
      add_products<R, C, kind>(sum, query, query_stride, words(dim), columns);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) store(scores + r * kStep + at + c * kVec, sum[r][c]);
    }
  }

  // out[R][width from element `at` on] = out × shrink + weights[R][count] · values; the elements that C divides.
  template <int R, int C>
  int64_t weigh(int64_t at, const float* weights, int64_t weights_stride, int64_t count, const float* shrink,
                float* out) const {
    for (; at + C * kVec <= dim; at += C * kVec) {
      Vec sum[R][C];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) sum[r][c] = scale_by(load(out + r * dim + at + c * kVec), spread(shrink[r]));
      for (int64_t from = 0; from < count; from += kPiece) {
        Columns<C> columns{{}, {}, dim};
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
          columns.at[c] = here.values[from / kPiece] + at + c * kVec;
          columns.ahead[c] = next.values[from / kPiece] + at + c * kVec;
        }
        add_products<R, C, kind>(sum, weights + from / kPack, weights_stride,
                                 words(std::min<int64_t>(kPiece, count - from)), columns);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) store(out + r * dim + at + c * kVec, sum[r][c]);
    }
    return at;
  }
};

// One task's scratch memory, in floats.
struct Scratch {
  float* keys;     // [dim / kPack][kLongStep] words
  float* values;   // [kLongStep / kPack][dim] words
  float* scores;   // [kRows][positions at a time]
  float* weights;  // [kRows][positions at a time / kPack] words
  // Of all heads, one after another:
  float* query;    // [rows][dim / kPack] words, scaled by log2 e / sqrt(dim)
  float* out;      // [rows][dim]
  float* maxima;   // [rows]
  float* sums;     // [rows][kVec]

  Scratch(int64_t rows, int64_t dim) {
    static thread_local Buffer<float> memory;
    const int64_t sizes[] = {dim / kPack * kLongStep,
                             kLongStep / kPack * dim,
                             kRows * kLongStep,
                             kRows * kLongStep / kPack,
                             rows * dim / kPack,
                             rows * dim,
                             rows,
                             rows * kVec};
    float** parts[] = {&keys, &values, &scores, &weights, &query, &out, &maxima, &sums};
    int64_t floats = 0;
    for (int64_t size : sizes) floats += (size + 15) / 16 * 16;
    float* at = memory.reserve(size_t(floats));
    for (int i = 0; i < 8; ++i) {
      *parts[i] = at;
      at += (sizes[i] + 15) / 16 * 16;
    }
  }
};

// The rows of one head.
struct Head {
  Task task;
  float *query, *out, *maxima, *sums;

  Head(const Call& call, const Task& all, int64_t i, const Scratch& scratch)
      : task(call.one_head(all, i)),
        query(scratch.query + i * call.rows(all) * call.paged.head_dim / kPack),
        out(scratch.out + i * call.rows(all) * call.paged.head_dim),
        maxima(scratch.maxima + i * call.rows(all)),
        sums(scratch.sums + i * call.rows(all) * kVec) {}
};

// Lay out the keys and values of positions [from, from + count).
Past<Words::kLaidOut, kLongStep> lay_out(const Call& call, const Task& task, int64_t from, int64_t count,
                                         const Scratch& scratch) {
  const int64_t dim = call.paged.head_dim, block_size = call.paged.block_size;
  for (int64_t i = 0; i < count;) {
    const int64_t slot = (from + i) % block_size, run = std::min(block_size - slot, kLongStep - i);
    const uint16_t* keys = call.tile(task, from + i, 0) + slot * 2;
    const uint16_t* values = call.tile(task, from + i, 1) + slot * dim;
    for (int64_t d = 0; d < dim; d += 2, keys += block_size * 2) {
      float *first = scratch.keys + d / kPack * kLongStep + i, *second = first + kLongStep;
      int64_t lane = 0;
      for (; lane + kVec <= run; lane += kVec) split_words(keys + lane * 2, first + lane, second + lane);
      if (lane == run) continue;
      alignas(64) uint16_t words[2 * kVec] = {};  // of a block with fewer tokens than a vector has lanes
      alignas(64) float parts[2][kVec];
      std::copy_n(keys + lane * 2, (run - lane) * 2, words);
      split_words(words, parts[0], parts[1]);
      std::copy_n(parts[0], run - lane, first + lane);
      if (kPack == 1) std::copy_n(parts[1], run - lane, second + lane);
    }
    for (int64_t pair = 0; pair < run / 2; ++pair)
      for (int64_t d = 0; d < dim; d += kVec) {
        float* first = scratch.values + (i + pair * 2) / kPack * dim + d;
        split_words(values + (pair * dim + d) * 2, first, first + dim);
      }
    i += run;
  }
  Past<Words::kLaidOut, kLongStep>::Pieces pieces;
  for (int64_t piece = 0; piece < kLongStep / kPiece; ++piece) {
    pieces.keys[piece] = scratch.keys + piece * kPiece;
    pieces.values[piece] = scratch.values + piece * kPiece / kPack * dim;
  }
  return {pieces, pieces, kLongStep, dim};
}

// Keys and values where they are, in blocks that hold whole pieces.
template <int kStep>
Past<Words::kCached, kStep> cached(const Call& call, const Task& task, int64_t from) {
  const int64_t dim = call.paged.head_dim, block_size = call.paged.block_size;
  const auto pieces = [&](int64_t begin) {
    typename Past<Words::kCached, kStep>::Pieces found;
    for (int64_t piece = 0; piece < kStep / kPiece; ++piece) {
      // Beyond the last position no block need be; what any other gives there is hidden.
      const int64_t position = std::min(begin + piece * kPiece, (task.end - 1) / kPiece * kPiece);
      const int64_t slot = position % block_size;
      found.keys[piece] = reinterpret_cast<const float*>(call.tile(task, position, 0) + slot * 2);
      found.values[piece] = reinterpret_cast<const float*>(call.tile(task, position, 1) + slot * dim);
    }
    return found;
  };
  return {pieces(from), pieces(from + kStep), block_size, dim};
}

// R rows from `row` on attend to kStep positions, of which `count` are there.
template <int R, Words kind, int kStep>
void attend_rows(const Call& call, const Head& head, const Past<kind, kStep>& past, int64_t row, int64_t from,
                 int64_t count, const Scratch& scratch) {
  constexpr int kColumns = columns_of(R), kScoreColumns = std::min(kColumns, kStep / kVec);
  const int64_t dim = call.paged.head_dim, words = dim / kPack;
  past.template score<R, kScoreColumns>(head.query + row * words, words, scratch.scores);
  float shrink[R];
  for (int r = 0; r < R; ++r) {
    constexpr int kParts = kStep / kVec;
    Vec s[kParts];
    const int64_t position = call.position(head.task, (row + r) / call.group());
    const int64_t end = std::min(count, position + 1 - from);
    const int64_t first = call.window > 0 ? position - call.window + 1 - from : 0;
    const bool masked = end < kStep || first > 0;
    unrolled<kParts>([&](auto i) { s[i] = load(scratch.scores + r * kStep + i * kVec); });
    if (masked) unrolled<kParts>([&](auto i) { s[i] = keep(s[i], first - i * kVec, end - i * kVec, kHidden); });
    Vec highest = s[0];
    unrolled<kParts - 1>([&](auto i) { highest = larger(highest, s[i + 1]); });
    const float before = head.maxima[row + r], maximum = std::max(before, largest(highest));
    head.maxima[row + r] = maximum;
    const Vec fade = exp2(spread(before - maximum));
    float faded[kVec];
    store(faded, fade);
    shrink[r] = faded[0];
    Vec sum = scale_by(load(head.sums + (row + r) * kVec), fade);
    // A NaN is no maximum here, but its own weight, and with it the sum, is one.
    unrolled<kParts>([&](auto i) { s[i] = exp2(subtract(s[i], spread(maximum))); });
    if (masked) unrolled<kParts>([&](auto i) { s[i] = keep(s[i], first - i * kVec, end - i * kVec, 0.0f); });
    unrolled<kParts>([&](auto i) { sum = add(sum, s[i]); });
    store(head.sums + (row + r) * kVec, sum);
    unrolled<kParts / 2>([&](auto i) {
      store_words(scratch.weights + (r * kStep + 2 * i * kVec) / kPack, s[2 * i], s[2 * i + 1]);
    });
  }
  float* out = head.out + row * dim;
  const auto weigh = [&]<int C>(int64_t at, std::integral_constant<int, C>) {
    return past.template weigh<R, C>(at, scratch.weights, kStep / kPack, count, shrink, out);
  };
  const int64_t at = weigh(0, std::integral_constant<int, kColumns>());
  weigh(at, std::integral_constant<int, 2>());
}

template <Words kind, int kStep>
void attend_some(int rows, const Call& call, const Head& head, const Past<kind, kStep>& past, int64_t row,
                 int64_t from, int64_t count, const Scratch& scratch) {
  switch (rows) {
    case 1: return attend_rows<1>(call, head, past, row, from, count, scratch);
    case 2: return attend_rows<2>(call, head, past, row, from, count, scratch);
    case 3: return attend_rows<3>(call, head, past, row, from, count, scratch);
    case 4: return attend_rows<4>(call, head, past, row, from, count, scratch);
    case 5: return attend_rows<5>(call, head, past, row, from, count, scratch);
    default: return attend_rows<6>(call, head, past, row, from, count, scratch);
  }
}
static_assert(kRows == 6);

}  // namespace

bool can_attend_vectors(const Paged& paged) { return paged.head_dim % 32 == 0; }

void attend_vectors(const Call& call, const Task& task) {
  const int64_t dim = call.paged.head_dim, rows = call.rows(task), words = dim / kPack;
  const Scratch scratch(task.heads * rows, dim);
  const Vec factor = spread(call.scale * kLog2e);
  for (int64_t h = 0; h < task.heads; ++h) {
    const Head head(call, task, h, scratch);
    for (int64_t row = 0; row < rows; ++row) {
      const float* q = call.query_row(head.task, row);
      for (int64_t d = 0; d < dim; d += 2 * kVec)
        store_words(head.query + row * words + d / kPack, scale_by(load(q + d), factor),
                    scale_by(load(q + d + kVec), factor));
    }
  }
  std::fill(scratch.out, scratch.out + task.heads * rows * dim, 0.0f);
  std::fill(scratch.maxima, scratch.maxima + task.heads * rows, kHidden);
  std::fill(scratch.sums, scratch.sums + task.heads * rows * kVec, 0.0f);
  const auto attend_in_steps = [&](int step, const auto& past_of) {
    for (int64_t from = task.begin; from < task.end; from += step) {
      const int64_t count = std::min<int64_t>(step, task.end - from);
      for (int64_t h = 0; h < task.heads; ++h) {
        const Head head(call, task, h, scratch);
        const auto past = past_of(head.task, from, count);
        for (int64_t row = 0; row < rows; row += kRows) {
          const int some = int(std::min<int64_t>(kRows, rows - row));
          // Tokens come in order, so rows of which the last sees nothing yet need not look.
          if (call.position(task, (row + some - 1) / call.group()) >= from)
            attend_some(some, call, head, past, row, from, count, scratch);
        }
      }
    }
  };
  // Tasks begin a multiple of kLongStep after a block's beginning, so a piece that divides blocks lies within one.
  const bool in_place = call.paged.block_size % kPiece == 0 && (kPack == 2 || rows <= kRows);
  if (!in_place)
    attend_in_steps(kLongStep, [&](const Task& one, int64_t from, int64_t count) {
      return lay_out(call, one, from, count, scratch);
    });
  else if (call.plan.fixed)  // in the same steps however many rows there are
    attend_in_steps(kLongStep, [&](const Task& one, int64_t from, int64_t) { return cached<kLongStep>(call, one, from); });
  else
    attend_in_steps(kCachedStep,
                    [&](const Task& one, int64_t from, int64_t) { return cached<kCachedStep>(call, one, from); });
  for (int64_t h = 0; h < task.heads; ++h) {
    const Head head(call, task, h, scratch);
    for (int64_t row = 0; row < rows; ++row) {
      float* out = head.out + row * dim;
      const float sum = total(load(head.sums + row * kVec));
      if (task.record >= 0) {
        std::copy(out, out + dim, call.record(head.task.record + row));
        call.set_record(head.task, row, head.maxima[row], sum);
        continue;
      }
      const Vec inverse = spread(1.0f / sum);
      float* target = call.out_row(head.task, row);
      for (int64_t d = 0; d < dim; d += kVec) store(target + d, scale_by(load(out + d), inverse));
    }
  }
}

#else

bool can_attend_vectors(const Paged&) { return false; }
void attend_vectors(const Call&, const Task&) {}

#endif

}  // namespace cs
