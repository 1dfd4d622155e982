"""Profiles are read whole or refused with the key, the value and the limit."""

from pathlib import Path

import pytest

from prfaas.config.model_file import read_model
from prfaas.config.profiles import read_kv_model, read_profile
from prfaas.engine.model_spec import layers_kv_bytes
from prfaas.errors import ConfigError
from tests.config.knobs import INF, NAN, integer, number
from tests.config.plan_files import PROFILE, UNSET, changed, toml

CONFIGS = Path(__file__).parents[2] / "configs"


def read(directory: Path, key: str, value: object):
    path = directory / "profile.toml"
    path.write_text(toml(changed(PROFILE, key, value)))
    return read_profile(path)


CASES = [
    *integer("gpus_per_instance", minimum=1, maximum=4096),
    *number("cost.per_gpu", above=0, maximum=1e9),
    *(c for c in integer("decode.max_batch", minimum=1, maximum=65_536)),
    ("cost", UNSET, None),
    ("decode", UNSET, None),
    ("prefill", UNSET, "prefill: is not set"),
    ("kv", UNSET, "kv: is not set"),
    ("prefill", 3, "expected a table [prefill], not 3"),
    ("name", "", "name: expected printable text, not ''"),
    ("name", 1, "name: expected printable text, not 1"),
    ("name", UNSET, "name: is not set"),
    ("prefill.source", UNSET, "prefill.source: is not set"),
    ("prefill.provenance", "guessed", "expected one of published, fitted, measured, not 'guessed'"),
    ("prefill.curve", "spline", "expected one of cubic, linear, polynomial, not 'spline'"),
    ("prefill.tokens", [1000, 1000], "prefill.curve: length 1000 is not above the 1000 before it"),
    ("prefill.tokens", [1000], "prefill.curve: 1 lengths and 2 values"),
    ("prefill.tokens", [], "prefill.tokens: expected a list of numbers, not []"),
    ("prefill.tokens", 7, "prefill.tokens: expected a list of numbers, not 7"),
    ("prefill.tokens", [0, 1], "prefill.tokens[0]: 0 must be above 0"),
    ("prefill.tokens", [1, 1e9], "prefill.tokens[1]: 1000000000 is above the maximum of 100000000"),
    ("prefill.tokens", UNSET, "prefill.tokens: is not set"),
    ("prefill.seconds", [2.0, 1.0], "prefill.curve: value 1 is below the 2 before it"),
    ("prefill.seconds", [-1, 1], "prefill.seconds[0]: -1 must be above 0"),
    ("prefill.seconds", [0, 1], "prefill.seconds[0]: 0 must be above 0"),
    ("prefill.seconds", [1, NAN], "prefill.seconds[1]: expected a finite number, not nan"),
    ("prefill.seconds", [1, INF], "prefill.seconds[1]: expected a finite number, not inf"),
    ("prefill.seconds", [1, 1e7], "prefill.seconds[1]: 10000000 is above the maximum of 1000000"),
    ("prefill.seconds", ["1", 2], "prefill.seconds[0]: expected a number, not '1'"),
    ("prefill.coefficients", [1.0], "unknown key prefill.coefficients"),
    ("kv.bytes", [0, 1], "kv.bytes[0]: 0 must be above 0"),
    ("kv.bytes", [2, 1], "kv.bytes: value 1 is below the 2 before it"),
    ("kv.bytes", [1, 1e16], "kv.bytes[1]: 1e+16 is above the maximum of 1e+15"),
    ("kv.model", "nowhere.json", "cannot read"),
    ("kv.typo", 1, "unknown key kv.typo"),
    ("decode.batch", [0, 32], "decode.batch[0]: 0 is below the minimum of 1"),
    ("decode.step_s", [0.02, 0.01], "decode.step_s: value 0.01 is below the 0.02 before it"),
    ("decode.step_s", [0, 0.01], "decode.step_s[0]: 0 must be above 0"),
    ("gpus_per_instnace", 8, "unknown key gpus_per_instnace; did you mean gpus_per_instance?"),
]


@pytest.mark.parametrize(("key", "value", "says"), CASES)
def test_a_profile_is_read_or_refused_with_key_value_and_limit(tmp_path, key, value, says):
    if says is None:
        read(tmp_path, key, value)
        return
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, key, value)
    message = str(caught.value)
    assert says in message
    assert str(tmp_path) in message
    assert key.partition(".")[0] in message or "cannot read" in says


@pytest.mark.parametrize("path", sorted((CONFIGS / "models").glob("*.json")), ids=lambda p: p.stem)
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float32"])
def test_the_kv_of_a_model_is_its_s_kv_at_every_length(tmp_path, path, kv_dtype):
    made = read(tmp_path, "kv", {"model": str(path), "kv_dtype": kv_dtype})
    layers = read_model(path).layers
    for length in (1, 2, 100, 127, 128, 129, 511, 512, 1024, 32_768, 1_000_003):
        assert made.kv_bytes(length) == pytest.approx(layers_kv_bytes(layers, length, kv_dtype))


@pytest.mark.parametrize("text", ["[]", "{", "\x00", "3"])
def test_a_model_file_that_is_no_config_is_refused(tmp_path, text):
    (tmp_path / "m.json").write_text(text)
    with pytest.raises(ConfigError, match=r"m\.json"):
        read(tmp_path, "kv", {"model": "m.json"})


@pytest.mark.parametrize("coefficients", [[0], [0.0, -1.0], [NAN]])
def test_a_polynomial_that_could_fall_is_refused(tmp_path, coefficients):
    prefill = {
        "curve": "polynomial",
        "coefficients": coefficients,
        "provenance": "fitted",
        "source": "a test",
    }
    with pytest.raises(ConfigError, match=r"prefill\.(curve|coefficients)"):
        read(tmp_path, "prefill", prefill)


def test_the_shipped_profiles_say_what_is_published_and_what_is_fitted():
    h200 = read_profile(CONFIGS / "profiles" / "h200-internal-1t.toml")
    h20 = read_profile(CONFIGS / "profiles" / "h20-internal-1t.toml")
    assert (h200.prefill_provenance, h200.decode) == ("published", None)
    assert h20.prefill_provenance == "fitted"
    assert h20.decode is not None
    assert h20.decode.provenance == "fitted"
    # PrfaaS Table 5; its longer prompts are a little shorter than their names (S_kv says so).
    table = {1024: (190.8, 0.44), 8192: (308.9, 0.72), 32768: (701.3, 1.84), 131072: (2316.3, 7.40)}
    for length, (mib, seconds) in table.items():
        assert h200.prefill_s(length) == pytest.approx(seconds)
        assert h200.kv_bytes(length) / 2**20 == pytest.approx(mib, rel=0.02)
    assert h20.prefill_s(10_000) == pytest.approx(1.0 + 0.672 + 0.1066)


def test_the_model_behind_a_profiles_kv_is_given_and_none_behind_a_table(tmp_path):
    path = CONFIGS / "profiles" / "h20-internal-1t.toml"
    named = read_kv_model(path)
    assert named is not None
    model, kv_dtype = named
    assert kv_dtype == "bfloat16"
    s_kv = layers_kv_bytes(model.layers, 4_096, kv_dtype)
    assert s_kv == read_profile(path).kv_bytes(4_096)
    table = tmp_path / "table.toml"
    table.write_text("[kv]\ntokens = [1]\nbytes = [2]\n")
    assert read_kv_model(table) is None
