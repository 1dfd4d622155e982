"""A case is one line that says whether it proves anything, and what differs."""

import pytest

from prfaas.cli.verify import describe
from prfaas.server.verify import VerifyCase


def case(**changes: object) -> VerifyCase:
    fields: dict[str, object] = {
        "prompt_tokens": 65,
        "sampling": "greedy",
        "row": "remote",
        "route": "remote",
        "reason": "forced",
        "tokens_reused": 0,
        "tokens_remote": 65,
        "bytes_received": 1_500_000,
        "exact": True,
        "answer_tokens": 32,
        "agreeing_tokens": 32,
        "tokens_equal": True,
        "bits_equal": True,
        "max_logit_difference": 0.0,
        "failure": None,
    }
    return VerifyCase(**(fields | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "end"),
    [
        ({}, "1.5 MB equal"),
        ({"failure": "no cache was hit"}, "FAILED: no cache was hit"),
        (
            {"bits_equal": False, "max_logit_difference": 0.25},
            "tokens equal, bits DIFFER (logits by up to 0.25)",
        ),
        ({"tokens_equal": False}, "tokens DIFFER, bits equal (logits by up to 0)"),
        (
            {"bits_equal": False, "tokens_equal": False, "max_logit_difference": None},
            "tokens DIFFER, bits DIFFER",
        ),
    ],
)
def test_the_verdict_ends_the_line(changes, end):
    line = " ".join(describe(case(**changes)).split())
    assert line.startswith("65 tokens greedy remote 0 reused 65 remote")
    assert line.endswith(end)
