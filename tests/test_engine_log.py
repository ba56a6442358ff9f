"""What is logged in one process of an engine: how often, and by whom."""

from __future__ import annotations

import logging

import pytest

from kvcache_plugin.hosts.engine_log import EngineLog
from kvcache_plugin.hosts.seams import VLLM_RANK


@pytest.fixture
def log() -> EngineLog:
    return EngineLog("Engine")


def levels(caplog: pytest.LogCaptureFixture) -> list[int]:
    return [record.levelno for record in caplog.records]


def test_one_of_those_with_the_same_layers_is_heard(
    log: EngineLog, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for speaks in (True, False):
        log.speaks = lambda speaks=speaks: speaks  # type: ignore[misc]
        log.say(logging.WARNING, "said of %s", "all")
    assert levels(caplog) == [logging.WARNING, logging.DEBUG]
    assert {record.getMessage() for record in caplog.records} == {"said of all"}


def test_a_process_that_cannot_tell_its_rank_is_heard(
    log: EngineLog, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> bool:
        raise AssertionError("no group")

    log.speaks = fail
    log.say(logging.WARNING, "said")
    assert levels(caplog) == [logging.ERROR, logging.WARNING]


def test_of_one_thing_the_first_message_is_said(
    log: EngineLog, caplog: pytest.LogCaptureFixture
) -> None:
    for topic, message in (("a", "first"), ("a", "second"), ("b", "third")):
        log.say_once(topic, logging.WARNING, message)
    assert [record.getMessage() for record in caplog.records] == ["first", "third"]


def test_what_is_wrong_in_one_process_is_heard_of_each(
    log: EngineLog, caplog: pytest.LogCaptureFixture
) -> None:
    log.speaks = lambda: False
    for _ in range(2):
        log.warn_once("a", "no room on %s", "this disk")
    assert [record.getMessage() for record in caplog.records] == ["no room on this disk"]
    assert levels(caplog) == [logging.WARNING]


def test_a_step_that_fails_is_told_once_and_stops_nothing(
    log: EngineLog, caplog: pytest.LogCaptureFixture
) -> None:
    def leave() -> int:
        raise SystemExit(3)

    assert log.guarded("counting", lambda: 7) == 7
    assert not log.has_failed
    assert [log.guarded("counting", leave) for _ in range(2)] == [None, None]
    assert log.has_failed
    (record,) = caplog.records
    assert "failed while counting. Engine goes on" in record.getMessage()
    assert record.exc_info is not None


def test_an_interrupt_goes_up(log: EngineLog) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        log.guarded("counting", interrupt)


def test_a_seam_that_is_left_out_is_named_with_what_is_lost(
    log: EngineLog, caplog: pytest.LogCaptureFixture
) -> None:
    log.leave_out(VLLM_RANK, "it is gone")
    (record,) = caplog.records
    assert record.getMessage() == (
        "kvcache_plugin leaves out a seam of Engine, which lets one process speak for all that "
        "hold parts of the same layers: it is gone [errors#seam-left-out]"
    )
