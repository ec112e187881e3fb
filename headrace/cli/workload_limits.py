"""What can be told of a workload before it runs: its size, and requests that the model can never answer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from headrace.checkpoint import load_architecture, resolve_model
from headrace.checkpoint.load import resolve_max_model_len
from headrace.cli.workload import WorkloadRequest
from headrace.config import EngineConfig
from headrace.errors import ConfigError


def size_text(requests: list[WorkloadRequest]) -> str:
    """How many requests and tokens, as "64 requests, 65,536 tokens in, 16,384 tokens out"."""
    num_in = sum(len(request.prompt_ids) for request in requests)
    num_out = sum(request.output_len for request in requests)
    plural = "" if len(requests) == 1 else "s"
    return f"{len(requests):,} request{plural}, {num_in:,} tokens in, {num_out:,} tokens out"


@dataclass(frozen=True)
class WorkloadLimits:
    """What a model takes; None is not known.

    max_model_len: prompt and answer together, in tokens.
    longest: what max_model_len may be raised to.
    """

    max_model_len: int | None
    vocab_size: int | None = None
    longest: int | None = None

    @classmethod
    def of(cls, config: EngineConfig) -> WorkloadLimits:
        """Those of an engine of these settings. Raises CheckpointError, ConfigError as its start would."""
        model = config.model
        architecture = load_architecture(resolve_model(model.model, revision=model.revision))
        length = resolve_max_model_len(model.max_model_len, architecture, model.model)
        return cls(length, architecture.vocab_size, architecture.max_context_tokens)

    def check(self, workloads: dict[str, list[WorkloadRequest]]) -> None:
        """Raises ConfigError for the first request that cannot be answered in full."""
        for name, requests in workloads.items():
            for index, request in enumerate(requests):
                where = f"request {index} of workload {name!r}"
                self._check_length(request, where)
                self._check_ids(request.prompt_ids, where)

    def _check_length(self, request: WorkloadRequest, where: str) -> None:
        num_prompt, limit = len(request.prompt_ids), self.max_model_len
        total = num_prompt + request.output_len
        if limit is None or total <= limit:
            return
        room = limit - num_prompt
        fix = f"lower output_len to {room} or less" if room > 0 else "shorten the prompt"
        if self.longest is None or total <= self.longest:
            fix += f", or raise max_model_len to {total} or more"
        raise ConfigError(
            f"{where} needs {total} tokens of context (a prompt of {num_prompt} and output_len {request.output_len}), "
            f"but the model takes {limit} (max_model_len): {fix}"
        )

    def _check_ids(self, ids: Iterable[int], where: str) -> None:
        size = self.vocab_size
        wrong = None if size is None else next((token for token in ids if not 0 <= token < size), None)
        if size is not None and wrong is not None:
            raise ConfigError(
                f"{where} has token id {wrong}; the model's vocabulary is [0, {size - 1}]: "
                "tokenize with this model's tokenizer"
            )
