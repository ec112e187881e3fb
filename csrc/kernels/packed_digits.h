// Packed matrices times many rows by tiles of AMX: inputs and decoded weights as two bf16 digits each.
//
// A number is the sum of its bf16 and of the bf16 of what is left, to 16 bits or so. Of the four products of
// two such numbers the one of both low digits is left out; sums are fp32. That is as exact as 16-bit inputs are, and
// unlike whole numbers it needs no sum of its own for each block of columns.
#pragma once
#include "digits.h"
#include "packed_amx.h"

namespace hr {
namespace HR_ISA {
namespace {

constexpr int64_t kFewestDigitRows = 64;               // from which on decoding pays
constexpr int64_t kDigitsAtOnce = 300000;              // of x: they stay in the second-level cache
constexpr int64_t kQuadTiles = 4;                      // tiles of the matrix that are decoded and multiplied together
constexpr int64_t kQuadOutputs = kQuadTiles * kTileRows;
constexpr int64_t kDigitColumns = 128;                 // whose weights stay in the first-level cache
static_assert(kPairOutputs == kTile && kBlockColumns == 2 * kTile, "a block of two tiles fills a tile of AMX");

// Rows of x whose digits are multiplied with each quad, whole groups of 32.
inline int64_t digit_rows_at_once(int64_t padded) {
  return max64(2 * kTile, min64(512, kDigitsAtOnce / padded) / (2 * kTile) * (2 * kTile));
}

// bf16 digits. Of x: [rows][columns]. Of a quad: [2 pairs][columns / 2][16 outputs][2].
struct Digits {
  uint16_t *high, *low;
};

// Two columns of 16 outputs, side by side in each lane. Digits are cut off, not rounded: that costs less, and one bit.
inline void store_pair(__m512 first, __m512 second, const Digits& to, int64_t at) {
  const __m512i upper = _mm512_set1_epi32(int32_t(0xffff0000u));
  const auto both = [&](__m512 a, __m512 b) {  // the upper half of a below that of b
    return _mm512_ternarylogic_epi32(_mm512_srli_epi32(_mm512_castps_si512(a), 16), _mm512_castps_si512(b), upper, 0xf8);
  };
  const auto rest = [&](__m512 a) {
    return _mm512_sub_ps(a, _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(a), upper)));
  };
  _mm512_storeu_si512(to.high + at, both(first, second));
  _mm512_storeu_si512(to.low + at, both(rest(first), rest(second)));
}

// x: `padded` fp32 numbers.
void split_row(const float* x, int64_t padded, const Digits& to, int64_t row) {
  for (int64_t k = 0; k < padded; k += kBlockColumns)
    store_digits<2>(_mm512_loadu_ps(x + k), _mm512_loadu_ps(x + k + 16), to.high + row * padded + k,
                    to.low + row * padded + k);
}

void clear_row(int64_t padded, const Digits& to, int64_t row) {
  for (int64_t k = 0; k < padded; ++k) to.high[row * padded + k] = to.low[row * padded + k] = 0;
}

// Column `c` of a chunk's 16 outputs, codes less their offset.
template <int BITS, bool HAS_MIN>
inline __m512 code_column(__m512i chunk, int c) {
  __m512i code;
  if constexpr (BITS == 8) {
    code = _mm512_srai_epi32(_mm512_slli_epi32(chunk, unsigned(24 - 8 * c)), 24);
  } else {
    code = _mm512_and_si512(_mm512_srli_epi32(chunk, unsigned(8 * c)), _mm512_set1_epi32(255));
    if constexpr (!HAS_MIN) code = _mm512_sub_epi32(code, _mm512_set1_epi32(1 << (BITS - 1)));
  }
  return _mm512_cvtepi32_ps(code);
}

// Two tiles decoded; scales and minimums: [steps][16].
template <int BITS, bool HAS_MIN>
void split_pair(const uint8_t* first, const uint8_t* second, TileScales pair, int halves, int64_t num_blocks,
                const Digits& to) {
  for (int64_t b = 0; b < num_blocks; ++b) {
    __m256i w0[kChunks], w1[kChunks];
    fetch_ahead<BITS>(first + b * block_bytes(BITS));
    fetch_ahead<BITS>(second + b * block_bytes(BITS));
    unpack<BITS>(first + b * block_bytes(BITS), w0);
    unpack<BITS>(second + b * block_bytes(BITS), w1);
    HR_UNROLL
    for (int j = 0; j < kChunks; ++j) {
      const __m512i chunk = _mm512_inserti64x4(_mm512_castsi256_si512(w0[j]), w1[j], 1);
      const int64_t step = halves == 2 ? 2 * b + j / 4 : b;
      const __m512 scale = _mm512_loadu_ps(pair.scales + step * kPairOutputs);
      __m512 value[4];
      HR_UNROLL
      for (int c = 0; c < 4; ++c) {
        const __m512 code = code_column<BITS, HAS_MIN>(chunk, c);
        value[c] = HAS_MIN ? _mm512_fmadd_ps(code, scale, _mm512_loadu_ps(pair.minimums + b * kPairOutputs))
                           : _mm512_mul_ps(code, scale);
      }
      const int64_t at = (b * kBlockColumns + 4 * j) * kPairOutputs;
      store_pair(value[0], value[1], to, at);
      store_pair(value[2], value[3], to, at + 2 * kPairOutputs);
    }
  }
}

// Four tiles from `tile` on (the last one for those beyond the end). scratch: [4][blocks][16].
void split_quad(const HrPackedMatrix& m, int64_t tile, float* scratch, const Digits& to) {
  const int64_t last = ceil_div(m.num_rows, kTileRows) - 1, tile_bytes = m.num_blocks * block_bytes(m.bits);
  float* minimums = scratch + 2 * m.num_blocks * kPairOutputs;
  const TileScales scales{scratch, m.minimums == nullptr ? nullptr : minimums};
  for (int64_t pair = 0; pair < 2; ++pair) {
    const uint8_t* codes[2];
    for (int64_t i = 0; i < 2; ++i) {
      const int64_t at = min64(tile + 2 * pair + i, last);
      codes[i] = m.codes + at * tile_bytes;
      widen(m, m.scales, m.super_scales, at, scratch + i * kTileRows, kPairOutputs);
      if (scales.minimums != nullptr)
        widen(m, m.minimums, m.super_minimums, at, minimums + i * kTileRows, kPairOutputs);
    }
    const int64_t ahead = pair * m.num_blocks * kBlockColumns * kPairOutputs;
    const Digits part{to.high + ahead, to.low + ahead};
#define HR_SPLIT(BITS)                                                                                    \
  scales.minimums != nullptr ? split_pair<BITS, true>(codes[0], codes[1], scales, 1, m.num_blocks, part)  \
                             : split_pair<BITS, false>(codes[0], codes[1], scales, halves_of(m), m.num_blocks, part)
    switch (m.bits) {
      case 4: HR_SPLIT(4); break;
      case 5: HR_SPLIT(5); break;
      case 6: HR_SPLIT(6); break;
      default: HR_SPLIT(8);
    }
#undef HR_SPLIT
  }
}

void configure_digits() {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) config.set(tile, kTile, 64);
  config.load();
}

