#include "linear.h"

#include "amx.h"
#include "linear_job.h"

namespace cs {

namespace {

int g_tile_threshold = 12;

int64_t padded_outputs(int64_t outputs) { return (outputs + 31) / 32 * 32; }

struct Block {
  uint8_t q[kGroup];  // 4-bit: 0…15, 8-bit: q + 128
  uint16_t scale, minimum;
};

int64_t block_bytes(int64_t kind) { return kind == kQ4_0 ? 18 : kind == kQ4_1 ? 20 : 34; }

Block read_block(int64_t kind, const uint8_t* bytes) {
  Block block{};
  std::memcpy(&block.scale, bytes, 2);
  if (kind == kQ8_0) {
    for (int i = 0; i < kGroup; ++i) block.q[i] = uint8_t(bytes[2 + i] + 128);
    return block;
  }
  if (kind == kQ4_1) std::memcpy(&block.minimum, bytes + 2, 2);
  else block.minimum = float_to_half(-8.0f * half_to_float(block.scale));
  const uint8_t* nibbles = bytes + (kind == kQ4_1 ? 4 : 2);
  for (int i = 0; i < 16; ++i) {
    block.q[i] = nibbles[i] & 15;
    block.q[i + 16] = nibbles[i] >> 4;
  }
  return block;
}

void put_block(int64_t kind, const Block& block, int lane, uint8_t* unit) {
  if (kind == kQ8_0) {
    for (int i = 0; i < kGroup; ++i) unit[i / 4 * 64 + lane * 4 + i % 4] = block.q[i];
    std::memcpy(unit + 512 + 2 * lane, &block.scale, 2);
    return;
  }
  for (int j = 0; j < 4; ++j)
    for (int i = 0; i < 4; ++i)
      unit[j * 64 + lane * 4 + i] = uint8_t(block.q[j * 8 + i] | block.q[j * 8 + 4 + i] << 4);
  std::memcpy(unit + 256 + 2 * lane, &block.scale, 2);
  std::memcpy(unit + 288 + 2 * lane, &block.minimum, 2);
}

// Memory for packed rows.
void reserve_tiles(Activation& a, int rows, int64_t inputs) {
  a.rows = rows;
  a.groups = int(inputs / kGroup);
  a.tiled = true;
  a.packed.reserve(size_t(a.row_tiles()) * size_t(a.groups) * 512);
  if (rows <= kFewRows) a.packed_sum.reserve(size_t(a.groups) * 16);
}

// body(pair) for every pair of weight tiles, in chunks large enough to be worth a claim and small enough that nobody
// waits long for the last one; few rows are bound by memory, which likes long runs.
template <class F>
void for_pairs(ThreadPool& pool, const Linear& linear, const Activation& a, const F& body) {
  const int pairs = linear.pairs();
  const int step = std::clamp(pairs / (pool.size() * (a.rows <= 4 ? 3 : 6)), 1, 16);
  pool.run_ranges((pairs + step - 1) / step, [&](int chunk) {
    const int end = std::min(pairs, (chunk + 1) * step);
    const auto run = [&] {
      for (int pair = chunk * step; pair < end; ++pair) body(pair);
    };
#if defined(CS_AMX)
    if (a.tiled) {
      TileShapes shapes;
      if (scales_sums(linear, a)) shapes.rows[5] = shapes.rows[6] = uint8_t(std::min(16, a.rows));
      const TileScope scope(shapes);
      return run();
    }
#endif
    run();
  });
}

}  // namespace

int tile_threshold() { return g_tile_threshold; }
void set_tile_threshold(int rows) { g_tile_threshold = rows; }

int64_t packed_bytes(int64_t kind, int64_t outputs, int64_t inputs) {
  if (kind == kBF16) return bf16_bytes(outputs, inputs);
  return padded_outputs(outputs) / kLanes * (inputs / kGroup) * unit_bytes(kind);
}

void pack(ThreadPool& pool, int64_t kind, const uint8_t* blocks, int64_t outputs, int64_t inputs, uint8_t* units) {
  if (kind == kBF16) return pack_bf16(pool, reinterpret_cast<const uint16_t*>(blocks), outputs, inputs, units);
  const int64_t groups = inputs / kGroup, bytes = unit_bytes(kind);
  pool.run(int(padded_outputs(outputs) / kLanes), [&](int tile) {
    uint8_t* target = units + tile * groups * bytes;
    std::memset(target, 0, size_t(groups * bytes));
    for (int lane = 0; lane < kLanes && tile * kLanes + lane < outputs; ++lane) {
      const uint8_t* row = blocks + (int64_t(tile) * kLanes + lane) * groups * block_bytes(kind);
      for (int64_t g = 0; g < groups; ++g)
        put_block(kind, read_block(kind, row + g * block_bytes(kind)), lane, target + g * bytes);
    }
  });
}

void prepare(ThreadPool& pool, Activation& a, int64_t kind, bool tiled, const float* x, int64_t stride, int rows,
             int64_t inputs, const float* norm_weight, float eps) {
#if defined(CS_AMX)
  if (tiled) {
    reserve_tiles(a, rows, inputs);
    pool.run((rows + 15) / 16, [&](int tile) {
      const int count = std::min(16, rows - tile * 16);
      const float* begin = x + int64_t(tile) * 16 * stride;
      float factor[16];
      for (int r = 0; r < count; ++r)
        factor[r] = norm_weight == nullptr ? 1.0f : norm_factor(begin + r * stride, inputs, eps);
      pack_rows(a, tile, begin, stride, count, inputs, norm_weight, factor);
    });
    if (rows <= kFewRows) sum_groups(a);
    return;
  }
#endif
  a.rows = rows;
  a.groups = int(inputs / kGroup);
  a.tiled = false;
  a.widened = kWidens && kind == kQ8_0;
  if (a.widened) a.wide.reserve(size_t(rows) * size_t(inputs));
  a.values.reserve(size_t(rows) * size_t(inputs));
  a.scale.reserve(size_t(rows) * size_t(a.groups));
  a.scaled_sum.reserve(size_t(rows) * size_t(a.groups));
  a.sum.reserve(size_t(rows) * size_t(a.groups));
  const auto quantise = [&](int row) {
    const float* begin = x + row * stride;
    const float factor = norm_weight == nullptr ? 1.0f : norm_factor(begin, inputs, eps);
    quantise_row(a, row, begin, inputs, norm_weight, factor);
  };
  // A row costs less than waking another thread for it.
  if (rows <= 8)
    for (int row = 0; row < rows; ++row) quantise(row);
  else pool.run(rows, quantise);
}

void multiply(ThreadPool& pool, const Linear& linear, const Activation& activation, Epilogue epilogue, float* out,
              int64_t stride) {
  const Job job{linear, activation, epilogue, out, stride};
  for_pairs(pool, linear, activation, [&](int pair) { activation.tiled ? tile_pair(job, pair) : dot_pair(job, pair); });
}

void multiply_gated(ThreadPool& pool, const Linear& linear, const Activation& activation, Activation& gated) {
  const int64_t inputs = linear.outputs / 2;
  reserve_tiles(gated, activation.rows, inputs);
  const Job job{linear, activation, Epilogue::kSiluMul, nullptr, 0};
  for_pairs(pool, linear, activation, [&](int pair) { tile_pair_gated(job, pair, gated); });
  if (gated.rows <= kFewRows) sum_groups(gated);
}

}  // namespace cs
