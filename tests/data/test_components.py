import numpy as np

from pclmix.labels import largest_component


def test_only_the_largest_part_of_each_class_stays():
    labels = np.zeros((3, 8, 8), np.int16)
    labels[:, 1:4, 1:4] = 1
    labels[2, 6:8, 6:8] = 1
    labels[0, 5:7, 0:2] = 2
    labels[2, 0, 7] = 2
    before = labels.copy()
    kept = largest_component(labels, (1, 2, 3))
    assert (labels == before).all()
    assert kept.dtype == labels.dtype
    assert (kept[:, 1:4, 1:4] == 1).all()
    assert (kept == 1).sum() == 27
    assert (kept == 2).sum() == 4
    assert kept[2, 0, 7] == kept[2, 6, 6] == 0


def test_voxels_that_touch_by_a_corner_are_one_part():
    labels = np.zeros((2, 4, 4), np.uint8)
    labels[0, 1, 1] = labels[1, 2, 2] = 1
    assert (largest_component(labels, (1,)) == labels).all()
