// Keys and values in 8, 5 and 4 bits, with a word of scale for each token and head: see kernels/quantized_cache.py.
#pragma once
#include "vec.h"

namespace hr {
namespace HR_ISA {

struct Fp8 {
  float largest;      // the code of a head's largest number
  float to_fp16;      // an fp16 with the code's bits at its top, times this, is the number
  float from_fp32;    // the number times this is an fp32 whose exponent's low bits are the code's
  int code_shift;     // to the left, of the code's bits below the sign in an fp16
  int mantissa_shift; // to the right, of an fp32's bits
};
constexpr Fp8 kE4M3 = {448.0f, 256.0f, 0x1p-120f, 7, 20};
constexpr Fp8 kE5M2 = {1792.0f, 1.0f, 0x1p-112f, 8, 21};

static inline uint16_t to_half(float value) {
  F16 lanes[kLanes];
  store(lanes, splat(value));
  return lanes[0].bits;
}

static inline float from_half(uint16_t bits) {
  const F16 one[1] = {{bits}};
  const Vec v = load_part(one, 1);
  return v[0];
}

static inline void decode_fp8(const Fp8& kind, const uint8_t* codes, float scale, int64_t dim, float* out) {
  const Vec factor = splat(scale * kind.to_fp16);
  for (int64_t i = 0; i < dim; i += kLanes) {
    const int64_t count = min64(kLanes, dim - i);
    F16 wide[kLanes] = {};
    for (int64_t j = 0; j < count; ++j)
      wide[j].bits = (uint16_t)((codes[i + j] & 0x80) << 8 | (codes[i + j] & 0x7f) << kind.code_shift);
    store_some(out + i, load(wide) * factor, count);
  }
}

// 16 for every bit of a nibble.
constexpr float kFifths[16][4] = {{0, 0, 0, 0},   {16, 0, 0, 0},   {0, 16, 0, 0},   {16, 16, 0, 0},
                                  {0, 0, 16, 0},  {16, 0, 16, 0},  {0, 16, 16, 0},  {16, 16, 16, 0},
                                  {0, 0, 0, 16},  {16, 0, 0, 16},  {0, 16, 0, 16},  {16, 16, 0, 16},
                                  {0, 0, 16, 16}, {16, 0, 16, 16}, {0, 16, 16, 16}, {16, 16, 16, 16}};

// Codes of 4 or 5 bits.
static inline void decode_range(bool has_fifth, const uint8_t* codes, const float* word, int64_t dim, float* out) {
  uint16_t halves[2];
  __builtin_memcpy(halves, word, 4);
  const float scale = from_half(halves[0]), minimum = from_half(halves[1]);
  const int64_t half = dim / 2;
  if (!has_fifth) {
    for (int64_t i = 0; i < half; ++i) {
      out[i] = (float)(codes[i] & 15) * scale + minimum;
      out[half + i] = (float)(codes[i] >> 4) * scale + minimum;
    }
    return;
  }
  for (int64_t i = 0; i < half; i += 4) {
    const uint8_t bits = codes[half + i / 4];
    __builtin_memcpy(out + i, kFifths[bits & 15], 16);
    __builtin_memcpy(out + half + i, kFifths[bits >> 4], 16);
  }
  for (int64_t i = 0; i < half; ++i) {
    out[i] = (out[i] + (float)(codes[i] & 15)) * scale + minimum;
    out[half + i] = (out[half + i] + (float)(codes[i] >> 4)) * scale + minimum;
  }
}

// One token of one head as fp32 [dim].
static inline void decode_token(int32_t type, const uint8_t* codes, const float* word, int64_t dim, float* out) {
  if (type == HR_I4 || type == HR_I5) {
    decode_range(type == HR_I5, codes, word, dim, out);
  } else if (type == HR_I8) {
    const float scale = *word;
    for (int64_t i = 0; i < dim; ++i) out[i] = (float)(int8_t)codes[i] * scale;
  } else {
    decode_fp8(type == HR_E4M3 ? kE4M3 : kE5M2, codes, *word, dim, out);
  }
}

// Codes of 4 or 5 bits.
static inline void encode_range(bool has_fifth, const float* values, int64_t dim, uint8_t* codes, float* word) {
  const float largest = has_fifth ? 31.0f : 15.0f;
  float low = values[0], high = values[0];
  for (int64_t i = 1; i < dim; ++i) {
    low = values[i] < low ? values[i] : low;
    high = values[i] > high ? values[i] : high;
  }
  uint16_t halves[2];
  halves[1] = to_half(low);
  const float minimum = from_half(halves[1]), range = high - minimum;
  halves[0] = to_half((range > 0.0f ? range : 0.0f) / largest);
  const float scale = from_half(halves[0]), inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
  const int64_t half = dim / 2;
  int fifths = 0;
  for (int64_t i = 0; i < half; ++i) {
    int pair[2];
    for (int j = 0; j < 2; ++j) {
      const float code = rintf((values[i + j * half] - minimum) * inverse);
      pair[j] = code < 0.0f ? 0 : code > largest ? (int)largest : (int)code;
      fifths |= (pair[j] >> 4) << (4 * j + i % 4);
    }
    codes[i] = (uint8_t)((pair[0] & 15) | (pair[1] & 15) << 4);
    if (has_fifth && i % 4 == 3) {
      codes[half + i / 4] = (uint8_t)fifths;
      fifths = 0;
    }
  }
  __builtin_memcpy(word, halves, 4);
}

static inline uint8_t encode_fp8(const Fp8& kind, float value) {
  const float aligned = value * kind.from_fp32;
  uint32_t bits;
  __builtin_memcpy(&bits, &aligned, 4);
  const uint32_t rest = bits & 0x7fffffff;
  const uint32_t half = (1u << (kind.mantissa_shift - 1)) - 1;
  const uint32_t rounded = (rest + half + (rest >> kind.mantissa_shift & 1)) >> kind.mantissa_shift;
  return (uint8_t)(bits >> 31 << 7 | rounded);
}

// fp32 [dim] as one token of one head.
static inline void encode_token(int32_t type, const float* values, int64_t dim, uint8_t* codes, float* word) {
  if (type == HR_I4 || type == HR_I5) return encode_range(type == HR_I5, values, dim, codes, word);
  float most = 0.0f;
  for (int64_t i = 0; i < dim; ++i) most = fabsf(values[i]) > most ? fabsf(values[i]) : most;
  const Fp8& kind = type == HR_E4M3 ? kE4M3 : kE5M2;
  const float largest = type == HR_I8 ? 127.0f : kind.largest;
  const float inverse = most > 0.0f ? largest / most : 0.0f;
  *word = most / largest;
  for (int64_t i = 0; i < dim; ++i) {
    float scaled = values[i] * inverse;
    scaled = scaled > largest ? largest : scaled < -largest ? -largest : scaled;
    codes[i] = type == HR_I8 ? (uint8_t)(int8_t)rintf(scaled) : encode_fp8(kind, scaled);
  }
}

// Where a token's codes and its word of scale are.
static inline uint8_t* codes_at(const HrCache& cache, int64_t block, int64_t head, int64_t place) {
  return (uint8_t*)cache.data + block * cache.block_stride + head * cache.head_stride + place * cache.token_stride;
}
static inline float* word_at(const HrCache& cache, int64_t block, int64_t head, int64_t place) {
  return cache.words + block * cache.words_block_stride + head * cache.words_head_stride + place;
}

}  // namespace HR_ISA
}  // namespace hr
