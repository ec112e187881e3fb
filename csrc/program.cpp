// A program: the recorded ops of a step, run one after another by one team of threads, so that threads are woken once.
#include <string.h>

#include "kernel_table.h"

namespace hr {

namespace {

struct Program {
  const KernelTable* table;
  const HrCall* calls;
  int64_t num_calls;
};

void run_calls(void* data, Team& team) {
  const Program& program = *static_cast<const Program*>(data);
  for (int64_t i = 0; i < program.num_calls; ++i) {
    program.table->kernels[program.calls[i].op](program.calls[i].args, team);
    team.barrier();
  }
}

void patch(const HrCall& call, char* const* values, int64_t rows) {
  char* args = static_cast<char*>(call.args);
  memcpy(args, &rows, sizeof(rows));  // the first field of every struct
  for (int32_t i = 0; i < call.num_patches; ++i) {
    const HrPatch& patch = call.patches[i];
    const char* pointer = values[patch.value] + patch.bytes;
    memcpy(args + patch.offset, &pointer, sizeof(pointer));
  }
}

}  // namespace

}  // namespace hr

extern "C" void hr_run_program(const HrCall* calls, int64_t num_calls, char* const* values, int64_t rows,
                               int32_t num_threads) {
  for (int64_t i = 0; i < num_calls; ++i) hr::patch(calls[i], values, rows);
  hr::Program program{hr::current_table(), calls, num_calls};
  hr::run_team(hr::run_calls, &program, num_threads);
}
