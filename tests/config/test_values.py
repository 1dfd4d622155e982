"""Values are read as their setting's type, within its limits, or refused by name."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.config.setting import Setting
from prfaas.config.settings import SETTINGS
from prfaas.config.values import parse_rate, parse_size, read_value
from prfaas.errors import ConfigError

UNITS = {
    "": 1,
    "B": 1,
    "kB": 1000,
    "MB": 1000**2,
    "GB": 1000**3,
    "TB": 1000**4,
    "KiB": 1024,
    "MiB": 1024**2,
    "GiB": 1024**3,
    "TiB": 1024**4,
}
BY_KEY = {setting.key: setting for setting in SETTINGS}


@given(st.integers(0, 10**9), st.integers(0, 999), st.sampled_from(sorted(UNITS)), st.booleans())
def test_a_size_is_its_number_times_its_unit_exactly(whole, thousandths, unit, is_spaced):
    text = f"{whole}.{thousandths:03d}{' ' if is_spaced else ''}{unit}"
    expected = (whole + Fraction(thousandths, 1000)) * UNITS[unit]
    if expected.denominator == 1:
        assert parse_size(text) == expected
    else:
        with pytest.raises(ValueError, match="no whole number of bytes"):
            parse_size(text)


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "4 gib", "4G", "1e9", "0x10", "4GiB4", "1__0", "٤", "nan"]
)
def test_what_is_no_size_is_refused_with_the_text(text):
    with pytest.raises(ValueError, match="expected bytes such as 4GiB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("800Mbit", 100e6),
        ("1.5Gbit", 187.5e6),
        ("1.5 Gbit/s", 187.5e6),
        ("8kbit", 1e3),
        ("8bit", 1.0),
        ("2Tbit", 250e9),
        ("100MB", 100e6),
        ("100MB/s", 100e6),
        ("1MiB/s", 1 << 20),
        ("7B/s", 7.0),
    ],
)
def test_a_rate_is_bytes_per_second(text, bytes_per_s):
    assert parse_rate(text) == bytes_per_s


@pytest.mark.parametrize(
    "text",
    ["", "800", "Mbit", "800mbit", "800Mb", "800Mbps", "-1Mbit", "1e3Mbit", "8Mbit/h", "nan"],
)
def test_what_is_no_rate_or_has_no_unit_is_refused_with_the_text(text):
    with pytest.raises(ValueError, match=f"expected a rate such as 800Mbit.*not '{text}'"):
        parse_rate(text)


RATE = Setting(section="x", name="limit_bytes_per_s", kind="rate", help="", above=0)


@pytest.mark.parametrize(("raw", "value"), [("8Mbit", 1e6), (1_000_000, 1e6), (0.5, 0.5)])
def test_a_rate_is_read_from_text_and_as_bytes_per_second_from_toml(raw, value):
    assert read_value(RATE, raw, origin="x") == value


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ("8", "expected a rate such as 800Mbit"),
        (True, "expected a rate such as 800Mbit, or bytes per second, not true"),
        ("0Mbit", "0 must be above 0"),
    ],
)
def test_a_wrong_rate_is_refused(raw, message):
    with pytest.raises(ConfigError, match=f"^the file: {message}"):
        read_value(RATE, raw, origin="the file")


@pytest.mark.parametrize(
    ("key", "raw", "value"),
    [
        ("engine.threads", "4", 4),
        ("engine.threads", 4, 4),
        ("engine.kv_ram_bytes", "4GiB", 4 << 30),
        ("engine.kv_ram_bytes", 1 << 30, 1 << 30),
        ("http.drain_timeout_s", 5, 5.0),
        ("http.drain_timeout_s", "2.5", 2.5),
        ("http.drain_timeout_s", "0", 0.0),
        ("transport.allow_plaintext", "Yes", True),
        ("transport.allow_plaintext", "0", False),
        ("transport.allow_plaintext", True, True),
        ("log.format", "json", "json"),
        ("model.model", "a b/c", "a b/c"),
        ("http.port", "65535", 65_535),
    ],
)
def test_text_and_toml_values_become_the_settings_type(key, raw, value):
    read = read_value(BY_KEY[key], raw, origin="x")
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("key", "raw", "message"),
    [
        ("http.port", "70000", "70000 is above the maximum of 65535"),
        ("http.port", 0, "0 is below the minimum of 1"),
        ("http.port", "80.5", "expected a whole number, not '80.5'"),
        ("http.port", True, "expected a whole number, not true"),
        ("http.port", [1], r"expected a whole number, not \[1\]"),
        ("http.port", "9" * 5000, "expected a whole number"),
        ("engine.threads", "0", "0 is below the minimum of 1"),
        ("transport.stall_timeout_s", "0", "0 must be above 0"),
        ("transport.stall_timeout_s", "nan", "expected a number, not 'nan'"),
        ("transport.stall_timeout_s", float("inf"), "expected a finite number, not inf"),
        ("transport.stall_timeout_s", False, "expected a number, not false"),
        ("scheduler.threshold_tokens", "-1", "-1 is below the minimum of 0"),
        (
            "scheduler.threshold_tokens",
            "1" + 20 * "0",
            f"1{20 * '0'} is above the maximum of {1 << 40}",
        ),
        ("log.level", "loud", "expected one of debug, info, warning, error, not 'loud'"),
        ("transport.allow_plaintext", "maybe", "expected true or false, not 'maybe'"),
        ("transport.allow_plaintext", 1, "expected true or false, not 1"),
        ("model.model", "", "expected printable text, not ''"),
        ("model.model", "a\x1b[31m", "expected printable text"),
        ("model.model", 5, "expected printable text, not 5"),
        ("cache.ram_bytes", "1KiB", "1024 is below the minimum of 1048576"),
        ("cache.ram_bytes", 1.5, "expected bytes such as 4GiB or 4096, not 1.5"),
    ],
)
def test_a_wrong_value_is_refused_with_origin_value_and_limit(key, raw, message):
    with pytest.raises(ConfigError, match=f"^the file: {message}"):
        read_value(BY_KEY[key], raw, origin="the file")


@given(
    st.integers(-(10**6), 10**6),
    st.integers(-(10**6), 10**6),
    st.integers(-(10**6), 10**6),
)
def test_an_integer_passes_exactly_within_its_bounds(value, one_end, other_end):
    low, high = sorted((one_end, other_end))
    setting = Setting(
        section="engine", name="n", kind="integer", help="", minimum=low, maximum=high
    )
    if low <= value <= high:
        assert read_value(setting, str(value), origin="x") == value
    else:
        with pytest.raises(ConfigError, match=str(value)):
            read_value(setting, str(value), origin="x")


@pytest.mark.parametrize("raw", ["se\nsame", 12345])
def test_a_refused_secret_is_not_repeated(raw):
    with pytest.raises(ConfigError) as caught:
        read_value(BY_KEY["http.api_key"], raw, origin="x")
    assert str(caught.value) == "x: expected printable text"
