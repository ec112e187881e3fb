from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.platforms.host_limits import HostLimits

GIB = 2**30
Host = Callable[..., HostLimits]


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """A made-up machine: 16 GiB, 12 of them free; ``files`` are added below its root."""

    def make(files: dict[str, str] | None = None) -> HostLimits:
        meminfo = (
            f"MemTotal:       {16 * GIB // 1024} kB\nMemFree: 1 kB\nMemAvailable: {12 * GIB // 1024} kB\n"
        )
        for name, text in ({"proc/meminfo": meminfo} | (files or {})).items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return HostLimits(tmp_path)

    return make


def on_cpus(monkeypatch: pytest.MonkeyPatch, *cpus: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(cpus))


def siblings(*pairs: str) -> dict[str, str]:
    """CPU n's siblings file says pairs[n]."""
    return {
        f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{text}\n"
        for cpu, text in enumerate(pairs)
    }


def test_without_container_limits(host: Host) -> None:
    limits = host()
    assert limits.total_memory_bytes() == 16 * GIB
    assert limits.available_memory_bytes() == 12 * GIB


def test_threads_of_a_core_count_once(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = host(siblings("0,2", "1,3", "0,2", "1,3"))
    on_cpus(monkeypatch, 0, 1, 2, 3)
    assert limits.num_physical_cores() == 2
    on_cpus(monkeypatch, 0, 2)
    assert limits.num_physical_cores() == 1
    on_cpus(monkeypatch, 1, 2)
    assert limits.num_physical_cores() == 2


def test_cpus_without_topology_count_as_cores(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpus(monkeypatch, 0, 1, 5)
    assert host().num_physical_cores() == 3


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("300000 100000", 3), ("250000 100000", 2), ("50000 100000", 1), ("max 100000", 8)],
)
def test_quota_of_version_2(quota: str, expected: int, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpus(monkeypatch, *range(8))
    limits = host({"proc/self/cgroup": "0::/pod/box\n", "sys/fs/cgroup/pod/cpu.max": quota})
    assert limits.num_physical_cores() == expected


def test_quota_of_version_1(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpus(monkeypatch, *range(8))
    files = {
        "proc/self/cgroup": "4:cpu,cpuacct:/box\n3:memory:/other\n",
        "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000",
    }
    assert host(files | {"sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "-1"}).num_physical_cores() == 8
    assert host(files | {"sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "400000"}).num_physical_cores() == 4


def test_memory_of_version_2_is_the_tightest_group_without_its_page_cache(host: Host) -> None:
    limits = host(
        {
            "proc/self/cgroup": "0::/pod/box\n",
            "sys/fs/cgroup/pod/memory.max": str(8 * GIB),
            "sys/fs/cgroup/pod/memory.current": str(7 * GIB),
            "sys/fs/cgroup/pod/memory.stat": f"anon 5\ninactive_file {4 * GIB}\n",
            "sys/fs/cgroup/pod/box/memory.max": "max",
        }
    )
    assert limits.total_memory_bytes() == 8 * GIB
    assert limits.available_memory_bytes() == 5 * GIB


def test_memory_of_version_1(host: Host) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/box\n0::/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2**63 - 4096),
        "sys/fs/cgroup/memory/box/memory.limit_in_bytes": str(4 * GIB),
        "sys/fs/cgroup/memory/box/memory.usage_in_bytes": str(3 * GIB),
        "sys/fs/cgroup/memory/box/memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB}\n",
    }
    assert host(files).total_memory_bytes() == 4 * GIB
    assert host(files).available_memory_bytes() == 2 * GIB


def test_a_container_that_sees_only_its_own_group(host: Host) -> None:
    """/proc names the group as the host does, /sys shows the container's group as the root."""
    files = {
        "proc/self/cgroup": "0::/kubepods/pod7/box\n",
        "sys/fs/cgroup/memory.max": str(2 * GIB),
        "sys/fs/cgroup/memory.current": str(3 * GIB),
    }
    assert host(files).total_memory_bytes() == 2 * GIB
    assert host(files).available_memory_bytes() == 0, "over its limit: nothing, not less than nothing"


@pytest.mark.parametrize("text", ["", "garbage", "1:2", "::", "0::/../..\n", "x:memory:/a\n"])
def test_odd_system_files_do_no_harm(text: str, host: Host) -> None:
    limits = host({"proc/self/cgroup": text, "proc/cpuinfo": text, "proc/self/status": text})
    assert limits.total_memory_bytes() == 16 * GIB
    assert limits.num_physical_cores() >= 1
    assert limits.cpu_flags() == frozenset() and limits.process_memory_bytes() == 0


def test_nothing_to_read_at_all(tmp_path: Path) -> None:
    limits = HostLimits(tmp_path)
    assert limits.total_memory_bytes() >= limits.available_memory_bytes() > 0
    assert limits.num_physical_cores() >= 1


def test_this_machine() -> None:
    limits = HostLimits()
    total, available = limits.total_memory_bytes(), limits.available_memory_bytes()
    assert 0 < available < total <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 1.01
    assert 1 <= limits.num_physical_cores() <= (os.cpu_count() or 1)
    before = limits.process_memory_bytes()
    with mmap.mmap(-1, 64 * 2**20) as ballast:  # fresh pages, whatever the heap has kept from earlier tests
        for start in range(0, len(ballast), mmap.PAGESIZE):
            ballast[start] = 1
        assert limits.process_memory_bytes() - before > 48 * 2**20
    assert limits.process_memory_bytes(peak=True) >= limits.process_memory_bytes()
