"""What a sequence without room goes on from: its own pages, or what is published of its prompt."""

from dataclasses import replace

from prfaas.engine.model import Segment
from prfaas.engine.sequence import SequenceState, new_request
from prfaas.engine.submission import Submission
from prfaas.engine.working_copies import WorkingCopies
from prfaas.types import Request
from tests.engine.running import GREEDY, Node, prompt_of, tiny_hybrid

PROMPT = prompt_of(100)
DRAWN = prompt_of(120, seed=1)
TURN = (*PROMPT, *DRAWN, *prompt_of(30, seed=2))


def test_without_pages_a_decoding_sequence_goes_on_from_what_a_lookup_finds():
    """What another turn computed of its drawn tokens has the bits that decode gave them."""
    model = tiny_hybrid("bamba")
    node = Node(model)
    for prompt in (PROMPT, TURN[:193]):
        node.answer(prompt, GREEDY)
    pinned = [node.lookup(prompt) for prompt in (PROMPT, TURN[:193])]
    assert [table.hit_tokens for table in pinned] == [64, 192]
    sampling = replace(GREEDY, max_tokens=200)
    request = Request(request_id="r", prompt_tokens=PROMPT, sampling=sampling)
    table = node.cache.lookup((), 1)
    state = new_request(Submission(request=request, table=table), max_context_tokens=400)
    sequence = SequenceState(
        key=0,
        owner=state,
        tokens=[*PROMPT, *DRAWN],
        table=table,
        stored_tokens=0,
        resume_tokens=0,
    )
    copies = WorkingCopies(model, node.cache)
    copies.make(sequence, 300)
    assert sequence.kv is not None
    segment = Segment(kv=sequence.kv, tokens=sequence.tokens[:219], num_logits=0)
    model.forward([segment])
    full = node.cache.lookup((), 1)
    block = 0
    while full.try_allocate(0, block) is not None:
        block += 1
    assert copies.end(sequence) == sequence.resume_tokens == 192
    for held in (*pinned, full, sequence.table):
        held.release()
    node.assert_idle()


def test_with_pages_it_goes_on_where_it_was():
    model = tiny_hybrid("bamba")
    node = Node(model)
    request = Request(request_id="r", prompt_tokens=PROMPT, sampling=GREEDY)
    table = node.cache.lookup(node.cache.block_keys(PROMPT, b""), len(PROMPT))
    state = new_request(Submission(request=request, table=table), max_context_tokens=400)
    sequence = SequenceState(
        key=0,
        owner=state,
        tokens=[*PROMPT, *DRAWN],
        table=table,
        stored_tokens=0,
        resume_tokens=0,
    )
    copies = WorkingCopies(model, node.cache)
    for end in (150, 192, 219):  # in a block, at its end, and after another resumption
        copies.make(sequence, 300)
        assert sequence.kv is not None
        start = sequence.kv.num_tokens
        segment = Segment(
            kv=sequence.kv,
            tokens=sequence.tokens[start:end],
            num_logits=0,
        )
        model.forward([segment])
        assert copies.end(sequence) == end
        assert table.hit_tokens == 0
        node.cache.check()
    copies.make(sequence, 300)
    straight = model.new_kv(capacity_tokens=300)
    tokens = sequence.tokens[:219]
    model.forward([Segment(kv=straight, tokens=tokens, num_logits=0)])
    rows = [
        model.forward([Segment(kv=kv, tokens=[5], num_logits=1)])
        for kv in (sequence.kv, straight)
        if kv is not None
    ]
    assert rows[0].numpy().tobytes() == rows[1].numpy().tobytes()
    table.release()
    node.assert_idle()
