"""From a checkpoint directory to a Model: stored tensors by name, packed one by one."""
