"""Pages are encoded where, and only where, that makes them arrive sooner."""

from dataclasses import dataclass
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.transport.codec import LOSSLESS
from prfaas.transport.codec_choice import CodecChoice
from prfaas.transport.messages import CodecName
from prfaas.transport.wire import Codec

PAGE = 1 << 20
BUFFER_BYTES = 4 << 20
"""Of a link: what a sender can be ahead of it."""


@dataclass
class Link:
    """A link in virtual time: it drains its buffer at its rate, whatever the sender does meanwhile."""

    bytes_per_s: float
    now_s: float = 0.0
    buffered_bytes: float = 0.0

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.buffered_bytes = max(0.0, self.buffered_bytes - seconds * self.bytes_per_s)

    def send(self, num_bytes: int) -> float:
        """Return the seconds that the sender had to wait for room."""
        excess_bytes = max(0.0, self.buffered_bytes + num_bytes - BUFFER_BYTES)
        waited_s = excess_bytes / self.bytes_per_s
        self.pass_time(waited_s)
        self.buffered_bytes += num_bytes
        return waited_s

    def drain(self) -> None:
        self.pass_time(self.buffered_bytes / self.bytes_per_s)


ENCODE_BYTES_PER_S = {Codec.ZSTD: 300e6, Codec.INT8: 1e9}
RATIO = {Codec.RAW: 1.0, Codec.ZSTD: 0.85, Codec.INT8: 0.26}


def arrival(name: CodecName, rates: list[float]) -> tuple[float, list[Codec]]:
    """Send a page at each of the rates; return when the last byte is out, and how each page went."""
    choice, link, chosen = CodecChoice(name), Link(rates[0]), []
    for rate in rates:
        link.bytes_per_s = rate
        codec = choice.choose(may_lose=True)
        chosen.append(codec)
        num_bytes = int(PAGE * RATIO[codec])
        if codec is not Codec.RAW:
            seconds = PAGE / ENCODE_BYTES_PER_S[codec]
            link.pass_time(seconds)
            choice.encoded(codec, num_bytes=PAGE, num_encoded_bytes=num_bytes, seconds=seconds)
        choice.sent(num_bytes=num_bytes, seconds=link.send(num_bytes))
    link.drain()
    return link.now_s, chosen


@pytest.mark.parametrize("name", ["auto", "auto-lossy"])
@pytest.mark.parametrize("link", [1e9, 3e9, 1e10])
def test_on_a_fast_link_a_transfer_takes_no_more_than_3_percent_longer(name, link):
    rates = [link] * 2000
    raw_s, _ = arrival("raw", rates)
    assert arrival(name, rates)[0] <= 1.03 * raw_s


@pytest.mark.parametrize(("name", "gain"), [("auto", 0.88), ("auto-lossy", 0.30)])
@pytest.mark.parametrize("link", [1e6, 6e6, 25e6])
def test_on_a_slow_link_a_transfer_takes_as_much_less_as_the_codec_saves(name, gain, link):
    rates = [link] * 1000
    raw_s, _ = arrival("raw", rates)
    assert arrival(name, rates)[0] < gain * raw_s


def test_a_link_that_changes_is_followed_page_by_page():
    rates = [6e6] * 300 + [1e10] * 300 + [6e6] * 300
    auto_s, chosen = arrival("auto", rates)
    assert auto_s < 0.9 * arrival("raw", rates)[0]
    assert set(chosen[200:300]) == {Codec.ZSTD}
    assert set(chosen[400:600]) == {Codec.RAW}
    assert set(chosen[700:]) == {Codec.ZSTD}


def test_auto_never_loses_anything():
    _, chosen = arrival("auto", [1e5] * 500)
    assert set(chosen) == {Codec.RAW, Codec.ZSTD}


def test_auto_lossy_loses_nothing_on_a_link_that_takes_pages_as_they_come():
    _, chosen = arrival("auto-lossy", [1e10] * 500)
    assert set(chosen) == {Codec.RAW}


def test_auto_lossy_keeps_to_the_lossless_codec_where_that_is_as_fast():
    choice = CodecChoice("auto-lossy")
    for _ in range(100):
        choice.sent(num_bytes=PAGE, seconds=1.0)
        for codec in (Codec.ZSTD, Codec.INT8):
            choice.encoded(codec, num_bytes=PAGE, num_encoded_bytes=PAGE // 4, seconds=1e-3)
    assert choice.choose(may_lose=True) is Codec.ZSTD


@pytest.mark.parametrize("name", get_args(CodecName))
def test_a_page_that_may_lose_nothing_goes_raw_or_by_zstd(name):
    choice = CodecChoice(name)
    choice.sent(num_bytes=PAGE, seconds=10.0)
    assert choice.choose(may_lose=False) in LOSSLESS


@pytest.mark.parametrize(
    ("name", "codec"),
    [
        ("raw", Codec.RAW),
        ("zstd", Codec.ZSTD),
        ("fp16", Codec.FP16),
        ("int8", Codec.INT8),
        ("fp8", Codec.FP8),
    ],
)
def test_a_codec_that_was_named_is_used_whatever_the_link(name, codec):
    assert set(choices(name)) == {codec}


def choices(name: CodecName) -> list[Codec]:
    choice = CodecChoice(name)
    chosen = []
    for seconds in (0.0, 10.0, 0.0):
        chosen.append(choice.choose(may_lose=True))
        choice.sent(num_bytes=PAGE, seconds=seconds)
    return chosen


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


@pytest.mark.parametrize("name", get_args(CodecName))
def test_pages_go_in_runs_only_where_each_of_them_would_go_raw(name):
    choice = CodecChoice(name)
    assert choice.is_raw == (name in ("raw", "auto", "auto-lossy"))
    choice.sent(num_bytes=PAGE, seconds=1.0)
    assert choice.is_raw == (name == "raw")
    assert choice.is_raw == (choice.choose(may_lose=True) is Codec.RAW)


def test_what_goes_in_runs_is_passed_over_like_what_goes_alone():
    alone, in_runs = CodecChoice("auto"), CodecChoice("auto")
    for choice in (alone, in_runs):
        choice.encoded(Codec.ZSTD, num_bytes=PAGE, num_encoded_bytes=PAGE, seconds=9.0)
        for _ in range(50):
            choice.sent(num_bytes=PAGE, seconds=PAGE / 10e6)
        assert choice.is_raw
    numbers: list[int] = []
    for choice, step in ((alone, 1), (in_runs, 8)):
        num_pages = 0
        while choice.is_raw:
            if choice is alone:
                assert choice.choose(may_lose=True) is Codec.RAW
            else:
                choice.passed_over(step)
            num_pages += step
            assert num_pages < 100_000, "never tried again"
        numbers.append(num_pages)
    assert numbers[0] == numbers[1]
