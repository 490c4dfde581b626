"""Lines that a process says once."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest

from sonicmoe.log import first_time, forget_what_was_said, log_once


def test_a_line_is_said_once_for_each_argument_or_key(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="sonicmoe")
    for _ in range(2):
        log_once(logging.INFO, "one %s", "line")
        log_once(logging.WARNING, "one %s", "more")
        log_once(logging.INFO, "never", key=("one %s", ("more",)))
        log_once(logging.INFO, "a first number is %d", 1, key="number")
        log_once(logging.INFO, "a first number is %d", 2, key="number")
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert said == [("INFO", "one line"), ("WARNING", "one more"), ("INFO", "a first number is 1")]
    forget_what_was_said()
    log_once(logging.INFO, "one %s", "line")
    assert caplog.messages[3:] == ["one line"]


def test_one_of_many_threads_is_the_first() -> None:
    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(first_time, ["key"] * 400)) == 1
