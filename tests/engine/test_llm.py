"""LLM over a real engine core and the fake executor, whose model is a function of the tokens."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from headrace.config import EngineConfig
from headrace.core.kv_cache_spec import KVCacheSpec
from headrace.engine.assemble import assemble
from headrace.engine.engine_core import EngineCore
from headrace.engine.front_end import FrontEnd
from headrace.engine.input_processor import InputProcessor
from headrace.engine.llm import LLM
from headrace.engine.output_processor import OutputProcessor
from headrace.errors import EngineDeadError, RequestError
from headrace.runtime.fake_executor import FakeExecutor
from headrace.sampling_params import SamplingParams
from tests.engine.byte_tokenizer import EOS, VOCAB, byte_tokenizer

TOKENIZER = byte_tokenizer()
MAX_LEN = 64
ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def after(token: int) -> int:
    """The letter after a letter, "a" after anything else."""
    text = TOKENIZER.token_text(token)
    return TOKENIZER.encode(ALPHABET[(ALPHABET.find(text) + 1) % 26])[0]


def alphabet_model(token_ids: list[int], child_index: int) -> int:
    """Goes on with the alphabet; child k begins k letters further."""
    last = token_ids[-1]
    if child_index and TOKENIZER.token_text(last) == "!":
        return TOKENIZER.encode(ALPHABET[child_index])[0]
    return after(last)


class Engine:
    """An LLM and what it is made of."""

    def __init__(self, model: Callable[[list[int], int], int] = alphabet_model, **options: Any) -> None:
        settings = {"num_kv_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64, **options}
        config = EngineConfig.from_options(**settings)
        self.executor = FakeExecutor(
            [KVCacheSpec("full", (0,), 64)],
            settings["num_kv_blocks"],
            16,
            vocab_size=VOCAB,
            next_token=model,
            lag=1,
        )
        self.core = assemble(config, self.executor)
        self.outputs = OutputProcessor(TOKENIZER)
        inputs = InputProcessor(
            vocab_size=VOCAB, max_model_len=MAX_LEN, eos_token_ids=[EOS], tokenizer=TOKENIZER
        )
        front_end = FrontEnd(
            source=cast(Any, None),
            architecture=cast(Any, None),
            tokenizer=TOKENIZER,
            max_model_len=MAX_LEN,
            inputs=inputs,
            outputs=self.outputs,
        )
        self.llm = LLM.from_parts(front_end, self.core)

    def generate(self, prompts: Any, params: Any = None, **fields: Any) -> Any:
        if fields:
            params = SamplingParams(**fields)
        return self.llm.generate(prompts, params, use_tqdm=False)

    def check_idle(self) -> None:
        """Nothing of earlier batches is left anywhere."""
        assert not self.core.has_work() and self.core.stats().num_running == 0
        assert self.outputs.request_ids == []


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.check_idle()


def test_a_batch_keeps_its_order(engine: Engine) -> None:
    prompts = ["x", [*TOKENIZER.encode("ab")], {"prompt": "k"}, {"prompt_token_ids": TOKENIZER.encode("m")}]
    params = [SamplingParams(max_tokens=n) for n in (7, 2, 4, 1)]
    outputs = engine.generate(prompts, params)
    assert [output.outputs[0].text for output in outputs] == ["yzabcde", "cd", "lmno", "n"]
    assert [output.prompt for output in outputs] == ["x", None, "k", None]
    assert all(o.finished and o.outputs[0].finish_reason == "length" for o in outputs)
    assert len({output.request_id for output in outputs}) == 4


def test_defaults_are_those_of_sampling_params(engine: Engine) -> None:
    (output,) = engine.generate("x")
    assert len(output.outputs[0].token_ids) == SamplingParams().max_tokens


def test_an_empty_batch(engine: Engine) -> None:
    assert engine.generate([]) == []


def test_n_answers_of_one_prompt(engine: Engine) -> None:
    (output,) = engine.generate("tell!", n=3, max_tokens=3)
    assert [a.text for a in output.outputs] == ["abc", "bcd", "cde"]
    assert [a.index for a in output.outputs] == [0, 1, 2]


def test_end_of_text() -> None:
    def model(token_ids: list[int], child_index: int) -> int:
        return EOS if len(token_ids) >= 5 else after(token_ids[-1])

    ending = Engine(model)
    (output,) = ending.generate("ab", max_tokens=9)
    answer = output.outputs[0]
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("cde", "stop", None)
    assert answer.token_ids[-1] == EOS
    (output,) = ending.generate("ab", max_tokens=5, ignore_eos=True)
    assert output.outputs[0].finish_reason == "length" and len(output.outputs[0].token_ids) == 5
    ending.check_idle()


def test_stop_strings_free_the_engine(engine: Engine) -> None:
    stopped = []
    abort_child = engine.core.abort_child
    engine.core.abort_child = lambda *child: (stopped.append(child), abort_child(*child))  # type: ignore[method-assign, func-returns-value, assignment]
    outputs = engine.generate(["a", "x", "m"], stop=["fg", "no"], max_tokens=50)
    assert [o.outputs[0].text for o in outputs] == ["bcde", "yzabcde", ""]
    assert [o.outputs[0].stop_reason for o in outputs] == ["fg", "fg", "no"]
    assert len(stopped) == 3 and engine.core.stats().num_computed_tokens < 40
    assert all(o.metrics is not None and o.metrics.finished_time for o in outputs)


def test_one_of_n_stops_and_the_others_go_on(engine: Engine) -> None:
    (output,) = engine.generate("!", n=2, stop=["abcd"], max_tokens=10)
    assert [a.text for a in output.outputs] == ["", "bcdefghijk"]


def test_chat(engine: Engine) -> None:
    conversation = [{"role": "user", "content": "say"}, {"role": "assistant", "content": "abc"}]
    params = SamplingParams(max_tokens=2)
    (output,) = engine.llm.chat(conversation, params, use_tqdm=False)
    assert output.prompt == "[user]say[assistant]abc[assistant]"
    assert output.prompt_token_ids == TOKENIZER.encode(output.prompt)
    (output,) = engine.llm.chat(
        conversation, params, use_tqdm=False, add_generation_prompt=False, continue_final_message=True
    )
    assert output.prompt == "[user]say[assistant]abc" and output.outputs[0].text == "de"
    outputs = engine.llm.chat([conversation, conversation[:1]], params, use_tqdm=False)
    assert [o.prompt for o in outputs] == ["[user]say[assistant]abc[assistant]", "[user]say[assistant]"]
    with pytest.raises(RequestError, match="at least one message"):
        engine.llm.chat([], params)


@pytest.mark.parametrize(
    ("prompts", "params", "words"),
    [
        (["a", ""], None, "empty"),
        (["a", "b" * MAX_LEN], None, "max_model_len"),
        (["a", [VOCAB]], None, "vocabulary"),
        (["a", "b"], [SamplingParams()], "1 entries for 2 prompts"),
        (["a", "b"], [], "0 entries for 2 prompts"),
        (3, None, "prompt_token_ids"),
    ],
)
def test_mistakes_are_raised_before_anything_runs(
    engine: Engine, prompts: Any, params: Any, words: str
) -> None:
    with pytest.raises(RequestError, match=words):
        engine.generate(prompts, params)
    assert engine.core.stats().num_steps == 0
    assert [o.outputs[0].text for o in engine.generate("a", max_tokens=2)] == ["bc"]


def test_a_failing_request_leaves_the_others_alone() -> None:
    def model(token_ids: list[int], child_index: int) -> int:
        if TOKENIZER.token_text(token_ids[0]) == "#" and len(token_ids) == 4:
            raise RequestError("logits are not finite")
        return after(token_ids[-1])

    failing = Engine(model)
    outputs = failing.generate(["a", "#", "b"], max_tokens=6)
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error", "length"]
    assert outputs[1].outputs[0].text == "abc" and "not finite" in outputs[1].outputs[0].error
    assert [outputs[0].outputs[0].text, outputs[2].outputs[0].text] == ["bcdefg", "cdefgh"]
    failing.check_idle()


def test_a_prompt_that_can_never_fit_ends_alone() -> None:
    small = Engine(num_kv_blocks=2)
    outputs = small.generate(["a", "b" * 40, "c"], max_tokens=3)
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error", "length"]
    assert "never fit" in outputs[1].outputs[0].error
    small.check_idle()


def test_more_prompts_than_the_queue_holds() -> None:
    narrow = Engine(max_num_seqs=2, max_waiting_requests=3)
    outputs = narrow.generate([ALPHABET[i] for i in range(20)], max_tokens=4)
    assert [o.outputs[0].text for o in outputs] == [(ALPHABET * 2)[i + 1 : i + 5] for i in range(20)]
    narrow.check_idle()


def sent_order(engine: Engine) -> list[list[int]]:
    """Fills up with the prompts that the core takes, in its order."""
    sent: list[list[int]] = []
    add_request = engine.core.scheduler.add_request
    engine.core.scheduler.add_request = lambda request, is_ready=None: (  # type: ignore[method-assign]
        add_request(request, is_ready),
        sent.append(list(request.token_ids)),
    )[0]
    return sent


@pytest.mark.parametrize("limit", [4096, 2])
def test_the_longest_answers_start_first_and_come_back_in_their_place(limit: int) -> None:
    own = Engine(max_num_seqs=2, max_waiting_requests=limit)
    sent = sent_order(own)
    lengths = [3, 9, 1, 9, 5, 3]
    outputs = own.generate(list("abcdef"), [SamplingParams(max_tokens=n) for n in lengths])
    assert [len(o.outputs[0].token_ids) for o in outputs] == lengths
    assert [o.outputs[0].text[0] for o in outputs] == list("bcdefg")
    assert [int(o.request_id) for o in outputs] == list(range(6))
    assert sent == [TOKENIZER.encode(letter) for letter in "bdeafc"]
    own.check_idle()


@pytest.mark.parametrize("policy", ["priority", "longest-prefix"])
def test_other_policies_have_an_order_of_their_own(policy: str) -> None:
    own = Engine(policy=policy)
    sent = sent_order(own)
    own.generate(list("abc"), [SamplingParams(max_tokens=n) for n in (1, 3, 2)])
    assert sent == [TOKENIZER.encode(letter) for letter in "abc"]
    own.check_idle()


def test_repeated_prompts_hit_the_prefix_cache_unless_salted(engine: Engine) -> None:
    prompt = "p" * 40
    (first,) = engine.generate(prompt, max_tokens=1)
    (second,) = engine.generate(prompt, max_tokens=1)
    assert first.num_cached_tokens == 0 and second.num_cached_tokens >= 32
    (salted,) = engine.generate({"prompt": prompt, "cache_salt": "other"}, max_tokens=1)
    assert salted.num_cached_tokens == 0
    assert engine.llm.reset_prefix_cache()
    (third,) = engine.generate(prompt, max_tokens=1)
    assert third.num_cached_tokens == 0


def test_priorities() -> None:
    order: list[str] = []

    def model(token_ids: list[int], child_index: int) -> int:
        first = TOKENIZER.token_text(token_ids[0])
        if first not in order:
            order.append(first)
        return after(token_ids[-1])

    ranked = Engine(model, policy="priority", max_num_seqs=1)
    params = SamplingParams(max_tokens=3)
    outputs = ranked.llm.generate(["a", "k", "x"], params, use_tqdm=False, priority=[3, 2, 1])
    assert [o.outputs[0].text for o in outputs] == ["bcd", "lmn", "yza"] and order == ["x", "k", "a"]
    with pytest.raises(RequestError, match='policy="priority"'):
        Engine().llm.generate(["a"], params, use_tqdm=False, priority=[1])
    ranked.check_idle()


def test_seeds_of_a_request_and_of_the_engine() -> None:
    """A request's own seed reaches the data plane; without one the engine draws seeds, the same in each start."""

    def seeds_of(**params: Any) -> list[int]:
        other = Engine()
        seen: list[int] = []
        execute = other.executor.execute_model
        other.executor.execute_model = lambda step: (  # type: ignore[method-assign]
            seen.extend(r.sample_seed for r in step.new_requests), execute(step)
        )[1]  # fmt: skip
        other.generate(["a", "b"], max_tokens=1, **params)
        return seen

    assert seeds_of(seed=5) == [5, 5]
    drawn = seeds_of()
    assert drawn == seeds_of() and drawn[0] != drawn[1]


