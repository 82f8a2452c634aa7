"""Think, then search, over HTTP: in one request or two, within a catalogue, and refused by name where it cannot be."""

import json
import subprocess
import sys

import pytest

from tests.servers import running

PROMPT = [(7 * token * token + token) % 256 for token in range(100)]
ITEMS = {f"item {number}": [number % 7, 10 + number % 11, 30 + number % 13] for number in range(200)}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    path = tmp_path_factory.mktemp("catalogue") / "items.json"
    path.write_text(json.dumps(ITEMS))
    with running("tiny", "--catalogue", f"items={path}", "--num-blocks", "400") as server:
        server.items = path
        yield server


def posted(server, path, body):
    status, _, found = server.post(path, body)
    assert status == 200, found
    return found


def lines(answer):
    return [(row["token_ids"], row["score"]) for row in answer["data"]]


def think(**more):
    return {"temperature": 0, "max_tokens": 12, "ignore_eos": True, **more}


def test_one_request_finds_what_two_do(server):
    """Going on from the state of a thought, and doing both in one request: the same items with the same scores."""
    suffix, beam = [1, 2, 3], {"width": 16, "catalogue": "items"}
    first = posted(server, "/v1/completions", {"prompt": PROMPT, **think(), "hold_seconds": 60})
    body = {"continuation_of": first["id"], "continuation_token_ids": suffix, "beam": beam}
    continued = posted(server, "/v1/recommend", body)
    usage = continued["usage"]
    assert usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"] == 1 + len(suffix)
    fused = posted(server, "/v1/recommend", {"prompt": PROMPT, "think": think(), "suffix": suffix, "beam": beam})
    assert fused["usage"]["search_prefill_tokens"] == 1 + len(suffix)
    [thought] = fused["thoughts"]
    assert thought["num_tokens"] == 12 and thought["finish_reason"] == "length"
    assert thought["text"] == first["choices"][0]["text"]
    assert lines(fused) == lines(continued) and len(lines(fused)) == 16
    for row in fused["data"]:
        assert row["items"] and all(ITEMS[item] == row["token_ids"] for item in row["items"])
    assert [row["rank"] for row in fused["data"]] == list(range(16))


def test_beam_search_as_vllm_has_it(server):
    body = {"prompt": PROMPT, "use_beam_search": True, "n": 8, "max_tokens": 3, "temperature": 0, "logprobs": 0}
    found = posted(server, "/v1/completions", body)
    assert [choice["index"] for choice in found["choices"]] == list(range(8))
    scores = [choice["score"] for choice in found["choices"]]
    assert scores == sorted(scores, reverse=True)
    for choice in found["choices"]:
        own = choice["logprobs"]["token_logprobs"]
        assert sum(own) == pytest.approx(choice["cumulative_logprob"]) == pytest.approx(choice["score"] * len(own))
    assert found["usage"]["completion_tokens"] == 24
    streamed = server.request("POST", "/v1/completions", body | {"stream": True})[2]
    events = [json.loads(line[6:]) for line in str(streamed).splitlines() if line.startswith("data: {")]
    assert [event["choices"][0]["text"] for event in events] == [choice["text"] for choice in found["choices"]]
    wide = posted(server, "/v1/completions", body | {"beam_width": 64, "n": 2})
    assert len(wide["choices"]) == 2 and wide["choices"][0]["score"] >= found["choices"][0]["score"] - 1e-6


def test_many_thoughts(server):
    body = {
        "prompt": PROMPT,
        "think": think(n=4, temperature=1.0, seed=5, stop="z"),
        "suffix": "go",
        "beam": {"width": 8, "catalogue": "items"},
    }
    found = posted(server, "/v1/recommend", body)
    assert len(found["thoughts"]) == 4 and len(found["data"]) == 8
    assert len({tuple(row["token_ids"]) for row in found["data"]}) == 8
    assert posted(server, "/v1/recommend", body)["data"] == found["data"]


def test_allow_deny_and_a_reload_meanwhile(server):
    beam = {"width": 4, "catalogue": "items"}
    best = posted(server, "/v1/recommend", {"prompt": PROMPT, "beam": beam})["data"][0]["items"]
    denied = posted(server, "/v1/recommend", {"prompt": PROMPT, "beam": beam | {"deny": best}})
    assert not {item for row in denied["data"] for item in row["items"]} & set(best)
    allowed = posted(server, "/v1/recommend", {"prompt": PROMPT, "beam": beam | {"allow": ["item 3", "item 4"]}})
    assert sorted(item for row in allowed["data"] for item in row["items"]) == ["item 3", "item 4"]
    assert server.get("/v1/catalogues")[2]["data"] == [{"id": "items", "object": "catalogue", "num_items": 200}]
    server.items.write_text(json.dumps({"only": [1, 2, 3]}))
    assert posted(server, "/v1/catalogues/items/reload", {})["num_items"] == 1
    assert posted(server, "/v1/recommend", {"prompt": PROMPT, "beam": beam})["data"][0]["items"] == ["only"]
    server.items.write_text("{")
    assert server.post("/v1/catalogues/items/reload")[0] == 400
    assert posted(server, "/v1/recommend", {"prompt": PROMPT, "beam": beam})["data"][0]["items"] == ["only"]
    server.items.write_text(json.dumps(ITEMS))
    posted(server, "/v1/catalogues/items/reload", {})
    assert server.post("/v1/catalogues/others/reload")[0] == 404
    assert server.post("/v1/check")[0] == 200


