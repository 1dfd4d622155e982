"""The settings of a node by itself: what it serves, computes with and keeps."""

from prfaas.config.setting import API, NODES, Setting, setting

NODE_SETTINGS: tuple[Setting, ...] = (
    setting(
        "role",
        "pd serves the API and decodes; prefill computes KVCache for others; scheduler fronts both.",
    ),
    setting(
        "model.model", "A fetched name, a GGUF file, or a Hugging Face directory or repository."
    ),
    setting(
        "model.served_model_name", "What clients call the model. Default: its name.", roles=API
    ),
    setting("model.chat_template", "A jinja file used instead of the checkpoint's template."),
    setting("http.host", "Address to listen on."),
    setting(
        "http.port",
        "Port to listen on. Default: pd 8000, prefill 8100, scheduler 8200.",
        minimum=1,
        maximum=65_535,
    ),
    setting("http.max_body_bytes", "Largest request body of the API; beyond it 413.", minimum=1024),
    setting(
        "http.drain_timeout_s",
        "After SIGTERM running answers get this long.",
        minimum=0,
        maximum=86_400,
    ),
    setting(
        "http.read_timeout_s",
        "A request's head and body must arrive within this.",
        above=0,
        maximum=86_400,
    ),
    setting(
        "http.cors_allow_origin",
        "Origin that browsers may call from, or *. Default: none.",
        roles=API,
    ),
    setting("http.api_key", "Clients must show this as a bearer token.", is_secret=True, roles=API),
    setting(
        "http.api_key_file",
        "Tenants' keys, one a line, mode 0600. They share no cache; they open /v1 only.",
        roles=API,
    ),
    setting(
        "http.heartbeat_s",
        "A stream that is silent this long gets a comment line. Default: none.",
        above=0,
        maximum=86_400,
        roles=API,
    ),
    setting(
        "engine.kind",
        "torch computes a model; replay keeps a profile's time with real pages and no weights.",
        typed_name="engine",
    ),
    setting(
        "engine.profile",
        "A profile's TOML file: what replay keeps to; a model's TTFT is predicted by it at first.",
    ),
    setting("engine.device", "cpu, cuda or cuda:N. Only a CPU gives exact answers.", roles=NODES),
    setting(
        "engine.dtype",
        "Of packed weights. auto: float16 on a CPU, bfloat16 (of KV, too) on CUDA.",
        roles=NODES,
    ),
    setting(
        "engine.threads",
        "Of the engine. Default: all cores. Two nodes on one machine: cores / nodes.",
        minimum=1,
        maximum=1024,
        roles=NODES,
    ),
    setting(
        "engine.max_batch_sequences",
        "Sequences that run at once.",
        minimum=1,
        maximum=4096,
        roles=NODES,
    ),
    setting(
        "engine.chunk_tokens",
        "Prefill tokens of one step; a multiple of the block.",
        minimum=1,
        maximum=1 << 20,
        roles=NODES,
    ),
    setting(
        "engine.mixed_chunk_tokens",
        "Prefill tokens of a step in which sequences decode, too: fewer shorten their ITL. Default: 128 on a"
        " CPU, a whole chunk elsewhere.",
        minimum=1,
        maximum=1 << 20,
        roles=NODES,
    ),
    setting(
        "engine.kv_ram_bytes", "Working KV of running sequences.", minimum=1 << 20, roles=NODES
    ),
    setting(
        "engine.max_context_tokens",
        "Prompt plus completion. Default: the model's limit.",
        minimum=2,
        roles=NODES,
    ),
    setting(
        "engine.max_waiting_requests",
        "Requests that may wait; beyond it 503.",
        minimum=1,
        maximum=1 << 20,
        roles=NODES,
    ),
    setting(
        "replay.speed",
        "With --engine replay: so many times as fast as the profile.",
        above=0,
        maximum=1e6,
        roles=NODES,
    ),
    setting(
        "replay.bytes_scale",
        "With --engine replay: the part of the profile's KV bytes that is really made and sent.",
        above=0,
        maximum=1,
        roles=NODES,
    ),
    setting(
        "cache.ram_bytes",
        "Prefix cache in RAM.",
        minimum=1 << 20,
        typed_name="cache_ram",
        roles=NODES,
    ),
    setting(
        "cache.dir",
        "Directory that keeps the prefix cache on disk, one node's at a time. Default: none.",
        needs_section=True,
        roles=NODES,
    ),
    setting(
        "cache.disk_bytes",
        "With --cache-dir: what its files may take.",
        minimum=1 << 20,
        typed_name="cache_disk",
        roles=NODES,
    ),
    setting(
        "cache.tenant_disk_bytes",
        "With --cache-dir: what one API key's pages may take. Default: as much as all.",
        minimum=1 << 20,
        typed_name="cache_tenant_disk",
        roles=NODES,
    ),
    setting(
        "cache.ttl_s",
        "With --cache-dir: pages are forgotten at this age. Default: when evicted.",
        above=0,
        maximum=10 * 365 * 86_400,
        typed_name="cache_ttl",
        roles=NODES,
    ),
    setting(
        "cache.zero_freed",
        "With --cache-dir: overwrite its files before they are deleted.",
        typed_name="cache_zero",
        roles=NODES,
    ),
    setting(
        "cache.block_tokens",
        "Tokens of one block; the same on both sides of a transfer.",
        minimum=1,
        maximum=4096,
        roles=NODES,
    ),
    setting(
        "cache.snapshot_tokens",
        "Keep windows and states every so many prompt tokens, a multiple of the block. 0: do not.",
        minimum=0,
        maximum=1 << 24,
        roles=NODES,
    ),
)
