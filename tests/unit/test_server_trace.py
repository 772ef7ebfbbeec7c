"""`TraceWriter`, the loggers of the server, and the JSON form of log lines."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minisgl.errors import ConfigError
from minisgl.message import RequestStart
from minisgl.server.logs import RequestLogger, StatsLogger
from minisgl.server.trace import TraceWriter
from minisgl.utils.logger import configure_logging, get_logger
from tests.unit.observed import deliver, generation, stats, step

START = RequestStart(2, received_s=100.5, started_s=101.0, first_token_s=103.0)


# -- traces ----------------------------------------------------------------------------------


def events(path: Path) -> list[dict[str, Any]]:
    """The trace, its format checked: see "Trace Event Format", complete and metadata events."""
    found: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))
    for event in found:
        assert event["ph"] in ("X", "M")
        assert isinstance(event["name"], str)
        assert {type(event[key]) for key in ("ts", "pid", "tid")} == {int}
        assert isinstance(event["args"], dict)
        if event["ph"] == "X":
            assert event["dur"] >= 0
    return found


def spans(path: Path) -> dict[str, dict[str, Any]]:
    return {event["name"]: event for event in events(path) if event["ph"] == "X"}


def test_a_request_is_drawn_as_queue_prefill_and_decode(tmp_path: Path) -> None:
    path, one = tmp_path / "trace.json", generation()
    trace = TraceWriter(str(path))
    trace.on_submit(one)
    deliver(trace, one, 104.0, start=START)
    deliver(trace, one, 105.5, (6, 7), finish_reason="stop")
    trace.close()

    drawn = spans(path)
    times = {name: (span["ts"], span["ts"] + span["dur"]) for name, span in drawn.items()}
    assert times == {
        "cmpl-1": (100_000_000, 105_500_000),
        "queue": (100_000_000, 101_000_000),
        "prefill": (101_000_000, 103_000_000),
        "decode": (103_000_000, 105_500_000),
    }
    assert len({span["tid"] for span in drawn.values()}) == 1
    assert drawn["cmpl-1"]["args"] == {
        "prompt_tokens": 3,
        "cached_tokens": 2,
        "output_tokens": 3,
        "finish_reason": "stop",
    }


def test_a_step_is_drawn_on_host_and_device(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = TraceWriter(str(path))
    facts = {"num_reqs": 3, "num_decode_tokens": 2, "num_prefill_tokens": 12}
    trace.on_step(step(1, 1.0, is_replayed=True, **facts))
    trace.on_step(step(2, 1.5))
    trace.close()
    drawn = spans(path)
    times = {name: (s["ts"] / 1e6, (s["ts"] + s["dur"]) / 1e6) for name, s in drawn.items()}
    assert times == {
        "plan 1": (1.0, 1.25),
        "launch 1": (1.25, 1.5),
        "read 1": (2.0, 2.25),
        "step 1": (1.5, 2.25),
        "plan 2": (1.5, 1.75),
        "launch 2": (1.75, 2.0),
        "read 2": (2.5, 2.75),
        "step 2": (2.0, 2.75),
    }
    assert {name: s["tid"] for name, s in drawn.items() if name.endswith("1")} == {
        "plan 1": 0, "launch 1": 0, "read 1": 0, "step 1": 1,
    }  # fmt: skip
    assert drawn["step 1"]["args"] == {
        "requests": 3, "decode_tokens": 2, "prefill_tokens": 12, "cuda_graph": True,
    }  # fmt: skip
    assert drawn["step 2"]["args"]["cuda_graph"] is False


def test_sequences_that_live_together_have_lanes_of_their_own_which_are_used_again(
    tmp_path: Path,
) -> None:
    path = tmp_path / "trace.json"
    trace = TraceWriter(str(path))
    first, second, third = (generation(first_uid=i, request_id=f"r{i}") for i in (1, 2, 3))
    trace.on_submit(first)
    trace.on_submit(second)
    deliver(trace, first, 104.0, start=START, finish_reason="stop")
    trace.on_submit(third)
    deliver(trace, third, 105.0, start=START, finish_reason="stop")
    deliver(trace, second, 106.0, start=START, finish_reason="stop")
    trace.close()
    drawn = spans(path)
    assert [drawn[name]["tid"] for name in ("r1", "r2", "r3")] == [2, 3, 2]
    names = {e["tid"]: e["args"]["name"] for e in events(path) if e["name"] == "thread_name"}
    assert names == {0: "host", 1: "device", 2: "lane 1", 3: "lane 2"}


def test_each_of_several_sequences_is_named(tmp_path: Path) -> None:
    path, one = tmp_path / "trace.json", generation(n=2)
    trace = TraceWriter(str(path))
    trace.on_submit(one)
    deliver(trace, one, 104.0, start=START, finish_reason="stop")
    deliver(trace, one, 105.0, (1, 2), choice=1, start=START, finish_reason="length")
    trace.close()
    drawn = spans(path)
    assert drawn["cmpl-1 [0]"]["args"]["finish_reason"] == "stop"
    assert drawn["cmpl-1 [1]"]["args"]["output_tokens"] == 2
    assert drawn["cmpl-1 [0]"]["tid"] != drawn["cmpl-1 [1]"]["tid"]


def test_a_request_that_was_dropped_in_the_queue_is_drawn_too(tmp_path: Path) -> None:
    path, one = tmp_path / "trace.json", generation()
    trace = TraceWriter(str(path))
    trace.on_submit(one)
    trace.on_end(one)
    trace.on_end(one)
    trace.close()
    drawn = [event["name"] for event in events(path) if event["ph"] == "X"]
    assert drawn == ["cmpl-1", "queue"]
    assert spans(path)["cmpl-1"]["args"]["finish_reason"] == "abort"


def test_a_request_id_can_not_break_the_file(tmp_path: Path) -> None:
    path, one = tmp_path / "trace.json", generation(request_id='"}]\n\ud800')
    trace = TraceWriter(str(path))
    trace.on_submit(one)
    trace.on_end(one)
    trace.close()
    assert '"}]\n\ud800' in spans(path)


def test_a_trace_of_nothing_is_valid_and_closing_twice_is_fine(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = TraceWriter(str(path))
    trace.close()
    trace.close()
    trace.on_step(step(1))  # too late: nothing is written
    assert {event["ph"] for event in events(path)} == {"M"}


def test_events_reach_the_file_once_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [10.0]
    monkeypatch.setattr("minisgl.server.trace.time", SimpleNamespace(monotonic=lambda: now[0]))
    path = tmp_path / "trace.json"
    trace = TraceWriter(str(path))
    trace.on_step(step(1))
    assert path.read_text() == ""
    now[0] = 11.0
    trace.on_step(step(2))
    assert path.read_text().count('"plan ') == 2
    now[0] = 11.9
    trace.on_step(step(3))
    assert path.read_text().count('"plan ') == 2
    trace.close()
    assert len(spans(path)) == 3 * 4


def test_a_file_that_can_not_be_written_is_told_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--trace-file .*no/trace.json.*No such file"):
        TraceWriter(str(tmp_path / "no" / "trace.json"))


def test_a_full_disk_ends_the_trace_and_not_the_server(caplog: pytest.LogCaptureFixture) -> None:
    trace = TraceWriter("/dev/full")  # every write to it fails with "no space left"
    trace.on_step(step(1))
    trace.close()
    trace.on_step(step(2))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "No space left" in caplog.text


# -- log lines -------------------------------------------------------------------------------


@pytest.fixture
def info(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "minisgl")
    return caplog


def test_a_busy_engine_logs_its_rates_once_an_interval(info: pytest.LogCaptureFixture) -> None:
    log, one = StatsLogger(2.0), generation()
    log.on_stats(stats(10.25, 1, num_prefill_tokens=100, num_queried_tokens=100))
    deliver(log, one, 11.0, (1, 2, 3, 4))
    log.on_stats(stats(11.0, 2, num_prefill_tokens=100, num_queried_tokens=100))
    assert not info.records
    deliver(log, one, 12.0, (5, 6))
    counts = {"num_prefill_tokens": 200, "num_queried_tokens": 400, "num_hit_tokens": 100}
    log.on_stats(stats(12.0, 3, num_running=4, num_waiting=2, num_used_pages=50, **counts))
    assert info.messages == [
        "running 4, waiting 2, prefill 100.0 tokens/s, output 3.0 tokens/s, cache hits 25.0 %, "
        "KV cache 50.0 %"
    ]
    log.on_stats(stats(13.0, 4, **counts))
    log.on_stats(stats(14.0, 5, **counts))
    assert len(info.messages) == 2
    assert "prefill 0.0 tokens/s, output 0.0 tokens/s, cache hits 0.0 %" in info.messages[1]


def test_idle_time_does_not_dilute_the_rates(info: pytest.LogCaptureFixture) -> None:
    log, one = StatsLogger(2.0), generation()
    log.on_stats(stats(10.0, 1, num_prefill_tokens=1000))
    log.on_stats(stats(1000.25, 2, num_prefill_tokens=1010))
    assert not info.records
    deliver(log, one, 1002.0, (1, 2))
    log.on_stats(stats(1002.0, 3, num_prefill_tokens=1010))
    assert "prefill 5.0 tokens/s, output 1.0 tokens/s" in info.messages[0]


def test_numbers_of_the_engine_are_fields_of_the_record(info: pytest.LogCaptureFixture) -> None:
    log = StatsLogger(1.0)
    log.on_stats(stats(10.25, 1))
    counts = {"num_queried_tokens": 8, "num_hit_tokens": 2}
    log.on_stats(stats(11.0, 2, num_running=3, num_used_pages=20, **counts))
    record = info.records[0]
    assert record.num_running == 3  # type: ignore[attr-defined]
    assert record.cache_hit_rate == 0.25  # type: ignore[attr-defined]
    assert record.kv_cache_usage == 0.2  # type: ignore[attr-defined]


def test_a_request_logs_one_line_when_it_ended(info: pytest.LogCaptureFixture) -> None:
    log, one = RequestLogger(), generation(n=2)
    log.on_submit(one)
    deliver(log, one, 104.0, start=START)
    deliver(log, one, 105.0, (6, 7), choice=1, finish_reason="length")
    assert not info.records
    deliver(log, one, 108.0, (8,), finish_reason="stop")
    assert info.messages == [
        "request 'cmpl-1': prompt 3 tokens (2 cached), output 4, first token 3000.0 ms, 8.000 s, "
        "0.5 tokens/s, stop, length"
    ]


def test_a_request_without_a_token_logs_none(info: pytest.LogCaptureFixture) -> None:
    one = generation(request_id="evil\nid")
    RequestLogger().on_end(one)
    assert "first token none" in info.messages[0]
    assert info.messages[0].endswith("abort")
    assert "\n" not in info.messages[0]


# -- the JSON form ---------------------------------------------------------------------------


@pytest.fixture
def console(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[[], str]]:
    """What was written to stderr since the last look, with no handler there at first."""
    root = logging.getLogger("minisgl")
    monkeypatch.setattr(root, "handlers", [])
    level = root.level
    yield lambda: capsys.readouterr().err
    root.setLevel(level)


def test_json_lines_carry_message_and_extra_fields(console: Callable[[], str]) -> None:
    configure_logging("info", "json")
    get_logger("minisgl.test").info("%d things", 3, extra={"request_id": "r\n1", "ids": [1, 2]})
    line = console()
    assert line.count("\n") == 1
    entry = json.loads(line)
    assert entry.pop("time").endswith("+00:00")
    assert entry == {
        "level": "INFO",
        "logger": "minisgl.test",
        "message": "3 things",
        "request_id": "r\n1",
        "ids": [1, 2],
    }


def test_json_lines_carry_stack_traces_and_what_json_has_no_type_for(
    console: Callable[[], str],
) -> None:
    configure_logging("info", "json")
    try:
        raise ValueError("broken")
    except ValueError:
        get_logger("test").exception("it failed", extra={"path": Path("/a")})
    entry = json.loads(console())
    assert "ValueError: broken" in entry["exception"]
    assert entry["path"] == "/a"


def test_the_numbers_of_a_request_are_fields_of_its_json_line(console: Callable[[], str]) -> None:
    configure_logging("info", "json")
    one, log = generation(), RequestLogger()
    deliver(log, one, 104.0, start=START, finish_reason="stop")
    entry = json.loads(console())
    expected = {
        "request_id": "cmpl-1",
        "prompt_tokens": 3,
        "cached_tokens": 2,
        "output_tokens": 1,
        "ttft_ms": 3000.0,
        "total_s": 4.0,
        "tokens_per_s": 0.25,
        "finish_reasons": ["stop"],
    }
    assert {name: entry[name] for name in expected} == expected


def test_the_form_can_change_and_others_handlers_stay_as_they_are(
    console: Callable[[], str],
) -> None:
    configure_logging("info")
    get_logger("test").info("plain")
    assert console().endswith(" INFO minisgl.test: plain\n")
    other = logging.StreamHandler(io.StringIO())
    logging.getLogger("minisgl").addHandler(other)
    configure_logging("info", "json")
    get_logger("test").info("object")
    assert json.loads(console())["message"] == "object"
    assert other.stream.getvalue() == "object\n"
    assert len(logging.getLogger("minisgl").handlers) == 2


def test_the_level_holds_for_both_forms(console: Callable[[], str]) -> None:
    configure_logging("warning", "json")
    get_logger("test").info("too quiet")
    assert console() == ""
