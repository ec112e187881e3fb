// Attention of many queries, as of a prompt: keys and values are packed into panels first.
#pragma once
#include "attention_work.h"
#include "panels.h"

namespace hr {
namespace HR_ISA {

namespace {

// Sizes of the scratch memory, in floats.
struct ManySizes {
  int64_t keys_padded, dim_padded, key_panels, value_panels, queries, scores, out;
  explicit ManySizes(const Work& work) {
    const int64_t dim = work.a.head_dim;
    keys_padded = ceil_div(work.num_keys(), kPanel) * kPanel;
    dim_padded = ceil_div(dim, kPanel) * kPanel;
    key_panels = keys_padded * dim;
    value_panels = dim_padded * work.num_keys();
    queries = max64(kMaxRows, kPanel) * dim;  // first, rows of keys to be packed
    scores = kMaxRows * keys_padded;
    out = kMaxRows * dim_padded;
  }
  int64_t total() const { return key_panels + value_panels + queries + scores + out; }
};

// to[i * kPanel + lane] = rows[lane * dim + i] for 16 lanes.
void transpose_panel(const float* rows, int64_t dim, float* to) {
  int64_t i = 0;
#if defined(__AVX2__)
  for (; i + 8 <= dim; i += 8)
    for (int half = 0; half < 2; ++half) {
      __m256 v[8], pairs[8], quads[8];
      for (int r = 0; r < 8; ++r) v[r] = _mm256_loadu_ps(rows + (half * 8 + r) * dim + i);
      for (int r = 0; r < 8; r += 2) {
        pairs[r] = _mm256_unpacklo_ps(v[r], v[r + 1]);
        pairs[r + 1] = _mm256_unpackhi_ps(v[r], v[r + 1]);
      }
      for (int r = 0; r < 8; r += 4) {
        quads[r] = _mm256_shuffle_ps(pairs[r], pairs[r + 2], 0x44);
        quads[r + 1] = _mm256_shuffle_ps(pairs[r], pairs[r + 2], 0xee);
        quads[r + 2] = _mm256_shuffle_ps(pairs[r + 1], pairs[r + 3], 0x44);
        quads[r + 3] = _mm256_shuffle_ps(pairs[r + 1], pairs[r + 3], 0xee);
      }
      for (int r = 0; r < 4; ++r) {
        _mm256_storeu_ps(to + (i + r) * kPanel + half * 8, _mm256_permute2f128_ps(quads[r], quads[r + 4], 0x20));
        _mm256_storeu_ps(to + (i + r + 4) * kPanel + half * 8, _mm256_permute2f128_ps(quads[r], quads[r + 4], 0x31));
      }
    }
#endif
  for (; i < dim; ++i)
    for (int lane = 0; lane < kPanel; ++lane) to[i * kPanel + lane] = rows[lane * dim + i];
}

// Keys as [panels of 16 keys][dim][16]; ``rows`` [16][dim] is scratch.
template <typename C>
void pack_keys(const Work& work, float* to, float* rows) {
  const int64_t dim = work.a.head_dim, count = work.num_keys();
  work.for_keys<C>(work.a.keys, 0, count, [&](int64_t s, const C* key) {
    float* row = rows + s % kPanel * dim;
    for (int64_t i = 0; i < dim; i += kLanes) store_some(row + i, load_some(key + i, dim - i), dim - i);
    if (s % kPanel == kPanel - 1) transpose_panel(rows, dim, to + s / kPanel * dim * kPanel);
  });
  if (count % kPanel == 0) return;
  for (int64_t i = count % kPanel * dim; i < kPanel * dim; ++i) rows[i] = 0;
  transpose_panel(rows, dim, to + count / kPanel * dim * kPanel);
}

// Values as [panels of 16 elements of a head][keys][16].
template <typename C>
void pack_values(const Work& work, float* to) {
  const int64_t dim = work.a.head_dim, count = work.num_keys();
  work.for_keys<C>(work.a.values, 0, count, [&](int64_t s, const C* value) {
    for (int64_t i = 0; i < dim; i += kLanes)
      store(to + i / kPanel * count * kPanel + s * kPanel + i % kPanel, load_some(value + i, dim - i));
  });
}

template <int R, int P>
void multiply_some(const float* rows, int64_t stride, const float* panels, int64_t panel_stride, int64_t inputs,
                   float* out, int64_t out_stride) {
  Vec sums[R][P * kPanelVecs];
  clear(sums);
  multiply<R, P, false>(rows, stride, panels, panel_stride, inputs, sums);
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < P * kPanelVecs; ++i) store(out + r * out_stride + i * kLanes, sums[r][i]);
}

// rows [R][inputs] times panels, into out [R][16 num_panels].
template <int R>
void multiply_panels(const float* rows, int64_t stride, const float* panels, int64_t panel_stride, int64_t inputs,
                     int64_t num_panels, float* out, int64_t out_stride) {
  constexpr int P = panels_for(R);
  for (; num_panels >= P; num_panels -= P, panels += P * panel_stride, out += P * kPanel)
    multiply_some<R, P>(rows, stride, panels, panel_stride, inputs, out, out_stride);
  for (; num_panels > 0; --num_panels, panels += panel_stride, out += kPanel)
    multiply_some<R, 1>(rows, stride, panels, panel_stride, inputs, out, out_stride);
}

struct ManyMemory {
  float *keys, *values, *queries, *scores, *out;
};

template <int R>
void many_queries(const Work& work, int64_t first_query, const ManySizes& sizes, const ManyMemory& memory) {
  const int64_t dim = work.a.head_dim;
  // Keys beyond the last one that any of the rows sees are left out of both products.
  int64_t last = 0;
  for (int r = 0; r < R; ++r) last = max64(last, work.last_seen((first_query + r) / work.group));
  const int64_t padded = ceil_div(last, kPanel) * kPanel;
  multiply_panels<R>(memory.queries, dim, memory.keys, dim * kPanel, dim, padded / kPanel, memory.scores,
                     sizes.keys_padded);
  Softmax found[R];
  for (int r = 0; r < R; ++r) {
    const int64_t row = (first_query + r) / work.group;
    found[r] = normalise(memory.scores + r * sizes.keys_padded, work.first_seen(row), work.last_seen(row), padded,
                         work.a.soft_cap);
  }
  multiply_panels<R>(memory.scores, sizes.keys_padded, memory.values, work.num_keys() * kPanel, last,
                     sizes.dim_padded / kPanel, memory.out, sizes.dim_padded);
  for (int r = 0; r < R; ++r)
    work.put(first_query + r, memory.out + r * sizes.dim_padded, found[r].top, found[r].weight);
}

template <int R>
void dispatch_many(int64_t count, const Work& work, int64_t first_query, const ManySizes& sizes,
                   const ManyMemory& memory) {
  if constexpr (R > 0) {
    if (count == R)
      many_queries<R>(work, first_query, sizes, memory);
    else
      dispatch_many<R - 1>(count, work, first_query, sizes, memory);
  }
}

template <typename T, typename C>
void run_many(const Work& work, float* floats) {
  const ManySizes sizes(work);
  ManyMemory memory;
  memory.keys = floats;
  memory.values = memory.keys + sizes.key_panels;
  memory.queries = memory.values + sizes.value_panels;
  memory.scores = memory.queries + sizes.queries;
  memory.out = memory.scores + sizes.scores;
  pack_keys<C>(work, memory.keys, memory.queries);
  pack_values<C>(work, memory.values);
  for (int64_t q = 0; q < work.num_queries(); q += kMaxRows) {
    const int64_t count = min64(kMaxRows, work.num_queries() - q);
    work.load_queries<T>(q, count, memory.queries, work.a.head_dim, work.a.scale);
    dispatch_many<kMaxRows>(count, work, q, sizes, memory);
  }
}

}  // namespace

}  // namespace HR_ISA
}  // namespace hr
