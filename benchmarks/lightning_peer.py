"""Lightning's loop for `peers.py`. Its classes can be defined only where Lightning is installed."""

import logging
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytorch_lightning as pl
import torch.nn.functional as F
from measure import wait_for_device
from peers import TrainingJob
from torch import Tensor

PRECISIONS = {"fp32": "32-true", "tf32": "32-true", "fp16": "16-true", "mixed": "16-mixed"}


class BatchLoader:
    """A pass of batches on the device: any iterable with a length will do as a loader."""

    def __init__(self, job: TrainingJob) -> None:
        self.job = job

    def __len__(self) -> int:
        return self.job.steps

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.job.batches()


class Classifier(pl.LightningModule):  # type: ignore[misc]
    def __init__(self, job: TrainingJob) -> None:
        super().__init__()
        self.job = job
        self.net = job.build_net()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> Any:
        return self.job.build_optimizer(self.net.parameters())

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return batch  # it is there


class EpochTimer(pl.Callback):  # type: ignore[misc]
    """Wall seconds of every epoch, the device waited for on both sides."""

    def __init__(self, job: TrainingJob) -> None:
        self.device = job.device
        self.start = 0.0
        self.times_s: list[float] = []

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        wait_for_device(self.device)
        self.start = time.perf_counter()

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        wait_for_device(self.device)
        self.times_s.append(time.perf_counter() - self.start)


def build_trainer(job: TrainingJob, **options: Any) -> Any:
    """A Trainer with everything optional turned off."""
    return pl.Trainer(
        accelerator="gpu" if job.device.type == "cuda" else "cpu",
        devices=1,
        precision=PRECISIONS[job.precision],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=0,
        num_sanity_val_steps=0,
        benchmark=job.channels_last or None,
        **options,
    )


def time_epochs(job: TrainingJob, rounds: int) -> list[float]:
    """Seconds of each of `rounds` passes, after a warm-up fit."""
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="pytorch_lightning")
    module = Classifier(job)
    loader = BatchLoader(job)
    timer = EpochTimer(job)
    warmup_steps = min(job.warmup_steps, job.steps)
    build_trainer(job, max_epochs=1, limit_train_batches=warmup_steps).fit(module, loader)
    build_trainer(job, max_epochs=rounds, callbacks=[timer]).fit(module, loader)
    return list(timer.times_s)
