"""Calls on a tape are those that were made, in their order, as often as it is run."""

import pytest
import torch

from prfaas.engine.native.activations import multiply_by_gate
from prfaas.engine.native.kernel import listening
from prfaas.engine.native.product import pack_panels, product
from prfaas.engine.native.tape import Call, Tape


def test_a_call_that_is_listened_to_is_not_made() -> None:
    calls: list[Call] = []
    values, gates = torch.ones(2, 8), torch.zeros(2, 8)
    with listening(calls.append):
        multiply_by_gate(values, gates)
    assert torch.equal(values, torch.ones(2, 8))
    assert len(calls) == 1
    assert {values.data_ptr(), gates.data_ptr()} <= set(calls[0].addresses)


def test_a_tape_makes_its_calls_in_order_and_again() -> None:
    calls: list[Call] = []
    values, gates = torch.full((1, 8), 16.0), torch.zeros(1, 8)
    with listening(calls.append):
        multiply_by_gate(values, gates)  # by a half
        multiply_by_gate(gates, values)  # by sigmoid(8), which is not that of 16
    tape = Tape(calls)
    calls.clear()
    expected, its_gates = torch.full((1, 8), 16.0), torch.ones(1, 8)
    gates.fill_(1.0)
    for _ in range(3):
        multiply_by_gate(expected, its_gates)
        multiply_by_gate(its_gates, expected)
        tape.run()
        assert torch.equal(values, expected)
        assert torch.equal(gates, its_gates)
    assert tape.nbytes > 0


@pytest.mark.parametrize("num_threads", [1, 2])
def test_threads_share_the_units_of_a_call(num_threads: int) -> None:
    weight_NK = torch.randn(512, 640, generator=torch.Generator().manual_seed(0))
    panels, x_MK = pack_panels(weight_NK, torch.float32), torch.ones(1, 640)
    calls: list[Call] = []
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(num_threads)
        expected = product(x_MK, panels, 512)
        with listening(calls.append):
            y_MN = product(x_MK, panels, 512)
    finally:
        torch.set_num_threads(before)
    assert [call.threads for call in calls] == [num_threads]
    y_MN.zero_()
    Tape(calls).run()
    assert torch.equal(y_MN, expected)


def test_a_tape_without_calls_does_nothing() -> None:
    Tape([]).run()
