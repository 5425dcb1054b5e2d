"""Importers of other layouts, one module each, registered in IMPORTERS."""

from pclmix.data.importers import acdc, folder, wsl4mis
from pclmix.data.importers.base import IMPORTERS, Options, import_dataset

__all__ = ["IMPORTERS", "Options", "acdc", "folder", "import_dataset", "wsl4mis"]
