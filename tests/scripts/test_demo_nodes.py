"""A signal ends the demo, also one that came where Python drops what a handler raises."""

import gc
import signal

import pytest

from scripts.demo_nodes import Ending


class Signalled:
    """Is signalled while it is finalized, where nothing that is raised gets out."""

    def __del__(self):
        signal.raise_signal(signal.SIGTERM)


@pytest.fixture
def ending():
    ending = Ending()
    before = signal.signal(signal.SIGTERM, ending.receive)
    yield ending
    signal.signal(signal.SIGTERM, before)


def test_a_signal_ends_what_runs(ending):
    with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_that_a_finalizer_swallows_ends_the_next_wait(ending):
    ending.wait(0)
    lost = Signalled()
    del lost
    gc.collect()
    with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
        ending.wait(3600)


def test_a_signal_while_held_ends_the_demo_behind_the_block(ending):
    steps = []

    def start_node() -> None:
        with ending.held():
            signal.raise_signal(signal.SIGTERM)
            steps.append("started")

    with pytest.raises(SystemExit):
        start_node()
    assert steps == ["started"]
