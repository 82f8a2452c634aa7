import math

import pytest

from segue.base.errors import InvalidRequest
from segue.base.types import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", math.nan),
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", math.nan),
        ("min_p", -1),
        ("top_k", -1),
        ("top_k", 1.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("presence_penalty", 3),
        ("frequency_penalty", math.nan),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {"1": 1.0}),
        ("seed", -1),
        ("seed", 2**63),
        ("n", 0),
        ("n", 5000),
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("logprobs", 101),
        ("logprobs", -1),
        ("stop", ("",)),
        ("stop", (3,)),
        ("stop_token_ids", (-2,)),
        ("stop_token_ids", 5),
        ("stop", 5),
        ("logit_bias", [1]),
        ("temperature", 10**400),
        ("ignore_eos", "no"),
        ("include_stop", 1),
    ],
)
def test_a_value_that_cannot_work_is_refused_by_name(field, value):
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field and str(caught.value).startswith(field)


def test_what_was_checked_cannot_change():
    bias = {1: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias[2] = math.nan
    assert dict(params.logit_bias) == {1: 1.0}
    with pytest.raises(TypeError):
        params.logit_bias[3] = 1.0


def test_one_stop_string_need_not_be_wrapped():
    assert SamplingParams(stop="end").stop == ("end",)
