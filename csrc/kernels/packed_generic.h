// Packed matrices in plain C++, for instruction sets without kernels of their own.
#pragma once
#include "packed_matrix.h"

namespace hr {
namespace HR_ISA {
namespace {

float scale_at(const HrPackedMatrix& m, const void* values, const uint16_t* supers, int64_t tile, int64_t column, int r) {
  const int64_t at = (tile * num_groups(m) + column / m.group_columns) * kTileRows + r;
  if (m.scale_kind == HR_SCALE_F32) return ((const float*)values)[at];
  if (m.scale_kind == HR_SCALE_F16) return half_to_float(((const uint16_t*)values)[at]);
  const int64_t super_at = (tile * num_supers(m) + column / kSuperColumns) * kTileRows + r;
  return half_to_float(supers[super_at]) * float(((const int8_t*)values)[at]);
}

int code_at(const uint8_t* block, int bits, int r, int column) {
  const int chunk = column / 4, byte = r * 4 + column % 4;
  if (bits == 8) return (int8_t)(block[chunk * 32 + byte]);
  const int nibble = chunk < 4 ? block[chunk * 32 + byte] & 15 : block[(chunk - 4) * 32 + byte] >> 4;
  if (bits == 4) return nibble;
  if (bits == 5) return nibble | ((block[128 + byte] >> chunk) & 1) << 4;
  return nibble | ((block[128 + (chunk / 4) * 32 + byte] >> (2 * (chunk % 4))) & 3) << 4;
}

int offset_of(const HrPackedMatrix& m) { return m.bits == 8 || m.minimums != nullptr ? 0 : 1 << (m.bits - 1); }

const uint8_t* block_at(const HrPackedMatrix& m, int64_t tile, int64_t block) {
  return m.codes + (tile * m.num_blocks + block) * block_bytes(m.bits);
}

void quantize_row(const float* x, const QuantizedRows& to, int64_t row) {
  for (int64_t b = 0; b < to.num_blocks; ++b) {
    const int64_t at = row * to.num_blocks + b;
    float values[kBlockColumns], largest = 0.0f;
    bool is_finite = true;
    for (int i = 0; i < kBlockColumns; ++i) {
      values[i] = x[b * kBlockColumns + i];
      largest = fmaxf(largest, fabsf(values[i]));
      is_finite = is_finite && fabsf(values[i]) < __builtin_inff();
    }
    if (!is_finite) {
      to.put_nan(row, b);
      continue;
    }
    const bool is_double = to.low_codes != nullptr;
    const float scale = largest / 127.0f / (is_double ? float(kSecondDigit) : 1.0f), inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
    int total = 0;
    for (int half = 0; half < 2; ++half) {
      int sum = 0;
      for (int i = half * 16; i < half * 16 + 16; ++i) {
        const int code = int(nearbyintf(values[i] * inverse));
        to.codes[at * kBlockColumns + i] = int8_t(code);
        sum += is_double ? kSecondDigit * code : code;
        if (!is_double) continue;
        const int low = int(nearbyintf(fmaf(values[i], inverse, -float(code)) * float(kSecondDigit)));
        to.low_codes[at * kBlockColumns + i] = int8_t(low);
        sum += low;
      }
      to.code_sums[2 * at + half] = sum;
      total += sum;
    }
    to.scales[at] = scale;
    to.sums[at] = scale * float(total);
  }
}

void tile_rounded(const HrPackedMatrix& m, int64_t tile, const QuantizedRows& x, int64_t num_x_rows, float*, float* out,
               int64_t out_stride) {
  const int halves = halves_of(m), width = kBlockColumns / halves, offset = offset_of(m);
  for (int64_t row = 0; row < num_x_rows; ++row) {
    for (int r = 0; r < kTileRows; ++r) {
      float total = 0.0f;
      for (int64_t b = 0; b < m.num_blocks; ++b) {
        const int8_t* a = x.codes + (row * m.num_blocks + b) * kBlockColumns;
        const int64_t at = row * m.num_blocks + b;
        for (int half = 0; half < halves; ++half) {
          int dot = 0;
          for (int i = half * width; i < (half + 1) * width; ++i) {
            const int low = x.low_codes == nullptr ? 0 : x.low_codes[at * kBlockColumns + i];
            const int whole = x.low_codes == nullptr ? a[i] : kSecondDigit * a[i] + low;
            dot += (code_at(block_at(m, tile, b), m.bits, r, i) - offset) * whole;
          }
          const float scale =
              scale_at(m, m.scales, m.super_scales, tile, b * kBlockColumns + half * width, r) * x.scales[at];
          total = fmaf(float(dot), scale, total);
        }
        if (m.minimums != nullptr) {
          const float minimum = scale_at(m, m.minimums, m.super_minimums, tile, b * kBlockColumns, r);
          total = fmaf(minimum, x.sums[at], total);
        }
      }
      out[row * out_stride + r] = total;
    }
  }
}

void decode(const HrPackedMatrix& m, int64_t tile, int r, float* out) {
  const int offset = offset_of(m);
  for (int64_t k = 0; k < m.num_blocks * kBlockColumns; ++k) {
    const int code = code_at(block_at(m, tile, k / kBlockColumns), m.bits, r, int(k % kBlockColumns)) - offset;
    float value = scale_at(m, m.scales, m.super_scales, tile, k, r) * float(code);
    if (m.minimums != nullptr) value += scale_at(m, m.minimums, m.super_minimums, tile, k, r);
    out[k] = value;
  }
}

void tile_float(const HrPackedMatrix& m, int64_t tile, const float* x, int64_t x_stride, int64_t num_x_rows, float*,
                float* panel, float* out, int64_t out_stride) {
  for (int r = 0; r < kTileRows; ++r) {
    decode(m, tile, r, panel);
    for (int64_t row = 0; row < num_x_rows; ++row) {
      float total = 0.0f;
      for (int64_t k = 0; k < m.num_blocks * kBlockColumns; ++k)
        total = fmaf(x[row * x_stride + k], panel[k], total);
      out[row * out_stride + r] = total;
    }
  }
}

constexpr int64_t kManyRows = 4;

void pair_float(const HrPackedMatrix& m, int64_t tile, const float* x, int64_t x_stride, int64_t num_rows,
                float* scales, float* panels, float* out, int64_t tile_stride) {
  tile_float(m, tile, x, x_stride, num_rows, scales, panels, out, kTileRows);
  tile_float(m, tile + 1, x, x_stride, num_rows, scales, panels, out + tile_stride, kTileRows);
}

void decode_row(const HrPackedMatrix& m, int64_t row, float*, float* out) {
  decode(m, row / kTileRows, int(row % kTileRows), out);
}

}  // namespace
}  // namespace HR_ISA
}  // namespace hr
