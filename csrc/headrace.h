// The plain C interface of the kernels: raw pointers, sizes and strides; no torch, no Python.
//
// An op is called with a struct of arguments, whose first field is the number of rows (tokens): a recorded step is a
// list of such structs in which only rows and some pointers change. The structs are mirrored, field by field, in
// headrace/kernels/native/structs.py, and their sizes are compared when the library is loaded.
//
// Strides are in elements. "dtype" fields hold HrDType. Pointers need the alignment of their type only.
#pragma once
#include <stddef.h>
#include <stdint.h>

#define HR_EXPORT __attribute__((visibility("default")))

extern "C" {

enum HrDType : int32_t { HR_F32 = 0, HR_BF16 = 1, HR_F16 = 2 };

// What a cache may hold besides: codes with scales (HrCache.words).
enum HrCacheType : int32_t { HR_I8 = 3, HR_E4M3 = 4, HR_E5M2 = 5, HR_I4 = 6, HR_I5 = 7 };

// Names of ops: the order is that of OPS in structs.py.
enum HrOp : int32_t {
  HR_RMS_NORM = 0,
  HR_LINEAR,
  HR_PACK_WEIGHT,
  HR_EMBEDDING,
  HR_GATHER_ROWS,
  HR_ROPE_AND_STORE,
  HR_ATTENTION,
  HR_GATED_ACT,
  HR_SOFT_CAP,
  HR_COPY_BLOCKS,
  HR_ROW_ARGMAX,
  HR_DRAW,
  HR_TOKEN_MASK,
  HR_LINEAR_PACKED,
  HR_EMBEDDING_PACKED,
  HR_LINEAR_GATED,
  HR_LINEAR_ARGMAX,
  HR_NUM_OPS,
};

// out = x / sqrt(mean(x^2) + eps) * weight; with a residual: residual += x first, and that is normalised.
struct HrRmsNorm {
  int64_t rows;
  const void* x;         // [rows, width]
  void* residual;        // [rows, width] or null
  const float* weight;   // [width]
  void* out;             // [rows, width], may be x
  int64_t x_stride, residual_stride, out_stride;
  int64_t width;
  float eps;
  int32_t dtype;         // of x, residual and out
};

// out = x weight^T + bias, summed in fp32 one input after another, so that a row's result depends on nothing else.
//
// weight is packed: panels of 16 outputs, padded with zeros, so that 16 sums advance together.
//   fp32, fp16  [ceil(n / 16)][in][16]
//   bf16        [ceil(n / 16)][ceil(in / 2)][16][2]   pairs of inputs: what bf16 instructions take, quick to widen
struct HrLinear {
  int64_t rows;
  const void* x;       // [rows, in]
  const void* weight;  // packed
  const void* bias;    // [n] or null
  void* out;           // [rows, n]
  int64_t x_stride, out_stride;
  int64_t num_inputs, num_outputs;
  int32_t x_dtype, weight_dtype, bias_dtype, out_dtype;
};

// Rows of a matrix of any float type into packed form of the same type; rows are outputs.
struct HrPackWeight {
  int64_t rows;        // n
  const void* weight;  // [n, in]
  void* packed;
  int64_t weight_stride;
  int64_t num_inputs;
  int32_t dtype;
  int32_t unused;
};

// out[t] = table[ids[t] - first_row] * scale; ids of rows that the table has not give zeros.
struct HrEmbedding {
  int64_t rows;
  const int64_t* ids;   // [rows]
  const void* weight;   // [num_table_rows, width], dense or packed
  void* out;            // [rows, width]
  int64_t weight_stride, out_stride;
  int64_t width;
  int64_t first_row, num_table_rows;
  float scale;
  int32_t weight_dtype, out_dtype;
  int32_t is_packed;
};

// out[r] = x[index[r]], whatever the type is.
struct HrGatherRows {
  int64_t rows;
  const void* x;
  const int64_t* index;
  void* out;
  int64_t x_stride_bytes, out_stride_bytes, row_bytes;
};

// Where one layer's keys or values are: [blocks, heads, block_size, head_dim], the last dense.
struct HrCache {
  void* data;
  int64_t block_stride, head_stride, token_stride;
  float* words;  // of a quantized cache: a scale for each [blocks, heads, block_size]; strides in words
  int64_t words_block_stride, words_head_stride;
  int32_t type;       // HrDType or HrCacheType
  int32_t is_turned;  // keys that go through the Hadamard transform before they are stored
};

// Per head: optional RMSNorm of queries and keys, rotation of them in place (the two halves of a head are a pair), keys
// and values into their slots; slot = block * block_size + place, negative: nowhere.
struct HrRopeAndStore {
  int64_t rows;
  void* qkv;                 // [rows, (heads + 2 kv_heads) * head_dim]
  const float* q_norm;       // [head_dim] or null
  const float* k_norm;       // the same
  const float* cos_sin;      // [positions, head_dim]: cosines, then sines
  const int64_t* positions;  // [rows]
  const int64_t* slot_mapping;  // [rows]
  HrCache keys, values;
  int64_t qkv_stride;
  int64_t block_size;
  int32_t num_heads, num_kv_heads, head_dim;
  float eps;
  int32_t dtype;
  int32_t unused;
};

// A step's attention as work items and reductions; see AttentionPlan in headrace/attention/metadata.py.
struct HrAttentionPlan {
  int64_t num_items, num_reductions;
  const int32_t* query_rows;
  const int32_t* row_positions;
  const int32_t* item_request;
  const int32_t* item_kv_start;
  const int32_t* item_kv_end;
  const int32_t* item_row_start;
  const int32_t* item_num_rows;
  const int32_t* item_partial_start;
  const int32_t* reduce_rows;
  const int32_t* reduce_starts;
  const int32_t* reduce_slots;
  const int32_t* block_table;  // [requests, block_table_stride]
  int64_t block_table_stride;
  int64_t block_size;
  int64_t window;   // 0: none
  float* partials;  // [partials, heads, head_dim]
  float* log_sums;  // [partials, heads]
};

// out[t] = softmax(cap(scale * q[t] . k)) v over the keys that token t sees, in fp32.
struct HrAttention {
  int64_t rows;
  const void* qkv;  // [rows, at least heads * head_dim]
  const HrAttentionPlan* plan;
  void* out;        // [rows, heads * head_dim]
  HrCache keys, values;
  int64_t qkv_stride, out_stride;
  int32_t num_heads, num_kv_heads, head_dim;
  float scale;
  float soft_cap;   // 0: none
  int32_t dtype, out_dtype;
};

// out = act(gate) * up; gate is the first half of a row, up the second.
struct HrGatedAct {
  int64_t rows;
  const void* gate_up;  // [rows, 2 width]
  void* out;            // [rows, width]
  int64_t gate_up_stride, out_stride;
  int64_t width;
  int32_t kind;         // 0: SiLU, 1: GELU by tanh
  int32_t dtype;
};

// A linear and the gated_act that alone reads its output, which need not be written: out is room for it.
struct HrLinearGated {
  HrLinear linear;
  HrGatedAct act;  // its rows are those of the linear
};

// x = cap * tanh(x / cap)
struct HrSoftCap {
  int64_t rows;
  void* x;  // [rows, width]
  int64_t stride, width;
  float cap;
  int32_t dtype;
};

// The first num_tokens[c] tokens of every plane of block src[c] go to block dst[c].
struct HrCopyBlocks {
  int64_t rows;  // copies
  void* blocks;
  const int64_t* src;
  const int64_t* dst;
  const int64_t* num_tokens;
  int64_t block_bytes, num_planes, plane_bytes, token_bytes;
};

// The largest number of each row and its lowest index; NaN counts as the largest.
struct HrRowArgmax {
  int64_t rows;
  const float* x;    // [rows, width]
  float* values;     // [rows]
  int64_t* indices;  // [rows]
  int64_t stride, width;
};

// A linear and the row_argmax that alone reads its output, which need not be written: out is room for it.
struct HrLinearArgmax {
  HrLinear linear;
  HrRowArgmax argmax;  // its rows are those of the linear
};

// A token of each row: the one whose weight over its noise is the largest (the Gumbel-max trick). Weights are those of
// the softmax of x / temperature, or x itself. The noise is that of kernels/reference/noise.py.
struct HrDraw {
  int64_t rows;
  const float* x;            // [rows, width]
  const float* row_max;      // [rows], the largest of x; unused without temperatures
  const float* temperature;  // [rows], or null: x are weights
  const int64_t* keys;       // [rows], of the noise
  int64_t* indices;          // [rows]
  int64_t stride, width;
};

// Logits of tokens that a mask forbids become -infinity. Bit i of word w allows token 32 w + i; tokens past the last
// word are forbidden.
struct HrTokenMask {
  int64_t rows;                // that are masked
  float* logits;               // [.., width]
  const int64_t* masked_rows;  // [rows], none twice
  const uint32_t* words;       // [rows, num_words]
  int64_t num_words, stride, width;
};

// A matrix of small integers. A weight is scale * code, or scale * (code - 2^(bits-1)), or scale * code + minimum, with
// a scale (and a minimum) for each row and group of columns. kernels/packed_matrix.h says how the parts lie.
enum HrScaleKind : int32_t { HR_SCALE_F32 = 0, HR_SCALE_F16 = 1, HR_SCALE_TWO_LEVEL = 2 };

struct HrPackedMatrix {
  const uint8_t* codes;
  const void* scales;              // fp32, fp16, or int8 (two-level)
  const void* minimums;            // of the same type; null: none
  const uint16_t* super_scales;    // two-level: fp16 for each 256 columns, which multiplies the int8 ones
  const uint16_t* super_minimums;
  int64_t num_rows;
  int64_t num_blocks;              // of 32 columns
  int32_t bits;                    // 4, 5, 6, 8
  int32_t group_columns;           // 16 (without minimums), or a multiple of 32
  int32_t scale_kind;
  int32_t reserved;
};

// out[t][r] = sum over k of x[t][k] * w[r][k] + bias[r]. With inputs of 8 bits, x is rounded to whole numbers with a scale for
// each 32 columns, and products are summed as integers; with 16 bits to two such digits, or, many rows on a CPU with AMX, to two
// bf16 digits.
struct HrLinearPacked {
  int64_t rows;
  const void* x;         // [rows, num_columns]
  const HrPackedMatrix* matrix;
  const float* bias;     // [num_rows of the matrix] or null
  void* out;             // [rows, num_rows of the matrix]
  int64_t x_stride, out_stride;
  int64_t num_columns;   // of x; the matrix has whole blocks
  int32_t x_dtype, out_dtype;
  int32_t input_bits;  // 8 or 16: x is rounded first; else it is not
  int32_t reserved;
};

// out[t] = row ids[t] - first_row of the matrix, times scale; zeros where it has no such row.
struct HrEmbeddingPacked {
  int64_t rows;
  const int64_t* ids;    // [rows]
  const HrPackedMatrix* matrix;
  void* out;             // [rows, num_columns]
  int64_t out_stride, num_columns, first_row;
  float scale;
  int32_t out_dtype;
};

// One op of a program, and the pointers in its arguments that each run looks up.
struct HrPatch {
  int32_t offset;  // of the pointer in the struct of arguments
  int32_t value;   // index among the values of the run
  int64_t bytes;   // added to the value
};
struct HrCall {
  int32_t op;
  int32_t num_patches;
  void* args;
  const HrPatch* patches;
};

// The parallel region of the OpenMP runtime that the process already uses: libgomp's entry point, and two functions
// of the standard. Null: everything runs on the calling thread.
typedef void (*HrParallel)(void (*body)(void*), void* data, unsigned num_threads, unsigned flags);
typedef int (*HrThreadQuery)(void);

HR_EXPORT int32_t hr_num_ops(void);
HR_EXPORT int64_t hr_args_bytes(int32_t op);
HR_EXPORT const char* hr_instruction_set(void);  // "" where this CPU has none that kernels were compiled for
HR_EXPORT int32_t hr_choose_instruction_set(const char* name);  // for tests; 0: not compiled, or not of this CPU
HR_EXPORT void hr_use_openmp(HrParallel parallel, HrThreadQuery thread_num, HrThreadQuery num_threads);
HR_EXPORT void hr_run(int32_t op, const void* args, int32_t num_threads);
HR_EXPORT void hr_run_program(const HrCall* calls, int64_t num_calls, char* const* values, int64_t rows,
                              int32_t num_threads);
}
