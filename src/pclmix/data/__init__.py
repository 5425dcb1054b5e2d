"""Data in and out: formats, checks, splits, scribble simulation, the phantom, the training store."""
