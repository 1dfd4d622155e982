"""The async shell: HTTP, roles, the engine thread."""
