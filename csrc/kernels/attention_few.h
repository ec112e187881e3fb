// Attention of few queries, as of a decode: keys and values are read where they lie.
#pragma once
#include "attention_work.h"

namespace hr {
namespace HR_ISA {

namespace {

constexpr int kFewQueries = 4;  // that share one reading

// scores[q][0 .. N) = query q . N keys, for N = 4 or 1. All orders of summing are those of sums_of_4.
template <int Q, int N, typename C>
inline void score_keys(const float* queries, int64_t dim, const C* key, int64_t key_stride, float* scores,
                       int64_t stride) {
  Vec sums[Q][N];
  clear(sums);
  int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) {
    Vec keys[N];
    for (int n = 0; n < N; ++n) keys[n] = load(key + n * key_stride + i);
    for (int q = 0; q < Q; ++q) {
      const Vec query = load(queries + q * dim + i);
      for (int n = 0; n < N; ++n) sums[q][n] += query * keys[n];
    }
  }
  if (i < dim)
    for (int q = 0; q < Q; ++q)
      for (int n = 0; n < N; ++n)
        sums[q][n] += load_part(queries + q * dim + i, dim - i) * load_part(key + n * key_stride + i, dim - i);
  for (int q = 0; q < Q; ++q) {
    if constexpr (N == 4) {
      sums_of_4(sums[q][0], sums[q][1], sums[q][2], sums[q][3], scores + q * stride);
    } else {
      float found[4];
      sums_of_4(sums[q][0], Vec{}, Vec{}, Vec{}, found);
      scores[q * stride] = found[0];
    }
  }
}

template <int Q, typename C>
void few_scores(const Work& work, const float* queries, int64_t dim, int64_t first, int64_t last, float* scores,
                int64_t stride) {
  const int64_t key_stride = work.a.keys.token_stride;
  work.for_blocks<C>(work.a.keys, first, last, [&](int64_t s, const C* key, int64_t count, const C* next, const C* later) {
    int64_t n = 0;
    for (; n + 4 <= count; n += 4) {
      for (int64_t i = n; i < n + 4; ++i) prefetch(next + i * key_stride, later + i * key_stride, dim);
      score_keys<Q, 4>(queries, dim, key + n * key_stride, key_stride, scores + s + n, stride);
    }
    for (; n < count; ++n) {
      prefetch(next + n * key_stride, later + n * key_stride, dim);
      score_keys<Q, 1>(queries, dim, key + n * key_stride, key_stride, scores + s + n, stride);
    }
  });
}

// out[q][i .. i + V vectors] = weights[q] . values
template <int Q, int V, typename C>
void few_values(const Work& work, const float* weights, int64_t stride, int64_t first, int64_t last, int64_t i,
                int64_t dim, float* out) {
  Vec sums[Q][V];
  clear(sums);
  const int64_t value_stride = work.a.values.token_stride;
  work.for_blocks<C>(work.a.values, first, last, [&](int64_t s, const C* value, int64_t count, const C* next, const C* later) {
    for (int64_t n = 0; n < count; ++n) {
      const int64_t at = n * value_stride + i;
      prefetch(next + at, later + at, V * kLanes);
      Vec v[V];
      for (int j = 0; j < V; ++j) v[j] = load_some(value + at + j * kLanes, V == 1 ? dim - i : kLanes);
      for (int q = 0; q < Q; ++q) {
        const Vec weight = splat(weights[q * stride + s + n]);
        for (int j = 0; j < V; ++j) sums[q][j] += weight * v[j];
      }
    }
  });
  for (int q = 0; q < Q; ++q)
    for (int j = 0; j < V; ++j) store_some(out + q * dim + i + j * kLanes, sums[q][j], V == 1 ? dim - i : kLanes);
}

// Q queries of one row.
template <int Q, typename C>
void few_queries(const Work& work, int64_t first_query, const float* queries, float* scores, int64_t stride,
                 float* out) {
  constexpr int V = 12 / Q < 4 ? 12 / Q : 4;
  const int64_t dim = work.a.head_dim, row = first_query / work.group;
  const int64_t first = work.first_seen(row), last = work.last_seen(row);
  few_scores<Q, C>(work, queries, dim, first, last, scores, stride);
  Softmax found[Q];
  for (int q = 0; q < Q; ++q) found[q] = normalise(scores + q * stride, first, last, last, work.a.soft_cap);
  int64_t i = 0;
  for (; i + V * kLanes <= dim; i += V * kLanes) few_values<Q, V, C>(work, scores, stride, first, last, i, dim, out);
  for (; i < dim; i += kLanes) few_values<Q, 1, C>(work, scores, stride, first, last, i, dim, out);
  for (int q = 0; q < Q; ++q) work.put(first_query + q, out + q * dim, found[q].top, found[q].weight);
}

template <int Q, typename C>
void dispatch_few(int64_t count, const Work& work, int64_t first_query, const float* queries, float* scores,
                  int64_t stride, float* out) {
  if constexpr (Q > 0) {
    if (count == Q)
      few_queries<Q, C>(work, first_query, queries, scores, stride, out);
    else
      dispatch_few<Q - 1, C>(count, work, first_query, queries, scores, stride, out);
  }
}

int64_t few_floats(const Work& work) { return kFewQueries * (work.num_keys() + 2 * work.a.head_dim); }

template <typename T, typename C>
void run_few(const Work& work, float* memory) {
  const int64_t dim = work.a.head_dim;
  float* out = memory + kFewQueries * dim;
  float* scores = out + kFewQueries * dim;
  for (int64_t row = 0; row < work.num_rows; ++row)
    for (int64_t g = 0; g < work.group; g += kFewQueries) {
      const int64_t first = row * work.group + g, count = min64(kFewQueries, work.group - g);
      work.load_queries<T>(first, count, memory, dim, work.a.scale);
      dispatch_few<kFewQueries, C>(count, work, first, memory, scores, work.num_keys(), out);
    }
}

}  // namespace

}  // namespace HR_ISA
}  // namespace hr
