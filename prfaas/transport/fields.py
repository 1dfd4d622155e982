"""JSON of the KV channel, read field by field.

Another type, a number out of range or a missing field is a ProtocolError that names the field.
"""

import base64
import binascii
import math
import sys
from array import array
from typing import Any, TypeVar

import msgspec

from prfaas.errors import ProtocolError

T = TypeVar("T")

MAX_LIST_ITEMS = 4096
MAX_TOKEN_ID = (1 << 31) - 1
MAX_SHOWN_CHARS = 512

_ENCODER, _DECODER = msgspec.json.Encoder(), msgspec.json.Decoder()


def dump(value: object) -> bytes:
    """Return compact JSON in UTF-8.

    Of numbers, text, lists and objects only: what else the encoder knows, and numbers that are not
    finite, nobody gives it. Those would be sent as null, which no field that must have a number takes.
    """
    return _ENCODER.encode(value)


def parse_object(data: bytes) -> dict[str, Any]:
    """Return the JSON object in `data`, or raise ProtocolError. All text in it can be encoded again."""
    try:
        value = _DECODER.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError("not valid JSON") from error
    if not isinstance(value, dict):
        raise ProtocolError("not a JSON object")
    return value


def typed(value: dict[str, Any], name: str, kind: type[T]) -> T:
    """Return the field if it is of exactly this type; an integer counts as a float."""
    item = value.get(name)
    if kind is float and type(item) is int:
        item = _as_float(item)
    if type(item) is not kind:
        raise ProtocolError(f"field {name} is missing or not of type {kind.__name__}")
    return item


def _as_float(number: int) -> float:
    """Return the number, infinity for one that no float is as large as."""
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def number_of(value: dict[str, Any], name: str, low: float, high: float = math.inf) -> float:
    """Return a finite number within the limits."""
    number = typed(value, name, float)
    if not (low <= number <= high and math.isfinite(number)):
        raise ProtocolError(f"field {name} is {number}, allowed {low} to {high}")
    return number


def optional_number_of(value: dict[str, Any], name: str) -> float | None:
    """Return a finite number that is not negative, or None for null or no such field."""
    return None if value.get(name) is None else number_of(value, name, 0)


def count_of(value: dict[str, Any], name: str, low: int, high: int) -> int:
    """Return an integer within the limits."""
    number = typed(value, name, int)
    if not low <= number <= high:
        raise ProtocolError(f"field {name} is {number}, allowed {low} to {high}")
    return number


def items_of(value: dict[str, Any], name: str) -> list[Any]:
    """Return a list of bounded length."""
    items = typed(value, name, list)
    if len(items) > MAX_LIST_ITEMS:
        raise ProtocolError(f"field {name} has {len(items)} items, limit {MAX_LIST_ITEMS}")
    return items


def token_id_of(item: object, name: str) -> int:
    """Return `item` if it is a token id."""
    if type(item) is not int or not 0 <= item <= MAX_TOKEN_ID:
        raise ProtocolError(f"field {name} has an item that is no token id")
    return item


def binary_of(value: dict[str, Any], name: str) -> bytes:
    """Return the bytes of a base64 field."""
    try:
        return base64.b64decode(typed(value, name, str), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ProtocolError(f"field {name} is not base64") from error


def name_of(value: dict[str, Any], name: str, num_chars: int) -> str:
    """Return a field of exactly so many ASCII letters and digits."""
    text = typed(value, name, str)
    if not (len(text) == num_chars and text.isalnum() and text.isascii()):
        raise ProtocolError(f"field {name} is not {num_chars} letters and digits")
    return text


def shown(text: str) -> str:
    """Return what a peer says as one line that can be shown to anybody, at most MAX_SHOWN_CHARS long."""
    text = text[:MAX_SHOWN_CHARS]
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else "?" for char in text)


def encodable(text: str) -> str:
    """Return the text, with a question mark for each lone surrogate (a file's name may hold some)."""
    return text.encode(errors="replace").decode()


def encode_tokens(tokens: tuple[int, ...]) -> str:
    """Return token ids as base64 of uint32 little-endian: a third of the size of JSON numbers."""
    packed = array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return base64.b64encode(packed.tobytes()).decode()


def tokens_of(value: dict[str, Any], name: str) -> tuple[int, ...]:
    """Return the token ids that `encode_tokens` made; at least one."""
    data = binary_of(value, name)
    if not data or len(data) % 4:
        raise ProtocolError(f"field {name} has {len(data)} bytes, expected a multiple of 4")
    packed = array("I", data)
    if sys.byteorder == "big":
        packed.byteswap()
    if max(packed) > MAX_TOKEN_ID:
        raise ProtocolError(f"field {name} has an item that is no token id")
    return tuple(packed)


def pair_of(item: object, name: str) -> tuple[int, float]:
    """Return (token id, finite number or -inf); -inf travels as null."""
    if not isinstance(item, list) or len(item) != 2:
        raise ProtocolError(f"field {name} has an item that is no pair")
    token_id, number = item
    return token_id_of(token_id, name), log_number_of(number, name)


def log_number_of(number: object, name: str) -> float:
    """Return a finite number, or -inf for null."""
    if number is None:
        return -math.inf
    if type(number) is int:
        number = _as_float(number)
    if type(number) is not float or not math.isfinite(number):
        raise ProtocolError(f"field {name} has an item that is no number")
    return number


def or_null(number: float) -> float | None:
    """Return what stands for a number in JSON: null for one that is not finite."""
    return number if math.isfinite(number) else None
