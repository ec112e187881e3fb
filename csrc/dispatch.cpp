// Which instruction set runs, and single ops.
#include <string.h>

#include "cpu_features.h"
#include "kernel_table.h"

namespace hr {

namespace {

struct InstructionSet {
  const char* name;
  bool (*is_there)();
  const KernelTable& (*table)();
};

#if defined(HR_HAS_NEON)
bool always() { return true; }
#endif

// The best first.
const InstructionSet kInstructionSets[] = {
#if defined(HR_HAS_AMX)
    {"amx", has_amx_bf16, amx::table},
#endif
#if defined(HR_HAS_AVX512_BF16)
    {"avx512_bf16", has_avx512_bf16, avx512_bf16::table},
#endif
#if defined(HR_HAS_AVX512_VNNI)
    {"avx512_vnni", has_avx512_vnni, avx512_vnni::table},
#endif
#if defined(HR_HAS_AVX512)
    {"avx512", has_avx512, avx512::table},
#endif
#if defined(HR_HAS_AVX_VNNI)
    {"avx_vnni", has_avx_vnni, avx_vnni::table},
#endif
#if defined(HR_HAS_AVX2)
    {"avx2", has_avx2, avx2::table},
#endif
#if defined(HR_HAS_NEON)
    {"neon", always, neon::table},
#endif
};

const InstructionSet* best() {
  for (const InstructionSet& set : kInstructionSets)
    if (set.is_there()) return &set;
  return nullptr;
}

const InstructionSet*& chosen() {
  static const InstructionSet* set = best();
  return set;
}

struct SingleCall {
  Kernel kernel;
  const void* args;
};

void run_single(void* data, Team& team) {
  const SingleCall* call = static_cast<const SingleCall*>(data);
  call->kernel(call->args, team);
}

const int64_t kArgsBytes[HR_NUM_OPS] = {
    sizeof(HrRmsNorm),
    sizeof(HrLinear),
    sizeof(HrPackWeight),
    sizeof(HrEmbedding),
    sizeof(HrGatherRows),
    sizeof(HrRopeAndStore),
    sizeof(HrAttention),
    sizeof(HrGatedAct),
    sizeof(HrSoftCap),
    sizeof(HrCopyBlocks),
    sizeof(HrRowArgmax),
    sizeof(HrDraw),
    sizeof(HrTokenMask),
    sizeof(HrLinearPacked),
    sizeof(HrEmbeddingPacked),
    sizeof(HrLinearGated),
    sizeof(HrLinearArgmax),
};

}  // namespace

const KernelTable* current_table() { return chosen() == nullptr ? nullptr : &chosen()->table(); }

}  // namespace hr

extern "C" {

int32_t hr_num_ops(void) { return HR_NUM_OPS; }

int64_t hr_args_bytes(int32_t op) { return op >= 0 && op < HR_NUM_OPS ? hr::kArgsBytes[op] : -1; }

const char* hr_instruction_set(void) { return hr::chosen() == nullptr ? "" : hr::chosen()->name; }

int32_t hr_choose_instruction_set(const char* name) {
  for (const hr::InstructionSet& set : hr::kInstructionSets)
    if (strcmp(set.name, name) == 0 && set.is_there()) {
      hr::chosen() = &set;
      return 1;
    }
  return 0;
}

void hr_use_openmp(HrParallel parallel, HrThreadQuery thread_num, HrThreadQuery num_threads) {
  hr::use_openmp(parallel, thread_num, num_threads);
}

void hr_run(int32_t op, const void* args, int32_t num_threads) {
  hr::SingleCall call{hr::current_table()->kernels[op], args};
  hr::run_team(hr::run_single, &call, num_threads);
}
}
