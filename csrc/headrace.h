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

// Names of ops: the order is that of OPS in structs.py.
enum HrOp : int32_t {
  HR_RMS_NORM = 0,
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

// One op of a program, and the pointers in its arguments that each run looks up.
struct HrPatch {
  int32_t offset;  // of the pointer in the struct of arguments
  int32_t value;   // index among the values of the run
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
HR_EXPORT void hr_run_program(const HrCall* calls, int64_t num_calls, void* const* values, int64_t rows,
                              int32_t num_threads);
}
