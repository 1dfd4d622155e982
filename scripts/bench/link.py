#!/usr/bin/env python
"""How near the KV channel comes to what the link carries: beside iperf3, plain sockets and Mooncake.

    sudo scripts/bench/link.py --json                  everything: about 25 minutes, on a quiet machine
    sudo scripts/bench/link.py --json --only links --mbit 200 --rtt-ms 40 --loss 0 0.001
    scripts/bench/link.py --quick                      seconds; links only where this user may make them
    sudo scripts/bench/link.py --peer mooncake --json  Mooncake's TCP transport, too, in its own environment

All move the same bytes in pages of the same size over as many connections, with the same congestion
control, in turn, round by round; a ratio is the median of the rounds' ratios. The KV channel and the
plain sockets keep their connections; iperf3 opens new ones. Goodput is counted at the receiver,
without headers. What the relay of scripts/wan carries without a limit is measured first, and links
over half of it are left out. docs/link.md says more.
"""

import argparse
import json
import platform
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from prfaas.transport.tcpinfo import available_congestion
from scripts.bench.link_peers import (
    GUARDS,
    Contender,
    Setup,
    check_mooncake,
    ends,
    iperf3,
    make_files,
    make_mooncake,
    mooncake,
)
from scripts.bench.link_places import Place, Shape, long_distance, loopback, why_no_links

PARTS = ("loopback", "links")
CODECS = ("raw", "zstd", "auto", "fp16", "int8", "fp8")
CEILING_RTT_MS = 10.0
CEILING_FRACTION = 0.5
LOOPBACK_CODEC_FRACTION = 0.25
"""Of the bytes of a run on loopback: codecs are slower, and a node cuts what takes half a minute."""
WARM_UP_FRACTION = 0.125
LINK_AIM, NO_CHECKSUM_AIM, CHECKSUM_AIM = 0.97, 0.9, 0.65
FULL = {
    "mbit": [50.0, 100.0, 200.0, 500.0],
    "rtt_ms": [10.0, 40.0, 80.0],
    "loss": [0.0, 0.001],
    "seconds": 6.0,
    "rounds": 3,
    "loopback_mib": 2048,
    "pool_mib": 256,
    "loopback_streams": [1, 4],
}
QUICK = {
    "mbit": [50.0],
    "rtt_ms": [10.0],
    "loss": [0.0],
    "seconds": 0.5,
    "rounds": 1,
    "loopback_mib": 64,
    "pool_mib": 32,
    "loopback_streams": [2],
}


def contenders(
    place: Place, setup: Setup, guards: Sequence[str]
) -> dict[str, AbstractContextManager[Contender]]:
    """Return all that run at a place, not yet started."""
    found: dict[str, AbstractContextManager[Contender]] = {}
    if shutil.which("iperf3") is not None:
        found["iperf3"] = iperf3(place, setup)
    found["plain"] = ends(place, setup, "plain")
    for guard in guards:
        found["kv" if guard == "checksum" else f"kv {guard}"] = ends(place, setup, "kv", guard)
    if setup.mooncake_python is not None:
        found["mooncake"] = mooncake(place, setup)
    return found


def measure(
    options: argparse.Namespace,
    place: Place,
    setup: Setup,
    num_bytes: int,
    *,
    guards: Sequence[str],
    codecs: Sequence[str] = (),
    codec_fraction: float = 1.0,
) -> dict[str, Any]:
    """Return how all fared at a place, in turn, and their ratios."""
    runs: dict[str, list[dict[str, Any]]] = {}
    failures: dict[str, str] = {}
    with ExitStack() as undo:
        started: dict[str, Contender] = {}
        for name, starting in contenders(place, setup, guards).items():
            try:
                started[name] = one = undo.enter_context(starting)
                if name != "iperf3":
                    one.run(max(1, round(WARM_UP_FRACTION * num_bytes)))
            except RuntimeError as error:
                failures[name] = str(error)
                started.pop(name, None)
        for _ in range(options.rounds):
            for name, contender in started.items():
                done = contender.run(num_bytes)
                runs.setdefault(name, []).append(
                    {"goodput_bytes_per_s": done.bytes_per_s} | done.detail
                )
        table = []
        if "kv" in started:
            for codec in codecs:
                done = started["kv"].run(round(codec_fraction * num_bytes), codec)
                table.append(
                    {"codec": codec, "goodput_bytes_per_s": done.bytes_per_s} | done.detail
                )
    rates = {name: [run["goodput_bytes_per_s"] for run in each] for name, each in runs.items()}
    return {
        "place": place.name,
        "rate_bytes_per_s": place.rate_bytes_per_s,
        "rtt_s": place.rtt_s,
        "loss": place.loss,
        "congestion": place.congestion,
        "streams": setup.streams,
        "page_bytes": setup.page_kib << 10,
        "num_bytes": num_bytes,
        "goodput_bytes_per_s": {name: statistics.median(each) for name, each in rates.items()},
        "ratios": _ratios(rates),
        "runs": runs,
        "codecs": table,
        "failures": failures,
    }


