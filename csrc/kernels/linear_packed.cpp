// Linear layers and embeddings over packed matrices. Compiled without contraction (see CMakeLists.txt): a decoded
// weight is rounded after the product and after the sum, as ggml rounds it.
#include "kernels.h"
#include "packed_matrix.h"

#if defined(__AMX_INT8__)
#include "packed_digits.h"
#endif
#if defined(__AVX512VNNI__)
#include "packed_twin_x86.h"
#endif
#if defined(__AVX2__)
#include "packed_float_x86.h"
#else
#include "packed_generic.h"
#endif

namespace hr {
namespace HR_ISA {

namespace {

constexpr int64_t kRowsAtOnce = 64;  // rows of x whose codes stay in the second-level cache while tiles pass by
constexpr int64_t kPiecesPerThread = 8;

// Hands out a thread's memory piece by piece.
struct Memory {
  char* next;
  template <typename T>
  T* take(int64_t count) {
    T* result = (T*)next;
    next += ceil_div(count * (int64_t)sizeof(T), 64) * 64;
    return result;
  }
};

template <typename T>
constexpr int64_t bytes_of(int64_t count) {
  return (count * (int64_t)sizeof(T) + 63) / 64 * 64;
}

// Row of x as fp32 with zeros up to `padded`, in memory of x where that will do.
const float* wide_row(const HrLinearPacked& a, int64_t row, int64_t padded, float* to) {
  const int64_t width = a.num_columns;
  if (a.x_dtype == HR_F32 && width == padded) return (const float*)a.x + row * a.x_stride;
  with_type(a.x_dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const T* from = (const T*)a.x + row * a.x_stride;
    for (int64_t i = 0; i < width; i += kLanes) {
      const int64_t count = min64(kLanes, width - i);
      store_some(to + i, load_some(from + i, count), count);
    }
  });
  for (int64_t i = width; i < padded; ++i) to[i] = 0.0f;
  return to;
}

template <typename T>
void put(T* out, const float* values, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t some = min64(kLanes, count - i);
    store_some(out + i, load_some(values + i, some), some);
  }
}

// sums: [count][stride], outputs of a tile or of several.
void put_tiles(const HrLinearPacked& a, int64_t tile, int64_t first_row, int64_t count, float* sums,
               int64_t stride = kTileRows) {
  const int64_t begin = tile * kTileRows, width = min64(stride, a.matrix->num_rows - begin);
  if (a.bias != nullptr)
    for (int64_t row = 0; row < count; ++row)
      for (int64_t r = 0; r < width; ++r) sums[row * stride + r] += a.bias[begin + r];
  with_type(a.out_dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    T* out = (T*)a.out + begin;
    for (int64_t row = 0; row < count; ++row)
      put(out + (first_row + row) * a.out_stride, sums + row * stride, width);
  });
}

// Pieces of work: some rows of x times some tiles, a multiple of those that a kernel takes at once.
struct Pieces {
  int64_t tiles, tiles_each, per_rows, count;
  Pieces(const HrLinearPacked& a, int64_t num_threads, int64_t rows_at_once = kRowsAtOnce, int64_t at_once = 2) {
    const int64_t groups = ceil_div(a.rows, rows_at_once);
    tiles = ceil_div(a.matrix->num_rows, kTileRows);
    tiles_each = max64(1, min64(tiles, at_once * ceil_div(tiles * groups, at_once * num_threads * kPiecesPerThread)));
    per_rows = ceil_div(tiles, tiles_each);
    count = per_rows * groups;
  }
};

// Rows that are there for tiles of eight or sixteen rows to read and write, where there are fewer of x.
int64_t padded_rows(int64_t rows) {
#if defined(__AMX_INT8__)
  if (rows > kFewestTileRows && rows < kTile) return rows <= kTile / 2 ? kTile / 2 : kTile;
#endif
  return rows;
}

// Rows whose sums nobody reads: zeros, because numbers by chance could be slow ones.
void clear_rows(const QuantizedRows& x, int64_t first, int64_t end) {
  for (int64_t i = first * x.num_blocks; i < end * x.num_blocks; ++i) x.scales[i] = x.sums[i] = 0;
}

