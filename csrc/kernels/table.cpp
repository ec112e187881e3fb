#include "kernels.h"

namespace hr {
namespace HR_ISA {

const KernelTable& table() {
  static const KernelTable all = {{
      rms_norm,
  }};
  return all;
}

}  // namespace HR_ISA
}  // namespace hr
