"""A request that was sent out waits for a word about it, and not for ever."""

import asyncio

import pytest

from segue.base.errors import InvalidRequest
from segue.server.requests import Exports


class FakeEngine:
    def __init__(self):
        self.asked = []

    async def ask(self, verb, **arguments):
        self.asked.append((verb, arguments["request_id"]))


class FakeService:
    def __init__(self):
        self.engine = FakeEngine()


def told(play, patience=0.01):
    """What the engine heard while `play` ran, and a little after."""

    async def run():
        service = FakeService()
        exports = Exports(service, patience)
        await play(exports)
        await asyncio.sleep(0.1)
        return service.engine.asked

    return asyncio.run(run())


def test_one_that_nobody_commits_goes_on():
    async def play(exports):
        exports.add("r", "salt")
        await asyncio.sleep(0.1)
        with pytest.raises(InvalidRequest):  # too late: it runs here
            await exports.end("r", "salt", "commit_export")

    assert told(play) == [("abort_export", "r")]


@pytest.mark.parametrize("verb", ["commit_export", "abort_export"])
def test_a_word_in_time_is_the_last_one(verb):
    async def play(exports):
        exports.add("r", "salt")
        with pytest.raises(InvalidRequest):
            await exports.end("r", "another's", verb)
        await exports.end("r", "salt", verb)
        exports.abort("r")

    assert told(play) == [(verb, "r")]


def test_a_cut_download_is_given_up_once():
    async def play(exports):
        exports.add("r", "salt")
        exports.abort("r")
        exports.abort("r")

    assert told(play) == [("abort_export", "r")]
