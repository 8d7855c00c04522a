"""How the ranks of a job begin alike: one network, one state, one sequence of random numbers.

Every rank runs the whole program, so each has built its own network and optimizer. Rank 0's values
are given to all. What cannot be given is compared, and refused by name.
"""

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from halfstep.distributed import Ranks
from halfstep.step.fingerprint import combine, fingerprint
from halfstep.step.objective import Batch
from halfstep.utils import rng

if TYPE_CHECKING:
    from halfstep.step.train_step import TrainStep


def start_alike(step: "TrainStep", ranks: Ranks) -> None:
    """Gives all ranks rank 0's weights, buffers and random states; compares the rest."""
    if ranks.count == 1:
        return
    _check_same_network(step, ranks)
    ranks.broadcast_([*step.params, *_other_tensors(step)], "the weights of rank 0")
    rng.set_host_states(ranks.broadcast_object(rng.host_states(), "the random states of rank 0"))
    check_equal_states(step, ranks)


def check_equal_states(step: "TrainStep", ranks: Ranks) -> None:
    """Refuses ranks that do not hold the same state, bit for bit, and names the first difference.

    The optimizer's state is compared by the positions of parameters: it may have been loaded.
    """
    if ranks.count == 1:
        return
    own = _digest(step)
    digests = ranks.gather_objects(own, "the comparison of the ranks' states")
    for rank, digest in enumerate(digests):
        for name, value in digests[0].items():
            if digest.get(name) != value:
                raise ValueError(
                    f"rank {rank} has another {name} than rank 0: expected all ranks to begin, or "
                    "to go on, in the same state. Load the same file on each of them, before the "
                    "step is built"
                )


def check_same_batch(batch: Batch, ranks: Ranks, step_number: int) -> None:
    """Refuses ranks that were given other batches: each would train on rows of its own batch.

    It reads the whole batch, and waits for the device: LaneAccumulate calls it in steps 1, 2, 4,
    8, … and in the first step of a pass.
    """
    if ranks.count == 1:
        return
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    digest = [(tuple(t.shape), int(fingerprint(t))) for t in tensors]
    digests = ranks.gather_objects(digest, "the comparison of the ranks' batches")
    for rank, other in enumerate(digests):
        if other != digests[0]:
            raise ValueError(
                f"step {step_number}: rank {rank} was given another batch than rank 0. Every rank "
                "is given the whole batch, and computes its part of it. Use no DistributedSampler "
                "and no sharding of your own, and shuffle by a seed that is the same on all "
                "ranks: hs.seed_everything(0) before the data is built, or "
                "hs.data.Dataset(…, seed=0).shuffle()"
            )


def check_same_sizes(sizes: dict[str, int | None], ranks: Ranks) -> None:
    """Refuses data that has more batches on some ranks: the others would wait at its end.

    None is a size that nobody knows.
    """
    all_sizes = ranks.gather_objects(sizes, "the sizes of the data")
    for rank, other in enumerate(all_sizes):
        if other != all_sizes[0]:
            raise ValueError(
                f"rank {rank} has data of {other} batches, rank 0 of {all_sizes[0]}: expected the "
                "same batches on all ranks. Give each of them all of the data, without sharding"
            )


def check_same_weights(params: Sequence[Tensor], ranks: Ranks, step_number: int) -> None:
    """Refuses ranks whose weights have come apart: something was changed on some of them only."""
    if ranks.count == 1:
        return
    with torch.no_grad():
        weights = int(combine([fingerprint(p).to(params[0].device) for p in params]))
    all_weights = ranks.gather_objects(weights, "the comparison of the ranks' weights")
    for rank, other in enumerate(all_weights):
        if other != all_weights[0]:
            raise ValueError(
                f"step {step_number}: rank {rank} has other weights than rank 0. All ranks make "
                "the same updates, so something was changed on some ranks only: weights, a "
                "learning rate, what is frozen. Do that on all of them, and leave for rank 0 "
                "alone what prints and writes"
            )


def refuse_wrapped(net: object) -> None:
    """Refuses a network that sums its gradients over ranks by itself."""
    for module in net.modules() if isinstance(net, nn.Module) else ():
        if isinstance(module, DistributedDataParallel):
            raise TypeError(
                "net: expected the plain network, received one in DistributedDataParallel, which "
                "would sum gradients a second time; give ddp.module, and strategy='ddp'"
            )


def _check_same_network(step: "TrainStep", ranks: Ranks) -> None:
    """Refuses ranks whose networks have other parameters or buffers than rank 0's."""
    layout = [
        (name, tuple(tensor.shape), str(tensor.dtype))
        for name, tensor in (
            *zip(step.names, step.params, strict=True),
            *step.net.named_buffers(),
        )
    ]
    everything = ranks.gather_objects((layout, _settings(step)), "the networks of the ranks")
    first_layout, first_settings = everything[0]
    for rank, (other_layout, other_settings) in enumerate(everything):
        for name in {**first_settings, **other_settings}:
            if other_settings.get(name) != first_settings.get(name):
                raise ValueError(
                    f"rank {rank} has {name} = {other_settings.get(name)}, rank 0 has "
                    f"{first_settings.get(name)}: expected one program with the same settings on "
                    "all ranks"
                )
        if other_layout == first_layout:
            continue
        differing = set(other_layout) ^ set(first_layout)
        if not differing:
            raise ValueError(
                f"rank {rank} has the parameters of rank 0 in another order: expected the same "
                "order on all ranks. A Python set has no order of its own: build layers from a "
                "list, or from sorted(…)"
            )
        name, shape, dtype = min(differing)
        raise ValueError(
            f"rank {rank} has another network than rank 0, for instance in {name} ({dtype} of "
            f"shape {list(shape)}): expected one program that builds the same network on all ranks"
        )


def _settings(step: "TrainStep") -> dict[str, str]:
    """What decides the updates beside weights and data, by name, as text."""
    settings = {"precision": step.precision.name, "optimizer": type(step.optimizer).__name__}
    for option in fields(step.options):
        value = getattr(step.options, option.name)
        if value is None or isinstance(value, bool | int | float | str):
            settings[option.name] = repr(value)
    for i, group in enumerate(step.optimizer.param_groups):
        for name, value in group.items():
            if name == "params":
                settings[f"parameters of group {i}"] = str(len(value))
            elif value is None or isinstance(value, bool | int | float | str | tuple):
                settings[f"{name} of group {i}"] = repr(value)
    return settings


def _other_tensors(step: "TrainStep") -> list[Tensor]:
    """Frozen parameters, buffers, averages: what a step holds beside trained parameters."""
    trained = {id(p) for p in step.params}
    tensors: list[Tensor] = [p for p in step.net.parameters() if id(p) not in trained]
    tensors += step.buffers.tensors()
    tensors += step.state.ema
    return tensors


def _digest(step: "TrainStep") -> dict[str, int]:
    """A fingerprint of each part of the state, as numbers of the host."""
    named: dict[str, Tensor] = {}
    for name, p in zip(step.names, step.params, strict=True):
        named[f"value of {name}"] = p
        for key, value in step.optimizer.state.get(p, {}).items():
            if isinstance(value, Tensor):
                named[f"optimizer state {key} of {name}"] = value
    for i, buffer in enumerate(step.buffers.tensors()):
        named[f"buffer number {i}"] = buffer
    named["loss scale"] = step.state.scale
    named["number of updates"] = step.state.updates
    with torch.no_grad():
        return {name: int(fingerprint(value)) for name, value in named.items()}
