// Attention of many queries by tiles of AMX: queries, keys, weights and values as two bf16 digits each.
//
// A number is the sum of its bf16 and of the bf16 of what is left, to 16 bits or so. Of the four products of two such
// numbers the one of both low digits is left out; sums are fp32.
#pragma once
#include "attention_work.h"
#if defined(__AMX_BF16__)
#include "attention_many.h"
#include "tiles.h"

namespace hr {
namespace HR_ISA {

namespace {

constexpr int64_t kTileInputs = 32;                         // numbers that a product of tiles sums over
constexpr int64_t kTileNumbers = kTile * kTileInputs;       // of one digit
constexpr int64_t kTileQueries = 2 * kTile;                 // that are multiplied together
constexpr int64_t kFewestTileQueries = kTile;               // from which on this pays

// Digits lie as [groups of 16][inputs / 32][high, low][16][32], where a group is one of queries, keys or elements of a
// head. In the right factor a row of a tile is a pair of inputs of 16 columns, else 32 inputs of one row.
struct TileSizes {
  int64_t dim, keys, key_numbers, value_numbers, query_numbers, weight_numbers, floats;
  explicit TileSizes(const Work& work) : dim(work.a.head_dim) {
    keys = ceil_div(work.num_keys(), kTileInputs) * kTileInputs;
    key_numbers = value_numbers = 2 * keys * dim;
    query_numbers = 2 * kTileQueries * dim;
    weight_numbers = 2 * kTileQueries * keys;
    floats = kTileQueries * (dim + keys);  // queries, then what comes out; scores
  }
  int64_t total() const { return (key_numbers + value_numbers + query_numbers + weight_numbers) / 2 + floats; }
};

bool fits_tiles(const Work& work) {
  return work.num_queries() >= kFewestTileQueries && work.a.head_dim % kTileInputs == 0;
}

inline __m512i digit_words(__m512bh v) { return reinterpret_cast<__m512i>(v); }

struct DigitWords {
  __m512i high, low;
};

// Digits of 32 numbers, of which `first` are the lower 16.
inline DigitWords digits_of(__m512 first, __m512 second) {
  const __m512i words = digit_words(_mm512_cvtne2ps_pbh(second, first));
  const __m512i whole_first = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(words)), 16);
  const __m512i whole_second = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(words, 1)), 16);
  const __m512 rest_first = _mm512_sub_ps(first, _mm512_castsi512_ps(whole_first));
  const __m512 rest_second = _mm512_sub_ps(second, _mm512_castsi512_ps(whole_second));
  return {words, digit_words(_mm512_cvtne2ps_pbh(rest_second, rest_first))};
}

inline void store_digits(const float* from, uint16_t* high, uint16_t* low) {
  const DigitWords digits = digits_of(_mm512_loadu_ps(from), _mm512_loadu_ps(from + kTile));
  _mm512_storeu_si512(high, digits.high);
  _mm512_storeu_si512(low, digits.low);
}

// A row of numbers, a multiple of 32, as row ``row`` of left factors.
void split_left(const float* from, int64_t inputs, int64_t row, int64_t group_numbers, uint16_t* to) {
  to += row / kTile * group_numbers + row % kTile * kTileInputs;
  for (int64_t i = 0; i < inputs; i += kTileInputs, to += 2 * kTileNumbers)
    store_digits(from + i, to, to + kTileNumbers);
}

// Keys, 16 at a time, as right factors: pairs of a key's elements are turned like numbers of 32 bits. scratch: 25 rows.
template <typename C>
void split_keys(const Work& work, const TileSizes& sizes, uint16_t* to, float* scratch) {
  const int64_t dim = sizes.dim, count = work.num_keys(), units = dim / 2;
  float* row = scratch;
  float *high = row + dim, *low = high + kTile * units;  // [16 keys][units]
  float* turned = low + kTile * units;
  const auto put = [&](int64_t group) {
    uint16_t* tiles = to + group * 2 * kTile * dim;
    for (int digit = 0; digit < 2; ++digit) {
      transpose_panel(digit == 0 ? high : low, units, turned);
      for (int64_t step = 0; step < units / kTile; ++step)
        __builtin_memcpy(tiles + (2 * step + digit) * kTileNumbers, turned + step * kTile * kTile, kTileNumbers * 2);
    }
  };
  const auto split = [&](int64_t s, const float* key) {
    for (int64_t i = 0; i < dim; i += kTileInputs)
      store_digits(key + i, (uint16_t*)(high + s % kTile * units) + i, (uint16_t*)(low + s % kTile * units) + i);
    if (s % kTile == kTile - 1) put(s / kTile);
  };
  work.for_keys<C>(work.a.keys, 0, count, [&](int64_t s, const C* key) {
    for (int64_t i = 0; i < dim; i += kLanes) store(row + i, load(key + i));
    split(s, row);
  });
  for (int64_t i = 0; i < dim; ++i) row[i] = 0;
  for (int64_t s = count; s < sizes.keys; ++s) split(s, row);
}

