"""No value of any field of a config.json does anything but change a description or be refused."""

import math
from typing import Any

import pytest

from prfaas.engine.families.fields import Fields
from prfaas.engine.families.registry import describe
from prfaas.errors import ConfigError
from tests.tiny_configs import FAMILIES, Family, tiny_config

ODD_VALUES = (0, -1, 2.5, 7, math.inf, math.nan, "x", [1], {"a": 1}, True)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_field_of_any_value_is_described_or_refused(family: Family) -> None:
    """A ConfigError says which; any other error would be a traceback at start."""
    config: dict[str, Any] = tiny_config(family)
    num_refused = 0
    for field in config:
        for value in ODD_VALUES:
            try:
                describe(config | {field: value})
            except ConfigError:
                num_refused += 1
    assert num_refused > 50


@pytest.mark.parametrize("value", [2.5, 0.5, math.inf, math.nan, -1, 0, True, "4", [4]])
def test_what_is_no_whole_number_is_refused_not_rounded(value: object) -> None:
    with pytest.raises(ConfigError, match="num_attention_heads="):
        Fields({"num_attention_heads": value}).integer("num_attention_heads")


def test_a_whole_number_may_be_written_with_a_point() -> None:
    assert Fields({"sliding_window": 128.0}).integer("sliding_window") == 128


@pytest.mark.parametrize("value", [[1.0], [1, 2, 3], ["1", 2], [True, 1], [math.nan, 1], 3])
def test_a_list_of_numbers_has_its_length_and_numbers_alone(value: object) -> None:
    fields = Fields({"mlp_multipliers": value})
    with pytest.raises(ConfigError, match="mlp_multipliers="):
        fields.numbers("mlp_multipliers", 2)
    assert fields.numbers("ssm_multipliers", 5) is None


def test_an_empty_list_of_attention_layers_means_none() -> None:
    config = tiny_config("lfm2")
    assert {layer.mixer for layer in describe(config | {"full_attn_idxs": []}).layers} == {
        "shortconv"
    }
