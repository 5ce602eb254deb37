"""Whole training runs against recorded losses, a plain PyTorch loop, and each other."""
