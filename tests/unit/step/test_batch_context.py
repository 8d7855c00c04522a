"""The batch that an error carries: it explains the error, and must not get in anybody's way."""

import copy
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.step.batch_context import batch_context


class FailingLoss(nn.Module):
    def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
        raise ValueError("boom")


def error_of_a_step() -> ValueError:
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = hs.TrainStep(net, FailingLoss(), optimizer)
    with pytest.raises(ValueError, match="boom") as caught:
        step(torch.randn(3, 4), torch.zeros(3, dtype=torch.int64))
    return caught.value


def test_the_error_carries_the_batch_and_the_arguments_of_the_loss() -> None:
    context = batch_context(error_of_a_step())
    assert [tuple(x.shape) for x in context.batch] == [(3, 4), (3,)]
    assert [tuple(x.shape) for x in context.loss_arguments] == [(3, 2), (3,)]
    assert isinstance(context.loss, FailingLoss)


def test_the_graph_of_the_step_is_not_kept_alive() -> None:
    outputs, _ = batch_context(error_of_a_step()).loss_arguments
    assert outputs.grad_fn is None


def dump_for_another_process(error: BaseException) -> BaseException:
    restored: BaseException = pickle.loads(ForkingPickler.dumps(error))
    return restored


@pytest.mark.parametrize(
    "copy_error", [copy.deepcopy, dump_for_another_process], ids=["deepcopy", "another process"]
)
def test_a_copy_of_the_error_is_the_users_error_without_the_batch(copy_error: Any) -> None:
    copied = copy_error(error_of_a_step())
    assert isinstance(copied, ValueError)
    assert copied.args == ("boom",)
    assert batch_context(copied).batch == ()
