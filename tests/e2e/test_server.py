"""The server as its users meet it: OpenAI's own client, curl, and plain HTTP, against a process that listens."""

import asyncio
import json
import subprocess

import openai
import pytest

from segue import Engine, SamplingParams
from tests.servers import running

HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say hello."}]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running("tiny", "--state-dir", str(tmp_path_factory.mktemp("states"))) as started:
        yield started


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def engine():
    with Engine("tiny") as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_is_left(server):
    yield
    server.wait_until(lambda: server.metric("num_requests_running") == server.metric("num_requests_waiting") == 0)
    for state in server.get("/v1/states")[2]["data"]:
        server.post(f"/v1/states/release/{state['id']}")
    assert server.usage() == 0.0


def chat_text(engine, messages, **options):
    return engine.generate(engine.chat_prompt(messages), SamplingParams(temperature=0, **options))[0]


# OpenAI's client


def test_a_completion_is_what_the_engine_says(client, engine):
    made = client.completions.create(model="tiny", prompt="Once upon", max_tokens=12, temperature=0)
    expected = engine.generate("Once upon", SamplingParams(max_tokens=12, temperature=0))[0]
    assert made.choices[0].text == expected.text
    assert made.choices[0].finish_reason == expected.completions[0].finish_reason
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (len(expected.prompt_token_ids), 12)


def test_prompts_come_as_texts_or_ids_and_n_answers_each(client, engine):
    texts = ["one", "two"]
    ids = [engine.encode(text).tolist() for text in texts]
    options = {"model": "tiny", "max_tokens": 5, "n": 2, "seed": 7}
    by_text = client.completions.create(prompt=texts, **options)
    by_ids = client.completions.create(prompt=ids, **options)
    alone = [client.completions.create(prompt=prompt, **options).choices for prompt in (texts[0], ids[1])]
    assert [choice.index for choice in by_text.choices] == [0, 1, 2, 3]
    answers = [choice.text for choice in by_text.choices]
    assert answers == [choice.text for choice in by_ids.choices] == [choice.text for pair in alone for choice in pair]
    assert by_text.choices[0].text != by_text.choices[1].text
    assert by_text.usage.prompt_tokens == sum(map(len, ids))
    assert by_text.usage.completion_tokens == 20


def test_a_stream_joins_to_the_whole(client):
    options = {
        "model": "tiny",
        "messages": HELLO,
        "max_tokens": 20,
        "seed": 3,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    for choice in whole.choices:
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices and chunk.choices[0].index == choice.index]
        assert "".join(part.delta.content or "" for part in mine) == choice.message.content
        assert mine[0].delta.role == "assistant"
        assert [part.finish_reason for part in mine if part.finish_reason] == [choice.finish_reason]
        tokens = [entry for part in mine if part.logprobs for entry in part.logprobs.content]
        assert tokens == choice.logprobs.content and len(tokens) == 20
        assert all(len(entry.top_logprobs) == 2 for entry in tokens)
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 40
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_async_client_streams_many_at_once(server):
    async def answers():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:

            async def one(number):
                stream = await client.completions.create(
                    model="tiny", prompt=f"number {number}", max_tokens=15, temperature=0, stream=True
                )
                return "".join([chunk.choices[0].text async for chunk in stream])

            together = await asyncio.gather(*(one(number) for number in range(12)))
            return together, [await one(number) for number in range(12)]

    together, alone = asyncio.run(answers())
    assert together == alone


