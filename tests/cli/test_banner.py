"""The banner says what runs and how to reach it."""

import pytest

from prfaas.cli.banner import banner
from prfaas.config.load import load_config


def lines_of(*, is_plain_template: bool = False, **flags: object) -> list[str]:
    text = banner(
        load_config(flags=flags, environ={}),
        model="tiny",
        routes=["GET /health", "POST /v1/chat/completions", "* /v1/{path}"],
        is_plain_template=is_plain_template,
    )
    return [" ".join(line.split()) for line in text.splitlines()]


def test_a_pd_node_names_model_address_routes_and_peer():
    lines = lines_of(peer="127.0.0.1:8100", threshold_tokens="99")
    assert lines[0].endswith("role pd, is ready")
    assert lines[1:] == [
        "model tiny, float16 weights on cpu",
        "address http://127.0.0.1:8000",
        "routes GET /health, POST /v1/chat/completions",
        "peer 127.0.0.1:8100 for more than 99 uncached prompt tokens",
    ]


def test_a_pd_node_without_a_peer_says_so():
    assert lines_of()[-1] == "peer none: every prompt is prefilled here"


@pytest.mark.parametrize(("role", "scheme"), [("prefill", "https"), ("pd", "http")])
def test_only_a_prefill_node_serves_over_tls(role, scheme):
    address = lines_of(role=role, tls_cert="c.pem", tls_key="c.key", tls_ca="ca.pem")[2]
    assert address.startswith(f"address {scheme}://")


def test_a_scheduler_says_what_it_decides_by_and_that_others_compute():
    lines = lines_of(role="scheduler")
    assert lines[1] == "model tiny, computed by the fleet's nodes"
    assert lines[2] == "address http://127.0.0.1:8200"
    assert lines[-1] == "fleet policy predictive; nodes join with --scheduler"


@pytest.mark.parametrize("role", ["prefill", "pd"])
def test_a_member_of_a_fleet_says_to_whom_it_belongs_and_under_which_name(role):
    lines = lines_of(role=role, scheduler="127.0.0.1:8200", cluster="east", port="9000")
    assert lines[-1] == "fleet cluster east of scheduler 127.0.0.1:8200, as 127.0.0.1:9000"


def test_a_prefill_node_has_no_peer():
    assert not any(line.startswith("peer") for line in lines_of(role="prefill"))


@pytest.mark.parametrize("is_plain", [False, True])
def test_a_missing_template_is_announced(is_plain):
    notice = "template no chat template in checkpoint: plain transcript"
    assert (notice in lines_of(is_plain_template=is_plain)) == is_plain


def test_an_ipv6_address_is_bracketed():
    assert "address http://[::1]:8000" in lines_of(host="::1")
