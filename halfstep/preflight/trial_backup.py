"""Everything that training a model for a while changes, copied before, and put back bit for bit."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from halfstep.data import Loader
from halfstep.engine import Feed
from halfstep.model import Model
from halfstep.model.model import choose_captures
from halfstep.model.resume_backup import ResumeBackup
from halfstep.utils.python_state import PythonState

# Attributes of a DataLoader that may hold a sampler, whose epoch a pass sets.
SAMPLER_ATTRIBUTES = ("sampler", "batch_sampler", "dataset")


@contextmanager
def undone_trial(model: Model) -> Iterator[ResumeBackup]:
    """Inside, the model may be trained; afterwards it is as it was, whatever was raised.

    Parameters, buffers, optimizer, loss scale, counters, averages, modes, random states, graphs.
    `add_data` does the same for data.
    """
    step = model.step
    backup = ResumeBackup()
    backup.add_model(model)
    backup.add(_undo_gradients(step.params))
    backup.add(PythonState(model.net, step.objective.loss, step.objective.forward).restore)
    for part in (
        step.objective,
        step.host_reads,
        step.device_watch,
        step.buffers,
        step._optimizer_guard,
        step._network_guard,
        step.compiled,
    ):
        backup.add(_undo_attributes(part))

    # Graphs of its own: those of the model know nothing of this trial.
    captures = model.captures
    mode = captures.mode
    model.captures = choose_captures(model._built_in_eval, mode, verify=0)
    try:
        yield backup
    finally:
        model.captures = captures
        backup.put_back()


def add_data(backup: ResumeBackup, feed: Feed) -> None:
    """Also the position and the generators of the data, and the workers of a DataLoader."""
    backup.add(feed.undo_function())
    batches: Any = feed.data.batches if isinstance(feed.data, Loader) else None
    if hasattr(batches, "state_dict") and hasattr(batches, "load_state_dict"):
        state = batches.state_dict()
        backup.add(lambda: batches.load_state_dict(state))
    for name in SAMPLER_ATTRIBUTES:
        part = getattr(batches, name, None)
        for sampler in (part, getattr(part, "sampler", None)):
            if callable(getattr(sampler, "set_epoch", None)):
                backup.add(_undo_attributes(sampler))
    if isinstance(batches, DataLoader):
        # Persistent workers that run already have random states of their own: others take over.
        workers = batches._iterator
        batches._iterator = None

        def put_back_workers() -> None:
            batches._iterator = workers

        backup.add(put_back_workers)


def _undo_attributes(owner: Any) -> Callable[[], None]:
    """A function that gives an object the attributes that it has now; dicts by their content."""
    attributes = dict(vars(owner))
    contents = {name: dict(value) for name, value in attributes.items() if isinstance(value, dict)}

    def undo() -> None:
        vars(owner).clear()
        vars(owner).update(attributes)
        for name, content in contents.items():
            attributes[name].clear()
            attributes[name].update(content)

    return undo


def _undo_gradients(params: list[Tensor]) -> Callable[[], None]:
    copies = [(p, p.grad, None if p.grad is None else p.grad.clone()) for p in params]

    def undo() -> None:
        for p, grad, values in copies:
            if grad is not None and values is not None:
                grad.copy_(values)
            p.grad = grad

    return undo
