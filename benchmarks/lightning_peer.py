"""Lightning's loop for `peers.py`, in a module of its own because its classes exist only where Lightning does."""

import logging
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytorch_lightning as pl
import torch.nn.functional as F
from peers import Work, wait
from torch import Tensor

PRECISIONS = {"fp32": "32-true", "tf32": "32-true", "fp16": "16-true", "mixed": "16-mixed"}


class Batches:
    """A pass of batches that are on the device already: any iterable with a length will do as a loader."""

    def __init__(self, work: Work) -> None:
        self.work = work

    def __len__(self) -> int:
        return self.work.steps

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.work.batches()


class Module(pl.LightningModule):  # type: ignore[misc]
    def __init__(self, work: Work) -> None:
        super().__init__()
        self.work, self.net = work, work.net()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> Any:
        return self.work.sgd(self.net.parameters())

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return batch  # it is there


class Clock(pl.Callback):  # type: ignore[misc]
    def __init__(self, work: Work) -> None:
        self.device, self.start = work.device, 0.0
        self.times: list[float] = []

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        wait(self.device)
        self.start = time.perf_counter()

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        wait(self.device)
        self.times.append(time.perf_counter() - self.start)


def trainer(work: Work, **options: Any) -> Any:
    return pl.Trainer(
        accelerator="gpu" if work.device.type == "cuda" else "cpu", devices=1, precision=PRECISIONS[work.precision],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        log_every_n_steps=0, num_sanity_val_steps=0, benchmark=work.channels_last or None, **options,
    )  # fmt: skip


def fit(work: Work, rounds: int) -> list[float]:
    """Seconds of each of `rounds` passes, after a warm-up fit."""
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="pytorch_lightning")
    module, data, clock = Module(work), Batches(work), Clock(work)
    trainer(work, max_epochs=1, limit_train_batches=min(work.warm, work.steps)).fit(module, data)
    trainer(work, max_epochs=rounds, callbacks=[clock]).fit(module, data)
    return list(clock.times)
