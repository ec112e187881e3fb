// Packed matrices on x86, in whole numbers: AVX2 with FMA and F16C, and the products of VNNI where they are compiled
// for. Inputs that are not rounded: packed_float_x86.h.
#pragma once
#include <immintrin.h>

#include "packed_matrix.h"

// Arrays of registers stay in registers only if the loops over them are unrolled before anything else is done.
#define HR_UNROLL _Pragma("GCC unroll 16")

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
#define HR_HAS_VNNI 1
#define HR_DPBUSD _mm256_dpbusd_epi32
#elif defined(__AVXVNNI__)
#define HR_HAS_VNNI 1
#define HR_DPBUSD _mm256_dpbusd_avx_epi32
#else
#define HR_HAS_VNNI 0
#endif

namespace hr {
namespace HR_ISA {
namespace {

constexpr int kChunks = 8;  // of 4 columns, in a block

inline __m256i load32(const void* address) { return _mm256_loadu_si256((const __m256i*)address); }

constexpr int64_t kBytesAhead = 2048;  // of codes; 1 and 4 KiB are slower

// Codes that follow: a core waits for too few at a time by itself, and reads memory at half its speed.
template <int BITS>
inline void fetch_ahead(const uint8_t* block) {
  HR_UNROLL
  for (int64_t i = 0; i < 32 * BITS; i += 64)
    _mm_prefetch(reinterpret_cast<const char*>(block + kBytesAhead + i), _MM_HINT_T0);
}

// The codes of a block, a chunk a register.
template <int BITS>
inline void unpack(const uint8_t* block, __m256i* w) {
  if constexpr (BITS == 8) {
    HR_UNROLL
    for (int j = 0; j < kChunks; ++j) w[j] = load32(block + 32 * j);
    return;
  }
  const __m256i low = _mm256_set1_epi8(15);
  HR_UNROLL
  for (int p = 0; p < 4; ++p) {
    const __m256i both = load32(block + 32 * p);
    w[p] = _mm256_and_si256(both, low);
    w[p + 4] = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
  }
  if constexpr (BITS == 5) {
    const __m256i high = load32(block + 128), bit = _mm256_set1_epi8(16);
    HR_UNROLL
    for (int j = 0; j < kChunks; ++j) {
      const __m256i moved = j < 4 ? _mm256_slli_epi16(high, 4 - j) : _mm256_srli_epi16(high, j - 4);
      w[j] = _mm256_or_si256(w[j], _mm256_and_si256(moved, bit));
    }
  }
  if constexpr (BITS == 6) {
    const __m256i two_bits = _mm256_set1_epi8(48);
    HR_UNROLL
    for (int h = 0; h < 2; ++h) {
      const __m256i high = load32(block + 128 + 32 * h);
      HR_UNROLL
      for (int i = 0; i < 4; ++i) {
        const __m256i moved = i < 2 ? _mm256_slli_epi16(high, 4 - 2 * i) : _mm256_srli_epi16(high, 2 * i - 4);
        w[4 * h + i] = _mm256_or_si256(w[4 * h + i], _mm256_and_si256(moved, two_bits));
      }
    }
  }
}

inline __m256i broadcast4(const int8_t* a) {
  int32_t four;
  __builtin_memcpy(&four, a, 4);
  return _mm256_set1_epi32(four);
}

// Sums over NUM chunks of codes times inputs, a row a lane. With VNNI, codes of 8 bits count 128 more each.
template <int BITS, int NUM>
inline __m256i dot(const __m256i* w, const int8_t* a) {
#if HR_HAS_VNNI
  __m256i sum = _mm256_setzero_si256();
  HR_UNROLL
  for (int j = 0; j < NUM; ++j) {
    const __m256i codes = BITS == 8 ? _mm256_xor_si256(w[j], _mm256_set1_epi8(-128)) : w[j];
    sum = HR_DPBUSD(sum, codes, broadcast4(a + 4 * j));
  }
  return sum;
#else
  const __m256i ones = _mm256_set1_epi16(1);
  if constexpr (BITS == 8) {
    __m256i sum = _mm256_setzero_si256();
    HR_UNROLL
    for (int j = 0; j < NUM; ++j) {
      const __m256i signed_inputs = _mm256_sign_epi8(broadcast4(a + 4 * j), w[j]);
      const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w[j]), signed_inputs);
      sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, ones));
    }
    return sum;
  } else {
    // How many products of two fit into 16 bits: 15, 31 or 63 times 127, twice.
    constexpr int kAtOnce = BITS == 4 ? 8 : BITS == 5 ? 4 : 2;
    __m256i sum = _mm256_setzero_si256();
    HR_UNROLL
    for (int j = 0; j < NUM; j += kAtOnce) {
      __m256i pairs = _mm256_maddubs_epi16(w[j], broadcast4(a + 4 * j));
      for (int i = 1; i < kAtOnce && j + i < NUM; ++i)
        pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(w[j + i], broadcast4(a + 4 * (j + i))));
      sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, ones));
    }
    return sum;
  }
