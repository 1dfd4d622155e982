"""The settings of nodes together: how KVCache travels, and who prefills what."""

from prfaas.config.options import Role
from prfaas.config.setting import API, NODES, Setting, setting

PD: tuple[Role, ...] = ("pd",)

FLEET_SETTINGS: tuple[Setting, ...] = (
    setting(
        "transport.peer",
        "host:port of the prefill node for long prompts; several, separated by commas.",
        roles=PD,
    ),
    setting(
        "transport.connect_timeout_s",
        "How long to wait for a connection to a peer, a node or the scheduler.",
        above=0,
        maximum=3600,
    ),
    setting(
        "transport.stall_timeout_s",
        "No verified byte from the peer for this long: the rest is prefilled here.",
        above=0,
        maximum=3600,
        roles=PD,
    ),
    setting(
        "transport.lease_s",
        "A transfer without progress is dropped after this.",
        above=0,
        maximum=86_400,
        roles=NODES,
    ),
    setting(
        "transport.max_transfers",
        "Transfers served at once; more are refused.",
        minimum=1,
        maximum=1 << 16,
        roles=NODES,
    ),
    setting(
        "transport.accept_numerics",
        "approximate: take KV from a peer with other numerics; answers say exact: false.",
        roles=API,
    ),
    setting("transport.allow_plaintext", "The KV channel may leave loopback unencrypted."),
    setting(
        "transport.kv_codec",
        "How the peer may encode pages. Up to auto lossless; the others make answers exact: false.",
        roles=PD,
    ),
    setting(
        "transport.streams",
        "Connections kept open to the peer, over which each transfer comes.",
        minimum=1,
        maximum=64,
        roles=PD,
    ),
    setting(
        "transport.kv_channel",
        "stream: raw connections to the peer, HTTP where a proxy lets none through. http: always HTTP.",
        roles=PD,
    ),
    setting(
        "transport.transfer_snapshot_tokens",
        "auto, 0 or N: a transfer that breaks leaves a prefix at a multiple of N tokens.",
        roles=PD,
    ),
    setting(
        "transport.tcp_congestion",
        "Congestion control of the KV channel's connections, as the kernel names it. Default: its own.",
        roles=NODES,
    ),
    setting(
        "transport.egress_limit_bytes_per_s",
        "KV is sent no faster, over all transfers together: 800Mbit. Default: no limit.",
        minimum=1000,
        typed_name="egress_limit",
        roles=NODES,
    ),
    setting(
        "transport.cluster_key_file",
        "A file of mode 600 whose secret both sides of the KV channel must prove to have.",
    ),
    setting(
        "transport.tls_cert",
        "PEM certificate (chain) that this node shows; in a fleet, its port then speaks TLS alone.",
    ),
    setting("transport.tls_key", "PEM key of --tls-cert."),
    setting(
        "transport.tls_ca",
        "PEM of who signs the other side's certificates: reach it by TLS; prefill: demand one of every peer.",
    ),
    setting(
        "scheduler.policy",
        "Where a prompt is prefilled. Default: static with a number for --threshold-tokens, else predictive.",
        roles=API,
    ),
    setting(
        "scheduler.threshold_tokens",
        "Prompts with more uncached tokens than this are prefilled by a peer. auto (default): as observed.",
        minimum=0,
        maximum=1 << 40,
        takes_auto=True,
        roles=API,
    ),
    setting(
        "scheduler.egress_target",
        "With --policy threshold or predictive: share of a link that KVCache may fill on average.",
        above=0,
        maximum=1,
        roles=API,
    ),
    setting(
        "scheduler.rebalance_period_s",
        "How often threshold, roles and shares of prefill and decode are solved anew.",
        above=0,
        maximum=86_400,
        roles=API,
    ),
    setting(
        "scheduler.rebalance_dwell_s",
        "Least time between two changes of a role or a share.",
        minimum=0,
        maximum=86_400,
        roles=API,
    ),
    setting(
        "scheduler.rebalance_prompts",
        "The last so many prompts are what they are solved for.",
        minimum=20,
        maximum=10_000,
        roles=API,
    ),
    setting(
        "scheduler.placement_timeout_s",
        "How long a request waits while no node can take it, but one may be back: silent, loading, converting.",
        minimum=0,
        maximum=3600,
        roles=("scheduler",),
    ),
    setting(
        "fleet.scheduler",
        "host:port of the scheduler of the fleet that this node joins. Default: none.",
        roles=NODES,
    ),
    setting(
        "fleet.cluster",
        "With --scheduler: the cluster that this node is in; its nodes share a fast network.",
        roles=NODES,
    ),
    setting(
        "fleet.advertise",
        "With --scheduler: host:port at which others reach this node. Default: --host and --port.",
        roles=NODES,
    ),
    setting(
        "fleet.mode",
        "With --scheduler: what this node does until it is told otherwise.",
        roles=PD,
    ),
)
