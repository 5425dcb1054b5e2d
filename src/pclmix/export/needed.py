"""What exporting needs beside the package itself."""

from __future__ import annotations

import importlib

from pclmix.errors import PclmixError


def require_libraries(*names: str) -> None:
    """Refuse, before any work, to export where a library of the extra `export` is missing."""
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise PclmixError(f"export needs {error.name or name}: pip install 'pclmix[export]'") from error
