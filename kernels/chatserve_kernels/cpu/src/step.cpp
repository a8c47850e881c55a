// One step, from the scheduler's rows and tokens to logits.
#include <cmath>

#include "argmax.h"
#include "decoder.h"

namespace cs {

namespace {

void lay_out(const Step& step, Layout& layout) {
  const Paged& paged = step.paged;
  const size_t sequences = size_t(paged.num_sequences), tokens = size_t(step.num_tokens);
  layout.query_start.resize(sequences + 1);
  layout.seq_lens.resize(sequences);
  layout.positions.resize(tokens);
  layout.slots.resize(tokens);
  layout.sequence.resize(tokens);
  size_t token = 0;
  for (size_t s = 0; s < sequences; ++s) {
    const int64_t* table = paged.table(int64_t(s));
    layout.query_start[s] = int64_t(token);
    layout.seq_lens[s] = step.num_computed[s] + step.num_new[s];
    for (int64_t position = step.num_computed[s]; position < layout.seq_lens[s]; ++position, ++token) {
      layout.positions[token] = position;
      layout.slots[token] =
          table[position / paged.block_size] * paged.block_size + position % paged.block_size;
      layout.sequence[token] = int32_t(s);
    }
  }
  layout.query_start[sequences] = int64_t(token);
}

// Zero what a sequence that is not finite wrote, so that whoever gets its blocks next reads finite padding.
void clear_slot(const Paged& paged, int64_t slot) {
  const int64_t block = slot / paged.block_size, offset = slot % paged.block_size;
  for (int64_t layer = 0; layer < paged.num_layers; ++layer)
    for (int64_t head = 0; head < paged.kv_heads; ++head)
      for (int64_t d = 0; d < paged.head_dim; ++d) {
        paged.tile(block, layer, 0, head)[paged.key_index(offset, d)] = 0;
        paged.tile(block, layer, 1, head)[paged.value_index(offset, d)] = 0;
      }
}

}  // namespace

int64_t Context::run(const Network& net, const Step& step) {
  lay_out(step, layout_);
  Paged paged = step.paged;
  paged.query_start = layout_.query_start.data();
  paged.seq_lens = layout_.seq_lens.data();
  const size_t width = size_t(net.hidden), vocabulary = size_t(net.head.outputs);
  float* hidden = hidden_.reserve(size_t(step.num_tokens) * width);
  pool.run_tokens(step.num_tokens, [&](int64_t token) {
    float* state = hidden + size_t(token) * width;
    const size_t id = uint32_t(step.token_ids[token]);
    if (id >= vocabulary) return (void)std::fill_n(state, width, NAN);  // which fails its sequence, and no other
    const uint16_t* row = net.embedding + id * width;
    for (size_t i = 0; i < width; ++i) state[i] = bf16_to_float(row[i]);
  });
  forward(net, paged, layout_, hidden);

  // Every token of a sequence counts, not only the last. A sum of finite terms is finite, short of 1e38.
  layout_.finite.resize(size_t(step.num_tokens));
  pool.run_tokens(step.num_tokens, [&](int64_t token) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (size_t i = 0; i < width; ++i) sum += hidden[size_t(token) * width + i];
    layout_.finite[size_t(token)] = std::isfinite(sum);
  });
  std::fill_n(step.finite, paged.num_sequences, 1);
  for (size_t token = 0; token < layout_.finite.size(); ++token)
    if (!layout_.finite[token]) step.finite[layout_.sequence[token]] = 0;
  for (size_t token = 0; token < layout_.finite.size(); ++token)
    if (!step.finite[layout_.sequence[token]]) clear_slot(paged, layout_.slots[token]);
  const size_t samples = size_t(step.num_samples);
  const auto source = [&](size_t i) { return step.sources == nullptr ? layout_.sequence[i] : step.sources[i]; };
  const float* sampled = hidden;
  if (step.sources != nullptr) {
    float* rows = sampled_.reserve(samples * width);
    for (size_t i = 0; i < samples; ++i)
      std::copy_n(hidden + size_t(layout_.query_start[size_t(source(i)) + 1] - 1) * width, width, rows + i * width);
    sampled = rows;
  }
  if (samples > 0)
    project(net.head, sampled, net.hidden, step.num_samples, net.final_norm, float(net.eps), Epilogue::kStore,
            step.logits, net.head.outputs);
  argmax(pool, step.logits, step.num_samples, net.head.outputs, step.best);
  for (size_t i = 0; i < samples; ++i) {
    float* row = step.logits + i * vocabulary;
    if (std::isfinite(row[step.best[i]])) continue;  // NaN counts as the best
    step.finite[source(i)] = 0;
    std::fill_n(row, vocabulary, 0.0f);
    step.best[i] = 0;
  }
  return std::count(step.finite, step.finite + paged.num_sequences, 0);
}

}  // namespace cs
