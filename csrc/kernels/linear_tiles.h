// bf16 rows times bf16 panels by tiles of AMX: 16 rows of x by 32 inputs, and 32 inputs of a panel, which lies in memory
// as a tile wants it. Four tiles of sums: of many rows two by two, so that every tile of x and of weights is read for
// two products; up to 16 rows, which wait for memory, are multiplied with four panels, because a core reads four streams
// at once quicker than two.
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
constexpr int kTileRows = 2 * kTile;  // that are multiplied together
constexpr int kMaxPanels = 4;
constexpr int kSumsStride = kMaxPanels * kPanel;
constexpr int64_t kFewestTileRows = 3;
constexpr int kRowsAStep = 2;  // of sums that are stored during a product

bool suits_tiles(const HrLinear& a) {
  return a.weight_dtype == HR_BF16 && a.x_dtype == HR_BF16 && a.num_inputs % kTileInputs == 0;
}

// Fewer rows are multiplied without, with the same sums to the bit (multiply_like_tiles).
bool fits_tiles(const HrLinear& a) { return suits_tiles(a) && a.rows >= kFewestTileRows; }

bool fits_gated_tiles(const HrLinearGated& a) {
  return fits_tiles(a.linear) && a.act.dtype == HR_BF16 && a.linear.bias == nullptr && a.act.width % kPanel == 0;
}

// A row of sums of up to four panels goes to the linear's output.
struct PutOutputs {
  const HrLinear& a;
  const bool is_plain;  // bf16 as it is

  explicit PutOutputs(const HrLinear& a) : a(a), is_plain(a.out_dtype == HR_BF16 && a.bias == nullptr) {}

  void fetch(int64_t row, int64_t column, int64_t panels) const {
    const int64_t size = a.out_dtype == HR_F32 ? 4 : 2;
    const char* line = (const char*)a.out + (row * a.out_stride + column) * size;
    for (int64_t i = 0; i < panels * kPanel * size; i += 64) __builtin_prefetch(line + i, 1);
  }

  void put(int64_t row, int64_t column, int64_t panels, const float* sums) const {
    const int64_t count = min64(panels * kPanel, a.num_outputs - column);
    int64_t i = 0;
    for (; is_plain && i + 2 * kPanel <= count; i += 2 * kPanel) {
      const __m512i both = digit_of(_mm512_loadu_ps(sums + i), _mm512_loadu_ps(sums + i + kPanel));
      _mm512_storeu_si512((Bf16*)a.out + row * a.out_stride + column + i, both);
    }
    for (; i < count; i += kLanes) put_some(row, column + i, load(sums + i), count - i);
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

// A row of sums of panels of gates and of as many beside them: what gated_act makes of them, once both are bf16.
struct PutGated {
  const HrGatedAct& act;

  void fetch(int64_t row, int64_t column, int64_t) const {
    __builtin_prefetch((Bf16*)act.out + row * act.out_stride + column, 1);
  }

  void put(int64_t row, int64_t column, int64_t panels, const float* sums) const {
    const auto half = [](__m256i words) { return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16); };
    const int64_t width = panels / 2 * kPanel;
    for (int64_t i = 0; i < width; i += kPanel) {
      const __m512i both = digit_of(_mm512_loadu_ps(sums + i), _mm512_loadu_ps(sums + width + i));
      const Vec gate = half(_mm512_castsi512_si256(both)), up = half(_mm512_extracti64x4_epi64(both, 1));
      store((Bf16*)act.out + row * act.out_stride + column + i, (act.kind == 0 ? silu(gate) : gelu_tanh(gate)) * up);
    }
  }
};

// Where the sums of a block are: rows [first, first + rows) and the outputs of some panels from a column on.
struct TilePlace {
  int64_t first, rows, column, panels;
};

// Sums of a block that wait to be stored.
template <typename Put>
struct WaitingSums {
  static constexpr int64_t kFloats = kTileRows * kSumsStride;

  Put to;
  const float* sums = nullptr;
  TilePlace at{};
  int64_t next = 0;

  void begin(const float* block, const TilePlace& place) {
    sums = block;
    at = place;
    next = 0;
  }
  void put_some() {
    for (int i = 0; i < kRowsAStep && next < at.rows; ++i, ++next)
      to.put(at.first + next, at.column, at.panels, sums + next * kSumsStride);
  }
  void put_all() {
    while (next < at.rows) put_some();
  }
};

// Panels that are multiplied together. next: from each to the one that is multiplied after it.
struct Panels {
  const Bf16* at[kMaxPanels];
  int64_t count, next;

