// Vectors of fp32 as wide as the instruction set, from and to memory of any float type.
//
// Written with the vector types of GCC and Clang, so that the same source serves every instruction set; only what they
// cannot express (fp16) is spelled in intrinsics. Everything is in the namespace of its instruction set: see team.h.
#pragma once
#include <math.h>
#include <type_traits>
#include <stdint.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "../headrace.h"

namespace hr {
namespace HR_ISA {

constexpr int kLanes = HR_VECTOR_BYTES / 4;

typedef float Vec __attribute__((vector_size(HR_VECTOR_BYTES)));
typedef int32_t IntVec __attribute__((vector_size(HR_VECTOR_BYTES)));
typedef uint32_t WordVec __attribute__((vector_size(HR_VECTOR_BYTES)));
typedef uint16_t HalfVec __attribute__((vector_size(HR_VECTOR_BYTES / 2)));

struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

static inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Not "Vec{} + value", which is an addition: -0 + 0 is another number.
static inline Vec splat(float value) {
#if HR_VECTOR_BYTES == 64
  return (Vec)_mm512_set1_ps(value);
#elif HR_VECTOR_BYTES == 32
  return (Vec)_mm256_set1_ps(value);
#else
  return Vec{value, value, value, value};
#endif
}

// Not "= {}", which GCC makes a slow instruction that clears memory: sums belong into registers.
template <int R, int N>
static inline void clear(Vec (&sums)[R][N]) {
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < N; ++i) sums[r][i] = Vec{};
}

static inline Vec load(const float* p) {
  Vec v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}

static inline void store(float* p, Vec v) { __builtin_memcpy(p, &v, sizeof(v)); }

static inline Vec load(const Bf16* p) {
  HalfVec half;
  __builtin_memcpy(&half, p, sizeof(half));
  // Not __builtin_convertvector, which GCC does in two halves that it takes apart and puts together again.
#if defined(__AVX512F__)
  return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)half), 16);
#elif defined(__AVX2__)
  return (Vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)half), 16);
#else
  return (Vec)(__builtin_convertvector(half, WordVec) << 16);
#endif
}

// To the nearest, ties to even; NaN stays NaN.
#if defined(__AVX512BF16__)
static inline void store(Bf16* p, Vec v) {
  const __m256bh half = _mm512_cvtneps_pbh((__m512)v);
  __builtin_memcpy(p, &half, sizeof(half));
}
#else
static inline void store(Bf16* p, Vec v) {
  const WordVec bits = (WordVec)v;
  const WordVec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const WordVec nan = (bits >> 16) | 0x40;
  const WordVec is_nan = (WordVec)(v != v);
  const HalfVec half = __builtin_convertvector((rounded & ~is_nan) | (nan & is_nan), HalfVec);
  __builtin_memcpy(p, &half, sizeof(half));
}
#endif

#if defined(__AVX512F__)
static inline Vec load(const F16* p) { return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
static inline void store(F16* p, Vec v) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#elif defined(__F16C__)
static inline Vec load(const F16* p) { return (Vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
static inline void store(F16* p, Vec v) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#else
static inline Vec load(const F16* p) { return (Vec)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits))); }
static inline void store(F16* p, Vec v) {
  vst1_u16(&p->bits, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)v)));
}
#endif

// Single elements, and tails of fewer than kLanes: memory beyond them is neither read nor written.
template <typename T>
static inline Vec load_part(const T* p, int64_t count) {
  T padded[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) padded[i] = p[i];
  return load(padded);
}

template <typename T>
static inline void store_part(T* p, Vec v, int64_t count) {
  T padded[kLanes];
  store(padded, v);
  for (int64_t i = 0; i < count; ++i) p[i] = padded[i];
}

template <typename T>
static inline Vec load_some(const T* p, int64_t count) {
  return count >= kLanes ? load(p) : load_part(p, count);
}

template <typename T>
static inline void store_some(T* p, Vec v, int64_t count) {
  count >= kLanes ? store(p, v) : store_part(p, v, count);
}

static inline float sum(Vec v) {
  float lanes[kLanes];
  store(lanes, v);
  for (int width = kLanes / 2; width >= 1; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
}

// {sum(a), sum(b), sum(c), sum(d)}
static inline void sums_of_4(Vec a, Vec b, Vec c, Vec d, float* out) {
#if defined(__AVX512F__)
  const __m256 v[4] = {_mm256_add_ps(_mm512_castps512_ps256((__m512)a), _mm512_extractf32x8_ps((__m512)a, 1)),
                       _mm256_add_ps(_mm512_castps512_ps256((__m512)b), _mm512_extractf32x8_ps((__m512)b, 1)),
                       _mm256_add_ps(_mm512_castps512_ps256((__m512)c), _mm512_extractf32x8_ps((__m512)c, 1)),
                       _mm256_add_ps(_mm512_castps512_ps256((__m512)d), _mm512_extractf32x8_ps((__m512)d, 1))};
#elif defined(__AVX2__)
  const __m256 v[4] = {(__m256)a, (__m256)b, (__m256)c, (__m256)d};
#endif
#if defined(__AVX2__)
  const __m256 ab = _mm256_add_ps(_mm256_unpacklo_ps(v[0], v[1]), _mm256_unpackhi_ps(v[0], v[1]));
  const __m256 cd = _mm256_add_ps(_mm256_unpacklo_ps(v[2], v[3]), _mm256_unpackhi_ps(v[2], v[3]));
  const __m256 all = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
#else
  vst1q_f32(out, vpaddq_f32(vpaddq_f32((float32x4_t)a, (float32x4_t)b), vpaddq_f32((float32x4_t)c, (float32x4_t)d)));
#endif
}

// The larger of each pair; b where either is NaN.
static inline Vec max(Vec a, Vec b) {
#if defined(__AVX512F__)
  return (Vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (Vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return (Vec)(((IntVec)a & (a > b)) | ((IntVec)b & ~(a > b)));
#endif
}

static inline float max_lane(Vec v) {
  float lanes[kLanes];
  store(lanes, v);
  float largest = lanes[0];
  for (int i = 1; i < kLanes; ++i) largest = lanes[i] > largest ? lanes[i] : largest;
  return largest;
}

static inline Vec select(IntVec mask, Vec yes, Vec no) {
  return (Vec)(((IntVec)yes & mask) | ((IntVec)no & ~mask));
}

// Calls f with a null pointer of the element type, for a dtype known only at run time.
template <typename F>
static inline void with_type(int32_t dtype, F f) {
  if (dtype == HR_F32)
    f((float*)nullptr);
  else if (dtype == HR_BF16)
    f((Bf16*)nullptr);
  else
    f((F16*)nullptr);
}

}  // namespace HR_ISA
}  // namespace hr
