"""The version: of the package, of every file it writes and, read by hatchling, of the distribution."""

__version__ = "0.1.0"