#endif
}

inline __m256 half8(const uint16_t* address) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(address)));
}

// Scales or minimums of a tile for each block (or half block, for groups of 16): 8 fp32 every `stride`.
void widen(const HrPackedMatrix& m, const void* values, const uint16_t* supers, int64_t tile, float* out,
           int64_t stride = kTileRows) {
  const int64_t groups = num_groups(m), per_group = m.group_columns <= 32 ? 1 : m.group_columns / 32;
  const int64_t num_steps = m.num_blocks * halves_of(m);
  const int64_t steps_per_super = kSuperColumns / (m.group_columns == 16 ? 16 : 32);
  if (m.scale_kind == HR_SCALE_F16 && groups == num_steps) {  // the commonest, without choices in the loop
    const uint16_t* halves = static_cast<const uint16_t*>(values) + tile * groups * kTileRows;
    for (int64_t g = 0; g < groups; ++g) _mm256_storeu_ps(out + g * stride, half8(halves + g * kTileRows));
    return;
  }
  for (int64_t g = 0, step = 0; g < groups; ++g) {
    const int64_t at = (tile * groups + g) * kTileRows;
    __m256 scale;
    if (m.scale_kind == HR_SCALE_F32) {
      scale = _mm256_loadu_ps(static_cast<const float*>(values) + at);
    } else if (m.scale_kind == HR_SCALE_F16) {
      scale = half8(static_cast<const uint16_t*>(values) + at);
    } else {
      const __m128i small = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(static_cast<const int8_t*>(values) + at));
      const __m256 super = half8(supers + (tile * num_supers(m) + step / steps_per_super) * kTileRows);
      scale = _mm256_mul_ps(super, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(small)));
    }
    for (int64_t i = 0; i < per_group && step < num_steps; ++i, ++step) _mm256_storeu_ps(out + step * stride, scale);
  }
}

struct TileScales {
  const float* scales;
  const float* minimums;  // null: none
};

// scratch: 2 x [blocks * 2][8].
TileScales widen_tile(const HrPackedMatrix& m, int64_t tile, float* scratch) {
  float* minimums = scratch + m.num_blocks * 2 * kTileRows;
  widen(m, m.scales, m.super_scales, tile, scratch);
  if (m.minimums == nullptr) return {scratch, nullptr};
  widen(m, m.minimums, m.super_minimums, tile, minimums);
  return {scratch, minimums};
}

