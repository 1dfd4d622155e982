"""The hybrid prefix cache: opaque pages, keys, hits."""
