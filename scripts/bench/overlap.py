#!/usr/bin/env python
"""Does sending hide behind computing? Time to the SECOND token over a link as fast as the prefill.

    sudo scripts/bench/overlap.py --json                        replayed engines, about 5 minutes
    sudo scripts/bench/overlap.py --json --model gemma-3-270m   the real model beside them
    sudo scripts/bench/overlap.py --quick

The second token can only come once decode has started, with all of the KV here. The link is shaped so
that what can be sent during the prefill takes as long as the prefill. Beside it stands the same
without overlap: the same prompt over an unlimited link, plus its KV alone over the shaped one (the
prefill node has it cached by then, and a second pd node asks). docs/link.md says how to read it.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from prfaas.config.profiles import read_profile
from scripts.bench.link_places import Shape, long_distance, why_no_links
from scripts.bench.overlap_nodes import ROOT, Engines, Pair, running

PROFILES = ROOT / "configs" / "profiles"
PREFILL_PROFILE = PROFILES / "h200-internal-1t.toml"
PD_PROFILE = PROFILES / "h20-internal-1t.toml"
CHUNK_TOKENS = 576
"""What a step of a prefill computes; the KV of the last one cannot leave before."""
BOUND_FACTOR = 1.1
FULL = {"tokens": 32_000, "rtt_ms": [0.0, 10.0, 40.0, 80.0], "prompts": 5, "speed": 1.0}
QUICK = {"tokens": 8000, "rtt_ms": [0.0, 20.0], "prompts": 1, "speed": 2.0}
TOKEN_IDS = range(32, 120)
"""Every tokenizer here has them, and each is text of its own in most."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one prompt costs where nothing limits the link."""

    num_tokens: int
    prefill_s: float
    num_bytes: int
    """KV that travels."""
    tail_bytes: int
    """Of it, what is final only with the last chunk: states, windows, that chunk's own."""
    unlimited: dict[str, float]
    """Times over a link without limit and delay."""

    @property
    def stream_bytes(self) -> int:
        return self.num_bytes - self.tail_bytes

    @property
    def mbit(self) -> float:
        """Rate at which sending the stream takes as long as the prefill."""
        return self.stream_bytes / self.prefill_s * 8 / 1e6


def replayed(options: argparse.Namespace) -> Engines:
    flags = ["--engine", "replay", "--speed", str(options.speed)]
    flags += ["--bytes-scale", str(options.bytes_scale)]
    return Engines(
        name=f"replay of {PREFILL_PROFILE.stem}",
        is_replay=True,
        prefill=[*flags, "--profile", str(PREFILL_PROFILE)],
        pd=[*flags, "--profile", str(PD_PROFILE)],
    )


def real(model: str) -> Engines:
    flags = ["--model", model, "--threads", "1"]
    return Engines(name=model, is_replay=False, prefill=flags, pd=flags)


