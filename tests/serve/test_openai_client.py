"""The official client, unchanged."""

from __future__ import annotations

import openai
import pytest

from tests.serve.launch import LaunchedServer


@pytest.fixture
def client(server: LaunchedServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.base + "/v1", api_key="none", max_retries=0, timeout=30)


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "smollm2"
    assert client.models.retrieve("smollm2").id == "smollm2"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="smollm2", prompt=[5] * 12, max_tokens=4, logprobs=1, echo=True)
    assert answer.choices[0].text.endswith("1, 2")
    assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.token_logprobs is not None
    assert answer.usage is not None and answer.usage.total_tokens == 16


def test_completion_stream(client: openai.OpenAI) -> None:
    stream = client.completions.create(model="smollm2", prompt=[5] * 12, max_tokens=6, stream=True)
    chunks = list(stream)
    assert "".join(c.choices[0].text for c in chunks) == "1, 2, "
    assert chunks[-1].choices[0].finish_reason == "length"


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "Count."}],
        max_completion_tokens=5,
        n=2,
        logprobs=True,
        top_logprobs=1,
        seed=3,
        extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1},
    )
    assert len(answer.choices) == 2 and answer.choices[0].message.content
    assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.content is not None
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None


def test_chat_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "Count."}],
        max_tokens=5,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 5


@pytest.mark.anyio
async def test_async_client_that_leaves_a_stream(server: LaunchedServer) -> None:
    async with openai.AsyncOpenAI(base_url=server.base + "/v1", api_key="none", max_retries=0) as client:
        stream = await client.completions.create(model="smollm2", prompt="Hi", max_tokens=8000, stream=True)
        async for _ in stream:
            break
        await stream.close()
    server.wait_metric("num_requests_running", 0, 5)


def test_errors_are_the_clients_types(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="smollm2", prompt="Hi", temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="Hi")
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": "Hi"}],
            tools=[{"type": "function", "function": {"name": "no name"}}],
        )
