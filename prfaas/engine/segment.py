"""The part of one sequence that a forward computes; torch-free."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prfaas.engine.sequence_kv import SequenceKv


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The next tokens of one sequence, at positions kv.num_tokens, ...; at least one."""

    kv: "SequenceKv"
    tokens: Sequence[int]
    num_logits: int
    """1: the last token's logits are wanted; 0: none."""
    snapshots: Sequence[int] = ()
    """Positions, ascending, after which linear mixers keep their state besides the last."""
