// A decoder network, run in one call per step: embedding, norms, projections, rotation, cache writes, attention,
// feed-forward, head.
//
// Knows pointers and sizes that `chatserve_kernels.cpu.decoder` fills in; owns only scratch memory. The residual
// stream is float32; keys and values are stored as bfloat16.
#pragma once

#include <vector>

#include "attention.h"
#include "linear.h"
#include "threads.h"

namespace cs {

struct Layer {
  const float* input_norm;  // [hidden]
  const float* post_norm;   // [hidden]
  const float* query_norm;  // [head_dim] or null
  const float* key_norm;    // [head_dim] or null
  Linear qkv, output, gate_up, down;
  int64_t window;  // 0: full attention
};

struct Network {
  int64_t num_layers, hidden, inner, heads, kv_heads, head_dim;
  double eps;
  const Layer* layers;
  const float* cos;         // [positions][head_dim]
  const float* sin;         // [positions][head_dim], signed
  const uint16_t* embedding;  // [vocabulary][hidden], bfloat16
  const float* final_norm;    // [hidden]
  Linear head;
};

// What stays from step to step: where the cache is, and where results go.
struct StepMemory {
  Paged paged;      // but for the sequences and what follows from them
  uint8_t* finite;  // [sequences] out
  float* logits;    // [num_samples][vocabulary] out; zeros where they are not finite
  int32_t* best;    // [num_samples] out, the largest logit
};

// One step's ragged batch as the scheduler says it.
struct Step : StepMemory {
  int64_t num_tokens, num_samples;
  const int32_t* num_computed;  // [sequences]
  const int32_t* num_new;       // [sequences]
  const int32_t* token_ids;     // [num_tokens]
  const int32_t* sources;       // [num_samples], sequences whose last token's logits are wanted; null: all tokens'
};

// A step's tokens one by one.
struct Layout {
  std::vector<int64_t> query_start, seq_lens;  // [sequences + 1], [sequences]
  std::vector<int64_t> positions, slots;       // [num_tokens]
  std::vector<int32_t> sequence;               // [num_tokens]
  std::vector<uint8_t> finite;                 // [num_tokens]
};

class Context {
 public:
  // `fixed`: what a token gives does not depend on what else is in its step.
  Context(int threads, bool tiles, bool fixed) : pool(threads), tiles(tiles), amx(tiles && !fixed), fixed(fixed) {}

  // A whole step, from tokens to logits (step.cpp). The number of sequences that were not finite.
  int64_t run(const Network& network, const Step& step);
  // out = epilogue(linear(norm(x))).
  void project(const Linear& linear, const float* x, int64_t x_stride, int64_t rows, const float* norm, float eps,
               Epilogue epilogue, float* out, int64_t out_stride);

  // One layer's attention; query and out are [tokens][heads × head_dim].
  void attend_layer(const Paged& paged, int64_t layer, int64_t heads, const float* query, float scale, int64_t window,
                    float* out);

  ThreadPool pool;
  // Whether there are AMX tiles, and whether they may be chosen by the number of rows, which changes bits.
  const bool tiles, amx, fixed;

 private:
  // Every layer; hidden [tokens][hidden], in place.
  void forward(const Network& network, const Paged& paged, const Layout& layout, float* hidden);
  // Whether so many rows are multiplied in tiles.
  bool tiled(const Linear& linear, int rows) const;

  Layout layout_;
  Activation activation_, gated_;
  Buffer<float> hidden_, sampled_, qkv_, attended_, inner_, records_;
};

// Store this step's keys and values (key_value [tokens][stride]: keys of all heads, then values) in their slots.
void write_cache(ThreadPool& pool, const Paged& paged, int64_t layer, int64_t num_tokens, const int64_t* slot_mapping,
                 const float* key_value, int64_t stride);

}  // namespace cs
