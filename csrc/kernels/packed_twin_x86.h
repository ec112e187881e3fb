// Few rows of inputs times two tiles of a packed matrix side by side, an output a lane of 512 bits: half the
// instructions of packed_x86.h for each byte of weights, so that a decode step waits for memory alone.
//
// Whole numbers are exact and blocks are added in order, as packed_x86.h adds them: a result has the same bits by either.
#pragma once
#include "packed_x86.h"

namespace hr {
namespace HR_ISA {
namespace {

constexpr int kTwinOutputs = 2 * kTileRows;

inline __m512i side_by_side(const uint8_t* first, const uint8_t* second) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(load32(first)), load32(second), 1);
}

// The codes of two blocks, a chunk a register; those of 8 bits count 128 more each.
template <int BITS>
inline void unpack_twin(const uint8_t* first, const uint8_t* second, __m512i* w) {
  if constexpr (BITS == 8) {
    HR_UNROLL
    for (int j = 0; j < kChunks; ++j)
      w[j] = _mm512_xor_si512(side_by_side(first + 32 * j, second + 32 * j), _mm512_set1_epi8(-128));
  } else if constexpr (BITS == 4) {
    const __m512i low = _mm512_set1_epi8(15);
    HR_UNROLL
    for (int p = 0; p < 4; ++p) {
      const __m512i both = side_by_side(first + 32 * p, second + 32 * p);
      w[p] = _mm512_and_si512(both, low);
      w[p + 4] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
    }
  } else {
    __m256i halves[2][kChunks];
    unpack<BITS>(first, halves[0]);
    unpack<BITS>(second, halves[1]);
    HR_UNROLL
    for (int j = 0; j < kChunks; ++j)
      w[j] = _mm512_inserti64x4(_mm512_castsi256_si512(halves[0][j]), halves[1][j], 1);
  }
}

template <int NUM>
inline __m512i dot_twin(const __m512i* w, const int8_t* a) {
  __m512i sum = _mm512_setzero_si512();
  HR_UNROLL
  for (int j = 0; j < NUM; ++j) {
    int32_t four;
    __builtin_memcpy(&four, a + 4 * j, 4);
    sum = _mm512_dpbusd_epi32(sum, w[j], _mm512_set1_epi32(four));
  }
  return sum;
}

// Scales or minimums of two tiles: fp16 as they are stored, one a block, or widened to fp32.
template <bool IS_STORED>
struct TwinScales;

template <>
struct TwinScales<true> {
  const uint16_t *first, *second;
  __m512 at(int64_t step) const {
    const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(first + step * kTileRows));
    const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(second + step * kTileRows));
    return _mm512_cvtph_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1));
  }
};

template <>
struct TwinScales<false> {
  const float* values;  // [steps][16]
  __m512 at(int64_t step) const { return _mm512_loadu_ps(values + step * kTwinOutputs); }
};

template <bool IS_STORED>
struct Twin {
  const uint8_t *first, *second;  // codes
  TwinScales<IS_STORED> scales, minimums;
};

// The twin that follows, which lies behind this one: it is fetched while this one is multiplied.
template <int BITS>
inline void fetch_next(const uint8_t* first, const uint8_t* second, int64_t block) {
  const char* next = reinterpret_cast<const char*>(second + (second - first) + block * 2 * block_bytes(BITS));
  HR_UNROLL
  for (int64_t i = 0; i < 64 * BITS; i += 64) _mm_prefetch(next + i, _MM_HINT_T0);
}

template <int BITS, int HALVES, bool HAS_MIN, bool IS_DOUBLE, bool IS_STORED, int ROWS>
void rows_times_twin(const Twin<IS_STORED>& twin, const QuantizedRows& x, int64_t first_row, float* out) {
  constexpr int kShift = BITS - 1;  // the offset 2^(bits-1) of codes without minimums
  constexpr bool kHasOffset = BITS == 8 || !HAS_MIN;
  constexpr int kNum = kChunks / HALVES;
  const int64_t num_blocks = x.num_blocks;
  __m512 sum[ROWS];
  HR_UNROLL
  for (int i = 0; i < ROWS; ++i) sum[i] = _mm512_setzero_ps();
  for (int64_t b = 0; b < num_blocks; ++b) {
    __m512i w[kChunks];
    fetch_next<BITS>(twin.first, twin.second, b);
    unpack_twin<BITS>(twin.first + b * block_bytes(BITS), twin.second + b * block_bytes(BITS), w);
    HR_UNROLL
    for (int i = 0; i < ROWS; ++i) {
      const int64_t at = (first_row + i) * num_blocks + b;
      const __m512 x_scale = _mm512_set1_ps(x.scales[at]);
      HR_UNROLL
      for (int half = 0; half < HALVES; ++half) {
        const int64_t column = at * kBlockColumns + 4 * kNum * half;
        __m512i product = dot_twin<kNum>(w + kNum * half, x.codes + column);
        if constexpr (IS_DOUBLE) {
          const __m512i twice = _mm512_slli_epi32(product, 1);  // 254 times the product is 256 times less twice
          product = _mm512_sub_epi32(_mm512_slli_epi32(product, 8), twice);
          product = _mm512_add_epi32(product, dot_twin<kNum>(w + kNum * half, x.low_codes + column));
        }
        if constexpr (kHasOffset) {
          const int32_t code_sum = HALVES == 2 ? x.code_sums[2 * at + half]
                                               : x.code_sums[2 * at] + x.code_sums[2 * at + 1];
          product = _mm512_sub_epi32(product, _mm512_set1_epi32(code_sum * (1 << kShift)));
        }
        const __m512 scale = _mm512_mul_ps(twin.scales.at(b * HALVES + half), x_scale);
        sum[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(product), scale, sum[i]);
      }
      if constexpr (HAS_MIN) sum[i] = _mm512_fmadd_ps(twin.minimums.at(b), _mm512_set1_ps(x.sums[at]), sum[i]);
    }
  }
  HR_UNROLL
  for (int i = 0; i < ROWS; ++i) _mm512_storeu_ps(out + (first_row + i) * kTwinOutputs, sum[i]);
}

