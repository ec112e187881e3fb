#include "team.h"

#include <atomic>
#include <memory>
#include <new>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include <sched.h>

namespace hr {

namespace {

constexpr int kNumRounds = 4;
constexpr int kMaxShares = 8;  // more would take longer to look through than they save
constexpr int kSpins = 4096;  // some 50 microseconds; longer waits give the core to others

struct alignas(64) Counter {
  std::atomic<int64_t> value{0};
};

HrParallel openmp_parallel = nullptr;
HrThreadQuery openmp_thread_num = nullptr;
HrThreadQuery openmp_num_threads = nullptr;

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

struct Free {
  void operator()(void* memory) const { ::operator delete(memory, std::align_val_t(64)); }
};

struct Scratch {
  std::unique_ptr<void, Free> memory;
  size_t bytes = 0;
};

thread_local Scratch thread_scratch;

}  // namespace

struct TeamState {
  TeamBody body;
  void* data;
  Counter taken[kNumRounds][kMaxShares];  // a round's counters are cleared two barriers before they are used again
  Counter arrived;
  Counter round;
};

int64_t Team::take(int64_t count) {
  Counter* taken = state_->taken[state_->round.value.load(std::memory_order_relaxed) % kNumRounds];
  const int shares = size_ < kMaxShares ? size_ : kMaxShares;
  for (int i = 0; i < shares; ++i) {
    const int share = (rank_ + i) % shares;
    const int64_t begin = count * share / shares, end = count * (share + 1) / shares;
    std::atomic<int64_t>& next = taken[share].value;
    if (begin + next.load(std::memory_order_relaxed) >= end) continue;
    const int64_t index = begin + next.fetch_add(1, std::memory_order_relaxed);
    if (index < end) return index;
  }
  return count;
}

void Team::barrier() {
  const int64_t round = state_->round.value.load(std::memory_order_relaxed);
  if (state_->arrived.value.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
    state_->arrived.value.store(0, std::memory_order_relaxed);
    for (Counter& taken : state_->taken[(round + 2) % kNumRounds]) taken.value.store(0, std::memory_order_relaxed);
    state_->round.value.store(round + 1, std::memory_order_release);
    return;
  }
  for (int spin = 0; state_->round.value.load(std::memory_order_acquire) == round;) {
    if (spin < kSpins) {
      ++spin;
      pause();
    } else {
      sched_yield();
    }
  }
}

void* Team::scratch(size_t bytes) {
  Scratch& own = thread_scratch;
  if (own.bytes < bytes) {
    own.bytes = 0;
    own.memory.reset(::operator new(bytes, std::align_val_t(64)));
    own.bytes = bytes;
  }
  return own.memory.get();
}

void use_openmp(HrParallel parallel, HrThreadQuery thread_num, HrThreadQuery num_threads) {
  openmp_parallel = parallel;
  openmp_thread_num = thread_num;
  openmp_num_threads = num_threads;
}

static void run_member(void* data) {
  TeamState* state = static_cast<TeamState*>(data);
  // The runtime may give fewer threads than were asked for.
  Team team(state, openmp_thread_num(), openmp_num_threads());
  state->body(state->data, team);
}

void run_team(TeamBody body, void* data, int num_threads) {
  TeamState state;
  state.body = body;
  state.data = data;
  if (num_threads > 1 && openmp_parallel != nullptr) {
    openmp_parallel(run_member, &state, static_cast<unsigned>(num_threads), 0);
    return;
  }
  Team team(&state, 0, 1);
  body(data, team);
}

}  // namespace hr
