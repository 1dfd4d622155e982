"""The KV channel: frames, handshake, client and server drivers."""
