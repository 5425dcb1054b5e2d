"""The version of the package. hatchling reads it here; every file that the package writes records it."""

__version__ = "0.1.0"
