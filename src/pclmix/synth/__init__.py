"""Synthetic data: the phantom, and scribbles drawn from masks."""
