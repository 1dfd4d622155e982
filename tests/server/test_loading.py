import asyncio
import threading

import pytest

from prfaas.errors import ConfigError
from prfaas.server.loading import Loading, LoadStopped


def ignore(_stage: str) -> None:
    """For loads whose stages do not matter."""


async def test_a_load_gives_its_node_and_tells_where_it_is():
    stages: list[str] = []

    def load(progress):
        progress("weights", 1, 4)
        progress("self-test", 0, 0)
        return "node"

    assert await Loading(load, stages.append).run(stop_timeout_s=60) == "node"
    assert stages == ["weights 25 %", "self-test"]


async def test_a_load_that_fails_raises_here(no_leaks):
    def load(_progress):
        raise ConfigError("no such file")

    with pytest.raises(ConfigError, match="no such file"):
        await Loading(load, ignore).run(stop_timeout_s=60)


async def test_a_stopped_load_gives_nothing(no_leaks):
    seen: list[BaseException] = []
    is_loading = asyncio.Event()
    loop = asyncio.get_running_loop()

    def load(progress):
        loop.call_soon_threadsafe(is_loading.set)
        try:
            while True:
                progress("weights", 1, 4)
        except LoadStopped as error:
            seen.append(error)
            raise

    loading = Loading(load, ignore)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(loading.run(stop_timeout_s=60))
        await is_loading.wait()
        loading.stop()
    assert running.result() is None
    assert len(seen) == 1


async def test_a_load_that_ends_after_a_stop_still_gives_its_node_to_be_closed():
    release = threading.Event()

    def load(_progress):
        release.wait()
        return "node"

    loading = Loading(load, ignore)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(loading.run(stop_timeout_s=60))
        await asyncio.sleep(0)
        loading.stop()
        release.set()
    assert running.result() == "node"


async def test_a_load_that_does_not_end_is_left_behind():
    release = threading.Event()

    def load(_progress):
        release.wait()

    loading = Loading(load, ignore)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(loading.run(stop_timeout_s=0.01))
        await asyncio.sleep(0)
        loading.stop()
    assert running.result() is None
    release.set()
