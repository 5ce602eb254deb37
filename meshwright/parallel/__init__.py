"""From a single-device model to one that trains on every device of the mesh. One strategy a file."""
