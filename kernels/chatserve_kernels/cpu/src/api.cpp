// The C interface that `chatserve_kernels.cpu.library` binds: raw pointers, no exceptions across it.
#include <new>

#include "amx.h"
#include "argmax.h"
#include "decoder.h"
#include "draw.h"
#include "logprobs.h"

#define CS_EXPORT __attribute__((visibility("default")))

using cs::Context;

namespace {

// 0: done, 1: out of memory on this thread. Nothing else in here throws.
template <class F>
int guarded(const F& body) {
  try {
    body();
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

}  // namespace

extern "C" {

CS_EXPORT int cs_abi_version() { return 10; }

CS_EXPORT Context* cs_create(int threads, int fixed) {
#if defined(CS_AMX)
  const bool tiles = cs::amx_granted();
#else
  const bool tiles = false;
#endif
  try {
    return new Context(threads, tiles, fixed != 0);
  } catch (...) {
    return nullptr;
  }
}

CS_EXPORT void cs_destroy(Context* context) { delete context; }

CS_EXPORT int cs_tile_threshold() { return cs::tile_threshold(); }
CS_EXPORT void cs_set_tile_threshold(int rows) { cs::set_tile_threshold(rows); }

CS_EXPORT int cs_share_threshold() { return cs::share_threshold(); }
CS_EXPORT void cs_set_share_threshold(int tokens) { cs::set_share_threshold(tokens); }

CS_EXPORT int64_t cs_packed_bytes(int64_t kind, int64_t outputs, int64_t inputs) {
  return cs::packed_bytes(kind, outputs, inputs);
}

CS_EXPORT int cs_pack(Context* context, int64_t kind, const uint8_t* blocks, int64_t outputs, int64_t inputs, uint8_t* units) {
  return guarded([&] { cs::pack(context->pool, kind, blocks, outputs, inputs, units); });
}

CS_EXPORT int cs_project(Context* context, const cs::Linear* linear, const float* x, int64_t rows, const float* norm, double eps,
               int epilogue, float* out, int64_t out_stride) {
  return guarded([&] {
    context->project(*linear, x, linear->inputs, rows, norm, float(eps), static_cast<cs::Epilogue>(epilogue), out,
                     out_stride);
  });
}

CS_EXPORT int cs_write_cache(Context* context, const cs::Paged* paged, int64_t layer, int64_t num_tokens,
                   const int64_t* slot_mapping, const float* key_value) {
  return guarded([&] {
    cs::write_cache(context->pool, *paged, layer, num_tokens, slot_mapping, key_value,
                    2 * paged->kv_heads * paged->head_dim);
  });
}

CS_EXPORT int cs_attend(Context* context, const cs::Paged* paged, int64_t layer, int64_t heads, const float* query, double scale,
              int64_t window, float* out) {
  return guarded([&] { context->attend_layer(*paged, layer, heads, query, float(scale), window, out); });
}

// What changes with every step comes as arguments: filling in a structure from Python costs more. The number of
// sequences that were not finite, or -1 without memory.
CS_EXPORT int64_t cs_run(Context* context, const cs::Network* network, const cs::StepMemory* memory,
                         int64_t num_sequences, const int32_t* rows, const int32_t* num_computed,
                         const int32_t* num_new, int64_t num_tokens, const int32_t* token_ids, int64_t num_samples,
                         const int32_t* sources) {
  cs::Step step{*memory, num_tokens, num_samples, num_computed, num_new, token_ids, sources};
  step.paged.num_sequences = num_sequences;
  step.paged.table_rows = rows;
  int64_t failed = 0;
  const int status = guarded([&] { failed = context->run(*network, step); });
  return status == 0 ? failed : -1;
}

CS_EXPORT int cs_argmax(Context* context, const float* x, int64_t rows, int64_t columns, int32_t* best) {
  return guarded([&] { cs::argmax(context->pool, x, rows, columns, best); });
}

CS_EXPORT int cs_draw(Context* context, const float* logits, int64_t columns, int64_t count, const int64_t* rows,
                      const cs::DrawOptions* options, const uint64_t* seeds, const uint64_t* positions,
                      uint64_t steps, const double* uniform, int32_t* tokens) {
  return guarded([&] {
    cs::draw(context->pool, logits, columns, {count, rows, options, seeds, positions, steps, uniform}, tokens);
  });
}

CS_EXPORT int cs_logprobs(Context* context, const float* logits, int64_t columns, int64_t count, const int64_t* rows,
                          const int32_t* tokens, int64_t top, float* chosen, int32_t* top_ids, float* top_logprobs) {
  return guarded([&] {
    cs::logprobs(context->pool, logits, columns, {count, rows, tokens, top}, chosen, top_ids, top_logprobs);
  });
}

}  // extern "C"
