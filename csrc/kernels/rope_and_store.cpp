// rope_and_store: query and key norms, rotary embedding (Su et al.), keys and values into the paged cache.
#include <initializer_list>

#include "kernels.h"
#include "quantized_cache.h"
#include "vec.h"

namespace hr {
namespace HR_ISA {

namespace {

template <typename T>
float inverse_rms(const T* head, int64_t dim, float eps) {
  Vec squares = {};
  for (int64_t i = 0; i < dim; i += kLanes) {
    const Vec v = load_some(head + i, dim - i);
    squares += v * v;
  }
  return 1.0f / sqrtf(sum(squares) / (float)dim + eps);
}

// In place, or into fp32.
template <typename T, typename O>
void rotate(const T* head, const float* norm, float eps, const float* cos_sin, int64_t dim, O* out) {
  const int64_t half = dim / 2;
  const Vec scale = splat(norm == nullptr ? 1.0f : inverse_rms(head, dim, eps));
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t count = half - i;
    Vec first = load_some(head + i, count), second = load_some(head + half + i, count);
    if (norm != nullptr) {
      first = first * scale * load_some(norm + i, count);
      second = second * scale * load_some(norm + half + i, count);
    }
    const Vec cos = load_some(cos_sin + i, count), sin = load_some(cos_sin + half + i, count);
    store_some(out + i, first * cos - second * sin, count);
    store_some(out + half + i, second * cos + first * sin, count);
  }
}

// ``hadamard`` of kernels/quantized_cache.py, in its order of sums.
void turn(float* head, int64_t dim) {
  const int64_t half = dim / 2, piece = half & -half;
  for (int64_t step = half; step > 0; step = step == half ? piece / 2 : step / 2)
    for (int64_t base = 0; base < dim; base += 2 * step)
      for (int64_t i = base; i < base + step; ++i) {
        const float low = head[i], high = head[i + step];
        head[i] = low + high;
        head[i + step] = low - high;
      }
  const float factor = (float)(1 / sqrt(2.0 * (double)piece));
  for (int64_t i = 0; i < dim; ++i) head[i] *= factor;
}

template <typename T>
void rotate_and_turn(T* head, const float* norm, float eps, const float* cos_sin, int64_t dim, float* wide) {
  rotate(head, norm, eps, cos_sin, dim, wide);
  turn(wide, dim);
  for (int64_t i = 0; i < dim; i += kLanes) store_some(head + i, load_some(wide + i, dim - i), dim - i);
}

template <typename T, typename C>
void put(const T* head, const HrCache& cache, int64_t block, int64_t index, int64_t place, int64_t dim) {
  C* to = (C*)cache.data + block * cache.block_stride + index * cache.head_stride + place * cache.token_stride;
  for (int64_t i = 0; i < dim; i += kLanes) store_some(to + i, load_some(head + i, dim - i), dim - i);
}

template <typename T>
void put_quantized(const HrRopeAndStore& a, const T* head, const HrCache& cache, int64_t block, int64_t index,
                   int64_t place, float* wide) {
  for (int64_t i = 0; i < a.head_dim; i += kLanes)
    store_some(wide + i, load_some(head + i, a.head_dim - i), a.head_dim - i);
  encode_token(cache.type, wide, a.head_dim, codes_at(cache, block, index, place),
               word_at(cache, block, index, place));
}

// Asks for the cache's lines of a token that comes soon: a store waits for its line, and few wait at a time.
template <typename C>
void fetch_slots(const HrRopeAndStore& a, int64_t slot) {
  const int64_t block = slot / a.block_size, place = slot % a.block_size;
  for (const HrCache* cache : {&a.keys, &a.values})
    for (int64_t h = 0; h < a.num_kv_heads; ++h) {
      const C* to = (const C*)cache->data + block * cache->block_stride + h * cache->head_stride + place * cache->token_stride;
      for (int64_t i = 0; i < a.head_dim; i += 64 / (int64_t)sizeof(C)) __builtin_prefetch(to + i, 1);
    }
}

constexpr int64_t kTokensAhead = 4;

template <typename T, typename C>
void run(const HrRopeAndStore& a, Team& team) {
  const int64_t dim = a.head_dim;
  const bool is_quantized = a.keys.words != nullptr;
  float* wide = is_quantized ? (float*)team.scratch((size_t)dim * sizeof(float)) : nullptr;
  const int64_t end = a.rows * (team.rank() + 1) / team.size();
  for (int64_t t = a.rows * team.rank() / team.size(); t < end; ++t) {
    if (!is_quantized && t + kTokensAhead < end && a.slot_mapping[t + kTokensAhead] >= 0)
      fetch_slots<C>(a, a.slot_mapping[t + kTokensAhead]);
    T* row = (T*)a.qkv + t * a.qkv_stride;
    T* keys = row + a.num_heads * dim;
    T* values = keys + a.num_kv_heads * dim;
    const float* cos_sin = a.cos_sin + a.positions[t] * dim;
    for (int64_t h = 0; h < a.num_heads + a.num_kv_heads; ++h) {
      T* head = row + h * dim;
      const float* norm = h < a.num_heads ? a.q_norm : a.k_norm;
      if (a.keys.is_turned)
        rotate_and_turn(head, norm, a.eps, cos_sin, dim, wide);
      else
        rotate(head, norm, a.eps, cos_sin, dim, head);
    }
    if (a.slot_mapping[t] < 0) continue;
    const int64_t block = a.slot_mapping[t] / a.block_size, place = a.slot_mapping[t] % a.block_size;
    for (int64_t h = 0; h < a.num_kv_heads; ++h) {
      if (is_quantized) {
        put_quantized(a, keys + h * dim, a.keys, block, h, place, wide);
        put_quantized(a, values + h * dim, a.values, block, h, place, wide);
        continue;
      }
      put<T, C>(keys + h * dim, a.keys, block, h, place, dim);
      put<T, C>(values + h * dim, a.values, block, h, place, dim);
    }
  }
}

}  // namespace

void rope_and_store(const void* args, Team& team) {
  const HrRopeAndStore& a = *(const HrRopeAndStore*)args;
  with_type(a.dtype, [&](auto* type) {
    with_type(a.keys.words == nullptr ? a.keys.type : HR_F32, [&](auto* cache) {
      run<std::remove_pointer_t<decltype(type)>, std::remove_pointer_t<decltype(cache)>>(a, team);
    });
  });
}

}  // namespace HR_ISA
}  // namespace hr
