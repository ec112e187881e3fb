// row_argmax, draw and token_mask: from logits to tokens.
#include "argmax.h"
#include "kernels.h"
#include "math.h"

namespace hr {
namespace HR_ISA {

namespace {

// -log(1 - u) of u in (0, 1), exact to about a unit in the last place near 0 too: the logarithm of the rounded 1 - u, and what the rounding
// took. The polynomial is that of Cephes' logf.
Vec exponential(Vec u) {
  const Vec one = splat(1.0f), y = one - u, lost = (one - y) - u;
  const IntVec bits = (IntVec)y;
  IntVec exponent = (bits >> 23) - 126;
  Vec m = (Vec)((bits & 0x007fffff) | 0x3f000000);  // [0.5, 1)
  const IntVec is_small = m < splat(0.707106781f);
  exponent += is_small;  // less one
  m = select(is_small, m + m, m) - one;
  const Vec z = m * m;
  Vec p = splat(7.0376836292e-2f);
  p = p * m + splat(-1.1514610310e-1f);
  p = p * m + splat(1.1676998740e-1f);
  p = p * m + splat(-1.2420140846e-1f);
  p = p * m + splat(1.4249322787e-1f);
  p = p * m + splat(-1.6668057665e-1f);
  p = p * m + splat(2.0000714765e-1f);
  p = p * m + splat(-2.4999993993e-1f);
  p = p * m + splat(3.3333331174e-1f);
  const Vec e = __builtin_convertvector(exponent, Vec);
  const Vec tail = p * m * z + e * splat(-2.12194440e-4f) - splat(0.5f) * z;
  return -(m + tail + e * splat(0.693359375f)) - lost / y;
}

WordVec mix(WordVec x, uint32_t high) {
  x ^= x >> 16;
  x = (x * 0x7feb352du) ^ high;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ (x >> 16);
}

// Numbers of tokens [first, first + kLanes); see kernels/reference/noise.py.
Vec noise(uint64_t key, int64_t first) {
  WordVec tokens;
  for (int lane = 0; lane < kLanes; ++lane) tokens[lane] = (uint32_t)first + (uint32_t)lane;
  const WordVec x = mix(tokens * 0x9e3779b9u + (uint32_t)key, (uint32_t)(key >> 32));
  const Vec uniform = (__builtin_convertvector((IntVec)(x >> 1), Vec) + splat(0.5f)) * splat(0x1p-31f);
  const Vec largest = splat(1.0f - 0x1p-24f);
  return exponential(select(uniform > largest, largest, uniform));
}

// Times at which tokens arrive, the largest being the first: weight over noise.
void race(const HrDraw& a, int64_t r, int64_t first, int64_t count, float* scores) {
  const float* x = a.x + r * a.stride + first;
  const bool is_logits = a.temperature != nullptr;
  const Vec top = splat(is_logits ? a.row_max[r] : 0.0f), heat = splat(is_logits ? a.temperature[r] : 1.0f);
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t some = min64(kLanes, count - i);
    Vec weight = load_some(x + i, some);
    if (is_logits) weight = exp((weight - top) / heat);
    store_some(scores + i, weight / noise((uint64_t)a.keys[r], first + i), some);
  }
}

int64_t draw_row(const HrDraw& a, int64_t r) {
  float scores[kPiece], best = -__builtin_inff();
  int64_t token = 0;
  for (int64_t first = 0; first < a.width; first += kPiece) {
    const int64_t count = min64(kPiece, a.width - first);
    race(a, r, first, count, scores);
    float value;
    int64_t index;
    find_largest(scores, count, &value, &index);
    if (value > best || value != value) {
      best = value;
      token = first + index;
    }
    if (value != value) break;
  }
  return token;
}

void mask_word(float* logits, int64_t count, uint32_t word) {
  for (int64_t i = 0; i < count; ++i) logits[i] = (word >> i) & 1 ? logits[i] : -__builtin_inff();
}

}  // namespace

void row_argmax(const void* args, Team& team) {
  const HrRowArgmax& a = *(const HrRowArgmax*)args;
  for (int64_t r = team.rank(); r < a.rows; r += team.size())
    find_largest(a.x + r * a.stride, a.width, a.values + r, a.indices + r);
}

void draw(const void* args, Team& team) {
  const HrDraw& a = *(const HrDraw*)args;
  for (int64_t r = team.rank(); r < a.rows; r += team.size()) a.indices[r] = draw_row(a, r);
}

void token_mask(const void* args, Team& team) {
  const HrTokenMask& a = *(const HrTokenMask*)args;
  for (int64_t n = team.rank(); n < a.rows; n += team.size()) {
    float* logits = a.logits + a.masked_rows[n] * a.stride;
    for (int64_t w = 0; w * 32 < a.width; ++w) {
      const uint32_t word = w < a.num_words ? a.words[n * a.num_words + w] : 0;
      if (word != 0xffffffffu) mask_word(logits + w * 32, min64(32, a.width - w * 32), word);
    }
  }
}

}  // namespace HR_ISA
}  // namespace hr
