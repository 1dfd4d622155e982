"""The model directory: fetch, convert, resolve."""
