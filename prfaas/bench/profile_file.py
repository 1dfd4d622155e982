"""What `prfaas profile` says: a profile as TOML, one JSON object, or lines for a person."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from prfaas.bench.machine import Machine
from prfaas.bench.profiling import EngineFigures, Timing, not_falling
from prfaas.cache.spec import CacheLayout
from prfaas.config.kv_layout import layout_kv_bytes, layout_lines
from prfaas.scheduler.profile import Link

QUIET_FRACTION = 0.95
"""Where the engine had a processor for less of the time, the figures say so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredProfile:
    """Everything that was measured, and of what."""

    name: str
    """Of the model."""
    machine: Machine
    weight_dtype: str
    kv_dtype: str
    chunk_tokens: int
    layout: CacheLayout
    figures: EngineFigures
    link: Link | None
    peer: str | None
    """That the link leads to."""
    streams: int
    """Connections over which the link was measured."""
    date: str
    """ISO, of today."""
    cpu_fraction: float | None
    """Of the time, that the engine's thread had a processor: less if others wanted it, too. None where
    an accelerator computes."""


def to_toml(profile: MeasuredProfile) -> str:
    """Return the profile as `prfaas plan`, `simulate` and `serve` read it."""
    return "\n".join(_toml_lines(profile)) + "\n"


def _toml_lines(profile: MeasuredProfile) -> Iterator[str]:
    machine, figures = profile.machine, profile.figures
    yield f"# Measured by `prfaas profile` on {profile.date}, not published by anybody: {_shown(profile.name)} on"
    yield f"# {_shown(machine.hardware)} of {machine.cores} cores, {machine.system}, torch {machine.torch_version};"
    yield (
        f"# {profile.weight_dtype} weights, {profile.kv_dtype} KV, chunks of {profile.chunk_tokens} tokens,"
        f" blocks of {profile.layout.block_tokens}."
    )
    if profile.cpu_fraction is not None and profile.cpu_fraction < QUIET_FRACTION:
        yield f"# {_busy(profile.cpu_fraction)}"
    yield f"name = {_text(profile.name)}"
    yield f"hardware = {_text(machine.hardware)}"
    yield "gpus_per_instance = 1"
    yield ""
    yield "[prefill]"
    yield 'curve = "cubic"'
    yield f"tokens = {[timing.size for timing in figures.prefill]}"
    yield f"seconds = {_numbers(curve_of(figures.prefill))}"
    yield from _origin(profile, f"medians of {_runs(figures.prefill)} runs")
    yield ""
    yield "[kv]"
    yield from layout_lines(profile.layout)
    if figures.decode:
        yield ""
        yield "[decode]"
        yield f"max_batch = {figures.decode[-1].size}"
        yield f"batch = {[timing.size for timing in figures.decode]}"
        yield f"step_s = {_numbers(curve_of(figures.decode))}"
        how = f"medians of {_runs(figures.decode)} steps behind {figures.decode_context_tokens} tokens each"
        yield from _origin(profile, how)
    if profile.link is not None:
        yield ""
        yield f"[link] # from {_shown(str(profile.peer))}"
        yield f"bytes_per_s = {profile.link.bytes_per_s:.6g}"
        yield f"rtt_s = {profile.link.rtt_s:.6g}"
        yield from _origin(profile, f"raw pages over {profile.streams} connections")


def _origin(profile: MeasuredProfile, how: str) -> Iterator[str]:
    yield 'provenance = "measured"'
    yield f"source = {_text(f'prfaas profile, {profile.date}: {how}')}"


def _busy(cpu_fraction: float) -> str:
    return (
        f"The engine had a processor for {cpu_fraction:.0%} of the time: others used the machine, too, "
        "and alone it is faster."
    )


def curve_of(timings: tuple[Timing, ...]) -> list[float]:
    """Return the medians; where noise made a larger one faster, both get their mean."""
    return not_falling([timing.median_s for timing in timings])


