"""Training methods, one file each (docs/methods.md)."""
