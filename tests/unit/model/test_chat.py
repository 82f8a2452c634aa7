"""A conversation renders as transformers renders it, and a template cannot do harm."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from segue.base.errors import InvalidRequest, ModelError
from segue.model.chat import CHATML, ChatTemplate, template_from_folder
from segue.model.loading import LoadedModel

TALK = [
    {"role": "user", "content": "Grüß Gott <b>&'\""},
    {"role": "assistant", "content": "日本 😀"},
    {"role": "user", "content": "go on"},
]
WITH_SYSTEM = [{"role": "system", "content": "be brief"}, *TALK]
TOOLS = [{"type": "function", "function": {"name": "größe", "parameters": {"type": "object", "properties": {}}}}]

FANCY = """
{%- if tools %}
    {{- bos_token }}tools: {{ tools | tojson }} {{ tools[0] | tojson(indent=2) }}
{%- endif %}
{% for message in messages %}
    {% if message.role == 'system' %}
        {% continue %}
    {% endif %}
    {% if loop.index > 3 %}{% break %}{% endif %}
  [{{ message.role | upper }}] {{ message.content | trim }}
    {% generation %}!{% endgeneration %}
{% endfor %}
{{ enable_thinking is defined }}
{%- if add_generation_prompt %}{{ '>' }}{% endif %}{{ eos_token }}
"""


def expected(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    edges = {"bos_token": "<s>", "eos_token": "</s>"}
    rendered, _ = render_jinja_template([messages], chat_template=source, **edges, **options)
    return rendered[0]


@pytest.mark.parametrize("source", [CHATML, FANCY], ids=["chatml", "fancy"])
@pytest.mark.parametrize("messages", [TALK, WITH_SYSTEM], ids=["plain", "system"])
@pytest.mark.parametrize("options", [{}, {"tools": TOOLS}, {"enable_thinking": False}], ids=["none", "tools", "option"])
@pytest.mark.parametrize("prompt", [True, False])
def test_renders_as_transformers(source: str, messages: Any, options: dict[str, Any], prompt: bool) -> None:
    ours = ChatTemplate(source, "<s>", "</s>").render(messages, prompt, **options)
    assert ours == expected(source, messages, add_generation_prompt=prompt, **options)


@pytest.mark.parametrize("messages", [TALK, WITH_SYSTEM], ids=["plain", "system"])
def test_smollm2_renders_as_transformers(smollm2: LoadedModel, messages: Any) -> None:
    source = smollm2.chat_template.source
    assert source is not None
    assert smollm2.chat_template.render(messages) == expected(source, messages, add_generation_prompt=True)
    assert "You are a helpful AI assistant named SmolLM" in smollm2.chat_template.render(TALK)


def test_time_is_the_callers() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", now=lambda: datetime(2031, 5, 4))
    assert template.render([]) == "04 May 2031"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0]['content'] + 1 }}", "concatenate"),
        ("{{ nothing.at.all }}", "undefined"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ range(10 ** 12) | list }}", "too big"),
    ],
)
def test_what_a_template_raises_is_the_requests_error(source: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as caught:
        ChatTemplate(source).render(TALK)
    assert caught.value.field == "messages"


def test_no_template_and_broken_template() -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        ChatTemplate(None).render(TALK)
    with pytest.raises(ModelError, match="cannot be parsed"):
        ChatTemplate("{% for %}").render(TALK)


def test_where_a_folder_keeps_its_template(tmp_path: Path) -> None:
    config = tmp_path / "tokenizer_config.json"
    assert template_from_folder(tmp_path, "", "").source is None
    config.write_text(json.dumps({"chat_template": "one {{ bos_token }}"}))
    assert template_from_folder(tmp_path, "<s>", "").render([]) == "one <s>"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with {{ tools | length }}"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert template_from_folder(tmp_path, "", "").render([]) == "plain"
    assert template_from_folder(tmp_path, "", "").render([], tools=TOOLS) == "with 1"
    (tmp_path / "chat_template.jinja").write_text("from its own file")
    assert template_from_folder(tmp_path, "", "").render([]) == "from its own file"


@pytest.mark.parametrize("value", [7, [7], [{"name": "default"}]])
def test_template_of_the_wrong_kind(tmp_path: Path, value: Any) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    with pytest.raises(ModelError, match="chat_template"):
        template_from_folder(tmp_path, "", "")