def _ratios(rates: dict[str, list[float]]) -> dict[str, float]:
    """Return, of the KV channel and each other in turn, the median of the rounds' ratios."""
    pairs = [(a, b) for a in rates if a.startswith("kv") for b in rates if not b.startswith("kv")]
    pairs += [("plain", "iperf3")] if {"plain", "iperf3"} <= rates.keys() else []
    return {
        f"{a} / {b}": statistics.median(x / y for x, y in zip(rates[a], rates[b], strict=True))
        for a, b in pairs
    }


def on_loopback(options: argparse.Namespace, setup: Setup) -> Iterator[dict[str, Any]]:
    for streams in options.loopback_streams:
        with loopback(options.loopback_congestion) as place:
            yield measure(
                options,
                place,
                _with_streams(setup, streams),
                options.loopback_mib << 20,
                guards=GUARDS,
                codecs=CODECS if streams == options.loopback_streams[-1] else (),
                codec_fraction=LOOPBACK_CODEC_FRACTION,
            )


def on_links(
    options: argparse.Namespace, setup: Setup, ceiling_bytes_per_s: float
) -> Iterator[dict[str, Any]]:
    """Yield what was measured over each link, or that it was left out."""
    shapes = [
        Shape(mbit=mbit, rtt_ms=rtt_ms, loss=loss)
        for mbit in options.mbit
        for rtt_ms in options.rtt_ms
        for loss in options.loss
    ]
    for number, shape in enumerate(shapes):
        assert shape.mbit is not None
        rate = shape.mbit * 1e6 / 8
        if rate > CEILING_FRACTION * ceiling_bytes_per_s:
            yield {"place": shape.name, "left_out": "over half of what the relay carries"}
            continue
        with long_distance(shape, options.congestion) as place:
            yield measure(
                options,
                place,
                setup,
                round(rate * options.seconds),
                guards=("checksum", "tls") if number == 0 else ("checksum",),
                codecs=CODECS if number == 0 else (),
            )


def ceiling(options: argparse.Namespace, setup: Setup) -> float:
    """Return the bytes per second that the relay carries without a limit."""
    with long_distance(Shape(mbit=None, rtt_ms=CEILING_RTT_MS), options.congestion) as place:
        has_iperf3 = shutil.which("iperf3") is not None
        with iperf3(place, setup) if has_iperf3 else ends(place, setup, "plain") as contender:
            return max(contender.run(round(50e6 * options.seconds)).bytes_per_s for _ in range(2))


def _with_streams(setup: Setup, streams: int) -> Setup:
    return Setup(**{**vars(setup), "streams": streams})


