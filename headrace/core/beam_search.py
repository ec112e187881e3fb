"""Beam search over requests: each beam is a request, and beams that part fork its blocks, copy on write.

One request computes the prompt. From its first log-probabilities on, beams are a co-schedule group that decodes
together. After each step the search decides on the host: a beam goes on in place with the first of its continuations,
further ones are forked from it (whole blocks shared, the last one copied), and a beam without any gives its blocks
back. Since a beam that goes on needs no more blocks than the one it replaces, a fork fails only when the group first
grows; a beam that finds no block or seat then waits its turn, computes its tail again, and the group waits for it.
"""

from __future__ import annotations

from headrace.core import fork
from headrace.core.beam_scores import BeamScores, Continuation, Hypothesis
from headrace.core.interfaces import ChoiceScene
from headrace.core.kv_cache_manager import KVCacheManager
from headrace.core.lifecycle import Lifecycle
from headrace.core.output import EngineCoreOutput, EngineCoreRequest, TokenLogprobs
from headrace.core.request import FinishReason, Request
from headrace.errors import CapacityError


class BeamSearch:
    """The beams of one user's request; a ``TokenChooser``.

    members: the requests of the running beams, best first.
    """

    def __init__(
        self, leader: Request, num_answers: int, num_logprobs: int | None, scores: BeamScores
    ) -> None:
        self.members = [leader]
        self.scores = scores
        self._leader = leader
        self._num_answers = num_answers
        self._num_logprobs = num_logprobs
        self._entries: dict[Request, TokenLogprobs] = {}
        self._num_forks = 0
        self._is_over = False

    @classmethod
    def start(
        cls, leader: Request, core_request: EngineCoreRequest, kv: KVCacheManager, max_num_seqs: int
    ) -> None:
        """Make ``leader`` the first beam of a search.

        Raises: CapacityError when the beams can never run together.
        """
        params = core_request.sampling_params
        width = params.num_sequences
        _check_room(width, leader, kv, max_num_seqs)
        scores = BeamScores(
            width,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            max_tokens=leader.max_tokens,
            min_tokens=params.min_tokens,
            stop_token_ids=leader.stop_token_ids,
        )
        leader.sampling_params = params.clone()
        leader.sampling_params.logprobs = max(scores.num_candidates, params.logprobs or 0)
        leader.may_run_ahead = False
        leader.chooser = cls(leader, params.n, params.logprobs, scores)

    def take(self, request: Request, entry: TokenLogprobs) -> None:
        """Log-probabilities of the token after a beam."""
        self._entries[request] = entry

    def decide(self, scene: ChoiceScene) -> list[EngineCoreOutput]:
        """All beams have been taken: fork, drop, go on; the answers once the search is over."""
        if self._is_over:
            return []
        assert set(self._entries) == set(self.members), "beams of one search are sampled together"
        self._leader.timeline.token_times.append(scene.now)
        chosen = self.scores.advance([self._entries[member] for member in self.members])
        self._entries.clear()
        if self.scores.is_done:
            return self._finish(scene.lifecycle)
        self._branch(chosen, scene)
        return []

    def end(
        self, lifecycle: Lifecycle, reason: FinishReason, message: str | None = None
    ) -> list[EngineCoreOutput]:
        """Break the search off; every answer ends with ``reason``."""
        if self._is_over:
            return []
        news = [EngineCoreOutput(self._leader.parent_id, index) for index in range(self._num_answers)]
        for item in news:
            item.finish_reason, item.message = reason.value, message
        self._retire_all(lifecycle, reason, news)
        return news

    def _branch(self, chosen: list[Continuation], scene: ChoiceScene) -> None:
        """Make the members those of ``chosen``, in its order."""
        before = self.members
        for index in set(range(len(before))) - {continuation.parent for continuation in chosen}:
            scene.lifecycle.finish(before[index], FinishReason.STOP)
        scene.lifecycle.drop_stopped()
        self.members = []
        going_on: list[tuple[Request, int]] = []
        for continuation in chosen:
            beam, token = before[continuation.parent], continuation.hypothesis.token
            if beam in self.members:
                self.members.append(self._fork(beam, token, scene))
            else:
                self.members.append(beam)
                going_on.append((beam, token))
        for beam, token in going_on:  # after the forks, which begin where their beam is now
            scene.lifecycle.choose_token(beam, token)
        if len(self.members) > 1:
            for member in self.members:
                member.group_id = self._leader.parent_id

    def _fork(self, beam: Request, token: int, scene: ChoiceScene) -> Request:
        self._num_forks += 1
        child = fork.branch(beam, f"{beam.parent_id}~{self._num_forks}", token)
        kv, length = scene.lifecycle.kv, beam.num_computed_tokens
        can_start = bool(beam.block_table) and len(scene.lifecycle.running) < scene.max_num_seqs
        if can_start and kv.can_fork(beam, length):
            kv.fork(beam, child, length, scene.next_step_id)
        scene.lifecycle.adopt(child, beam)
        return child

    def _finish(self, lifecycle: Lifecycle) -> list[EngineCoreOutput]:
        news = []
        for index, (_, hypothesis) in enumerate(self.scores.finished[: self._num_answers]):
            news.append(self._answer(index, hypothesis))
        self._retire_all(lifecycle, FinishReason.STOP, news)
        return news

    def _answer(self, index: int, hypothesis: Hypothesis) -> EngineCoreOutput:
        leader, path = self._leader, hypothesis.path()
        item = EngineCoreOutput(leader.parent_id, index, [link.token for link in path])
        if self._num_logprobs is not None:
            item.logprobs = [_entry_of(link, self._num_logprobs) for link in path]
        is_stopped = hypothesis.token in leader.stop_token_ids
        item.finish_reason = (FinishReason.STOP if is_stopped else FinishReason.LENGTH).value
        if is_stopped and hypothesis.token not in leader.eos_token_ids:
            item.stop_reason = hypothesis.token
        return item

    def _retire_all(self, lifecycle: Lifecycle, reason: FinishReason, news: list[EngineCoreOutput]) -> None:
        self._is_over = True
        for member in self.members:
            lifecycle.finish(member, reason)
        lifecycle.drop_stopped()
        for item in news:
            item.num_cached_tokens = self._leader.num_cached_prompt_tokens
            item.timeline = self._leader.timeline


def _entry_of(link: Hypothesis, num_top: int) -> TokenLogprobs:
    """The token's own log-probability first, then the ``num_top`` best ones."""
    entry = link.entry
    place = entry.token_ids.index(link.token, 1)
    return TokenLogprobs(
        [link.token, *entry.token_ids[1 : num_top + 1]],
        [entry.logprobs[place], *entry.logprobs[1 : num_top + 1]],
        place,
    )


def _check_room(width: int, leader: Request, kv: KVCacheManager, max_num_seqs: int) -> None:
    if width > max_num_seqs:
        raise CapacityError(
            f"beam search of width {width} needs as many seats, but max_num_seqs is {max_num_seqs}; lower best_of",
            param="best_of",
        )
    size = kv.block_size
    num_blocks = leader.num_prompt_tokens // size + width * (-(-leader.max_tokens // size) + 1)
    if num_blocks * kv.num_groups > kv.num_blocks:
        raise CapacityError(
            f"beam search of width {width} over {leader.num_prompt_tokens} + {leader.max_tokens} tokens can need "
            f"{num_blocks * kv.num_groups} KV blocks, but there are {kv.num_blocks}; lower best_of or max_tokens, or "
            "raise kv_cache_bytes",
            param="best_of",
        )
