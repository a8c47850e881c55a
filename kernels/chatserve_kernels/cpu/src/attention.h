// Causal attention over the paged bfloat16 cache, for decodes and prefill chunks alike.
//
// Query heads that share a key/value head are rows of one task, next to each other's tokens, so every key and value
// is read once for all of them. Softmax is computed online in float32 (Milakov & Gimelshein 2018); where a step has
// fewer tasks than the threads can share, the past is split and the parts are merged by their log-sum-exp.
#pragma once

#include "common.h"
#include "threads.h"

namespace cs {

// The cache of one step, layout [blocks, layers, 2, kv_heads, block_size, head_dim], and where its sequences lie.
struct Paged {
  uint16_t* cache;
  int64_t num_layers, kv_heads, block_size, head_dim;
  int64_t num_sequences;
  const int64_t* query_start;   // [num_sequences + 1]
  const int64_t* seq_lens;      // [num_sequences]
  const int64_t* block_tables;  // [num_sequences][table_stride]
  int64_t table_stride;

  // Token `slot` of a block's keys (part 0) or values (part 1).
  uint16_t* row(int64_t block, int64_t layer, int64_t part, int64_t head, int64_t slot) const {
    return cache + ((((block * num_layers + layer) * 2 + part) * kv_heads + head) * block_size + slot) * head_dim;
  }
};

// query and out are [tokens][stride] with the heads of a token side by side; window 0 sees everything.
void attend(ThreadPool& pool, const Paged& paged, int64_t layer, int64_t num_heads, const float* query,
            int64_t query_stride, float scale, int64_t window, float* out, int64_t out_stride);

}  // namespace cs