// Two keys' values of 16 elements, side by side in each lane.
inline void store_value_pair(__m512 first, __m512 second, uint16_t* to) {
  alignas(64) static constexpr uint16_t kTurns[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i order = _mm512_load_si512(kTurns);
  const DigitWords digits = digits_of(first, second);
  _mm512_storeu_si512(to, _mm512_permutexvar_epi16(order, digits.high));
  _mm512_storeu_si512(to + kTileNumbers, _mm512_permutexvar_epi16(order, digits.low));
}

// Values as right factors: inputs are keys, columns are elements of a head.
template <typename C>
void split_values(const Work& work, const TileSizes& sizes, uint16_t* to, float* scratch) {
  const int64_t dim = sizes.dim, count = work.num_keys(), group_numbers = 2 * kTile * sizes.keys;
  float *before = scratch, *zeros = scratch + dim;
  for (int64_t i = 0; i < dim; ++i) zeros[i] = 0;
  const auto put = [&](int64_t s, const float* first, const float* second) {
    uint16_t* tile = to + s / kTileInputs * 2 * kTileNumbers + s % kTileInputs / 2 * kTileInputs;
    for (int64_t i = 0; i < dim; i += kTile)
      store_value_pair(_mm512_loadu_ps(first + i), _mm512_loadu_ps(second + i), tile + i / kTile * group_numbers);
  };
  float* now = zeros + dim;
  work.for_keys<C>(work.a.values, 0, count, [&](int64_t s, const C* value) {
    float* row = s % 2 == 0 ? before : now;
    for (int64_t i = 0; i < dim; i += kLanes) store(row + i, load(value + i));
    if (s % 2 == 1) put(s - 1, before, now);
  });
  if (count % 2 == 1) put(count - 1, before, zeros);
  for (int64_t s = ceil_div(count, 2) * 2; s < sizes.keys; s += 2) put(s, zeros, zeros);
}

// Two groups of 16 rows times two of 16 columns: ``inputs`` numbers each, a multiple of 32; out: [32][out_stride].
void multiply_digits(const uint16_t* left, int64_t left_group, const uint16_t* right, int64_t right_group,
                     int64_t inputs, float* out, int64_t out_stride) {
  const uint16_t *lower = left + left_group, *second = right + right_group;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t i = 0; i < inputs / kTileInputs * 2 * kTileNumbers; i += 2 * kTileNumbers) {
    _tile_loadd(4, left + i + kTileNumbers, 64);
    _tile_loadd(6, right + i, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, second + i, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, lower + i + kTileNumbers, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    _tile_loadd(4, left + i, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, lower + i, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    _tile_loadd(6, right + i + kTileNumbers, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, second + i + kTileNumbers, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
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
template <typename T>
void tile_queries(const Work& work, int64_t first, int64_t count, const TileSizes& sizes, const TileMemory& memory) {
  const int64_t dim = sizes.dim, query_group = 2 * kTile * dim, weight_group = 2 * kTile * sizes.keys;
  work.load_queries<T>(first, count, memory.rows, dim);
  for (int64_t q = 0; q < count; ++q) split_left(memory.rows + q * dim, dim, q, query_group, memory.queries);
  // Keys beyond the last one that any of the rows sees are left out of both products.
  int64_t last = 0;
  for (int64_t q = 0; q < count; ++q) last = max64(last, work.last_seen((first + q) / work.group));
  const int64_t padded = ceil_div(last, kTileInputs) * kTileInputs;
  for (int64_t key = 0; key < padded; key += kTileInputs)
    multiply_digits(memory.queries, query_group, memory.keys + key * 2 * dim, query_group, dim, memory.scores + key,
                    sizes.keys);
  Softmax found[kTileQueries];
  for (int64_t q = 0; q < count; ++q) {
    const int64_t row = (first + q) / work.group;
    float* scores = memory.scores + q * sizes.keys;
    found[q] = normalise(scores, work.first_seen(row), work.last_seen(row), padded, work.a.soft_cap);
    split_left(scores, padded, q, weight_group, memory.weights);
  }
  for (int64_t i = 0; i < dim; i += kTileInputs)
    multiply_digits(memory.weights, weight_group, memory.values + i * 2 * sizes.keys, weight_group, padded,
                    memory.rows + i, dim);
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
    tile_queries<T>(work, q, min64(kTileQueries, work.num_queries() - q), sizes, memory);
  _tile_release();
}

}  // namespace

}  // namespace HR_ISA
}  // namespace hr
#endif