void run_rounded(const HrLinearPacked& a, Team& team) {
  const HrPackedMatrix& m = *a.matrix;
  const int64_t blocks = m.num_blocks, padded = blocks * kBlockColumns, most = padded_rows(min64(kRowsAtOnce, a.rows));
  const bool is_double = a.input_bits == 16;
  Memory memory{(char*)team.scratch(2 * bytes_of<int8_t>(most * padded) + 2 * bytes_of<float>(most * blocks) +
                                    bytes_of<int32_t>(most * blocks * 2) + bytes_of<float>(padded) +
                                    bytes_of<float>(8 * blocks * kTileRows) + bytes_of<float>(2 * most * kTileRows) +
                                    bytes_of<int8_t>(2 * padded * kTileRows))};
  QuantizedRows x{memory.take<int8_t>(most * padded),
                  is_double ? memory.take<int8_t>(most * padded) : nullptr,
                  memory.take<float>(most * blocks),
                  memory.take<float>(most * blocks),
                  memory.take<int32_t>(most * blocks * 2),
                  blocks};
  float* wide = memory.take<float>(padded);
  float* scales = memory.take<float>(8 * blocks * kTileRows);
  float* sums = memory.take<float>(2 * most * kTileRows);
#if defined(__AMX_INT8__)
  const Pair pair{memory.take<int8_t>(2 * padded * kTileRows), scales, scales + 4 * blocks * kTileRows};
  bool is_configured = false;
#endif
  const Pieces pieces(a, team.size());
  // Every thread rounds the rows that it works on: that costs less than waiting for each other.
  int64_t rounded = -1;
  for (int64_t piece; (piece = team.take(pieces.count)) < pieces.count;) {
    const int64_t first = piece / pieces.per_rows * kRowsAtOnce, count = min64(kRowsAtOnce, a.rows - first);
    if (rounded != first) {
      for (int64_t row = 0; row < count; ++row)
        quantize_row(wide_row(a, first + row, padded, wide), x, row);
      clear_rows(x, count, padded_rows(count));
      rounded = first;
    }
    int64_t tile = piece % pieces.per_rows * pieces.tiles_each;
    const int64_t end = min64(tile + pieces.tiles_each, pieces.tiles);
#if defined(__AMX_INT8__)
    for (; count >= kFewestTileRows && tile + 2 <= end; tile += 2) {
      pair_rounded(m, tile, x, count, pair, sums);
      put_tiles(a, tile, first, count, sums, kPairOutputs);
      is_configured = true;
    }
#endif
#if defined(__AVX512VNNI__)
    for (; tile + 2 <= end; tile += 2) {
      twin_rounded(m, tile, x, count, scales, sums);
      put_tiles(a, tile, first, count, sums, kTwinOutputs);
    }
#endif
    for (; tile < end; ++tile) {
      tile_rounded(m, tile, x, count, scales, sums, kTileRows);
      put_tiles(a, tile, first, count, sums);
    }
  }
#if defined(__AMX_INT8__)
  if (is_configured) _tile_release();
#endif
}

#if defined(__AMX_INT8__)
void run_digits(const HrLinearPacked& a, Team& team) {
  const HrPackedMatrix& m = *a.matrix;
  const int64_t padded = m.num_blocks * kBlockColumns, at_once = digit_rows_at_once(padded);
  const int64_t most = min64(at_once, ceil_div(a.rows, 32) * 32);
  Memory memory{(char*)team.scratch(2 * bytes_of<uint16_t>(most * padded) + 2 * bytes_of<uint16_t>(kQuadOutputs * padded) +
                                    bytes_of<float>(padded) + bytes_of<float>(4 * m.num_blocks * kPairOutputs) +
                                    bytes_of<float>(most * kQuadOutputs))};
  const Digits x{memory.take<uint16_t>(most * padded), memory.take<uint16_t>(most * padded)};
  const Digits w{memory.take<uint16_t>(kQuadOutputs * padded), memory.take<uint16_t>(kQuadOutputs * padded)};
  float* wide = memory.take<float>(padded);
  float* scales = memory.take<float>(4 * m.num_blocks * kPairOutputs);
  float* sums = memory.take<float>(most * kQuadOutputs);
  const Pieces pieces(a, team.size(), at_once, kQuadTiles);
  int64_t split = -1;
  for (int64_t piece; (piece = team.take(pieces.count)) < pieces.count;) {
    const int64_t first = piece / pieces.per_rows * at_once, count = min64(at_once, a.rows - first);
    if (split < 0) configure_digits();
    if (split != first) {
      for (int64_t row = 0; row < count; ++row) split_row(wide_row(a, first + row, padded, wide), padded, x, row);
      for (int64_t row = count; row % 32 != 0; ++row) clear_row(padded, x, row);
      split = first;
    }
    const int64_t begin = piece % pieces.per_rows * pieces.tiles_each;
    for (int64_t tile = begin; tile < min64(begin + pieces.tiles_each, pieces.tiles); tile += kQuadTiles) {
      split_quad(m, tile, scales, w);
      multiply_groups(x, count, padded, w, sums);
      put_tiles(a, tile, first, count, sums, kQuadOutputs);
    }
  }
  if (split >= 0) _tile_release();
}
#endif