def test_stops_echo_logprobs_and_penalties(client):
    def complete(**options):
        extra = {"ignore_eos": True, **options.pop("extra_body", {})}
        fixed = {"model": "tiny", "prompt": "abc", "temperature": 0, "max_tokens": 30, "extra_body": extra}
        return client.completions.create(**(fixed | options))

    text = complete().choices[0].text
    stop = next(text[at : at + 2] for at in range(8, 30) if text[at : at + 2].isprintable())
    cut = complete(stop=[stop, "never"]).choices[0]
    assert (cut.text, cut.finish_reason) == (text[: text.index(stop)], "stop")
    assert "".join(chunk.choices[0].text for chunk in complete(stop=stop, stream=True)) == cut.text
    included = complete(stop=stop, extra_body={"include_stop_str_in_output": True}).choices[0]
    assert included.text == cut.text + stop

    assert complete(echo=True).choices[0].text == "abc" + text

    counted = complete(max_tokens=4, logprobs=3).choices[0].logprobs
    assert len(counted.tokens) == len(counted.token_logprobs) == len(counted.text_offset) == 4
    for top, chosen in zip(counted.top_logprobs, counted.token_logprobs, strict=True):
        assert 1 <= len(top) <= 3 and max(top.values()) == pytest.approx(chosen)

    assert complete(max_tokens=5, logit_bias={"65": 100}).choices[0].text == "AAAAA"
    penalised = complete(max_tokens=20, logit_bias={"65": 50, "66": 49}, frequency_penalty=2).choices[0].text
    assert set(penalised) == {"A", "B"}


def test_likely_tokens_that_are_parts_of_characters_are_told_apart(client):
    """The model's tokens are bytes, half of which are not text."""
    made = client.completions.create(model="tiny", prompt="abc", max_tokens=12, seed=5, temperature=5, logprobs=100)
    counted = made.choices[0].logprobs
    for token, value, top in zip(counted.tokens, counted.token_logprobs, counted.top_logprobs, strict=True):
        assert top[token] == value  # likely or not
        assert len(top) == 100 + (value < sorted(top.values())[-100])
    assert any(token.startswith("bytes:\\x") for token in counted.top_logprobs[0])
    alone = client.completions.create(model="tiny", prompt="abc", max_tokens=2, temperature=0, logprobs=0).choices[0]
    assert [[*top] for top in alone.logprobs.top_logprobs] == [[token] for token in alone.logprobs.tokens]


def test_responses_remember_what_was_said(client, server):
    first = client.responses.create(model="tiny", input="My name is Ada.", max_output_tokens=9, temperature=0)
    second = client.responses.create(
        model="tiny", input="What is my name?", previous_response_id=first.id, max_output_tokens=9, temperature=0
    )
    chat = client.chat.completions.create(
        model="tiny",
        messages=[
            {"role": "user", "content": "My name is Ada."},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "What is my name?"},
        ],
        max_tokens=9,
        temperature=0,
    )
    assert second.output_text == chat.choices[0].message.content
    assert second.usage.input_tokens == chat.usage.prompt_tokens
    assert second.usage.input_tokens_details.cached_tokens > 0
    assert client.responses.retrieve(second.id).output_text == second.output_text
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)

    events = list(client.responses.create(model="tiny", input="Go on.", previous_response_id=first.id, stream=True,
                                          max_output_tokens=9, temperature=0))  # fmt: skip
    assert [events[0].type, events[-1].type] == ["response.created", "response.incomplete"]
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == events[-1].response.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))

    salted = server.post("/v1/responses", {"input": "Hi", "max_output_tokens": 2, "cache_salt": "mine"})[2]["id"]
    paths = [f"/v1/responses/{salted}", f"/v1/responses/{salted}?cache_salt=mine"]
    assert [server.get(path)[0] for path in paths] == [404, 200]
    assert [server.request("DELETE", path)[0] for path in paths] == [404, 200]

    unstored = client.responses.create(model="tiny", input="Hi", store=False, max_output_tokens=2)
    with pytest.raises(openai.APIStatusError) as refused:
        client.responses.create(model="tiny", input="again", previous_response_id=unstored.id)
    assert refused.value.status_code in (404, 410)


def test_models_and_tokens(client, server, engine):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-99")
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-99", prompt="hi")
    _, _, made = server.post("/tokenize", {"prompt": "hé<|im_end|>"})
    assert made["tokens"] == engine.encode("hé<|im_end|>").tolist() and made["count"] == len(made["tokens"])
    assert server.post("/detokenize", {"tokens": made["tokens"]})[2]["prompt"].endswith("hé<|im_end|>")
    _, _, made = server.post("/tokenize", {"messages": HELLO})
    assert made["tokens"] == engine.chat_prompt(HELLO)
    assert server.get("/health")[0] == 200
    assert server.get("/version")[2]["version"]


