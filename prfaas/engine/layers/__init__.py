"""Mixers and feed-forward layers."""
