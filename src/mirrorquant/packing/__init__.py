"""Weights of a few levels at their true size: storage, and kernels that run it."""
