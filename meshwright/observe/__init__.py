"""What a run tells: the time split, operations and MFU, metrics lines, progress, reports, traces, the noise scale.

Import from the modules; this package loads nothing by itself, so that `meshwright report` does without torch.
"""