def prompts(num_tokens: int, count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [rng.choices(TOKEN_IDS, k=num_tokens) for _ in range(count)]


def ask_all(pair: Pair, client: int, asked: Sequence[list[int]]) -> list[dict[str, Any]]:
    """Return how each prompt fared. RuntimeError if one was not prefilled by the peer."""
    answers = []
    for prompt in asked:
        answer = pair.clients[client].ask({"prompt": prompt})
        story = answer["story"]
        if story["route"] != "remote" or story["tokens_local"]:
            raise RuntimeError(f"a prompt was prefilled locally: {story['reason']}")
        answers.append(answer)
    return answers


def medians(answers: Sequence[dict[str, Any]]) -> dict[str, float]:
    return {
        name: statistics.median(answer[name] for answer in answers)
        for name in ("ttft_s", "second_s")
    }


def unlimited(engines: Engines, options: argparse.Namespace, num_tokens: int, work: Path) -> Work:
    """Return what a prompt costs by itself."""
    with (
        long_distance(Shape(mbit=None, rtt_ms=0), options.congestion) as place,
        running(place, engines, 1, work) as pair,
    ):
        ask_all(pair, 0, prompts(num_tokens, 1, seed=1))
        answers = ask_all(pair, 0, prompts(num_tokens, options.prompts, seed=2))
        token_bytes = pair.link(0.2)["routing"]["kv_bytes_per_token"]
    num_bytes = answers[-1]["story"]["bytes_received"]
    tail_bytes = num_bytes - token_bytes * (num_tokens - min(num_tokens, CHUNK_TOKENS))
    times = medians(answers)
    prefill_s = times["ttft_s"]
    if engines.is_replay:
        prefill_s = read_profile(PREFILL_PROFILE).prefill_s(num_tokens) / options.speed
    return Work(
        num_tokens=num_tokens,
        prefill_s=prefill_s,
        num_bytes=num_bytes,
        tail_bytes=tail_bytes,
        unlimited=times,
    )


def over_link(
    engines: Engines, options: argparse.Namespace, work: Work, rtt_ms: float, directory: Path
) -> dict[str, Any]:
    """Return the times over a link as fast as the prefill, beside bound and no overlap.

    A real model's link has the rate that was named: its KV is so small beside its prefill that
    the rate at which both take as long is no link's.
    """
    mbit = work.mbit if engines.is_replay else options.model_mbit
    shape = Shape(mbit=mbit, rtt_ms=rtt_ms)
    with (
        long_distance(shape, options.congestion) as place,
        running(place, engines, 2, directory) as pair,
    ):
        ask_all(pair, 0, prompts(work.num_tokens, 1, seed=3))  # windows open, pages are touched
        asked = prompts(work.num_tokens, options.prompts, seed=4)
        answers = ask_all(pair, 0, asked)
        alone = medians(ask_all(pair, 1, asked))
        link = pair.link(options.link_seconds)
    rate = max(each["goodput_bytes_per_s"] for each in link["streams"])
    times, rtt_s = medians(answers), rtt_ms / 1e3
    tail_s = work.tail_bytes / rate
    bound_s = BOUND_FACTOR * (max(work.prefill_s, work.stream_bytes / rate) + tail_s + rtt_s)
    return {
        "rtt_s": rtt_s,
        "shaped_bytes_per_s": mbit * 1e6 / 8,
        "goodput_bytes_per_s": rate,
        "transfer_s": work.stream_bytes / rate,
        "tail_s": tail_s,
        **times,
        "bound_s": bound_s,
        "second_over_bound": times["second_s"] / bound_s * BOUND_FACTOR,
        "kv_alone_second_s": alone["second_s"],
        "without_overlap_s": work.unlimited["second_s"] + alone["second_s"],
        "runs": [{name: each[name] for name in ("ttft_s", "second_s")} for each in answers],
    }


def figures(
    engines: Engines, options: argparse.Namespace, num_tokens: int, directory: Path
) -> Iterator[tuple[str, Any]]:
    """Yield (what, figures) of one pair of engines."""
    work = unlimited(engines, options, num_tokens, directory)
    yield (
        "work",
        {
            "engine": engines.name,
            "num_tokens": num_tokens,
            "prefill_s": work.prefill_s,
            "num_bytes": work.num_bytes,
            "tail_bytes": work.tail_bytes,
            "unlimited": work.unlimited,
        },
    )
    for rtt_ms in options.rtt_ms:
        yield "links", over_link(engines, options, work, rtt_ms, directory)


def aims(links: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what was aimed at beside what was found."""
    found = [
        {
            "aim": f"second token within {BOUND_FACTOR} x (prefill or transfer + tail + RTT)",
            "rtt_s": link["rtt_s"],
            "found_s": link["second_s"],
            "at_most_s": link["bound_s"],
        }
        for link in links
    ]
    found += [
        {
            "aim": f"{name} at most one RTT and the tail over that at RTT {links[0]['rtt_s']}",
            "rtt_s": link["rtt_s"],
            "found_s": link[name],
            "at_most_s": links[0][name] + link["rtt_s"] + link["tail_s"],
        }
        for link in links[1:]
        for name in ("ttft_s", "second_s")
    ]
    return [aim | {"is_met": aim["found_s"] <= aim["at_most_s"]} for aim in found]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--quick", action="store_true", help="one prompt, two links")
    parser.add_argument("--tokens", type=int, help="of a replayed prompt: 32000")
    parser.add_argument("--rtt-ms", type=float, nargs="+", help="0 10 40 80; the first is the base")
    parser.add_argument("--prompts", type=int, help="median of so many: 5")
    parser.add_argument("--speed", type=float, help="of the replay: 1")
    parser.add_argument("--bytes-scale", type=float, default=0.02, help="of the replay: 0.02")
    parser.add_argument("--model", action="append", default=[], help="a real one beside it")
    parser.add_argument("--model-tokens", type=int, default=2048, help="of its prompts: 2048")
    parser.add_argument("--model-mbit", type=float, default=30.0, help="of its link: 30")
    parser.add_argument("--link-seconds", type=float, default=2.0, help="of bench link: 2")
    parser.add_argument("--congestion", default="bbr", help="bbr")
    options = parser.parse_args(argv)
    for name, value in (QUICK if options.quick else FULL).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def line(what: str, found: dict[str, Any]) -> str:
    if what == "work":
        return (
            f"{found['engine']}, {found['num_tokens']:,} tokens: prefill {found['prefill_s']:.2f} s,"
            f" {found['num_bytes'] / 1e6:.1f} MB of KV, the last {found['tail_bytes'] / 1e6:.2f} MB"
            f" of them final at the end; unlimited: second token {found['unlimited']['second_s']:.2f} s"
        )
    return (
        f"RTT {1e3 * found['rtt_s']:.0f} ms, {found['goodput_bytes_per_s'] * 8 / 1e6:.1f} Mbit/s:"
        f" first token {found['ttft_s']:.2f} s, second {found['second_s']:.2f} s,"
        f" bound {found['bound_s']:.2f} s, without overlap {found['without_overlap_s']:.2f} s"
    )


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    reason = why_no_links()
    if reason is not None:
        sys.exit(f"overlap.py needs links that it can shape: {reason}")
    engines = [(replayed(options), options.tokens)]
    engines += [(real(model), options.model_tokens) for model in options.model]
    report: dict[str, Any] = {"engines": []}
    with tempfile.TemporaryDirectory() as name:
        for each, num_tokens in engines:
            found: dict[str, Any] = {"links": []}
            report["engines"].append(found)
            for what, value in figures(each, options, num_tokens, Path(name)):
                if what == "links":
                    found["links"].append(value)
                else:
                    found |= value
                output = sys.stderr if options.json else sys.stdout
                print(line(what, value), file=output, flush=True)
            found["aims"] = aims(found["links"])
            if not options.json:
                for aim in found["aims"]:
                    verdict = "met" if aim["is_met"] else "MISSED"
                    print(
                        f"{verdict}: {aim['found_s']:.2f} of {aim['at_most_s']:.2f} s: {aim['aim']}"
                    )
    if options.json:
        print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
