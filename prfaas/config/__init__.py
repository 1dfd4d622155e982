"""Options of all rooms, composed: flag > environment > TOML > default."""
