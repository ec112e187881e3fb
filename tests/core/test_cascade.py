"""Which spans of a step are read once: several levels, blocks that are really the same, the floor, the cost model."""

from __future__ import annotations

import random

import pytest

from headrace.config import SharingConfig
from headrace.core.cascade import CascadePlanner
from headrace.core.cascade_floor import CascadeFloor
from headrace.core.cost_model import CostModel, StepFeatures
from headrace.core.output import SchedulerOutput
from tests.engine.core_harness import HYBRID, CoreHarness

SYSTEM = [(7 * i) % 50 for i in range(64)]
DOCUMENTS = [[(11 * i + j) % 50 for i in range(72)] for j in range(2)]
LOW = CascadeFloor(1)


class Recorder:
    """A harness whose steps are checked: every span's blocks are the same for all its requests."""

    def __init__(self, config: SharingConfig, floor: CascadeFloor = LOW, **options: object) -> None:
        self.harness = CoreHarness(num_blocks=600, max_num_seqs=16, max_num_batched_tokens=256, **options)  # type: ignore[arg-type]
        scheduler = self.harness.core.scheduler
        scheduler.cascade = CascadePlanner(config, self.harness.kv.block_size, scheduler.cost_model, floor)
        self.outputs: list[SchedulerOutput] = []
        schedule = scheduler.schedule

        def recording() -> SchedulerOutput | None:
            output = schedule()
            if output is not None:
                self._check(output)
                self.outputs.append(output)
            return output

        scheduler.schedule = recording  # type: ignore[method-assign]

    def _check(self, output: SchedulerOutput) -> None:
        ends: dict[int, int] = {}
        size = self.harness.kv.block_size
        for span in sorted(output.shared_prefixes, key=lambda span: span.first_block):
            assert len(set(span.batch_indices)) == len(span.batch_indices) >= 2
            tables = []
            for index in span.batch_indices:
                assert ends.get(index, 0) == span.first_block < span.num_blocks, "spans follow one another"
                ends[index] = span.num_blocks
                assert span.num_blocks * size <= output.start_positions[index]
                request = self.harness.core.scheduler.lifecycle.requests[output.request_ids[index]]
                tables.append(
                    [
                        table[span.first_block : span.num_blocks]
                        for table, spec in zip(request.block_table, self.harness.kv.specs, strict=True)
                        if spec.window is None
                    ]
                )
            assert all(table == tables[0] for table in tables)

    @property
    def most_levels(self) -> int:
        """Spans of one request in one step."""
        counts = [0]
        for output in self.outputs:
            indices = [index for span in output.shared_prefixes for index in span.batch_indices]
            counts += [indices.count(index) for index in set(indices)]
        return max(counts)


def add_conversations(recorder: Recorder, number: int, tokens: int = 8) -> None:
    for index in range(number):
        prompt = [*SYSTEM, *DOCUMENTS[index % 2], index, 3, index]
        recorder.harness.add(f"r{index}", prompt, tokens)


def test_system_prompt_and_documents_are_two_levels() -> None:
    recorder = Recorder(SharingConfig(cascade="on"))
    add_conversations(recorder, 8)
    recorder.harness.run()
    recorder.harness.check_answers()
    assert recorder.most_levels == 2
    steady = max(recorder.outputs, key=lambda output: len(output.shared_prefixes))
    spans = sorted(
        (span.first_block, span.num_blocks, len(span.batch_indices)) for span in steady.shared_prefixes
    )
    assert spans == [(0, 16, 8), (16, 34, 4), (16, 34, 4)]


def test_siblings_share_their_prompt() -> None:
    recorder = Recorder(SharingConfig(cascade="on"))
    recorder.harness.add("r", [*SYSTEM, 1, 2], 12, n=4)
    recorder.harness.run()
    recorder.harness.check_answers()
    assert any(len(span.batch_indices) == 4 for output in recorder.outputs for span in output.shared_prefixes)


def test_hybrid_models_share_in_their_full_groups() -> None:
    recorder = Recorder(SharingConfig(cascade="on"), specs=HYBRID)
    add_conversations(recorder, 6)
    recorder.harness.run()
    recorder.harness.check_answers()
    assert recorder.most_levels >= 1


def test_random_traffic_with_preemptions_only_shares_what_is_the_same() -> None:
    rng = random.Random(0)
    recorder = Recorder(SharingConfig(cascade="on"), lag=1)
    for number in range(60):
        prompt = SYSTEM[: rng.randrange(65)] + DOCUMENTS[rng.randrange(2)][: rng.randrange(73)]
        recorder.harness.add(
            f"r{number}", [*prompt, number % 50], rng.randrange(1, 30), n=rng.choice([1, 1, 3])
        )
        for _ in range(rng.randrange(3)):
            recorder.harness.step()
        if rng.random() < 0.1:
            recorder.harness.core.abort_requests([f"r{number}"])
    recorder.harness.run()
    assert recorder.most_levels >= 2


