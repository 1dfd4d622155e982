"""Our own JSON looked at closely: what the fast encoder lets pass, and Python's refuses, is a mistake of ours."""

import json
from collections.abc import Iterator

import msgspec
import pytest

from prfaas.server.openai import answers
from prfaas.transport import fields

_ENCODER = msgspec.json.Encoder()


class StrictEncoder:
    """Encodes as ever, but raises for numbers that are not finite, bytes, sets and whatever else is no JSON."""

    def encode(self, value: object) -> bytes:
        json.dumps(value, allow_nan=False)
        return _ENCODER.encode(value)


@pytest.fixture(autouse=True)
def our_json_is_checked() -> Iterator[pytest.MonkeyPatch]:
    """Check all that is encoded in a test; `undo` ends it."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (fields, answers):
            patch.setattr(module, "_ENCODER", StrictEncoder())
        yield patch
