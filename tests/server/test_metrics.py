"""`/metrics`: every name is there, and what is counted is what was asked for."""

from __future__ import annotations

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.server.answers import CHAT, COMPLETIONS, HELLO, ok
from tests.server.serving import PROSE, wait_for

GAUGES = {"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"}
COUNTERS = {
    "prompt_tokens",
    "generation_tokens",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions",
    "request_success",
    "request_errors",
}
HISTOGRAMS = {
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "iteration_tokens",
}
Samples = dict[tuple[str, str], float]


def families(client: httpx.Client) -> dict[str, str]:
    """Type by name."""
    text = client.get("/metrics").text
    return {family.name: family.type for family in text_string_to_metric_families(text)}


def samples(client: httpx.Client) -> Samples:
    """Values by name without prefix, and the further label."""
    response = client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")
    found: Samples = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "tiny"
            assert sample.value == sample.value  # no NaN
            found[sample.name.removeprefix("minisgl:"), "".join(labels.values())] = sample.value
    return found


def samples_at_rest(client: httpx.Client) -> Samples:
    """The same, once nothing runs: the counts of requests that ended before are all there."""
    latest: Samples = {}

    def rests() -> bool:
        latest.update(samples(client))
        return latest["num_requests_running", ""] == 0 == latest["num_requests_waiting", ""]

    assert wait_for(rests, 30)
    return latest


def moved(before: Samples, after: Samples, name: str, label: str = "") -> float:
    return after[name, label] - before.get((name, label), 0.0)


def test_all_names_are_there_with_their_types(tiny: httpx.Client) -> None:
    tiny.get("/no/such/route")
    expected = {f"minisgl:{name}": "gauge" for name in GAUGES}
    expected |= {f"minisgl:{name}": "counter" for name in COUNTERS}
    expected |= {f"minisgl:{name}": "histogram" for name in HISTOGRAMS}
    assert {name: kind for name, kind in families(tiny).items() if name in expected} == expected


def test_counters_move_by_what_was_done(tiny: httpx.Client) -> None:
    tiny.post("/flush_cache")
    before = samples_at_rest(tiny)
    body = {"prompt": PROSE, "max_tokens": 5, "ignore_eos": True}
    usages = [ok(tiny.post(COMPLETIONS, json={**body, "n": n}))["usage"] for n in (1, 2)]
    chat = {"messages": HELLO, "logit_bias": {"319": 100}, "temperature": 0}
    usages.append(ok(tiny.post(CHAT, json=chat))["usage"])  # ends at once
    for _ in range(2):
        assert tiny.post(CHAT, json={}).status_code == 400
    assert tiny.get("/no/such/route").status_code == 404
    prompts = sum(usage["prompt_tokens"] for usage in usages)
    tokens = sum(usage["completion_tokens"] for usage in usages)
    assert tokens == 5 + 10 + 1
    after = samples_at_rest(tiny)
    assert moved(before, after, "prompt_tokens_total") == prompts
    assert moved(before, after, "generation_tokens_total") == tokens
    assert moved(before, after, "request_success_total", "length") == 3  # sequences
    assert moved(before, after, "request_success_total", "stop") == 1
    assert moved(before, after, "request_success_total", "abort") == 0
    assert moved(before, after, "request_errors_total", "400") == 2
    assert moved(before, after, "request_errors_total", "404") == 1
    assert moved(before, after, "prefix_cache_hits_total") > 0
    assert moved(before, after, "prefix_cache_queries_total") >= prompts
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
        assert moved(before, after, f"{name}_seconds_count") == 3  # requests
    assert moved(before, after, "inter_token_latency_seconds_count") == tokens - 4
    assert moved(before, after, "iteration_tokens_count") > 0
    assert 0 <= after["kv_cache_usage_perc", ""] <= 1


def test_an_aborted_request_is_counted_as_one(guarded: httpx.Client) -> None:
    before = samples_at_rest(guarded)
    body = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with guarded.stream("POST", COMPLETIONS, json=body) as running:
        chunks = running.iter_raw()
        next(chunks)
        assert samples(guarded)["num_requests_running", ""] == 1
    after = samples_at_rest(guarded)
    assert moved(before, after, "request_success_total", "abort") == 1
    assert moved(before, after, "e2e_request_latency_seconds_count") == 0
