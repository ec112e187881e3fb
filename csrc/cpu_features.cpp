#include "cpu_features.h"

#include <stdint.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace hr {

#if defined(__x86_64__)
namespace {

struct Registers {
  uint32_t a = 0, b = 0, c = 0, d = 0;
};

Registers cpuid(uint32_t leaf, uint32_t subleaf) {
  Registers r;
  __get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d);
  return r;
}

bool bit(uint32_t word, int index) { return (word >> index) & 1; }

// Which register files the operating system saves: a CPU's feature is of no use without.
uint64_t saved_states() {
  if (!bit(cpuid(1, 0).c, 27)) return 0;
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t(high) << 32) | low;
}

bool saves(uint64_t mask) { return (saved_states() & mask) == mask; }

// Linux gives a process tiles only when it asks, once; without, the first use of one is an illegal instruction.
bool may_use_tiles() {
#if defined(__linux__)
  constexpr long request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
  return false;
#endif
}

}  // namespace

bool has_avx2() {
  const Registers basic = cpuid(1, 0), more = cpuid(7, 0);
  return saves(0x6) && bit(basic.c, 12) && bit(basic.c, 29) && bit(more.b, 5);
}

bool has_avx_vnni() { return has_avx2() && bit(cpuid(7, 1).a, 4); }

bool has_avx512() {
  const Registers more = cpuid(7, 0);
  return has_avx2() && saves(0xe6) && bit(more.b, 16) && bit(more.b, 17) && bit(more.b, 30) && bit(more.b, 31);
}

bool has_avx512_vnni() { return has_avx512() && bit(cpuid(7, 0).c, 11); }

bool has_avx512_bf16() { return has_avx512_vnni() && bit(cpuid(7, 1).a, 5); }

bool has_amx_bf16() {
  const uint32_t d = cpuid(7, 0).d;
  return has_avx512_bf16() && saves(0x600e6) && bit(d, 22) && bit(d, 24) && bit(d, 25) && may_use_tiles();
}

#else

bool has_avx2() { return false; }
bool has_avx_vnni() { return false; }
bool has_avx512() { return false; }
bool has_avx512_vnni() { return false; }
bool has_avx512_bf16() { return false; }
bool has_amx_bf16() { return false; }

#endif

}  // namespace hr
