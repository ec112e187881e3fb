"""One step: under construction in ``Scheduler.schedule``, then in flight until its results come."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import mul

from headrace.core.cost_model import StepFeatures
from headrace.core.output import NewRequest, SchedulerOutput
from headrace.core.request import Request


@dataclass(eq=False, repr=False, slots=True)
class Step:
    """The batch of one step, on the scheduler's side.

    requests, ends: each request and the position its tokens reach; ``sampled``: those that sample.
    foreseen: {request: token} of those whose sample is committed already, since their grammar forces it.
    started: those that the data plane does not hold yet.  grown: those that got blocks since.
    num_decodes: running streams among them, which a long step would stall.
    num_saved_tokens: KV tokens that cascade is expected to spare it; exact figures are in ``shared`` once known.
    shared: what reading shared spans once adds to the features.
    """

    step_id: int
    num_saved_tokens: int = 0
    output: SchedulerOutput = field(init=False)
    requests: list[Request] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    sampled: list[Request] = field(default_factory=list)
    foreseen: dict[Request, int] = field(default_factory=dict)
    started: list[Request] = field(default_factory=list)
    grown: list[Request] = field(default_factory=list)
    num_tokens: int = 0
    num_decodes: int = 0
    shared: StepFeatures = field(default_factory=StepFeatures)
    features: StepFeatures = field(default_factory=StepFeatures)

    def __post_init__(self) -> None:
        self.output = SchedulerOutput(self.step_id)

    def add(self, request: Request, num_tokens: int) -> None:
        """Give a request its next tokens; it samples if that reaches the last token it knows or awaits."""
        start = request.num_computed_tokens
        end = start + num_tokens
        samples = end == len(request.token_ids) + request.num_placeholders
        output = self.output
        if samples:
            request.num_placeholders += 1
            output.sampled.append(len(self.requests))
            self.sampled.append(request)
        if not request.is_resident:
            request.is_resident = True
            self.started.append(request)
        elif request.resident_capacity != request.capacity_tokens:
            self.grown.append(request)
        request.resident_capacity = request.capacity_tokens
        output.request_ids.append(request.request_id)
        output.start_positions.append(start)
        output.num_tokens.append(num_tokens)
        self.requests.append(request)
        self.ends.append(end)
        self.num_tokens += num_tokens
        request.num_computed_tokens = end
        request.num_steps_in_flight += 1
        request.last_step_id = self.step_id

    def start_of(self, request: Request) -> int:
        """How far the request's KV has got before this step."""
        if request.last_step_id != self.step_id:
            return request.num_computed_tokens
        return self.output.start_positions[self.requests.index(request)]

    def count_features(self) -> None:
        """Fold the batch into ``features`` for the cost model."""
        output = self.output
        features = StepFeatures(self.num_tokens, len(self.requests), len(self.sampled))
        features.kv_tokens_read = sum(self.ends) + self.shared.kv_tokens_read
        features.kv_tokens_read -= min(self.num_saved_tokens, features.kv_tokens_read)
        features.num_shared_rows = self.shared.num_shared_rows
        counts = output.num_tokens
        features.attention_pairs = sum(map(mul, counts, output.start_positions))
        features.attention_pairs += 0.5 * sum(map(mul, counts, counts))
        self.features = features

    def describe_new(self, request: Request) -> None:
        """Send a request's whole state, which the data plane does not hold."""
        self.output.new_requests.append(
            NewRequest(
                request.request_id,
                list(request.token_ids),
                request.num_prompt_tokens,
                [list(table) for table in request.block_table],
                request.sampling_params,
                request.sample_seed,
                request.child_index,
                list(request.eos_token_ids),
                request.next_prompt_logprob if request.wants_prompt_logprobs else 0,
            )
        )
