"""Tools: offered through the model's template, called in its answers, answered in the next turn, over OpenAI's client.

The model is a script, since a random one calls nothing; all the rest is the server.
"""

import json
import threading
from dataclasses import replace
from pathlib import Path

import openai
import pytest
import uvicorn

from segue.base.errors import EngineClosed, UnknownState
from segue.model.chat import ChatTemplate
from segue.model.loading import open_model
from segue.server.app import create_app
from segue.server.messages import Part, Ready, StateInfo
from segue.server.metrics import Metrics
from segue.server.remote_engine import Answering
from segue.server.service import Service
from segue.server.tenants import Tenants

TEMPLATE = """{%- if tools %}<|im_start|>system
# Tools: call with <tool_call>{"name": ..., "arguments": ...}</tool_call>
{% for tool in tools %}{{ tool.function.name }}: {{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "of a place", "parameters": {"type": "object", "properties": {}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Zürich"}}\n</tool_call>'
ASKED = [{"role": "user", "content": "How is the weather in Zürich?"}]


class Script:
    """An engine that says what it is told to, a few bytes at a time, and remembers the prompts it was given."""

    def __init__(self):
        self.ready = Ready("a script", "no memory", 16, 100, 8192, 8)
        self.failure, self.num_restarts = None, 0
        self.answer, self.prompts, self.dies = "", [], False

    async def start(self):
        return self.ready

    async def close(self):
        pass

    def submit(self, calls):
        [call] = calls
        self.prompts.append(bytes(token for token in call.tokens if token < 256).decode())
        answering = Answering(self, calls)
        data = self.answer.encode()
        for start in range(0, len(data), 3):
            answering.put(Part(call.request_id, 0, list(data[start : start + 3]), "", []))
        if self.dies:
            answering.fail(EngineClosed("it is gone"))
            return answering
        info = StateInfo(call.request_id, 9, 8, 0, None, None, False)
        answering.put(Part(call.request_id, 0, [259], "", [], "stop", (0, 0, 0, len(call.tokens)), info))
        return answering

    async def ask(self, verb, **arguments):
        raise UnknownState(f"{verb}: a script has no states")

    def forget(self, request_id):
        pass

    abort = forget


@pytest.fixture(scope="module")
def script():
    return Script()


@pytest.fixture(scope="module")
def client(script):
    model = open_model("tiny", Path("/nonexistent"))
    model = replace(model, chat_template=ChatTemplate(TEMPLATE, "<|bos|>", "<|im_end|>"))
    app = create_app(Service(model, script, Tenants({}), Metrics()))
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        thread.join(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as made:
        yield made
    server.should_exit = True
    thread.join(30)


def test_a_call_comes_out_and_its_result_goes_in(client, script):
    script.answer = f"Let me see. {CALL}"
    made = client.chat.completions.create(model="tiny", messages=ASKED, tools=[WEATHER])
    choice = made.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
    [call] = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"place": "Zürich"})
    assert "weather" in script.prompts[-1]

    script.answer = "It rains."
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    made = client.chat.completions.create(
        model="tiny", messages=[*ASKED, choice.message.model_dump(exclude_none=True), result], tools=[WEATHER]
    )
    assert made.choices[0].message.content == "It rains." and made.choices[0].finish_reason == "stop"
    assert '<tool_call>{"name": "weather", "arguments": {"place": "Zürich"}}</tool_call>' in script.prompts[-1]
    assert "rain" in script.prompts[-1]


def test_calls_are_streamed(client, script):
    script.answer = f"First{CALL}\n{CALL.replace('Zürich', 'Bern')}"
    chunks = list(client.chat.completions.create(model="tiny", messages=ASKED, tools=[WEATHER], stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "First"
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [call.index for call in calls] == [0, 1]
    assert [json.loads(call.function.arguments)["place"] for call in calls] == ["Zürich", "Bern"]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize(
    "broken", ['<tool_call>{"name": "weather", "arguments": {</tool_call>', "<tool_call>nothing", "a < b"]
)
def test_what_is_no_call_comes_back_as_text(client, script, broken):
    script.answer = broken
    for stream in (False, True):
        made = client.chat.completions.create(model="tiny", messages=ASKED, tools=[WEATHER], stream=stream)
        if stream:
            text = "".join(chunk.choices[0].delta.content or "" for chunk in made)
        else:
            assert made.choices[0].finish_reason == "stop"
            text = made.choices[0].message.content
        assert text == broken


@pytest.mark.parametrize("options", [{}, {"tools": [WEATHER], "tool_choice": "none"}])
def test_without_tools_an_answer_is_text(client, script, options):
    script.answer = CALL
    made = client.chat.completions.create(model="tiny", messages=ASKED, **options)
    assert made.choices[0].message.content == CALL and made.choices[0].message.tool_calls is None
    assert "# Tools" not in script.prompts[-1]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_calls_are_not_forced(client, choice):
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        client.chat.completions.create(model="tiny", messages=ASKED, tools=[WEATHER], tool_choice=choice)


def test_responses_call_functions_too(client, script):
    tool = {"type": "function", **WEATHER["function"]}
    script.answer = f"Wait.{CALL}"
    made = client.responses.create(model="tiny", input="How is it?", tools=[tool])
    message, call = made.output
    assert (message.content[0].text, call.name, json.loads(call.arguments)) == ("Wait.", "weather", {"place": "Zürich"})

    script.answer = "Rain."
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    followed = client.responses.create(model="tiny", input=[result], previous_response_id=made.id, tools=[tool])
    assert followed.output_text == "Rain."
    assert script.prompts[-1].endswith("tool\nrain\nassistant\n")

    script.answer = f"{CALL} Then."
    events = list(client.responses.create(model="tiny", input="How is it?", tools=[tool], stream=True))
    finished = events[-1].response
    assert [item.type for item in finished.output] == ["function_call", "message"]
    done = {event.output_index: event.item.id for event in events if event.type == "response.output_item.done"}
    assert [done[0], done[1]] == [item.id for item in finished.output]


def test_a_developer_is_the_system_to_a_template_that_knows_no_other(client, script):
    script.answer = "Yes."
    client.chat.completions.create(model="tiny", messages=[{"role": "developer", "content": "Be brief."}, *ASKED])
    assert script.prompts[-1].startswith("system\nBe brief.\n")


def test_instructions_are_those_of_the_response_they_came_with(client, script):
    script.answer = "Aye."
    first = client.responses.create(model="tiny", input="Hello", instructions="Be a pirate.")
    assert script.prompts[-1] == "system\nBe a pirate.\nuser\nHello\nassistant\n"
    options = {"model": "tiny", "input": "Again", "previous_response_id": first.id}
    client.responses.create(**options, instructions="Be a monk.")
    assert script.prompts[-1].endswith("monk.\nuser\nHello\nassistant\nAye.\nuser\nAgain\nassistant\n")
    client.responses.create(**options)
    assert "pirate" not in script.prompts[-1] and "Aye." in script.prompts[-1]


def test_a_response_that_breaks_off_says_so_as_an_error_event(client, script, monkeypatch):
    script.answer = "Let me"
    monkeypatch.setattr(script, "dies", True)
    events = list(client.responses.create(model="tiny", input="Hello", stream=True))
    assert (events[-1].type, events[-1].message) == ("error", "it is gone")
    assert not any(event.type == "response.completed" for event in events)


@pytest.mark.parametrize(
    ("name", "value"), [("tools", [WEATHER]), ("tool_choice", "none"), ("chat_template_kwargs", {"a": 1})]
)
def test_what_is_for_the_template_is_refused_beside_a_suffix(client, name, value):
    body = {"continuation_of": "some", "continuation_suffix": "Go on.", name: value}
    with pytest.raises(openai.BadRequestError) as refused:
        client.post("/chat/completions", body=body, cast_to=object)
    assert refused.value.param == name