template <int BITS, int HALVES, bool HAS_MIN, bool IS_DOUBLE, bool IS_STORED>
void all_rows_times_twin(const Twin<IS_STORED>& twin, const QuantizedRows& x, int64_t num_rows, float* out) {
  int64_t row = 0;
#if !defined(__SANITIZE_ADDRESS__)  // it takes minutes to compile the same once more
  for (; row + 4 <= num_rows; row += 4)
    rows_times_twin<BITS, HALVES, HAS_MIN, IS_DOUBLE, IS_STORED, 4>(twin, x, row, out);
#endif
  for (; row + 2 <= num_rows; row += 2)
    rows_times_twin<BITS, HALVES, HAS_MIN, IS_DOUBLE, IS_STORED, 2>(twin, x, row, out);
  if (row < num_rows) rows_times_twin<BITS, HALVES, HAS_MIN, IS_DOUBLE, IS_STORED, 1>(twin, x, row, out);
}

template <int BITS, int HALVES, bool HAS_MIN, bool IS_STORED>
void twin_digits(const Twin<IS_STORED>& twin, const QuantizedRows& x, int64_t num_rows, float* out) {
  if (x.low_codes == nullptr) return all_rows_times_twin<BITS, HALVES, HAS_MIN, false>(twin, x, num_rows, out);
  all_rows_times_twin<BITS, HALVES, HAS_MIN, true>(twin, x, num_rows, out);
}

// Whether each block has one scale, in fp16, which is then widened as it is read.
inline bool has_stored_scales(const HrPackedMatrix& m) {
  return m.scale_kind == HR_SCALE_F16 && halves_of(m) == 1 && num_groups(m) == m.num_blocks;
}

template <int BITS>
void twin_stored(const HrPackedMatrix& m, int64_t tile, const QuantizedRows& x, int64_t num_rows, float* out) {
  const int64_t bytes = m.num_blocks * block_bytes(BITS), each = m.num_blocks * kTileRows;
  const uint8_t* codes = m.codes + tile * bytes;
  const uint16_t* scales = static_cast<const uint16_t*>(m.scales) + tile * each;
  Twin<true> twin{codes, codes + bytes, {scales, scales + each}, {nullptr, nullptr}};
  if (m.minimums == nullptr) return twin_digits<BITS, 1, false>(twin, x, num_rows, out);
  const uint16_t* minimums = static_cast<const uint16_t*>(m.minimums) + tile * each;
  twin.minimums = {minimums, minimums + each};
  twin_digits<BITS, 1, true>(twin, x, num_rows, out);
}

template <int BITS>
void twin_widened(const HrPackedMatrix& m, int64_t tile, const QuantizedRows& x, int64_t num_rows, float* scratch,
                  float* out) {
  float* minimums = scratch + 2 * m.num_blocks * kTwinOutputs;
  for (int i = 0; i < 2; ++i) {
    widen(m, m.scales, m.super_scales, tile + i, scratch + i * kTileRows, kTwinOutputs);
    if (m.minimums != nullptr)
      widen(m, m.minimums, m.super_minimums, tile + i, minimums + i * kTileRows, kTwinOutputs);
  }
  const int64_t bytes = m.num_blocks * block_bytes(BITS);
  const uint8_t* codes = m.codes + tile * bytes;
  const Twin<false> twin{codes, codes + bytes, {scratch}, {minimums}};
  if (m.minimums != nullptr) return twin_digits<BITS, 1, true>(twin, x, num_rows, out);
  if (halves_of(m) == 1) return twin_digits<BITS, 1, false>(twin, x, num_rows, out);
  twin_digits<BITS, 2, false>(twin, x, num_rows, out);
}

template <int BITS>
void twin_of(const HrPackedMatrix& m, int64_t tile, const QuantizedRows& x, int64_t num_rows, float* scratch,
             float* out) {
  if (has_stored_scales(m)) return twin_stored<BITS>(m, tile, x, num_rows, out);
  twin_widened<BITS>(m, tile, x, num_rows, scratch, out);
}

// Tiles `tile` and the next. scratch: 4 x [blocks][16]; out: [num_rows][16].
void twin_rounded(const HrPackedMatrix& m, int64_t tile, const QuantizedRows& x, int64_t num_rows, float* scratch,
                  float* out) {
  switch (m.bits) {
    case 4: return twin_of<4>(m, tile, x, num_rows, scratch, out);
    case 5: return twin_of<5>(m, tile, x, num_rows, scratch, out);
    case 6: return twin_of<6>(m, tile, x, num_rows, scratch, out);
    default: return twin_of<8>(m, tile, x, num_rows, scratch, out);
  }
}

}  // namespace
}  // namespace HR_ISA
}  // namespace hr
