"""A byte is a token, and text survives the way there and back."""

from hypothesis import given
from hypothesis import strategies as st

from prfaas.text.byte_tokenizer import EOS_ID, EOS_TOKEN, VOCAB_SIZE, byte_tokenizer

TOKENIZER = byte_tokenizer()


@given(st.text().filter(lambda text: EOS_TOKEN not in text))
def test_ids_are_the_bytes_of_the_text(text):
    ids = TOKENIZER.encode(text, add_bos=True)
    assert bytes(ids) == text.encode()
    assert TOKENIZER.decode(ids) == text


def test_one_more_token_ends_an_answer_and_is_no_text():
    assert TOKENIZER.encode(f"a{EOS_TOKEN}b", add_bos=False) == [97, EOS_ID, 98]
    assert TOKENIZER.eos_ids == (EOS_ID,)
    assert TOKENIZER.is_special(EOS_ID)
    assert TOKENIZER.decode([97, EOS_ID, 98]) == "ab"
    assert TOKENIZER.vocab_size == VOCAB_SIZE == EOS_ID + 1


def test_the_fingerprint_is_the_same_each_time():
    assert byte_tokenizer().fingerprint == TOKENIZER.fingerprint
