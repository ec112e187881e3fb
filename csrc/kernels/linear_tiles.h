// bf16 rows times bf16 panels by tiles of AMX: 16 rows of x by 32 inputs, and 32 inputs of a panel, which lies in memory
// as a tile wants it. Four tiles of sums, two by two, read every tile of x and of weights for two products.
//
// A product of tiles leaves the other units of a core idle, so that meanwhile the sums before are rounded and stored,
// the lines that they go to are asked for, and so are the weights that come next.
#pragma once
#include "digits.h"
#include "math.h"
#include "panels.h"
#include "tiles.h"

namespace hr {
namespace HR_ISA {

namespace {

constexpr int kTileInputs = 32;
constexpr int kTileRows = 2 * kTile;     // that are multiplied together
constexpr int kTileOutputs = 2 * kPanel;
constexpr int64_t kFewestTileRows = 3;
constexpr int kRowsAStep = 2;            // of sums that are stored during a product
constexpr int64_t kInputsAhead = 256;    // of a panel: what is asked for from memory

bool fits_tiles(const HrLinear& a) {
  return a.weight_dtype == HR_BF16 && a.x_dtype == HR_BF16 && a.num_inputs % kTileInputs == 0 && a.rows >= kFewestTileRows;
}

bool fits_gated_tiles(const HrLinearGated& a) {
  return fits_tiles(a.linear) && a.act.dtype == HR_BF16 && a.linear.bias == nullptr && a.act.width % kPanel == 0;
}

// A row of sums of two panels goes to the linear's output.
struct PutOutputs {
  const HrLinear& a;

  void fetch(int64_t row, int64_t column) const {
    const int64_t size = a.out_dtype == HR_F32 ? 4 : 2;
    const char* line = (const char*)a.out + (row * a.out_stride + column) * size;
    __builtin_prefetch(line, 1);
    if (size == 4) __builtin_prefetch(line + 64, 1);
  }

  void put(int64_t row, int64_t column, const float* sums) const {
    if (a.out_dtype == HR_BF16 && a.bias == nullptr && column + kTileOutputs <= a.num_outputs) {
      const __m512i both = digit_of(_mm512_loadu_ps(sums), _mm512_loadu_ps(sums + kPanel));
      _mm512_storeu_si512((Bf16*)a.out + row * a.out_stride + column, both);
      return;
    }
    for (int64_t i = 0; i < kTileOutputs; i += kLanes) {
      const int64_t count = a.num_outputs - column - i;
      if (count > 0) put_some(row, column + i, load(sums + i), count);
    }
  }

 private:
  void put_some(int64_t row, int64_t column, Vec sums, int64_t count) const {
    if (a.bias != nullptr)
      with_type(a.bias_dtype, [&](auto* type) { sums += load_some((decltype(type))a.bias + column, count); });
    with_type(a.out_dtype, [&](auto* type) {
      store_some((decltype(type))a.out + row * a.out_stride + column, sums, count);
    });
  }
};

// A row of sums of a panel of gates and of the panel beside it: what gated_act makes of them, once both are bf16.
struct PutGated {
  const HrGatedAct& act;

  void fetch(int64_t row, int64_t column) const { __builtin_prefetch((Bf16*)act.out + row * act.out_stride + column, 1); }

  void put(int64_t row, int64_t column, const float* sums) const {
    const __m512i both = digit_of(_mm512_loadu_ps(sums), _mm512_loadu_ps(sums + kPanel));
    const auto half = [&](__m256i words) { return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16); };
    const Vec gate = half(_mm512_castsi512_si256(both)), up = half(_mm512_extracti64x4_epi64(both, 1));
    store((Bf16*)act.out + row * act.out_stride + column, (act.kind == 0 ? silu(gate) : gelu_tanh(gate)) * up);
  }
};

// Sums of a block of rows that wait to be stored.
template <typename Put>
struct WaitingSums {
  static constexpr int64_t kFloats = kTileRows * kTileOutputs;

  Put to;
  const float* sums = nullptr;
  int64_t row = 0, column = 0, next = 0, end = 0;  // next, end: rows of the block

  void put_some() {
    for (int i = 0; i < kRowsAStep && next < end; ++i, ++next) to.put(row + next, column, sums + next * kTileOutputs);
  }
  void put_all() {
    while (next < end) put_some();
  }
};

// Tiles 0 to 3: sums of (upper rows, first panel), (upper, second), (lower, first), (lower, second); 4 and 5: x; 6 and
// 7: panels. Tiles of no rows may not be used.
void configure_tiles(int64_t upper, int64_t lower) {
  TileConfig config;
  const int64_t rows[8] = {upper, upper, lower, lower, upper, lower, kTile, kTile};
  for (int tile = 0; tile < 8; ++tile) config.set(tile, rows[tile], 64);
  config.load();
}

// Two panels. second: how far the second one is from the first; 0: there is none. jump: from the end of the first to
// the one that is read next.
struct PanelPair {
  const Bf16* first;
  int64_t second, jump;

