"""Chat messages to prompt text, by the template the model came with.

A template is code from a stranger: it runs in jinja's sandbox, and whatever it raises is the request's error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from segue.base.errors import InvalidRequest, ModelError
from segue.model.json_file import read_json

if TYPE_CHECKING:
    import jinja2

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_NO_TEMPLATE = "this model has no chat template; send it a plain prompt instead."


class ChatTemplate:
    """Renders conversations as transformers' `apply_chat_template` does. `source` None makes every render an error."""

    def __init__(
        self,
        source: str | None,
        bos: str = "",
        eos: str = "",
        *,
        named: Mapping[str, str] | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.source = source
        self.bos = bos
        self.eos = eos
        self._named = dict(named or {})
        self._now = now

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> str:
        """`options` are passed to the template as they are (`enable_thinking`, `documents`, ...)."""
        if self.source is None:
            raise InvalidRequest("messages", _NO_TEMPLATE)
        template = self._with_tools if tools and "tool_use" in self._named else self._plain
        try:
            return template.render(
                messages=messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                bos_token=self.bos,
                eos_token=self.eos,
                **options,
            )
        except Exception as error:
            raise InvalidRequest("messages", f"the model's chat template refused them: {error}") from error

    @cached_property
    def _plain(self) -> jinja2.Template:
        return self._compiled(self.source or "")

    @cached_property
    def _with_tools(self) -> jinja2.Template:
        return self._compiled(self._named["tool_use"])

    def _compiled(self, source: str) -> jinja2.Template:
        from jinja2 import TemplateSyntaxError

        try:
            return _environment(self._now).from_string(source)
        except (TemplateSyntaxError, RecursionError) as error:
            raise ModelError(f"the model's chat template cannot be parsed: {error}.") from error


def template_from_folder(folder: Path, bos: str, eos: str) -> ChatTemplate:
    """`chat_template.jinja` wins over the `chat_template` of `tokenizer_config.json`, as in transformers."""
    alone = folder / "chat_template.jinja"
    if alone.is_file():
        try:
            return ChatTemplate(alone.read_text(encoding="utf-8"), bos, eos)
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{alone.name} cannot be read: {error}.") from error
    config = folder / "tokenizer_config.json"
    source = read_json(config).get("chat_template") if config.is_file() else None
    if isinstance(source, list):
        named = _named_templates(source)
        return ChatTemplate(named.get("default"), bos, eos, named=named)
    if source is not None and not isinstance(source, str):
        raise ModelError(f"chat_template must be a text or a list of named texts, not {type(source).__name__}.")
    return ChatTemplate(source, bos, eos)


def _named_templates(entries: list[Any]) -> dict[str, str]:
    named: dict[str, str] = {}
    for entry in entries:
        name, source = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(source, str):
            raise ModelError("chat_template is a list, and each entry needs a name and a template.")
        named[name] = source
    return named


def _environment(now: Callable[[], datetime]) -> jinja2.Environment:
    from jinja2 import ext, nodes
    from jinja2.exceptions import TemplateError
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(ext.Extension):
        """`{% generation %}` marks assistant text for training; here its body is simply rendered."""

        tags = {"generation"}  # noqa: RUF012 - jinja declares it so

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which a prompt must not have."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
