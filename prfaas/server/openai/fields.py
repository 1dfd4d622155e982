"""Strictly typed reading of a JSON object's fields; every complaint names field, value and limit."""

import math
import reprlib
from collections.abc import Collection, Mapping

from prfaas.errors import BadRequest

SHOWN_CHARS = 60

_repr = reprlib.Repr()  # bounded in depth and width: a client may send megabytes
_repr.maxlevel = 2
_repr.maxstring = _repr.maxother = _repr.maxlong = SHOWN_CHARS


def shown(value: object) -> str:
    """Return a short, printable form of a client's value."""
    text = _repr.repr(value) if not isinstance(value, str) else f"'{value[: SHOWN_CHARS + 1]}'"
    text = "".join(char if char.isprintable() else "?" for char in text)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."


class Fields:
    """Reads one JSON object. A null counts as unset; bool is never a number.

    Args:
        body: the object.
        where: its path, as a prefix of the `param` that complaints name.
    """

    def __init__(self, body: Mapping[str, object], where: str = "") -> None:
        self._body = body
        self._where = where

    def param(self, name: str) -> str:
        """Return the field's path as clients know it."""
        return f"{self._where}{name}"

    def wrong(self, name: str, message: str) -> BadRequest:
        """Return the complaint about one field."""
        return BadRequest(f"{self.param(name)}: {message}", param=self.param(name))

    def raw(self, name: str) -> object | None:
        """Return the field's value as it came, None if unset."""
        return self._body.get(name)

    def refuse_unknown(self, known: Collection[str]) -> None:
        """Raise BadRequest for the first field that is set and not in `known`."""
        for name, value in self._body.items():
            if name not in known and value is not None:
                clean = shown(name)
                raise BadRequest(
                    f"unrecognised field {clean}", param=f"{self._where}{clean.strip(chr(39))}"
                )

    def refuse(self, reasons: Mapping[str, str]) -> None:
        """Raise BadRequest for the first set field of `reasons`, saying why."""
        for name, reason in reasons.items():
            if self._body.get(name) is not None:
                raise self.wrong(name, reason)

    def boolean(self, name: str) -> bool:
        """Return the field, False if unset."""
        value = self._body.get(name)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.wrong(name, f"must be true or false, not {shown(value)}")
        return value

    def string(self, name: str, *, max_chars: int) -> str | None:
        """Return a non-empty string of at most `max_chars`, None if unset."""
        value = self._body.get(name)
        if value is None:
            return None
        if not isinstance(value, str):
            raise self.wrong(name, f"must be a string, not {shown(value)}")
        if not value:
            raise self.wrong(name, "must not be empty")
        if len(value) > max_chars:
            raise self.wrong(name, f"has {len(value)} characters, the limit is {max_chars}")
        return value

    def integer(self, name: str, *, low: int, high: int) -> int | None:
        """Return an integer of low <= value <= high, None if unset."""
        value = self._body.get(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.wrong(name, f"must be an integer, not {shown(value)}")
        if not low <= value <= high:
            raise self.wrong(name, f"is {shown(value)}, must be from {low} to {high}")
        return value

    def number(
        self, name: str, *, low: float, high: float, above: float | None = None
    ) -> float | None:
        """Return a finite number of low <= value <= high (and > `above`), None if unset."""
        value = self._body.get(name)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.wrong(name, f"must be a number, not {shown(value)}")
        if isinstance(value, float) and not math.isfinite(value):
            raise self.wrong(name, f"must be finite, not {shown(value)}")
        if not low <= value <= high:
            raise self.wrong(name, f"is {shown(value)}, must be from {low:g} to {high:g}")
        if above is not None and value <= above:
            raise self.wrong(name, f"is {shown(value)}, must be above {above:g}")
        return float(value)

    def items(self, name: str, *, max_items: int) -> list[object] | None:
        """Return a list of at most `max_items`, None if unset."""
        value = self._body.get(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self.wrong(name, f"must be a list, not {shown(value)}")
        if len(value) > max_items:
            raise self.wrong(name, f"has {len(value)} items, the limit is {max_items}")
        return value

    def mapping(self, name: str) -> dict[str, object] | None:
        """Return an object, None if unset."""
        value = self._body.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(name, f"must be an object, not {shown(value)}")
        return value
