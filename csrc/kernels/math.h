// exp and what is made of it, for vectors of fp32.
#pragma once
#include "vec.h"

namespace hr {
namespace HR_ISA {

// e^x with an error of about one unit in the last place. Below -87.3 it is 0, above 88.7 infinity; NaN stays NaN.
//
// x = n ln 2 + r with |r| <= ln 2 / 2, and a polynomial for e^r (the minimax coefficients of Cephes' expf).
static inline Vec exp(Vec x) {
  const IntVec is_low = x < splat(-87.3f), is_high = x > splat(88.7f);
  const Vec shifter = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number, in the low bits
  const Vec shifted = x * splat(1.44269504f) + shifter;
  const Vec n = shifted - shifter;
  const Vec r = (x - n * splat(0.693359375f)) + n * splat(2.12194440e-4f);
  Vec p = splat(1.9875691500e-4f);
  p = p * r + splat(1.3981999507e-3f);
  p = p * r + splat(8.3334519073e-3f);
  p = p * r + splat(4.1665795894e-2f);
  p = p * r + splat(1.6666665459e-1f);
  p = p * r + splat(5.0000001201e-1f);
  p = p * (r * r) + r + splat(1.0f);
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
  Vec p = splat(1.9875691500e-4f);
  p = p * r + splat(1.3981999507e-3f);
  p = p * r + splat(8.3334519073e-3f);
  p = p * r + splat(4.1665795894e-2f);
  p = p * r + splat(1.6666665459e-1f);
  p = p * r + splat(5.0000001201e-1f);
  p = p * (r * r) + r + splat(1.0f);
  return (Vec)((IntVec)p + ((IntVec)shifted << 23));
}

static inline Vec sigmoid(Vec x) { return splat(1.0f) / (splat(1.0f) + exp(-x)); }

static inline Vec silu(Vec x) { return x / (splat(1.0f) + exp(-x)); }

// 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), and (1 + tanh u) / 2 is sigmoid(2 u).
static inline Vec gelu_tanh(Vec x) {
  const Vec u = splat(0.7978845608f) * (x + splat(0.044715f) * x * x * x);
  return x / (splat(1.0f) + exp(splat(-2.0f) * u));
}

static inline Vec tanh(Vec x) { return splat(2.0f) * sigmoid(splat(2.0f) * x) - splat(1.0f); }

}  // namespace HR_ISA
}  // namespace hr
