"""LLM: the engine in this process, driven until all prompts have their answers. The interface is vLLM's."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from headrace.config import EngineConfig
from headrace.engine.assemble import build_engine_core
from headrace.engine.engine_core import EngineCore
from headrace.engine.front_end import FrontEnd
from headrace.engine.input_processor import ProcessedInput
from headrace.engine.interrupts import DelayedInterrupt
from headrace.engine.offline_order import in_offline_order
from headrace.engine.output_processor import OutputProcessor, RequestOutputKind
from headrace.engine.progress import AnswerBar, LoadBar
from headrace.engine.prompts import ParsedPrompt, Prompt, parse_prompt, split_batch
from headrace.engine.settled_start import settle
from headrace.engine.step_meter import StepMeter
from headrace.errors import CapacityError, EngineDeadError, RequestError
from headrace.outputs import RequestOutput
from headrace.sampling_params import SamplingParams
from headrace.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model loaded for answering batches of prompts.

    Args:
        model: a Hugging Face folder or id, a .gguf file, or the name of a packaged model.
        tokenizer: a tokenizer folder or .gguf, when not the model's own.
        options: any setting of ``headrace.config``, by its flat name (``max_model_len=2048``).

    Raises: ConfigError for unknown settings and wrong values, CheckpointError for a model that cannot be read.
    """

    def __init__(self, model: str = "smollm2", *, tokenizer: str | None = None, **options: Any) -> None:
        self._load(EngineConfig.from_options(model=model, tokenizer=tokenizer, **options))

    @classmethod
    def from_config(cls, config: EngineConfig) -> LLM:
        """Load what a configuration describes. Raises as the constructor does."""
        llm = cls.__new__(cls)
        llm._load(config)
        return llm

    @classmethod
    def from_parts(cls, front_end: FrontEnd, core: EngineCore) -> LLM:
        """Over a front end and an engine core that are there already."""
        llm = cls.__new__(cls)
        llm._attach(front_end, core)
        return llm

    def _load(self, config: EngineConfig) -> None:
        front_end = FrontEnd.open(config.model)
        with LoadBar() as bar:
            core = build_engine_core(config, bar, is_offline=True)
        self._attach(front_end, core)
        self._settled.append(settle(self))

    def _attach(self, front_end: FrontEnd, core: EngineCore) -> None:
        self._front_end = front_end
        self._core: EngineCore | None = core
        self._lock = threading.Lock()  # one batch at a time; another thread waits
        self._num_requests = 0
        self._settled: list[Callable[[], object]] = []  # what undoes it

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts; outputs come in their order. Those with the largest ``max_tokens`` are started first.

        Args:
            prompts: one prompt or a batch; each is text, token ids, ``{"prompt": text}`` or
                ``{"prompt_token_ids": [...]}``, the latter two with an optional ``cache_salt``.
            sampling_params: one for all, or one a prompt; the defaults when left out.
            use_tqdm: show a progress bar on stderr.
            priority: one a prompt, lower first; needs ``policy="priority"``.

        Raises: RequestError for a prompt or parameter that is wrong, before anything runs. Later failures end their
            own request alone: it gets ``finish_reason`` "error" and the message in ``error``.
        """
        return self._answer(
            [parse_prompt(prompt) for prompt in split_batch(prompts)], sampling_params, use_tqdm, priority
        )

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or a batch of them, each a list of ``{"role": ..., "content": ...}``.

        Args:
            chat_template: Jinja source to use in place of the model's own.
            add_generation_prompt: start the assistant's message.
            continue_final_message: go on with the last message instead.
            tools: function descriptions for the template.
            chat_template_kwargs: further variables of the template.

        Raises: RequestError as ``generate`` does, and for messages that the template refuses.
        """
        tokenizer = self.get_tokenizer()
        prompts = []
        for conversation in _split_conversations(messages):
            text = tokenizer.apply_chat_template(
                conversation,
                add_generation_prompt,
                continue_final_message,
                tools=tools,
                chat_template=chat_template,
                **(chat_template_kwargs or {}),
            )
            prompts.append(ParsedPrompt(text, tokenizer.encode(text, add_special_tokens=False)))
        return self._answer(prompts, sampling_params, use_tqdm, None)

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises RequestError when the engine was started without one."""
        if self._front_end.tokenizer is None:
            raise RequestError("this engine has no tokenizer: it was started with skip_tokenizer_init")
        return self._front_end.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What is used when no parameters are given."""
        return SamplingParams()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; True if nothing is left."""
        return self._living_core().reset_prefix_cache()

    def update_weights(self, model: str | Path | None = None) -> None:
        """Replace the model's weights, say by those of a training step; KV memory and the tokenizer stay, the prefix
        cache is forgotten.

        Args:
            model: a folder or .gguf file of the same model; None: the files loaded last, which were replaced.

        Raises:
            RequestError: requests are unfinished.
            CheckpointError, ConfigError, DeviceMemoryError: they cannot be used; the old weights go on.
            EngineDeadError: loading failed when the old ones were gone, and this LLM was shut down.
        """
        with self._lock:
            try:
                self._living_core().update_weights(None if model is None else str(model))
            except EngineDeadError:
                self.shutdown()
                raise

    def measure_steps(self) -> StepMeter:
        """A context in which the engine's steps are counted and timed."""
        return StepMeter(self._living_core())

    def shutdown(self) -> None:
        """Free the device. Calling twice is allowed; nothing else may be called after it."""
        if self._core is not None:
            self._core.shutdown()
            self._core = None
            for undo in self._settled:
                undo()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _living_core(self) -> EngineCore:
        if self._core is None:
            raise EngineDeadError("this LLM was shut down; make a new one")
        return self._core

    def _answer(
        self,
        prompts: list[ParsedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        priority: Sequence[int] | None,
    ) -> list[RequestOutput]:
        """Check all prompts, run them, and put the outputs in order."""
        core = self._living_core()
        wanted = self.get_default_sampling_params() if sampling_params is None else sampling_params
        params = _one_each("sampling_params", wanted, len(prompts))
        if priority is not None and core.scheduler.config.policy != "priority":
            raise RequestError(
                'priority needs an engine with policy="priority"; this one has "fcfs"', param="priority"
            )
        priorities = _one_each("priority", 0 if priority is None else priority, len(prompts))
        inputs = []
        for prompt, own_params, rank in zip(prompts, params, priorities, strict=True):
            request_id = str(self._num_requests)
            self._num_requests += 1
            inputs.append(self._front_end.inputs.process(request_id, prompt, own_params, priority=rank))
        with self._lock, AnswerBar(len(inputs), use_tqdm) as bar, DelayedInterrupt() as interrupt:
            run = _Run(core, self._front_end.outputs, inputs)
            try:
                while not run.is_done:
                    interrupt.check()
                    for output in run.step():
                        bar.finished_one(sum(len(answer.token_ids) for answer in output.outputs))
            except Exception:  # the engine failed: nothing of it can be trusted any more
                run.forget()
                self.shutdown()
                raise
            except BaseException:  # an interrupt
                try:
                    run.abort()
                except BaseException:  # it fell into the middle of a step: the engine cannot go on
                    run.forget()
                    self.shutdown()
                raise
        return [run.finished[item.request.request_id] for item in inputs]


class _Run:
    """One batch on its way through the engine core, longest answers first."""

    def __init__(self, core: EngineCore, outputs: OutputProcessor, inputs: list[ProcessedInput]) -> None:
        self._core = core
        self._outputs = outputs
        self._num_inputs = len(inputs)
        for item in inputs:  # in the caller's order, so that no answer depends on the one below
            core.settle_seed(item.request)
        policy = core.scheduler.config.policy
        self._unsent = deque(in_offline_order(inputs, policy, lambda item: item.request.max_tokens))
        self._sent: list[str] = []
        self.finished: dict[str, RequestOutput] = {}

    @property
    def is_done(self) -> bool:
        """True when every prompt has its answers and the core has put everything away."""
        return len(self.finished) == self._num_inputs and not self._core.has_work()

    def step(self) -> list[RequestOutput]:
        """Hand over as many prompts as the core has room for, and do one step. Returns the finished ones."""
        done = self._send()
        processed = self._outputs.process(self._core.step())
        for request_id, child_index in processed.stopped:
            self._core.abort_child(request_id, child_index)
        done += processed.outputs
        for output in done:
            self.finished[output.request_id] = output
        return done

    def _send(self) -> list[RequestOutput]:
        """Prompts that the core refuses for good end with an error; a full queue is tried again after a step."""
        refused = []
        while self._unsent:
            request, prompt = self._unsent[0]
            self._outputs.add_request(request, prompt, RequestOutputKind.FINAL_ONLY)
            try:
                self._core.add_request(request)
            except RequestError as error:
                output = self._outputs.end(request.request_id, "error", error.message)
                is_full = isinstance(error, CapacityError) and error.code == "queue_full"
                if is_full and self._core.has_work():
                    break
                assert output is not None
                refused.append(output)
            else:
                self._sent.append(request.request_id)
            self._unsent.popleft()
        return refused

    def abort(self) -> None:
        """Drop what is not finished, so that the engine is free for the next batch."""
        self._core.abort_requests(self._sent)
        while self._core.has_work():
            self._core.step()
        self.forget()

    def forget(self) -> None:
        """Drop the user's side of what is not finished."""
        for request_id in self._sent:
            self._outputs.end(request_id, "abort")


def _one_each(name: str, value: Any, count: int) -> list[Any]:
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise RequestError(
            f"{name} has {len(value)} entries for {count} prompts; give one, or one each", param=name
        )
    return list(value)


def _split_conversations(messages: Messages | Sequence[Messages]) -> list[Messages]:
    is_single = bool(messages) and isinstance(messages[0], Mapping)
    return [messages] if is_single or not messages else list(messages)  # type: ignore[list-item, arg-type]
