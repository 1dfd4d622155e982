"""Prefill-as-a-Service: long prompts are prefilled remotely, their KVCache arrives over TCP."""

__version__ = "0.1.0"
