"""What a step had in hand when its network or its loss raised an error, attached to the error.

halfstep/engine/batch_errors.py turns it into a message about the batch.
"""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor

_ATTRIBUTE = "_halfstep_batch_context"


@dataclass
class BatchContext:
    """The batch of the failed step; and where the loss failed, the loss and its arguments."""

    batch: tuple[Any, ...] = ()
    loss: Any = None
    loss_arguments: tuple[Any, ...] = ()
    forward: Any = None  # what calls the network with the batch

    def __reduce__(self) -> tuple[Any, ...]:
        """Empty in a copy or a pickle: an error must pass to another process as it always did."""
        return (BatchContext, ())


def batch_context(error: BaseException) -> BatchContext:
    """What was attached to the error; an empty context where nothing was."""
    context = getattr(error, _ATTRIBUTE, None)
    return context if isinstance(context, BatchContext) else BatchContext()


def attach_batch(error: BaseException, batch: tuple[Any, ...], forward: Any) -> None:
    """Notes the batch that was in hand, unless a deeper place has noted one."""
    context = batch_context(error)
    if not context.batch:
        context.batch = batch
        context.forward = forward
    _attach(error, context)


def attach_loss_arguments(error: BaseException, loss: Any, out: Any) -> None:
    """Notes that the loss raised the error, and what it was called with."""
    context = batch_context(error)
    context.loss = loss
    if isinstance(out, tuple):
        # Detached: an error that somebody keeps must not keep the graph of its step alive.
        context.loss_arguments = tuple(x.detach() if isinstance(x, Tensor) else x for x in out)
    _attach(error, context)


def _attach(error: BaseException, context: BatchContext) -> None:
    with suppress(Exception):  # an error that takes no attributes is raised as it is
        setattr(error, _ATTRIBUTE, context)
