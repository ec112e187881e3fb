"""Which requests of a step share the beginning of their context, so that attention reads it once for all of them.

The radix tree knows: requests whose paths run through one node hold the same blocks up to its end. Spans are found
top-down, at several levels (system prompt, document, conversation); a span that is not worth sharing by itself is left
to the spans below it, so that what is shared always begins at the first token. What is worth sharing is told by a floor
(tokens, requests, share of the context, and what the device needs to be spared) and by the cost model, which has seen
steps with and without and can only turn off what the floor lets pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from headrace.config import SharingConfig
from headrace.core.cascade_floor import DEFAULT_FLOOR, CascadeFloor
from headrace.core.cost_model import CostModel, StepFeatures
from headrace.core.kv_cache_spec import MAX_LEVELS
from headrace.core.kv_request import RequestBlocks
from headrace.core.output import SharedPrefix
from headrace.core.radix_tree import RadixNode
from headrace.core.step import Step

FULL_TILE_TOKENS = 64
"""A prompt chunk of so many tokens fills a tile of query rows by itself: gathering it with others saves no reads."""

REUSED_STEPS = 16
"""While the same requests decode, what they share is looked up only every so many steps."""


@dataclass(slots=True)
class _Branch:
    """A node of the tree that requests of the step pass through.

    end: blocks from the root to the node's end.  members: batch indices of requests that hold all of them.
    children: branches right below it.
    """

    end: int
    members: list[int]
    children: list[_Branch]


class CascadePlanner:
    """Fills ``SchedulerOutput.shared_prefixes``.

    num_saved_tokens: KV tokens that the last step did not read again; the next one is expected to do alike.

    Args:
        config: the user's floor, and whether to share at all.
        block_size: tokens in a block.
        cost_model: predicts the step with and without.
        floor: auto: the device's floor.
    """

    def __init__(
        self,
        config: SharingConfig,
        block_size: int,
        cost_model: CostModel,
        floor: CascadeFloor = DEFAULT_FLOOR,
    ) -> None:
        self._config = config
        self._block_size = block_size
        self._cost_model = cost_model
        is_auto = config.cascade == "auto"
        self._min_blocks = max(1, config.cascade_min_tokens // block_size) if is_auto else 1
        self._min_requests = config.min_requests if is_auto else 2
        self._floor = floor
        limit = config.max_prefix_length
        self._max_blocks = None if limit is None else limit // block_size
        self.num_saved_tokens = 0
        self._last_ids: list[str] = []
        self._last_found: list[SharedPrefix] = []
        self._num_reused = 0

    def fill(self, step: Step) -> None:
        """Find what the step's requests share and put it into the step, if that makes it faster."""
        self.num_saved_tokens = step.num_saved_tokens = 0
        if self._config.cascade == "off" or len(step.requests) < self._min_requests:
            return
        found = self._found_before(step)
        if found is None:
            found = self._find(step)
            is_steady = step.num_tokens == len(step.requests)
            self._last_ids = list(step.output.request_ids) if is_steady else []
            self._last_found = found
            self._num_reused = 0
        if found and self._is_faster(step, found):
            step.output.shared_prefixes = found
            self._count(step.shared, step, found)
            self.num_saved_tokens = -step.shared.kv_tokens_read

    def _found_before(self, step: Step) -> list[SharedPrefix] | None:
        """What was found for the same requests in an earlier step; it stays true while they only decode."""
        if step.started or self._num_reused >= REUSED_STEPS or step.num_tokens != len(step.requests):
            return None
        if step.output.request_ids != self._last_ids:
            return None
        self._num_reused += 1
        return self._last_found

    def _find(self, step: Step) -> list[SharedPrefix]:
        found: list[SharedPrefix] = []
        starts = step.output.start_positions
        pending = [(branch, 0, 1) for branch in self._branches(step)]
        while pending:
            branch, first, level = pending.pop()
            end = branch.end if self._max_blocks is None else min(branch.end, self._max_blocks)
            if self._is_worthwhile(branch.members, first, end, starts):
                found.append(SharedPrefix(branch.members, end, first))
                first, level = end, level + 1
            if level <= MAX_LEVELS and end == branch.end:
                pending += [(child, first, level) for child in branch.children]
        return found

    def _branches(self, step: Step) -> list[_Branch]:
        """The tops of the forest of nodes that at least two requests of the step hold."""
        branches: dict[RadixNode, _Branch] = {}
        for index, (request, num_tokens) in enumerate(
            zip(step.requests, step.output.num_tokens, strict=True)
        ):
            held = request.lock
            if num_tokens >= FULL_TILE_TOKENS and self._config.cascade == "auto":
                continue
            if not isinstance(held, RequestBlocks) or held.node is None:
                continue
            node, end = held.node, held.num_inserted
            while node.parent is not None:
                if end <= held.num_same:
                    branch = branches.get(node)
                    if branch is None:
                        branches[node] = _Branch(end, [index], [])
                    else:
                        branch.members.append(index)
                end -= node.num_blocks
                node = node.parent
        tops = []
        for node, branch in branches.items():
            if len(branch.members) < 2:
                continue
            assert node.parent is not None
            if node.parent.parent is None:
                tops.append(branch)
            else:
                branches[node.parent].children.append(branch)
        return tops

    def _is_worthwhile(self, members: list[int], first: int, end: int, starts: list[int]) -> bool:
        """Whether blocks [first, end) reach the floor; ``starts``: the context of each request of the step."""
        if end - first < self._min_blocks or len(members) < self._min_requests:
            return False
        if self._config.cascade == "on":
            return True
        num_tokens = (end - first) * self._block_size
        context = sum(starts[index] for index in members)
        if num_tokens * len(members) < self._config.cascade_min_share * context:
            return False
        num_own = max(0, context - end * self._block_size * len(members))
        return self._floor.is_reached(num_tokens, len(members), num_own)

    def _is_faster(self, step: Step, found: list[SharedPrefix]) -> bool:
        """Ask the cost model; until it is fitted the floor alone decides."""
        if self._config.cascade == "on" or not self._cost_model.is_fitted:
            return True
        step.count_features()
        apart = step.features
        shared = msgspec.structs.replace(apart)
        self._count(shared, step, found)
        return self._cost_model.prefers(shared, apart)

    def _count(self, features: StepFeatures, step: Step, found: list[SharedPrefix]) -> None:
        num_tokens = step.output.num_tokens
        for span in found:
            length = (span.num_blocks - span.first_block) * self._block_size
            rows = sum(num_tokens[index] for index in span.batch_indices)
            features.share(length, len(span.batch_indices), rows)
