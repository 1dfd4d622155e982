"""The load of a node that says what is true."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prfaas.scheduler.work import TRANSIT_S, Job, Load


class HonestNode(RuleBasedStateMachine):
    """A node that reports all that has arrived: the load is then never less than what is there and coming."""

    def __init__(self):
        super().__init__()
        self.load, self.now_s, self.num = Load(), 0.0, 0
        self.tokens: dict[str, int] = {}
        self.sent_s: dict[str, float] = {}
        self.sequences: dict[str, int] = {}
        self.bytes: dict[str, int] = {}
        self.foreign = 0

    @rule(tokens=st.integers(0, 1000), num_sequences=st.integers(1, 3))
    def send(self, tokens, num_sequences):
        name = f"r{self.num}"
        self.num += 1
        self.tokens[name], self.sent_s[name] = tokens, self.now_s
        self.sequences[name], self.bytes[name] = num_sequences, tokens
        self.load.sent(name, Job(tokens, num_sequences, num_bytes=tokens), self.now_s)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def compute(self, data):
        name = data.draw(st.sampled_from(sorted(self.tokens)))
        self.tokens[name] = 0
        self.load.computed(name)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def end(self, data):
        name = data.draw(st.sampled_from(sorted(self.tokens)))
        del self.tokens[name], self.sent_s[name], self.sequences[name], self.bytes[name]
        self.load.ended(name)

    @rule(seconds=st.sampled_from([0.0, 0.1, 0.2, 1.0]), foreign=st.integers(0, 3))
    def report(self, seconds, foreign):
        self.now_s += seconds
        self.foreign = foreign
        there = [name for name, sent_s in self.sent_s.items() if sent_s <= self.now_s - TRANSIT_S]
        tokens = sum(self.tokens[name] for name in there)
        num_active = sum(self.sequences[name] for name in there) + foreign
        self.late = set(self.tokens) - set(there)
        self.load.reported(num_active, tokens, 10_000, self.now_s)

    @invariant()
    def is_exact(self):
        self.load.check()
        assert self.load.inflight == self.tokens.keys()
        assert self.load.num_inflight == len(self.tokens)
        assert self.load.num_active == sum(self.sequences.values()) + self.foreign
        assert self.load.queue_tokens == sum(self.tokens.values())
        assert self.load.num_queued == sum(tokens > 0 for tokens in self.tokens.values())


TestHonestNode = HonestNode.TestCase
TestHonestNode.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)
