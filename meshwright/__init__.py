"""Meshwright: a model, a corpus and a machine in; a trained, proven and served model out."""

__version__ = "0.1.0"
