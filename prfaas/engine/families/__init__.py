"""One reader for each family of checkpoints: config.json to a ModelSpec; torch-free."""
