"""Prompts that begin alike and come together: one computes what they share, the others wait for it."""

from collections.abc import Collection, Iterable

from prfaas.cache.spec import CacheLayout, replay_boundary
from prfaas.engine.batcher import Batcher
from prfaas.engine.sequence import SequenceState


def share_prefixes(
    sequences: Collection[SequenceState], batcher: Batcher, layout: CacheLayout
) -> dict[int, int]:
    """Let new prompts start from what was published since they came, and find whom others wait for.

    Args:
        sequences: all of the engine, oldest first.
        batcher: is told of what new prompts can start from.
        layout: of the cache.

    Returns:
        As find_leaders; such a prompt still gains by waiting.
    """
    leaders = find_leaders(sequences, layout)
    for sequence in sequences:
        is_waiting = sequence.is_new and sequence.kv is None and not sequence.is_choice
        if is_waiting and sequence.key not in leaders and look_again(sequence, layout):
            batcher.stored(sequence.key, sequence.resume_tokens)
    return leaders


def find_leaders(sequences: Iterable[SequenceState], layout: CacheLayout) -> dict[int, int]:
    """Return for prompts that never ran another that is to make what they would hit.

    That one runs, or came earlier. In a model with states it is told to keep its state where they
    part.

    Args:
        sequences: oldest first.
        layout: of the cache.

    Returns:
        Key of a prompt that never ran -> key of the other.
    """
    prompts = [sequence for sequence in sequences if not sequence.is_choice]
    ran = [prompt for prompt in prompts if not prompt.is_new]
    firsts: dict[bytes, SequenceState] = {}
    """Prompts that never ran, by the key of the block they would begin with."""
    leaders: dict[int, int] = {}
    for prompt in prompts:
        next_block = prompt.resume_tokens // layout.block_tokens
        if not prompt.is_new or next_block >= prompt.table.num_keys:
            continue
        first = firsts.setdefault(prompt.table.keys[next_block], prompt)
        candidates = ran if first is prompt else [*ran, first]
        leader = next((other for other in candidates if _leads(other, prompt, layout)), None)
        if leader is not None:
            leaders[prompt.key] = leader.key
    return leaders


def _leads(other: SequenceState, prompt: SequenceState, layout: CacheLayout) -> bool:
    """Return whether `other` will yet make what `prompt` can use; it then keeps its state there."""
    block_tokens = layout.block_tokens
    done_tokens = other.resume_tokens if other.kv is None else other.kv.num_tokens
    shared_tokens = prompt.table.num_shared_blocks(other.table.keys) * block_tokens
    usable_tokens = min(shared_tokens, replay_boundary(len(prompt.tokens), block_tokens))
    is_leading = usable_tokens > max(done_tokens, prompt.resume_tokens)
    if is_leading and layout.has_states:
        other.table.mark(usable_tokens)
    return is_leading


def look_again(prompt: SequenceState, layout: CacheLayout) -> bool:
    """Let a prompt that never ran start from what was published since it came; return if it gained.

    Its table must be in nobody else's use behind the hit.
    """
    table = prompt.table
    if table.num_tokens != table.hit_tokens:
        return False  # it came whole from a peer
    hit_tokens = table.look_again(len(prompt.tokens))
    if hit_tokens <= prompt.stored_tokens:
        return False
    state = prompt.owner
    prompt.stored_tokens = hit_tokens
    prompt.resume_tokens = min(hit_tokens, state.num_reusable(layout))
    state.num_prompt_ready = state.num_prompt_done = prompt.resume_tokens
    return True