@pytest.mark.parametrize("limit", [4096, 1])
def test_drawn_seeds_follow_the_callers_order(limit: int) -> None:
    """Neither the order in which a batch is handed over nor a queue that was full changes who gets which seed."""

    def seeds_of(lengths: tuple[int, ...], **options: Any) -> dict[int, int]:
        other = Engine(**options)
        seen: dict[int, int] = {}
        execute = other.executor.execute_model
        other.executor.execute_model = lambda step: (  # type: ignore[method-assign]
            seen.update((r.token_ids[0], r.sample_seed) for r in step.new_requests), execute(step)
        )[1]  # fmt: skip
        other.generate(list("abcd"), [SamplingParams(max_tokens=n) for n in lengths])
        return seen

    seeds = seeds_of((4, 4, 4, 4))
    assert len(set(seeds.values())) == 4
    assert seeds_of((1, 3, 4, 2), max_num_seqs=1, max_waiting_requests=limit) == seeds


def interrupt_at_step(core: EngineCore, count: int) -> None:
    step = core.step

    def counted() -> Any:
        nonlocal count
        count -= 1
        if count == 0:
            signal.raise_signal(signal.SIGINT)
        return step()

    core.step = counted  # type: ignore[method-assign]


def test_ctrl_c_drops_the_batch_and_frees_the_engine(engine: Engine) -> None:
    interrupt_at_step(engine.core, 3)
    params = [SamplingParams(n=2, max_tokens=length) for length in (40, 50)]
    with pytest.raises(KeyboardInterrupt):
        engine.generate(["a", "b!"], params)
    engine.check_idle()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert [o.outputs[0].text for o in engine.generate("a", max_tokens=2)] == ["bc"]