void run_float(const HrLinearPacked& a, Team& team) {
  const HrPackedMatrix& m = *a.matrix;
  const int64_t blocks = m.num_blocks, padded = blocks * kBlockColumns, most = padded_rows(min64(kRowsAtOnce, a.rows));
  const bool is_ready = a.x_dtype == HR_F32 && a.num_columns == padded;
  Memory memory{(char*)team.scratch(bytes_of<float>(is_ready ? 0 : most * padded) +
                                    bytes_of<float>(2 * padded * kTileRows) +
                                    bytes_of<float>(4 * blocks * kTileRows) + bytes_of<float>(2 * most * kTileRows))};
  float* wide = memory.take<float>(is_ready ? 0 : most * padded);
  float* panel = memory.take<float>(2 * padded * kTileRows);
  float* scales = memory.take<float>(4 * blocks * kTileRows);
  float* sums = memory.take<float>(2 * most * kTileRows);
  const Pieces pieces(a, team.size());
  int64_t widened = -1;
  for (int64_t piece; (piece = team.take(pieces.count)) < pieces.count;) {
    const int64_t first = piece / pieces.per_rows * kRowsAtOnce, count = min64(kRowsAtOnce, a.rows - first);
    if (!is_ready && widened != first) {
      for (int64_t row = 0; row < count; ++row) wide_row(a, first + row, padded, wide + row * padded);
      widened = first;
    }
    const float* x = is_ready ? (const float*)a.x + first * a.x_stride : wide;
    const int64_t begin = piece % pieces.per_rows * pieces.tiles_each, x_stride = is_ready ? a.x_stride : padded;
    int64_t tile = begin;
    const int64_t end = min64(begin + pieces.tiles_each, pieces.tiles), behind = most * kTileRows;
    for (; count >= kManyRows && tile + 2 <= end; tile += 2) {
      pair_float(m, tile, x, x_stride, count, scales, panel, sums, behind);
      put_tiles(a, tile, first, count, sums);
      put_tiles(a, tile + 1, first, count, sums + behind);
    }
    for (; tile < end; ++tile) {
      tile_float(m, tile, x, x_stride, count, scales, panel, sums, kTileRows);
      put_tiles(a, tile, first, count, sums);
    }
  }
}

template <typename T>
void embed_row(const HrEmbeddingPacked& a, const float* row, T* out) {
  // the number is rounded to the type of out before it is scaled, as a dense table's is
  put(out, row, a.num_columns);
  if (a.scale == 1.0f) return;
  const Vec scale = splat(a.scale);
  for (int64_t i = 0; i < a.num_columns; i += kLanes) {
    const int64_t count = min64(kLanes, a.num_columns - i);
    store_some(out + i, load_some(out + i, count) * scale, count);
  }
}

}  // namespace

void linear_packed(const void* args, Team& team) {
  const HrLinearPacked& a = *(const HrLinearPacked*)args;
#if defined(__AMX_INT8__)
  if (a.input_bits == 16 && a.rows >= kFewestDigitRows) return run_digits(a, team);
#endif
  if (a.input_bits == 8 || a.input_bits == 16) {
    run_rounded(a, team);
  } else {
    run_float(a, team);
  }
}

void embedding_packed(const void* args, Team& team) {
  const HrEmbeddingPacked& a = *(const HrEmbeddingPacked*)args;
  const HrPackedMatrix& m = *a.matrix;
  const int64_t padded = m.num_blocks * kBlockColumns;
  Memory memory{(char*)team.scratch(bytes_of<float>(padded) + bytes_of<float>(4 * m.num_blocks * kTileRows))};
  float* row = memory.take<float>(padded);
  float* scales = memory.take<float>(4 * m.num_blocks * kTileRows);
  for (int64_t i = team.rank(); i < a.rows; i += team.size()) {
    const int64_t at = a.ids[i] - a.first_row;
    if (at >= 0 && at < m.num_rows) {
      decode_row(m, at, scales, row);
    } else {
      for (int64_t k = 0; k < padded; ++k) row[k] = 0.0f;
    }
    with_type(a.out_dtype, [&](auto* type) {
      using T = std::remove_pointer_t<decltype(type)>;
      embed_row(a, row, (T*)a.out + i * a.out_stride);
    });
  }
}

}  // namespace HR_ISA
}  // namespace hr
