"""The metrics of links, made at each scrape from their last samples."""

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily

from prfaas.server.node import NodeLoad


def link_families(load: NodeLoad) -> Iterator[GaugeMetricFamily]:
    """Yield the families, with a sample for each node at the other end of open KV streams."""

    def family(name: str, text: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"prfaas_link_{name}", text, labels=["peer"])

    streams = family("streams", "KV connections open.")
    rtt = family("rtt_seconds", "Round trip, smoothed by the kernel.")
    queueing = family("queueing_seconds", "Round trip beyond the shortest seen.")
    goodput = family("goodput_bytes_per_second", "Bytes that arrived, idle times included.")
    used = family("utilisation_ratio", "Of the egress limit, or of the best goodput lately.")
    loss = family("retransmitted_ratio", "Of the bytes sent, the part sent again.")
    unsent = family("unsent_bytes", "Waiting in this side's send buffers.")
    for peer, view in load.links.items():
        streams.add_metric([peer], view.num_streams)
        rtt.add_metric([peer], view.rtt_s or 0.0)
        queueing.add_metric([peer], view.queueing_s)
        goodput.add_metric([peer], view.goodput_bytes_per_s)
        used.add_metric([peer], view.utilisation_fraction)
        loss.add_metric([peer], view.loss_fraction)
        unsent.add_metric([peer], view.unsent_bytes)
    yield from (streams, rtt, queueing, goodput, used, loss, unsent)