  void fetch(int64_t input, int64_t num_inputs) const {
    const int64_t ahead = input + kInputsAhead;
    const Bf16* next = first + ahead * kPanel + (ahead < num_inputs ? 0 : jump);
    for (int64_t i = 0; i < kTileInputs * kPanel; i += 32) {
      __builtin_prefetch(next + i);
      __builtin_prefetch(next + second + i);
    }
  }
};

// Up to 32 rows times one or two panels. is_first: the panels are read for the first time.
template <typename Put>
void multiply_tiles(const HrLinear& a, int64_t row, int64_t rows, int64_t column, const PanelPair& w, bool is_first,
                    float* sums, WaitingSums<Put>& waiting) {
  const Bf16* x = (const Bf16*)a.x + row * a.x_stride;
  const int64_t x_bytes = a.x_stride * 2;
  const bool has_lower = rows > kTile, has_second = w.second != 0;
  int64_t fetched = 0;
  _tile_zero(0);
  if (has_second) _tile_zero(1);
  if (has_lower) _tile_zero(2);
  if (has_lower && has_second) _tile_zero(3);
  for (int64_t k = 0; k < a.num_inputs; k += kTileInputs) {
    _tile_loadd(4, x + k, x_bytes);
    _tile_loadd(6, w.first + k * kPanel, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (has_second) {
      _tile_loadd(7, w.first + w.second + k * kPanel, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (has_lower) {
      _tile_loadd(5, x + kTile * a.x_stride + k, x_bytes);
      _tile_dpbf16ps(2, 5, 6);
      if (has_second) _tile_dpbf16ps(3, 5, 7);
    }
    if (is_first) w.fetch(k, a.num_inputs);
    waiting.put_some();
    for (int i = 0; i < kRowsAStep && fetched < rows; ++i) waiting.to.fetch(row + fetched++, column);
  }
  waiting.put_all();
  constexpr int64_t sums_bytes = kTileOutputs * 4;
  _tile_stored(0, sums, sums_bytes);
  if (has_second) _tile_stored(1, sums + kPanel, sums_bytes);
  if (has_lower) _tile_stored(2, sums + kTile * kTileOutputs, sums_bytes);
  if (has_lower && has_second) _tile_stored(3, sums + kTile * kTileOutputs + kPanel, sums_bytes);
  tiles_stored();
  waiting.sums = sums;
  waiting.row = row;
  waiting.column = column;
  waiting.next = 0;
  waiting.end = rows;
}

// Rows that are multiplied with one pair of panels after another, few enough to stay in the second-level cache.
struct RowGroups {
  int64_t count, rows_each;
  explicit RowGroups(const HrLinear& a) {
    constexpr int64_t bytes = 5 << 18;
    const int64_t groups = ceil_div(a.rows * a.num_inputs * (int64_t)sizeof(Bf16), bytes);
    rows_each = ceil_div(ceil_div(a.rows, groups), kTileRows) * kTileRows;
    count = ceil_div(a.rows, rows_each);
  }
};

// All rows times pairs of panels. pair_at(index of a pair): the pair; outputs_each: columns from one pair to the next.
template <typename Put, typename Pair>
void run_pairs(const HrLinear& a, Team& team, int64_t num_pairs, int64_t outputs_each, Put to, Pair pair_at) {
  const RowGroups groups(a);
  WaitingSums<Put> waiting{to};
  float* sums = (float*)team.scratch(2 * waiting.kFloats * sizeof(float));
  float* other = sums + waiting.kFloats;
  int64_t configured = -1;
  const int64_t all = groups.count * num_pairs;
  for (int64_t piece; (piece = team.take(all)) < all;) {
    const int64_t first = piece / num_pairs * groups.rows_each, end = min64(first + groups.rows_each, a.rows);
    const PanelPair pair = pair_at(piece % num_pairs);
    for (int64_t row = first; row < end; row += kTileRows) {
      const int64_t rows = min64(kTileRows, end - row), lower = max64(0, rows - kTile);
      if (rows != configured) configure_tiles(rows - lower, lower);
      configured = rows;
      multiply_tiles(a, row, rows, piece % num_pairs * outputs_each, pair, row == first, sums, waiting);
      float* done = sums;
      sums = other;
      other = done;
    }
  }
  waiting.put_all();
  if (configured >= 0) _tile_release();
}

void run_tiles(const HrLinear& a, Team& team) {
  const int64_t stride = panel_elements((const Bf16*)nullptr, a.num_inputs), panels = ceil_div(a.num_outputs, kPanel);
  run_pairs(a, team, ceil_div(panels, 2), kTileOutputs, PutOutputs{a}, [&](int64_t pair) {
    return PanelPair{(const Bf16*)a.weight + 2 * pair * stride, 2 * pair + 1 < panels ? stride : 0, stride};
  });
}

// The outputs are gates, then as many factors of them.
void run_gated_tiles(const HrLinear& a, const HrGatedAct& act, Team& team) {
  const int64_t stride = panel_elements((const Bf16*)nullptr, a.num_inputs), panels = act.width / kPanel;
  run_pairs(a, team, panels, kPanel, PutGated{act}, [&](int64_t panel) {
    return PanelPair{(const Bf16*)a.weight + panel * stride, panels * stride, 0};
  });
}

}  // namespace

}  // namespace HR_ISA
}  // namespace hr
