// Packed matrices by tiles of AMX: up to 16 rows of codes times 16 outputs, a block of columns at a time.
//
// A block's whole numbers are exact and blocks are added in order, as packed_x86.h adds them: the result of a row is
// bitwise the same by either, in any batch.
#pragma once
#include "packed_x86.h"
#include "tiles.h"

namespace hr {
namespace HR_ISA {
namespace {

constexpr int kPairOutputs = 2 * kTileRows;                // two tiles of the matrix side by side
constexpr int kPairBytes = kBlockColumns * kPairOutputs;   // codes of a block, a byte each
constexpr int64_t kFewestTileRows = 4;                     // rows of x from which on tiles pay

// Two tiles of a matrix as tiles of AMX want them.
struct Pair {
  int8_t* codes;    // [blocks][8 chunks][16 outputs][4], less their offset
  float* scales;    // [blocks, or twice as many halves][16]
  float* minimums;  // [blocks][16]; unused where the matrix has none
};

template <int BITS>
void spread_codes(const uint8_t* codes, int64_t num_blocks, bool has_min, int8_t* to) {
  const __m256i offset = _mm256_set1_epi8(BITS == 8 || has_min ? 0 : 1 << (BITS - 1));
  for (int64_t b = 0; b < num_blocks; ++b) {
    __m256i w[kChunks];
    fetch_ahead<BITS>(codes + b * block_bytes(BITS));
    unpack<BITS>(codes + b * block_bytes(BITS), w);
    HR_UNROLL
    for (int j = 0; j < kChunks; ++j)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + b * kPairBytes + j * 4 * kPairOutputs),
                          _mm256_sub_epi8(w[j], offset));
  }
}

void spread_pair(const HrPackedMatrix& m, int64_t tile, const Pair& pair) {
  for (int i = 0; i < 2; ++i) {
    const uint8_t* codes = m.codes + (tile + i) * m.num_blocks * block_bytes(m.bits);
    int8_t* to = pair.codes + i * 4 * kTileRows;
    const bool has_min = m.minimums != nullptr;
    switch (m.bits) {
      case 4: spread_codes<4>(codes, m.num_blocks, has_min, to); break;
      case 5: spread_codes<5>(codes, m.num_blocks, has_min, to); break;
      case 6: spread_codes<6>(codes, m.num_blocks, has_min, to); break;
      default: spread_codes<8>(codes, m.num_blocks, has_min, to);
    }
    widen(m, m.scales, m.super_scales, tile + i, pair.scales + i * kTileRows, kPairOutputs);
    if (has_min) widen(m, m.minimums, m.super_minimums, tile + i, pair.minimums + i * kTileRows, kPairOutputs);
  }
}

// Tiles 0 to 3: sums of two steps, by digit; 4 and 5: digits of x; 6 and 7: codes of the two steps.
void configure_steps(int rows, int columns) {
  TileConfig config;
  for (int tile = 0; tile < 4; ++tile) config.set(tile, rows, 4 * kPairOutputs);
  for (int tile = 4; tile < 6; ++tile) config.set(tile, rows, columns);
  for (int tile = 6; tile < 8; ++tile) config.set(tile, columns / 4, 4 * kPairOutputs);
  config.load();
}

// Products of one step (a block, or half of one) and of both digits. The two kinds of steps use different tiles, so
// that one's products run while the other's are scaled. A macro, since numbers of tiles must be literals.
template <int KIND, bool IS_DOUBLE>
inline void multiply_step(const int8_t* codes, const int8_t* x, const int8_t* low, int64_t x_bytes, int32_t* whole,
                          int32_t* rest) {
#define HR_STEP(WHOLE, REST, CODES)            \
  _tile_loadd(CODES, codes, 4 * kPairOutputs); \
  _tile_zero(WHOLE);                           \
  _tile_loadd(4, x, x_bytes);                  \
  _tile_dpbssd(WHOLE, 4, CODES);               \
  if constexpr (IS_DOUBLE) {                   \
    _tile_zero(REST);                          \
    _tile_loadd(5, low, x_bytes);              \
    _tile_dpbssd(REST, 5, CODES);              \
    _tile_stored(REST, rest, 4 * kPairOutputs);  \
  }                                            \
  _tile_stored(WHOLE, whole, 4 * kPairOutputs);
  if constexpr (KIND == 0) {
    HR_STEP(0, 1, 6)
  } else {
    HR_STEP(2, 3, 7)
  }
#undef HR_STEP
  tiles_stored();
}

template <int BITS, bool IS_DOUBLE>
inline __m512 as_float(const int32_t* whole, const int32_t* rest) {
  const __m512i high = _mm512_load_si512(whole);
  if constexpr (!IS_DOUBLE) return _mm512_cvtepi32_ps(high);
  const __m512i low = _mm512_load_si512(rest);
  // Codes of 4 bits: 32 products of 15 and 32,385 are whole in fp32 too.
  if constexpr (BITS == 4)
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(high), _mm512_set1_ps(float(kSecondDigit)), _mm512_cvtepi32_ps(low));
  return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_mullo_epi32(high, _mm512_set1_epi32(kSecondDigit)), low));
}