def _runs(timings: tuple[Timing, ...]) -> str:
    counts = sorted(len(timing.seconds) for timing in timings)
    return f"{counts[0]} to {counts[-1]}" if counts[0] < counts[-1] else str(counts[0])


def _numbers(values: list[float]) -> str:
    return f"[{', '.join(f'{value:.6g}' for value in values)}]"


def _text(value: str) -> str:
    return '"' + _shown(value).replace("\\", "\\\\").replace('"', '\\"') + '"'


def _shown(value: str) -> str:
    """Return the text without what a line of TOML could not hold."""
    return "".join(char if char.isprintable() else "?" for char in value)


def to_json(profile: MeasuredProfile) -> dict[str, Any]:
    """Return everything that was measured, each run, in base units."""
    machine, figures, link = profile.machine, profile.figures, profile.link
    return {
        "model": profile.name,
        "hardware": machine.hardware,
        "cores": machine.cores,
        "torch": machine.torch_version,
        "weight_dtype": profile.weight_dtype,
        "kv_dtype": profile.kv_dtype,
        "chunk_tokens": profile.chunk_tokens,
        "block_tokens": profile.layout.block_tokens,
        "date": profile.date,
        "cpu_fraction": profile.cpu_fraction,
        "prefill": [
            {
                "tokens": timing.size,
                "seconds": value,
                "runs_s": list(timing.seconds),
                "kv_bytes": layout_kv_bytes(profile.layout, timing.size),
                "transfer_bytes": num_bytes,
            }
            for timing, value, num_bytes in zip(
                figures.prefill, curve_of(figures.prefill), figures.kv_bytes, strict=True
            )
        ],
        "decode": [
            {"batch": timing.size, "step_s": value, "runs_s": list(timing.seconds)}
            for timing, value in zip(figures.decode, curve_of(figures.decode), strict=True)
        ],
        "decode_context_tokens": figures.decode_context_tokens,
        "link": None
        if link is None
        else {
            "peer": profile.peer,
            "bytes_per_s": link.bytes_per_s,
            "rtt_s": link.rtt_s,
            "streams": profile.streams,
        },
    }


def to_lines(report: dict[str, Any]) -> Iterator[str]:
    """Yield what `to_json` returned as lines for a person."""
    yield (
        f"{report['model']} on {report['hardware']}, {report['weight_dtype']} weights,"
        f" {report['kv_dtype']} KV"
    )
    yield ""
    yield " tokens   T_prefill   fastest to slowest of runs   tokens/s    S_kv MiB   in pages"
    for row in report["prefill"]:
        runs = row["runs_s"]
        spread = f"{min(runs):.3f} to {max(runs):.3f} s of {len(runs)}"
        yield (
            f"{row['tokens']:>7} {row['seconds']:>9.3f} s   {spread:>26} {row['tokens'] / row['seconds']:>10,.0f}"
            f" {row['kv_bytes'] / 2**20:>11,.1f} {row['transfer_bytes'] / 2**20:>10,.1f}"
        )
    if report["decode"]:
        yield ""
        yield f"  batch    T_decode   fastest to slowest of steps  tokens/s    (behind {report['decode_context_tokens']} tokens each)"
    for row in report["decode"]:
        runs = row["runs_s"]
        spread = f"{1e3 * min(runs):.1f} to {1e3 * max(runs):.1f} ms of {len(runs)}"
        yield (
            f"{row['batch']:>7} {1e3 * row['step_s']:>8.1f} ms   {spread:>26} {row['batch'] / row['step_s']:>10,.1f}"
        )
    link = report["link"]
    if link is not None:
        yield ""
        yield (
            f"link from {link['peer']}: {link['bytes_per_s'] * 8 / 1e6:,.1f} Mbit/s over {link['streams']}"
            f" connections, round trip {1e3 * link['rtt_s']:.3g} ms"
        )
    cpu_fraction = report["cpu_fraction"]
    if cpu_fraction is not None and cpu_fraction < QUIET_FRACTION:
        yield ""
        yield _busy(cpu_fraction)
