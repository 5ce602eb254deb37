"""Suites of the host's side: the loader, checkpoints, the way from a command to the first step, overhead over a bare loop."""
