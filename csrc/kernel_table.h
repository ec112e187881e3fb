// The kernels of one instruction set, by op. kernels/table.cpp fills one in for each.
#pragma once
#include "headrace.h"
#include "team.h"

namespace hr {

typedef void (*Kernel)(const void* args, Team& team);

struct KernelTable {
  Kernel kernels[HR_NUM_OPS];
};

#define HR_DECLARE_TABLE(isa) \
  namespace isa {             \
  const KernelTable& table(); \
  }
HR_DECLARE_TABLE(avx2)
HR_DECLARE_TABLE(avx_vnni)
HR_DECLARE_TABLE(avx512)
HR_DECLARE_TABLE(avx512_vnni)
HR_DECLARE_TABLE(avx512_bf16)
HR_DECLARE_TABLE(amx)
HR_DECLARE_TABLE(neon)

// The table of the instruction set in use; null where this CPU has none of those compiled.
const KernelTable* current_table();

}  // namespace hr
