// embedding and gather_rows.
#include "kernels.h"
#include "panels.h"

namespace hr {
namespace HR_ISA {

namespace {

// Row ``row`` of a packed table, four bytes here and there: slow, but a step has few tokens.
template <typename T>
void unpack_row(const T* packed, int64_t row, int64_t width, T* out) {
  constexpr int pair = std::is_same_v<T, Bf16> ? 2 : 1;
  const T* panel = packed + row / kPanel * panel_elements(packed, width) + row % kPanel * pair;
  for (int64_t k = 0; k < width; ++k) out[k] = panel[k / pair * kPanel * pair + k % pair];
}

template <typename W, typename O>
void embed(const HrEmbedding& a, Team& team) {
  W* memory = (W*)team.scratch(a.is_packed ? a.width * sizeof(W) : 0);
  const Vec scale = splat(a.scale);
  for (int64_t t; (t = team.take(a.rows)) < a.rows;) {
    O* out = (O*)a.out + t * a.out_stride;
    const int64_t row = a.ids[t] - a.first_row;
    const bool is_there = row >= 0 && row < a.num_table_rows;
    const W* from = (const W*)a.weight + row * a.weight_stride;
    if (is_there && a.is_packed) {
      unpack_row((const W*)a.weight, row, a.width, memory);
      from = memory;
    }
    for (int64_t i = 0; i < a.width; i += kLanes) {
      const int64_t count = a.width - i;
      store_some(out + i, is_there ? load_some(from + i, count) * scale : Vec{}, count);
    }
  }
}

}  // namespace

void embedding(const void* args, Team& team) {
  const HrEmbedding& a = *(const HrEmbedding*)args;
  with_type(a.weight_dtype, [&](auto* weight) {
    with_type(a.out_dtype, [&](auto* out) {
      embed<std::remove_pointer_t<decltype(weight)>, std::remove_pointer_t<decltype(out)>>(a, team);
    });
  });
}

void gather_rows(const void* args, Team& team) {
  const HrGatherRows& a = *(const HrGatherRows*)args;
  for (int64_t r = team.rank(); r < a.rows; r += team.size())
    __builtin_memcpy((char*)a.out + r * a.out_stride_bytes, (const char*)a.x + a.index[r] * a.x_stride_bytes,
                     a.row_bytes);
}

}  // namespace HR_ISA
}  // namespace hr
