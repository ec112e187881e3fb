// How a packed matrix (HrPackedMatrix in ../headrace.h) lies in memory: tiles of 8 rows, blocks of 32 columns.
//
// Codes lie as [tiles][blocks][bytes of a block]. In a block, a chunk is 4 columns of 8 rows, 32 bytes, so that a
// 32-bit lane of a register is a row:
//
//   bits 4   bytes [4][8][4]: chunk p in the low nibbles of vector p, chunk p + 4 in the high ones
//   bits 5   as 4 with the low bits; then [8][4] bytes, whose bit j is the fifth bit of chunk j
//   bits 6   as 4 with the low bits; then [2][8][4] bytes: bits 2i, 2i+1 of vector h belong to chunk 4h + i
//   bits 8   bytes [8][8][4], signed
//
// Scales and minimums lie as [tiles][groups][8]. Products with rounded inputs are summed over blocks in order, one
// chain per output, whatever the number of rows of x: a row's result does not depend on its neighbours (see
// packed_digits.h for many rows).
#pragma once
#include "vec.h"

namespace hr {
namespace HR_ISA {

constexpr int kTileRows = 8;
constexpr int kBlockColumns = 32;
constexpr int kSuperColumns = 256;

constexpr int kSecondDigit = 254;  // low digits in one of the codes

// Rows of inputs as one int8 a number or two, with a scale for each 32 columns: scale * code, or
// scale * (254 * code + low code).
struct QuantizedRows {
  int8_t* codes;       // [rows][blocks * 32]
  int8_t* low_codes;   // the same, or null: there is one digit
  float* scales;       // [rows][blocks]
  float* sums;         // [rows][blocks], of the dequantized numbers
  int32_t* code_sums;  // [rows][blocks * 2], of each 16 whole codes
  int64_t num_blocks;

  // A block that holds NaN or an infinity makes its row's results NaN.
  void put_nan(int64_t row, int64_t block) const {
    const int64_t at = row * num_blocks + block;
    __builtin_memset(codes + at * kBlockColumns, 0, kBlockColumns);
    if (low_codes != nullptr) __builtin_memset(low_codes + at * kBlockColumns, 0, kBlockColumns);
    scales[at] = sums[at] = __builtin_nanf("");
    code_sums[2 * at] = code_sums[2 * at + 1] = 0;
  }
};

static inline int64_t block_bytes(int bits) { return 32 * bits; }

static inline int64_t num_groups(const HrPackedMatrix& m) {
  return ceil_div(m.num_blocks * kBlockColumns, m.group_columns);
}

// Scales in a block: groups of 16 columns have two.
static inline int halves_of(const HrPackedMatrix& m) { return m.group_columns == 16 ? 2 : 1; }

static inline int64_t num_supers(const HrPackedMatrix& m) { return m.num_blocks * kBlockColumns / kSuperColumns; }

static inline float half_to_float(uint16_t bits) {
  const F16 one[1] = {{bits}};
  float lanes[kLanes];
  store(lanes, load_part(one, 1));
  return lanes[0];
}

}  // namespace HR_ISA
}  // namespace hr
