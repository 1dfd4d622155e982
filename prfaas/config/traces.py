"""Traces of real requests: when each came, how long its prompt was, and which blocks it shares.

Two formats: Mooncake's JSON lines (`timestamp` in ms, `input_length`, `output_length`, `hash_ids` of
blocks of 512 tokens) and Azure's CSV (`TIMESTAMP`, `ContextTokens`, `GeneratedTokens`).
"""

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from prfaas.errors import ConfigError

TraceFormat = Literal["mooncake", "azure"]
MOONCAKE_BLOCK_TOKENS = 512
MAX_TOKENS = 100_000_000
AZURE_FIELDS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace."""

    arrival_s: float
    """Since the first request."""
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()
    """Of the prompt's blocks, each naming everything up to its end; the last may be partial."""


def read_trace(path: Path, trace_format: TraceFormat) -> tuple[TraceRequest, ...]:
    """Return the requests of a file by arrival; those that came at once keep their order.

    Raises:
        ConfigError: the file cannot be read, or a line of it is no request; names the line.
    """
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            parse = _mooncake if trace_format == "mooncake" else _azure
            requests = sorted(parse(path, lines), key=lambda request: request.arrival_s)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text: {error}") from error
    if not requests:
        raise ConfigError(f"{path} has no request")
    first_s = requests[0].arrival_s
    return tuple(
        TraceRequest(
            arrival_s=request.arrival_s - first_s,
            input_tokens=request.input_tokens,
            output_tokens=request.output_tokens,
            block_ids=request.block_ids,
        )
        for request in requests
    )


def uncached_lengths(requests: Sequence[TraceRequest]) -> Iterator[int]:
    """Yield each prompt's tokens beyond the blocks that an earlier one had: an unbounded cache.

    At least one token has to be computed.
    """
    seen: set[int] = set()
    for request in requests:
        num_hits = 0
        while num_hits < len(request.block_ids) and request.block_ids[num_hits] in seen:
            num_hits += 1
        seen.update(request.block_ids)
        yield max(1, request.input_tokens - num_hits * MOONCAKE_BLOCK_TOKENS)


def _mooncake(path: Path, lines: Iterator[str]) -> Iterator[TraceRequest]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}:{number} is not JSON: {error}") from error
        if not isinstance(entry, dict):
            raise ConfigError(f"{path}:{number} holds no object")
        where = f"{path}:{number}"
        timestamp, ids = entry.get("timestamp"), entry.get("hash_ids", [])
        if not isinstance(timestamp, int | float) or not 0 <= timestamp < 1e15:
            raise ConfigError(f"{where}: timestamp {timestamp!r} is no number from 0 to 1e15")
        if not isinstance(ids, list) or not all(isinstance(block, int) for block in ids):
            raise ConfigError(f"{where}: hash_ids is no list of numbers")
        yield TraceRequest(
            arrival_s=timestamp / 1000,
            input_tokens=_count(where, "input_length", entry.get("input_length"), minimum=1),
            output_tokens=_count(where, "output_length", entry.get("output_length"), minimum=0),
            block_ids=tuple(ids),
        )


def _azure(path: Path, lines: Iterator[str]) -> Iterator[TraceRequest]:
    reader = csv.DictReader(lines)
    missing = [name for name in AZURE_FIELDS if name not in (reader.fieldnames or ())]
    if missing:
        raise ConfigError(f"{path} has no column {', '.join(missing)}")
    try:
        for row in reader:
            yield _azure_request(f"{path}:{reader.line_num}", row)
    except csv.Error as error:
        raise ConfigError(f"{path}:{reader.line_num} is not CSV: {error}") from error


def _azure_request(where: str, row: dict[str, str]) -> TraceRequest:
    text = row["TIMESTAMP"]
    try:  # seven digits after the point; Python 3.11 takes six
        moment = datetime.fromisoformat(text[:26]).replace(tzinfo=UTC)
    except (TypeError, ValueError):
        raise ConfigError(f"{where}: TIMESTAMP {text!r} is no date and time") from None
    return TraceRequest(
        arrival_s=moment.timestamp(),
        input_tokens=_count(where, "ContextTokens", row["ContextTokens"], minimum=1),
        output_tokens=_count(where, "GeneratedTokens", row["GeneratedTokens"], minimum=0),
    )


def _count(where: str, name: str, raw: object, *, minimum: int) -> int:
    if isinstance(raw, str) and raw.isascii() and raw.isdigit() and len(raw) < 12:
        raw = int(raw)
    if not isinstance(raw, int) or isinstance(raw, bool) or not minimum <= raw <= MAX_TOKENS:
        raise ConfigError(f"{where}: {name} {raw!r} is no count from {minimum} to {MAX_TOKENS:,}")
    return raw
