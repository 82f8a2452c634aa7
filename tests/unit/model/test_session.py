"""A session computes on the tokens of the whole conversation tokenised anew, and on no more of them than it must."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from segue import (
    Engine,
    EngineConfig,
    EngineCore,
    FinishReason,
    InvalidRequest,
    SamplingParams,
    SnapshotError,
    StateError,
    StepFailed,
)
from segue.engine import StepPlan, StepResult
from segue.model.chat import CHATML, ChatTemplate
from segue.model.loading import LoadedModel
from segue.model.session import Session
from segue.model.tiny import random_weights, tiny_spec
from segue.model.tokenized_text import TokenizedText, common_prefix
from segue.model.tokenizer import ByteTokenizer, TextTokenizer, Tokenizer
from segue.model.weights import Weights, fingerprint
from tests.fakes import VOCAB, FakeExecutor

LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
    "message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LLAMA3_SPECIALS = ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>")
PLAIN = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
FORGETS_THOUGHTS = (
    "{% set last = namespace(user=0) %}{% for message in messages %}{% if message.role == 'user' %}"
    "{% set last.user = loop.index0 %}{% endif %}{% endfor %}{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if loop.index0 > last.user %}{{ message.content }}{% else %}{{ message.content.split('</think>')[-1] }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
CORPUS = [
    "the user said hello to the assistant, and the assistant said hello there\n\nuser\nassistant\nsystem",
    "a.<|im_start|> b <|im_end|>. c><|im_end|>\n<|im_start|>user\n <|im_end|>user<|x|><|",
] * 4
A, EOS = ord("a"), 259  # of the byte tokenizer


# Vocabularies


def trained(
    specials: tuple[str, ...] = ByteTokenizer.SPECIALS, kind: str = "byte level", **flags: bool
) -> TextTokenizer:
    """A small vocabulary with merges. `flags` are those of its special tokens."""
    from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Backend

    added = [AddedToken(special, special=True, **flags) for special in specials]
    if kind.startswith("byte level"):
        backend = Backend(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=kind.endswith("with spaces"))
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        if kind.endswith("composed"):
            backend.normalizer = normalizers.NFC()
    else:
        backend = Backend(models.BPE(unk_token="<unk>", byte_fallback=True))
        alphabet = []
        if kind == "sentencepiece":
            backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        else:
            backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind.split()[-1], split=False)
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        added += [AddedToken(f"<0x{byte:02X}>", special=False) for byte in range(256)]
        added.append(AddedToken("<unk>", special=True))
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=added, initial_alphabet=alphabet, show_progress=False, min_frequency=1
    )
    backend.train_from_iterator(CORPUS, trainer)
    ends = [backend.token_to_id(name) for name in ("<|eot_id|>", "<|im_end|>", "<|endoftext|>")]
    bos = backend.token_to_id(specials[0])
    return TextTokenizer(backend, bos_id=bos, eos_ids=[end for end in ends if end is not None])


VOCABULARIES: dict[str, Any] = {
    "bytes": ByteTokenizer,
    "byte level": trained,
    "byte level with spaces": lambda: trained(kind="byte level with spaces"),
    "byte level composed": lambda: trained(kind="byte level composed"),
    "composed, looked for afterwards": lambda: trained(kind="byte level composed", normalized=True),
    "eats space before": lambda: trained(lstrip=True),
    "eats space behind": lambda: trained(rstrip=True),
    "whole words": lambda: trained(single_word=True),
    "one inside another": lambda: trained((*ByteTokenizer.SPECIALS, "the<|im_end|>user", "<|im_start|>user")),
    "begins with space, eats space": lambda: trained((*ByteTokenizer.SPECIALS, "the "), lstrip=True),
    "sentencepiece": lambda: trained(kind="sentencepiece", normalized=False),
    "sentencepiece, looked for afterwards": lambda: trained(kind="sentencepiece", normalized=True),
    "metaspace first": lambda: trained(kind="metaspace first", normalized=False),
    "metaspace always": lambda: trained(kind="metaspace always", normalized=False),
    "metaspace, looked for afterwards": lambda: trained(kind="metaspace always", normalized=True),
}
PIECES = [
    *ByteTokenizer.SPECIALS, "<|im_", "end|>", "user", "the", "hello", " ", "  ", "\n", "\n\n", "ε", "e", "\u0301", "\u0338",
    "😀", "<", ">", "a", "\ud83d", "\ude00",
]  # fmt: skip
texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=12).map("".join)


@pytest.fixture(scope="module", params=VOCABULARIES)
def vocabulary(request: pytest.FixtureRequest) -> Tokenizer:
    tokenizer: Tokenizer = VOCABULARIES[request.param]()
    return tokenizer


@settings(max_examples=60)
@given(st.lists(st.tuples(texts, st.integers(0, 3)), min_size=2, max_size=5))
def test_changed_text_is_tokenised_as_if_anew(vocabulary: Tokenizer, changes: list[tuple[str, int]]) -> None:
    known = TokenizedText(vocabulary)
    for piece, num_kept in changes:
        known = known.changed_to(known.text[: len(known.text) * num_kept // 3] + piece)
        assert known.tokens.tolist() == vocabulary.encode(known.text, add_special=False)


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("whole words", "hello.<|im_end|>", "hello.<|im_end|>user"),
        ("whole words", "<|im_end|> user<|im_end|>a", "<|im_end|> user<|im_end|>."),
        ("one inside another", "say the<|im_end|>.", "say the<|im_end|>user."),
        ("one inside another", "a.<|im_start|>", "a.<|im_start|>user"),
        ("eats space before", "the  <|im_end|>", "the  <|im_end|> <|im_end|>"),
        ("begins with space, eats space", "the<|im_end|>", "the <|im_end|>"),
        ("composed, looked for afterwards", "a.<|im_end|>", "a.<|im_end|>\u0338"),
        ("sentencepiece, looked for afterwards", "the<|im_end|>user", "the<|im_end|>user the"),
    ],
)
def test_traps(kind: str, before: str, after: str) -> None:
    tokenizer = VOCABULARIES[kind]()
    known = TokenizedText(tokenizer).changed_to(before).changed_to(after)
    assert known.tokens.tolist() == tokenizer.encode(after, add_special=False)


class Counting(ByteTokenizer):
    num_chars = 0

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        self.num_chars += len(text)
        return super().encode(text, add_special)


@pytest.mark.parametrize("start", ["", "<|bos|>", "<|bos|>think<|endoftext|>"], ids=["plain", "one", "several"])
def test_the_old_part_is_not_tokenised_again(start: str) -> None:
    """Also where an answer starts with special tokens that are not repeated when it is history."""
    tokenizer = Counting()
    template = ChatTemplate(CHATML + "{% if add_generation_prompt %}" + start + "{% endif %}")
    talk = [{"role": "user", "content": "x" * 5000}]
    known = TokenizedText(tokenizer).changed_to(template.render(talk))
    for _ in range(10):
        talk += [{"role": "assistant", "content": "y" * 50}, {"role": "user", "content": "z" * 50}]
        tokenizer.num_chars = 0
        known = known.changed_to(template.render(talk))
        assert tokenizer.num_chars < 1000


@pytest.mark.parametrize("kind", VOCABULARIES)
def test_which_vocabularies_can_be_cut(kind: str) -> None:
    """Those in which special tokens are looked for in the text itself, and others as far as that makes no difference."""
    known = TokenizedText(VOCABULARIES[kind]()).changed_to("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
    cannot = ("whole words", "sentencepiece, looked for afterwards")
    assert bool(known.cuts) == (kind not in cannot)


@given(st.lists(st.integers(0, 2), max_size=9), st.lists(st.integers(0, 2), max_size=9))
def test_common_prefix(one: list[int], other: list[int]) -> None:
    count = common_prefix(array("i", one), array("i", other))
    assert one[:count] == other[:count]
    assert count in (len(one), len(other)) or one[count] != other[count]


# Sessions


def engine_for(tokenizer: Tokenizer, source: str, **options: Any) -> Engine:
    """A model with random weights that speaks any vocabulary, so that its answers are anything but canonical."""
    spec = replace(
        tiny_spec(), vocab_size=tokenizer.vocab_size, bos_id=tokenizer.bos_id, eos_ids=tokenizer.eos_ids,
        num_layers=1, windows=(None,),
    )  # fmt: skip
    weights = Weights.in_memory(random_weights(spec))
    assert tokenizer.bos_id is not None
    bos = tokenizer.token_bytes(tokenizer.bos_id).decode()
    loaded = LoadedModel("test", spec, weights, tokenizer, ChatTemplate(source, bos), fingerprint(spec, weights))
    return Engine(loaded, device="cpu", **{"num_blocks": 256, "max_model_len": 2048, **options})


class Speaker(FakeExecutor):
    """Says anything that a model might: words, halves of words and of characters, special tokens."""

    def __init__(self, tokenizer: Tokenizer, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        ids = tokenizer.encode(
            "hello the user,\n said\n\n ä😀</think>" + " the end" * 9 + "".join(PIECES), add_special=False
        )
        self._says = (sorted(tokenizer.special_ids)[:4] + ids)[:VOCAB]

    def execute(self, plan: StepPlan) -> StepResult:
        return StepResult([self._says[token] for token in super().execute(plan).tokens])


class Talker(EngineCore):
    """An engine for sessions, at no cost: `FakeExecutor` also notices whatever is not computed as it should be."""

    session, chat_prompt = Engine.session, Engine.chat_prompt

    def __init__(self, tokenizer: Tokenizer, source: str) -> None:
        config = EngineConfig(400, 4, max_model_len=1500)
        self.model = SimpleNamespace(tokenizer=tokenizer, chat_template=ChatTemplate(source, "<|begin_of_text|>"))
        super().__init__(Speaker(tokenizer, 400, 4), config, tokenizer=tokenizer)


TALKERS: dict[str, Any] = {
    "chatml, bytes": lambda: (ByteTokenizer(), CHATML),
    "chatml, merges": lambda: (trained(), CHATML),
    "llama 3": lambda: (trained(LLAMA3_SPECIALS), LLAMA3),
    "forgets thoughts": lambda: (trained(), FORGETS_THOUGHTS),
    "plain text": lambda: (trained(), PLAIN),
    "sentencepiece": lambda: (trained(kind="sentencepiece", normalized=False), CHATML),
}


@pytest.fixture(scope="module", params=TALKERS)
def talker(request: pytest.FixtureRequest) -> Talker:
    return Talker(*TALKERS[request.param]())


@pytest.fixture(scope="module")
def tiny() -> Iterator[Engine]:
    with Engine("tiny", device="cpu", num_blocks=256, max_model_len=1024) as engine:
        yield engine


@pytest.fixture(autouse=True)
def _nothing_is_left_held(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    for name in {"tiny", "talker"} & set(request.fixturenames):
        engine = request.getfixturevalue(name)
        engine.check()
        for state in engine.states():
            engine.release(state)


def greedy(max_tokens: int = 6, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, **more)


def says(text: str, **more: Any) -> SamplingParams:
    """Makes the tiny model say one letter so many times, and then end."""
    bias = {ord(text[0]): 60.0, EOS: 100.0}
    return greedy(len(text) + 1, min_tokens=len(text), logit_bias=bias, **more)


def check(session: Session, engine: Engine, result: Any) -> None:
    """The promise: the last prompt was the whole conversation, templated and tokenised anew."""
    prompt = engine.chat_prompt(session.messages[:-1])
    assert result.prompt_token_ids == prompt
    assert session.state is not None and session.state.tokens.tolist() == prompt + result.token_ids
    assert session.messages[-1] == {"role": "assistant", "content": result.text}


said = st.lists(
    st.sampled_from(
        ["hello", " the user ", "\n\n", "<|im_end|>", "<|eot_id|>", "<|im_start|>", "</think>", "ä😀", "", " "]
    )
    | st.text(max_size=4),
    max_size=5,
).map("".join)
acts = st.lists(
    st.tuples(st.sampled_from(["send", "send", "send", "tool", "close", "undo", "fork", "forget", "lose"]), said),
    min_size=2,
    max_size=7,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(acts, st.integers(0, 1000))
def test_every_turn_is_computed_on_the_whole_conversation(talker: Any, acts: Any, seed: int) -> None:
    params = SamplingParams(max_tokens=5, seed=seed, stop=("l",))
    session = talker.session("be brief", params=params)
    for act, text in acts:
        if act in ("send", "tool"):
            role = "user" if act == "send" else "tool"
            check(session, talker, session.send([{"role": role, "content": text}]))
        elif act == "close":
            reply = session.stream(text)
            next(reply)
            reply.close()
            assert session.messages[-1]["role"] == "assistant"
        elif act == "undo" and len(session.messages) > 1:
            session.undo()
        elif act == "fork":
            other = session.fork()
            session.close()
            session = other
        elif act == "forget":
            talker.forget()
        elif act == "lose" and session.state is not None:
            talker.release(session.state)
    check(session, talker, session.send("and now?"))
    session.close()
    talker.check()


def test_only_what_is_new_is_computed(tiny: Engine) -> None:
    with tiny.session("be brief", params=says("aaa")) as session:
        first = session.send("hello")
        assert (first.text, first.token_ids[-1]) == ("aaa", EOS)
        before = session.state
        assert before is not None
        second = session.send("and again")
        assert session.state is not before and not before.num_held
        # Everything was held but the last token, which was sampled and never fed.
        new = len("\n") + len("#user\nand again#\n#assistant\n")
        assert (second.reuse.held, second.reuse.cached, second.reuse.recomputed) == (before.num_tokens - 1, 0, 0)
        assert second.reuse.new == second.num_prefilled == new + 1


@pytest.mark.parametrize(
    ("params", "text", "reason", "lost"),
    [
        (says("aaa"), "aaa", FinishReason.STOP, 0),
        (replace(says("aaa"), max_tokens=3), "aaa", FinishReason.LENGTH, 0),
        (greedy(logit_bias={A: 100.0}, stop=("aa",)), "", FinishReason.STOP, 2),
        (greedy(logit_bias={A: 100.0}, stop=("aa",), include_stop=True), "aa", FinishReason.STOP, 0),
        (greedy(logit_bias={A: 100.0}, stop_token_ids=(A,)), "", FinishReason.STOP, 1),
    ],
    ids=["eos", "length", "stop string", "stop string kept", "stop token"],
)
def test_however_an_answer_ended(tiny: Engine, params: SamplingParams, text: str, reason: str, lost: int) -> None:
    with tiny.session(params=params) as session:
        first = session.send("hello")
        assert (first.text, first.completions[0].finish_reason) == (text, reason)
        before = session.state
        assert before is not None
        second = session.send("go on")
        check(session, tiny, second)
        # What the template does not repeat is not kept; the token after it is computed in any case.
        assert second.reuse.held == before.num_tokens - max(lost, 1)


def test_roles_and_what_is_no_message(tiny: Engine) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"arguments": {"x": 1}}]}
    with tiny.session(params=says("a")) as session:
        session.send([{"role": "user", "content": "what time is it?"}, call, {"role": "tool", "content": "noon"}])
        call["tool_calls"].clear()  # type: ignore[attr-defined]
        roles = [message["role"] for message in session.messages]
        assert roles == ["user", "assistant", "tool", "assistant"] and session.messages[1]["tool_calls"]
        session.messages[0].clear()  # type: ignore[attr-defined]
        wrong: list[Any] = [{}, [], {"role": 7}, 7, None, ["text"], [{"role": "user", "content": "x"}, "text"]]
        for what in wrong:
            with pytest.raises(InvalidRequest, match="messages"):
                session.send(what)
        assert session.messages[0]["content"] == "what time is it?"
        with pytest.raises(InvalidRequest, match="n: is 2"):
            session.send("x", replace(says("a"), n=2))
    for options in ({"hold": -1}, {"params": 7}, {"add_generation_prompt": False}, {"job_id": ""}):
        with pytest.raises(InvalidRequest, match=next(iter(options))):
            tiny.session(**options)  # type: ignore[arg-type]


def test_template_options_are_used_and_saved(tmp_path: Path) -> None:
    source = "{{ tools | tojson }}{{ mood }}" + CHATML
    tools = [{"name": "clock"}]
    with engine_for(ByteTokenizer(), source) as engine:
        session = engine.session(tools=tools, mood="dry", params=greedy())
        result = session.send("hello")
        assert result.prompt_token_ids == engine.chat_prompt(session.messages[:-1], tools=tools, mood="dry")
        session.save(tmp_path / "s")
        again = engine.load_session(tmp_path / "s", params=greedy())
        result = again.send("x")
        assert result.prompt_token_ids == engine.chat_prompt(again.messages[:-1], tools=tools, mood="dry")


# Undo, fork


def test_undo(tiny: Engine) -> None:
    session = tiny.session("be brief", params=greedy())
    session.send("one")
    messages, state = session.messages, session.state
    assert state is not None
    prompt, answer = session.send("two"), session.messages
    session.send("three")
    session.undo(2)
    assert session.messages == messages
    assert session.state is not None and session.state.tokens == state.tokens[: session.state.num_tokens]
    again = session.send("two")
    assert (again.prompt_token_ids, again.text, session.messages) == (prompt.prompt_token_ids, prompt.text, answer)
    assert again.reuse.held >= prompt.reuse.held - 1
    for turns in (0, 3, -1, True, 1.0, "1"):
        with pytest.raises(InvalidRequest, match="2 can be undone"):
            session.undo(turns)  # type: ignore[arg-type]
    session.undo(2)
    assert session.state is None and [message["role"] for message in session.messages] == ["system"]
    check(session, tiny, session.send("one"))
    session.close()
    assert not tiny.stats().leased_blocks


def test_forks_go_on_by_themselves(tiny: Engine) -> None:
    with tiny.session(params=greedy()) as session:
        session.send("one")
        children = [session.fork() for _ in range(3)]
        used = tiny.stats().leased_blocks
        results = [child.send(f"branch {index}") for index, child in enumerate([session, *children])]
        for child, result in zip([session, *children], results, strict=True):
            check(child, tiny, result)
            assert len(child.messages) == 4
        assert tiny.stats().leased_blocks < 4 * used
        children[0].undo()
        assert len(session.messages) == 4 and session.state is not None
        session.close()
        check(children[1], tiny, children[1].send("more"))
        for child in children:
            child.close()
    assert not tiny.stats().leased_blocks


# Streams


def test_stream_gives_what_send_gives(tiny: Engine) -> None:
    with tiny.session(params=greedy()) as session, tiny.session(params=greedy()) as other:
        reply = session.stream("hello")
        text = "".join(delta.text for delta in reply)
        assert text == reply.result.text == other.send("hello").text == session.messages[-1]["content"]
        assert session.state is reply.result.state
        reply = session.stream("and more")
        while next(reply).finish_reason is None:
            pass
        check(session, tiny, session.send("the last delta has been read, and that is enough"))


def test_closed_early_keeps_what_there_is(tiny: Engine) -> None:
    with tiny.session(params=says("a" * 9)) as session:
        reply = session.stream("hello")
        for _ in range(4):
            next(reply)
        with pytest.raises(StateError, match="answering"):
            session.send("x")
        with pytest.raises(StateError, match="answering"):
            session.undo()
        reply.close()
        assert list(reply) == [] and not tiny.has_work
        assert session.messages[-1] == {"role": "assistant", "content": "aaaa"}
        assert session.state is not None and session.state.num_held == session.state.num_tokens - 1
        held = session.state.num_held
        result = session.send("go on")
        check(session, tiny, result)
        assert result.reuse.held == held
        session.undo(2)
        assert session.messages == []


def test_dropped_streams_are_closed(tiny: Engine) -> None:
    with tiny.session(params=says("a" * 9)) as session:
        for _ in session.stream("hello"):
            break
        assert session.messages[-1]["content"] == "a"
        session.stream("never read")
        assert len(session.messages) == 2 and not tiny.has_work
        check(session, tiny, session.send("go on"))


def test_an_interrupt_keeps_what_there_is(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends the request inside a step, where it cannot be forked any more."""
    with tiny.session(params=says("a" * 9)) as session:
        session.send("hello")
        state, reply = session.state, session.stream("more")
        next(reply), next(reply)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(tiny.runner, "execute", lambda plan: (_ for _ in ()).throw(KeyboardInterrupt))
            next(reply)
        assert session.messages[-1]["content"] == "aa" and session.state is state
        check(session, tiny, session.send("go on"))
        session.undo(2)
        assert len(session.messages) == 2
        check(session, tiny, session.send("more"))


