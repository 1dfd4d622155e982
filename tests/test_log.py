"""Logs tell; they never end what they tell of."""

import io
import os
import subprocess
import sys

import pytest

from prfaas.log import configure_logging, get_logger


def test_a_line_goes_to_standard_error_as_it_is_when_it_is_written(monkeypatch):
    configure_logging()
    later = io.StringIO()
    monkeypatch.setattr(sys, "stderr", later)
    get_logger().info("node.ready", port=8000)
    assert "event='node.ready' port=8000" in later.getvalue()
    get_logger().debug("node.detail")
    assert "detail" not in later.getvalue()


def test_a_line_that_nobody_takes_is_lost_and_no_more(monkeypatch):
    configure_logging()
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    get_logger().error("store.write_failed")
    monkeypatch.setattr(sys, "stderr", None)
    get_logger().error("store.write_failed")


@pytest.mark.slow
def test_a_log_collector_that_died_costs_lines_only():
    reading, writing = os.pipe()
    os.close(reading)
    told = subprocess.run(
        [
            sys.executable,
            "-c",
            "from prfaas.log import configure_logging, get_logger\n"
            "configure_logging(log_format='json')\n"
            "for number in range(3): get_logger().error('node.lost', number=number)\n"
            "print('still here', flush=True)\n",
        ],
        stderr=writing,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writing)
    assert told.stdout == "still here\n"
