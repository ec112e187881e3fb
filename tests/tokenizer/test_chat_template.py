from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from headrace.errors import RequestError
from headrace.tokenizer import Tokenizer
from headrace.tokenizer.chat_template import ChatTemplate
from tests.tokenizer.vocabularies import byte_level

CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STRIPPING = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</{{ m.role }}>\n{% endfor %}"
ALTERNATING = """\
{{ bos_token }}
{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('roles must alternate user/assistant/user/assistant/...') }}
    {% endif %}
    {% if message['role'] == 'user' %}
[INST] {{ message['content'] }} [/INST]
    {%- else %}
{{ ' ' + message['content'] | trim + ' ' + eos_token }}
    {%- endif %}
{% endfor %}
"""
WITH_TOOLS = """\
{%- set ns = namespace(last=-1, text='') %}
{%- macro show(tool) %}{{ tool | tojson }}{% endmacro %}
{%- if tools %}{% for tool in tools %}{{ show(tool) ~ '\n' }}{% endfor %}{% endif %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages[::-1] %}{% if loop.first and m.role == 'skip' %}{% continue %}{% endif %}
{%- generation %}{{ loop.index }}/{{ loop.length }} {{ m.role | upper }}{% endgeneration %} {{ m.content }}
{%- for call in m.tool_calls or [] %}
{{ call.function.name }}({% for key, value in call.function.arguments.items() -%}
{{ key }}={{ value | tojson(indent=2) }}{% if not loop.last %}, {% endif %}{% endfor %})
{%- endfor %}
{%- endfor %} {{ ns.last }} {{ documents | length if documents else 'none' }} {{ 'x' * 3 }} {{ [1, 2] + [3] }}
{%- if enable_thinking is defined and not enable_thinking %} quiet{% endif %}
"""
TALK = [
    {"role": "user", "content": "Hi  there\n"},
    {"role": "assistant", "content": ' Hello <b>&amp;</b> "you"  '},
    {"role": "user", "content": "日本 🎉"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"ü": "<&>"}}}]


@pytest.fixture
def tokenizer_with(from_metadata: Callable[[dict[str, Any]], Tokenizer]) -> Callable[[str], Tokenizer]:
    return lambda template: from_metadata(byte_level() | {"tokenizer.chat_template": template})


def transformers_with(template: str) -> Any:
    """A transformers tokenizer with that template and the same special tokens."""
    transformers = pytest.importorskip("transformers")
    import tokenizers

    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|s|>", eos_token="<|end|>"
    )
    theirs.chat_template = template
    return theirs


@pytest.mark.parametrize("template", [CHATML, STRIPPING, ALTERNATING, WITH_TOOLS])
def test_renders_as_transformers_does(template: str, tokenizer_with: Callable[[str], Tokenizer]) -> None:
    ours, theirs = tokenizer_with(template), transformers_with(template)
    calls = [
        {
            "id": "1",
            "type": "function",
            "function": {"name": "f", "arguments": {"a": [1, {"b": "ü"}], "c": None}},
        }
    ]
    talks = [TALK[:1], TALK[:2], TALK, [*TALK, {"role": "assistant", "content": "", "tool_calls": calls}]]
    for talk in talks:
        for prompt in (True, False):
            for extra in (
                {},
                {"tools": TOOLS},
                {"documents": [{"title": "t", "text": "x"}]},
                {"enable_thinking": False},
            ):
                expected = theirs.apply_chat_template(
                    talk, tokenize=False, add_generation_prompt=prompt, **extra
                )
                assert ours.apply_chat_template(talk, add_generation_prompt=prompt, **extra) == expected


@pytest.mark.parametrize("template", [CHATML, STRIPPING])
@pytest.mark.parametrize(
    "content",
    [
        "The capital is",
        "ends with spaces  ",
        "  starts so",
        "assistant",
        "",
        "\n",
        "<|im_end|>",
        "a",
        "ContinueFromHere",
        "user",
    ],
)
def test_continuing_ends_right_after_the_content(
    template: str, content: str, tokenizer_with: Callable[[str], Tokenizer]
) -> None:
    """Contents that also stand elsewhere in the template must not mislead it."""
    talk = [{"role": "user", "content": "assistant <|im_end|> a"}, {"role": "assistant", "content": content}]
    tokenizer = tokenizer_with(template)
    whole = tokenizer.apply_chat_template(talk, add_generation_prompt=False)
    text = tokenizer.apply_chat_template(talk, add_generation_prompt=False, continue_final_message=True)
    ending = "<|im_end|>\n" if template == CHATML else "</assistant>\n"
    assert text + ending == whole
    assert text.endswith(content if template == CHATML else content.strip())


