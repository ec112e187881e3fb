// Panels: 16 outputs of a weight side by side, and the register tile that multiplies rows with them.
//
// Every sum runs over the inputs in order, one fused multiply-add after another, whatever the tile's shape is, or in the
// order of AMX where that takes the larger batches: a row's result is bitwise the same alone and in any batch.
#pragma once
#include "vec.h"

namespace hr {
namespace HR_ISA {

constexpr int kPanel = 16;
constexpr int kPanelVecs = kPanel / kLanes;

// Rows of a register tile, and panels of one with that many rows: as many sums as registers hold.
#if defined(__AVX512F__)
constexpr int kMaxRows = 12;
constexpr int kMaxPairRows = 12;
constexpr int panels_for(int rows) { return rows <= 6 ? 4 : 2; }
#elif defined(__AVX2__)
constexpr int kMaxRows = 6;
constexpr int kMaxPairRows = 5;  // pairs of bf16 need registers to be widened in
constexpr int panels_for(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }
#else
constexpr int kMaxRows = 6;
constexpr int kMaxPairRows = 5;
constexpr int panels_for(int rows) { return rows == 1 ? 2 : 1; }
#endif

// Elements of a panel of ``inputs`` inputs.
static inline int64_t panel_elements(const float*, int64_t inputs) { return inputs * kPanel; }
static inline int64_t panel_elements(const F16*, int64_t inputs) { return inputs * kPanel; }
static inline int64_t panel_elements(const Bf16*, int64_t inputs) { return (inputs + 1) / 2 * 2 * kPanel; }

static inline WordVec load_words(const Bf16* p) {
  WordVec words;
  __builtin_memcpy(&words, p, sizeof(words));
  return words;
}

// x[.., k] times the weights of one input k, into all sums of a tile.
template <int R, int N>
static inline __attribute__((always_inline)) void add_input(const float* x, int64_t x_stride, const Vec (&weights)[N],
                                                            Vec (&sums)[R][N]) {
  for (int r = 0; r < R; ++r) {
    const Vec value = splat(x[r * x_stride]);
    for (int i = 0; i < N; ++i) sums[r][i] += value * weights[i];
  }
}

constexpr int64_t kBytesAhead = 2048;  // in each panel

// A line of each of P panels that is needed soon, from memory: a core by itself fetches too few at a time. Behind the
// ends of these panels the next ones begin.
template <int P, typename T>
static inline __attribute__((always_inline)) void fetch_panels(const T* w, int64_t panel_stride, int64_t element) {
  const int64_t ahead = element + kBytesAhead / (int64_t)sizeof(T);
  const T* next = w + ahead + (ahead < panel_stride ? 0 : (P - 1) * panel_stride);
  for (int p = 0; p < P; ++p) __builtin_prefetch(next + p * panel_stride);
}

// sums[r][p * kPanelVecs + v] += x[r][k] * panel p [k], for k in [0, inputs). FROM_MEMORY: the panels are in no cache.
template <int R, int P, bool FROM_MEMORY, typename T>
static inline __attribute__((always_inline)) void multiply(const float* x, int64_t x_stride, const T* w,
                                                           int64_t panel_stride, int64_t inputs,
                                                           Vec (&sums)[R][P * kPanelVecs]) {
  constexpr int N = P * kPanelVecs;
  Vec weights[N];
  if constexpr (std::is_same_v<T, Bf16>) {  // in pairs of inputs: the low half of a word is the first
    int64_t k = 0;
    for (; k + 1 < inputs; k += 2) {
      if constexpr (FROM_MEMORY) fetch_panels<P>(w, panel_stride, k * kPanel);
      if constexpr (R <= 3) {  // registers hold x, and weights come one by one
        for (int i = 0; i < N; ++i) {
          const WordVec word = load_words(w + i / kPanelVecs * panel_stride + k * kPanel + i % kPanelVecs * 2 * kLanes);
          for (int r = 0; r < R; ++r) sums[r][i] += splat(x[r * x_stride + k]) * (Vec)(word << 16);
          for (int r = 0; r < R; ++r) sums[r][i] += splat(x[r * x_stride + k + 1]) * (Vec)(word & 0xffff0000u);
        }
      } else {
        WordVec words[N];
        for (int i = 0; i < N; ++i)
          words[i] = load_words(w + i / kPanelVecs * panel_stride + k * kPanel + i % kPanelVecs * 2 * kLanes);
        for (int i = 0; i < N; ++i) weights[i] = (Vec)(words[i] << 16);
        add_input(x + k, x_stride, weights, sums);
        for (int i = 0; i < N; ++i) weights[i] = (Vec)(words[i] & 0xffff0000u);
        add_input(x + k + 1, x_stride, weights, sums);
      }
    }
    if (k < inputs) {
      for (int i = 0; i < N; ++i)
        weights[i] = (Vec)(load_words(w + i / kPanelVecs * panel_stride + k * kPanel + i % kPanelVecs * 2 * kLanes)
                           << 16);
      add_input(x + k, x_stride, weights, sums);
    }
  } else {
    for (int64_t k = 0; k < inputs; ++k) {
      if constexpr (FROM_MEMORY) fetch_panels<P>(w, panel_stride, k * kPanel);
      for (int i = 0; i < N; ++i)
        weights[i] = load(w + i / kPanelVecs * panel_stride + k * kPanel + i % kPanelVecs * kLanes);
      add_input(x + k, x_stride, weights, sums);
    }
  }
}

#if defined(__AMX_BF16__)
// The same in the order of tiles of AMX, to the bit: of each 32 inputs the even and the odd ones are summed for
// themselves, both are added, and then that to what came before. The panels are in no cache.
template <int R, int P>
static inline __attribute__((always_inline)) void multiply_like_tiles(const float* x, int64_t x_stride, const Bf16* w,
                                                                      int64_t panel_stride, int64_t inputs,
                                                                      Vec (&sums)[R][P]) {
  for (int64_t step = 0; step < inputs; step += 32) {
    Vec even[R][P], odd[R][P];
    clear(even);
    clear(odd);
    for (int64_t k = step; k < step + 32; k += 2) {
      fetch_panels<P>(w, panel_stride, k * kPanel);
      for (int p = 0; p < P; ++p) {
        const WordVec word = load_words(w + p * panel_stride + k * kPanel);
        for (int r = 0; r < R; ++r) even[r][p] += splat(x[r * x_stride + k]) * (Vec)(word << 16);
        for (int r = 0; r < R; ++r) odd[r][p] += splat(x[r * x_stride + k + 1]) * (Vec)(word & 0xffff0000u);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int p = 0; p < P; ++p) sums[r][p] += even[r][p] + odd[r][p];
  }
}
#endif

}  // namespace HR_ISA
}  // namespace hr
