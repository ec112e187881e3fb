"""LocalBackend: programs over an engine that this process started."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headrace.engine.async_llm import AsyncLLM
from headrace.engine.output_processor import RequestOutputKind
from headrace.engine.prompts import ParsedPrompt
from headrace.errors import RequestError
from headrace.lang.backend import Backend, Generated, GenSpec
from headrace.lang.conversation import Conversation
from headrace.lang.scoring import scoring_batch
from headrace.outputs import RequestOutput
from headrace.sampling_params import SamplingParams
from headrace.structured_outputs import StructuredOutputsParams
from headrace.tokenizer import Tokenizer


class LocalBackend(Backend):
    """Over an AsyncLLM, which belongs to the backend from then on.

    Args:
        make_llm: makes the engine; called on the backend's event loop.
    """

    def __init__(self, make_llm: Callable[[], AsyncLLM]) -> None:
        super().__init__()

        async def make() -> AsyncLLM:
            return make_llm()

        self._llm = self.submit(make()).result()

    async def generate(
        self, conversation: Conversation, spec: GenSpec, on_text: Callable[[str], None] | None = None
    ) -> Generated:
        """See ``Backend``. Raises RequestError."""
        prompt = await self._prompt(conversation)
        constraint = StructuredOutputsParams(**spec.constraint) if spec.constraint else None
        params = SamplingParams(**spec.fields(), structured_outputs=constraint)
        text, num_tokens, reason = "", 0, "stop"
        async for output in self._llm.generate(prompt, params, kind=RequestOutputKind.DELTA):
            (answer,) = output.outputs
            text += answer.text
            num_tokens += len(answer.token_ids)
            if on_text is not None and answer.text:
                on_text(answer.text)
            if answer.finish_reason is not None:
                reason = answer.finish_reason
                _check(output)
        return Generated(text, reason, num_tokens)

    async def score(self, conversation: Conversation, choices: Sequence[str]) -> list[float]:
        """See ``Backend``: one batch, its shared prefix from the cache."""
        context = await self._prompt(conversation)
        joined = [(await self._prompt(conversation.append(choice))).token_ids or [] for choice in choices]
        batch = scoring_batch(context.token_ids or [], joined)
        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=0,
            logprobs_from=batch.logprobs_from,
            detokenize=False,
        )
        prompts = [ParsedPrompt(None, ids) for ids in batch.prompts]
        mailbox = await self._llm.submit(prompts, params, RequestOutputKind.FINAL_ONLY)
        outputs: dict[int, RequestOutput] = {}
        try:
            while not mailbox.is_done:
                outputs.update(await mailbox.get())
        finally:
            mailbox.close()
        logprobs = []
        for index, ids in enumerate(batch.prompts):
            _check(outputs[index])
            entries = (outputs[index].prompt_logprobs or [])[batch.logprobs_from :]
            own = zip(ids[batch.logprobs_from :], entries, strict=True)
            logprobs.append([entry[token].logprob for token, entry in own if entry is not None])
        return batch.means(logprobs)

    async def warm(self, conversation: Conversation) -> None:
        """See ``Backend``."""
        prompt = await self._prompt(conversation)
        if prompt.token_ids:
            async for _ in self._llm.generate(prompt, SamplingParams(max_tokens=1, temperature=0.0)):
                pass

    async def close_model(self) -> None:
        """See ``Backend``."""
        await self._llm.shutdown()

    async def _tokenizer(self) -> Tokenizer:
        front_end = await self._llm.front_end()
        if front_end.tokenizer is None:
            raise RequestError(
                "this engine has no tokenizer: programs need one; leave skip_tokenizer_init out"
            )
        return front_end.tokenizer

    async def _prompt(self, conversation: Conversation) -> ParsedPrompt:
        tokenizer = await self._tokenizer()
        if not conversation.messages:
            return ParsedPrompt(conversation.text, tokenizer.encode(conversation.text))
        goes_on = conversation.has_begun_turn
        text = tokenizer.apply_chat_template(
            conversation.prompt_messages, conversation.is_open and not goes_on, goes_on
        )
        return ParsedPrompt(text, tokenizer.encode(text, add_special_tokens=False))


def _check(output: RequestOutput) -> None:
    for answer in output.outputs:
        if answer.finish_reason == "error":
            raise RequestError(answer.error or "the engine failed on this request")
