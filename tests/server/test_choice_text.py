from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.server.choice_text import ChoiceText
from prfaas.server.openai.answers import Piece
from prfaas.types import FinishReason, TokenEvent, TokenLogprobs
from tests.server.fake_node import TOKENIZER, byte_ids
from tests.tiny_models import EOS_ID


def pieces_of(
    tokens: list[int], *, stops: list[str], finish_reason: FinishReason = "length"
) -> list[Piece]:
    """The pieces up to the choice's end."""
    choice = ChoiceText(TOKENIZER, stops=stops, stop_token_ids=[EOS_ID])
    pieces: list[Piece] = []
    for index, token_id in enumerate(tokens):
        is_last = index + 1 == len(tokens)
        event = TokenEvent(
            request_id="r",
            choice_index=0,
            token_id=token_id,
            logprobs=TokenLogprobs(logprob=-float(index)),
            finish_reason=finish_reason if is_last else None,
        )
        pieces.append(choice.push(event))
        if choice.finish_reason is not None:
            break
    return pieces


texts = st.text(alphabet="abé😀 ", max_size=20)
stop_lists = st.lists(st.text(alphabet="abé😀 ", min_size=1, max_size=4), max_size=3)


def cut_at_stop(text: str, stops: list[str]) -> tuple[str, bool]:
    """The oracle: look at every prefix of the whole text."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


@settings(deadline=None)
@given(texts, stop_lists)
def test_the_pieces_joined_are_the_text_before_the_first_stop_string(text, stops):
    pieces = pieces_of([*byte_ids(text), EOS_ID], stops=stops, finish_reason="stop")
    expected, _ = cut_at_stop(text, stops)
    joined = Piece.joined(pieces)
    assert joined.text == expected
    assert joined.finish_reason == "stop"
    assert all(piece.finish_reason is None for piece in pieces[:-1])


@settings(deadline=None)
@given(texts, stop_lists)
def test_entries_spell_the_text_and_end_with_it(text, stops):
    pieces = pieces_of([*byte_ids(text), EOS_ID], stops=stops, finish_reason="stop")
    joined = Piece.joined(pieces)
    assert b"".join(entry.text_bytes for entry in joined.entries).decode() == joined.text
    assert [entry.logprobs.logprob for entry in joined.entries] == [
        -float(index) for index in range(len(joined.entries))
    ]
    for entry in joined.entries:
        assert 0 <= entry.text_offset < max(1, len(joined.text))


@settings(deadline=None)
@given(st.text(alphabet="é😀", min_size=1, max_size=5), st.integers(0, 20))
def test_an_answer_cut_inside_a_character_has_at_most_one_replacement(text, num_tokens):
    tokens = byte_ids(text)[: num_tokens + 1]
    joined = Piece.joined(pieces_of(tokens, stops=[]))
    whole = bytes(byte for token in tokens for byte in TOKENIZER.text_bytes(token))
    assert joined.text == whole.decode(errors="replace")
    assert joined.text.count("\ufffd") <= 1
    assert len(joined.entries) == len(tokens)


def test_a_stop_string_that_the_end_completes_is_found():
    """The replacement of a cut character may be part of a stop string."""
    pieces = pieces_of(byte_ids("a😀")[:3], stops=["\ufffd"])
    assert Piece.joined(pieces).text == "a"
    assert pieces[-1].finish_reason == "stop"


def test_a_token_that_ends_the_answer_adds_no_text_and_no_entry():
    pieces = pieces_of([*byte_ids("ab"), EOS_ID], stops=[], finish_reason="stop")
    assert [piece.text for piece in pieces] == ["a", "b", ""]
    assert pieces[-1].entries == ()


def test_offsets_begin_where_the_echo_ends():
    choice = ChoiceText(TOKENIZER, stops=[], stop_token_ids=[], first_offset=10)
    event = TokenEvent(
        request_id="r", choice_index=0, token_id=byte_ids("a")[0], logprobs=TokenLogprobs(logprob=0)
    )
    assert [choice.push(event).entries[0].text_offset for _ in range(2)] == [10, 11]
