#include "kernels.h"

namespace hr {
namespace HR_ISA {

const KernelTable& table() {
  static const KernelTable all = {{
      rms_norm,
      linear,
      pack_weight,
      embedding,
      gather_rows,
      rope_and_store,
      attention,
      gated_act,
      soft_cap,
      copy_blocks,
      row_argmax,
      draw,
      token_mask,
      linear_packed,
      embedding_packed,
      linear_gated,
      linear_argmax,
  }};
  return all;
}

}  // namespace HR_ISA
}  // namespace hr