def test_continuing_agrees_with_transformers(tokenizer_with: Callable[[str], Tokenizer]) -> None:
    for template in (CHATML, STRIPPING):
        ours, theirs = tokenizer_with(template), transformers_with(template)
        for content in ("The capital is", "ends with space ", "x"):
            talk = [TALK[0], {"role": "assistant", "content": content}]
            expected = theirs.apply_chat_template(talk, tokenize=False, continue_final_message=True)
            got = ours.apply_chat_template(talk, add_generation_prompt=False, continue_final_message=True)
            assert got == expected


def test_what_cannot_be_continued(tokenizer_with: Callable[[str], Tokenizer]) -> None:
    tokenizer = tokenizer_with(CHATML)
    with pytest.raises(RequestError, match="cannot both be true") as caught:
        tokenizer.apply_chat_template(TALK, add_generation_prompt=True, continue_final_message=True)
    assert caught.value.param == "continue_final_message"
    for template in (
        "{{ messages[0].content }}",
        "{{ messages[-1].content | upper }}",
        "{{ messages[-1].content[:3] }}",
    ):
        with pytest.raises(RequestError, match="does not print the last message's content"):
            tokenizer_with(template).apply_chat_template(TALK, False, True)
    called = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
    }
    with pytest.raises(RequestError, match="with tool calls cannot be continued"):
        tokenizer.apply_chat_template([*TALK, called], False, True)


def test_parts_become_one_text(tokenizer_with: Callable[[str], Tokenizer]) -> None:
    tokenizer = tokenizer_with(CHATML)
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, "c"]
    assert tokenizer.apply_chat_template(
        [{"role": "user", "content": parts}]
    ) == tokenizer.apply_chat_template([{"role": "user", "content": "a\nb\nc"}])
    empty = [{"role": "user", "content": []}]
    assert "user\n<|im_end|>" in tokenizer.apply_chat_template(empty)


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([], "at least one message"),
        ("text", "must be a list"),
        ({"role": "user"}, "must be a list"),
        ([3], "messages[0] is not an object"),
        ([{"content": "x"}], "messages[0]: 'role' is None"),
        ([{"role": 3, "content": "x"}], "messages[0]: 'role' is 3"),
        ([{"role": "user"}], "messages[0]: 'content' is missing"),
        ([TALK[0], {"role": "user", "content": 5}], "messages[1]: 'content' is neither"),
        ([{"role": "user", "content": {"type": "text"}}], "messages[0]: 'content' is neither"),
        (
            [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {}}],
                }
            ],
            "messages[0].content[1] is a part of type 'image_url'; this model takes text parts only",
        ),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            "messages[0].content[0] is a part of type 'text'",
        ),
        ([{"role": "user", "content": [{"type": ["text"]}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [None]}], "messages[0].content[0] is a part of type None"),
        (
            [{"role": "assistant", "content": "", "tool_calls": "x"}],
            "messages[0]: 'tool_calls' is not a list",
        ),
        ([{"role": "assistant", "content": "", "tool_calls": [3]}], "a tool call has no 'function'"),
    ],
)
def test_malformed_messages_are_named(
    messages: Any, expected: str, tokenizer_with: Callable[[str], Tokenizer]
) -> None:
    with pytest.raises(RequestError) as caught:
        tokenizer_with(CHATML).apply_chat_template(messages)
    assert expected in str(caught.value)
    assert caught.value.param == "messages"


