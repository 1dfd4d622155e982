"""From a cache directory to the records of one identity, whatever state they were left in."""

from contextlib import suppress
from functools import partial
from pathlib import Path

from prfaas.cache.options import StoreOptions
from prfaas.cache.segments import segment_files
from prfaas.cache.store_directory import CacheDirectory, generation_name
from prfaas.cache.store_records import Records
from prfaas.cache.store_scan import DamagedIndex, NoRoom, renew_index
from prfaas.clock import Clock
from prfaas.errors import ConfigError, StoreError
from prfaas.log import get_logger


def open_records(
    directory: CacheDirectory, identity: str, options: StoreOptions, *, wall: Clock
) -> Records:
    """Return the records of an identity; those that cannot be read are moved aside, and said so.

    Raises:
        ConfigError: not even an empty generation can be made.
    """
    path = directory.make_generation(identity)
    try:
        try:
            return _opened(directory, path, identity, options, wall)
        except DamagedIndex as error:
            aside = directory.set_aside(path, wall())
            get_logger().error("store.set_aside", path=str(aside), reason=str(error))
            directory.make_generation(identity)
            return _opened(directory, path, identity, options, wall)
    except StoreError as error:
        raise ConfigError(f"cannot use the cache directory {path}: {error}") from error
    except OSError as error:
        raise ConfigError(f"cannot use the cache directory {path}: {error.strerror}") from error


def _opened(
    directory: CacheDirectory, path: Path, identity: str, options: StoreOptions, wall: Clock
) -> Records:
    records = Records(
        path,
        options,
        entries=_renewed(path, options),
        wall=wall,
        free_others=partial(_free_others, directory, identity, options, wall),
    )
    stats = records.stats()
    get_logger().info(
        "store.opened",
        path=str(path),
        num_records=stats.num_records,
        live_bytes=stats.live_bytes,
        other_bytes=stats.other_bytes,
    )
    return records


def _renewed(path: Path, options: StoreOptions) -> bytes:
    while True:
        try:
            return renew_index(path)
        except NoRoom as error:
            if not _remove_one_segment(path, options):
                raise ConfigError(f"no room for the index of {path}: {error}") from error


def _remove_one_segment(path: Path, options: StoreOptions) -> bool:
    """Make room on a full disk: delete the segment that was unused longest, if there is one."""
    with segment_files(path, zeroes=options.zero_freed) as files:
        oldest = min(files.sizes(), key=files.used_s, default=None)
        if oldest is not None:
            files.remove(oldest)
    return oldest is not None


def _free_others(
    directory: CacheDirectory,
    identity: str,
    options: StoreOptions,
    wall: Clock,
    over_bytes: int,
) -> int:
    """Return what other generations take, after deleting some, the longest unused first.

    It ends when `over_bytes` are gone. Their segments that the TTL has reached go in any case.
    """
    left_bytes = 0
    for found in directory.generations():
        if found.path.name == generation_name(identity):
            continue
        num_bytes = found.num_bytes
        with suppress(OSError):  # what cannot be deleted still counts
            if over_bytes > 0:
                directory.remove(found)
                over_bytes -= num_bytes
                continue
            if options.ttl_s is not None:
                num_bytes -= _remove_expired(found.path, options, wall() - options.ttl_s * 15 / 16)
        left_bytes += num_bytes
    return left_bytes


def _remove_expired(path: Path, options: StoreOptions, before_s: float) -> int:
    """Delete the segments last written before then; return their bytes.

    The first record of a segment is up to a sixteenth of the TTL older than its last.
    """
    num_bytes = 0
    with segment_files(path, zeroes=options.zero_freed) as files:
        for number, size_bytes in files.sizes().items():
            if files.written_s(number) <= before_s:
                files.remove(number)
                num_bytes += size_bytes
    return num_bytes
