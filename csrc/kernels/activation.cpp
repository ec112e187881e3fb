// gated_act and soft_cap.
#include "kernels.h"
#include "math.h"

namespace hr {
namespace HR_ISA {

namespace {

constexpr int64_t kPiece = 1024;  // elements of a row that a thread takes at once

template <typename T, typename Act>
void gate_rows(const HrGatedAct& a, Team& team, Act act) {
  const int64_t pieces = ceil_div(a.width, kPiece), all = pieces * a.rows;
  for (int64_t index = team.rank(); index < all; index += team.size()) {
    const int64_t row = index / pieces, first = index % pieces * kPiece, end = min64(first + kPiece, a.width);
    const T* gate = (const T*)a.gate_up + row * a.gate_up_stride;
    T* out = (T*)a.out + row * a.out_stride;
    for (int64_t i = first; i < end; i += kLanes) {
      const int64_t count = end - i;
      store_some(out + i, act(load_some(gate + i, count)) * load_some(gate + a.width + i, count), count);
    }
  }
}

}  // namespace

void gated_act(const void* args, Team& team) {
  const HrGatedAct& a = *(const HrGatedAct*)args;
  with_type(a.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    if (a.kind == 0)
      gate_rows<T>(a, team, [](Vec x) { return silu(x); });
    else
      gate_rows<T>(a, team, [](Vec x) { return gelu_tanh(x); });
  });
}

void soft_cap(const void* args, Team& team) {
  const HrSoftCap& a = *(const HrSoftCap*)args;
  const Vec cap = splat(a.cap), inverse = splat(1.0f / a.cap);
  const int64_t pieces = ceil_div(a.width, kPiece), all = pieces * a.rows;
  with_type(a.dtype, [&](auto* type) {
    for (int64_t index = team.rank(); index < all; index += team.size()) {
      const int64_t first = index % pieces * kPiece, end = min64(first + kPiece, a.width);
      auto* x = (decltype(type))a.x + index / pieces * a.stride;
      for (int64_t i = first; i < end; i += kLanes)
        store_some(x + i, cap * tanh(load_some(x + i, end - i) * inverse), end - i);
    }
  });
}

}  // namespace HR_ISA
}  // namespace hr
