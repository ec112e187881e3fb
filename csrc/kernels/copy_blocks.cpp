// copy_blocks: the first tokens of KV blocks to other blocks.
#include "kernels.h"
#include "vec.h"

namespace hr {
namespace HR_ISA {

void copy_blocks(const void* args, Team& team) {
  const HrCopyBlocks& a = *(const HrCopyBlocks*)args;
  const int64_t all = a.rows * a.num_planes;
  for (int64_t index = team.rank(); index < all; index += team.size()) {
    const int64_t c = index / a.num_planes, plane = index % a.num_planes * a.plane_bytes;
    char* blocks = (char*)a.blocks + plane;
    __builtin_memcpy(blocks + a.dst[c] * a.block_bytes, blocks + a.src[c] * a.block_bytes,
                     a.num_tokens[c] * a.token_bytes);
  }
}

}  // namespace HR_ISA
}  // namespace hr
