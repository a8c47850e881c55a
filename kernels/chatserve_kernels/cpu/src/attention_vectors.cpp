// Attention in vector registers (AVX-512 with bfloat16 products, AVX-512, AVX2), for decodes and chunks alike.
//
// 64 positions at a time are laid side by side once for all rows of the task: of keys the lanes are positions, of values
// elements, as in the cache. Scores and outputs are then the same product of a few rows of words, each spread over a
// vector, and a matrix of words. What a row gets does not depend on the rows beside it.
#include "attention_task.h"
#include "vector.h"

namespace cs {

#if defined(CS_VECTORS)

namespace {

constexpr int kStep = 64;  // positions at a time

// out[R][C vectors] = out × shrink + a[R][words] · b[words][C vectors], or without what is in out where shrink is null.
template <int R, int C>
void block(const float* a, int64_t a_stride, int64_t words, const float* b, int64_t b_stride, const float* shrink,
           float* out, int64_t out_stride) {
  Vec sum[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c)
      sum[r][c] = shrink == nullptr ? zero() : scale_by(load(out + r * out_stride + c * kVec), spread(shrink[r]));
  for (int64_t w = 0; w < words; ++w, b += b_stride) {
    Vec column[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) column[c] = load(b + c * kVec);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Vec word = spread(a[r * a_stride + w]);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sum[r][c] = multiply(sum[r][c], word, column[c]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) store(out + r * out_stride + c * kVec, sum[r][c]);
}

template <int R>
void product(const float* a, int64_t a_stride, int64_t words, const float* b, int64_t b_stride, const float* shrink,
             float* out, int64_t out_stride, int64_t width) {
  int64_t at = 0;
  for (; at + kColumns * kVec <= width; at += kColumns * kVec)
    block<R, kColumns>(a, a_stride, words, b + at, b_stride, shrink, out + at, out_stride);
  for (; at < width; at += 2 * kVec)
    block<R, 2>(a, a_stride, words, b + at, b_stride, shrink, out + at, out_stride);
}

// One task's scratch memory, in floats.
struct Scratch {
  float* keys;     // [dim / kPack][kStep] words
  float* values;   // [kStep / kPack][dim] words
  float* scores;   // [kRows][kStep]
  float* weights;  // [kRows][kStep / kPack] words
  // Of all heads, one after another:
  float* query;    // [rows][dim / kPack] words, scaled by log2 e / sqrt(dim)
  float* out;      // [rows][dim]
  float* maxima;   // [rows]
  float* sums;     // [rows][kVec]

  Scratch(int64_t rows, int64_t dim) {
    static thread_local Buffer<float> memory;
    const int64_t sizes[] = {dim / kPack * kStep, kStep / kPack * dim, kRows * kStep, kRows * kStep / kPack,
                             rows * dim / kPack,  rows * dim,          rows,          rows * kVec};
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
void lay_out(const Call& call, const Task& task, int64_t from, int64_t count, const Scratch& scratch) {
  const int64_t dim = call.paged.head_dim, block_size = call.paged.block_size;
  for (int64_t i = 0; i < count;) {
    const int64_t slot = (from + i) % block_size, run = std::min(block_size - slot, kStep - i);
    const uint16_t* keys = call.tile(task, from + i, 0) + slot * 2;
    const uint16_t* values = call.tile(task, from + i, 1) + slot * dim;
    for (int64_t d = 0; d < dim; d += 2, keys += block_size * 2) {
      float *first = scratch.keys + d / kPack * kStep + i, *second = first + kStep;
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
}

// R rows from `row` on attend to the positions that are laid out.
template <int R>
void attend_rows(const Call& call, const Head& head, int64_t row, int64_t from, int64_t count, const Scratch& scratch) {
  const int64_t dim = call.paged.head_dim, words = dim / kPack;
  product<R>(head.query + row * words, words, words, scratch.keys, kStep, nullptr, scratch.scores, kStep, kStep);
  float shrink[R];
  for (int r = 0; r < R; ++r) {
    Vec s[kStep / kVec];
    const int64_t position = call.position(head.task, (row + r) / call.group());
    const int64_t end = std::min(count, position + 1 - from);
    const int64_t first = call.window > 0 ? position - call.window + 1 - from : 0;
    const bool masked = end < kStep || first > 0;
    for (int i = 0; i < kStep / kVec; ++i) {
      s[i] = load(scratch.scores + r * kStep + i * kVec);
      if (masked) s[i] = keep(s[i], first - i * kVec, end - i * kVec, kHidden);
    }
    Vec highest = s[0];
    for (int i = 1; i < kStep / kVec; ++i) highest = larger(highest, s[i]);
    const float before = head.maxima[row + r], maximum = std::max(before, largest(highest));
    head.maxima[row + r] = maximum;
    const Vec fade = exp2(spread(before - maximum));
    float faded[kVec];
    store(faded, fade);
    shrink[r] = faded[0];
    Vec sum = scale_by(load(head.sums + (row + r) * kVec), fade);
    for (int i = 0; i < kStep / kVec; ++i) {
      // A NaN is no maximum here, but its own weight, and with it the sum, is one.
      s[i] = exp2(subtract(s[i], spread(maximum)));
      if (masked) s[i] = keep(s[i], first - i * kVec, end - i * kVec, 0.0f);
      sum = add(sum, s[i]);
    }
    store(head.sums + (row + r) * kVec, sum);
    for (int i = 0; i < kStep / kVec; i += 2)
      store_words(scratch.weights + (r * kStep + i * kVec) / kPack, s[i], s[i + 1]);
  }
  product<R>(scratch.weights, kStep / kPack, (count + kPack - 1) / kPack, scratch.values, dim, shrink,
             head.out + row * dim, dim, dim);
}

void attend_some(int rows, const Call& call, const Head& head, int64_t row, int64_t from, int64_t count,
                 const Scratch& scratch) {
  switch (rows) {
    case 1: return attend_rows<1>(call, head, row, from, count, scratch);
    case 2: return attend_rows<2>(call, head, row, from, count, scratch);
    case 3: return attend_rows<3>(call, head, row, from, count, scratch);
    case 4: return attend_rows<4>(call, head, row, from, count, scratch);
    case 5: return attend_rows<5>(call, head, row, from, count, scratch);
    default: return attend_rows<6>(call, head, row, from, count, scratch);
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
  for (int64_t from = task.begin; from < task.end; from += kStep) {
    const int64_t count = std::min<int64_t>(kStep, task.end - from);
    for (int64_t h = 0; h < task.heads; ++h) {
      const Head head(call, task, h, scratch);
      lay_out(call, head.task, from, count, scratch);
      for (int64_t row = 0; row < rows; row += kRows) {
        const int some = int(std::min<int64_t>(kRows, rows - row));
        // Tokens come in order, so a block whose last row sees nothing yet need not look.
        if (call.position(task, (row + some - 1) / call.group()) >= from)
          attend_some(some, call, head, row, from, count, scratch);
      }
    }
  }
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
