// linear over packed weights.
//
// A thread takes chunks of a few panels. With few rows it reads each panel once, straight from memory: bound by bytes.
// With many, a block of the chunk is widened to fp32 in the thread's cache and multiplied with all rows: bound by FMAs.
#include "kernels.h"
#include "panels.h"
#if defined(__AMX_BF16__)
#include "linear_argmax.h"
#include "linear_tiles.h"
#endif

namespace hr {
namespace HR_ISA {

namespace {

constexpr int kChunkPanels = 4;
constexpr int kChunkOutputs = kChunkPanels * kPanel;
constexpr int kBlockRows = 96;     // whose sums wait in the cache while the inputs are gone through
constexpr int kBlockInputs = 512;  // of a chunk's panels at once: 128 KiB as fp32

// Where panels are read from. kLikeTiles: from memory, and summed as tiles of AMX would.
enum class Way { kFromCache, kFromMemory, kLikeTiles };
constexpr int kRowsLikeTiles = 2;  // at most: tiles take more

// Where the sums of a tile begin and end up.
struct Target {
  const HrLinear* args;
  float* waiting;      // [rows of the block][kChunkOutputs], for sums over a part of the inputs; null: none
  bool is_first, is_last;
};

template <int R, int P>
void begin_sums(const Target& target, int64_t row_in_block, int64_t column_in_chunk,
                Vec (&sums)[R][P * kPanelVecs]) {
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < P * kPanelVecs; ++i)
      sums[r][i] = target.is_first ? Vec{}
                                   : load(target.waiting + (row_in_block + r) * kChunkOutputs + column_in_chunk +
                                          i * kLanes);
}

template <typename T>
Vec load_bias(const void* bias, int64_t column, int64_t count) {
  return load_some((const T*)bias + column, count);
}

template <int R, int P>
void end_sums(const Target& target, int64_t row, int64_t row_in_block, int64_t column, int64_t column_in_chunk,
              const Vec (&sums)[R][P * kPanelVecs]) {
  const HrLinear& a = *target.args;
  if (!target.is_last) {
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < P * kPanelVecs; ++i)
        store(target.waiting + (row_in_block + r) * kChunkOutputs + column_in_chunk + i * kLanes, sums[r][i]);
    return;
  }
  for (int i = 0; i < P * kPanelVecs; ++i) {
    const int64_t first = column + i * kLanes, count = min64(kLanes, a.num_outputs - first);
    if (count <= 0) return;
    Vec bias = {};
    if (a.bias != nullptr)
      with_type(a.bias_dtype, [&](auto* type) {
        bias = load_bias<std::remove_pointer_t<decltype(type)>>(a.bias, first, count);
      });
    with_type(a.out_dtype, [&](auto* type) {
      auto* out = (decltype(type))a.out + row * a.out_stride + first;
      for (int r = 0; r < R; ++r, out += a.out_stride)
        store_some(out, sums[r][i] + bias, count);
    });
  }
}

// One panel group of a chunk: places of the tile in everything that it touches.
struct Place {
  int64_t row, row_in_block, column, column_in_chunk;
};

template <int R, int P, Way WAY, typename T>
void run_tile(const Target& target, const Place& at, const float* x, int64_t x_stride, const T* w,
              int64_t panel_stride, int64_t inputs) {
  Vec sums[R][P * kPanelVecs];
  begin_sums<R, P>(target, at.row_in_block, at.column_in_chunk, sums);
#if defined(__AMX_BF16__)
  if constexpr (WAY == Way::kLikeTiles)
    multiply_like_tiles<R, P>(x, x_stride, w, panel_stride, inputs, sums);
  else
#endif
    multiply<R, P, WAY == Way::kFromMemory>(x, x_stride, w, panel_stride, inputs, sums);
  end_sums<R, P>(target, at.row, at.row_in_block, at.column, at.column_in_chunk, sums);
}

// R rows times ``panels`` panels.
template <int R, Way WAY, typename T>
void run_rows(const Target& target, Place at, const float* x, int64_t x_stride, const T* w, int64_t panel_stride,
              int64_t inputs, int64_t panels) {
  constexpr int P = panels_for(R);
  for (; panels >= P; panels -= P) {
    run_tile<R, P, WAY>(target, at, x, x_stride, w, panel_stride, inputs);
    at.column += P * kPanel;
    at.column_in_chunk += P * kPanel;
    w += P * panel_stride;
  }
  for (; panels > 0; --panels) {
    run_tile<R, 1, WAY>(target, at, x, x_stride, w, panel_stride, inputs);
    at.column += kPanel;
    at.column_in_chunk += kPanel;
    w += panel_stride;
  }
}

// ``rows`` <= R rows.
template <int R, Way WAY, typename T>
void dispatch_rows(int64_t rows, const Target& target, const Place& at, const float* x, int64_t x_stride,
                   const T* w, int64_t panel_stride, int64_t inputs, int64_t panels) {
  if constexpr (R > 0) {
    if (rows == R)
      run_rows<R, WAY>(target, at, x, x_stride, w, panel_stride, inputs, panels);
    else
      dispatch_rows<R - 1, WAY>(rows, target, at, x, x_stride, w, panel_stride, inputs, panels);
  }
}

// Rows of x as fp32: themselves, or a copy.
struct Rows {
  const float* values;
  int64_t stride;
};

Rows widen_rows(const HrLinear& a, int64_t row, int64_t rows, int64_t first, int64_t inputs, float* memory) {
  if (a.x_dtype == HR_F32) return {(const float*)a.x + row * a.x_stride + first, a.x_stride};
  with_type(a.x_dtype, [&](auto* type) {
    for (int64_t r = 0; r < rows; ++r) {
      const auto* x = (decltype(type))a.x + (row + r) * a.x_stride + first;
      float* to = memory + r * inputs;
      for (int64_t k = 0; k < inputs; k += kLanes) store_some(to + k, load_some(x + k, inputs - k), inputs - k);
    }
  });
  return {memory, inputs};
}

void widen_panel(const F16* from, int64_t inputs, float* to) {
  for (int64_t i = 0; i < inputs * kPanel; i += kLanes) store(to + i, load(from + i));
}

void widen_panel(const Bf16* from, int64_t inputs, float* to) {
  for (int64_t k = 0; k < inputs; k += 2)
    for (int v = 0; v < kPanelVecs; ++v) {
      const WordVec words = load_words(from + k * kPanel + 2 * v * kLanes);
      store(to + k * kPanel + v * kLanes, (Vec)(words << 16));
      if (k + 1 < inputs) store(to + (k + 1) * kPanel + v * kLanes, (Vec)(words & 0xffff0000u));
    }
}

// Sizes of row tiles that differ by one at most.
struct EvenTiles {
  int64_t rows, count;
  EvenTiles(int64_t rows, int max_rows) : rows(rows), count(ceil_div(rows, max_rows)) {}
  int64_t start(int64_t index) const { return rows * index / count; }
};

template <Way WAY, typename T>
void few_rows(const HrLinear& a, const T* w, int64_t panel_stride, int64_t column, int64_t panels, float* memory) {
  const Target target{&a, nullptr, true, true};
  constexpr int all_rows = std::is_same_v<T, Bf16> ? kMaxPairRows : kMaxRows;
  constexpr int max_rows = WAY == Way::kLikeTiles ? kRowsLikeTiles : all_rows;
  const EvenTiles tiles(a.rows, max_rows);
  for (int64_t tile = 0; tile < tiles.count; ++tile) {
    const int64_t row = tiles.start(tile), rows = tiles.start(tile + 1) - row;
    const Rows x = widen_rows(a, row, rows, 0, a.num_inputs, memory);
    dispatch_rows<max_rows, WAY>(rows, target, Place{row, 0, column, 0}, x.values, x.stride, w, panel_stride,
                                 a.num_inputs, panels);
  }
}

// Memory of a thread for many_rows: widened panels, waiting sums, widened rows.
constexpr int64_t kManyPanels = kBlockInputs * kChunkOutputs;
constexpr int64_t kManySums = kBlockRows * kChunkOutputs;
constexpr int64_t kManyFloats = kManyPanels + kManySums + kMaxRows * kBlockInputs;

template <typename T>
void many_rows(const HrLinear& a, const T* w, int64_t panel_stride, int64_t column, int64_t panels, float* memory) {
  float* sums = memory + kManyPanels;
  float* x_memory = sums + kManySums;
  for (int64_t top = 0; top < a.rows; top += kBlockRows) {
    const int64_t block_rows = min64(kBlockRows, a.rows - top);
    for (int64_t first = 0; first < a.num_inputs; first += kBlockInputs) {
      const int64_t inputs = min64(kBlockInputs, a.num_inputs - first);
      const float* widened = (const float*)(w + first * kPanel);
      int64_t stride = panel_stride;
      if constexpr (!std::is_same_v<T, float>) {
        for (int64_t p = 0; p < panels; ++p)
          widen_panel(w + p * panel_stride + first * kPanel, inputs, memory + p * inputs * kPanel);
        widened = memory;
        stride = inputs * kPanel;
      }
      const Target target{&a, sums, first == 0, first + inputs == a.num_inputs};
      const EvenTiles tiles(block_rows, kMaxRows);
      for (int64_t tile = 0; tile < tiles.count; ++tile) {
        const int64_t row = tiles.start(tile), rows = tiles.start(tile + 1) - row;
        const Rows x = widen_rows(a, top + row, rows, first, inputs, x_memory);
        dispatch_rows<kMaxRows, Way::kFromCache>(rows, target, Place{top + row, row, column, 0}, x.values, x.stride, widened, stride,
                                inputs, panels);
      }
    }
  }
}

template <typename T>
void run(const HrLinear& a, Team& team) {
  const bool is_many = a.rows > 2 * kMaxRows;
  auto run_chunk = is_many ? many_rows<T> : few_rows<Way::kFromMemory, T>;
#if defined(__AMX_BF16__)
  if constexpr (std::is_same_v<T, Bf16>) {
    if (fits_tiles(a)) return run_tiles(a, team, PutOutputs(a));
    static_assert(kRowsLikeTiles + 1 == kFewestTileRows);
    if (suits_tiles(a)) run_chunk = few_rows<Way::kLikeTiles, T>;
  }
#endif
  const int64_t stride = panel_elements((const T*)nullptr, a.num_inputs);
  const int64_t num_panels = ceil_div(a.num_outputs, kPanel), num_chunks = ceil_div(num_panels, kChunkPanels);
  const int64_t floats = is_many ? kManyFloats : a.x_dtype == HR_F32 ? 0 : kMaxRows * a.num_inputs;
  float* memory = (float*)team.scratch((size_t)floats * sizeof(float));
  for (int64_t chunk; (chunk = team.take(num_chunks)) < num_chunks;) {
    const int64_t panel = chunk * kChunkPanels, panels = min64(kChunkPanels, num_panels - panel);
    const T* w = (const T*)a.weight + panel * stride;
    run_chunk(a, w, stride, panel * kPanel, panels, memory);
  }
}

template <typename T>
void pack_panel(const HrPackWeight& a, int64_t panel) {
  const int64_t stride = panel_elements((const T*)nullptr, a.num_inputs);
  constexpr int pair = std::is_same_v<T, Bf16> ? 2 : 1;
  T* to = (T*)a.packed + panel * stride;
  for (int64_t i = 0; i < stride; ++i) to[i] = T{};
  for (int64_t r = 0; r < kPanel && panel * kPanel + r < a.rows; ++r) {
    const T* from = (const T*)a.weight + (panel * kPanel + r) * a.weight_stride;
    for (int64_t k = 0; k < a.num_inputs; ++k) to[(k / pair * kPanel + r) * pair + k % pair] = from[k];
  }
}

}  // namespace

