"""What one step reports, as device tensors: reading one is the caller's host visit, not the step's."""

from typing import NamedTuple, Protocol

from torch import Tensor


class Record(NamedTuple):
    """One step.

    `loss` is this batch's, `cycle_loss` the weighted mean of the open cycle: on an updating step, the full batch's.
    `scale` is the one this step used. `skipped`: its update was dropped for a non-finite gradient. `updated`: the
    weights moved. `lr` has one entry per parameter group when there are several. `grad_norm` is taken after unscaling,
    before clipping, and is 0 on steps that do not end a cycle. `fingerprint` is 0 unless this step recorded one.
    """

    loss: Tensor
    cycle_loss: Tensor
    lr: Tensor
    scale: Tensor
    skipped: Tensor
    grad_norm: Tensor
    updated: Tensor
    fingerprint: Tensor


class RecordTarget(Protocol):
    """A table of records, the next in row `at`. Who writes that of the step under way says that it is `taken`."""

    table: Tensor
    at: Tensor
    taken: bool


class UpdateResult(NamedTuple):
    """What became of an update: the cycle's loss, what the update used, and whether it happened.

    Wide dtypes stand first, so that the fields can be packed into bytes without gaps.
    """

    lr: Tensor
    loss: Tensor
    norm: Tensor
    scale: Tensor
    skipped: Tensor
    updated: Tensor
