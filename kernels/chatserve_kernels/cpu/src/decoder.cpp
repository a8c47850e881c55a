#include "decoder.h"

#include <map>

namespace cs {

namespace {

constexpr int64_t kRowsAtOnce = 512;  // rows whose activations stay in the L2 cache between two projections

void normalise(float* x, int64_t dim, const float* weight, float eps) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t d = 0; d < dim; ++d) sum += x[d] * x[d];
  const float factor = 1.0f / std::sqrt(sum / float(dim) + eps);
  for (int64_t d = 0; d < dim; ++d) x[d] *= factor * weight[d];
}

void rotate(float* x, int64_t dim, const float* cos, const float* sin) {
  const int64_t half = dim / 2;
#pragma omp simd
  for (int64_t d = 0; d < half; ++d) {
    const float first = x[d], second = x[d + half];
    x[d] = first * cos[d] + second * sin[d];
    x[d + half] = second * cos[d + half] + first * sin[d + half];
  }
}

void write_token(const Paged& paged, int64_t layer, int64_t slot, const float* key_value) {
  const int64_t block = slot / paged.block_size, offset = slot % paged.block_size, dim = paged.head_dim;
  constexpr int64_t kAtOnce = 64;  // numbers rounded side by side, which compilers turn into vectors
  uint16_t numbers[kAtOnce];
  const auto for_each_run = [&](const auto& store) {
    for (int64_t head = 0; head < paged.kv_heads; ++head, key_value += dim)
      for (int64_t from = 0; from < dim; from += kAtOnce) {
        const int64_t count = std::min(kAtOnce, dim - from);
        for (int64_t i = 0; i < count; ++i) numbers[i] = float_to_bf16(key_value[from + i]);
        store(head, from, count);
      }
  };
  for_each_run([&](int64_t head, int64_t from, int64_t count) {
    uint16_t* pair = paged.tile(block, layer, 0, head) + paged.key_index(offset, from);
    for (int64_t i = 0; i < count; i += 2, pair += paged.block_size * 2) std::memcpy(pair, numbers + i, 4);
  });
  for_each_run([&](int64_t head, int64_t from, int64_t count) {
    // One by one: the other halves of these words may be another thread's tokens.
    uint16_t* values = paged.tile(block, layer, 1, head) + paged.value_index(offset, from);
    for (int64_t i = 0; i < count; ++i) values[2 * i] = numbers[i];
  });
}

}  // namespace

void write_cache(ThreadPool& pool, const Paged& paged, int64_t layer, int64_t num_tokens, const int64_t* slot_mapping,
                 const float* key_value, int64_t stride) {
  pool.run_tokens(num_tokens,
                  [&](int64_t t) { write_token(paged, layer, slot_mapping[t], key_value + t * stride); });
}

bool Context::tiled(const Linear& linear, int rows) const {
  return amx && linear.kind != kBF16 && rows > tile_threshold() * (linear.four_bit() ? 1 : 2);
}

void Context::project(const Linear& linear, const float* x, int64_t x_stride, int64_t rows, const float* norm,
                      float eps, Epilogue epilogue, float* out, int64_t out_stride) {
  for (int64_t row = 0; row < rows; row += kRowsAtOnce) {
    const int count = int(std::min(kRowsAtOnce, rows - row));
    if (linear.kind == kBF16) {
      project_bf16(pool, linear, activation_, tiles, x + row * x_stride, x_stride, count, norm, eps, epilogue,
                   out + row * out_stride, out_stride);
      continue;
    }
    prepare(pool, activation_, linear.kind, tiled(linear, count), x + row * x_stride, x_stride, count, linear.inputs,
            norm, eps);
    multiply(pool, linear, activation_, epilogue, out + row * out_stride, out_stride);
  }
}

void Context::attend_layer(const Paged& paged, int64_t layer, int64_t heads, const float* query, float scale,
                           int64_t window, float* out) {
  const int64_t stride = heads * paged.head_dim;
  const AttentionPlan plan = plan_attention(paged, heads, window, pool.size(), fixed);
  attend(pool, paged, plan, layer, heads, query, stride, scale, window, amx, records_, out, stride);
}

void Context::forward(const Network& net, const Paged& paged, const Layout& layout, float* hidden) {
  const int64_t tokens = int64_t(layout.positions.size()), dim = net.head_dim;
  const int64_t query_size = net.heads * dim, qkv_size = (net.heads + 2 * net.kv_heads) * dim;
  const float eps = float(net.eps), scale = 1.0f / std::sqrt(float(dim));
  float* qkv = qkv_.reserve(size_t(tokens * qkv_size));
  float* attended = attended_.reserve(size_t(tokens * query_size));
  float* inner = inner_.reserve(size_t(std::min(tokens, kRowsAtOnce) * net.inner));
  std::map<int64_t, AttentionPlan> plans;  // by window
  for (int64_t l = 0; l < net.num_layers; ++l) {
    const Layer& layer = net.layers[l];
    auto plan = plans.find(layer.window);
    if (plan == plans.end())
      plan = plans.emplace(layer.window, plan_attention(paged, net.heads, layer.window, pool.size(), fixed)).first;
    project(layer.qkv, hidden, net.hidden, tokens, layer.input_norm, eps, Epilogue::kStore, qkv, qkv_size);
    pool.run_tokens(tokens, [&](int64_t t) {
      const float* cos = net.cos + layout.positions[size_t(t)] * dim;
      const float* sin = net.sin + layout.positions[size_t(t)] * dim;
      float* row = qkv + t * qkv_size;
      for (int64_t h = 0; h < net.heads + net.kv_heads; ++h) {
        const float* weight = h < net.heads ? layer.query_norm : layer.key_norm;
        if (weight != nullptr) normalise(row + h * dim, dim, weight, eps);
        rotate(row + h * dim, dim, cos, sin);
      }
      write_token(paged, l, layout.slots[size_t(t)], row + query_size);
    });
    attend(pool, paged, plan->second, l, net.heads, qkv, qkv_size, scale, layer.window, amx, records_, attended,
           query_size);
    project(layer.output, attended, query_size, tokens, nullptr, eps, Epilogue::kAdd, hidden, net.hidden);
    for (int64_t row = 0; row < tokens; row += kRowsAtOnce) {
      const int count = int(std::min(kRowsAtOnce, tokens - row));
      float* x = hidden + row * net.hidden;
      if (tiled(layer.gate_up, count) && tiled(layer.down, count) && layer.gate_up.bias == nullptr) {
        prepare(pool, activation_, layer.gate_up.kind, true, x, net.hidden, count, net.hidden, layer.post_norm, eps);
        multiply_gated(pool, layer.gate_up, activation_, gated_);
        multiply(pool, layer.down, gated_, Epilogue::kAdd, x, net.hidden);
        continue;
      }
      project(layer.gate_up, x, net.hidden, count, layer.post_norm, eps, Epilogue::kSiluMul, inner, net.inner);
      project(layer.down, inner, net.inner, count, nullptr, eps, Epilogue::kAdd, x, net.hidden);
    }
  }
}

}  // namespace cs
