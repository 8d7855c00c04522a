"""The metrics of a regression, against numpy in float64."""

import numpy as np
import pytest
import torch

import halfstep as hs


def test_both_are_those_of_all_samples_whatever_the_batches() -> None:
    g = torch.Generator().manual_seed(0)
    outputs = torch.randn(1000, 1, generator=g)
    targets = outputs + 0.3 * torch.randn(1000, 1, generator=g) + 5
    mae = hs.metrics.MeanAbsoluteError(scale=2.5)
    r2 = hs.metrics.R2Score()
    for start, stop in ((0, 1), (1, 400), (400, 1000)):
        mae.update(outputs[start:stop], targets[start:stop])
        r2.update(outputs[start:stop], targets[start:stop])
    y = targets.double().numpy()
    error = y - outputs.double().numpy()
    # float64 sums in another order
    assert float(mae.compute()) == pytest.approx(2.5 * np.abs(error).mean(), rel=1e-12)
    expected = 1 - (error**2).sum() / ((y - y.mean()) ** 2).sum()
    assert float(r2.compute()) == pytest.approx(expected, rel=1e-10)


def test_state_merge_and_reset() -> None:
    x, y = torch.tensor([[1.0], [2.0]]), torch.tensor([[1.5], [3.0]])
    whole, first, second = (hs.metrics.R2Score() for _ in range(3))
    whole.update(x, y)
    first.update(x[:1], y[:1])
    second.load_state_dict(first.state_dict())
    second.reset()
    assert torch.isnan(second.compute())
    second.update(x[1:], y[1:])
    first.merge(second)
    assert torch.equal(first.compute(), whole.compute())
    with pytest.raises(ValueError, match="expected 4 sums"):
        first.load_state_dict({"sums": torch.zeros(3)})


@pytest.mark.parametrize("metric", [hs.metrics.MeanAbsoluteError(), hs.metrics.R2Score()])
def test_shapes_that_would_broadcast_are_refused(metric: hs.metrics.R2Score) -> None:
    with pytest.raises(ValueError, match="expected outputs and targets of one shape"):
        metric.update(torch.zeros(4, 1), torch.zeros(4))
