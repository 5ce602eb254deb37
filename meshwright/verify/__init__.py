"""Every layout against one device: the same weights and samples, a few steps, every tensor compared."""
