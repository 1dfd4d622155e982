"""Measures what is between two nodes, and what it is worth."""
