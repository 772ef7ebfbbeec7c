"""`Metrics`: what Prometheus reads of an engine."""

from __future__ import annotations

import math

import pytest
from prometheus_client.parser import text_string_to_metric_families

from minisgl.errors import EngineDeadError
from minisgl.message import RequestStart
from minisgl.server.metrics import FINISHED_REASONS, Metrics
from tests.unit.observed import deliver, generation, stats

START = RequestStart(2, received_s=100.5, started_s=101.0, first_token_s=103.0)


def samples(metrics: Metrics) -> dict[str, float]:
    """Values by `name` or `name{label}`, without prefix and without the model's label."""
    text, content_type = metrics.render()
    assert content_type.startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "m"
            name = sample.name.removeprefix("minisgl:")
            assert name != sample.name
            if labels:
                name += "{" + ",".join(labels.values()) + "}"
            found[name] = sample.value
    return found


def test_every_metric_is_there_before_the_first_request() -> None:
    found = samples(Metrics("m"))
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert found[name] == 0
    for name in (
        "prompt_tokens",
        "generation_tokens",
        "prefix_cache_queries",
        "prefix_cache_hits",
        "num_preemptions",
    ):
        assert found[f"{name}_total"] == 0
    for name in (
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "iteration_tokens",
    ):
        assert found[f"{name}_count"] == 0
    for reason in FINISHED_REASONS:
        assert found[f"request_success_total{{{reason}}}"] == 0


def test_a_request_is_counted_and_timed() -> None:
    metrics, one = Metrics("m"), generation()
    metrics.on_submit(one)
    assert samples(metrics)["prompt_tokens_total"] == 0
    deliver(metrics, one, 104.0, start=START)
    deliver(metrics, one, 105.0, (6, 7))
    deliver(metrics, one, 108.0, (8,), finish_reason="length")

    found = samples(metrics)
    assert found["prompt_tokens_total"] == 3
    assert found["generation_tokens_total"] == 4
    assert found["request_success_total{length}"] == 1
    assert found["request_success_total{stop}"] == 0
    expected = {
        "time_to_first_token_seconds": 4.0,
        "e2e_request_latency_seconds": 8.0,
        "request_queue_time_seconds": 1.0,
        "request_prefill_time_seconds": 2.0,
        "request_decode_time_seconds": 5.0,
    }
    for name, seconds in expected.items():
        assert (found[f"{name}_count"], found[f"{name}_sum"]) == (1, seconds), name


def test_tokens_that_come_together_share_the_time_since_the_last() -> None:
    metrics, one = Metrics("m"), generation()
    metrics.on_submit(one)
    deliver(metrics, one, 104.0, start=START)
    deliver(metrics, one, 104.6, (6, 7, 8), finish_reason="stop")
    found = samples(metrics)
    assert found["inter_token_latency_seconds_count"] == 3
    assert found["inter_token_latency_seconds_sum"] == pytest.approx(0.6)
    assert found["inter_token_latency_seconds_bucket{0.1}"] == 0
    assert found["inter_token_latency_seconds_bucket{0.2}"] == 3


def test_sequences_of_one_request_are_timed_apart_and_their_prompt_counts_once() -> None:
    metrics, one = Metrics("m"), generation(n=2)
    metrics.on_submit(one)
    deliver(metrics, one, 101.0, start=START)
    deliver(metrics, one, 105.0, start=START, choice=1)  # no time between tokens: another sequence
    deliver(metrics, one, 105.0, finish_reason="stop")
    deliver(metrics, one, 106.0, finish_reason="length", choice=1)
    found = samples(metrics)
    assert found["prompt_tokens_total"] == 3
    assert found["inter_token_latency_seconds_count"] == 2
    assert found["inter_token_latency_seconds_sum"] == 5.0  # 4 s and 1 s
    assert found["time_to_first_token_seconds_count"] == 1
    assert found["e2e_request_latency_seconds_count"] == 1
    assert found["request_success_total{stop}"] == found["request_success_total{length}"] == 1


