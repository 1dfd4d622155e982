"""Which rotation a config asks for: what is not read is refused, never taken for plain rope."""

from typing import Any

import pytest

from prfaas.engine.families.registry import describe
from prfaas.errors import ConfigError
from tests.tiny_configs import Family, tiny_config

FULL, SLIDING = "full_attention", "sliding_attention"
PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}


def unsupported(family: Family, **fields: Any) -> tuple[str, ...]:
    return describe(tiny_config(family) | fields).unsupported


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", "proportional", "ntk"])
def test_other_scalings_are_refused_by_name(kind: str) -> None:
    for field in ("rope_scaling", "rope_parameters"):
        assert unsupported("llama", **{field: {"type": kind, "factor": 2.0}}) == (
            f"rope type {kind!r}",
        )


def test_a_factor_without_a_known_type_is_refused() -> None:
    (named,) = unsupported("llama", rope_scaling={"factor": 4.0})
    assert "factor=4.0" in named
    assert unsupported("llama", rope_scaling={"factor": 1.0, "type": "default"}) == ()
    assert unsupported("qwen3_5", rope_scaling={"type": "mrope", "mrope_section": [1, 1]}) == ()


@pytest.mark.parametrize("family", ["gemma3", "mimo_v2_flash"])
@pytest.mark.parametrize(("kept", "lost"), [(FULL, SLIDING), (SLIDING, FULL)])
def test_parameters_of_one_layer_type_alone_are_refused(
    family: Family, kept: str, lost: str
) -> None:
    with pytest.raises(ConfigError, match=f"rope_parameters say nothing of {lost}"):
        unsupported(family, rope_parameters={kept: PLAIN})


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_oss"])
def test_parameters_by_layer_type_are_refused_where_all_layers_rotate_alike(
    family: Family,
) -> None:
    named = unsupported(family, rope_parameters={FULL: PLAIN, SLIDING: PLAIN})
    assert named == tuple(f"rope_parameters of {kind} layers alone" for kind in (FULL, SLIDING))


@pytest.mark.parametrize("part", [1.5, 0.01, 0.1])
def test_a_part_of_a_head_that_has_no_pairs_is_refused(part: float) -> None:
    """Of 32 dimensions: more than there are, none, and three."""
    with pytest.raises(ConfigError, match="cannot rotate in pairs"):
        unsupported("qwen3_5", partial_rotary_factor=part)