# When things go wrong


def test_a_failed_step_changes_nothing(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with tiny.session(params=greedy()) as session:
        session.send("one")
        messages, state = session.messages, session.state
        for tokens_before in (0, 2):
            reply = session.stream("two")
            for _ in range(tokens_before):
                next(reply)
            with monkeypatch.context() as patch, pytest.raises(StepFailed):
                patch.setattr(tiny.runner, "execute", lambda plan: 1 / 0)
                next(reply)
            assert (session.messages, session.state) == (messages, state)
            assert state is not None and state.num_held == state.num_computed
        check(session, tiny, session.send("two"))


def test_a_refused_turn_changes_nothing(tiny: Engine) -> None:
    with tiny.session(params=greedy()) as session:
        session.send("one")
        messages, state = session.messages, session.state
        with pytest.raises(InvalidRequest, match="1024"):
            session.send("long " * 1000)
        assert (session.messages, session.state) == (messages, state)
        check(session, tiny, session.send("short"))


def test_a_template_that_refuses_changes_nothing() -> None:
    source = CHATML + "{% if messages[-1].content == 'bad' %}{{ raise_exception('no') }}{% endif %}"
    with engine_for(ByteTokenizer(), source) as engine, engine.session(params=greedy()) as session:
        session.send("good")
        with pytest.raises(InvalidRequest, match="no"):
            session.send("bad")
        check(session, engine, session.send("good"))


@pytest.mark.parametrize("hold", [True, False, 60.0])
def test_a_lost_state_costs_time_only(tiny: Engine, hold: Any) -> None:
    with tiny.session(params=greedy()) as kept, tiny.session(params=greedy(), hold=hold) as session:
        for text in ("one", "two"):
            assert session.send(text).text == kept.send(text).text
        assert session.state is not None
        tiny.release(session.state)
        tiny.forget()
        lost = session.send("three")
        assert lost.reuse.held == 0 and lost.text == kept.send("three").text
        check(session, tiny, lost)


def test_a_forgotten_state_costs_time_only(tmp_path: Path) -> None:
    with Engine("tiny", device="cpu", num_blocks=64) as engine:
        ledger = engine._desk.ledger
        with engine.session(params=greedy()) as session, engine.session(params=greedy()) as kept:
            session.send("one"), kept.send("one")
            ledger.max_states = 1
            check(session, engine, session.send("two"))
            kept.send("other")
            assert session.state not in engine.states()
            assert session.fork().state is None
            assert session.save(tmp_path / "s") and session.state in engine.states()
            kept.send("other")
            session.undo()
            check(session, engine, session.send("two"))
        engine.check()


def test_closed_sessions(tiny: Engine) -> None:
    session = tiny.session(params=says("aaaa"))
    reply = session.stream("hello")
    next(reply)
    session.close()
    reply.close()
    assert session.state is None and not tiny.stats().leased_blocks and not tiny.has_work
    assert [message["content"] for message in session.messages] == ["hello", "a"]
    for act in (lambda: session.send("x"), session.fork, session.undo, lambda: session.save("x")):
        with pytest.raises(StateError, match="closed"):
            act()


def test_tenants_and_jobs(tiny: Engine) -> None:
    with tiny.session(params=greedy(), salt="ours", job_id="job") as session:
        session.send("one")
        assert session.state is not None and session.state.job == "job"
        assert session.state in tiny.states(salt="ours") and session.state not in tiny.states()
        with session.fork() as child:
            assert child.send("two").reuse.held
        session.undo()
        reply = session.stream("one")
        next(reply)
        reply.close()
        assert session.state is not None and session.state.scope.salt == "ours"
        check(session, tiny, session.send("two"))


def test_a_rewritten_history_is_computed_from_where_it_differs() -> None:
    with engine_for(ByteTokenizer(), FORGETS_THOUGHTS) as engine, engine.session(params=greedy()) as session:
        thought, noon = {"role": "assistant", "content": "hm</think>yes"}, {"role": "tool", "content": "noon"}
        first = session.send([{"role": "user", "content": "x" * 40}, thought, noon])
        second = session.send(noon)
        third = session.send("and?")
        check(session, engine, third)
        shown = [engine.model.tokenizer.decode(result.prompt_token_ids) for result in (first, second, third)]
        assert ["hm</think>yes" in text for text in shown] == [True, True, False]
        same = engine.chat_prompt([{"role": "user", "content": "x" * 40}, {"role": "assistant", "content": ""}])
        assert third.reuse.held == same.index(EOS, 50) and third.num_prefilled > 50


# Save, load


def test_saved_and_loaded_elsewhere(tiny: Engine, tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=6, seed=5)
    with tiny.session("be brief", params=params) as session:
        session.send("one"), session.send("two")
        assert session.save(tmp_path / "s") == (tmp_path / "s").stat().st_size
        expected = session.send("three")
        with Engine("tiny", device="cpu", num_blocks=64, block_size=8) as other:
            loaded = other.load_session(tmp_path / "s", params=params)
            assert loaded.messages == session.messages[:-2]
            result = loaded.send("three")
            assert (result.token_ids, result.text) == (expected.token_ids, expected.text)
            assert result.reuse == expected.reuse
            loaded.undo(3)
            assert [message["role"] for message in loaded.messages] == ["system"]


def test_sessions_without_a_state_can_be_saved(tiny: Engine, tmp_path: Path) -> None:
    with tiny.session(params=greedy()) as session:
        with pytest.raises(InvalidRequest, match="nothing to save"):
            session.save(tmp_path / "s")
        session.send("one")
        session.send("two")
        session.undo()
        session.save(tmp_path / "undone")
    with tiny.session("be brief", params=greedy()) as session:
        session.save(tmp_path / "begun")
    for name, count in (("undone", 2), ("begun", 1)):
        with tiny.load_session(tmp_path / name, params=greedy()) as loaded:
            assert len(loaded.messages) == count
            check(loaded, tiny, loaded.send("go on"))


def test_undone_words_are_not_in_the_file(tiny: Engine, tmp_path: Path) -> None:
    with tiny.session(params=greedy()) as session:
        session.send("one")
        session.send("secret")
        session.undo()
        session.save(tmp_path / "s")
        with tiny.load_session(tmp_path / "s") as loaded:
            assert loaded.state is not None
            assert "secret" not in tiny.tokenizer.decode(loaded.state.tokens)  # type: ignore[union-attr]


GOOD: dict[str, Any] = {
    "session": 1,
    "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}],
    "options": {},
    "turns": [[0, 0]],
}


@pytest.mark.parametrize(
    "change",
    [
        {"session": 2},
        {"session": None},
        {"more": 1},
        {"messages": None},
        {"messages": {"role": "user"}},
        {"messages": [{"content": "x"}]},
        {"messages": [{"role": 1}]},
        {"messages": ["x"]},
        {"messages": []},
        {"options": []},
        {"options": {"messages": []}},
        {"options": {"self": 1}},
        {"turns": None},
        {"turns": [0]},
        {"turns": [[0]]},
        {"turns": [[0, 0, 0]]},
        {"turns": [[0, -1]]},
        {"turns": [[True, 0]]},
        {"turns": [[0.0, 0]]},
        {"turns": [[2, 0]]},
        {"turns": [[1, 0], [0, 0]]},
        {"turns": [[0, 0], [0, 0]]},
    ],
    ids=repr,
)
def test_a_note_that_no_session_wrote(tiny: Engine, tmp_path: Path, change: dict[str, Any]) -> None:
    state = tiny.generate("hello", greedy(), hold=True)[0].state
    assert state is not None
    num_states = len(tiny.states())
    for note in (GOOD | change, {}, {key: value for key, value in GOOD.items() if key not in change}):
        if note != GOOD:
            tiny.save(state, tmp_path / "s", note=note)
            with pytest.raises(SnapshotError, match="session"):
                tiny.load_session(tmp_path / "s")
    assert len(tiny.states()) == num_states
    tiny.save(state, tmp_path / "s", note=GOOD)
    with tiny.load_session(tmp_path / "s", params=greedy()) as session:
        check(session, tiny, session.send("fits nothing, and is right all the same"))


def test_a_damaged_file_changes_nothing(tiny: Engine, tmp_path: Path) -> None:
    with tiny.session(params=greedy()) as session:
        session.send("one")
        session.save(tmp_path / "s")
    data, num_states = bytearray((tmp_path / "s").read_bytes()), len(tiny.states())
    data[-30] ^= 1
    (tmp_path / "s").write_bytes(data)
    with pytest.raises(SnapshotError, match="damaged"):
        tiny.load_session(tmp_path / "s")
    assert len(tiny.states()) == num_states and not tiny.stats().leased_blocks


def test_what_is_not_plain_json_cannot_be_saved(tiny: Engine, tmp_path: Path) -> None:
    with tiny.session(params=greedy()) as session:
        session.send({"role": "user", "content": "x", "when": (1, 2)})
        with pytest.raises(SnapshotError, match="JSON"):
            session.save(tmp_path / "s")
        assert not list(tmp_path.iterdir())


# A real model


def test_smollm2(smollm2: LoadedModel) -> None:
    with Engine(smollm2, num_blocks=64, device="cpu") as engine, engine.session(params=greedy(12)) as session:
        session.send("What is the capital of France?")
        before = session.state
        result = session.send("And of Italy?")
        check(session, engine, result)
        assert before is not None and result.reuse.held == before.num_tokens - 1 and result.num_prefilled < 20
        prompt = result.prompt_token_ids
        engine.release(session.state or "")
        engine.forget()
        assert engine.generate(prompt, greedy(12))[0].token_ids == result.token_ids