def test_requests_that_were_broken_off_are_counted_but_not_timed() -> None:
    metrics = Metrics("m")
    aborted, dropped, failed = (generation(first_uid=uid) for uid in (1, 2, 3))
    for one in (aborted, dropped, failed):
        metrics.on_submit(one)
    deliver(metrics, aborted, 104.0, start=START)
    deliver(metrics, aborted, 105.0, (), finish_reason="abort")
    metrics.on_end(dropped)
    failed.fail(EngineDeadError("gone"))
    metrics.on_end(failed)
    found = samples(metrics)
    assert found["request_success_total{abort}"] == 2
    assert found["request_success_total{error}"] == 1
    assert found["e2e_request_latency_seconds_count"] == 0
    assert found["time_to_first_token_seconds_count"] == 1  # it did get one


def test_nothing_is_kept_of_requests_that_ended() -> None:
    metrics = Metrics("m")
    for uid in range(5):
        one = generation(first_uid=uid)
        metrics.on_submit(one)
        deliver(metrics, one, 104.0, start=START, finish_reason="stop")
        metrics.on_end(one)  # told twice: counted once
    assert not metrics._live
    assert samples(metrics)["request_success_total{stop}"] == 5


def test_stats_set_gauges_and_advance_counters_by_their_difference() -> None:
    metrics = Metrics("m")
    counts = {"num_queried_tokens": 40, "num_hit_tokens": 16, "num_retractions": 1}
    metrics.on_stats(stats(1.0, 1, num_running=3, num_waiting=2, num_used_pages=25, **counts))
    found = samples(metrics)
    assert found["num_requests_running"] == 3
    assert found["num_requests_waiting"] == 2
    assert found["kv_cache_usage_perc"] == 0.25
    counts = {"num_queried_tokens": 50, "num_hit_tokens": 20, "num_retractions": 1}
    metrics.on_stats(stats(2.0, 2, **counts))
    found = samples(metrics)
    assert found["num_requests_running"] == found["kv_cache_usage_perc"] == 0
    assert found["prefix_cache_queries_total"] == 50
    assert found["prefix_cache_hits_total"] == 20
    assert found["num_preemptions_total"] == 1


def test_iteration_tokens_are_what_each_step_computed() -> None:
    metrics = Metrics("m")
    metrics.on_stats(stats(1.0, 1, num_prefill_tokens=12))
    metrics.on_stats(stats(2.0, 2, num_prefill_tokens=12, num_decode_tokens=1))
    metrics.on_stats(stats(2.0, 2, num_prefill_tokens=12, num_decode_tokens=1))  # the same again
    metrics.on_stats(stats(4.0, 4, num_prefill_tokens=18, num_decode_tokens=3))  # two at once
    found = samples(metrics)
    assert found["iteration_tokens_count"] == 4
    assert found["iteration_tokens_sum"] == 21
    assert found["iteration_tokens_bucket{1.0}"] == 1
    assert found["iteration_tokens_bucket{4.0}"] == 3
    assert found["iteration_tokens_bucket{16.0}"] == 4


def test_errors_are_counted_by_status() -> None:
    metrics = Metrics("m")
    for status in (400, 400, 503):
        metrics.on_error(status)
    found = samples(metrics)
    assert found["request_errors_total{400}"] == 2
    assert found["request_errors_total{503}"] == 1


def test_two_engines_of_one_process_count_apart() -> None:
    first, second = Metrics("m"), Metrics("m")
    first.on_error(400)
    assert "request_errors_total{400}" not in samples(second)


def test_buckets_grow_from_a_millisecond_to_minutes() -> None:
    prefix = "time_to_first_token_seconds_bucket{"
    bounds = [
        float(name[len(prefix) : -1]) for name in samples(Metrics("m")) if name.startswith(prefix)
    ]
    assert bounds == sorted(set(bounds))
    assert bounds[0] == 0.001
    assert bounds[-2:] == [500.0, math.inf]
