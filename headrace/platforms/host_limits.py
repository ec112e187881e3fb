"""HostLimits: the cores and the memory that this process may use, counting affinity and container limits (cgroups)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

# Version 1 writes "no limit" as a number near 2**63.
_UNLIMITED_BYTES = 1 << 60


@dataclass(frozen=True, slots=True)
class HostLimits:
    """Reads Linux's /proc and /sys; elsewhere falls back on what Python knows. Nothing is cached: limits may change.

    Attributes:
        root: prefix of /proc and /sys, another one in tests.
    """

    root: Path = Path("/")

    def num_physical_cores(self) -> int:
        """Cores to keep busy: one for each physical core in the affinity mask, at most the CPU quota."""
        cpus = (
            os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
        )
        cores = {self._siblings(cpu) or str(cpu) for cpu in cpus}
        quota = self._cpu_quota()
        return max(1, len(cores) if quota is None else min(len(cores), int(quota)))

    def cpu_flags(self) -> frozenset[str]:
        """Feature words of the first CPU ("avx512_bf16"); empty where the system does not tell."""
        for line in self._text("proc/cpuinfo").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("flags", "Features"):
                return frozenset(value.split())
        return frozenset()

    def total_memory_bytes(self) -> int:
        """RAM, or the container's limit if that is lower."""
        total = self._meminfo("MemTotal")
        if total is None:
            total = _sysconf_bytes("SC_PHYS_PAGES")
        return min([total, *(limit for limit, _ in self._memory_limits())])

    def available_memory_bytes(self) -> int:
        """What can be had without swapping, here and below every container limit. Page cache counts as free."""
        available = self._meminfo("MemAvailable")
        if available is None:
            available = _sysconf_bytes("SC_AVPHYS_PAGES")
        return max(0, min([available, *(limit - used for limit, used in self._memory_limits())]))

    def process_memory_bytes(self, *, peak: bool = False) -> int:
        """Resident memory of this process, now or at its highest; 0 where the system does not tell."""
        value = _kilobytes(self._text("proc/self/status"), "VmHWM" if peak else "VmRSS")
        return value or 0

    def _text(self, path: str | Path) -> str:
        try:
            return (self.root / path).read_text()
        except (OSError, UnicodeDecodeError):
            return ""

    def _meminfo(self, key: str) -> int | None:
        return _kilobytes(self._text("proc/meminfo"), key)

    def _siblings(self, cpu: int) -> str:
        return self._text(f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").strip()

    def _groups(self, controller: str) -> Iterator[tuple[Path, bool]]:
        """(folder, is version 2) of this process's control group and every one above it, for one controller."""
        for line in self._text("proc/self/cgroup").splitlines():
            _, controllers, path = (*line.split(":", 2), "", "")[:3]
            is_v2 = controllers == ""
            if not is_v2 and controller not in controllers.split(","):
                continue
            mount = Path("sys/fs/cgroup") if is_v2 else Path("sys/fs/cgroup") / controller
            group = PurePosixPath(path.strip() or "/")
            for folder in (group, *group.parents):
                # The path may be the host's while the container sees only its own part: then the folder is not
                # there, and the mount itself, which comes last, is the container's group.
                yield mount / str(folder).lstrip("/"), is_v2

    def _cpu_quota(self) -> float | None:
        """The lowest quota, in CPUs, or None."""
        quotas = []
        for folder, is_v2 in self._groups("cpu"):
            if is_v2:
                fields = self._text(folder / "cpu.max").split()
            else:
                fields = [self._text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
            numbers = [int(field) for field in fields if field.isdigit()]
            if len(numbers) == 2 and numbers[1] > 0:
                quotas.append(numbers[0] / numbers[1])
        return min(quotas, default=None)

    def _memory_limits(self) -> list[tuple[int, int]]:
        """(limit, used without page cache that can be dropped), in bytes, of every group that has a limit."""
        limits = []
        for folder, is_v2 in self._groups("memory"):
            limit = self._text(folder / ("memory.max" if is_v2 else "memory.limit_in_bytes")).strip()
            if not limit.isdigit() or int(limit) >= _UNLIMITED_BYTES:
                continue
            used = self._text(folder / ("memory.current" if is_v2 else "memory.usage_in_bytes")).strip()
            droppable = "inactive_file" if is_v2 else "total_inactive_file"
            cache = sum(
                int(words[1])
                for words in map(str.split, self._text(folder / "memory.stat").splitlines())
                if len(words) == 2 and words[0] == droppable and words[1].isdigit()
            )
            limits.append((int(limit), max(0, int(used) - cache) if used.isdigit() else 0))
        return limits


def _kilobytes(text: str, key: str) -> int | None:
    """The value of a line such as "MemTotal:  16384 kB", in bytes."""
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == f"{key}:" and words[1].isdigit():
            return int(words[1]) * 1024
    return None


def _sysconf_bytes(pages: str) -> int:
    try:
        return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