  // Asks for an input's part of the panels after these.
  void fetch(int64_t input) const {
    for (int64_t p = 0; p < count; ++p)
      for (int64_t i = 0; i < kTileInputs * kPanel; i += 32)
        __builtin_prefetch(at[p] + next + input * kPanel + i, 0, 2);
  }
};

// What is done beside the products of a block: for each step of inputs a part.
template <typename Put>
struct Beside {
  WaitingSums<Put>& waiting;
  const Panels& panels;
  const TilePlace& place;
  const bool is_first;  // the panels are read for the first time
  int64_t fetched = 0;

  inline __attribute__((always_inline)) void step(int64_t input) {
    if (is_first) panels.fetch(input);
    waiting.put_some();
    for (int i = 0; i < kRowsAStep && fetched < place.rows; ++i)
      waiting.to.fetch(place.first + fetched++, place.column, place.panels);
  }
};

// Tiles for up to 16 rows: 0 to 3: sums of each panel; 4: x; 5 to 7: panels. For more: 0 to 3: sums of (upper rows,
// first panel), (upper, second), (lower, first), (lower, second); 4 and 5: x; 6 and 7: panels.
void configure_tiles(int64_t rows) {
  const int64_t upper = min64(rows, kTile), lower = rows > kTile ? rows - kTile : upper;
  TileConfig config;
  const int64_t counts[8] = {upper, upper, lower, lower, upper, rows > kTile ? lower : kTile, kTile, kTile};
  for (int tile = 0; tile < 8; ++tile) config.set(tile, counts[tile], 64);
  config.load();
}

// Up to 16 rows times up to four panels.
template <typename Put>
void multiply_few(const HrLinear& a, const TilePlace& place, const Panels& w, float* sums, Beside<Put> beside) {
  const Bf16* x = (const Bf16*)a.x + place.first * a.x_stride;
  const Bf16 *first = w.at[0], *second = w.at[1], *third = w.at[2], *fourth = w.at[3];
  const int64_t num_inputs = a.num_inputs, x_bytes = a.x_stride * 2, count = w.count;
  clear_sums();
  for (int64_t k = 0; k < num_inputs; k += kTileInputs) {
    _tile_loadd(4, x + k, x_bytes);
    _tile_loadd(5, first + k * kPanel, 64);
    _tile_dpbf16ps(0, 4, 5);
    if (count > 1) {
      _tile_loadd(6, second + k * kPanel, 64);
      _tile_dpbf16ps(1, 4, 6);
    }
    if (count > 2) {
      _tile_loadd(7, third + k * kPanel, 64);
      _tile_dpbf16ps(2, 4, 7);
    }
    if (count > 3) {
      _tile_loadd(5, fourth + k * kPanel, 64);
      _tile_dpbf16ps(3, 4, 5);
    }
    beside.step(k);
  }
  beside.waiting.put_all();
  constexpr int64_t stride = kSumsStride * 4;
  _tile_stored(0, sums, stride);
  _tile_stored(1, sums + kPanel, stride);
  _tile_stored(2, sums + 2 * kPanel, stride);
  _tile_stored(3, sums + 3 * kPanel, stride);
  tiles_stored();
}

// 17 to 32 rows times one or two panels.
template <typename Put>
void multiply_many(const HrLinear& a, const TilePlace& place, const Panels& w, float* sums, Beside<Put> beside) {
  const Bf16* x = (const Bf16*)a.x + place.first * a.x_stride;
  const Bf16 *first = w.at[0], *second = w.at[w.count - 1];
  const int64_t num_inputs = a.num_inputs, x_bytes = a.x_stride * 2;
  clear_sums();
  for (int64_t k = 0; k < num_inputs; k += kTileInputs) {
    _tile_loadd(4, x + k, x_bytes);
    _tile_loadd(6, first + k * kPanel, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, second + k * kPanel, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, x + kTile * a.x_stride + k, x_bytes);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    beside.step(k);
  }
  beside.waiting.put_all();
  constexpr int64_t stride = kSumsStride * 4;
  _tile_stored(0, sums, stride);
  _tile_stored(1, sums + kPanel, stride);
  _tile_stored(2, sums + kTile * kSumsStride, stride);
  _tile_stored(3, sums + kTile * kSumsStride + kPanel, stride);
  tiles_stored();
}

// Rows that are multiplied with the same panels one after another, few enough to stay in the second-level cache.
struct RowGroups {
  int64_t count, rows_each;
  explicit RowGroups(const HrLinear& a) {
    constexpr int64_t bytes = 5 << 18;
    const int64_t groups = ceil_div(a.rows * a.num_inputs * (int64_t)sizeof(Bf16), bytes);
    rows_each = ceil_div(ceil_div(a.rows, groups), kTileRows) * kTileRows;
    count = ceil_div(a.rows, rows_each);
  }
};

// All rows times all panels. panels_at(piece): the panels of one piece of them; outputs_each: columns of a piece.
template <typename Put, typename PanelsAt>
void run_pieces(const HrLinear& a, Team& team, int64_t num_pieces, int64_t outputs_each, Put to, PanelsAt panels_at) {
  const RowGroups groups(a);
  WaitingSums<Put> waiting{to};
  float* sums = (float*)team.scratch(2 * waiting.kFloats * sizeof(float));
  float* other = sums + waiting.kFloats;
  int64_t configured = -1;
  const int64_t all = groups.count * num_pieces;
  for (int64_t index; (index = team.take(all)) < all;) {
    const int64_t piece = index % num_pieces, first = index / num_pieces * groups.rows_each;
    const int64_t end = min64(first + groups.rows_each, a.rows);
    const Panels panels = panels_at(piece);
    for (int64_t row = first; row < end; row += kTileRows) {
      const TilePlace place{row, min64(kTileRows, end - row), piece * outputs_each, panels.count};
      const Beside<Put> beside{waiting, panels, place, row == first};
      if (place.rows != configured) configure_tiles(place.rows);
      configured = place.rows;
      if (place.rows <= kTile)
        multiply_few(a, place, panels, sums, beside);
      else
        multiply_many(a, place, panels, sums, beside);
      waiting.begin(sums, place);
      float* done = sums;
      sums = other;
      other = done;
    }
  }
  waiting.put_all();
  if (configured >= 0) _tile_release();
}

// Panels of a piece, of at most ``most``: as many as let the threads end together.
int64_t panels_each(int64_t num_panels, int64_t most, int64_t num_threads) {
  int64_t best = 1, least = INT64_MAX;
  for (int64_t each = most; each >= 1; --each) {
    const int64_t longest = ceil_div(ceil_div(num_panels, each), num_threads) * each;
    if (longest < least) best = each, least = longest;
  }
  return best;
}

template <typename Put>
void run_tiles(const HrLinear& a, Team& team, Put to) {
  const int64_t stride = panel_elements((const Bf16*)nullptr, a.num_inputs);
  const int64_t num_panels = ceil_div(a.num_outputs, kPanel);
  const int64_t each = a.rows <= kTile ? panels_each(num_panels, 4, team.size()) : 2;
  run_pieces(a, team, ceil_div(num_panels, each), each * kPanel, to, [&](int64_t piece) {
    Panels panels{{}, min64(each, num_panels - piece * each), each * stride};
    for (int64_t p = 0; p < panels.count; ++p) panels.at[p] = (const Bf16*)a.weight + (piece * each + p) * stride;
    return panels;
  });
}

// The outputs are gates, then as many factors of them.
void run_gated_tiles(const HrLinear& a, const HrGatedAct& act, Team& team) {
  const int64_t stride = panel_elements((const Bf16*)nullptr, a.num_inputs), num_gates = act.width / kPanel;
  const int64_t each = a.rows <= kTile ? 2 : 1;
  run_pieces(a, team, ceil_div(num_gates, each), each * kPanel, PutGated{act}, [&](int64_t piece) {
    const int64_t gates = min64(each, num_gates - piece * each);
    Panels panels{{}, 2 * gates, each * stride};
    for (int64_t p = 0; p < gates; ++p) {
      panels.at[p] = (const Bf16*)a.weight + (piece * each + p) * stride;
      panels.at[gates + p] = panels.at[p] + num_gates * stride;
    }
    return panels;
  });
}

}  // namespace

}  // namespace HR_ISA
}  // namespace hr
