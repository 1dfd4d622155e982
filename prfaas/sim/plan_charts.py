"""The two curves of PrfaaS figure 5: Lambda_max over the threshold, and over N_p : N_d."""

from prfaas.scheduler.planner import Plan, SweepPoint, sweep_split, sweep_threshold
from prfaas.scheduler.throughput import Stage, ThroughputModel
from prfaas.sim.chart import Chart, Series

HEADROOM = 1.6
"""Times Lambda_max: the terms that rise above it are cut there."""
LAMBDA_NAME = "Lambda_max"


def figure_5(model: ThroughputModel, plan: Plan) -> tuple[Chart, Chart]:
    """Return Lambda_max and its terms around the best plan, along t and along N_p : N_d.

    Raises:
        ValueError: a deployment that routes nothing by length.
    """
    if plan.threshold_tokens is None:
        raise ValueError(f"a {plan.kind} deployment has no threshold to draw Lambda_max over")
    return _over_threshold(model, plan), _over_split(model, plan)


def _over_threshold(model: ThroughputModel, plan: Plan) -> Chart:
    points = sweep_threshold(model, plan.shape)
    shape, threshold = plan.shape, plan.threshold_tokens
    assert threshold is not None

    def line(name: str, stage: Stage) -> Series:
        values = ((p.threshold_tokens, p.limits.get(stage, float("inf"))) for p in points)
        return Series(name=name, points=tuple(values))

    return Chart(
        title=f"threshold, N_p : N_d = {shape.num_prefill} : {shape.num_decode}",
        x_label="threshold t (uncached tokens)",
        y_label="requests/s",
        series=(
            line("Theta_prfaas / p", "prfaas"),
            line("Theta_pd_p / (1 - p)", "prefill"),
            line("Theta_pd_d", "decode"),
            _lambda([(p.threshold_tokens, p) for p in points]),
        ),
        marked_x=threshold,
        mark_label=f"t = {threshold:,.0f}",
        y_max=HEADROOM * max(plan.rates.lambda_max_rps, plan.rates.theta_decode_rps),
    )


def _over_split(model: ThroughputModel, plan: Plan) -> Chart:
    points = [(float(p.shape.num_prefill), p) for p in sweep_split(model, plan)]
    return Chart(
        title=f"N_p : N_d, t = {plan.threshold_tokens:,.0f}",
        x_label=f"N_p of {plan.shape.num_prefill + plan.shape.num_decode} local instances",
        y_label="requests/s",
        series=(
            Series(
                name="Theta_prfaas + Theta_pd_p",
                points=tuple((x, p.producer_rps) for x, p in points),
            ),
            Series(
                name="Theta_pd_d", points=tuple((x, p.rates.theta_decode_rps) for x, p in points)
            ),
            Series(
                name="Theta_pd_p / (1 - p)",
                points=tuple((x, p.limits.get("prefill", float("inf"))) for x, p in points),
            ),
            _lambda(points),
        ),
        marked_x=float(plan.shape.num_prefill),
        mark_label=f"N_p : N_d = {plan.shape.num_prefill} : {plan.shape.num_decode}",
        y_max=HEADROOM * max(plan.rates.lambda_max_rps, plan.rates.theta_decode_rps),
    )


def _lambda(points: list[tuple[float, SweepPoint]]) -> Series:
    return Series(name=LAMBDA_NAME, points=tuple((x, p.rates.lambda_max_rps) for x, p in points))