def test_the_line_it_prints_works(server):
    made = subprocess.run(server.example, shell=True, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(made.stdout)["choices"][0]["message"]["role"] == "assistant"


# States


def test_a_continuation_is_as_if_nothing_had_ended(server, engine):
    """Fields at the top, or in a literal extra_body, which people post as it is."""
    whole = engine.generate("A story:", SamplingParams(max_tokens=24, temperature=0, ignore_eos=True))[0]
    base = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    for wrap in (lambda fields: fields, lambda fields: {"extra_body": fields}):
        _, _, first = server.post("/v1/completions", base | {"prompt": "A story:"} | wrap({"hold_seconds": 60}))
        state = first["choices"][0]["state"]
        assert state["num_held"] == state["num_tokens"] - 1
        _, _, rest = server.post("/v1/completions", base | wrap({"continuation_of": state["id"]}))
        assert first["choices"][0]["text"] + rest["choices"][0]["text"] == whole.text
        told = rest["choices"][0]["state"]
        assert (told["inherited_tokens"], told["recomputed_tokens"], told["new_tokens"]) == (state["num_held"], 0, 1)
        assert rest["usage"]["prompt_tokens_details"]["cached_tokens"] == state["num_held"]

        suffixed = {"continuation_of": state["id"], "continuation_suffix": " And then", "fork_at": 15}
        _, _, branch = server.post("/v1/completions", base | wrap(suffixed))
        kept = (whole.prompt_token_ids + whole.token_ids)[:15]
        tokens = kept + engine.encode_suffix(" And then").tolist()
        direct = engine.generate(tokens, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))[0]
        assert branch["choices"][0]["text"] == direct.text
        by_ids = {"continuation_of": state["id"], "continuation_token_ids": tokens[15:], "fork_at": 15}
        assert server.post("/v1/completions", base | wrap(by_ids))[2]["choices"][0]["text"] == direct.text


