"""The native hash of a vocabulary against its definition."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prfaas.engine.native.noise import LANES, UNIT_IDS, loud_ids
from prfaas.engine.splitmix import GOLDEN, mix64

WORD = 1 << 64


def plain_loud_ids(key: int, threshold: int, num_ids: int) -> list[int]:
    words = (mix64((key + (index + 1) * GOLDEN) % WORD) for index in range(num_ids))
    return [index for index, word in enumerate(words) if word >= threshold]


@given(
    key=st.integers(0, WORD - 1),
    threshold=st.integers(0, WORD - 1) | st.sampled_from([0, 1 << 63, WORD - 1]),
    num_ids=st.integers(LANES, 300),
)
def test_ids_are_those_whose_hash_reaches_the_threshold(
    key: int, threshold: int, num_ids: int
) -> None:
    assert loud_ids(key, threshold, num_ids).tolist() == plain_loud_ids(key, threshold, num_ids)


@pytest.mark.parametrize("num_ids", [UNIT_IDS - 1, UNIT_IDS, UNIT_IDS + 3])
@pytest.mark.parametrize("threads", [1, 3])
def test_threads_share_a_vocabulary_without_a_gap(num_ids: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = loud_ids(5, WORD // 2, num_ids)
    finally:
        torch.set_num_threads(before)
    assert found.tolist() == plain_loud_ids(5, WORD // 2, num_ids)
