// Packed matrices on x86, decoded to fp32: products with inputs as they are, and single rows of a table.
#pragma once
#include "packed_x86.h"

namespace hr {
namespace HR_ISA {
namespace {

// Column 4 j + c of the tile's 8 rows, codes less their offset, as fp32.
template <int BITS, bool HAS_MIN>
inline __m256 code_column(__m256i chunk, int c) {
  __m256i code;
  if constexpr (BITS == 8) {
    code = _mm256_srai_epi32(_mm256_slli_epi32(chunk, 24 - 8 * c), 24);
  } else {
    code = _mm256_and_si256(_mm256_srli_epi32(chunk, 8 * c), _mm256_set1_epi32(255));
    if constexpr (!HAS_MIN) code = _mm256_sub_epi32(code, _mm256_set1_epi32(1 << (BITS - 1)));
  }
  return _mm256_cvtepi32_ps(code);
}

// The tile's weights as fp32 [columns][8]; product and sum are rounded one after the other, as ggml does.
template <int BITS, bool HAS_MIN>
void decode_tile(const uint8_t* codes, TileScales tile, int halves, int64_t num_blocks, float* panel) {
  for (int64_t b = 0; b < num_blocks; ++b) {
    __m256i w[kChunks];
    unpack<BITS>(codes + b * 32 * BITS, w);
    HR_UNROLL
    for (int j = 0; j < kChunks; ++j) {
      const int64_t step = halves == 2 ? 2 * b + j / 4 : b;
      const __m256 scale = _mm256_loadu_ps(tile.scales + step * kTileRows);
      HR_UNROLL
      for (int c = 0; c < 4; ++c) {
        __m256 value = _mm256_mul_ps(code_column<BITS, HAS_MIN>(w[j], c), scale);
        if constexpr (HAS_MIN) value = _mm256_add_ps(value, _mm256_loadu_ps(tile.minimums + b * kTileRows));
        _mm256_storeu_ps(panel + (b * kBlockColumns + 4 * j + c) * kTileRows, value);
      }
    }
  }
}

void decode_any(const HrPackedMatrix& m, int64_t tile, TileScales scales, float* panel) {
  const uint8_t* codes = m.codes + tile * m.num_blocks * block_bytes(m.bits);
  const int halves = halves_of(m);
  const bool has_min = m.minimums != nullptr;
#define HR_DECODE(BITS)                                                            \
  has_min ? decode_tile<BITS, true>(codes, scales, halves, m.num_blocks, panel)          \
          : decode_tile<BITS, false>(codes, scales, halves, m.num_blocks, panel)
  switch (m.bits) {
    case 4: HR_DECODE(4); break;
    case 5: HR_DECODE(5); break;
    case 6: HR_DECODE(6); break;
    default: HR_DECODE(8);
  }
#undef HR_DECODE
}

// Sums of ROWS rows of x over a decoded tile. Four chains a row, which hide the latency of a single row's.
template <int ROWS>
void panel_rows(const float* panel, int64_t num_columns, const float* x, int64_t x_stride, float* out,
                int64_t out_stride) {
  constexpr int kChains = 4;
  __m256 sum[ROWS][kChains];
  HR_UNROLL
  for (int i = 0; i < ROWS; ++i)
    HR_UNROLL
    for (int c = 0; c < kChains; ++c) sum[i][c] = _mm256_setzero_ps();
  for (int64_t k = 0; k < num_columns; k += kChains) {
    HR_UNROLL
    for (int c = 0; c < kChains; ++c) {
      const __m256 w = _mm256_loadu_ps(panel + (k + c) * kTileRows);
      HR_UNROLL
      for (int i = 0; i < ROWS; ++i)
        sum[i][c] = _mm256_fmadd_ps(w, _mm256_broadcast_ss(x + i * x_stride + k + c), sum[i][c]);
    }
  }
  HR_UNROLL
  for (int i = 0; i < ROWS; ++i) {
    const __m256 total = _mm256_add_ps(_mm256_add_ps(sum[i][0], sum[i][1]), _mm256_add_ps(sum[i][2], sum[i][3]));
    _mm256_storeu_ps(out + i * out_stride, total);
  }
}

// The same over two decoded tiles, one behind the other, one chain a sum: rows enough hide the latency.
template <int ROWS>
void pair_rows(const float* panels, int64_t num_columns, const float* x, int64_t x_stride, float* out,
               int64_t tile_stride) {
  const float* second = panels + num_columns * kTileRows;
  __m256 sum[ROWS][2];
  HR_UNROLL
  for (int i = 0; i < ROWS; ++i) sum[i][0] = sum[i][1] = _mm256_setzero_ps();
  for (int64_t k = 0; k < num_columns; ++k) {
    const __m256 w0 = _mm256_loadu_ps(panels + k * kTileRows), w1 = _mm256_loadu_ps(second + k * kTileRows);
    HR_UNROLL
    for (int i = 0; i < ROWS; ++i) {
      const __m256 input = _mm256_broadcast_ss(x + i * x_stride + k);
      sum[i][0] = _mm256_fmadd_ps(w0, input, sum[i][0]);
      sum[i][1] = _mm256_fmadd_ps(w1, input, sum[i][1]);
    }
  }
  HR_UNROLL
  for (int i = 0; i < ROWS; ++i) {
    _mm256_storeu_ps(out + i * kTileRows, sum[i][0]);
    _mm256_storeu_ps(out + tile_stride + i * kTileRows, sum[i][1]);
  }
}

constexpr int64_t kManyRows = 4;  // from which on tiles are multiplied in pairs

// Two tiles; the second one's sums are tile_stride behind the first one's.
void pair_float(const HrPackedMatrix& m, int64_t tile, const float* x, int64_t x_stride, int64_t num_rows,
                float* scale_scratch, float* panels, float* out, int64_t tile_stride) {
  const int64_t num_columns = m.num_blocks * kBlockColumns;
  decode_any(m, tile, widen_tile(m, tile, scale_scratch), panels);
  decode_any(m, tile + 1, widen_tile(m, tile + 1, scale_scratch), panels + num_columns * kTileRows);
  int64_t row = 0;
  for (; row + 6 <= num_rows; row += 6)
    pair_rows<6>(panels, num_columns, x + row * x_stride, x_stride, out + row * kTileRows, tile_stride);
  for (; row + 3 <= num_rows; row += 3)
    pair_rows<3>(panels, num_columns, x + row * x_stride, x_stride, out + row * kTileRows, tile_stride);
  for (; row < num_rows; ++row)
    pair_rows<1>(panels, num_columns, x + row * x_stride, x_stride, out + row * kTileRows, tile_stride);
}

void tile_float(const HrPackedMatrix& m, int64_t tile, const float* x, int64_t x_stride, int64_t num_rows,
                float* scale_scratch, float* panel, float* out, int64_t out_stride) {
  decode_any(m, tile, widen_tile(m, tile, scale_scratch), panel);
  const int64_t num_columns = m.num_blocks * kBlockColumns;
  int64_t row = 0;
  for (; row + 3 <= num_rows; row += 3)
    panel_rows<3>(panel, num_columns, x + row * x_stride, x_stride, out + row * out_stride, out_stride);
  for (; row < num_rows; ++row)
    panel_rows<1>(panel, num_columns, x + row * x_stride, x_stride, out + row * out_stride, out_stride);
}

void decode_row(const HrPackedMatrix& m, int64_t row, float* scale_scratch, float* out) {
  // A block of 8 rows at a time, of which one is kept: rows are looked up a few at a time.
  const int64_t tile = row / kTileRows, r = row % kTileRows;
  const TileScales scales = widen_tile(m, tile, scale_scratch);
  HrPackedMatrix block = m;
  block.num_blocks = 1;
  const int steps = halves_of(m);
  for (int64_t b = 0; b < m.num_blocks; ++b) {
    float panel[kBlockColumns * kTileRows];
    block.codes = m.codes + (tile * m.num_blocks + b) * block_bytes(m.bits);
    const float* minimums = scales.minimums == nullptr ? nullptr : scales.minimums + b * kTileRows;
    decode_any(block, 0, {scales.scales + b * steps * kTileRows, minimums}, panel);
    for (int k = 0; k < kBlockColumns; ++k) out[b * kBlockColumns + k] = panel[k * kTileRows + r];
  }
}

}  // namespace
}  // namespace HR_ISA
}  // namespace hr