def test_an_assistant_turn_of_calls_alone(tokenizer_with: Callable[[str], Tokenizer]) -> None:
    template = (
        "{% for c in messages[0].tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}"
        "{{ messages[0].content }}"
    )
    tokenizer = tokenizer_with(template)
    for arguments, shown in [
        ('{"a": 1}', '{"a": 1}'),
        ("", "{}"),
        (None, "{}"),
        ("{broken", '"{broken"'),
        ("[1]", '"[1]"'),
    ]:
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
        assert tokenizer.apply_chat_template(messages) == shown
        assert call["function"]["arguments"] == arguments


def test_the_callers_messages_are_left_alone(tokenizer_with: Callable[[str], Tokenizer]) -> None:
    messages = json.loads(
        json.dumps([*TALK, {"role": "assistant", "content": [{"type": "text", "text": "x"}]}])
    )
    before = json.dumps(messages)
    tokenizer_with(CHATML).apply_chat_template(messages, False, True)
    assert json.dumps(messages) == before


def test_a_model_without_a_template(from_metadata: Callable[[dict[str, Any]], Tokenizer]) -> None:
    tokenizer = from_metadata(byte_level())
    assert tokenizer.chat_template is None
    with pytest.raises(RequestError, match="has no chat template") as caught:
        tokenizer.apply_chat_template(TALK)
    assert caught.value.code == "no_chat_template"
    assert "as chat_template" in str(caught.value) and "/v1/completions" in str(caught.value)
    assert tokenizer.apply_chat_template(TALK, chat_template=CHATML).startswith(
        "<|im_start|>user\nHi  there\n<|im_end|>"
    )


def test_variables_of_the_request(tokenizer_with: Callable[[str], Tokenizer]) -> None:
    tokenizer = tokenizer_with("{{ mood }} {{ eos_token }}")
    assert tokenizer.apply_chat_template(TALK, mood="good") == "good <|end|>"
    with pytest.raises(RequestError, match="'messages' is set by the request itself"):
        ChatTemplate(CHATML).render([], variables={"messages": []})


def test_templates_speak_through_errors(tokenizer_with: Callable[[str], Tokenizer]) -> None:
    with pytest.raises(RequestError, match="refused the messages: roles must alternate user/assistant"):
        tokenizer_with(ALTERNATING).apply_chat_template(TALK[:1] * 2)
    for template, expected in [
        ("{{ messages[0].content.nothing.more }}", "has no attribute 'nothing'"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[0].content + 3 }}", "TypeError"),
        ("{{ undefined_function() }}", "'undefined_function' is undefined"),
        ("{% for x in 5 %}{% endfor %}", "TypeError"),
    ]:
        with pytest.raises(RequestError) as caught:
            tokenizer_with(template).apply_chat_template(TALK)
        assert expected in str(caught.value)


def test_a_template_that_does_not_parse_is_an_error_of_chats_alone(
    tokenizer_with: Callable[[str], Tokenizer],
) -> None:
    tokenizer = tokenizer_with("line\n{% if %}")
    assert tokenizer.encode("text")
    with pytest.raises(RequestError, match="does not parse in line 2"):
        tokenizer.apply_chat_template(TALK)
    for source in ("{% include 'x' %}", "{% import 'os' as os %}", "{% extends 'x' %}"):
        with pytest.raises(RequestError, match="no loader for this environment"):
            tokenizer_with(source).apply_chat_template(TALK)


def test_several_threads_share_a_template(tokenizer_with: Callable[[str], Tokenizer]) -> None:
    tokenizer, results = tokenizer_with(CHATML), []
    threads = [
        threading.Thread(
            target=lambda n=n: results.append(
                (n, tokenizer.apply_chat_template([{"role": "user", "content": str(n)}]))
            )
        )
        for n in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(f"user\n{n}<" in text for n, text in results)
    assert len(results) == 20


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("tools", 5), ("tools", "x"), ("tools", {"a": 1}), ("tools", [object()]), ("tools", 0),
        ("documents", 5), ("documents", ["x"]), ("chat_template", 5),
    ],
)  # fmt: skip
def test_arguments_of_the_wrong_type(
    name: str, wrong: Any, tokenizer_with: Callable[[str], Tokenizer]
) -> None:
    with pytest.raises(RequestError, match=name) as caught:
        tokenizer_with(CHATML).apply_chat_template(TALK, **{name: wrong})
    assert caught.value.param == name
