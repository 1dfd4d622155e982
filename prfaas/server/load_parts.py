"""Loads the parts of a node for the engine that it is to have."""

from typing import assert_never

from prfaas.config.options import NodeConfig
from prfaas.server.node import Progress
from prfaas.server.parts import NodeParts


def load_parts(config: NodeConfig, progress: Progress) -> NodeParts:
    """Load what `config` names. Blocking; raises ConfigError, and whatever `progress` raises."""
    match config.engine.kind:
        case "torch":
            from prfaas.server.model_parts import load_model_parts  # imports torch

            return load_model_parts(config, progress)
        case "replay":
            from prfaas.server.replay_parts import load_replay_parts

            return load_replay_parts(config, progress)
        case _:
            assert_never(config.engine.kind)
