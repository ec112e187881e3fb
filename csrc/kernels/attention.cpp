// attention: paged attention over a step's work list.
//
// A thread takes (item, KV head) pairs. A pair's queries are the item's rows times the query heads that share the KV
// head. A decode's few queries read keys and values once, where they lie; a prompt's many queries multiply packed panels
// of them. Either way the scores of all keys of the item are in the thread's cache when they are normalised. Rows with
// several items are merged by the log-sum-exp of each part, as split-KV flash decoding does (Dao et al.).
#include "kernels.h"
#include "math.h"
#include "panels.h"
#include "quantized_cache.h"

namespace hr {
namespace HR_ISA {

namespace {

// Blocks lie anywhere, so that a CPU does not foresee the next one: it is asked for while this one is read.
template <typename T>
inline void prefetch(const T* row, int64_t count) {
  for (int64_t i = 0; i < count; i += 64 / (int64_t)sizeof(T)) __builtin_prefetch(row + i);
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

  // f(key, where its row is, how many rows follow in the same block, itself counted, where the next block's rows are)
  // for the keys [first, last). After the last block the next one is the same again.
  template <typename T, typename F>
  void for_blocks(const HrCache& cache, int64_t first, int64_t last, F f) const {
    const T* head = (const T*)cache.data + kv_head * cache.head_stride;
    while (first < last) {
      const int64_t block = (start + first) / plan.block_size, place = (start + first) % plan.block_size;
      const int64_t count = min64(last - first, plan.block_size - place);
      const int64_t next = first + count < last ? block + 1 : block;
      f(first, head + blocks[block] * cache.block_stride + place * cache.token_stride, count,
        head + blocks[next] * cache.block_stride);
      first += count;
    }
  }

  // f(key, where its row is)
  template <typename T, typename F>
  void for_keys(const HrCache& cache, int64_t first, int64_t last, F f) const {
    for_blocks<T>(cache, first, last, [&](int64_t s, const T* row, int64_t count, const T* next) {
      for (int64_t i = 0; i < count; ++i) {
        prefetch(next + i * cache.token_stride, a.head_dim);
        f(s + i, row + i * cache.token_stride);
      }
    });
  }

  // Query q (row by row, heads of a row together), scaled, as fp32.
  template <typename T>
  void load_queries(int64_t first, int64_t count, float* to, int64_t stride) const {
    const Vec scale = splat(a.scale);
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

// Scores [first, last) become exp(score - top), with a soft cap first; the others of [0, padded) become 0.
Softmax normalise(float* scores, int64_t first, int64_t last, int64_t padded, float soft_cap) {
  for (int64_t i = 0; i < first; ++i) scores[i] = 0;
  for (int64_t i = last; i < padded; ++i) scores[i] = 0;
  if (first >= last) return {0, 0};
  Vec tops = splat(-__builtin_inff());
  if (soft_cap > 0) {
    const Vec cap = splat(soft_cap), inverse = splat(1 / soft_cap);
    for (int64_t i = first; i < last; i += kLanes)
      store_some(scores + i, cap * tanh(load_some(scores + i, last - i) * inverse), last - i);
  }
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

// ---- few queries: keys and values are read where they lie ----

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
  work.for_blocks<C>(work.a.keys, first, last, [&](int64_t s, const C* key, int64_t count, const C* next) {
    for (; count >= 4; count -= 4, s += 4, key += 4 * key_stride, next += 4 * key_stride) {
      for (int n = 0; n < 4; ++n) prefetch(next + n * key_stride, dim);
      score_keys<Q, 4>(queries, dim, key, key_stride, scores + s, stride);
    }
    for (; count > 0; --count, ++s, key += key_stride, next += key_stride) {
      prefetch(next, dim);
      score_keys<Q, 1>(queries, dim, key, key_stride, scores + s, stride);
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
  work.for_blocks<C>(work.a.values, first, last, [&](int64_t s, const C* value, int64_t count, const C* next) {
    for (value += i, next += i; count > 0; --count, ++s, value += value_stride, next += value_stride) {
      prefetch(next, V * kLanes);
      Vec v[V];
      for (int j = 0; j < V; ++j) v[j] = load_some(value + j * kLanes, V == 1 ? dim - i : kLanes);
      for (int q = 0; q < Q; ++q) {
        const Vec weight = splat(weights[q * stride + s]);
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
      work.load_queries<T>(first, count, memory, dim);
      dispatch_few<kFewQueries, C>(count, work, first, memory, scores, work.num_keys(), out);
    }
}

// ---- many queries: keys and values are packed into panels first ----

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
  multiply<R, P>(rows, stride, panels, panel_stride, inputs, sums);
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
    work.load_queries<T>(q, count, memory.queries, work.a.head_dim);
    dispatch_many<kMaxRows>(count, work, q, sizes, memory);
  }
}

// ---- all together ----

template <typename T, typename C>
void run_items(const HrAttention& a, Team& team) {
  const int64_t all = a.plan->num_items * a.num_kv_heads;
  for (int64_t index; (index = team.take(all)) < all;) {
    const Work work(a, index / a.num_kv_heads, index % a.num_kv_heads);
    const bool is_few = work.num_rows == 1;
    const int64_t floats = is_few ? few_floats(work) : ManySizes(work).total();
    float* memory = (float*)team.scratch((size_t)floats * sizeof(float));
    is_few ? run_few<T, C>(work, memory) : run_many<T, C>(work, memory);
  }
}

// Keys or values of an item as fp32, from its first block on; returns where they are as a dense cache of one head, whose
// blocks follow one another.
HrCache decode_keys(const Work& work, const HrCache& cache, float* memory) {
  const int64_t dim = work.a.head_dim, size = work.plan.block_size, first = work.start / size;
  for (int64_t key = work.start; key < work.end; ++key) {
    const int64_t block = work.blocks[key / size], place = key % size;
    decode_token(cache.type, codes_at(cache, block, work.kv_head, place),
                 word_at(cache, block, work.kv_head, place), dim, memory + (key - first * size) * dim);
  }
  return {memory, size * dim, 0, dim, nullptr, 0, 0, HR_F32, 0};
}

// Over a quantized cache: every item's keys and values are decoded first.
template <typename T>
void run_quantized(const HrAttention& a, Team& team) {
  const int64_t all = a.plan->num_items * a.num_kv_heads, size = a.plan->block_size;
  for (int64_t index; (index = team.take(all)) < all;) {
    HrAttention decoded = a;
    Work work(decoded, index / a.num_kv_heads, index % a.num_kv_heads);
    const bool is_few = work.num_rows == 1;
    const int64_t first = work.start / size, num_blocks = ceil_div(work.end, size);
    const int64_t keys = (num_blocks - first) * size * a.head_dim;
    const int64_t rest = is_few ? few_floats(work) : ManySizes(work).total();
    float* memory = (float*)team.scratch((size_t)(2 * keys + rest + num_blocks) * sizeof(float));
    decoded.keys = decode_keys(work, a.keys, memory);
    decoded.values = decode_keys(work, a.values, memory + keys);
    int32_t* blocks = (int32_t*)(memory + 2 * keys + rest);
    for (int64_t block = 0; block < num_blocks; ++block) blocks[block] = (int32_t)(block < first ? 0 : block - first);
    work.blocks = blocks;
    is_few ? run_few<T, float>(work, memory + 2 * keys) : run_many<T, float>(work, memory + 2 * keys);
  }
}

// One head of a merged row, from its partials.
void merge_head(const HrAttention& a, int64_t index, int64_t head, float* sums) {
  const HrAttentionPlan& plan = *a.plan;
  const int64_t dim = a.head_dim, first = plan.reduce_starts[index], last = plan.reduce_starts[index + 1];
  float top = -__builtin_inff(), weight = 0;
  for (int64_t p = first; p < last; ++p) {
    const float log_sum = plan.log_sums[plan.reduce_slots[p] * a.num_heads + head];
    top = log_sum > top ? log_sum : top;
  }
  for (int64_t i = 0; i < dim; ++i) sums[i] = 0;
  for (int64_t p = first; p < last; ++p) {
    const int64_t slot = plan.reduce_slots[p] * a.num_heads + head;
    const float share = expf(plan.log_sums[slot] - top);
    if (share == 0) continue;  // its partial may be anything
    weight += share;
    const float* partial = plan.partials + slot * dim;
    for (int64_t i = 0; i < dim; i += kLanes)
      store_some(sums + i, load_some(sums + i, dim - i) + splat(share) * load_some(partial + i, dim - i), dim - i);
  }
  const Vec factor = splat(1 / weight);
  with_type(a.out_dtype, [&](auto* type) {
    auto* out = (decltype(type))a.out + plan.reduce_rows[index] * a.out_stride + head * dim;
    for (int64_t i = 0; i < dim; i += kLanes)
      store_some(out + i, load_some(sums + i, dim - i) * factor, dim - i);
  });
}

}  // namespace

void attention(const void* args, Team& team) {
  const HrAttention& a = *(const HrAttention*)args;
  with_type(a.dtype, [&](auto* type) {
    if (a.keys.words != nullptr) return run_quantized<std::remove_pointer_t<decltype(type)>>(a, team);
    with_type(a.keys.type, [&](auto* cache) {
      run_items<std::remove_pointer_t<decltype(type)>, std::remove_pointer_t<decltype(cache)>>(a, team);
    });
  });
  if (a.plan->num_reductions == 0) return;
  team.barrier();
  float* sums = (float*)team.scratch((size_t)a.head_dim * sizeof(float));
  const int64_t all = a.plan->num_reductions * a.num_heads;
  for (int64_t index = team.rank(); index < all; index += team.size())
    merge_head(a, index / a.num_heads, index % a.num_heads, sums);
}

}  // namespace HR_ISA
}  // namespace hr
