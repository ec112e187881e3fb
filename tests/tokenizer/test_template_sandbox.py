"""Hostile templates: no way out of the sandbox, and an end in bounded time and memory."""

from __future__ import annotations

import resource
import time
from typing import Any

import pytest

from headrace.errors import RequestError
from headrace.tokenizer import template_budget
from headrace.tokenizer.template_sandbox import compile_template, render_template


def render(source: str, **context: Any) -> str:
    return render_template(compile_template(source), context)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ ''['__class__'] }}",
        "{{ (''|attr('__class__')).__mro__ }}",
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__['__builtins__'] }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ self.__init__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ ''.format.__globals__ }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ '{a.__class__}'.format_map({'a': 1}) }}",
        "{{ messages.append(1) }}",
        "{{ messages.clear() }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ (messages|map(attribute='__class__')|list)[0].mro() }}",
        "{% macro m() %}{% endmacro %}{{ m.__globals__ }}",
        "{{ dict.__base__.__subclasses__() }}",
        "{{ joiner.__init__.__globals__ }}",
        "{{ loop_.__class__ if false else caller.__class__.x }}",
    ],
)
def test_no_way_out(source: str) -> None:
    messages = [{"role": "user", "content": "x"}]
    try:
        text = render(source, messages=messages)
    except RequestError:
        pass
    else:
        assert "class" not in text and "object" not in text and "module" not in text, text
    assert messages == [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{{ b }}{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for a in range(99999) %}{{ range(99999) | list | length }}{% endfor %}",
        "{% for a in range(99999) %}{{ range(99999) | sum }}{% endfor %}",
        "{% for a in range(99999) %}{% set x = range(99999) | map('string') | join %}{% endfor %}",
        "{% set n = namespace(t='xxxxxxxx') %}{% for a in range(99) %}{% set n.t = n.t ~ n.t %}{% endfor %}",
        "{% set n = namespace(t='xxxxxxxx') %}{% for a in range(99) %}{% set n.t = n.t + n.t %}{% endfor %}",
        "{% set n = namespace(t=[1]) %}{% for a in range(99) %}{% set n.t = n.t + n.t %}{% endfor %}",
        "{% set n = namespace(t='x') %}{% for a in range(99) %}{% set n.t = n.t | replace('x', 'xxxx') %}{% endfor %}",
        "{% set n = namespace(t='x') %}{% for a in range(99) %}{% set n.t = n.t.replace('x', 'xxxx') %}{% endfor %}",
        "{% set n = namespace(t='x') %}{% for a in range(99) %}{% set n.t = [n.t, n.t] | join(n.t) %}{% endfor %}",
        "{% set n = namespace(t='x') %}{% for a in range(99) %}{% set n.t = n.t.join([n.t, n.t]) %}{% endfor %}",
        "{% set n = namespace(t='x') %}{% for a in range(99) %}{% set n.t = '%s%s' % (n.t, n.t) %}{% endfor %}",
        "{% set n = namespace(t='x') %}{% for a in range(99) %}{% set n.t = '{0}{0}{0}'.format(n.t) %}{% endfor %}",
        "{% set n = namespace(t='x') %}{% for a in range(99) %}{% set n.t %}{{ n.t }}{{ n.t }}{% endset %}{% endfor %}",
        "{{ 'x' * 9999999999 }}",
        "{{ [1] * 9999999999 }}",
        "{{ 9999999999 * 'x' }}",
        "{{ 'x'.ljust(9999999999) }}",
        "{{ 'x'.zfill(9999999999) }}",
        "{{ 'x'.center(9999999999) }}",
        "{{ 'a\\tb'.expandtabs(9999999999) }}",
        "{{ 'x' | center(9999999999) }}",
        "{{ 'x\\ny' | indent(9999999999) }}",
        "{{ ('x\\n' * 999999) | indent(999999) }}",
        "{{ ('x\\n' * 99999) | indent('y' * 99999) }}",
        "{{ ('x' * 999999) | wordwrap(1) }}",
        "{{ ('\\t' * 999999).expandtabs(999999) }}",
        "{{ ('x' * 999999).translate({120: 'y' * 99999}) }}",
        "{{ ('x' * 999999) | wordwrap(width=100) }}",
        "{{ ('x y ' * 99999) | wordwrap(1, wrapstring='z' * 99999) }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ '%*d' % (9999999999, 1) }}",
        "{{ '%9999999999d' | format(1) }}",
        "{{ '{:9999999999}'.format(1) }}",
        "{{ '{:{w}}'.format(1, w=9999999999) }}",
        "{{ range(9999999999) | list }}",
        "{% set n = namespace(t=9) %}{% for a in range(99) %}{% set n.t = n.t ** 9 %}{% endfor %}",
        "{% set n = namespace(t=9) %}{% for a in range(99) %}{% set n.t = n.t * n.t %}{% endfor %}",
        "{% set n = namespace(t=1) %}{% for a in range(99) %}{% set n.t = [n.t, n.t] %}{% endfor %}{{ n.t }}",
        "{% set n = namespace(t=1) %}{% for a in range(99) %}{% set n.t = [n.t, n.t] %}{% endfor %}{{ n.t ~ '' }}",
        "{% set n = namespace(t=1) %}{% for a in range(99) %}{% set n.t = [n.t, n.t] %}{% endfor %}{{ n.t | tojson }}",
        "{% set n = namespace(t=1) %}{% for a in range(99) %}{% set n.t = {1: n.t, 2: n.t} %}{% endfor %}{{ n.t }}",
        "{% set n = namespace(t=1) %}{% for a in range(99) %}{% set n.t = (n.t, n.t) %}{% endfor %}{{ '%s' % (n.t,) }}",
        "{% set n = namespace(t=1) %}{% for a in range(99) %}{% set n.t = [n.t, n.t] %}{% endfor %}{{ n.t | join }}",
        "{{ ('x' * 99999) | replace('x', 'y' * 99999) }}",
        "{{ ('x' * 99999).replace('x', 'y' * 99999) }}",
        "{{ ('x' * 99999).join(['y'] * 99999) }}",
        "{{ (['y'] * 99999) | join('x' * 99999) }}",
        "{{ ('%s' * 999) % (['x' * 999999] * 999) | list }}",
        "{{ 9 ** 9999999999 }}",
        "{{ ([1] * 99999999) | length }}",
        "{% set n = namespace(t=[1]) %}{% for a in range(26) %}{% set n.t = n.t + n.t %}{% endfor %}",
        "{{ lipsum(n=99999) }}",
        "{% for x in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
        "{{ [1, 2, 3] | batch(9999999999, 'x') | list }}",
    ],
)
def test_an_end_in_time_and_memory(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_budget, "MAX_RENDER_CPU_S", 0.3)
    started = time.thread_time()
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(RequestError):
        render(source, messages=[])
    assert time.thread_time() - started < 3
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 1_500_000


