"""Profiles as TOML: what an instance takes to prefill, keep and decode.

[prefill] is a curve through `tokens` and `seconds` ("cubic", "linear"), or `coefficients` of a
"polynomial". [kv] is the config.json of a `model`, a table of `tokens` and `bytes`, or [[kv.groups]] of
layers. [decode], which a prefill cluster does not need, has the step seconds of some `batch` sizes and
`max_batch`; [cost] has what one GPU costs in any unit; [link] is the way from a PrfaaS cluster to this
instance. But for [kv], each says where it is from.
"""

from pathlib import Path
from typing import cast, get_args

from prfaas.cache.spec import CacheLayout
from prfaas.config.kv_layout import layout_kv_curve, read_layout
from prfaas.config.model_file import KV_DTYPES, as_kv_dtype, kv_curve, read_model
from prfaas.config.tables import Table, read_toml
from prfaas.engine.mixer_spec import KvDtype
from prfaas.engine.model_spec import ModelSpec
from prfaas.scheduler.curves import CubicCurve, Curve, LinearCurve, PolynomialCurve
from prfaas.scheduler.profile import Cost, DecodeProfile, Link, Profile, Provenance

MAX_TOKENS = 100_000_000
MAX_SECONDS = 1e6
MAX_BYTES = 1e15
MAX_BATCH = 65_536
MAX_GPUS_PER_INSTANCE = 4096
MAX_COST = 1e9
MAX_BYTES_PER_S = 1e15
MAX_RTT_S = 60
CURVES = ("cubic", "linear", "polynomial")
PROVENANCES: tuple[str, ...] = get_args(Provenance)


def read_profile(path: Path) -> Profile:
    """Return the profile in a TOML file.

    Raises:
        ConfigError: an unknown or missing key, or a value that makes no sense; names both.
    """
    top = read_toml(path)
    prefill = top.table("prefill")
    profile = Profile(
        name=top.text("name"),
        hardware=top.text("hardware"),
        gpus_per_instance=top.integer(
            "gpus_per_instance", minimum=1, maximum=MAX_GPUS_PER_INSTANCE
        ),
        cost=_cost(top.table("cost")) if "cost" in top else None,
        prefill_s=_prefill(prefill),
        prefill_provenance=_provenance(prefill),
        kv_bytes=_kv(top.table("kv")),
        decode=_decode(top.table("decode")) if "decode" in top else None,
        link=_link(top.table("link")) if "link" in top else None,
    )
    top.finish()
    return profile


def read_kv_model(path: Path) -> tuple[ModelSpec, KvDtype] | None:
    """Return the model that a profile's [kv] names, and the dtype of its KV; None if it has a table.

    Raises:
        ConfigError: as read_profile.
    """
    table = read_toml(path).table("kv")
    return _kv_model(table) if "model" in table else None


def read_kv_layout(path: Path, block_tokens: int) -> CacheLayout | None:
    """Return the layout that a profile's [[kv.groups]] describe; None if it has none.

    Raises:
        ConfigError: as read_profile.
    """
    table = read_toml(path).table("kv")
    return read_layout(table, block_tokens) if "groups" in table else None


def _provenance(table: Table) -> Provenance:
    """Where a table's numbers are from; `source` is for readers, and has to be there."""
    table.text("source")
    return cast("Provenance", table.choice("provenance", PROVENANCES))


def _cost(table: Table) -> Cost:
    cost = Cost(
        per_gpu=table.number("per_gpu", above=0, maximum=MAX_COST),
        provenance=_provenance(table),
    )
    table.finish()
    return cost


def _prefill(table: Table) -> Curve:
    kind = table.choice("curve", CURVES)
    try:
        if kind == "polynomial":
            curve: Curve = PolynomialCurve(
                coefficients=table.numbers("coefficients", minimum=0, maximum=MAX_SECONDS)
            )
        else:
            points = {
                "tokens": table.numbers("tokens", above=0, maximum=MAX_TOKENS),
                "values": table.numbers("seconds", above=0, maximum=MAX_SECONDS),
            }
            curve = CubicCurve(**points) if kind == "cubic" else LinearCurve(**points)
    except ValueError as error:
        raise table.error("curve", error) from None
    _provenance(table)
    table.finish()
    return curve


def _kv(table: Table) -> LinearCurve:
    if "model" in table:
        curve = kv_curve(*_kv_model(table))
    elif "groups" in table:
        try:
            curve = layout_kv_curve(read_layout(table, block_tokens=1))
        except ValueError as error:  # windows of one token keep nothing
            raise table.error("groups", error) from None
    else:
        try:
            curve = LinearCurve(
                tokens=table.numbers("tokens", above=0, maximum=MAX_TOKENS),
                values=table.numbers("bytes", above=0, maximum=MAX_BYTES),
            )
        except ValueError as error:
            raise table.error("bytes", error) from None
    table.finish()
    return curve


def _kv_model(table: Table) -> tuple[ModelSpec, KvDtype]:
    kv_dtype = as_kv_dtype(table.choice("kv_dtype", KV_DTYPES, "bfloat16"))
    return read_model(table.file("model")), kv_dtype


def _decode(table: Table) -> DecodeProfile:
    max_batch = table.integer("max_batch", minimum=1, maximum=MAX_BATCH)
    try:
        step_s = LinearCurve(
            tokens=table.numbers("batch", minimum=1, maximum=MAX_BATCH),
            values=table.numbers("step_s", above=0, maximum=MAX_SECONDS),
        )
    except ValueError as error:
        raise table.error("step_s", error) from None
    decode = DecodeProfile(step_s=step_s, max_batch=max_batch, provenance=_provenance(table))
    table.finish()
    return decode


def _link(table: Table) -> Link:
    _provenance(table)
    link = Link(
        bytes_per_s=table.number("bytes_per_s", above=0, maximum=MAX_BYTES_PER_S),
        rtt_s=table.number("rtt_s", minimum=0, maximum=MAX_RTT_S),
    )
    table.finish()
    return link
