// Projections with 4-bit and 8-bit weights: y = W x, from the values that a GGUF file stores; and with
// bfloat16 ones (linear_bf16.cpp).
//
// Few rows: activations are quantised to 8 bits per group of 32 and multiplied as integers ("dots"). Many rows, where
// the CPU has AMX: activations are rounded to bfloat16 and multiplied in tiles. Both read one layout, made by pack().
#pragma once

#include "common.h"
#include "threads.h"

namespace cs {

enum Kind : int64_t { kQ4_0 = 2, kQ4_1 = 3, kQ8_0 = 8, kBF16 = 30 };  // the numbers of the GGUF format

// Layout, in units of (16 outputs, 32 inputs): 4-bit: 4 × 64 bytes, each holding inputs 8j…8j+3 of every output in its
// low nibbles and 8j+4…8j+7 in its high ones, then 16 scales and 16 minima (half floats). 8-bit: 8 × 64 bytes of q + 128,
// then 16 scales. Outputs are padded with zeros to a multiple of 32.
struct Linear {
  int64_t kind, outputs, inputs;
  const uint8_t* units;
  const float* bias;  // [outputs] or null

  bool four_bit() const { return kind != kQ8_0; }
  int groups() const { return int(inputs / kGroup); }
  int pairs() const { return int((outputs + 2 * kLanes - 1) / (2 * kLanes)); }
};

constexpr int64_t unit_bytes(int64_t kind) { return kind == kQ8_0 ? 512 + 32 : 256 + 64; }
int64_t packed_bytes(int64_t kind, int64_t outputs, int64_t inputs);

// Lay out the rows of a GGUF tensor (outputs × inputs / 32 blocks), or of a bfloat16 one.
void pack(ThreadPool& pool, int64_t kind, const uint8_t* blocks, int64_t outputs, int64_t inputs, uint8_t* units);

#if defined(CS_AVX512) && defined(__AVX512BF16__)
using Number = uint16_t;  // an activation beside bfloat16 weights: bfloat16
#else
using Number = float;
#endif

// Rows of activations in the form one of the ways wants.
struct Activation {
  int rows = 0, groups = 0;
  bool tiled = false, widened = false;  // `packed` and `wide` are filled
  Buffer<Number> numbers;      // beside bfloat16: [rows / 16][inputs / 32][16 rows][32 inputs]
  Buffer<int8_t> values;       // dots: [rows][inputs]
  Buffer<int16_t> wide;        // dots, the same in 16 bits: inputs 0, 2, 1, 3 of each four
  Buffer<float> scale;         // dots: [rows][groups]
  Buffer<float> scaled_sum;    // dots: [rows][groups], scale × sum of values
  Buffer<int32_t> sum;         // dots: [rows][groups]
  Buffer<uint16_t> packed;     // tiles: [rows / 16][groups][16 rows][32 inputs], bfloat16
  Buffer<float> packed_sum;    // tiles, of few rows: [groups][16 rows]

  int row_tiles() const { return (rows + 15) / 16; }
  uint16_t* tile(int row_tile) const { return packed.data() + int64_t(row_tile) * groups * 512; }
};

constexpr int kFewRows = 16;  // a row tile: one that must be scaled twice gains nothing

// Whether tiles hold integers, whose sums are scaled.
inline bool scales_sums(const Linear& linear, const Activation& a) { return linear.four_bit() && a.rows <= kFewRows; }

// Above this many rows tiles beat dot products of 4-bit weights; 8-bit ones need no unpacking for dot products, which
// win up to twice as many rows (measured on the linears of SmolLM2).
int tile_threshold();
void set_tile_threshold(int rows);

// Fill `activation` for weights of a kind from x [rows][inputs], each row optionally RMS-normalised first (weight may be
// null).
void prepare(ThreadPool& pool, Activation& activation, int64_t kind, bool tiled, const float* x, int64_t stride,
             int rows, int64_t inputs, const float* norm_weight, float eps);

enum class Epilogue { kStore, kAdd, kSiluMul };

// prepare() and multiply() for bfloat16 weights; `amx`: in tiles.
void project_bf16(ThreadPool& pool, const Linear& linear, Activation& activation, bool amx, const float* x,
                  int64_t x_stride, int rows, const float* norm_weight, float eps, Epilogue epilogue, float* out,
                  int64_t out_stride);

// kStore: out = y + bias. kAdd: out += y + bias. kSiluMul: the outputs come in blocks of 16 gates and 16 ups in turn;
// out [rows][outputs / 2] = silu(gate) × up.
void multiply(ThreadPool& pool, const Linear& linear, const Activation& activation, Epilogue epilogue, float* out,
              int64_t stride);

// kSiluMul of tiled rows, without bias, straight into the tiles that the next projection wants.
void multiply_gated(ThreadPool& pool, const Linear& linear, const Activation& activation, Activation& gated);

}  // namespace cs
