#!/usr/bin/env python
"""The disk tier beside a plain file: store and load in GB/s, and what a lookup costs.

The plain side writes and reads the same pages in one file, one call a record, and takes the same
checksum; it syncs once, the store with each commit. Both go in turn, so that a busy machine slows
both; judge by `ratio`, or where others take the processors by `cpu_ratio`, which compares CPU time
of all threads. Reads are shown from the page cache, and from the disk: there the page cache is
dropped first, and the plain side reads with O_DIRECT.

    scripts/bench/store.py --json
"""

import argparse
import gc
import json
import mmap
import os
import platform
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import xxhash

sys.path.insert(0, str(Path(__file__).parents[2]))

from prfaas.cache.options import StoreOptions
from prfaas.cache.store import Store
from prfaas.log import configure_logging

NAME = bytes(34)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement: medians, and the median of the runs' ratios."""

    name: str
    record_bytes: int
    num_runs: int
    store_gb_per_s: float
    plain_gb_per_s: float
    ratio: float
    cpu_ratio: float
    """The plain file's CPU time over the store's."""


class Spent(NamedTuple):
    """Seconds that something took."""

    wall_s: float
    cpu_s: float


def spent(run: Callable[[], object]) -> Spent:
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    run()
    return Spent(time.perf_counter() - wall_s, time.process_time() - cpu_s)


def row(name: str, record_bytes: int, num_bytes: int, runs: Sequence[tuple[Spent, Spent]]) -> Row:
    """From what the store and the plain file took in each run."""
    return Row(
        name=name,
        record_bytes=record_bytes,
        num_runs=len(runs),
        store_gb_per_s=round(num_bytes / statistics.median(a.wall_s for a, _ in runs) / 1e9, 3),
        plain_gb_per_s=round(num_bytes / statistics.median(b.wall_s for _, b in runs) / 1e9, 3),
        ratio=round(statistics.median(b.wall_s / a.wall_s for a, b in runs), 3),
        cpu_ratio=round(statistics.median(b.cpu_s / a.cpu_s for a, b in runs), 3),
    )


class Pages:
    """An arena as the pool has it: records of several pages each."""

    def __init__(self, record_bytes: int, page_bytes: int, total_bytes: int) -> None:
        self.num_records = total_bytes // record_bytes
        self.num_bytes = self.num_records * record_bytes
        self.arena = memoryview(mmap.mmap(-1, self.num_bytes))
        piece = random.Random(0).randbytes(1 << 20)
        for start in range(0, self.num_bytes, len(piece)):
            stop = min(start + len(piece), self.num_bytes)
            self.arena[start:stop] = piece[: stop - start]
        self.records = [
            [
                self.arena[start : min(start + page_bytes, record + record_bytes)]
                for start in range(record, record + record_bytes, page_bytes)
            ]
            for record in range(0, self.num_bytes, record_bytes)
        ]


def key(number: int) -> tuple[int, bytes]:
    return 0, number.to_bytes(32, "big")


def store_all(store: Store, pages: Pages) -> None:
    for number, parts in enumerate(pages.records):
        while not store.put(key(number), parts):
            store.flush()
    store.flush()


def checksum(parts: Sequence[memoryview]) -> int:
    digest = xxhash.xxh3_64(NAME)
    for part in parts:
        digest.update(part)
    return digest.intdigest()


def plain_store(path: Path, pages: Pages) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    offset = 0
    for parts in pages.records:
        offset += os.pwritev(fd, parts, offset)
        checksum(parts)
    os.fdatasync(fd)
    os.close(fd)


def load_all(store: Store, pages: Pages) -> None:
    wanted = [(key(number), parts) for number, parts in enumerate(pages.records)]
    for start in range(0, len(wanted), 64):
        if not all(store.get_many(wanted[start : start + 64])):
            raise RuntimeError("a record was lost")


def plain_load(path: Path, pages: Pages, flags: int = 0) -> None:
    fd = os.open(path, os.O_RDONLY | flags)
    offset = 0
    for parts in pages.records:
        offset += os.preadv(fd, parts, offset)
        checksum(parts)
    os.close(fd)
    if offset != pages.num_bytes:
        raise RuntimeError("short read")