template <int BITS, int HALVES, bool HAS_MIN, bool IS_DOUBLE, int ROWS>
void rows_rounded(const uint8_t* codes, TileScales tile, const QuantizedRows& x, int64_t first_row, float* out,
               int64_t out_stride) {
  constexpr int kShift = BITS - 1;  // the offset 2^(bits-1) of codes without minimums
  constexpr bool kHasOffset = HR_HAS_VNNI && BITS == 8 ? true : BITS != 8 && !HAS_MIN;
  constexpr int kNum = kChunks / HALVES;
  const int64_t num_blocks = x.num_blocks;
  __m256 sum[ROWS];
  HR_UNROLL
  for (int i = 0; i < ROWS; ++i) sum[i] = _mm256_setzero_ps();
  for (int64_t b = 0; b < num_blocks; ++b) {
    __m256i w[kChunks];
    fetch_ahead<BITS>(codes + b * 32 * BITS);
    unpack<BITS>(codes + b * 32 * BITS, w);
    HR_UNROLL
    for (int i = 0; i < ROWS; ++i) {
      const int64_t at = (first_row + i) * num_blocks + b;
      const int8_t* a = x.codes + at * kBlockColumns;
      const __m256 x_scale = _mm256_broadcast_ss(x.scales + at);
      HR_UNROLL
      for (int half = 0; half < HALVES; ++half) {
        __m256i product = dot<BITS, kNum>(w + kNum * half, a + 4 * kNum * half);
        if constexpr (IS_DOUBLE) {
          const int8_t* low = x.low_codes + at * kBlockColumns + 4 * kNum * half;
          const __m256i twice = _mm256_slli_epi32(product, 1);  // 254 times the product is 256 times less twice
          product = _mm256_sub_epi32(_mm256_slli_epi32(product, 8), twice);
          product = _mm256_add_epi32(product, dot<BITS, kNum>(w + kNum * half, low));
        }
        if constexpr (kHasOffset) {
          const int32_t code_sum = HALVES == 2 ? x.code_sums[2 * at + half]
                                               : x.code_sums[2 * at] + x.code_sums[2 * at + 1];
          product = _mm256_sub_epi32(product, _mm256_set1_epi32(code_sum * (1 << kShift)));
        }
        const __m256 scale = _mm256_loadu_ps(tile.scales + (b * HALVES + half) * kTileRows);
        sum[i] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(product), _mm256_mul_ps(scale, x_scale), sum[i]);
      }
      if constexpr (HAS_MIN) {
        const __m256 minimum = _mm256_loadu_ps(tile.minimums + b * kTileRows);
        sum[i] = _mm256_fmadd_ps(minimum, _mm256_broadcast_ss(x.sums + at), sum[i]);
      }
    }
  }
  HR_UNROLL
  for (int i = 0; i < ROWS; ++i) _mm256_storeu_ps(out + (first_row + i) * out_stride, sum[i]);
}

template <int BITS, int HALVES, bool HAS_MIN, bool IS_DOUBLE>
void all_rows_of(const uint8_t* codes, TileScales tile, const QuantizedRows& x, int64_t num_rows, float* out,
                   int64_t out_stride) {
  int64_t row = 0;
  for (; row + 4 <= num_rows; row += 4)
    rows_rounded<BITS, HALVES, HAS_MIN, IS_DOUBLE, 4>(codes, tile, x, row, out, out_stride);
  if (num_rows - row >= 2) {
    rows_rounded<BITS, HALVES, HAS_MIN, IS_DOUBLE, 2>(codes, tile, x, row, out, out_stride);
    row += 2;
  }
  if (row < num_rows) rows_rounded<BITS, HALVES, HAS_MIN, IS_DOUBLE, 1>(codes, tile, x, row, out, out_stride);
}

template <int BITS, int HALVES, bool HAS_MIN>
void all_rows_rounded(const uint8_t* codes, TileScales tile, const QuantizedRows& x, int64_t num_rows, float* out,
                      int64_t out_stride) {
  if (x.low_codes == nullptr) {
    all_rows_of<BITS, HALVES, HAS_MIN, false>(codes, tile, x, num_rows, out, out_stride);
  } else {
    all_rows_of<BITS, HALVES, HAS_MIN, true>(codes, tile, x, num_rows, out, out_stride);
  }
}

