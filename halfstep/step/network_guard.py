"""What a user changes in a network after a step was built around it, noticed at every step.

Where the meaning is clear the change is followed: another activation, a frozen adapter, weights
that are tied or parametrized. It is refused where the optimizer would go on with tensors that the
network does not use.
"""

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import Notice
from halfstep.precision import Applied
from halfstep.precision.layout import NetworkLayout
from halfstep.utils.keywords import user_stacklevel
from halfstep.utils.text import dtype_name, list_some

MAX_NAMES = 4  # parameters that a message names

_BUILD_AGAIN = "build the optimizer from net.parameters() again, and the step (or Model) around it"


class NetworkGuard:
    """The parameters of a network and its loss as they were when the step was built."""

    def __init__(self, net: nn.Module, loss: Any, trained: list[Tensor]) -> None:
        self._net = net
        self._loss = loss
        self._trained = trained
        self._names = {id(p): name for name, p in self._named_parameters()}
        # Parameters that belonged to the network at the last check. They are stored, so that no
        # other tensor gets the id of one of them.
        self._known = {id(p): p for _, p in self._named_parameters()}
        self._kinds = [_kind(p) for p in trained]
        self._checked_layout: NetworkLayout | None = None
        self._loss_layout = self._layout_of_loss()

    def is_current(self, applied: Applied, *, every_forward: bool) -> bool:
        """Whether network and loss are still what they were at the last check that passed."""
        if applied.layout is not self._checked_layout:
            return False
        if not applied.is_current(every_forward=every_forward):
            return False
        loss_layout = self._loss_layout
        return loss_layout is None or loss_layout.is_current(every_forward=every_forward)

    def check(self, *, after_forward: bool = False) -> None:
        """Refuses what the optimizer cannot follow. Names parameters that nobody trains.

        `after_forward`: the network was what it should be before this step's forward.
        """
        self._check_used(after_forward)
        self._check_kinds()
        self._check_added(after_forward)
        self._known = {id(p): p for _, p in self._named_parameters()}
        self._loss_layout = self._layout_of_loss()

    def current_names(self, names: list[str]) -> list[str]:
        """The trained parameters' names in the network as it is; of one outside, as before."""
        self._names = {id(p): name for name, p in self._named_parameters()}
        return [self._names.get(id(p), name) for p, name in zip(self._trained, names, strict=True)]

    def passed(self, applied: Applied) -> None:
        """Remembers the network as it is: the next check looks for changes since now."""
        self._checked_layout = applied.layout

    def _check_used(self, after_forward: bool) -> None:
        """Every trained parameter that was in the network or the loss must still be there."""
        present = {id(p) for _, p in self._named_parameters()}
        replaced = [
            self._names[id(p)]
            for p in self._trained
            if id(p) in self._names and id(p) not in present
        ]
        if not replaced:
            return
        when = "during forward" if after_forward else "since the step was built"
        raise ValueError(
            f"the network was changed {when}: it no longer uses {list_some(replaced, MAX_NAMES)}, "
            "which the optimizer still trains. After replacing a parameter or a module, or after "
            f"load_state_dict(assign=True), {_BUILD_AGAIN}. To give a parameter new values and "
            "train on, write into it: load_state_dict without assign=True, "
            "or param.copy_(…) under torch.no_grad()"
        )

    def _check_kinds(self) -> None:
        """Each trained parameter must have its dtype, device and shape."""
        for p, kind in zip(self._trained, self._kinds, strict=True):
            if _kind(p) != kind:
                name = self._names.get(id(p), "of the optimizer")
                raise ValueError(
                    f"parameter {name} was {_describe(kind)} when the step was built and is now "
                    f"{_describe(_kind(p))}; after net.to(…), net.half() or another change of its "
                    f"kind, {_BUILD_AGAIN}"
                )

    def _check_added(self, after_forward: bool) -> None:
        """Parameters that came later are in no optimizer that this step runs."""
        trained = {id(p) for p in self._trained}
        added = [
            name
            for name, p in self._named_parameters()
            if p.requires_grad and id(p) not in self._known and id(p) not in trained
        ]
        if not added:
            return
        names = list_some(added, MAX_NAMES)
        if after_forward:
            raise ValueError(
                f"forward has added parameters to the network: {names}. The optimizer was built "
                "before and does not hold them, so they would never be trained. Make all layers in "
                "__init__, or run one forward first; then "
                f"{_BUILD_AGAIN}"
            )
        warnings.warn(
            f"the network has new parameters that the step's optimizer does not train: {names}; "
            f"{_BUILD_AGAIN}, or say so with requires_grad_(False)",
            Notice,
            stacklevel=user_stacklevel(),
        )

    def _named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._net.named_parameters()
        if isinstance(self._loss, nn.Module):
            yield from self._loss.named_parameters(prefix="loss")

    def _layout_of_loss(self) -> NetworkLayout | None:
        return NetworkLayout(self._loss) if isinstance(self._loss, nn.Module) else None


def _kind(p: Tensor) -> tuple[torch.dtype, torch.device, torch.Size]:
    return p.dtype, p.device, p.shape


def _describe(kind: tuple[torch.dtype, torch.device, torch.Size]) -> str:
    dtype, device, shape = kind
    return f"{dtype_name(dtype)} {list(shape)} on {device}"