def drop_page_cache(paths: Sequence[Path]) -> None:
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def throughput(root: Path, pages: Pages, record_bytes: int, num_runs: int) -> list[Row]:
    plain = root / "plain"
    options = StoreOptions(quota_bytes=4 * pages.num_bytes)
    stores, cached, disk = [], [], []
    for _ in range(num_runs):
        store = Store.open(root / "cache", identity="bench", options=options)
        ours = spent(partial(store_all, store, pages))
        stores.append((ours, spent(partial(plain_store, plain, pages))))
        load_all(store, pages)
        cached.append(
            (
                spent(partial(load_all, store, pages)),
                spent(partial(plain_load, plain, pages)),
            )
        )
        drop_page_cache([plain, *(root / "cache").rglob("*.seg")])
        disk.append(
            (
                spent(partial(load_all, store, pages)),
                spent(partial(plain_load, plain, pages, os.O_DIRECT)),
            )
        )
        store.close()
        shutil.rmtree(root / "cache")
        plain.unlink()
    return [
        row(name, record_bytes, pages.num_bytes, runs)
        for name, runs in (("store", stores), ("load cached", cached), ("load disk", disk))
    ]


def know(store: Store, keys: Sequence[tuple[int, bytes]]) -> None:
    for wanted in keys:
        store.known(wanted)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def lookup(root: Path, num_records: int, num_runs: int) -> dict[str, float]:
    """Cost of `known` in a large index, and of opening it."""
    options = StoreOptions(quota_bytes=1 << 34)
    store = Store.open(root / "lookup", identity="bench", options=options)
    part = [memoryview(bytes(16))]
    for number in range(num_records):
        while not store.put(key(number), part):
            store.flush()
    store.close()
    reopened: list[Store] = []
    resident_bytes = resident()
    opening = spent(
        lambda: reopened.append(Store.open(root / "lookup", identity="bench", options=options))
    )
    (store,) = reopened
    figures = {
        "num_records": num_records,
        "open_s": round(opening.wall_s, 2),
        "open_cpu_s": round(opening.cpu_s, 2),
        "resident_bytes_per_record": round((resident() - resident_bytes) / num_records),
    }
    for name, first in (("hit", 0), ("miss", num_records)):
        keys = [key(first + number) for number in range(2048)]  # of one long prompt
        gc.disable()
        runs = [spent(partial(know, store, keys)).wall_s for _ in range(num_runs * 20)]
        gc.enable()
        figures[f"known_{name}_ns_per_block"] = round(statistics.median(runs) / len(keys) * 1e9)
    store.close()
    return figures


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--directory", type=Path, help="where to write (default: a temporary one)")
    parser.add_argument("--record-kib", type=int, nargs="*", default=[64, 256, 1024])
    parser.add_argument(
        "--page-kib", type=int, default=128, help="a record's bytes in pages of this"
    )
    parser.add_argument("--total-mib", type=int, default=256, help="bytes of one run")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--index-records", type=int, default=100_000, help="0 leaves lookup out")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    configure_logging(level="warning")
    report = sys.stderr if args.json else sys.stdout
    rows = []
    root = Path(tempfile.mkdtemp(dir=args.directory))
    try:
        for record_kib in args.record_kib:
            pages = Pages(record_kib << 10, args.page_kib << 10, args.total_mib << 20)
            for found in throughput(root, pages, record_kib << 10, args.runs):
                rows.append(asdict(found))
                print(
                    f"{found.name:<12} {record_kib:>5} KiB: {found.store_gb_per_s:6.2f} GB/s, plain "
                    f"{found.plain_gb_per_s:6.2f}, ratio {found.ratio:.2f}, by CPU time {found.cpu_ratio:.2f}",
                    file=report,
                    flush=True,
                )
        figures = lookup(root, args.index_records, args.runs) if args.index_records else {}
        for name, number in figures.items():
            print(f"{name:<24} {number:>12,}", file=report)
    finally:
        shutil.rmtree(root)
    if args.json:
        settings = {"machine": platform.machine(), "runs": args.runs, "total_mib": args.total_mib}
        print(json.dumps(settings | {"rows": rows, "lookup": figures}, indent=2))


if __name__ == "__main__":
    main()
