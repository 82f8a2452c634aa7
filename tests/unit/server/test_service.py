"""What every request that generates goes through: tenants' limits, one count however often it is tried, and its text."""

import asyncio

import pytest

from segue.base.config import Environment
from segue.base.errors import EngineClosed, InvalidRequest, UnknownState
from segue.base.types import SamplingParams
from segue.model.loading import open_model
from segue.server.generation import _choice
from segue.server.messages import Part
from segue.server.metrics import Metrics
from segue.server.remote_engine import Answering, Call
from segue.server.service import Service
from segue.server.tenants import Gate, Tenant, Tenants, TooMany, read_tenants

PARAMS = SamplingParams(max_tokens=3)


class Forgetful:
    """An engine that knows no parent, and answers what needs none."""

    def __init__(self):
        self.tried, self.is_gone = [], False

    def submit(self, calls):
        if self.is_gone:
            raise EngineClosed("it is starting")
        [call] = calls
        self.tried.append(call.parent)
        answering = Answering(self, calls)
        if call.parent is not None:
            answering.fail(UnknownState("who is that?"))
        else:
            answering.put(Part(call.request_id, 0, [65, 66], "", [], "length", (0, 0, 0, 1)))
        return answering

    def forget(self, request_id):
        pass

    abort = forget


@pytest.fixture(scope="module")
def model():
    return open_model("tiny", Environment.read().cache_dir)


@pytest.fixture
def service(model):
    return Service(model, Forgetful(), Tenants({}), Metrics())


def counted(service):
    """Requests by what became of them, and how many have a time to their last token."""
    lines = service.metrics.render({}).decode().splitlines()
    outcomes = {
        line.split('outcome="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith("segue:requests_total{")
    }
    [timed] = [line for line in lines if line.startswith("segue:e2e_request_latency_seconds_count")]
    return outcomes, float(timed.rsplit(" ", 1)[1])


async def text_of(generation):
    return "".join([piece.text async for pieces in generation.pieces() for piece in pieces])


def test_what_is_tried_again_without_its_parent_is_one_request(service):
    gate = Gate(Tenant("slow", requests_per_minute=6))  # one at a time, and the next in ten seconds
    call, alone = Call("a", [1], PARAMS, parent="gone"), Call("a", [1, 2, 3], PARAMS)

    async def ask(**more):
        return await text_of(await service.run(gate, [call], **more))

    assert asyncio.run(ask(alone=alone)) == "AB"
    assert service.engine.tried == ["gone", None]
    assert (gate.num_running, service.num_sequences) == (0, 0)
    with pytest.raises(TooMany):
        asyncio.run(ask(alone=alone))
    assert counted(service) == ({"finished": 1.0}, 1.0)


def test_what_could_not_be_is_counted_and_has_no_last_token(service):
    gate = Gate(Tenant())

    async def ask(call):
        return await service.run(gate, [call])

    with pytest.raises(UnknownState):
        asyncio.run(ask(Call("a", [1], PARAMS, parent="gone")))
    service.engine.is_gone = True
    with pytest.raises(EngineClosed):
        asyncio.run(ask(Call("a", [1], PARAMS)))
    assert counted(service) == ({"refused": 1.0, "failed": 1.0}, 0.0)
    assert (gate.num_running, service.num_sequences) == (0, 0)


def test_more_than_a_tenant_may_ever_have_at_once_is_no_matter_of_waiting():
    with pytest.raises(InvalidRequest, match="at most 2 requests at a time"), Gate(Tenant(max_concurrent=2)).entry(3):
        pass
    with pytest.raises(InvalidRequest, match="at most 2 requests at once"):  # noqa: SIM117
        with Gate(Tenant(requests_per_minute=12)).entry(3):
            pass
    with pytest.raises(TooMany), Gate(Tenant(requests_per_minute=0)).entry():
        pass
    gate = Gate(Tenant(max_concurrent=2))
    with gate.entry(2), pytest.raises(TooMany), gate.entry():
        pass


def test_a_key_without_a_name_does_not_get_another_tenants(tmp_path):
    file = tmp_path / "keys.toml"
    file.write_text('[[tenant]]\nname = "key-1"\nkey = "a-key-of-the-file"\n')
    with pytest.raises(InvalidRequest, match="'key-1' is the name of a tenant in the file"):
        read_tenants(file, ["a-key-from-outside"])
    assert [tenant.name for tenant in read_tenants(file, ["a-key-of-the-file"])] == ["key-1"]


@pytest.mark.parametrize("is_split", [False, True])
def test_special_tokens_are_shown_where_calls_are_written_with_them_also_beside_a_stop_string(model, is_split):
    special = min(model.tokenizer.special_ids)
    name = model.tokenizer.token_bytes(special).decode()
    tokens = [special, *b"call", special, *b" zZzz more"]
    for stops, wanted in (((), f"{name}call{name} zZzz more"), (("zz",), f"{name}call{name} zZ")):
        choice = _choice(Call("a", [], SamplingParams(stop=stops)), model.tokenizer, show_special=True)
        parts = [[token] for token in tokens] if is_split else [tokens]
        text = "".join(choice.text_of(Part("a", 0, part, "", [])) for part in parts)
        assert text + choice.text_of(Part("a", 0, [], "", [], "length")) == wanted
    ended = _choice(Call("a", [], SamplingParams(stop=("zz",))), model.tokenizer, show_special=True)
    assert ended.text_of(Part("a", 0, [*b"hi z", special], "", [], "stop")) == "hi z", "what ends it is no part of it"
