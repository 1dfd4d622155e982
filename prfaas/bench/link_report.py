"""What `prfaas bench link` says: one JSON object, or lines for a person."""

import math
from collections.abc import Iterator
from typing import Any

from prfaas.bench.link import LinkFigures, Rate
from prfaas.bench.threshold import (
    KvSize,
    LinkRates,
    break_even_tokens_per_s,
    kv_size,
    threshold_tokens,
)

PROMPT_TOKENS = (1024, 8192, 32_768, 131_072)
_GIB = 1 << 30


def to_json(figures: LinkFigures, local_tokens_per_s: float | None) -> dict[str, Any]:
    """Return everything that was measured and what follows from it, in base units."""
    return {
        "peer": figures.peer,
        "guard": figures.guard,
        "rtt_s": figures.rtt_s,
        "request_s": figures.request_s,
        "congestion": figures.best.sender.congestion,
        "streams": [_rate(rate) for rate in figures.rates],
        "codecs": [_rate(rate) for rate in figures.codecs],
        "costs_s_per_gib": {cost.name: cost.s_per_gib for cost in figures.costs},
        "routing": _routing(figures, local_tokens_per_s),
    }


def _rate(rate: Rate) -> dict[str, Any]:
    return {
        "streams": rate.streams,
        "codec": rate.codec,
        "goodput_bytes_per_s": rate.bytes_per_s,
        "wire_fraction": rate.num_wire_bytes / rate.num_bytes,
        "seconds": rate.seconds,
        "num_bytes": rate.num_bytes,
        "num_retransmits": rate.sender.num_retransmits,
        "loss_fraction": rate.loss_fraction,
        "cpu_s_per_gib": rate.cpu_s / rate.num_bytes * _GIB,
        "sender_cpu_s_per_gib": rate.sender.cpu_s / rate.num_bytes * _GIB,
    }


def _routing(figures: LinkFigures, local_tokens_per_s: float | None) -> dict[str, Any]:
    identity = figures.status.identity
    try:
        kv = kv_size(identity.layout, identity.block_tokens)
    except ValueError as error:
        return {"unknown": str(error)}
    rates = link_rates(figures)
    threshold = None
    if local_tokens_per_s is not None:
        threshold = threshold_tokens(
            kv, rates, local_tokens_per_s, block_tokens=identity.block_tokens
        )
    return {
        "kv_bytes_per_token": kv.bytes_per_token,
        "tail_bytes": kv.tail_bytes(PROMPT_TOKENS[-1]),
        "peer_tokens_per_s": figures.status.prefill_tokens_per_s or None,
        "local_tokens_per_s": local_tokens_per_s,
        "threshold_tokens": threshold,
        "prompts": [_prompt(kv, rates, num_tokens) for num_tokens in PROMPT_TOKENS],
    }


def link_rates(figures: LinkFigures) -> LinkRates:
    """Return what a remote prefill over the measured link runs at; a peer of unknown rate takes no time."""
    return LinkRates(
        link_bytes_per_s=figures.best.bytes_per_s,
        rtt_s=figures.rtt_s,
        peer_tokens_per_s=figures.status.prefill_tokens_per_s or math.inf,
    )


def _prompt(kv: KvSize, rates: LinkRates, num_tokens: int) -> dict[str, Any]:
    return {
        "tokens": num_tokens,
        "kv_bytes": kv.of(num_tokens),
        "transfer_s": kv.of(num_tokens) / rates.link_bytes_per_s,
        "remote_s": rates.remote_s(kv, num_tokens),
        "break_even_tokens_per_s": break_even_tokens_per_s(kv, rates, num_tokens),
    }


def to_lines(report: dict[str, Any]) -> Iterator[str]:
    """Yield what `to_json` returned as lines for a person."""
    yield f"{report['peer']}, frames guarded by {report['guard']}, {report['congestion'] or 'unknown'}"
    yield (
        f"round trip {_ms(report['rtt_s'])} ms in TCP, {_ms(report['request_s'])} ms for a request"
    )
    yield ""
    yield "streams      goodput   sent again   CPU s/GiB here, there"
    for rate in report["streams"]:
        yield (
            f"{rate['streams']:>7} {_mbit(rate):>12} {rate['loss_fraction']:>11.3%}"
            f"   {rate['cpu_s_per_gib']:.2f}, {rate['sender_cpu_s_per_gib']:.2f}"
        )
    if report["codecs"]:
        yield ""
        yield "codec   of its bytes      KV goodput   (made-up numbers: real keys and values differ a little)"
        for rate in report["codecs"]:
            yield f"{rate['codec']:<7} {rate['wire_fraction']:>12.1%} {_mbit(rate):>15}"
    yield ""
    yield "guarding one GiB costs one core, each side: " + ", ".join(
        f"{name} {seconds:.2f} s" for name, seconds in report["costs_s_per_gib"].items()
    )
    yield ""
    yield from _routing_lines(report["routing"])


def _routing_lines(routing: dict[str, Any]) -> Iterator[str]:
    if "unknown" in routing:
        yield f"no threshold: {routing['unknown']}"
        return
    peer = routing["peer_tokens_per_s"]
    yield (
        f"KV: {routing['kv_bytes_per_token']:,} bytes a token and {routing['tail_bytes']:,} at the end; "
        + (
            "the peer has not prefilled yet"
            if peer is None
            else f"the peer prefills {peer:,.0f} tokens/s"
        )
    )
    yield " prompt   transfer     remote   as fast as a local prefill of"
    for prompt in routing["prompts"]:
        yield (
            f"{prompt['tokens']:>7} {prompt['transfer_s']:>8.2f} s {prompt['remote_s']:>8.2f} s"
            f"   {prompt['break_even_tokens_per_s']:,.0f} tokens/s"
        )
    local = routing["local_tokens_per_s"]
    if local is None:
        yield "--local-tokens-per-s N, what the pd node prefills, turns this into a threshold"
    elif routing["threshold_tokens"] is None:
        yield f"at {local:,.0f} tokens/s here no prompt is sooner over this link"
    else:
        yield (
            f"at {local:,.0f} tokens/s here: --threshold-tokens {routing['threshold_tokens']}"
            " (one request alone; `prfaas plan` knows load)"
        )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"


def _mbit(rate: dict[str, Any]) -> str:
    return f"{rate['goodput_bytes_per_s'] * 8 / 1e6:,.1f} Mbit/s"