template <int BITS>
void tile_rounded_of(const HrPackedMatrix& m, const uint8_t* codes, TileScales tile, const QuantizedRows& x,
                  int64_t num_rows, float* out, int64_t out_stride) {
  if (m.minimums != nullptr) {
    all_rows_rounded<BITS, 1, true>(codes, tile, x, num_rows, out, out_stride);
  } else if (halves_of(m) == 1) {
    all_rows_rounded<BITS, 1, false>(codes, tile, x, num_rows, out, out_stride);
  } else {
    all_rows_rounded<BITS, 2, false>(codes, tile, x, num_rows, out, out_stride);
  }
}

void tile_rounded(const HrPackedMatrix& m, int64_t tile, const QuantizedRows& x, int64_t num_rows, float* scale_scratch,
               float* out, int64_t out_stride) {
  const TileScales scales = widen_tile(m, tile, scale_scratch);
  const uint8_t* codes = m.codes + tile * m.num_blocks * block_bytes(m.bits);
  switch (m.bits) {
    case 4: return tile_rounded_of<4>(m, codes, scales, x, num_rows, out, out_stride);
    case 5: return tile_rounded_of<5>(m, codes, scales, x, num_rows, out, out_stride);
    case 6: return tile_rounded_of<6>(m, codes, scales, x, num_rows, out, out_stride);
    default: return tile_rounded_of<8>(m, codes, scales, x, num_rows, out, out_stride);
  }
}

inline float largest_lane(__m256 v) {
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_shuffle_ps(m, m, 1)));
}

inline int32_t sum_lanes(__m256i v) {
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}

// Four vectors of int32 as 32 int8.
inline void store_codes(const __m256i* q, int8_t* to) {
  const __m256i words = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permutevar8x32_epi32(words, order));
}

void quantize_row(const float* x, const QuantizedRows& to, int64_t row) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  for (int64_t b = 0; b < to.num_blocks; ++b) {
    const int64_t at = row * to.num_blocks + b;
    const float* from = x + b * kBlockColumns;
    __m256 v[4], most = _mm256_setzero_ps(), nans = _mm256_setzero_ps();
    HR_UNROLL
    for (int i = 0; i < 4; ++i) {
      v[i] = _mm256_loadu_ps(from + 8 * i);
      most = _mm256_max_ps(most, _mm256_andnot_ps(sign, v[i]));
      nans = _mm256_or_ps(nans, _mm256_cmp_ps(v[i], v[i], _CMP_UNORD_Q));
    }
    const float largest = largest_lane(most);
    if (_mm256_movemask_ps(nans) != 0 || !(largest < __builtin_inff())) {
      to.put_nan(row, b);
      continue;
    }
    const __m256 inverse = _mm256_set1_ps(largest > 0.0f ? 127.0f / largest : 0.0f);
    __m256i q[4], rest[4];
    HR_UNROLL
    for (int i = 0; i < 4; ++i) q[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse));
    store_codes(q, to.codes + at * kBlockColumns);
    float scale = largest / 127.0f;
    if (to.low_codes != nullptr) {
      const __m256 digits = _mm256_set1_ps(float(kSecondDigit));
      HR_UNROLL
      for (int i = 0; i < 4; ++i) {
        const __m256 left = _mm256_fmsub_ps(v[i], inverse, _mm256_cvtepi32_ps(q[i]));
        rest[i] = _mm256_cvtps_epi32(_mm256_mul_ps(left, digits));
        q[i] = _mm256_add_epi32(_mm256_mullo_epi32(q[i], _mm256_set1_epi32(kSecondDigit)), rest[i]);
      }
      store_codes(rest, to.low_codes + at * kBlockColumns);
      scale /= float(kSecondDigit);
    }
    const int32_t first = sum_lanes(_mm256_add_epi32(q[0], q[1])), second = sum_lanes(_mm256_add_epi32(q[2], q[3]));
    to.scales[at] = scale;
    to.sums[at] = scale * float(first + second);
    to.code_sums[2 * at] = first;
    to.code_sums[2 * at + 1] = second;
  }
}

}  // namespace
}  // namespace HR_ISA
}  // namespace hr
