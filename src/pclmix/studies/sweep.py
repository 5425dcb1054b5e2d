"""A grid of settings as variants of a study."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from pclmix.errors import PclmixError
from pclmix.studies.study import Variant

METHOD = "method"


def sweep_variants(grid: Sequence[str]) -> list[Variant]:
    """Every combination of `key=v1,v2,...`; a key with one value is set for all and is in no name.

    The key `method` takes names of methods, so that a table of methods is one study.

    >>> [v.name for v in sweep_variants(["params.lambda_t=0.1,0.2", "seed=3"])]
    ['lambda_t=0.1', 'lambda_t=0.2']
    """
    axes = []
    for text in grid:
        key, sign, values = text.partition("=")
        choices = [v.strip() for v in values.split(",") if v.strip()]
        if not sign or not key or not choices:
            raise PclmixError(f"'{text}' is not of the form key=v1,v2,..., such as params.lambda_t=0.1,0.2,0.3")
        if len(set(choices)) != len(choices):
            raise PclmixError(f"'{text}' names a value twice")
        axes.append([(key, value) for value in choices])
    varied = {axis[0][0] for axis in axes if len(axis) > 1}
    if not varied:
        raise PclmixError("nothing varies; give at least one key several values, such as params.lambda_t=0.1,0.2,0.3")
    variants = []
    for chosen in product(*axes):
        name = ", ".join(f"{key.rpartition('.')[2]}={value}" for key, value in chosen if key in varied)
        folder = "_".join(f"{key}={value}" for key, value in chosen).replace("/", "-")
        method = next((value for key, value in chosen if key == METHOD), None)
        variants.append(
            Variant(name, folder, tuple(f"{key}={value}" for key, value in chosen if key != METHOD), method)
        )
    return variants
