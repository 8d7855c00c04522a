"""Class weights, against the formula and scikit-learn's."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import halfstep as hs
from halfstep.data.class_weights import describe_imbalance


@pytest.mark.parametrize("counts", [[5, 5], [1, 99], [3, 7, 90], [1]])
def test_the_weights_are_samples_over_classes_times_count(counts: list[int]) -> None:
    labels = np.repeat(np.arange(len(counts)), counts)
    expected = torch.tensor([sum(counts) / (len(counts) * count) for count in counts])
    assert torch.equal(hs.data.class_weights(labels), expected)
    assert torch.equal(hs.data.class_weights(labels.tolist()), expected)
    assert torch.equal(hs.data.class_weights(torch.from_numpy(labels)), expected)
    assert torch.equal(hs.data.class_weights(SimpleNamespace(targets=labels)), expected)


def test_scikit_learn_has_the_same_weights() -> None:
    compute = pytest.importorskip("sklearn.utils.class_weight").compute_class_weight
    labels = np.random.default_rng(0).integers(0, 7, 1000)
    expected = compute("balanced", classes=np.arange(7), y=labels)
    assert torch.equal(hs.data.class_weights(labels), torch.from_numpy(expected).float())


def test_a_class_without_samples_weighs_nothing() -> None:
    weights = hs.data.class_weights([0, 0, 2], classes=4)
    assert torch.equal(weights, torch.tensor([0.75, 0, 1.5, 0]))


@pytest.mark.parametrize("labels", [[], [0.5], [-1, 0], [[0, 1]], ["cat"]])
def test_what_are_no_labels_is_refused(labels: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="class_weights: expected"):
        hs.data.class_weights(labels)


def test_imbalance_is_told_from_three_times_on() -> None:
    assert describe_imbalance(["a", "b"], [29, 10]) is None
    assert describe_imbalance(["a", "b", "c"], [30, 10, 0]) == (
        "30 samples of 'a' and 10 of 'b', 3 times as many"
    )