def test_the_next_rendering_starts_afresh() -> None:
    with pytest.raises(RequestError):
        render("{{ 'x' * 9999999999 }}")
    assert render("{{ 'x' * 3 }}") == "xxx"


def test_honest_templates_have_room() -> None:
    """Ten thousand messages, ten megabytes, numbers and braces in the text: no limit is near."""
    source = "{% for m in messages %}{{ '<' + m.role + '>' + (m.content | trim) + '\n' }}{% endfor %}"
    many = [{"role": "user", "content": f"{{{n:09}}} 100% 12345678901 "} for n in range(10_000)]
    assert render(source, messages=many).count("<user>") == 10_000
    big = [{"role": "user", "content": "0123456789" * 1_000_000}]
    assert len(render(source, messages=big)) == 10_000_007
    assert render("{{ messages.strip() }}", messages=" {12345678} ") == "{12345678}"
    assert (
        render("{{ 123456789012 | tojson }}{{ messages | string }}", messages=12345678901)
        == "12345678901212345678901"
    )
    assert render("{{ '%s' % messages }}", messages="9" * 50) == "9" * 50
    assert render("{{ '%d' % messages }}", messages=12345678901) == "12345678901"
    assert render("{{ '{:,}'.format(messages) }}", messages=12345678901) == "12,345,678,901"


def test_what_templates_rely_on() -> None:
    assert render("a\n{% if true %}\n  b\n    {% endif %}\nc") == "a\n  b\nc"
    skipping = "{% if x == 2 %}{% continue %}{% elif x == 4 %}{% break %}{% endif %}{{ x }}"
    assert render("{% for x in [1,2,3,4] %}" + skipping + "{% endfor %}") == "13"
    assert render("{% for x in [] %}{% else %}none{% endfor %}") == "none"
    assert (
        render(
            "{% for x in y %}{{ loop.length }}{{ loop.revindex }}{{ loop.previtem }}|{% endfor %}", y=[1, 2]
        )
        == "22|211|"
    )
    assert render("{{ {'b': '<ü>', 'a': 1} | tojson }}") == '{"b": "<ü>", "a": 1}'
    assert render("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, indent=1) }}") == '{\n "a": 2,\n "b": 1\n}'
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == 10
    assert render("{% generation %}x{{ 1 }}{% endgeneration %}") == "x1"
    assert render("{{ x ~ 1 ~ none ~ undefined_name }}", x="a") == "a1None"
    assert render("{% set n = namespace(a=1) %}{% set n.a = n.a + 1 %}{{ n.a }}") == "2"
    assert render("{{ dict(a=1) }}{{ [3, 1] | sort }}{{ 'a,b'.split(',') }}") == "{'a': 1}[1, 3]['a', 'b']"
    assert render("{{ 2 ** 10 }} {{ 7 % 4 }} {{ '%05.1f' % 3.14159 }}") == "1024 3 003.1"
    assert render("{% filter upper %}a{{ 'b' }}{% endfilter %}") == "AB"