def aims(places: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield what was aimed at beside what was found: the worst place decides."""
    for name, ratio, least, where in (
        ("of iperf3 on links", "kv / iperf3", LINK_AIM, "links"),
        ("of plain sockets on loopback, checksums off", "kv none / plain", NO_CHECKSUM_AIM, "lo"),
        ("of plain sockets on loopback", "kv / plain", CHECKSUM_AIM, "lo"),
        ("of Mooncake on loopback", "kv / mooncake", 1.0, "lo"),
        ("of Mooncake where the link is the limit", "kv / mooncake", LINK_AIM, "links"),
    ):
        found = {
            f"{place['place']}, {place['streams']} streams": place["ratios"][ratio]
            for place in places
            if ratio in place.get("ratios", {})
            and (place["place"] == "loopback") == (where == "lo")
        }
        if found:
            worst = min(found, key=lambda place: found[place])
            yield {
                "aim": name,
                "at_least": least,
                "worst": found[worst],
                "at": worst,
                "median": statistics.median(found.values()),
                "is_met": found[worst] >= least,
            }


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--quick", action="store_true", help="seconds: is all in order?")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--peer", choices=("mooncake",), action="append", default=[])
    parser.add_argument("--mooncake-python", help="that has its wheel; default: a new environment")
    parser.add_argument("--mbit", type=float, nargs="+", help="links: 50 100 200 500")
    parser.add_argument("--rtt-ms", type=float, nargs="+", help="links: 10 40 80")
    parser.add_argument("--loss", type=float, nargs="+", help="links: 0 0.001")
    parser.add_argument("--seconds", type=float, help="of a run over a link: 6")
    parser.add_argument("--rounds", type=int, help="of each: 3")
    parser.add_argument("--loopback-mib", type=int, help="of a run on loopback: 2048")
    parser.add_argument("--loopback-streams", type=int, nargs="+", help="1 4")
    parser.add_argument("--streams", type=int, default=4, help="over links: 4")
    parser.add_argument("--page-kib", type=int, default=128, help="128: the default model's")
    parser.add_argument("--pool-mib", type=int, help="pages at each end, used in turn: 256")
    parser.add_argument("--congestion", default="bbr", help="over links: bbr")
    parser.add_argument("--loopback-congestion", default="cubic", help="cubic")
    options = parser.parse_args(argv)
    for name, value in (QUICK if options.quick else FULL).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    for name in {options.congestion, options.loopback_congestion} - set(available_congestion()):
        parser.error(f"no congestion control {name} here: {' '.join(available_congestion())}")
    return options


def mooncake_python(options: argparse.Namespace, directory: Path) -> tuple[str | None, str | None]:
    """Return a Python with Mooncake, or why there is none."""
    if "mooncake" not in options.peer:
        return None, None
    try:
        python = options.mooncake_python or make_mooncake(directory)
        check_mooncake(python)
    except (RuntimeError, OSError) as error:
        return None, str(error)
    return python, None


def report(options: argparse.Namespace, directory: Path) -> Iterator[tuple[str, Any]]:
    """Yield (what, figures), each as soon as it is there."""
    make_files(directory)
    python, failure = mooncake_python(options, directory)
    setup = Setup(
        streams=options.streams,
        page_kib=options.page_kib,
        pool_mib=options.pool_mib,
        files=directory,
        mooncake_python=python,
    )
    yield "machine", {"kernel": platform.release(), "python": platform.python_version()}
    missing = {} if shutil.which("iperf3") else {"iperf3": "iperf3 not found: install it"}
    if failure is not None:
        missing["mooncake"] = failure
    yield "missing", missing
    if "loopback" in options.only:
        for place in on_loopback(options, setup):
            yield "places", place
    if "links" in options.only:
        reason = why_no_links()
        if reason is not None:
            yield "links", f"left out: {reason}"
            return
        most = ceiling(options, setup)
        yield "relay_bytes_per_s", most
        for place in on_links(options, setup, most):
            yield "places", place


def line(what: str, figures: Any) -> str:
    """Return a line for a person."""
    if what == "relay_bytes_per_s":
        return f"relay of scripts/wan: {figures * 8 / 1e6:,.0f} Mbit/s without a limit"
    if what != "places":
        return f"{what}: {figures}"
    if "left_out" in figures:
        return f"{figures['place']}: left out, {figures['left_out']}"
    rates = "  ".join(
        f"{name} {rate * 8 / 1e6:,.0f}" for name, rate in figures["goodput_bytes_per_s"].items()
    )
    ratios = "  ".join(f"{name} {ratio:.3f}" for name, ratio in figures["ratios"].items())
    lines = [f"{figures['place']}, {figures['streams']} streams: {rates} Mbit/s", f"    {ratios}"]
    if figures["codecs"]:
        lines.append(
            "    KV by codec: "
            + "  ".join(
                f"{each['codec']} {each['goodput_bytes_per_s'] * 8 / 1e6:,.0f} Mbit/s"
                f" ({each['wire_fraction']:.0%})"
                for each in figures["codecs"]
            )
        )
    lines += [f"    {name} failed: {why}" for name, why in figures["failures"].items()]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    found: dict[str, Any] = {"places": []}
    with tempfile.TemporaryDirectory() as directory:
        for what, figures in report(options, Path(directory)):
            if what == "places":
                found[what].append(figures)
            else:
                found[what] = figures
            print(line(what, figures), file=sys.stderr if options.json else sys.stdout, flush=True)
    found["aims"] = list(aims(found["places"]))
    if options.json:
        print(json.dumps(found, indent=2))
        return
    for aim in found["aims"]:
        verdict = "met" if aim["is_met"] else "MISSED"
        print(f"{verdict}: {aim['at_least']} {aim['aim']}: {aim['worst']:.3f} at {aim['at']}")


if __name__ == "__main__":
    main()
