"""`SamplingParams`: ranges, defaults, and that nothing is changed behind the caller's back."""

from __future__ import annotations

import dataclasses
import math

import msgspec
import pytest

from minisgl import SamplingParams
from minisgl.errors import InvalidRequestError

BAD = [
    ("max_tokens", 0),
    ("max_tokens", 1.5),
    ("max_tokens", True),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "hot"),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("top_k", -2),
    ("top_k", 1.0),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("presence_penalty", 2.5),
    ("presence_penalty", None),
    ("frequency_penalty", -2.5),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", -1.0),
    ("repetition_penalty", math.inf),
    ("n", 0),
    ("n", 129),
    ("seed", 2**63),
    ("seed", -(2**63) - 1),
    ("min_tokens", -1),
    ("logprobs", -1),
    ("logprobs", 21),
    ("prompt_logprobs", 21),
    ("stop", [""]),
    ("stop", [3]),
    ("stop", 3),
    ("stop", ["x"] * 17),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["a"]),
    ("stop_token_ids", 5),
    ("logit_bias", {1: 101.0}),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {"1": 1.0}),
    ("logit_bias", [1]),
    ("ignore_eos", 1),
    # Beyond what can be sent to another process, or checked in no time.
    ("max_tokens", 2**63),
    ("min_tokens", 2**63),
    ("top_k", 2**63),
    ("stop_token_ids", [2**63]),
    ("stop_token_ids", [1, True]),
    ("stop_token_ids", [1] * 129),
    ("logit_bias", {2**63: 1.0}),
    ("logit_bias", dict.fromkeys(range(1025), 1.0)),
    ("stop", ["\ud800"]),
    ("stop", ["x" * 1025]),
    ("stop", "x" * 1025),
    ("skip_special_tokens", "yes"),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=[f"{n}={v!r}"[:30] for n, v in BAD])
def test_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(InvalidRequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert len(str(caught.value)) < 400


def test_bounds_themselves_are_accepted():
    SamplingParams(
        max_tokens=1,
        temperature=2.0,
        top_p=1.0,
        top_k=-1,
        min_p=1.0,
        presence_penalty=-2,
        frequency_penalty=2,
        repetition_penalty=1e-3,
        n=128,
        seed=-(2**63),
        min_tokens=1,
        logprobs=20,
        prompt_logprobs=0,
        stop="x",
        logit_bias={0: -100},
    )
    SamplingParams(
        max_tokens=2**63 - 1,
        top_k=2**63 - 1,
        stop=["x" * 1024] * 16,
        stop_token_ids=[*range(127), 2**63 - 1],
        logit_bias=dict.fromkeys(range(1024), 100),
    )


@pytest.mark.parametrize("name", ["top_k", "n", "temperature", "stop_token_ids"])
def test_a_number_too_long_to_be_shown_is_refused(name):
    value = [10**5000] if name == "stop_token_ids" else 10**5000
    with pytest.raises(InvalidRequestError, match=f"{name} = a int too long to show must be"):
        SamplingParams(**{name: value})


def test_all_that_is_accepted_can_be_sent():
    params = SamplingParams(repetition_penalty=10**300, seed=-(2**63), top_k=2**63 - 1, stop="é😀")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def test_stop_ids_count_once():
    assert SamplingParams(stop_token_ids=[7, 2, 7, 2]).stop_token_ids == (7, 2)


def test_min_tokens_is_at_most_max_tokens():
    with pytest.raises(InvalidRequestError, match="min_tokens = 5 must be from 0 to 4"):
        SamplingParams(max_tokens=4, min_tokens=5)


def test_defaults_are_the_request_then_the_model_then_openai():
    asked = SamplingParams(top_p=0.5)
    resolved = asked.resolve_defaults({"temperature": 0.6, "top_p": 0.9, "top_k": 20})
    assert (resolved.temperature, resolved.top_p, resolved.top_k) == (0.6, 0.5, 20)
    assert (resolved.min_p, resolved.repetition_penalty, resolved.max_tokens) == (0.0, 1.0, 16)
    assert asked == SamplingParams(top_p=0.5), "the caller's object changed"


def test_resolved_parameters_share_nothing_that_may_change():
    asked = SamplingParams(logit_bias={1: 2.0}, stop=["a"], stop_token_ids=[3])
    resolved = asked.resolve_defaults({})
    asked.logit_bias[1] = 5.0
    assert resolved.logit_bias == {1: 2.0}
    assert (resolved.stop, resolved.stop_token_ids) == (("a",), (3,))


def test_a_model_s_own_length_replaces_the_default_but_not_the_request():
    assert SamplingParams().resolve_defaults({"max_new_tokens": 7}).max_tokens == 7
    assert SamplingParams(max_tokens=3).resolve_defaults({"max_new_tokens": 7}).max_tokens == 3


def test_do_sample_false_means_greedy_unless_the_request_says_otherwise():
    assert SamplingParams().resolve_defaults({"do_sample": False, "temperature": 0.7}).greedy
    warm = SamplingParams(temperature=0.7)
    assert not warm.resolve_defaults({"do_sample": False}).greedy


def test_a_bad_model_default_is_refused_like_a_request():
    with pytest.raises(InvalidRequestError, match="temperature"):
        SamplingParams().resolve_defaults({"temperature": 9.0})


def test_lists_and_maps_are_copied():
    stops, bias = ["a"], {1: 2.0}
    params = SamplingParams(stop=stops, logit_bias=bias)
    stops.append("b")
    bias[2] = 3.0
    assert params.stop == ("a",)
    assert params.logit_bias == {1: 2.0}


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 1.0  # type: ignore[misc]


@pytest.mark.parametrize("value", [0, 9e-6])
def test_tiny_temperatures_are_greedy(value):
    assert SamplingParams(temperature=value).greedy
    assert not SamplingParams(temperature=1e-4).greedy


def test_ids_outside_the_vocabulary_are_named():
    with pytest.raises(InvalidRequestError, match="stop_token_ids = 10 .* vocabulary of 10"):
        SamplingParams(stop_token_ids=[10]).check_vocabulary(10)
    with pytest.raises(InvalidRequestError, match="logit_bias = 12"):
        SamplingParams(logit_bias={12: 1.0}).check_vocabulary(10)
    SamplingParams(stop_token_ids=[9], logit_bias={0: 1.0}).check_vocabulary(10)
