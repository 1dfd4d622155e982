"""The table of settings covers the rooms' options, no more and no less."""

from dataclasses import fields

import pytest

from prfaas.config.options import NodeConfig
from prfaas.config.setting import SECTIONS, kind_of
from prfaas.config.settings import SETTINGS


def test_every_option_of_every_room_can_be_set_and_nothing_else():
    options = {
        f"{section}.{option.name}" for section, cls in SECTIONS.items() for option in fields(cls)
    }
    assert {setting.key for setting in SETTINGS} == options | {"role"}


def test_sections_are_the_node_configs_fields():
    assert ["role", *SECTIONS] == [field.name for field in fields(NodeConfig)]


def test_no_two_settings_share_a_flag_or_a_variable():
    flags = [setting.flag for setting in SETTINGS if setting.flag]
    assert len(set(flags)) == len(flags)
    assert len({setting.variable for setting in SETTINGS}) == len(SETTINGS)


@pytest.mark.parametrize(
    ("key", "flag", "variable"),
    [
        ("role", "--role", "PRFAAS_ROLE"),
        ("model.model", "--model", "PRFAAS_MODEL"),
        ("scheduler.threshold_tokens", "--threshold-tokens", "PRFAAS_THRESHOLD_TOKENS"),
        ("transport.accept_numerics", "--accept-numerics", "PRFAAS_ACCEPT_NUMERICS"),
        ("cache.ram_bytes", "--cache-ram", "PRFAAS_CACHE_RAM"),
        ("log.level", "--log-level", "PRFAAS_LOG_LEVEL"),
    ],
)
def test_a_setting_has_one_name_in_three_spellings(key, flag, variable):
    setting = {setting.key: setting for setting in SETTINGS}[key]
    assert (setting.flag, setting.variable) == (flag, variable)


def test_defaults_are_within_their_own_limits():
    config = NodeConfig()
    for setting in SETTINGS:
        if setting.section:
            value = getattr(getattr(config, setting.section), setting.name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                assert setting.minimum is None or value >= setting.minimum, setting.key
                assert setting.maximum is None or value <= setting.maximum, setting.key
                assert setting.above is None or value > setting.above, setting.key
            if setting.choices and value is not None:
                assert value in setting.choices, setting.key


def test_the_kind_of_a_field_follows_from_its_type_and_unit():
    assert kind_of("ram_bytes", int) == ("size", ())
    assert kind_of("num_threads", int | None) == ("integer", ())
    assert kind_of("lease_s", float) == ("number", ())
    assert kind_of("limit_bytes_per_s", float | None) == ("rate", ())


def test_a_secret_has_no_flag():
    assert [setting.key for setting in SETTINGS if setting.flag is None] == ["http.api_key"]
