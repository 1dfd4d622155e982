"""kill -9 at any moment: what was acknowledged is whole afterwards, and nothing else is left."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cache.stores import generation_of, opened, segments_of, whole
from tests.processes import started

LENGTH = 30_000
ROOT = Path(__file__).parents[2]

WRITER = f"""
import sys
from pathlib import Path
from tests.cache.stores import bytes_of, key_of, open_store, put
store = open_store(Path(sys.argv[1]), quota_bytes=8 << 20)
print("open", flush=True)
for number in range(int(sys.argv[2]), 10**6):
    while not put(store, key_of(number), bytes_of(number, {LENGTH})):
        store.flush()
    if number % 5 == 0:
        store.flush()
        print(number, flush=True)
"""


@pytest.mark.slow
def test_whatever_was_acknowledged_survives_kill_minus_9(tmp_path):
    directory = tmp_path / "cache"
    generator = random.Random(11)
    first, acknowledged = 0, -1
    for _ in range(8):
        with started(
            [sys.executable, "-c", WRITER, str(directory), str(first)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as child:
            assert child.stdout is not None
            while (line := child.stdout.readline()) and line.strip() != "open":
                pass
            assert line, "the writer could not open what the last one left"
            time.sleep(generator.uniform(0.0, 0.6))
            child.send_signal(signal.SIGKILL)
            lines, _ = child.communicate()
        acknowledged = max([acknowledged, *map(int, filter(str.isdigit, lines.split()))])
        with opened(directory, quota_bytes=8 << 20) as store:
            known = [key for key, _ in store.ls()]
            numbers = [int.from_bytes(key[1], "big") for key in known]
            top = max(numbers, default=-1)
            found = whole(store, range(top + 1), LENGTH)
            assert sorted(numbers) == found, "a record that is known is damaged"
            evicted = set(range(top + 1)) - set(found)
            oldest = min(found, default=0)
            assert all(n in found for n in range(oldest, acknowledged + 1)), evicted
            stats = store.stats().records
            assert stats.segment_bytes == sum(p.stat().st_size for p in segments_of(directory))
            assert stats.counts.num_damaged == 0
        first = top + 1
    assert acknowledged > 20
    names = {path.suffix for path in generation_of(directory).iterdir()}
    assert names == {".seg", ".mdb", ".json"}
