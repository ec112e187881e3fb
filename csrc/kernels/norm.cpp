// RMSNorm (Zhang and Sennrich), with or without adding to a residual stream first.
#include "kernels.h"
#include "vec.h"

namespace hr {
namespace HR_ISA {

namespace {

template <typename T>
void norm_row(const HrRmsNorm& a, int64_t row) {
  const T* x = (const T*)a.x + row * a.x_stride;
  T* out = (T*)a.out + row * a.out_stride;
  const T* source = x;
  Vec squares = {};
  if (a.residual != nullptr) {
    T* residual = (T*)a.residual + row * a.residual_stride;
    for (int64_t i = 0; i < a.width; i += kLanes) {
      const int64_t count = min64(kLanes, a.width - i);
      store_some(residual + i, load_some(residual + i, count) + load_some(x + i, count), count);
      const Vec total = load_some(residual + i, count);  // as stored: what the next layer adds to
      squares += total * total;
    }
    source = residual;
  } else {
    for (int64_t i = 0; i < a.width; i += kLanes) {
      const Vec v = load_some(x + i, min64(kLanes, a.width - i));
      squares += v * v;
    }
  }
  const Vec scale = splat(1.0f / sqrtf(sum(squares) / (float)a.width + a.eps));
  for (int64_t i = 0; i < a.width; i += kLanes) {
    const int64_t count = min64(kLanes, a.width - i);
    store_some(out + i, load_some(source + i, count) * scale * load_some(a.weight + i, count), count);
  }
}

}  // namespace

void rms_norm(const void* args, Team& team) {
  const HrRmsNorm& a = *(const HrRmsNorm*)args;
  with_type(a.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    for (int64_t row = team.rank(); row < a.rows; row += team.size()) norm_row<T>(a, row);
  });
}

}  // namespace HR_ISA
}  // namespace hr
