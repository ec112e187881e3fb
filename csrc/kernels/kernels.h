// The kernels of one instruction set. Each is called by every thread of a team with the same arguments, and may use
// the team's barriers; a barrier follows it before the next op. See ../headrace.h for what they compute.
#pragma once
#include "../kernel_table.h"

namespace hr {
namespace HR_ISA {

void rms_norm(const void* args, Team& team);

}  // namespace HR_ISA
}  // namespace hr
