"""Layers are said in the fewest words that give them back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.cli.layer_pattern import shortest


def said(kinds: str) -> str:
    return ", ".join(str(part) for part in shortest(list(kinds)))


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        ("", ""),
        ("aaaaa", "5 a"),
        ("aab", "2 a, 1 b"),
        ("aaabaaab", "2 x (3 a, 1 b)"),
        ("kkkm" * 6 + "kkm", "6 x (3 k, 1 m), 2 k, 1 m"),
        ("f" + "ssssf" + "sssssf" * 7, "1 f, 4 s, 1 f, 7 x (5 s, 1 f)"),
        ("ab", "1 a, 1 b"),
        ("abab", "2 x (1 a, 1 b)"),
    ],
)
def test_repeats_are_said_once(kinds: str, words: str) -> None:
    assert said(kinds) == words


@given(kinds=st.text("ab", max_size=24))
def test_the_words_give_the_layers_back(kinds: str) -> None:
    parts = shortest(list(kinds))
    again = "".join(
        "".join(kind * count for count, kind in part.runs) * part.times for part in parts
    )
    assert again == kinds


@given(kinds=st.text("ab", max_size=24))
def test_no_more_is_said_than_run_by_run(kinds: str) -> None:
    num_runs = sum(1 for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1])
    assert sum(len(part.runs) for part in shortest(list(kinds))) <= num_runs
