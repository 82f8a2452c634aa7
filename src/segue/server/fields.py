"""The bodies of requests. Every field here works; one that is not here, or has a value we cannot honour, is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticUseDefault

from segue.base.errors import InvalidRequest
from segue.base.types import MAX_WIDTH, BeamParams, SamplingParams

MAX_PROMPTS = 256
MAX_NAMES = 10_000
MAX_MESSAGES = 10_000  # of one request, and parts of one message
_MAX_DEPTH = 100  # of lists and objects in each other; what walks them later needs stack for it
_NESTED = (dict, list)
_encode = msgspec.json.Encoder().encode

_Entry = TypeVar("_Entry")
Listed = Annotated[list[_Entry], Field(fail_fast=True)]  # one wrong entry is enough: a million would each be reported
TokenIds = Listed[Annotated[int, Field(ge=0, lt=2**31)]]
ForkPoint = Annotated[int, Field(ge=-(2**63), lt=2**63)] | Literal["now"] | None
Stop = str | Annotated[Listed[str], Field(max_length=64)] | None


def _use_default(value: Any) -> Any:
    """OpenAI's schema allows null for some fields that have a default, and clients send it."""
    if value is None:
        raise PydanticUseDefault
    return value


OrNull = BeforeValidator(_use_default)


def at_most(count: int) -> BeforeValidator:
    """For objects, whose entries would all be looked at before they are counted."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > count:
            raise ValueError(f"has {len(value)} entries: at most {count} are taken")
        return value

    return BeforeValidator(check)


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _check_values(cls, data: Any) -> Any:
        """Python reads more as JSON than can be written again: to the engine, to a template, or into an answer. Of names that
        are not known only the first is left, since one is enough to be refused for."""
        if isinstance(data, dict):
            known = cls.model_fields
            unknown = next((name for name in data if name not in known), None)
            data = {name: value for name, value in data.items() if name in known or name == unknown}
            for name, value in data.items():
                if (problem := _unwritable(name)) is not None:
                    raise ValueError(f"body: {problem}")
                if (problem := _unwritable(value)) is not None:
                    raise ValueError(f"{name}: {problem}")
        return data


def _unwritable(value: Any) -> str | None:
    """What is wrong with a value that JSON was read into."""
    try:
        data = _encode(value)
    except UnicodeEncodeError:
        return "has text that is not Unicode: half of a surrogate pair"
    except RecursionError:
        return "is nested too deeply"
    if data.count(b"[") + data.count(b"{") > _MAX_DEPTH and _is_deep(value):
        return f"is nested more than {_MAX_DEPTH} levels deep"
    return None


def _is_deep(value: Any) -> bool:
    level = [value] if isinstance(value, _NESTED) else []
    for _ in range(_MAX_DEPTH):
        inner = (node.values() if isinstance(node, dict) else node for node in level)
        level = [node for nodes in inner for node in nodes if isinstance(node, _NESTED)]
    return bool(level)


# What the engine calls a part of a request, and what bodies do: of these, the one that a body gives is meant.
_CALLED = {
    "at": ("fork_at",),
    "parent": ("continuation_of", "previous_response_id"),
    "suffix": ("continuation_token_ids", "continuation_suffix", "messages", "input"),
    "prompt": ("prompt", "messages", "input", "continuation_token_ids", "continuation_suffix", "continuation_of"),
    "messages": ("messages", "input"),
    "max_tokens": ("max_completion_tokens", "max_output_tokens", "max_tokens"),
    "hold": ("hold_seconds",),
    "width": ("beam_width", "n"),
    "then.suffix": ("suffix",),
    "then.rest": ("suffix",),
    "beam.stop_token_ids": ("stop_token_ids",),
    "beam.allowed_token_ids": ("allowed_token_ids",),
}


class StateFields(Body):
    """What Segue adds to any request that generates. People also post these inside a literal `extra_body` object."""

    continuation_of: str | None = Field(None, min_length=1, description="id of the state or request to go on from")
    continuation_suffix: str | None = Field(None, description="text that follows it")
    continuation_token_ids: TokenIds | None = Field(None, description="the same as token ids")
    fork_at: ForkPoint = Field(None, description="keep only so many of the parent's tokens")
    job_id: str | None = Field(None, min_length=1, max_length=256, description="the job this turn belongs to")
    is_last_step: bool = Field(False, description="after this turn nothing of the job is held")
    hold_seconds: float | None = Field(None, ge=0, le=1e9, description="keep the answer's KV for so long")
    priority: int = Field(0, ge=-(2**31), lt=2**31, description="the smallest runs first")
    cache_salt: str = Field("", max_length=256, description="KV is shared only with the same salt")

    @model_validator(mode="before")
    @classmethod
    def _unpack_extra_body(cls, data: Any) -> Any:
        if not isinstance(data, dict) or not isinstance(data.get("extra_body"), dict):
            return data
        extra = data["extra_body"]
        twice = next((name for name in extra if name in data and _unwritable(name) is None), None)
        if twice is not None:
            raise ValueError(f"{twice}: given both in extra_body and beside it")
        return {name: value for name, value in data.items() if name != "extra_body"} | extra

    @model_validator(mode="after")
    def _check_state_fields(self) -> StateFields:
        if self.continuation_of is None:
            for name in ("continuation_suffix", "continuation_token_ids", "fork_at"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name}: is for a continuation: give continuation_of")
        if self.continuation_suffix is not None and self.continuation_token_ids is not None:
            raise ValueError("continuation_suffix: give it or continuation_token_ids, not both")
        if self.is_last_step and self.job_id is None:
            raise ValueError("is_last_step: ends a job: give job_id")
        if self.is_last_step and self.hold_seconds:
            raise ValueError("hold_seconds: nothing is held after the last step of a job")
        return self

    @contextmanager
    def naming(self) -> Iterator[None]:
        """A refusal within names the field that the client sent."""
        try:
            yield
        except InvalidRequest as error:
            raise type(error)(self.called(error.field), str(error).removeprefix(f"{error.field}: ")) from error

    def called(self, field: str) -> str:
        return next((name for name in _CALLED.get(field, ()) if getattr(self, name, None) is not None), field)

    @property
    def has_suffix(self) -> bool:
        return self.continuation_suffix is not None or self.continuation_token_ids is not None


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: Literal[False] = False


class GenerationFields(StateFields):
    """What completions and chat have in common."""

    model: str | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int = Field(0, ge=-1, lt=2**31)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0, le=100)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[dict[str, float] | None, at_most(1024)] = Field(None, max_length=1024)
    seed: int | None = Field(None, ge=0, lt=2**63)
    n: Annotated[int, OrNull] = Field(1, ge=1, le=128)
    stop: Stop = None
    stop_token_ids: TokenIds = Field(default_factory=list, max_length=64)
    allowed_token_ids: TokenIds = Field(default_factory=list, description="nothing else is ever sampled")
    include_stop_str_in_output: bool = False
    min_tokens: int = Field(0, ge=0, lt=2**31)
    ignore_eos: bool = False
    stream: Annotated[bool, OrNull] = False
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="who it is for; appears in the log", max_length=256)

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, stop: Stop) -> Stop:
        if stop == "" or (isinstance(stop, list) and "" in stop):
            raise ValueError("a stop string must not be empty")
        return stop

    @model_validator(mode="after")
    def _check_stream_options(self) -> GenerationFields:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: is for streams: set stream")
        return self

    def params(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        bias = {}
        for token, value in (self.logit_bias or {}).items():
            if not token.isascii() or not token.isdigit() or len(token) > 9:
                raise InvalidRequest("logit_bias", f"{token!r:.40} is not a token id")
            bias[int(token)] = value
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k, 0),
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=bias,
            seed=self.seed,
            n=self.n,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids),
            allowed_token_ids=tuple(self.allowed_token_ids),
            ignore_eos=self.ignore_eos,
            include_stop=self.include_stop_str_in_output,
            logprobs=logprobs,
        )


class BeamFields(Body):
    """A beam search; see `BeamParams`."""

    length_penalty: float = Field(1.0, ge=-10, le=10)
    early_stopping: bool | Literal["never"] = False
    catalogue: str | None = Field(None, description="name of the catalogue whose items are sought")
    allow: Listed[str] | None = Field(None, max_length=MAX_NAMES, description="of those, only these")
    deny: Listed[str] = Field(default_factory=list, max_length=MAX_NAMES, description="of those, none of these")
    scoring: Literal["full", "legal"] = Field("full", description="what log-probabilities are taken over")

    def beam(self, **more: Any) -> BeamParams:
        allow = None if self.allow is None else tuple(self.allow)
        return BeamParams(
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
            catalogue=self.catalogue,
            allow=allow,
            deny=tuple(self.deny),
            scoring=self.scoring,
            **more,
        )


class BeamBody(BeamFields):
    width: int = Field(32, ge=1, le=MAX_WIDTH)
    max_tokens: int | None = Field(None, ge=1, lt=2**31, description="default: as many as an item of the catalogue has")
    n: int | None = Field(None, ge=1, le=MAX_WIDTH, description="how many to return (default: all)")
    temperature: float = Field(0.0, ge=0, le=100, description="above 0, lines are drawn")
    seed: int | None = Field(None, ge=0, lt=2**63)
    stop_token_ids: TokenIds = Field(default_factory=list, max_length=64)
    ignore_eos: bool = False
    allowed_token_ids: TokenIds = Field(default_factory=list)
    merge: Literal["best", "sum"] = Field("best", description="the score of what several thoughts led to")

    def params(self) -> BeamParams:
        return self.beam(
            width=self.width,
            max_tokens=self.max_tokens,
            n=self.n,
            temperature=self.temperature,
            seed=self.seed,
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            allowed_token_ids=tuple(self.allowed_token_ids),
            merge=self.merge,
        )


class ThinkBody(Body):
    """How a thought is sampled."""

    n: int = Field(1, ge=1, le=128, description="thoughts, each with a search of its own")
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, lt=2**31)
    min_p: float = Field(0.0, ge=0, le=1)
    seed: int | None = Field(None, ge=0, lt=2**63)
    stop: Stop = None
    stop_token_ids: TokenIds = Field(default_factory=list, max_length=64)
    ignore_eos: bool = False

    def params(self) -> SamplingParams:
        return SamplingParams(
            n=self.n,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
        )


class RecommendBody(StateFields):
    """Think if asked to, then search."""

    model: str | None = None
    prompt: str | Annotated[TokenIds, Field(min_length=1)] | None = None
    think: ThinkBody | None = None
    suffix: str | TokenIds = Field("", description="between a thought and the search")
    beam: BeamBody
    user: str | None = Field(None, description="who it is for; appears in the log", max_length=256)

    @model_validator(mode="after")
    def _check_prompt(self) -> RecommendBody:
        if self.continuation_of is None and self.prompt in (None, ""):
            raise ValueError("prompt: is missing: give a prompt, or continuation_of")
        if self.continuation_of is not None and self.prompt is not None:
            raise ValueError("prompt: what follows a parent is continuation_suffix or continuation_token_ids")
        if self.suffix and self.think is None:
            raise ValueError("suffix: follows a thought, and none is asked for: put it at the end of the prompt")
        return self

    def called(self, field: str) -> str:
        name = super().called(field)
        return f"beam.{name}" if name in BeamBody.model_fields and name not in RecommendBody.model_fields else name


_NEUTRAL: dict[str, tuple[Any, ...]] = {  # values of fields for sampling that ask for nothing
    "top_p": (None, 1),
    "top_k": (0, -1),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "stop": (None, []),
    "min_tokens": (0,),
    "include_stop_str_in_output": (False,),
}


class CompletionBody(GenerationFields, BeamFields):
    prompt: (
        str
        | Annotated[Listed[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[TokenIds, Field(min_length=1)]
        | Annotated[Listed[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)]
        | None
    ) = None
    max_tokens: int | None = Field(16, ge=1, lt=2**31)
    logprobs: int | None = Field(None, ge=0, le=100)
    echo: Annotated[bool, OrNull] = False
    best_of: int | None = Field(None, ge=1, le=128)
    use_beam_search: bool = Field(False, description="answers are the n best lines of a search")
    beam_width: int | None = Field(None, ge=1, le=MAX_WIDTH, description="lines at a time (default: n)")
    suffix: Literal[None] = Field(None, description="text after the completion; not supported")

    @model_validator(mode="after")
    def _check_prompt(self) -> CompletionBody:
        if self.continuation_of is None and self.prompt in (None, ""):
            raise ValueError("prompt: is missing: give a prompt, or continuation_of")
        if self.continuation_of is not None and self.prompt is not None:
            raise ValueError("prompt: what follows a parent is continuation_suffix or continuation_token_ids")
        if self.best_of not in (None, self.n):
            raise ValueError("best_of: answers are not ranked here: leave it out, or equal to n")
        if self.echo and self.logprobs is not None:
            raise ValueError("echo: log-probabilities of a prompt are not computed: leave out echo or logprobs")
        self._check_search()
        return self

    def _check_search(self) -> None:
        given = self.model_fields_set
        if not self.use_beam_search:
            if wrong := sorted(given & {"beam_width", *BeamFields.model_fields}):
                raise ValueError(f"{wrong[0]}: is for searches: set use_beam_search")
            return
        if wrong := [name for name, neutral in _NEUTRAL.items() if getattr(self, name) not in neutral]:
            raise ValueError(f"{wrong[0]}: is for sampling, and a beam search samples nothing: leave it out")
        if self.logprobs:
            raise ValueError("logprobs: a search gives those of its own tokens alone: 0, or leave it out")
        if self.beam_width is not None and self.beam_width < self.n:
            raise ValueError(f"beam_width: {self.beam_width} lines, and n={self.n} are wanted")

    def search(self) -> BeamParams:
        return self.beam(
            width=self.beam_width or self.n,
            n=self.n,
            max_tokens=self.max_tokens if "max_tokens" in self.model_fields_set or self.catalogue is None else None,
            temperature=self.temperature or 0.0,
            seed=self.seed,
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            allowed_token_ids=tuple(self.allowed_token_ids),
        )


class FunctionDefinition(BaseModel):
    """Goes to the chat template as it is."""

    model_config = ConfigDict(extra="allow", strict=True)
    name: str = Field(min_length=1, max_length=256)


class Tool(Body):
    type: Literal["function"]
    function: FunctionDefinition


class ResponseFormat(Body):
    type: Literal["text"]


class Message(BaseModel):
    """Goes to the chat template; fields that templates know are checked, others pass."""

    model_config = ConfigDict(extra="allow", strict=True)
    role: str = Field(min_length=1, max_length=64)
    content: str | Annotated[Listed[dict[str, Any]], Field(max_length=MAX_MESSAGES)] | None = None
    tool_calls: Listed[dict[str, Any]] | None = Field(None, max_length=MAX_MESSAGES)
    tool_call_id: str | None = None


class ChatBody(GenerationFields):
    messages: Listed[Message] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: Listed[Tool] | None = Field(None, max_length=512)
    tool_choice: Literal["none", "auto"] | None = Field(
        None, description="calls are not forced here, so 'required' and a named function are refused"
    )
    parallel_tool_calls: Literal[True] | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict, max_length=64)

    @model_validator(mode="after")
    def _check_messages(self) -> ChatBody:
        if self.continuation_of is None and self.messages is None:
            raise ValueError("messages: is missing: give messages, or continuation_of")
        if self.messages is not None and self.has_suffix:
            raise ValueError("messages: give new messages or a suffix to follow the parent, not both")
        if self.messages is not None and self.fork_at is not None:
            raise ValueError("fork_at: goes with continuation_suffix or continuation_token_ids, not with messages")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: needs logprobs")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ValueError("max_tokens: differs from max_completion_tokens, which is its new name")
        return self


class TokenizeBody(Body):
    model: str | None = None
    prompt: str | None = None
    messages: Listed[Message] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    add_special_tokens: bool = True
    add_generation_prompt: bool = True

    @model_validator(mode="after")
    def _check_input(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: give a prompt or messages, one of them")
        if self.messages is not None and "add_special_tokens" in self.model_fields_set:
            raise ValueError("add_special_tokens: is for a prompt: the chat template writes those of messages itself")
        if self.prompt is not None and "add_generation_prompt" in self.model_fields_set:
            raise ValueError("add_generation_prompt: is for messages: a prompt goes through no template")
        return self


class DetokenizeBody(Body):
    model: str | None = None
    tokens: TokenIds


class ForkBody(Body):
    at: ForkPoint = Field(None, description="how many tokens to keep (default: all)")
    hold_seconds: float | None = Field(None, ge=0, le=1e9, description="None: until it is released")
    cache_salt: str = Field("", max_length=256)


class HoldBody(Body):
    seconds: float | None = Field(None, ge=0, le=1e9, description="None: until it is released")
    cache_salt: str = Field("", max_length=256)


class SaltBody(Body):
    cache_salt: str = Field("", max_length=256)


class SaveBody(SaltBody):
    name: str | None = Field(None, description="letters, digits, '-', '_' and '.' (default: the state's id)")


class LoadBody(SaltBody):
    name: str
    hold_seconds: float | None = Field(None, ge=0, le=1e9, description="None: until it is released")
