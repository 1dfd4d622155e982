"""Checks that hold for every test of this room."""

from tests.strict_encoding import our_json_is_checked

__all__ = ["our_json_is_checked"]
