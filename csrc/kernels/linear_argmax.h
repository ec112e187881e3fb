// A linear by tiles of AMX whose outputs are looked at and forgotten: a thread keeps the best of each row, in each of 16
// lanes, over the panels that it multiplies; what the threads found is compared at the end, by way of the rows' room.
#pragma once
#include "linear_tiles.h"

namespace hr {
namespace HR_ISA {

namespace {

constexpr int64_t kMostArgmaxRows = 256;  // whose best lie on a thread's stack
constexpr int32_t kNoIndex = INT32_MAX;

struct Best {
  float value = -__builtin_inff();
  int32_t index = kNoIndex;

  // NaN counts as the largest; among equals the lowest index does.
  void take(float other, int32_t at) {
    const bool is_nan = value != value, is_other_nan = other != other;
    const bool is_equal = is_nan ? is_other_nan : other == value;
    const bool is_larger = is_other_nan ? !is_nan : other > value;
    if (is_larger || (is_equal && at < index)) value = other, index = at;
  }
};

// The best of a row in each lane: output i belongs to lane i % 16.
struct RowBest {
  alignas(64) float values[kPanel];
  alignas(64) int32_t indices[kPanel];

  void clear() {
    _mm512_store_ps(values, _mm512_set1_ps(-__builtin_inff()));
    _mm512_store_si512(indices, _mm512_set1_epi32(kNoIndex));
  }
  Best lane(int i) const { return {values[i], indices[i]}; }
  void set(int i, const Best& best) { values[i] = best.value, indices[i] = best.index; }
};

// A row of sums goes to the best of that row.
struct PutBest {
  const HrLinear& a;
  RowBest* rows;

  void fetch(int64_t, int64_t, int64_t) const {}

  void put(int64_t row, int64_t column, int64_t panels, const float* sums) const {
    const int64_t count = min64(panels * kPanel, a.num_outputs - column);
    RowBest& best = rows[row];
    __m512 values = _mm512_load_ps(best.values);
    __m512i indices = _mm512_load_si512(best.indices);
    for (int64_t i = 0; i < count; i += kPanel) {
      const __mmask16 there = (__mmask16)(count - i >= kPanel ? 0xffff : (1 << (count - i)) - 1);
      const __m512 some = _mm512_loadu_ps(sums + i);
      const __m512i at = _mm512_add_epi32(_mm512_set1_epi32((int32_t)(column + i)), lane_numbers());
      if (_mm512_mask_cmp_ps_mask(there, some, values, _CMP_UNORD_Q) != 0) return put_slowly(row, column, count, sums);
      const __mmask16 larger = _mm512_mask_cmp_ps_mask(there, some, values, _CMP_GT_OQ);
      const __mmask16 equal = _mm512_mask_cmp_ps_mask(there, some, values, _CMP_EQ_OQ);
      const __mmask16 taken = larger | _mm512_mask_cmplt_epi32_mask(equal, at, indices);
      values = _mm512_mask_mov_ps(values, taken, some);
      indices = _mm512_mask_mov_epi32(indices, taken, at);
    }
    _mm512_store_ps(best.values, values);
    _mm512_store_si512(best.indices, indices);
  }

 private:
  static __m512i lane_numbers() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }

  void put_slowly(int64_t row, int64_t column, int64_t count, const float* sums) const {
    for (int64_t i = 0; i < count; ++i) {
      Best best = rows[row].lane(i % kPanel);
      best.take(sums[i], (int32_t)(column + i));
      rows[row].set(i % kPanel, best);
    }
  }
};

bool fits_argmax_tiles(const HrLinear& a, int64_t num_threads) {
  const int64_t room = num_threads * (int64_t)(sizeof(Best) / sizeof(float));
  return fits_tiles(a) && a.out_dtype == HR_F32 && a.bias == nullptr && a.rows <= kMostArgmaxRows &&
         room <= a.num_outputs && a.num_outputs < kNoIndex;
}

void run_argmax_tiles(const HrLinear& a, const HrRowArgmax& argmax, Team& team) {
  RowBest rows[kMostArgmaxRows];
  for (int64_t r = 0; r < a.rows; ++r) rows[r].clear();
  run_tiles(a, team, PutBest{a, rows});
  const auto found = [&](int64_t row, int64_t thread) {
    return (char*)((float*)a.out + row * a.out_stride) + thread * (int64_t)sizeof(Best);
  };
  for (int64_t r = 0; r < a.rows; ++r) {
    Best best;
    for (int i = 0; i < kPanel; ++i) best.take(rows[r].values[i], rows[r].indices[i]);
    __builtin_memcpy(found(r, team.rank()), &best, sizeof(best));
  }
  team.barrier();
  for (int64_t r = team.rank(); r < a.rows; r += team.size()) {
    Best best;
    for (int64_t thread = 0; thread < team.size(); ++thread) {
      Best other;
      __builtin_memcpy(&other, found(r, thread), sizeof(other));
      best.take(other.value, other.index);
    }
    argmax.values[r] = best.value;
    argmax.indices[r] = best.index;
  }
}

}  // namespace

}  // namespace HR_ISA
}  // namespace hr
