// Attention of many queries by tiles of AMX: queries, keys, weights and values as bf16 digits.
//
// A number is the sum of its bf16 and of the bf16 of what is left, to 16 bits or so. Of the four products of two such
// numbers the one of both low digits is left out; sums are fp32. What is stored as bf16 is its own only digit. Where
// queries are bf16, and so is the result, the softmax's weights are rounded to one digit too, as GPUs do.
#pragma once
#include "attention_work.h"
#if defined(__AMX_BF16__)
#include "attention_many.h"
#include "digits.h"
#include "tiles.h"

namespace hr {
namespace HR_ISA {

namespace {

constexpr int64_t kTileInputs = 32;                         // numbers that a product of tiles sums over
constexpr int64_t kTileNumbers = kTile * kTileInputs;       // of one digit
constexpr int64_t kTileQueries = 2 * kTile;                 // that are multiplied together
constexpr int64_t kFewestTileQueries = kTile;               // from which on two digits pay

// Digits of queries and of the softmax's weights, and of keys and values: of the types T and C.
template <typename T, typename C>
struct NumDigits {
  static constexpr int right = std::is_same_v<C, Bf16> ? 1 : 2;
  static constexpr int left = std::is_same_v<T, Bf16> && right == 1 ? 1 : 2;
};

// Digits lie as [groups of 16][inputs / 32][high, low][16][32], where a group is one of queries, keys or elements of a
// head. In the right factor a row of a tile is a pair of inputs of 16 columns, else 32 inputs of one row.
struct TileSizes {
  int64_t dim, keys, key_numbers, value_numbers, query_numbers, weight_numbers, floats;
  // For two digits of everything, which is enough for one.
  explicit TileSizes(const Work& work) : dim(work.a.head_dim) {
    keys = ceil_div(work.num_keys(), kTileInputs) * kTileInputs;
    key_numbers = value_numbers = 2 * keys * dim;
    query_numbers = 2 * kTileQueries * dim;
    weight_numbers = 2 * kTileQueries * keys;
    floats = kTileQueries * (dim + score_stride());  // queries, then what comes out; scores
  }
  // Rows of scores lie a line more than a power of two apart, or they would share a few sets of the cache.
  int64_t score_stride() const { return keys + kTile; }
  int64_t total() const { return (key_numbers + value_numbers + query_numbers + weight_numbers) / 2 + floats; }
};

// All bf16 items of several rows, be it for the same bits alone: answers are rounded to bf16, so that another way of
// summing would make a prompt's hang on how many of its tokens are computed together.
template <typename T, typename C>
bool fits_tiles(const Work& work) {
  const int64_t fewest = NumDigits<T, C>::left == 1 ? 1 : kFewestTileQueries;
  return work.num_queries() >= fewest && work.a.head_dim % kTileInputs == 0;
}

// Where row ``row`` of left factors begins; the next 32 numbers are DIGITS tiles further.
inline uint16_t* left_row(uint16_t* tiles, int64_t row, int64_t group_numbers) {
  return tiles + row / kTile * group_numbers + row % kTile * kTileInputs;
}

// A row of numbers, a multiple of 32, as a row of left factors.
template <int DIGITS>
void split_left(const float* from, int64_t inputs, uint16_t* to) {
  for (int64_t i = 0; i < inputs; i += kTileInputs, to += DIGITS * kTileNumbers)
    store_digits<DIGITS>(_mm512_loadu_ps(from + i), _mm512_loadu_ps(from + i + kTile), to, to + kTileNumbers);
}

// 2^x for x <= 0 with an error of 3e-7: 2^n times a polynomial (least squares at Chebyshev's points) for what is left.
inline __m512 power_of_2(__m512 x) {
  const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 r = _mm512_sub_ps(x, n);
  __m512 p = _mm512_set1_ps(0.00132186725f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.00967169794f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.0555089295f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.24022238f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.693146856f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, n);
}

// The lanes of 16 numbers from ``i`` on that lie in [first, last).
inline __mmask16 lanes_within(int64_t i, int64_t first, int64_t last) {
  const int64_t low = min64(max64(first - i, 0), kTile), high = min64(max64(last - i, 0), kTile);
  return (__mmask16)(((1u << high) - 1) & ~((1u << low) - 1));
}

// exp(scale * score - the largest) of the scores [first, last), and 0 for the others of [0, padded), as a row of left
// factors.
template <int DIGITS>
Softmax weigh(const float* scores, int64_t first, int64_t last, int64_t padded, float scale, uint16_t* to) {
  __m512 tops = _mm512_set1_ps(-__builtin_inff());
  for (int64_t i = first; i < last; i += kTile)
    tops = _mm512_mask_max_ps(tops, lanes_within(i, i, last), _mm512_loadu_ps(scores + i), tops);
  const float top = _mm512_reduce_max_ps(tops) * scale;
  const __m512 factor = _mm512_set1_ps(scale * 1.44269504f), shift = _mm512_set1_ps(top * 1.44269504f);
  __m512 sums = _mm512_setzero_ps();
  const auto weights_at = [&](int64_t i) {
    const bool is_within = first <= i && i + kTile <= last;
    const __mmask16 lanes = is_within ? (__mmask16)0xffff : lanes_within(i, first, last);
    if (lanes == 0) return _mm512_setzero_ps();
    const __m512 found = power_of_2(_mm512_fmsub_ps(_mm512_loadu_ps(scores + i), factor, shift));
    const __m512 weights = is_within ? found : _mm512_maskz_mov_ps(lanes, found);
    sums = _mm512_add_ps(sums, weights);
    return weights;
  };
  for (int64_t i = 0; i < padded; i += kTileInputs, to += DIGITS * kTileNumbers) {
    const __m512 lower = weights_at(i), upper = weights_at(i + kTile);
    store_digits<DIGITS>(lower, upper, to, to + kTileNumbers);
  }
  return first < last ? Softmax{top, _mm512_reduce_add_ps(sums)} : Softmax{0, 0};
}

// Keys, 16 at a time, as right factors: pairs of a key's elements are turned like numbers of 32 bits. scratch: 25 rows.
template <typename C>
void split_keys(const Work& work, const TileSizes& sizes, uint16_t* to, float* scratch) {
  constexpr int digits = NumDigits<float, C>::right;
  const int64_t dim = sizes.dim, count = work.num_keys(), units = dim / 2;
  float* row = scratch;
  float *high = row + dim, *low = high + kTile * units;  // [16 keys][units]
  float* turned = low + kTile * units;
  const auto put = [&](int64_t s) {
    if (s % kTile != kTile - 1) return;
    uint16_t* tiles = to + s / kTile * digits * kTile * dim;
    for (int digit = 0; digit < digits; ++digit) {
      transpose_panel(digit == 0 ? high : low, units, turned);
      for (int64_t step = 0; step < units / kTile; ++step)
        __builtin_memcpy(tiles + (digits * step + digit) * kTileNumbers, turned + step * kTile * kTile,
                         kTileNumbers * 2);
    }
  };
  work.for_keys<C>(work.a.keys, 0, count, [&](int64_t s, const C* key) {
    if constexpr (digits == 1) {
      __builtin_memcpy(high + s % kTile * units, key, dim * sizeof(C));
    } else {
      for (int64_t i = 0; i < dim; i += kLanes) store(row + i, load(key + i));
      for (int64_t i = 0; i < dim; i += kTileInputs)
        store_digits<2>(_mm512_loadu_ps(row + i), _mm512_loadu_ps(row + i + kTile),
                        (uint16_t*)(high + s % kTile * units) + i, (uint16_t*)(low + s % kTile * units) + i);
    }
    put(s);
  });
  for (int64_t s = count; s < sizes.keys; ++s) {
    for (int64_t i = 0; i < units; ++i) high[s % kTile * units + i] = low[s % kTile * units + i] = 0;
    put(s);
  }
}

// Two keys' values of 16 elements, side by side in each lane.
inline __m512i value_pairs(__m512i both) {
  alignas(64) static constexpr uint16_t kTurns[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(kTurns), both);
}

inline void store_value_pair(const float* first, const float* second, uint16_t* to) {
  const DigitWords digits = digits_of(_mm512_loadu_ps(first), _mm512_loadu_ps(second));
  _mm512_storeu_si512(to, value_pairs(digits.high));
  _mm512_storeu_si512(to + kTileNumbers, value_pairs(digits.low));
}

inline void store_value_pair(const Bf16* first, const Bf16* second, uint16_t* to) {
  const __m256i lower = _mm256_loadu_si256((const __m256i*)first), upper = _mm256_loadu_si256((const __m256i*)second);
  _mm512_storeu_si512(to, value_pairs(_mm512_inserti64x4(_mm512_castsi256_si512(lower), upper, 1)));
}

// Values as right factors: inputs are keys, columns are elements of a head.
template <typename C>
void split_values(const Work& work, const TileSizes& sizes, uint16_t* to, float* scratch) {
  constexpr int digits = NumDigits<float, C>::right;
  using Number = std::conditional_t<digits == 1, Bf16, float>;
  const int64_t dim = sizes.dim, count = work.num_keys(), group_numbers = digits * kTile * sizes.keys;
  Number *before = (Number*)scratch, *zeros = (Number*)(scratch + dim), *now = (Number*)(scratch + 2 * dim);
  for (int64_t i = 0; i < dim; ++i) zeros[i] = Number{};
  const auto put = [&](int64_t s, const Number* first, const Number* second) {
    uint16_t* tile = to + s / kTileInputs * digits * kTileNumbers + s % kTileInputs / 2 * kTileInputs;
    for (int64_t i = 0; i < dim; i += kTile) store_value_pair(first + i, second + i, tile + i / kTile * group_numbers);
  };
  work.for_keys<C>(work.a.values, 0, count, [&](int64_t s, const C* value) {
    Number* row = s % 2 == 0 ? before : now;
    if constexpr (digits == 1)
      __builtin_memcpy(row, value, dim * sizeof(C));
    else
      for (int64_t i = 0; i < dim; i += kLanes) store(row + i, load(value + i));
    if (s % 2 == 1) put(s - 1, before, now);
  });
  if (count % 2 == 1) put(count - 1, before, zeros);
  for (int64_t s = ceil_div(count, 2) * 2; s < sizes.keys; s += 2) put(s, zeros, zeros);
}

// Two groups of 16 rows times two of 16 columns: ``inputs`` numbers each, a multiple of 32; out: [32][out_stride].
template <int LEFT, int RIGHT>
void multiply_digits(const uint16_t* left, int64_t left_group, const uint16_t* right, int64_t right_group,
                     int64_t inputs, float* out, int64_t out_stride) {
  const uint16_t *lower = left + left_group, *second = right + right_group;
  const auto multiply_left = [&](const uint16_t* upper_tile, const uint16_t* lower_tile) {
    _tile_loadd(4, upper_tile, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, lower_tile, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  };
  clear_sums();
  for (int64_t step = 0; step < inputs / kTileInputs; ++step) {
    const int64_t at = step * LEFT * kTileNumbers, place = step * RIGHT * kTileNumbers;
    _tile_loadd(6, right + place, 64);
    _tile_loadd(7, second + place, 64);
    if constexpr (LEFT == 2) multiply_left(left + at + kTileNumbers, lower + at + kTileNumbers);
    multiply_left(left + at, lower + at);
    if constexpr (RIGHT == 2) {
      _tile_loadd(6, right + place + kTileNumbers, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, second + place + kTileNumbers, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, out, out_stride * 4);
  _tile_stored(1, out + kTile, out_stride * 4);
  _tile_stored(2, out + kTile * out_stride, out_stride * 4);
  _tile_stored(3, out + kTile * out_stride + kTile, out_stride * 4);
  tiles_stored();
}

struct TileMemory {
  uint16_t *keys, *values, *queries, *weights;
  float *rows, *scores;
};

// Queries [first, first + count), at most 32. Rows of tiles beyond them hold anything: a row's sums are its own.
template <typename T, typename C>
void tile_queries(const Work& work, int64_t first, int64_t count, const TileSizes& sizes, const TileMemory& memory) {
  constexpr int left = NumDigits<T, C>::left, right = NumDigits<T, C>::right;
  const int64_t dim = sizes.dim, query_group = left * kTile * dim, weight_group = left * kTile * sizes.keys;
  // One digit of a query is the query itself, unless it is scaled: then the scores are.
  const float scale = left == 1 ? work.a.scale : 1.0f;
  work.load_queries<T>(first, count, memory.rows, dim, left == 1 ? 1.0f : work.a.scale);
  for (int64_t q = 0; q < count; ++q)
    split_left<left>(memory.rows + q * dim, dim, left_row(memory.queries, q, query_group));
  // Keys beyond the last one that any of the rows sees are left out of both products.
  int64_t last = 0;
  for (int64_t q = 0; q < count; ++q) last = max64(last, work.last_seen((first + q) / work.group));
  const int64_t padded = ceil_div(last, kTileInputs) * kTileInputs;
  for (int64_t key = 0; key < padded; key += kTileInputs)
    multiply_digits<left, right>(memory.queries, query_group, memory.keys + key * right * dim, right * kTile * dim, dim,
                                 memory.scores + key, sizes.score_stride());
  Softmax found[kTileQueries];
  for (int64_t q = 0; q < count; ++q) {
    const int64_t row = (first + q) / work.group;
    const int64_t first_key = work.first_seen(row), last_key = work.last_seen(row);
    float* scores = memory.scores + q * sizes.score_stride();
    if (work.a.soft_cap > 0) cap_scores(scores, first_key, last_key, scale, work.a.soft_cap);
    found[q] = weigh<left>(scores, first_key, last_key, padded, work.a.soft_cap > 0 ? 1.0f : scale,
                           left_row(memory.weights, q, weight_group));
  }
  for (int64_t i = 0; i < dim; i += kTileInputs)
    multiply_digits<left, right>(memory.weights, weight_group, memory.values + i * right * sizes.keys,
                                 right * kTile * sizes.keys, padded, memory.rows + i, dim);
  for (int64_t q = 0; q < count; ++q)
    work.put(first + q, memory.rows + q * dim, found[q].top, found[q].weight);
}

template <typename T, typename C>
void run_tiles(const Work& work, float* floats) {
  const TileSizes sizes(work);
  TileMemory memory;
  memory.keys = (uint16_t*)floats;
  memory.values = memory.keys + sizes.key_numbers;
  memory.queries = memory.values + sizes.value_numbers;
  memory.weights = memory.queries + sizes.query_numbers;
  memory.rows = (float*)(memory.weights + sizes.weight_numbers);
  memory.scores = memory.rows + kTileQueries * sizes.dim;
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) config.set(tile, kTile, 64);
  config.load();
  split_keys<C>(work, sizes, memory.keys, memory.rows);
  split_values<C>(work, sizes, memory.values, memory.rows);
  for (int64_t q = 0; q < work.num_queries(); q += kTileQueries)
    tile_queries<T, C>(work, q, min64(kTileQueries, work.num_queries() - q), sizes, memory);
  _tile_release();
}

}  // namespace

}  // namespace HR_ISA
}  // namespace hr
#endif
