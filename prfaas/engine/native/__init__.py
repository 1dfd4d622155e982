"""Kernels that the engine compiles for the machine it runs on."""
