#!/usr/bin/env python
"""One end of a transfer with Mooncake's TransferEngine over TCP; run by scripts/bench/link.py.

Needs a Python with mooncake-transfer-engine-non-cuda and nothing of prfaas. Its engine chooses the
number of connections; it has no checksums.
"""

import argparse
import contextlib
import ctypes
import json
import mmap
import os
import sys
import time
from typing import Any


def say(value: dict[str, Any], output: int) -> None:
    os.write(output, (json.dumps(value) + "\n").encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=("serve", "pull"))
    parser.add_argument("--host", required=True)
    parser.add_argument("--page-kib", type=int, required=True)
    parser.add_argument("--pool-mib", type=int, required=True)
    parser.add_argument("--peer")
    parser.add_argument("--address", type=int)
    options = parser.parse_args()
    output = os.dup(1)
    os.dup2(2, 1)  # the engine prints, too
    from mooncake.engine import TransferEngine  # type: ignore[import-not-found]  # an own environment's

    pool_bytes, page_bytes = options.pool_mib << 20, options.page_kib << 10
    pool = mmap.mmap(-1, pool_bytes)
    for at in range(0, pool_bytes, mmap.PAGESIZE):
        pool[at] = 1
    address = ctypes.addressof(ctypes.c_char.from_buffer(pool))
    engine = TransferEngine()
    if engine.initialize(options.host, "P2PHANDSHAKE", "tcp", ""):
        raise RuntimeError("TransferEngine.initialize failed")
    if engine.register_memory(address, pool_bytes):
        raise RuntimeError("TransferEngine.register_memory failed")
    if options.role == "serve":
        say({"peer": f"{options.host}:{engine.get_rpc_port()}", "address": address}, output)
        for _ in sys.stdin:
            continue
    else:
        say({"is_open": True}, output)
        for line in sys.stdin:
            num_pages = -(-json.loads(line)["num_bytes"] // page_bytes)
            seconds, cpu_s = read(engine, options, address, page_bytes, num_pages)
            say({"num_bytes": num_pages * page_bytes, "seconds": seconds, "cpu_s": cpu_s}, output)
    with contextlib.suppress(OSError):
        os.close(output)
    os._exit(0)  # its threads would not let the process end


def read(
    engine: Any, options: argparse.Namespace, address: int, page_bytes: int, num_pages: int
) -> tuple[float, float]:
    """Read pages in batches as large as the pool; return seconds and seconds of CPU."""
    in_pool = (options.pool_mib << 20) // page_bytes
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    while num_pages:
        batch = min(num_pages, in_pool)
        offsets = [number * page_bytes for number in range(batch)]
        failure = engine.batch_transfer_sync_read(
            options.peer,
            [address + offset for offset in offsets],
            [options.address + offset for offset in offsets],
            [page_bytes] * batch,
        )
        if failure:
            raise RuntimeError(f"batch_transfer_sync_read: {failure}")
        num_pages -= batch
    return time.perf_counter() - began_s, time.process_time() - began_cpu_s


if __name__ == "__main__":
    main()