def test_another_thread_may_drive_it(engine: Engine) -> None:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.extend(engine.generate("a", max_tokens=3)))
    thread.start()
    thread.join()
    assert results[0].outputs[0].text == "bcd"


def test_a_dead_engine_says_so() -> None:
    def model(token_ids: list[int], child_index: int) -> int:
        raise RuntimeError("the device fell off")

    dying = Engine(model)
    with pytest.raises(EngineDeadError):
        dying.generate("a")
    assert dying.outputs.request_ids == []
    with pytest.raises(EngineDeadError, match="shut down"):
        dying.generate("a")


def test_shutdown() -> None:
    other = Engine()
    with other.llm as llm:
        llm.generate("a", use_tqdm=False)
    llm.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        llm.generate("a")


def test_the_progress_bar_goes_to_stderr(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.llm.generate(["a", "b"], SamplingParams(max_tokens=2))
    captured = capsys.readouterr()
    assert captured.out == "" and "2/2" in captured.err and "tok/s" in captured.err


@pytest.mark.parametrize("wrong", ["a", None, 1.5, float("nan"), True])
def test_a_priority_that_is_no_integer_is_refused(wrong: Any) -> None:
    ranked = Engine(policy="priority")
    params = SamplingParams(max_tokens=2)
    with pytest.raises(RequestError, match="priority must be an integer"):
        ranked.llm.generate(["a", "b"], params, use_tqdm=False, priority=[wrong, 1])
    assert ranked.generate("a", max_tokens=2)[0].outputs[0].text == "bc"


def test_threads_take_turns(engine: Engine) -> None:
    results: dict[str, str] = {}

    def ask(letter: str) -> None:
        results[letter] = engine.generate(letter, max_tokens=20)[0].outputs[0].text

    threads = [threading.Thread(target=ask, args=(letter,)) for letter in "abcdef"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert {letter: text[0] for letter, text in results.items()} == dict(zip("abcdef", "bcdefg", strict=True))
    engine.check_idle()


def test_an_interrupt_inside_a_step_ends_the_engine_cleanly() -> None:
    engine = Engine()
    update = engine.core.scheduler.update_from_output

    def torn(output: Any) -> Any:
        engine.core.scheduler.update_from_output = update  # type: ignore[method-assign]
        raise KeyboardInterrupt

    engine.core.scheduler.update_from_output = torn  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        engine.generate(["a", "b"], max_tokens=9)
    with pytest.raises(EngineDeadError, match="make a new one"):
        engine.generate("a")
