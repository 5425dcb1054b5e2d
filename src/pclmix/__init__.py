"""pclmix: medical image segmentation from scribbles."""

__version__ = "0.1.0"
