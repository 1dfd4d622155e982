"""What `prfaas plan feasibility` says: who makes how much KVCache, and which link carries it."""

from typing import Any

from prfaas.config.feasibility_file import (
    Cluster,
    FeasibilityFile,
    Hardware,
    ModelPoints,
    PublishedPoint,
)
from prfaas.engine.mixer_spec import KvDtype
from prfaas.engine.model_spec import layers_kv_bytes
from prfaas.scheduler.throughput import cluster_egress, kv_throughput
from prfaas.sim.roofline import active_parameters, roofline_s

Report = dict[str, Any]
KV_DTYPE: KvDtype = "bfloat16"


def report(file: FeasibilityFile) -> Report:
    """Return S_kv, T_prefill and Phi_kv of each model and length, clusters' egress, and links."""
    models = {model.name: _model(model, file.hardware) for model in file.models}
    return {
        "hardware": {"name": file.hardware.name, "gpus": file.hardware.gpus},
        "kv_dtype": KV_DTYPE,
        "cluster_gpus": file.cluster_gpus,
        "models": models,
        "clusters": [_cluster(file, models[cluster.model], cluster) for cluster in file.clusters],
        "links": [_link(file, models, name, bytes_per_s) for name, bytes_per_s in file.links],
    }


def _model(model: ModelPoints, hardware: Hardware) -> Report:
    return {
        "active_parameters": active_parameters(model.spec),
        "prefill_source": model.table[0].prefill_source,
        "points": [_point(model, point, hardware) for point in model.table],
        "further_points": [_point(model, point, hardware) for point in model.further],
    }


def _point(model: ModelPoints, point: PublishedPoint, hardware: Hardware) -> Report:
    """One length: Phi_kv from S_kv and T_prefill (eq. 1), and beside it the published one.

    Where T_prefill is implied, the two are the same figure, and there is no error to speak of.
    """
    kv_bytes = layers_kv_bytes(model.spec.layers, point.tokens, KV_DTYPE)
    prefill_s = point.prefill_s
    if prefill_s is None:
        prefill_s = kv_bytes / point.phi_bytes_per_s
    least_s = roofline_s(model.spec, point.tokens, hardware)
    phi = kv_throughput(kv_bytes, prefill_s)
    return {
        "tokens": point.tokens,
        "kv_bytes": kv_bytes,
        "prefill_s": prefill_s,
        "prefill_source": point.prefill_source,
        "source": point.source,
        "phi_bytes_per_s": phi,
        "published_bytes_per_s": point.phi_bytes_per_s,
        "error_vs_paper": None if point.prefill_s is None else phi / point.phi_bytes_per_s - 1,
        "roofline_prefill_s": least_s,
        "roofline_phi_bytes_per_s": kv_throughput(kv_bytes, least_s),
        "peak_fraction": least_s / prefill_s,
    }


def _cluster(file: FeasibilityFile, model: Report, cluster: Cluster) -> Report:
    """The egress of a cluster (eq. 2); it is as independent as its Phi_kv."""
    point = model["points"][file.tokens.index(cluster.tokens)]
    egress = cluster_egress(cluster.gpus, file.hardware.gpus, point["phi_bytes_per_s"])
    return {
        "model": cluster.model,
        "gpus": cluster.gpus,
        "tokens": cluster.tokens,
        "egress_bytes_per_s": egress,
        "published_bytes_per_s": cluster.published_bytes_per_s,
        "error_vs_paper": egress / cluster.published_bytes_per_s - 1,
    }


def _link(
    file: FeasibilityFile, models: dict[str, Report], name: str, bytes_per_s: float
) -> Report:
    """How many GPUs of each model, in whole instances, a link carries at its busiest length."""
    carried = {}
    for model, facts in models.items():
        phi = max(point["phi_bytes_per_s"] for point in facts["points"])
        carried[model] = int(bytes_per_s / phi) * file.hardware.gpus
    return {
        "name": name,
        "bytes_per_s": bytes_per_s,
        "gpus": carried,
        "fits_one_instance": [model for model, gpus in carried.items() if gpus],
        "fits_cluster": [model for model, gpus in carried.items() if gpus >= file.cluster_gpus],
    }
