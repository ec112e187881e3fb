// The kernels of one instruction set. Each is called by every thread of a team with the same arguments, and may use
// the team's barriers; a barrier follows it before the next op. See ../headrace.h for what they compute.
#pragma once
#include "../kernel_table.h"

namespace hr {
namespace HR_ISA {

void rms_norm(const void* args, Team& team);
void linear(const void* args, Team& team);
void pack_weight(const void* args, Team& team);
void embedding(const void* args, Team& team);
void gather_rows(const void* args, Team& team);
void rope_and_store(const void* args, Team& team);
void attention(const void* args, Team& team);
void gated_act(const void* args, Team& team);
void soft_cap(const void* args, Team& team);
void copy_blocks(const void* args, Team& team);
void row_argmax(const void* args, Team& team);
void draw(const void* args, Team& team);
void token_mask(const void* args, Team& team);
void linear_packed(const void* args, Team& team);
void embedding_packed(const void* args, Team& team);
void linear_gated(const void* args, Team& team);
void linear_argmax(const void* args, Team& team);

}  // namespace HR_ISA
}  // namespace hr
