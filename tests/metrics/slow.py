"""Surface distances by definition, independent of the package: every voxel, every pair."""

import itertools

import numpy as np


def surface(mask):
    """Voxels of the mask with a face neighbour outside it or the image; an axis of length one has no neighbours."""
    axes = [axis for axis in range(mask.ndim) if mask.shape[axis] > 1]
    found = []
    for index in itertools.product(*(range(n) for n in mask.shape)):
        if mask[index] and (not axes or any(_is_open(mask, index, axis) for axis in axes)):
            found.append(index)
    return np.array(found, dtype=float).reshape(-1, mask.ndim)


def _is_open(mask, index, axis):
    for step in (-1, 1):
        other = list(index)
        other[axis] += step
        if not 0 <= other[axis] < mask.shape[axis] or not mask[tuple(other)]:
            return True
    return False


def directed(first, second, spacing):
    a, b = surface(first) * spacing, surface(second) * spacing
    return np.array([np.sqrt(((b - point) ** 2).sum(axis=1)).min() for point in a])


def hd95(first, second, spacing):
    return np.percentile(np.concatenate([directed(first, second, spacing), directed(second, first, spacing)]), 95)


def assd(first, second, spacing):
    return (directed(first, second, spacing).mean() + directed(second, first, spacing).mean()) / 2