def test_a_chat_goes_on_with_its_new_messages_only(server, engine):
    options = {"temperature": 0, "max_tokens": 8}
    _, _, first = server.post("/v1/chat/completions", options | {"messages": HELLO, "hold_seconds": 60})
    answer = first["choices"][0]["message"]
    more = {"role": "user", "content": "And now?"}
    _, _, second = server.post(
        "/v1/chat/completions", options | {"messages": [more], "continuation_of": first["id"], "hold_seconds": 60}
    )
    expected = chat_text(engine, [*HELLO, answer, more], max_tokens=8)
    assert second["choices"][0]["message"]["content"] == expected.text
    assert second["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)
    assert second["choices"][0]["state"]["inherited_tokens"] >= len(engine.chat_prompt(HELLO))
    _, _, third = server.post("/v1/chat/completions", options | {"messages": [more], "continuation_of": second["id"]})
    expected = chat_text(engine, [*HELLO, answer, more, second["choices"][0]["message"], more], max_tokens=8)
    assert third["choices"][0]["message"]["content"] == expected.text


def test_the_verbs_of_a_state(server):
    options = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    _, _, first = server.post("/v1/completions", options | {"prompt": "x" * 20, "hold_seconds": 60})
    state = first["choices"][0]["state"]
    assert server.get(f"/v1/states/{state['id']}")[2]["num_held"] == state["num_held"]
    _, _, child = server.post(f"/v1/states/fork/{state['id']}", {"at": 30})
    assert (child["num_tokens"], child["num_held"], child["expires_in"]) == (30, 30, None)
    assert {entry["id"] for entry in server.get("/v1/states")[2]["data"]} >= {state["id"], child["id"]}
    assert server.post(f"/v1/states/hold/{child['id']}", {"seconds": 5})[2]["expires_in"] <= 5
    _, _, saved = server.post(f"/v1/states/save/{child['id']}", {"name": "mine"})
    assert saved["size_bytes"] > 0
    assert [entry["name"] for entry in server.get("/v1/states/saved")[2]["data"]] == ["mine"]
    for state_id in (state["id"], child["id"]):
        assert server.post(f"/v1/states/release/{state_id}")[2]["num_held"] == 0
    assert server.usage() == 0.0
    _, _, loaded = server.post("/v1/states/load", {"name": "mine"})
    assert loaded["num_held"] == 30
    _, _, rest = server.post("/v1/completions", options | {"continuation_of": loaded["id"], "max_tokens": 5})
    _, _, direct = server.post(
        "/v1/completions", options | {"continuation_of": state["id"], "fork_at": 30, "max_tokens": 5}
    )
    assert rest["choices"][0]["text"] == direct["choices"][0]["text"]
    status, _, error = server.post("/v1/states/load", {"name": "other"})
    assert status == 404 and "other" in error["error"]["message"] and "tenant" not in error["error"]["message"]
    assert server.post("/v1/states/load", {"name": "../mine"})[0] == 400


def test_the_last_step_of_a_job_gives_everything_back(server):
    fields = {"max_tokens": 4, "prompt": "turn one of a job", "job_id": "j", "hold_seconds": 60}
    server.post("/v1/completions", fields)
    server.post("/v1/completions", fields | {"prompt": "turn two of a job, which is longer"})
    held = server.usage()
    assert held > 0
    other = server.post("/v1/completions", fields | {"job_id": "k", "prompt": "another job"})[2]
    server.post("/v1/completions", {"max_tokens": 4, "prompt": "the last", "job_id": "j", "is_last_step": True})
    states = {state["id"]: state for state in server.get("/v1/states")[2]["data"]}
    assert [state["id"] for state in states.values() if state["num_held"]] == [other["id"]]


# What goes wrong


def test_a_client_that_leaves_frees_its_request(server):
    body = {"prompt": "for ever", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        stream = client.completions.create(model="tiny", extra_body={"ignore_eos": True}, prompt="for ever",
                                           max_tokens=3000, stream=True)  # fmt: skip
        next(iter(stream))
        assert server.metric("num_requests_running") == 1
        stream.close()
    server.wait_until(lambda: server.metric("num_requests_running") == 0)
    whole = subprocess.Popen(
        ["curl", "-s", f"{server.url}/v1/completions", "-d", json.dumps(body | {"stream": False}),
         "-H", "content-type: application/json"], stdout=subprocess.PIPE
    )  # fmt: skip
    server.wait_until(lambda: server.metric("num_requests_running") == 1)
    whole.kill()
    whole.communicate()
    server.wait_until(lambda: server.metric("num_requests_running") == 0)
    assert server.metric("requests_total", outcome="aborted") >= 2


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "max_tokens": "5"}, "max_tokens"),
        ({"prompt": "x", "max_tokens": True}, "max_tokens"),
        ({"prompt": "x", "max_tokens": 10**9}, "max_tokens"),
        ({"prompt": "x" * 20000, "max_tokens": 5}, "prompt"),
        ({"prompt": [5, 300000]}, "prompt"),
        ({"prompt": [5, -1]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({}, "prompt"),
        ({"prompt": "x", "temperature": -1}, "temperature"),
        ({"prompt": "x", "temperature": "hot"}, "temperature"),
        ({"prompt": "x", "best_of": 3}, "best_of"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "no_such_field": 1}, "no_such_field"),
        ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias"),
        ({"prompt": "x", "logit_bias": {"999999": 1}}, "logit_bias"),
        ({"prompt": "x", "stop": [""]}, "stop"),
        ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "x", "continuation_suffix": "y"}, "continuation_suffix"),
        ({"prompt": "x", "continuation_of": "y"}, "prompt"),
        ({"prompt": "x", "is_last_step": True}, "is_last_step"),
        ({"prompt": "x", "hold_seconds": -1}, "hold_seconds"),
        ({"prompt": "x", "extra_body": {"hold_seconds": "long"}}, "hold_seconds"),
        ({"prompt": "x", "hold_seconds": 1, "extra_body": {"hold_seconds": 1}}, "hold_seconds"),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_a_wrong_field_is_named(server, body, field):
    status, _, answer = server.post("/v1/completions", body)
    assert status == 400
    assert answer["error"]["param"].split(".")[0] == field, answer
    assert answer["error"]["type"] == "invalid_request_error"


