"""The fake executor must catch every kind of block-accounting error, and complete late but in order."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.core.kv_cache_spec import KVCacheSpec
from headrace.core.output import BlockCopy, ModelRunnerOutput, NewRequest, SchedulerOutput, SharedPrefix
from headrace.core.token_mask import TokenMask
from headrace.errors import EngineDeadError, RequestError
from headrace.runtime.fake_executor import FakeExecutor
from headrace.runtime.fake_kv_cache import BlockContentError
from headrace.sampling_params import SamplingParams

FULL = KVCacheSpec("full", (0,), 64)
SLIDING = KVCacheSpec("sliding", (1,), 64, window=4)


class Driver:
    """Writes scheduler outputs by hand, one step at a time."""

    def __init__(self, specs: list[KVCacheSpec] | None = None, **options) -> None:
        self.executor = FakeExecutor(specs or [FULL], 32, 4, **options)
        self.step_id = 0

    def step(self, batch: list[tuple[str, int, int]], sampled: list[int] | None = None, mask=None, **delta):
        self.step_id += 1
        self.executor.execute_model(
            SchedulerOutput(
                self.step_id,
                [entry[0] for entry in batch],
                [entry[1] for entry in batch],
                [entry[2] for entry in batch],
                list(range(len(batch))) if sampled is None else sampled,
                **delta,
            )
        )
        return self.executor.sample_tokens(mask)


def new(request_id: str, tokens: list[int], *blocks: list[int], child_index: int = 0, **params) -> NewRequest:
    return NewRequest(request_id, tokens, len(tokens), list(blocks), SamplingParams(**params), 0, child_index)


def generate(driver: Driver, chunks: list[int], blocks: list[int], num_output: int) -> list[int]:
    """Tokens of one request whose prompt (1..10) is computed in ``chunks``."""
    prompt, start, result = list(range(1, 11)), 0, []
    for index, count in enumerate(chunks):
        delta = {"new_requests": [new("a", prompt, blocks)]} if index == 0 else {}
        future = driver.step([("a", start, count)], sampled=[0] if index == len(chunks) - 1 else [], **delta)
        start += count
    result += future.result().sampled_token_ids[0]
    for _ in range(num_output - 1):
        result += driver.step([("a", start, 1)]).result().sampled_token_ids[0]
        start += 1
    return result


def test_tokens_depend_on_history_and_child_only() -> None:
    whole = generate(Driver(), [10], [3, 1, 7, 9], 5)
    assert generate(Driver(), [1, 4, 5], [5, 6, 2, 0], 5) == whole
    assert len(set(whole)) > 2
    driver = Driver()
    batch = [new("a", [1, 2], [0]), new("b", [1, 2], [1], child_index=1), new("c", [2, 1], [2])]
    tokens = (
        driver.step([("a", 0, 2), ("b", 0, 2), ("c", 0, 2)], new_requests=batch).result().sampled_token_ids
    )
    assert tokens[0] != tokens[1] and tokens[0] != tokens[2]


def test_cached_prefix_is_read_through_the_block_table() -> None:
    driver = Driver()
    driver.step([("a", 0, 5)], new_requests=[new("a", [1, 2, 3, 4, 5], [0, 1])])
    shared = driver.step([("b", 4, 2)], new_requests=[new("b", [1, 2, 3, 4, 9, 9], [0, 2])]).result()
    alone = Driver().step([("b", 0, 6)], new_requests=[new("b", [1, 2, 3, 4, 9, 9], [5, 6])]).result()
    assert shared.sampled_token_ids == alone.sampled_token_ids


def test_wrong_block_content_is_caught() -> None:
    driver = Driver()
    driver.step([("a", 0, 5)], new_requests=[new("a", [1, 2, 3, 4, 5], [0, 1])])
    with pytest.raises(BlockContentError, match="position 3"):
        driver.step([("b", 4, 1)], new_requests=[new("b", [1, 2, 3, 7, 5], [0, 2])])


def test_block_overwritten_by_another_request_is_caught() -> None:
    driver = Driver()
    driver.step([("a", 0, 5)], new_requests=[new("a", [1, 2, 3, 4, 5], [0, 1])])
    driver.step([("b", 0, 2)], new_requests=[new("b", [8, 8], [0])])
    with pytest.raises(BlockContentError, match="'a'"):
        driver.step([("a", 5, 1)])


def test_two_requests_writing_one_block_in_one_step_is_caught() -> None:
    with pytest.raises(BlockContentError):
        Driver().step([("a", 0, 2), ("b", 0, 2)], new_requests=[new("a", [1, 2], [0]), new("b", [3, 4], [0])])


def test_missing_block_and_released_block_are_caught() -> None:
    with pytest.raises(BlockContentError, match="not all in"):
        Driver().step([("a", 0, 2)], new_requests=[new("a", [1, 2], [32])])
    with pytest.raises(BlockContentError, match="need blocks"):
        Driver().step([("a", 0, 5)], new_requests=[new("a", [1, 2, 3, 4, 5], [0])])
    driver = Driver()
    driver.step([("a", 0, 5)], new_requests=[new("a", [1, 2, 3, 4, 5], [0, 1])])
    with pytest.raises(BlockContentError, match="need blocks"):
        driver.step([("b", 5, 1)], new_requests=[new("b", [1, 2, 3, 4, 5, 6], [-1, 1])])


def test_block_of_two_groups_is_caught() -> None:
    with pytest.raises(BlockContentError):
        Driver([FULL, SLIDING]).step([("a", 0, 2)], new_requests=[new("a", [1, 2], [0], [0])])


def test_sliding_group_needs_only_its_window() -> None:
    tokens = list(range(9))
    driver = Driver([FULL, SLIDING])
    driver.step([("a", 0, 9)], new_requests=[new("a", tokens, [0, 1, 2], [3, 4, 5])])
    driver.step([("b", 0, 2)], new_requests=[new("b", [7, 7], [6], [3])])
    driver.step([("a", 9, 1)])
    driver.step([("c", 8, 2)], new_requests=[new("c", [*tokens, 50], [0, 1, 7], [-1, 4, 8])], block_copies=[])
    driver.step([("b", 2, 1)], removed_request_ids=["c"])
    driver.step([("d", 0, 2)], new_requests=[new("d", [7, 7], [9], [5])])
    with pytest.raises(BlockContentError, match="group 1"):
        driver.step([("a", 10, 1)])


def test_block_copy_carries_content_and_too_short_a_copy_is_caught() -> None:
    for num_tokens, is_right in ((3, True), (2, False)):
        driver = Driver()
        driver.step([("a", 0, 3)], new_requests=[new("a", [1, 2, 3], [0])])
        again = [new("b", [1, 2, 3, 9], [1])]
        copies = [BlockCopy(0, 1, num_tokens)]
        if is_right:
            driver.step([("b", 3, 1)], new_requests=again, block_copies=copies)
        else:
            with pytest.raises(BlockContentError, match="position 2"):
                driver.step([("b", 3, 1)], new_requests=again, block_copies=copies)


def test_fence_is_verified() -> None:
    for lag, is_right in ((0, True), (1, False)):
        driver = Driver(lag=lag)
        driver.step([("a", 0, 2)], new_requests=[new("a", [1, 2], [0])])
        late = {"new_requests": [new("b", [3, 4], [0])], "removed_request_ids": ["a"]}
        if is_right:
            driver.step([("b", 0, 2)], **late)
        else:
            with pytest.raises(BlockContentError, match="outstanding"):
                driver.step([("b", 0, 2)], **late)


def test_fence_covers_copies_and_allows_appending() -> None:
    driver = Driver(lag=3)
    driver.step([("a", 0, 2)], new_requests=[new("a", [1, 2], [0])])
    driver.step(
        [("a", 2, 1), ("b", 2, 1)], new_requests=[new("b", [1, 2, 5], [1])], block_copies=[BlockCopy(0, 1, 2)]
    )
    driver.step([("a", 3, 1), ("b", 3, 1)])
    with pytest.raises(BlockContentError, match="copied into"):
        driver.step([("a", 4, 1)], new_block_ids={"a": [[2]]}, block_copies=[BlockCopy(0, 1, 2)])


def test_futures_complete_late_and_in_order() -> None:
    driver = Driver(lag=2)
    futures = [driver.step([("a", 0, 2)], new_requests=[new("a", [1, 2], [0, 1])])]
    futures += [driver.step([("a", start, 1)]) for start in (2, 3)]
    assert [future.done() for future in futures] == [True, False, False]
    assert driver.executor.num_steps_outstanding == 2
    assert futures[2].result().step_id == 3
    assert futures[1].done() and futures[1].result().step_id == 2


def test_virtual_clock_runs_steps_one_after_another() -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    driver = Driver(step_ms=5.0, clock=lambda: now[0], sleep=sleep)
    first = driver.step([("a", 0, 2)], new_requests=[new("a", [1, 2], [0])])
    second = driver.step([("a", 2, 1)])
    assert not first.done()
    assert second.result().elapsed_ms == 5.0
    assert now[0] == pytest.approx(0.010) and driver.executor.device_busy_s == pytest.approx(0.010)


def test_bad_batches_are_caught() -> None:
    with pytest.raises(AssertionError, match="never sent"):
        Driver().step([("a", 0, 1)])
    with pytest.raises(AssertionError, match="known tokens"):
        Driver().step([("a", 0, 3)], new_requests=[new("a", [1, 2], [0])])
    with pytest.raises(AssertionError, match="samples at"):
        Driver().step([("a", 0, 1)], new_requests=[new("a", [1, 2], [0])])
    driver = Driver()
    driver.step([("a", 0, 2)], new_requests=[new("a", [1, 2], [0])])
    driver.step_id += 1
    with pytest.raises(AssertionError, match="after step 1"):
        driver.step([("a", 2, 1)])


def test_shared_prefixes_are_checked() -> None:
    driver = Driver()
    driver.step([("a", 0, 5)], new_requests=[new("a", [1, 2, 3, 4, 5], [0, 1])])
    batch = {
        "new_requests": [new("b", [1, 2, 3, 4, 9], [0, 2])],
        "shared_prefixes": [SharedPrefix([0, 1], 2)],
    }
    with pytest.raises(BlockContentError, match="does not share"):
        driver.step([("a", 5, 1), ("b", 4, 1)], **batch)


def test_mask_and_appended_tokens_and_logprobs() -> None:
    driver = Driver()
    mask = TokenMask(np.array([0]), np.zeros((1, 32), np.uint32))
    mask.words[0, 3] = 1 << 5
    request = new("a", [1, 2, 3], [0, 1], logprobs=2, prompt_logprobs=1)
    request.prompt_logprobs_from = 2
    output: ModelRunnerOutput = driver.step([("a", 0, 3)], mask=mask, new_requests=[request]).result()
    assert output.sampled_token_ids == [[101]]
    assert output.logprobs["a"][0].token_ids == [101, 101, 102]
    assert [entry.token_ids[0] for entry in output.prompt_logprobs["a"]] == [3]
    forced = driver.step([("a", 3, 3)], appended_token_ids={"a": [7, 8]}).result()
    alone = Driver().step([("a", 0, 6)], new_requests=[new("a", [1, 2, 3, 101, 7, 8], [5, 6])]).result()
    assert forced.sampled_token_ids == alone.sampled_token_ids
    assert "a" not in forced.prompt_logprobs


def test_request_error_ends_one_request_and_other_errors_the_engine() -> None:
    def next_token(tokens: list[int], child_index: int) -> int:
        if tokens[0] == 66:
            raise RequestError("no token for 66")
        if tokens[0] == 13:
            raise ValueError("boom")
        return len(tokens)

    driver = Driver(next_token=next_token)
    output = driver.step(
        [("a", 0, 1), ("b", 0, 2)], new_requests=[new("a", [66], [0]), new("b", [2, 3], [1])]
    ).result()
    assert output.errors == {"a": "no token for 66"}
    assert output.request_ids == ["b"] and output.sampled_token_ids == [[2]]
    future = driver.step([("c", 0, 1)], new_requests=[new("c", [13], [2])])
    with pytest.raises(EngineDeadError, match="boom"):
        future.result()
    with pytest.raises(EngineDeadError, match="boom"):
        driver.step([("b", 2, 1)])
    driver.executor.shutdown()
    driver.executor.shutdown()


def test_torch_is_not_imported() -> None:
    import subprocess
    import sys

    code = "import sys, headrace.runtime.fake_executor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