// Tiles 0 to 3: sums of (upper rows, first pair), (upper, second), (lower, first), (lower, second). They take turns, so
// that no product waits for the one before. Columns from `first` up to `end`; sums of those before are in out, [32][32].
template <bool HAS_LOWER>
void multiply_quad(const Digits& x, int64_t row, int64_t padded, int64_t first, int64_t end, const Digits& w,
                   float* out) {
  constexpr int64_t out_bytes = kQuadOutputs * 4;
  const uint16_t *upper_high = x.high + row * padded, *upper_low = x.low + row * padded;
  const uint16_t *lower_high = upper_high + kTile * padded, *lower_low = upper_low + kTile * padded;
  const int64_t second = padded * kPairOutputs, x_bytes = padded * 2;
  if (first == 0) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, out, out_bytes);
    _tile_loadd(1, out + kPairOutputs, out_bytes);
    if constexpr (HAS_LOWER) {
      _tile_loadd(2, out + kTile * kQuadOutputs, out_bytes);
      _tile_loadd(3, out + kTile * kQuadOutputs + kPairOutputs, out_bytes);
    }
  }
  for (int64_t k = first; k < end; k += kBlockColumns) {
    const uint16_t *high = w.high + k * kPairOutputs, *low = w.low + k * kPairOutputs;
    _tile_loadd(6, high, 64);
    _tile_loadd(4, upper_low + k, x_bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, high + second, 64);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (HAS_LOWER) {
      _tile_loadd(5, lower_low + k, x_bytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_loadd(4, upper_high + k, x_bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (HAS_LOWER) {
      _tile_loadd(5, lower_high + k, x_bytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_loadd(6, low, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, low + second, 64);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (HAS_LOWER) {
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, out, out_bytes);
  _tile_stored(1, out + kPairOutputs, out_bytes);
  if constexpr (HAS_LOWER) {
    _tile_stored(2, out + kTile * kQuadOutputs, out_bytes);
    _tile_stored(3, out + kTile * kQuadOutputs + kPairOutputs, out_bytes);
  }
  tiles_stored();
}

// A quad times `num_rows` rows of x, which are padded with zeros up to whole groups of 32. out: [rows][32].
void multiply_groups(const Digits& x, int64_t num_rows, int64_t padded, const Digits& w, float* out) {
  for (int64_t first = 0; first < padded; first += kDigitColumns) {
    const int64_t end = min64(first + kDigitColumns, padded);
    for (int64_t row = 0; row < num_rows; row += 2 * kTile) {
      const bool has_lower = num_rows - row > kTile;
      (has_lower ? multiply_quad<true> : multiply_quad<false>)(x, row, padded, first, end, w, out + row * kQuadOutputs);
    }
  }
}

}  // namespace
}  // namespace HR_ISA
}  // namespace hr
