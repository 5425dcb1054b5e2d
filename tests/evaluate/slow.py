"""Surface distances the long way, written apart from the package: every voxel, every pair."""

import itertools

import numpy as np


def surface(mask):
    """Voxels of the mask with a face neighbour that is not of it, or with a face on the image's border."""
    found = []
    for index in itertools.product(*(range(n) for n in mask.shape)):
        if not mask[index]:
            continue
        for axis, step in itertools.product(range(mask.ndim), (-1, 1)):
            other = list(index)
            other[axis] += step
            if not 0 <= other[axis] < mask.shape[axis] or not mask[tuple(other)]:
                found.append(index)
                break
    return np.array(found, dtype=float).reshape(-1, mask.ndim)


def directed(first, second, spacing):
    a, b = surface(first) * spacing, surface(second) * spacing
    return np.array([np.sqrt(((b - point) ** 2).sum(axis=1)).min() for point in a])


def hd95(first, second, spacing):
    return np.percentile(np.concatenate([directed(first, second, spacing), directed(second, first, spacing)]), 95)


def assd(first, second, spacing):
    return (directed(first, second, spacing).mean() + directed(second, first, spacing).mean()) / 2
