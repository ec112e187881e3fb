// One piece of attention's work list: where its queries, keys and answers are, and the softmax over its scores.
#pragma once
#include "kernels.h"
#include "math.h"

namespace hr {
namespace HR_ISA {

namespace {

// Blocks lie anywhere, so that a CPU does not foresee them. The next one is asked for while this one is read, what comes
// after the whole pass, too, but only into the second level of caches: the first can wait for few lines at a time.
template <typename T>
inline void prefetch(const T* next, const T* later, int64_t count) {
  for (int64_t i = 0; i < count; i += 64 / (int64_t)sizeof(T)) {
    __builtin_prefetch(next + i, 0, 3);
    __builtin_prefetch(later + i, 0, 2);
  }
}

// One item and KV head.
struct Work {
  const HrAttention& a;
  const HrAttentionPlan& plan;
  int64_t kv_head, group;      // query heads that share it
  int64_t num_rows, row_start;  // of the gathered query rows
  int64_t start, end;          // keys
  int64_t partial;             // -1: final
  const int32_t* blocks;       // of the request
  const Work* following = nullptr;  // what the same thread does next, if that is known

  Work(const HrAttention& a, int64_t item, int64_t kv_head)
      : a(a), plan(*a.plan), kv_head(kv_head), group(a.num_heads / a.num_kv_heads) {
    num_rows = plan.item_num_rows[item];
    row_start = plan.item_row_start[item];
    start = plan.item_kv_start[item];
    end = plan.item_kv_end[item];
    partial = plan.item_partial_start[item];
    blocks = plan.block_table + plan.item_request[item] * plan.block_table_stride;
  }

  int64_t num_keys() const { return end - start; }
  int64_t num_queries() const { return num_rows * group; }

  // Keys of the item that row r sees: [first, last), counted from the item's start.
  int64_t first_seen(int64_t r) const {
    if (plan.window == 0) return 0;
    const int64_t position = plan.row_positions[row_start + r];
    return min64(max64(0, position - plan.window + 1 - start), num_keys());
  }
  int64_t last_seen(int64_t r) const {
    return max64(0, min64(num_keys(), plan.row_positions[row_start + r] + 1 - start));
  }

  // A block's first row.
  template <typename T>
  const T* rows_of(const HrCache& cache, int64_t block) const {
    return (const T*)cache.data + kv_head * cache.head_stride + blocks[block] * cache.block_stride;
  }

  // What is read a pass later: after a block of keys its values, after values the following item's keys; else ``next``.
  template <typename T>
  const T* rows_after(const HrCache& cache, int64_t block, const T* next) const {
    if (&cache == &a.keys) return rows_of<T>(a.values, block);
    const bool is_known = following != nullptr && block * plan.block_size < following->end;
    return is_known ? following->rows_of<T>(a.keys, block) : next;
  }

  // f(key, where its row is, how many rows follow in the same block, itself counted, where the next block's rows are,
  // where rows of the next pass are) for the keys [first, last). After the last block the next one is the same again.
  template <typename T, typename F>
  void for_blocks(const HrCache& cache, int64_t first, int64_t last, F f) const {
    while (first < last) {
      const int64_t block = (start + first) / plan.block_size, place = (start + first) % plan.block_size;
      const int64_t count = min64(last - first, plan.block_size - place);
      const T* next = rows_of<T>(cache, first + count < last ? block + 1 : block);
      f(first, rows_of<T>(cache, block) + place * cache.token_stride, count, next, rows_after<T>(cache, block, next));
      first += count;
    }
  }

  // f(key, where its row is)
  template <typename T, typename F>
  void for_keys(const HrCache& cache, int64_t first, int64_t last, F f) const {
    for_blocks<T>(cache, first, last, [&](int64_t s, const T* row, int64_t count, const T* next, const T* later) {
      for (int64_t i = 0; i < count; ++i) {
        prefetch(next + i * cache.token_stride, later + i * cache.token_stride, a.head_dim);
        f(s + i, row + i * cache.token_stride);
      }
    });
  }

  // Query q (row by row, heads of a row together), times ``factor``, as fp32.
  template <typename T>
  void load_queries(int64_t first, int64_t count, float* to, int64_t stride, float factor) const {
    const Vec scale = splat(factor);
    for (int64_t q = first; q < first + count; ++q, to += stride) {
      const int64_t token = plan.query_rows[row_start + q / group];
      const T* from = (const T*)a.qkv + token * a.qkv_stride + (kv_head * group + q % group) * a.head_dim;
      for (int64_t i = 0; i < a.head_dim; i += kLanes)
        store_some(to + i, load_some(from + i, a.head_dim - i) * scale, a.head_dim - i);
    }
  }

  // The weighted sum of values of query q, and the scores' largest and the sum of their weights.
  void put(int64_t q, const float* values, float top, float weight) const {
    const int64_t head = kv_head * group + q % group, row = q / group;
    const Vec factor = splat(weight > 0 ? 1.0f / weight : weight);  // NaN stays
    if (partial >= 0) {
      const int64_t slot = (partial + row) * a.num_heads + head;
      float* to = plan.partials + slot * a.head_dim;
      for (int64_t i = 0; i < a.head_dim; i += kLanes)
        store_some(to + i, load_some(values + i, a.head_dim - i) * factor, a.head_dim - i);
      plan.log_sums[slot] = weight > 0 ? top + logf(weight) : weight == 0 ? -__builtin_inff() : weight;
      return;
    }
    const int64_t token = plan.query_rows[row_start + row];
    with_type(a.out_dtype, [&](auto* type) {
      auto* to = (decltype(type))a.out + token * a.out_stride + head * a.head_dim;
      for (int64_t i = 0; i < a.head_dim; i += kLanes)
        store_some(to + i, load_some(values + i, a.head_dim - i) * factor, a.head_dim - i);
    });
  }
};

struct Softmax {
  float top, weight;
};

// Scores [first, last) times ``scale``, held within the cap.
void cap_scores(float* scores, int64_t first, int64_t last, float scale, float soft_cap) {
  const Vec cap = splat(soft_cap), factor = splat(scale / soft_cap);
  for (int64_t i = first; i < last; i += kLanes)
    store_some(scores + i, cap * tanh(load_some(scores + i, last - i) * factor), last - i);
}

// Scores [first, last) become exp(score - top), with a soft cap first; the others of [0, padded) become 0.
Softmax normalise(float* scores, int64_t first, int64_t last, int64_t padded, float soft_cap) {
  for (int64_t i = 0; i < first; ++i) scores[i] = 0;
  for (int64_t i = last; i < padded; ++i) scores[i] = 0;
  if (first >= last) return {0, 0};
  Vec tops = splat(-__builtin_inff());
  if (soft_cap > 0) cap_scores(scores, first, last, 1, soft_cap);
  int64_t i = first;
  for (; i + kLanes <= last; i += kLanes) tops = max(load(scores + i), tops);
  float top = max_lane(tops);
  for (; i < last; ++i) top = scores[i] > top ? scores[i] : top;
  const Vec shift = splat(top);
  Vec sums = {};
  for (i = first; i + kLanes <= last; i += kLanes) {
    const Vec v = exp_of_negative(load(scores + i) - shift);
    store(scores + i, v);
    sums += v;
  }
  float weight = sum(sums);
  if (i < last) {
    const Vec v = exp_of_negative(load_part(scores + i, last - i) - shift);
    store_part(scores + i, v, last - i);
    for (int64_t lane = 0; lane < last - i; ++lane) weight += v[lane];
  }
  return {top, weight};
}

}  // namespace

}  // namespace HR_ISA
}  // namespace hr
