// Team: the threads that run a kernel together. Every one of them calls the kernel with the same arguments.
//
// Nothing here is inline: kernels are compiled for several instruction sets, and a linker keeps only one copy of an
// inline function, which might be the one that this CPU cannot run.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "headrace.h"

namespace hr {

struct TeamState;

class Team {
 public:
  Team(TeamState* state, int rank, int size) : state_(state), rank_(rank), size_(size) {}
  int rank() const { return rank_; }
  int size() const { return size_; }

  // One of ``count`` pieces of work that no thread has taken since the last barrier; count: none is left. A thread goes
  // through a share of its own from its beginning, so that what it reads lies together; then it helps others.
  int64_t take(int64_t count);

  // Waits until every thread is here. Also begins a new round of take().
  void barrier();

  // Memory of this thread, aligned to 64 bytes and not cleared; valid until the thread asks again.
  void* scratch(size_t bytes);

 private:
  TeamState* state_;
  int rank_, size_;
};

typedef void (*TeamBody)(void* data, Team& team);

void use_openmp(HrParallel parallel, HrThreadQuery thread_num, HrThreadQuery num_threads);

// Runs body on up to num_threads threads of the process's OpenMP runtime and returns when all are done.
void run_team(TeamBody body, void* data, int num_threads);

}  // namespace hr