void linear(const void* args, Team& team) {
  const HrLinear& a = *(const HrLinear*)args;
  if (a.rows == 0) return;
  with_type(a.weight_dtype, [&](auto* type) { run<std::remove_pointer_t<decltype(type)>>(a, team); });
}

void linear_gated(const void* args, Team& team) {
  const HrLinearGated& a = *(const HrLinearGated*)args;
  if (a.linear.rows == 0) return;
  HrGatedAct act = a.act;
  act.rows = a.linear.rows;
#if defined(__AMX_BF16__)
  if (fits_gated_tiles(a)) return run_gated_tiles(a.linear, act, team);
#endif
  linear(&a.linear, team);
  team.barrier();
  gated_act(&act, team);
}

void linear_argmax(const void* args, Team& team) {
  const HrLinearArgmax& a = *(const HrLinearArgmax*)args;
  if (a.linear.rows == 0) return;
  HrRowArgmax argmax = a.argmax;
  argmax.rows = a.linear.rows;
#if defined(__AMX_BF16__)
  if (fits_argmax_tiles(a.linear, team.size())) return run_argmax_tiles(a.linear, argmax, team);
#endif
  linear(&a.linear, team);
  team.barrier();
  row_argmax(&argmax, team);
}

void pack_weight(const void* args, Team& team) {
  const HrPackWeight& a = *(const HrPackWeight*)args;
  const int64_t panels = ceil_div(a.rows, kPanel);
  with_type(a.dtype, [&](auto* type) {
    for (int64_t panel; (panel = team.take(panels)) < panels;)
      pack_panel<std::remove_pointer_t<decltype(type)>>(a, panel);
  });
}

}  // namespace HR_ISA
}  // namespace hr