// Sums of ROWS rows of x, [ROWS][16].
template <int BITS, int HALVES, bool HAS_MIN, bool IS_DOUBLE, int ROWS>
void multiply_rows(const Pair& pair, const QuantizedRows& x, int64_t first_row, float* out) {
  constexpr int kColumns = kBlockColumns / HALVES, kStepBytes = kPairBytes / HALVES;
  const int64_t num_blocks = x.num_blocks, num_steps = num_blocks * HALVES, x_bytes = num_blocks * kBlockColumns;
  const int8_t* codes = x.codes + first_row * x_bytes;
  const int8_t* low_codes = IS_DOUBLE ? x.low_codes + first_row * x_bytes : nullptr;
  const float *x_scales = x.scales + first_row * num_blocks, *x_sums = x.sums + first_row * num_blocks;
  alignas(64) int32_t whole[2][ROWS * kPairOutputs], rest[2][ROWS * kPairOutputs];
  __m512 sum[ROWS];
  HR_UNROLL
  for (int i = 0; i < ROWS; ++i) sum[i] = _mm512_setzero_ps();
  const auto add_step = [&](int64_t step, int kind) {
    const int64_t b = step / HALVES;
    const __m512 scale = _mm512_loadu_ps(pair.scales + step * kPairOutputs);
    HR_UNROLL
    for (int i = 0; i < ROWS; ++i) {
      const __m512 product = as_float<BITS, IS_DOUBLE>(whole[kind] + i * kPairOutputs, rest[kind] + i * kPairOutputs);
      const __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(x_scales[i * num_blocks + b]));
      sum[i] = _mm512_fmadd_ps(product, both, sum[i]);
    }
    if constexpr (HAS_MIN) {  // then a step is a block
      const __m512 minimum = _mm512_loadu_ps(pair.minimums + b * kPairOutputs);
      HR_UNROLL
      for (int i = 0; i < ROWS; ++i)
        sum[i] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(x_sums[i * num_blocks + b]), sum[i]);
    }
  };
  const auto multiply = [&](int64_t step, auto kind) {
    const int64_t column = step * kColumns;
    multiply_step<decltype(kind)::value, IS_DOUBLE>(pair.codes + step * kStepBytes, codes + column, low_codes + (IS_DOUBLE ? column : 0), x_bytes,
                                   whole[kind], rest[kind]);
  };
  int64_t step = 0;
  for (; step + 2 <= num_steps; step += 2) {
    multiply(step, std::integral_constant<int, 0>());
    multiply(step + 1, std::integral_constant<int, 1>());
    add_step(step, 0);
    add_step(step + 1, 1);
  }
  if (step < num_steps) {
    multiply(step, std::integral_constant<int, 0>());
    add_step(step, 0);
  }
  HR_UNROLL
  for (int i = 0; i < ROWS; ++i) _mm512_storeu_ps(out + (first_row + i) * kPairOutputs, sum[i]);
}

// Groups of ROWS rows from ``row`` on; the last one begins early enough to be whole, and finds some sums once more.
// Fewer than ROWS rows of x in all are one group, which reads the rows behind them.
template <int BITS, int HALVES, bool HAS_MIN, bool IS_DOUBLE, int ROWS>
void multiply_groups(const Pair& pair, const QuantizedRows& x, int64_t row, int64_t num_rows, float* out) {
  configure_steps(ROWS, kBlockColumns / HALVES);
  for (; row < num_rows; row += ROWS)
    multiply_rows<BITS, HALVES, HAS_MIN, IS_DOUBLE, ROWS>(pair, x, max64(0, min64(row, num_rows - ROWS)), out);
}

// Groups of 16, then one of the fewest rows that hold what is left: what a step costs grows with the rows of its group.
template <int BITS, int HALVES, bool HAS_MIN, bool IS_DOUBLE>
void multiply_all(const Pair& pair, const QuantizedRows& x, int64_t num_rows, float* out) {
  const int64_t rest = num_rows % kTile, whole = rest > kTile / 2 ? num_rows : num_rows - rest;
  if (whole > 0) multiply_groups<BITS, HALVES, HAS_MIN, IS_DOUBLE, kTile>(pair, x, 0, whole, out);
  if (whole == num_rows) return;
  if (rest > kFewestTileRows)
    multiply_groups<BITS, HALVES, HAS_MIN, IS_DOUBLE, kTile / 2>(pair, x, whole, num_rows, out);
  else
    multiply_groups<BITS, HALVES, HAS_MIN, IS_DOUBLE, kFewestTileRows>(pair, x, whole, num_rows, out);
}

template <int BITS, int HALVES, bool HAS_MIN>
void multiply_pair(const Pair& pair, const QuantizedRows& x, int64_t num_rows, float* out) {
  if (x.low_codes != nullptr)
    multiply_all<BITS, HALVES, HAS_MIN, true>(pair, x, num_rows, out);
  else
    multiply_all<BITS, HALVES, HAS_MIN, false>(pair, x, num_rows, out);
}

template <int BITS>
void multiply_pair_of(const HrPackedMatrix& m, const Pair& pair, const QuantizedRows& x, int64_t num_rows, float* out) {
  if (m.minimums != nullptr) {
    multiply_pair<BITS, 1, true>(pair, x, num_rows, out);
  } else if (halves_of(m) == 1) {
    multiply_pair<BITS, 1, false>(pair, x, num_rows, out);
  } else {
    multiply_pair<BITS, 2, false>(pair, x, num_rows, out);
  }
}

// Tiles `tile` and `tile + 1` of the matrix times at least kFewestTileRows rows, into out [rows][16].
void pair_rounded(const HrPackedMatrix& m, int64_t tile, const QuantizedRows& x, int64_t num_rows, const Pair& pair,
                  float* out) {
  spread_pair(m, tile, pair);
  switch (m.bits) {
    case 4: return multiply_pair_of<4>(m, pair, x, num_rows, out);
    case 5: return multiply_pair_of<5>(m, pair, x, num_rows, out);
    case 6: return multiply_pair_of<6>(m, pair, x, num_rows, out);
    default: return multiply_pair_of<8>(m, pair, x, num_rows, out);
  }
}

}  // namespace
}  // namespace HR_ISA
}  // namespace hr
