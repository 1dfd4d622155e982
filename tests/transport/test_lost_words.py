"""Sender and receiver against each other where words of losses are lost, too, and pages are being encoded."""

import random
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from prfaas.transport.attach import Attach, encode_attach, parse_attach
from prfaas.transport.incoming import IncomingTransfer
from prfaas.transport.outgoing import OutgoingTransfer
from prfaas.transport.pieces import Item, PagePlace, Piece, SendingLane
from prfaas.transport.seals import CHECKSUM
from prfaas.transport.wire import FrameType
from tests.transport.channels import Pages
from tests.transport.test_outgoing import CAPABILITY, PAGE_BYTES, attach, decode, page_view, place

MAX_BREAKS = 25


@dataclass
class Wire:
    """One stream: what is on its way over it, and what its sender has in hand."""

    words: list[Attach] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    lane: SendingLane | None = None
    item: Item | None = None
    """Taken, and not sealed yet."""


class Link:
    """Both ends of a transfer with a credit that is no byte too large."""

    def __init__(self, num_pages: int, draw: random.Random) -> None:
        self.draw = draw
        self.transfer = OutgoingTransfer(
            transfer_id="t" * 32,
            page_view=page_view,
            capability=CAPABILITY,
            credit_bytes=num_pages * PAGE_BYTES,
        )
        self.held = Pages(PAGE_BYTES)
        self.incoming = IncomingTransfer(self.held)
        self.wires: dict[int, Wire] = {}
        self.num_breaks = 0

    def begin(self) -> None:
        number = self.incoming.new_stream()
        self.wires[number] = Wire([attach(number, *self.incoming.tell_losses(number))])

    def hear(self, wire: Wire) -> None:
        if wire.words:
            word = parse_attach(encode_attach(wire.words.pop(0)))
            if wire.lane is None:
                wire.lane = self.transfer.attach(word, CHECKSUM)
            else:
                self.transfer.attach_again(wire.lane, word)

    def take(self, wire: Wire) -> None:
        if wire.lane is not None and wire.item is None:
            run = self.transfer.take_run(wire.lane, self.draw.choice([0, 0, 3]) * PAGE_BYTES)
            if run is not None:
                wire.pieces.append(run)
                return
            wire.item = self.transfer.take(wire.lane)
            if not isinstance(wire.item, PagePlace):  # nothing else is ever encoded
                self.seal(wire)

    def seal(self, wire: Wire) -> None:
        if wire.lane is not None and wire.item is not None:
            item, wire.item = wire.item, None
            piece = self.transfer.seal(wire.lane, item)
            assert piece is not None
            wire.pieces.append(piece)

    def receive(self, number: int, wire: Wire) -> None:
        if wire.pieces:
            self.incoming.take(number, decode(wire.pieces.pop(0), self.held))

    def lose(self, number: int) -> None:
        if self.num_breaks == MAX_BREAKS:
            return
        self.num_breaks += 1
        wire = self.wires.pop(number)
        self.incoming.lose(number)
        if wire.lane is not None and self.draw.random() < 0.5:
            self.transfer.lose(wire.lane)
        if self.wires and self.draw.random() < 0.7:
            carrier = self.draw.choice(sorted(self.wires))
            resumes = self.incoming.tell_losses(carrier)
            self.wires[carrier].words.append(attach(carrier, *resumes))

    def step(self) -> None:
        if not self.wires or (len(self.wires) < 4 and self.draw.random() < 0.1):
            self.begin()
        number = self.draw.choice(sorted(self.wires))
        wire = self.wires[number]
        what = self.draw.choice(["hear", "hear", "take", "take", "seal", "seal", "receive", "lose"])
        match what:
            case "hear":
                self.hear(wire)
            case "take":
                self.take(wire)
            case "seal":
                self.seal(wire)
            case "receive":
                self.receive(number, wire)
            case _ if self.draw.random() < 0.3:
                self.lose(number)
            case _ if self.incoming.has_losses:
                resumes = self.incoming.tell_losses(number)
                wire.words.append(attach(number, *resumes))
            case _:
                return


@given(seed=st.integers(0, 10**9), num_pages=st.integers(0, 30))
def test_words_that_are_lost_are_told_again_and_no_credit_leaks(seed, num_pages):
    link = Link(num_pages, random.Random(seed))
    link.transfer.put_urgent(FrameType.FIRST_TOKENS, b"x")
    for block in range(num_pages):
        link.transfer.put_page(place(block))
    link.transfer.finish(tokens_computed=0)
    num_steps = 0
    while not link.incoming.is_finished:
        link.step()
        link.transfer.check()
        num_steps += 1
        assert num_steps < 20_000, "it goes on for ever"
    link.held.check(num_pages)
    assert link.held.kinds.count(FrameType.FIRST_TOKENS) == 1
    link.transfer.acknowledge()
    assert link.transfer.outcome == "completed"


def test_a_page_that_was_being_encoded_when_its_stream_was_lost_gives_its_credit_back():
    link = Link(1, random.Random(0))
    link.transfer.put_page(place(0))
    lane = link.transfer.attach(attach(0), CHECKSUM)
    assert isinstance(link.transfer.take(lane), PagePlace)
    other = link.transfer.attach(attach(1, (0, 0)), CHECKSUM)
    assert isinstance(link.transfer.take(other), PagePlace)