def test_what_the_engine_refuses_is_named_as_the_body_names_it(server):
    parent = server.post("/v1/completions", {"prompt": "x", "max_tokens": 2})[2]["id"]
    goes_on, far, long = {"continuation_of": parent}, 100_000, "x" * 20_000
    said = [{"role": "user", "content": "Hi"}]
    refused = [
        ("completions", goes_on | {"fork_at": 0}, "fork_at"),
        ("completions", goes_on | {"fork_at": far}, "fork_at"),
        ("completions", goes_on | {"continuation_token_ids": [999_999]}, "continuation_token_ids"),
        ("completions", goes_on | {"continuation_suffix": long}, "continuation_suffix"),
        ("completions", goes_on | {"max_tokens": far}, "max_tokens"),
        ("completions", {"continuation_of": ""}, "continuation_of"),
        ("completions", {"prompt": "x", "use_beam_search": True, "beam_width": 5000}, "beam_width"),
        ("completions", {"prompt": "x", "use_beam_search": True, "stop_token_ids": [999_999]}, "stop_token_ids"),
        ("chat/completions", {"messages": said, "max_completion_tokens": far}, "max_completion_tokens"),
        ("chat/completions", {"messages": said, "max_tokens": far}, "max_tokens"),
        ("chat/completions", {"messages": [{"role": "user", "content": long}]}, "messages"),
        ("chat/completions", goes_on | {"fork_at": 0}, "fork_at"),
        ("responses", {"input": "Hi", "max_output_tokens": far}, "max_output_tokens"),
        ("responses", {"input": long}, "input"),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ("recommend", {"prompt": "x", "beam": {"max_tokens": far}}, "beam.max_tokens"),
        ("recommend", goes_on | {"fork_at": 0, "beam": {"max_tokens": 1}}, "fork_at"),
    ]
    for path, body, field in refused:
        status, _, answer = server.post(f"/v1/{path}", body)
        error = answer["error"]
        assert (status, error["param"]) == (400, field), (path, body, error)
        assert error["message"].startswith(f"{field}: ")


def test_unknown_parents_are_404_and_streams_too(server):
    for stream in (False, True):
        status, _, answer = server.post("/v1/completions", {"continuation_of": "cmpl-none", "stream": stream})
        assert status == 404 and "cmpl-none" in answer["error"]["message"]
    status, _, _ = server.post("/v1/chat/completions", {"continuation_of": "x", "messages": HELLO})
    assert status == 404
    assert server.get("/v1/states/none")[0] == 404
    assert server.post("/v1/states/hold/none")[0] == 404


def test_the_log_says_whom_a_request_was_for(server):
    """In one line, whatever a name has in it."""
    asked = [
        ("completions", {"prompt": "x", "max_tokens": 1}),
        ("chat/completions", {"messages": HELLO, "max_tokens": 1}),
        ("responses", {"input": "x", "max_output_tokens": 1}),
        ("recommend", {"prompt": "x", "beam": {"max_tokens": 1, "width": 1}}),
    ]
    for path, body in asked:
        user = f"Ada of\n{path}\x1b[2J\u2028"
        _, headers, _ = server.post(f"/v1/{path}", body | {"user": user})
        request_id = headers["x-request-id"]
        server.wait_until(lambda request_id=request_id: request_id in server.log())
        [line] = [line for line in server.log().split("\n") if request_id in line]
        assert line.isprintable() and json.loads(line[line.index("{") :])["user"] == user


def test_metrics_say_what_happened(server):
    before = {name: server.metric(name) or 0 for name in ("prompt_tokens_total", "prefilled_tokens_total")}
    hits = server.metric("prefix_hit_tokens_total", source="lease") or 0
    _, _, first = server.post("/v1/completions", {"prompt": "metrics " * 10, "max_tokens": 4, "hold_seconds": 30})
    _, _, second = server.post("/v1/completions", {"continuation_of": first["id"], "max_tokens": 4})
    needed = first["usage"]["prompt_tokens"] + second["usage"]["prompt_tokens"]
    assert server.metric("prompt_tokens_total") - before["prompt_tokens_total"] == needed
    inherited, found = (made["choices"][0]["state"]["inherited_tokens"] for made in (second, first))
    assert server.metric("prefix_hit_tokens_total", source="lease") - hits == inherited
    assert server.metric("prefilled_tokens_total") - before["prefilled_tokens_total"] == needed - inherited - found
    blocks = -(-(first["choices"][0]["state"]["num_tokens"] - 1) // 16)
    assert server.metric("leased_blocks") == blocks
    assert server.metric("time_to_first_token_seconds_count") >= 2
