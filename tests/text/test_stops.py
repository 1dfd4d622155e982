import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import BadRequest
from prfaas.text.stops import StopMatcher

short_text = st.text(alphabet="abc ", max_size=30)
stop_lists = st.lists(st.text(alphabet="abc ", min_size=1, max_size=5), max_size=4)


def run(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    sent = ""
    for piece in pieces:
        text, is_stopped = matcher.push(piece)
        sent += text
        if is_stopped:
            return sent + matcher.finish(), True
    return sent + matcher.finish(), False


def obvious(stops: list[str], text: str) -> tuple[str, bool]:
    """Grow the text by characters until it ends in a stop string; cut the longest such."""
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)], True
    return text, False


@st.composite
def cut_text(draw: st.DrawFn) -> list[str]:
    text = draw(short_text)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@given(stop_lists, cut_text())
def test_text_up_to_the_first_stop_goes_through_whatever_the_cuts(
    stops: list[str], pieces: list[str]
) -> None:
    assert run(stops, pieces) == obvious(stops, "".join(pieces))


@given(stop_lists, cut_text())
def test_only_the_beginning_of_a_stop_string_is_held(stops: list[str], pieces: list[str]) -> None:
    matcher = StopMatcher(stops)
    sent = seen = ""
    for piece in pieces:
        text, is_stopped = matcher.push(piece)
        sent, seen = sent + text, seen + piece
        if is_stopped:
            return
        held = seen[len(sent) :]
        assert seen == sent + held
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_a_stop_string_that_spans_tokens_leaks_nothing() -> None:
    matcher = StopMatcher(["own fox"])
    pieces = ["The", " quick", " br", "o", "wn", " fo", "x", " jumps"]
    assert [matcher.push(piece) for piece in pieces] == [
        ("The", False),
        (" quick", False),
        (" br", False),
        ("", False),
        ("", False),
        ("", False),
        ("", True),
        ("", True),
    ]
    assert matcher.finish() == ""


def test_a_stop_string_that_never_completes_is_released_at_the_end() -> None:
    matcher = StopMatcher(["own fox"])
    assert matcher.push("a brown fo") == ("a br", False)
    assert matcher.finish() == "own fo"


def test_the_longest_of_two_stops_that_end_together_is_cut() -> None:
    assert run(["\nQuestion:", "\n\nQuestion:"], ["Paris.\n", "\nQuest", "ion: x"]) == (
        "Paris.",
        True,
    )


def test_the_stop_that_is_complete_first_wins_over_one_that_starts_earlier() -> None:
    assert run(["abcdef", "cd"], ["abcdef"]) == ("ab", True)


def test_without_stops_everything_goes_through_at_once() -> None:
    matcher = StopMatcher(())
    assert matcher.push("text") == ("text", False)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(BadRequest) as caught:
        StopMatcher(["a", ""])
    assert caught.value.param == "stop"
