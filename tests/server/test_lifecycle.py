import asyncio

import pytest

from prfaas.errors import Overloaded
from prfaas.server.lifecycle import Lifecycle


async def test_nobody_is_let_in_while_loading_or_draining():
    lifecycle = Lifecycle()
    lifecycle.note_progress("weights 3 %")
    with pytest.raises(Overloaded, match="loading: weights 3 %"), lifecycle.admit():
        pass
    lifecycle.start_serving(lambda: (True, ""))
    with lifecycle.admit():
        assert lifecycle.num_inside == 1
    lifecycle.start_draining()
    lifecycle.start_draining()
    with pytest.raises(Overloaded, match="draining"), lifecycle.admit():
        pass
    assert lifecycle.num_inside == 0


async def test_a_node_that_cannot_serve_says_why():
    lifecycle = Lifecycle()
    answers = [(False, "the engine thread died")]
    lifecycle.start_serving(lambda: answers[0])
    assert lifecycle.readiness() == (False, "the engine thread died")
    with pytest.raises(Overloaded, match="thread died"), lifecycle.admit():
        pass
    answers[0] = (True, "")
    assert lifecycle.readiness() == (True, "")


async def test_waiting_ends_when_the_last_one_leaves_whatever_ended_it():
    lifecycle = Lifecycle()
    lifecycle.start_serving(lambda: (True, ""))
    await lifecycle.wait_empty()
    async with asyncio.TaskGroup() as tasks:
        with lifecycle.admit():
            with pytest.raises(ValueError, match="x"), lifecycle.admit():
                raise ValueError("x")
            waiting = tasks.create_task(lifecycle.wait_empty())
            await asyncio.sleep(0)
            assert not waiting.done()
        await waiting