def test_what_is_sampled_can_be_limited_too(server):
    body = {
        "prompt": PROMPT,
        "max_tokens": 20,
        "temperature": 1.0,
        "seed": 1,
        "allowed_token_ids": [65, 66],
        "ignore_eos": True,
    }
    text = posted(server, "/v1/completions", body)["choices"][0]["text"]
    assert len(text) == 20 and set(text) <= set("AB")


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"prompt": "a", "beam_width": 4}, "beam_width"),
        ("/v1/completions", {"prompt": "a", "catalogue": "items"}, "catalogue"),
        ("/v1/completions", {"prompt": "a", "use_beam_search": True, "top_p": 0.5}, "top_p"),
        ("/v1/completions", {"prompt": "a", "use_beam_search": True, "stop": "x"}, "stop"),
        ("/v1/completions", {"prompt": "a", "use_beam_search": True, "logprobs": 3}, "logprobs"),
        ("/v1/completions", {"prompt": "a", "use_beam_search": True, "n": 4, "beam_width": 2}, "beam_width"),
        ("/v1/recommend", {"beam": {"max_tokens": 2}}, "prompt"),
        ("/v1/recommend", {"prompt": "a", "beam": {"width": 4}}, "max_tokens"),
        ("/v1/recommend", {"prompt": "a", "beam": {"width": 4, "n": 5, "max_tokens": 2}}, "n"),
        ("/v1/recommend", {"prompt": "a", "beam": {"catalogue": "none"}}, "catalogue"),
        ("/v1/recommend", {"prompt": "a", "beam": {"catalogue": "items", "deny": ["nothing"]}}, "deny"),
        ("/v1/recommend", {"prompt": "a", "suffix": "b", "beam": {"catalogue": "items"}}, "suffix"),
        ("/v1/recommend", {"prompt": "a", "beam": {"catalogue": "items", "allow": []}}, "allow"),
        ("/v1/recommend", {"prompt": "a", "beam": {"width": 513, "max_tokens": 1}}, "beam"),
        ("/v1/recommend", {"prompt": "a", "beam": {"widht": 5}}, "beam"),
        ("/v1/recommend", {"prompt": "a", "beam": {"catalogue": "items", "max_tokens": 2}}, "max_tokens"),
        ("/v1/recommend", {"prompt": "a", "beam": {"max_tokens": 1}, "stream": True}, "stream"),
    ],
)
def test_what_cannot_be_is_refused_by_name(server, path, body, field):
    status, _, found = server.post(path, body)
    assert status == 400, found
    assert field in json.dumps(found["error"])


def test_a_suffix_outside_the_vocabulary_harms_nobody(server):
    first = posted(server, "/v1/completions", {"prompt": PROMPT, "max_tokens": 2, "hold_seconds": 60})
    parent = {"continuation_of": first["id"], "continuation_token_ids": [100_000]}
    for path, body in (
        ("/v1/recommend", {"beam": {"catalogue": "items"}}),
        ("/v1/completions", {"use_beam_search": True, "n": 2}),
    ):
        assert server.post(path, parent | body)[0] == 400
    neutral = {"top_p": 1, "presence_penalty": 0, "stop": None, "logit_bias": {}}
    assert (
        len(posted(server, "/v1/completions", {"prompt": "a", "use_beam_search": True, "n": 3} | neutral)["choices"])
        == 3
    )


def test_compile_and_serve(tmp_path):
    (tmp_path / "items.csv").write_text("item,a,b\nx,1,2\ny,1,3\n")
    command = [
        sys.executable,
        "-m",
        "segue",
        "catalogue",
        str(tmp_path / "items.csv"),
        "--out",
        str(tmp_path / "items.bin"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "2 items" in done.stdout
    with running("tiny", "--catalogue", f"items={tmp_path / 'items.bin'}") as server:
        found = posted(server, "/v1/recommend", {"prompt": "a", "beam": {"catalogue": "items"}})
        assert sorted(item for row in found["data"] for item in row["items"]) == ["x", "y"]
