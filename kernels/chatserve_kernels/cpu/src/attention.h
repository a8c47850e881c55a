// Causal attention over the paged bfloat16 cache, for decodes and prefill chunks alike.
//
// A step is planned once (`AttentionPlan`) and the plan run for each layer. Query heads that share a key/value head are
// rows of one task, next to each other's tokens, so every key and value is read once for all of them. Softmax is
// computed online in float32 (Milakov & Gimelshein 2018). Parts of the past that several sequences share are attended
// to once for all of them, pasts are cut and heads taken apart where the threads would then be done sooner, and what was
// computed in parts is merged by log-sum-exp.
#pragma once

#include <vector>

#include "common.h"
#include "threads.h"

namespace cs {

// The cache of one step, and where its sequences lie.
//
// Layout [blocks, layers, 2, kv_heads] of tiles that hold block_size tokens (an even number) in words of two numbers, as
// they are multiplied: of keys two elements of one token, [head_dim / 2][block_size][2]; of values one element of two
// tokens, [block_size / 2][head_dim][2].
struct Paged {
  uint16_t* cache;
  int64_t num_layers, kv_heads, block_size, head_dim;
  int64_t num_sequences;
  const int64_t* query_start;   // [num_sequences + 1]
  const int64_t* seq_lens;      // [num_sequences]
  const int64_t* block_tables;  // [rows][table_stride]
  int64_t table_stride;
  const int32_t* table_rows;  // [num_sequences], or null: in order
  // Runs of blocks at the beginning of several tables, a longer one after those that it continues: run i holds the
  // first run_blocks[i] blocks of the sequences run_members[run_start[i] … run_start[i + 1]).
  int64_t num_runs;
  const int32_t* run_blocks;   // [num_runs]
  const int32_t* run_start;    // [num_runs + 1]
  const int32_t* run_members;  // [run_start[num_runs]]

  const int64_t* table(int64_t sequence) const {
    return block_tables + (table_rows == nullptr ? sequence : table_rows[sequence]) * table_stride;
  }

  // A block's keys (part 0) or values (part 1) of one head.
  uint16_t* tile(int64_t block, int64_t layer, int64_t part, int64_t head) const {
    return cache + (((block * num_layers + layer) * 2 + part) * kv_heads + head) * block_size * head_dim;
  }
  // Where in it element d of the token in `slot` is.
  int64_t key_index(int64_t slot, int64_t d) const { return (d / 2 * block_size + slot) * 2 + d % 2; }
  int64_t value_index(int64_t slot, int64_t d) const { return (slot / 2 * head_dim + d) * 2 + slot % 2; }
};

// Query tokens that attend to one range of one table's positions.
struct Task {
  const int64_t* table;
  int64_t head, heads;   // key/value heads [head, head + heads)
  int64_t first, count;  // tokens: AttentionPlan::order[first … first + count)
  int64_t begin, end;    // positions
  int64_t record;        // of the first row's partial result, or -1 where the task is all there is
};

// What is attended to together in one step. Depends on sizes and tables, not on the layer.
struct AttentionPlan {
  std::vector<int64_t> position;  // [tokens]
  std::vector<int64_t> order;     // the step's tokens, then those of each shared run
  std::vector<Task> tasks;        // longest first
  int64_t num_records = 0;
  bool fixed = false;  // see plan_attention()
  // Merge i finishes a token's rows of one key/value head from parts[merge_start[i] … merge_start[i + 1]): the record
  // of the first of those rows in each part, in the order of the past.
  std::vector<int64_t> merge_token, merge_head, merge_start, parts;
};

// A run of the past is attended to together where that saves each of its sequences, on average, reading this many
// tokens: below, merging costs as much (measured on Zen 4, 2 to 32 sequences of 256 to 1100 tokens).
int share_threshold();
void set_share_threshold(int tokens);

// Window 0 sees everything. `fixed`: rows are computed in the same way whatever else is in the step.
AttentionPlan plan_attention(const Paged& paged, int64_t num_heads, int64_t window, int threads, bool fixed);

// query and out are [tokens][stride] with the heads of a token side by side.
void attend(ThreadPool& pool, const Paged& paged, const AttentionPlan& plan, int64_t layer, int64_t num_heads,
            const float* query, int64_t query_stride, float scale, int64_t window, bool amx, Buffer<float>& records,
            float* out, int64_t out_stride);

}  // namespace cs
