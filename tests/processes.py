"""Processes that tests start: whatever becomes of the test, they end with it and their pipes are closed."""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def started(command: Sequence[str], **settings: Any) -> Iterator[subprocess.Popen[Any]]:
    """Run a command, `settings` being Popen's; it has ended when the block has."""
    with subprocess.Popen(command, **settings) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
