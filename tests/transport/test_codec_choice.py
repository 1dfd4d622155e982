"""Pages are encoded where, and only where, that makes them arrive sooner."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.transport.codec_choice import CodecChoice
from prfaas.transport.wire import Codec

PAGE = 1 << 20


def send(
    choice: CodecChoice, num_pages: int, *, link: float, encode: float, ratio: float
) -> tuple[int, float]:
    """Send pages over a modelled link (bytes/s); return how many were encoded, and all seconds."""
    num_encoded, seconds = 0, 0.0
    for _ in range(num_pages):
        num_bytes = PAGE
        if choice.choose(may_lose=True) is Codec.ZSTD:
            num_encoded += 1
            num_bytes = int(PAGE * ratio)
            choice.encoded(
                Codec.ZSTD, num_bytes=PAGE, num_encoded_bytes=num_bytes, seconds=PAGE / encode
            )
            seconds += PAGE / encode
        choice.sent(num_bytes=num_bytes, seconds=num_bytes / link)
        seconds += num_bytes / link
    return num_encoded, seconds


def test_a_link_that_never_pushes_back_gets_pages_as_they_are():
    choice = CodecChoice("auto")
    assert send(choice, 1000, link=5e9, encode=500e6, ratio=0.8)[0] == 0


def test_a_slow_link_gets_encoded_pages():
    num_encoded, _ = send(CodecChoice("auto"), 1000, link=6e6, encode=300e6, ratio=0.8)
    assert num_encoded > 950


def test_pages_that_do_not_shrink_stop_being_encoded():
    choice = CodecChoice("auto")
    send(choice, 200, link=6e6, encode=300e6, ratio=1.0)
    assert send(choice, 1000, link=6e6, encode=300e6, ratio=1.0)[0] < 50


def test_the_choice_follows_the_link():
    choice = CodecChoice("auto")
    send(choice, 200, link=6e6, encode=300e6, ratio=0.8)
    send(choice, 200, link=5e9, encode=300e6, ratio=0.8)
    assert send(choice, 200, link=5e9, encode=300e6, ratio=0.8)[0] == 0
    send(choice, 200, link=6e6, encode=300e6, ratio=0.8)
    assert send(choice, 200, link=6e6, encode=300e6, ratio=0.8)[0] == 200


@given(link=st.floats(1e6, 1e10), encode=st.floats(20e6, 2e9), ratio=st.floats(0.3, 1.0))
def test_it_is_never_much_slower_than_pages_as_they_are(link, encode, ratio):
    num_pages = 2000
    _, seconds = send(CodecChoice("auto"), num_pages, link=link, encode=encode, ratio=ratio)
    assert seconds <= 1.03 * num_pages * PAGE / link


@pytest.mark.parametrize("link", [1e6, 1e7])
def test_a_slow_link_gains_what_the_codec_saves(link):
    _, seconds = send(CodecChoice("auto"), 2000, link=link, encode=400e6, ratio=0.8)
    assert seconds < 0.9 * 2000 * PAGE / link
