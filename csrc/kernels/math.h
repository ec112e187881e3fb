// exp and what is made of it, for vectors of fp32.
#pragma once
#include "vec.h"

namespace hr {
namespace HR_ISA {

// e^r for |r| <= ln 2 / 2.
static inline Vec exp_of_rest(Vec r) {
  Vec p = splat(1.9875691500e-4f);
  p = p * r + splat(1.3981999507e-3f);
  p = p * r + splat(8.3334519073e-3f);
  p = p * r + splat(4.1665795894e-2f);
  p = p * r + splat(1.6666665459e-1f);
  p = p * r + splat(5.0000001201e-1f);
  return p * (r * r) + r + splat(1.0f);
}

// e^x with an error of about one unit in the last place. Below -87.3 it is 0, above 88.7 infinity; NaN stays NaN.
//
// x = n ln 2 + r with |r| <= ln 2 / 2, and a polynomial for e^r (the minimax coefficients of Cephes' expf).
#if defined(__AVX512F__)
static inline Vec exp(Vec x) {
  // Bounds outside of which the result is 0 or infinity anyhow: an infinite x would be multiplied with 0 below.
  const __m512 bounded = _mm512_max_ps(_mm512_set1_ps(-110.0f), _mm512_min_ps(_mm512_set1_ps(100.0f), (__m512)x));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(bounded, _mm512_set1_ps(1.44269504f)),
                                        _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const Vec whole = (Vec)n;
  const Vec r = ((Vec)bounded - whole * splat(0.693359375f)) + whole * splat(2.12194440e-4f);
  return (Vec)_mm512_scalef_ps((__m512)exp_of_rest(r), n);
}

static inline Vec exp_of_negative(Vec x) { return exp(x); }
#else
static inline Vec exp(Vec x) {
  const IntVec is_low = x < splat(-87.3f), is_high = x > splat(88.7f);
  const Vec shifter = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number, in the low bits
  const Vec shifted = x * splat(1.44269504f) + shifter;
  const Vec n = shifted - shifter;
  const Vec r = (x - n * splat(0.693359375f)) + n * splat(2.12194440e-4f);
  const Vec p = exp_of_rest(r);
  // 2^n in two factors: n may be 128, whose power alone would be infinite.
  const IntVec whole = (IntVec)shifted - (IntVec)shifter;
  const IntVec half = whole >> 1;
  const Vec first = (Vec)((half + 127) << 23), second = (Vec)((whole - half + 127) << 23);
  const Vec result = p * first * second;
  return select(is_low, Vec{}, select(is_high, splat(__builtin_inff()), result));
}

// The same for x <= 0, cheaper; where it is below 1.2e-38, it is 1.2e-38.
static inline Vec exp_of_negative(Vec x) {
  const Vec shifter = splat(12582912.0f);
  const Vec bounded = max(splat(-87.3f), x);
  const Vec shifted = bounded * splat(1.44269504f) + shifter;
  const Vec n = shifted - shifter;
  const Vec r = (bounded - n * splat(0.693359375f)) + n * splat(2.12194440e-4f);
  const Vec p = exp_of_rest(r);
  return (Vec)((IntVec)p + ((IntVec)shifted << 23));
}
#endif

// x / y to about two units in the last place, for 1 <= y: quicker than a division. Above 8e37 y is 8e37.
static inline Vec divide(Vec x, Vec y) {
#if defined(__AVX512F__)
  const Vec bounded = (Vec)_mm512_min_ps(_mm512_set1_ps(8e37f), (__m512)y);
  const Vec guess = (Vec)_mm512_rcp14_ps((__m512)bounded);
  return x * (guess * (splat(2.0f) - bounded * guess));  // one step of Newton's method
#else
  return x / y;
#endif
}

static inline Vec sigmoid(Vec x) { return divide(splat(1.0f), splat(1.0f) + exp(-x)); }

static inline Vec silu(Vec x) { return divide(x, splat(1.0f) + exp(-x)); }

// 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), and (1 + tanh u) / 2 is sigmoid(2 u).
static inline Vec gelu_tanh(Vec x) {
  const Vec u = splat(0.7978845608f) * (x + splat(0.044715f) * x * x * x);
  return x / (splat(1.0f) + exp(splat(-2.0f) * u));
}

static inline Vec tanh(Vec x) { return splat(2.0f) * sigmoid(splat(2.0f) * x) - splat(1.0f); }

}  // namespace HR_ISA
}  // namespace hr
