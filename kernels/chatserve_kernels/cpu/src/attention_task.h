// What the ways of attending share: one layer's call, its rows, and where their results go.
#pragma once

#include "attention.h"

namespace cs {

constexpr float kHidden = -1e30f;  // finite, so that a fully hidden part has weights instead of NaN; they vanish later
constexpr float kLog2e = 1.44269504f;

// Rows are the query heads of one key/value head, token by token.
struct Call {
  const Paged& paged;
  const AttentionPlan& plan;
  int64_t layer, num_heads;
  const float* query;
  int64_t query_stride;
  float scale;
  int64_t window;
  float* records;
  float* out;
  int64_t out_stride;

  int64_t group() const { return num_heads / paged.kv_heads; }
  int64_t rows(const Task& t) const { return t.count * group(); }
  // The part of a task that is about its i-th key/value head.
  Task one_head(const Task& t, int64_t i) const {
    Task part = t;
    part.head += i;
    part.heads = 1;
    if (t.record >= 0) part.record += i * rows(t);
    return part;
  }
  int64_t position(const Task& t, int64_t token) const { return plan.position[token_of(t, token)]; }
  const float* query_row(const Task& t, int64_t row) const {
    return query + int64_t(token_of(t, row / group())) * query_stride + column(t.head, row % group());
  }
  float* out_row(const Task& t, int64_t row) const {
    return out + int64_t(token_of(t, row / group())) * out_stride + column(t.head, row % group());
  }
  float* out_of(int64_t token, int64_t head, int64_t row) const { return out + token * out_stride + column(head, row); }

  // A record: the unnormalised output of a row, its softmax maximum (times log2 e) and its sum.
  int64_t record_stride() const { return paged.head_dim + 16; }
  float* record(int64_t index) const { return records + index * record_stride(); }
  void set_record(const Task& t, int64_t row, float maximum, float sum) const {
    float* tail = record(t.record + row) + paged.head_dim;
    tail[0] = maximum;
    tail[1] = sum;
  }

  // The tile of keys (part 0) or values (part 1) that a position lies in.
  const uint16_t* tile(const Task& t, int64_t position, int64_t part) const {
    return paged.tile(t.table[position / paged.block_size], layer, part, t.head);
  }

 private:
  size_t token_of(const Task& t, int64_t token) const { return size_t(plan.order[size_t(t.first + token)]); }
  int64_t column(int64_t head, int64_t row) const { return (head * group() + row) * paged.head_dim; }
};

// One task in one of the ways: each writes its rows of out, or their records. attend_portable() takes one head.
void attend_portable(const Call& call, const Task& task);
bool can_attend_vectors(const Paged& paged);
void attend_vectors(const Call& call, const Task& task);
bool can_attend_tiles(const Paged& paged);
void attend_tiles(const Call& call, const Task& task);

}  // namespace cs
