"""Request bodies: read within a size and a time, parsed as strict JSON. Never a 500."""

import asyncio
import json
import re

import msgspec
from aiohttp import web
from aiohttp.web_exceptions import HTTPRequestEntityTooLarge

from prfaas.errors import BadRequest

JSON_TYPES = frozenset({"application/json", "application/octet-stream"})
"""The second is what a missing Content-Type counts as: it is read as JSON."""
CHARSETS = frozenset({"utf-8", "utf8", "us-ascii", "ascii"})

_DECODER = msgspec.json.Decoder()
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


async def read_body(request: web.Request, *, max_bytes: int, timeout_s: float) -> bytes:
    """Return the body of a JSON request.

    Raises:
        BadRequest: 413 above `max_bytes`, 408 if it is not whole after `timeout_s`, 415 for another
            type, charset or content encoding.
    """
    _check_headers(request)
    length = request.content_length
    if length is not None and length > max_bytes:
        raise _too_large(f"has {length} bytes", max_bytes)
    body = bytearray()
    try:
        if request.content.is_eof():  # all of it came with the head
            body += request.content.read_nowait()
            if len(body) > max_bytes:
                raise _too_large(f"has more than {max_bytes} bytes", max_bytes)
            return bytes(body)
        async with asyncio.timeout(timeout_s):
            async for chunk in request.content.iter_any():
                body += chunk
                if len(body) > max_bytes:
                    raise _too_large(f"has more than {max_bytes} bytes", max_bytes)
    except TimeoutError:
        raise BadRequest(
            f"the body was not whole after {timeout_s:g} s, {len(body)} bytes came",
            code="request_timeout",
            status=408,
        ) from None
    except (web.RequestPayloadError, HTTPRequestEntityTooLarge) as error:
        raise BadRequest(f"the body is damaged: {error}") from None
    return bytes(body)


def _too_large(what: str, max_bytes: int) -> BadRequest:
    return BadRequest(
        f"the body {what}, the limit is {max_bytes}", code="request_too_large", status=413
    )


def _check_headers(request: web.Request) -> None:
    if request.content_type not in JSON_TYPES:
        raise BadRequest(
            f"Content-Type must be application/json, not {request.content_type}",
            code="unsupported_media_type",
            status=415,
        )
    charset = request.charset
    if charset is not None and charset.lower() not in CHARSETS:
        raise BadRequest(
            f"charset must be utf-8, not {charset}", code="unsupported_media_type", status=415
        )
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise BadRequest(
            f"Content-Encoding must be identity, not {encoding}",
            code="unsupported_media_type",
            status=415,
        )


def parse_object(body: bytes) -> dict[str, object]:
    """Return the JSON object that `body` is; BadRequest says what else it is.

    NaN, infinities and unpaired surrogates, which Python would let pass, are refused too.
    """
    try:
        value = _DECODER.decode(body)
    except (msgspec.DecodeError, RecursionError):  # Python's words for it are better ones
        value = _parse_slowly(body)
    if not isinstance(value, dict):
        raise BadRequest(f"the body must be a JSON object, not {_kind(value)}")
    return value


def _parse_slowly(body: bytes) -> object:
    """Do the same by Python's own parser, ten times as slow, that says where a fault is."""
    try:
        value = json.loads(body.decode(), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise BadRequest(f"the body is not UTF-8: byte {error.start}") from None
    except RecursionError:
        raise BadRequest("the body is not usable JSON: nested too deeply") from None
    except ValueError as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from None
    if _SURROGATE_ESCAPE.search(body):
        _refuse_surrogates(value)
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _refuse_surrogates(value: object) -> None:
    """Walk without recursion: depth is the client's choice."""
    rest = [value]
    while rest:
        item = rest.pop()
        if isinstance(item, str):
            try:
                item.encode()
            except UnicodeEncodeError:
                raise BadRequest("the body holds an unpaired surrogate") from None
        elif isinstance(item, dict):
            rest.extend(item.keys())
            rest.extend(item.values())
        elif isinstance(item, list):
            rest.extend(item)


def _kind(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case _:
            return "an array"
