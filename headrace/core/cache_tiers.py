"""Where cached blocks go when the device needs their room: host memory, then disk; and how they come back.

The control side, which knows what is where; ``HostBlocks`` and ``DiskBlocks`` move the bytes beside the engine's
thread. A block is known by a digest of its namespace and all tokens up to its end. What leaves the device is copied to
host memory (the least recently used makes room) and, where there is a disk, written to a file soon after, so that host
memory can drop it at any time. A restored prefix is copied into the own blocks of a request that is PREPARING. Whatever
goes wrong with a file or a copy ends the restored prefix there: the rest is computed, and costs time only.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from headrace.core.interfaces import DiskBlocks, HostBlocks, LoadItem, Transfer
from headrace.core.kv_cache_manager import KVCacheManager
from headrace.core.load_times import LoadTimes, Place
from headrace.core.radix_tree import TOKEN_BYTES
from headrace.core.request import Request

MIN_LOADED_BLOCKS = 2
"""Fewer are computed: a load costs a step of waiting."""

_KNOWN_KEYS = 256


class TierStats(msgspec.Struct):
    """Counts since the start; the numbers of blocks and bytes are of now."""

    num_host_blocks: int = 0
    num_disk_blocks: int = 0
    num_disk_bytes: int = 0
    host_hit_tokens: int = 0
    disk_hit_tokens: int = 0
    num_stored_blocks: int = 0
    num_failed_blocks: int = 0


@dataclass(slots=True)
class _Store:
    transfer: Transfer
    key: bytes
    slot: int
    block_ids: list[int]
    epoch: int


@dataclass(slots=True)
class _Load:
    transfer: Transfer
    request: Request
    first_token: int
    num_tokens: int
    items: list[LoadItem]
    block_ids: list[int]
    epoch: int


class TieredCache:
    """A ``CacheTier`` of host memory and, perhaps, disk, for models of one KV group that keeps every token.

    Args:
        host: slots of host memory, and the copies between them and the device.
        disk: files of blocks, or None.
        block_size: tokens in a block.
        recompute_ms: (first position, tokens) -> expected time to compute them, 0 if unknown: a load that was measured
            to be slower is not made, but for a short one now and then, which measures again.
        load_times: what loads were measured to take.
        reopen_disk: opens the files of blocks of the weights that run now.
    """

    def __init__(
        self,
        host: HostBlocks,
        disk: DiskBlocks | None,
        block_size: int,
        recompute_ms: Callable[[int, int], float],
        load_times: LoadTimes | None = None,
        reopen_disk: Callable[[], DiskBlocks] | None = None,
    ) -> None:
        self._host = host
        self._disk = disk
        self._block_size = block_size
        self._recompute_ms = recompute_ms
        self._reopen_disk = reopen_disk
        self._kv: KVCacheManager | None = None
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # key -> slot, least recently used first
        self._free_slots = list(range(host.num_slots - 1, -1, -1))
        self._kept: set[int] = set()  # slots that hold a key
        self._epoch = 0  # rises with each reset: what began before it is not kept
        self._busy: dict[int, int] = {}  # slot -> transfers that read or fill it
        self._stores: dict[bytes, _Store] = {}
        self._loads: list[_Load] = []
        self._writes: list[tuple[Transfer, int]] = []
        self._ended: list[tuple[str, int]] = []
        self._keys = _KeyChains(block_size)
        self._load_times = load_times or LoadTimes()
        self._stats = TierStats()

    def attach(self, kv: KVCacheManager) -> None:
        """The manager whose blocks these are."""
        self._kv = kv

    # ---- CacheTier ------------------------------------------------------------------------------------------

    def on_evict(self, namespace: str, prefix: bytes, block_ids: list[int]) -> bool:
        """Copy a block to host memory, unless it is there already. See ``CacheTier``."""
        key = self._keys.of_prefix(namespace, prefix)
        if key in self._slots:
            self._slots.move_to_end(key)
            return False
        if key in self._stores:
            return False
        slot = self._take_slot()
        if slot is None:
            return False
        store = _Store(self._host.store(block_ids[0], slot), key, slot, list(block_ids), self._epoch)
        if store.transfer.is_done:
            self._end_store(store, is_device_block_held=False)
            return False
        self._stores[key] = store
        return True

    def match(self, request: Request, num_cached_tokens: int) -> tuple[int, bool]:
        """See ``CacheTier``."""
        first = num_cached_tokens // self._block_size
        places = self._places(self._keys.of_request(request)[first:])
        num_blocks = self._num_to_load(num_cached_tokens, places)
        return ((first + num_blocks) * self._block_size - num_cached_tokens if num_blocks else 0), True

    def start_load(self, request: Request, first_token: int, num_tokens: int) -> None:
        """See ``CacheTier``."""
        assert self._kv is not None
        size = self._block_size
        first, end = first_token // size, -(-(first_token + num_tokens) // size)
        items: list[LoadItem] = []
        for key, block in zip(
            self._keys.of_request(request)[first:end], request.block_table[0][first:end], strict=False
        ):
            item = self._load_item(key, block)
            if item is None:
                break
            items.append(item)
        if not items:
            self._ended.append((request.request_id, 0))
            return
        block_ids = [item.block for item in items]
        self._kv.hold_loading(block_ids)
        transfer = self._host.load(items, self._disk)
        self._loads.append(_Load(transfer, request, first_token, num_tokens, items, block_ids, self._epoch))

    def poll_loaded(self) -> list[tuple[str, int]]:
        """See ``CacheTier``; also gives back what ended transfers held."""
        if self._disk is not None:
            self._disk.tend()
        for store in [store for store in self._stores.values() if store.transfer.is_done]:
            del self._stores[store.key]
            self._end_store(store, is_device_block_held=True)
        for load in [load for load in self._loads if load.transfer.is_done]:
            self._loads.remove(load)
            self._end_load(load)
        for write in [write for write in self._writes if write[0].is_done]:
            self._writes.remove(write)
            self._release_slot(write[1])
        ended, self._ended = self._ended, []
        return ended

    # ---- the engine's side ----------------------------------------------------------------------------------

    def held_tokens(self, namespace: str, prefix: bytes, num_cached_tokens: int) -> int:
        """Tokens of ``prefix`` (uint32) that lie here beyond those cached on the device, in whole blocks."""
        first = num_cached_tokens // self._block_size
        num_blocks = len(self._places(self._keys.of_tokens(namespace, prefix)[first:]))
        return (first + num_blocks) * self._block_size - num_cached_tokens if num_blocks else 0

    def stats(self) -> TierStats:
        """Counters and sizes."""
        stats = msgspec.structs.replace(self._stats)
        stats.num_host_blocks = len(self._slots)
        if self._disk is not None:
            stats.num_disk_blocks = len(self._disk)
            stats.num_disk_bytes = self._disk.num_bytes()
        return stats

    def reset(self) -> None:
        """Forget everything, files too. Transfers under way end and are forgotten."""
        self._forget_host()
        if self._disk is not None:
            self._disk.clear()

    def renew(self) -> None:
        """The model has other weights: forget what is in host memory; files stay for the weights they are of, and those
        of the new ones are opened."""
        self._forget_host()
        if self._disk is not None:
            assert self._reopen_disk is not None
            self._disk.shutdown()
            self._disk = self._reopen_disk()

    def _forget_host(self) -> None:
        self._epoch += 1
        self._free_slots += [slot for slot in self._slots.values() if slot not in self._busy]
        self._slots.clear()  # slots that are busy come back when their transfers end
        self._kept.clear()

    def files_left(self) -> tuple[int, str] | None:
        """What of the last ``reset`` is left on disk. See ``DiskBlocks``."""
        return (0, "") if self._disk is None else self._disk.files_left()

    def shutdown(self) -> None:
        """Wait for what is under way and let go of the memory."""
        self._host.shutdown()
        if self._disk is not None:
            self._disk.shutdown()

    # ---- inside ---------------------------------------------------------------------------------------------

    def _places(self, keys: list[bytes]) -> list[Place]:
        """Where each block is, up to the first that is nowhere."""
        places: list[Place] = []
        for key in keys:
            if key in self._slots:
                places.append("host")
            elif self._disk is not None and key in self._disk:
                places.append("disk")
            else:
                break
        return places

    def _num_to_load(self, start: int, places: list[Place]) -> int:
        """How many of the blocks behind token ``start``: all, what measures a slow place anew, those in host memory."""
        if len(places) < MIN_LOADED_BLOCKS:
            return 0
        if self._is_faster(start, places):
            return len(places)
        num_tried = 0 if self._loads else self._load_times.blocks_to_measure(places)
        if num_tried:
            return max(num_tried, MIN_LOADED_BLOCKS)
        num_host = places.index("disk") if "disk" in places else 0
        return num_host if num_host >= MIN_LOADED_BLOCKS and self._is_faster(start, places[:num_host]) else 0

    def _is_faster(self, start: int, places: list[Place]) -> bool:
        recompute_ms = self._recompute_ms(start, len(places) * self._block_size - start % self._block_size)
        return not recompute_ms or self._load_times.expected_ms(places) <= recompute_ms

    def _load_item(self, key: bytes, block: int) -> LoadItem | None:
        """A block to load, its slot held; None when it is gone, or host memory has no room for what is on disk."""
        slot = self._slots.get(key)
        if slot is not None:
            self._slots.move_to_end(key)
            self._hold_slot(slot)
            return LoadItem(key, slot, block, is_on_disk=False)
        if self._disk is None or key not in self._disk:
            return None
        slot = self._take_slot()
        return None if slot is None else LoadItem(key, slot, block, is_on_disk=True)

    def _take_slot(self) -> int | None:
        """A slot to fill, held; the least recently used that is at rest makes room if need be."""
        if not self._free_slots:
            key = next((key for key, slot in self._slots.items() if slot not in self._busy), None)
            if key is None:
                return None
            slot = self._slots.pop(key)
            self._kept.discard(slot)
            self._free_slots.append(slot)
        slot = self._free_slots.pop()
        self._hold_slot(slot)
        return slot

    def _keep(self, key: bytes, slot: int) -> None:
        """The slot holds the block from now on, unless another does already."""
        if key not in self._slots:
            self._slots[key] = slot
            self._kept.add(slot)

    def _hold_slot(self, slot: int) -> None:
        self._busy[slot] = self._busy.get(slot, 0) + 1

    def _release_slot(self, slot: int) -> None:
        self._busy[slot] -= 1
        if not self._busy[slot]:
            del self._busy[slot]
            if slot not in self._kept:
                self._free_slots.append(slot)

    def _end_store(self, store: _Store, is_device_block_held: bool) -> None:
        if is_device_block_held:
            assert self._kv is not None
            self._kv.release_transfer(store.block_ids)
        if not store.transfer.num_done:
            self._stats.num_failed_blocks += 1
        elif store.epoch == self._epoch:
            self._stats.num_stored_blocks += 1
            self._keep(store.key, store.slot)
            if self._disk is not None and (write := self._disk.write(store.key, self._host.view(store.slot))):
                self._hold_slot(store.slot)
                self._writes.append((write, store.slot))
        self._release_slot(store.slot)

    def _end_load(self, load: _Load) -> None:
        assert self._kv is not None
        self._kv.release_loading(load.block_ids)
        num_done = load.transfer.num_done
        for index, item in enumerate(load.items):
            if index < num_done:
                if item.is_on_disk:
                    self._stats.disk_hit_tokens += self._block_size
                    if load.epoch == self._epoch:
                        self._keep(item.key, item.slot)
                else:
                    self._stats.host_hit_tokens += self._block_size
            self._release_slot(item.slot)
        self._stats.num_failed_blocks += len(load.items) - num_done
        if num_done:
            places: list[Place] = ["disk" if item.is_on_disk else "host" for item in load.items[:num_done]]
            self._load_times.learn(places, load.transfer.elapsed_ms)
        if num_done < len(load.items) and self._disk is not None:
            first = load.first_token // self._block_size
            self._disk.doubt(self._keys.of_request(load.request)[first + num_done :])
        end = (load.first_token // self._block_size + num_done) * self._block_size
        num_tokens = max(0, min(load.num_tokens, end - load.first_token)) if num_done else 0
        self._ended.append((load.request.request_id, num_tokens))


class _KeyChains:
    """Digests of prefixes, block by block, each made from the one before it."""

    def __init__(self, block_size: int) -> None:
        self._block_bytes = block_size * TOKEN_BYTES
        # by id and order of arrival, since an id may be used again; -> tokens counted in, digests
        self._of_requests: OrderedDict[tuple[str, int], tuple[int, list[bytes]]] = OrderedDict()
        self._last: tuple[str, bytes, list[bytes]] = ("", b"", [])

    def of_prefix(self, namespace: str, prefix: bytes) -> bytes:
        """The digest of a whole prefix. Tails of one prefix, longest first, cost one comparison each."""
        last_namespace, tokens, keys = self._last
        if namespace != last_namespace or not tokens.startswith(prefix):
            keys = self.of_tokens(namespace, prefix)
            self._last = (namespace, prefix, keys)
        return keys[len(prefix) // self._block_bytes - 1]

    def of_request(self, request: Request) -> list[bytes]:
        """The digests of all whole blocks of a request's known tokens."""
        name = (request.request_id, request.sequence)
        found = self._of_requests.get(name)
        if found is None or found[0] != request.num_tokens:
            tokens = array("I", request.token_ids).tobytes()
            found = (request.num_tokens, self.of_tokens(request.namespace, tokens))
            self._of_requests[name] = found
            if len(self._of_requests) > _KNOWN_KEYS:
                self._of_requests.popitem(last=False)
        return found[1]

    def of_tokens(self, namespace: str, tokens: bytes) -> list[bytes]:
        """The digests of all whole blocks of tokens (uint32)."""
        size, keys = self._block_bytes, []
        key = hashlib.blake2b(namespace.encode(), digest_size=16).digest()
        for start in range(0, len(tokens) - size + 1, size):
            key = hashlib.blake2b(key + tokens[start : start + size], digest_size=16).digest()
            keys.append(key)
        return keys