def test_off_and_the_floor_share_nothing() -> None:
    for config in (
        SharingConfig(cascade="off"),
        SharingConfig(cascade_min_tokens=137),
        SharingConfig(cascade_min_tokens=16, cascade_min_requests=9),
        SharingConfig(cascade_min_tokens=16, cascade_min_share=1.0),
    ):
        recorder = Recorder(config)
        add_conversations(recorder, 8)
        recorder.harness.run()
        assert recorder.most_levels == 0, config
    recorder = Recorder(SharingConfig(cascade_min_tokens=64, cascade_min_requests=5))
    add_conversations(recorder, 8)
    recorder.harness.run()
    assert recorder.most_levels == 1, "a document has 4 requests"


@pytest.mark.parametrize(
    ("floor", "levels"),
    [
        (CascadeFloor(7 * 64), 1),
        (CascadeFloor(7 * 64 + 1), 0),
        (CascadeFloor(7 * 64 - 8 * 10, 10), 1),
        (CascadeFloor(7 * 64 - 8 * 10 + 1, 10), 0),
        (CascadeFloor(0, 0, 0.5), 1),  # 72 to 82 tokens of each come after the first 64
        (CascadeFloor(0, 0, 1.0), 0),
    ],
)
def test_what_spares_too_few_reads_is_left(floor: CascadeFloor, levels: int) -> None:
    recorder = Recorder(SharingConfig(cascade_min_tokens=16), floor)
    add_conversations(recorder, 8)
    recorder.harness.run()
    assert recorder.most_levels == levels


def test_a_span_too_short_goes_to_the_spans_below_it() -> None:
    recorder = Recorder(SharingConfig(cascade_min_tokens=100, cascade_min_requests=4))
    add_conversations(recorder, 8)
    recorder.harness.run()
    spans = {
        (span.first_block, span.num_blocks) for output in recorder.outputs for span in output.shared_prefixes
    }
    assert spans == {(0, 34)}


def test_no_more_is_shared_than_the_limit() -> None:
    recorder = Recorder(SharingConfig(cascade="on", max_prefix_length=50))
    add_conversations(recorder, 4)
    recorder.harness.run()
    assert {span.num_blocks for output in recorder.outputs for span in output.shared_prefixes} == {12}


@pytest.mark.parametrize(("certain", "levels"), [(1 << 18, 0), (500, 2)])
def test_the_cost_model_turns_off_what_it_saw_to_be_slower(
    certain: int, levels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But it is not asked where very much is spared."""
    monkeypatch.setattr("headrace.core.cost_model.CERTAIN_SAVED_TOKENS", certain)
    recorder = Recorder(SharingConfig(cascade_min_tokens=16, cascade_min_requests=4))
    model = CostModel()
    rng = random.Random(0)
    for _ in range(40):
        features = StepFeatures(8, 8, 8, rng.randrange(500, 900), 5000.0, rng.choice([0, 8, 16]))
        model.observe(features, 1.0 + features.num_shared_rows)
    scheduler = recorder.harness.core.scheduler
    scheduler.cost_model = scheduler.cascade._cost_model = model
    add_conversations(recorder, 8)
    recorder.harness.run()
    assert recorder.most_levels == levels


@pytest.mark.parametrize(("spared", "levels"), [(7 * 64, 1), (7 * 64 + 1, 0)])
def test_the_cost_model_turns_on_nothing_below_the_floor(spared: int, levels: int) -> None:
    """Even if in all that it saw reading was dear and sharing free."""
    recorder = Recorder(SharingConfig(cascade_min_tokens=16), CascadeFloor(spared))
    model, rng = CostModel(), random.Random(0)
    for _ in range(40):
        features = StepFeatures(8, 8, 8, rng.randrange(500, 900), 5000.0, rng.choice([0, 8, 16]))
        model.observe(features, 1.0 + features.kv_tokens_read)
    scheduler = recorder.harness.core.scheduler
    scheduler.cost_model = scheduler.cascade._cost_model = model
    add_conversations(recorder, 8)
    recorder.harness.run()
    assert recorder.most_levels == levels


def test_steps_that_share_read_less() -> None:
    recorder = Recorder(SharingConfig(cascade="on"))
    add_conversations(recorder, 8, tokens=30)
    scheduler = recorder.harness.core.scheduler
    while recorder.most_levels < 2:
        recorder.harness.step()
    recorder.harness.step()
    features = scheduler.in_flight[-1].features if scheduler.in_flight else None
    assert features is None or features.kv_tokens_read < 8 * 136
    assert scheduler.cascade.num_saved_tokens == 7 * 64 + 2 * 3 * 72
    recorder.harness.run()
