"""scripts/bench/link.py: what is compared, where, and the JSON that it writes."""

import json
import shutil
from typing import Any

import pytest

from prfaas.transport.tcpinfo import available_congestion
from scripts.bench import link
from scripts.bench.link_peers import Setup, check_mooncake, ends, iperf3, make_files
from scripts.bench.link_places import Place, Shape, why_no_links

CONGESTION = ["--congestion", "reno", "--loopback-congestion", "reno"]

pytestmark = pytest.mark.skipif("reno" not in available_congestion(), reason="Linux only")


def place(name: str, **ratios: float) -> dict[str, Any]:
    return {
        "place": name,
        "streams": 4,
        "ratios": {k.replace("_", " / "): v for k, v in ratios.items()},
    }


def test_the_worst_place_decides_whether_an_aim_is_met():
    places = [
        place("loopback", kv_plain=0.7, kv_iperf3=0.1),
        place("far", kv_iperf3=0.99),
        place("near", kv_iperf3=0.96),
        {"place": "fast", "left_out": "over half of what the relay carries"},
    ]
    found = {aim["aim"]: aim for aim in link.aims(places)}
    assert found["of iperf3 on links"]["at"] == "near, 4 streams"
    assert not found["of iperf3 on links"]["is_met"]
    assert found["of plain sockets on loopback"]["is_met"]
    assert len(found) == 2


def test_ratios_are_of_runs_of_the_same_round():
    rates = {"iperf3": [10.0, 20.0, 30.0], "plain": [10.0, 20.0, 15.0], "kv": [9.0, 10.0, 27.0]}
    ratios = link._ratios(rates)
    assert ratios == {
        "kv / iperf3": pytest.approx(0.9),
        "kv / plain": pytest.approx(0.9),
        "plain / iperf3": pytest.approx(1.0),
    }


def test_what_is_missing_is_named(monkeypatch, tmp_path):
    here = Place(name="here", host="127.0.0.1", congestion="reno")
    setup = Setup(streams=1, page_kib=64, pool_mib=1, files=tmp_path)
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    with pytest.raises(RuntimeError, match="iperf3 not found: install it"), iperf3(here, setup):
        pass
    missing = tmp_path / "python"
    missing.write_text("#!/bin/sh\necho 'ImportError: libibverbs.so.1' >&2\nexit 1\n")
    missing.chmod(0o755)
    with pytest.raises(RuntimeError, match="libibverbs"):
        check_mooncake(str(missing))


def test_a_shape_says_what_it_is():
    assert Shape(mbit=200, rtt_ms=40, loss=0.001).name == "200 Mbit/s, RTT 40 ms, loss 0.1%"


def test_an_unknown_congestion_control_is_refused(capsys):
    with pytest.raises(SystemExit):
        link.parse(["--congestion", "carrier-pigeon"])
    assert "carrier-pigeon" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("guard", ["none", "tls"])
def test_both_ends_move_bytes_in_processes_of_their_own(guard, tmp_path):
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    make_files(tmp_path)
    here = Place(name="here", host="127.0.0.1", congestion="reno")
    setup = Setup(streams=2, page_kib=64, pool_mib=2, files=tmp_path)
    with ends(here, setup, "kv", guard) as contender:
        done = contender.run(1_000_000, "zstd" if guard == "tls" else "raw")
    assert done.bytes_per_s > 0
    assert done.detail["num_bytes"] == 16 * (64 << 10)
    assert (done.detail["wire_fraction"] < 1) == (guard == "tls")
    assert done.detail["congestion"] == "reno"


@pytest.mark.slow
def test_a_quick_run_measures_all_side_by_side(capsys):
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    link.main(
        [
            "--quick",
            "--json",
            "--loopback-mib",
            "4",
            "--pool-mib",
            "4",
            "--seconds",
            "0.1",
            *CONGESTION,
        ]
    )
    found = json.loads(capsys.readouterr().out)
    names = {"plain", "kv", "kv none", "kv mac", "kv tls"}
    if shutil.which("iperf3") is not None:
        names.add("iperf3")
    else:
        assert "iperf3 not found" in found["missing"]["iperf3"]
    [loopback, *links] = found["places"]
    assert loopback["goodput_bytes_per_s"].keys() == names
    assert not loopback["failures"]
    assert {each["codec"] for each in loopback["codecs"]} == set(link.CODECS)
    assert all(rate > 0 for rate in loopback["goodput_bytes_per_s"].values())
    if why_no_links() is None:
        assert found["relay_bytes_per_s"] > 0
        [one] = links
        assert one["place"] == "50 Mbit/s, RTT 10 ms, loss 0.0%"
        assert one.get("left_out") or one["goodput_bytes_per_s"].keys() >= {"plain", "kv"}
    else:
        assert found["links"].startswith("left out")
    assert found["aims"]
