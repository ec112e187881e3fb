// Tiles of AMX: the eight registers of up to 16 rows of 64 bytes, and their configuration.
#pragma once
#include <immintrin.h>
#include <stdint.h>

namespace hr {
namespace HR_ISA {

constexpr int kTile = 16;  // rows of a tile, and 32-bit lanes of a row

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int64_t num_rows, int64_t num_bytes) {
    rows[tile] = (uint8_t)num_rows;
    row_bytes[tile] = num_rows == 0 ? 0 : (uint16_t)num_bytes;
  }

  // Not the intrinsic: GCC 12 tells the compiler that it reads 8 of the 64 bytes, and drops the stores to the others.
  void load() const { __asm__ volatile("ldtilecfg %0" ::"m"(*this)); }
};

// The four tiles that products are summed in.
static inline void clear_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// After tiles were stored: the compiler does not know which memory they wrote.
static inline void tiles_stored() { __asm__ volatile("" ::: "memory"); }

}  // namespace HR_ISA
}  // namespace hr
