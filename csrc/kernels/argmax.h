// The largest of a row's numbers and its lowest index; NaN counts as the largest.
#pragma once
#include "vec.h"

namespace hr {
namespace HR_ISA {

constexpr int64_t kPiece = 4096;  // numbers looked at before the index is searched

// The largest number of a piece; NaN if there is one.
static inline float largest(const float* x, int64_t count) {
  Vec best = splat(-__builtin_inff());
  IntVec is_nan = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Vec v = load(x + i);
    is_nan |= v != v;
    best = select(v > best, v, best);
  }
  float result = max_lane(best);
  for (int lane = 0; lane < kLanes; ++lane)
    if (is_nan[lane]) return __builtin_nanf("");
  for (; i < count; ++i) {
    if (x[i] != x[i]) return x[i];
    result = x[i] > result ? x[i] : result;
  }
  return result;
}

static inline void find_largest(const float* x, int64_t width, float* value, int64_t* index) {
  float best = -__builtin_inff();
  int64_t piece = 0;
  for (int64_t first = 0; first < width; first += kPiece) {
    const float found = largest(x + first, min64(kPiece, width - first));
    if (found > best || found != found) {
      best = found;
      piece = first;
    }
    if (found != found) break;
  }
  int64_t i = piece;
  if (best == best)
    while (x[i] != best) ++i;
  else
    while (x[i] == x[i]) ++i;
  *value = best;
  *index = i;
}

}  // namespace HR_ISA
}  // namespace hr
