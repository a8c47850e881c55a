// AMX tiles: permission, configuration and instructions.
//
// Own wrappers because those of GCC 12 tell the compiler nothing about the memory they touch: it then drops or moves
// the stores that fill a tile's source.
#pragma once

#include "common.h"

#if defined(CS_AMX)
#include <sys/syscall.h>
#include <unistd.h>

namespace cs {

// Whether tiles may be used: Linux grants their registers on request, once per process; some sandboxes do not.
inline bool amx_granted() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
}

// Rows and bytes per row of each of the eight tiles. Fewer rows take less time.
struct TileShapes {
  uint8_t rows[8] = {16, 16, 16, 16, 16, 16, 16, 16};
  uint16_t bytes[8] = {64, 64, 64, 64, 64, 64, 64, 64};
};

// Holds a tile configuration while in scope, and leaves none behind for whoever runs next on this thread.
class TileScope {
 public:
  explicit TileScope(const TileShapes& shapes) {
    struct alignas(64) Config {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t column_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    static_assert(sizeof(Config) == 64);
    std::copy_n(shapes.rows, 8, config.rows);
    std::copy_n(shapes.bytes, 8, config.column_bytes);
    asm volatile("ldtilecfg %0" ::"m"(config) : "memory");
  }
  ~TileScope() { asm volatile("tilerelease" ::: "memory"); }
};

}  // namespace cs

#define TILE_ZERO(t) asm volatile("tilezero %%tmm" #t ::)
#define TILE_LOAD(t, base, stride) \
  asm volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"(base), "r"(long(stride)) : "memory")
#define TILE_STORE(t, base, stride) \
  asm volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(base), "r"(long(stride)) : "memory")
// c[16 × 16] += a[16 × 32] b[32 × 16], bfloat16 in, float32 out; b holds pairs of rows: [16][16][2].
#define TILE_MULTIPLY(c, a, b) asm volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::)
#endif
