"""The inference engine: token ids in, token events out."""
