"""The options --ranks, --exact, --logical and --max-restarts: checked, and what they decide."""

from dataclasses import dataclass
from typing import Any

from halfstep.cli.rank_process import has_launcher
from halfstep.utils.rank_environment import (
    rank_count_of_environment,
    started_by_torchrun,
)

USUAL_LOGICAL = 12  # micro-batches of a batch: 1, 2, 3, 4, 6 and 12 ranks share them evenly


@dataclass(frozen=True)
class RankOptions:
    """How many processes train, and how they add up."""

    ranks: int | None
    exact: str | None = None
    logical: int | None = None
    max_restarts: int = 0

    @property
    def count(self) -> int:
        """The number of ranks: as typed, or as torchrun has started."""
        return rank_count_of_environment() if self.ranks is None else self.ranks

    @property
    def must_launch(self) -> bool:
        """Whether this process starts the ranks, instead of being one."""
        return not started_by_torchrun() and (self.count > 1 or self.max_restarts > 0)

    def settings(self) -> dict[str, Any]:
        """The settings of a run that these options are."""
        logical = None
        if self.exact is not None:
            logical = self.logical or USUAL_LOGICAL
        return {"ranks": self.count, "exact": self.exact, "logical": logical}

    def check(self, device: str) -> None:
        """Refuses what no run can have, before anything is read or started."""
        if self.ranks is not None and self.ranks < 1:
            raise ValueError(f"--ranks: expected 1 or more, got {self.ranks}")
        if self.exact not in (None, "bits"):
            raise ValueError(
                f"--exact: expected bits, got {self.exact!r}; leave it out for ordinary sums"
            )
        if self.logical is not None and self.exact is None:
            raise ValueError("--logical: expected it beside --exact bits, got it alone")
        if self.logical is not None and self.logical < 1:
            raise ValueError(
                f"--logical: expected 1 or more micro-batches per batch, got {self.logical}"
            )
        if self.max_restarts < 0:
            raise ValueError(f"--max-restarts: expected 0 or more, got {self.max_restarts}")
        self._check_torchrun()
        self._check_logical()
        if self.must_launch and self.count > 1:
            self._check_device(device)

    def _check_torchrun(self) -> None:
        if not started_by_torchrun():
            return
        started = rank_count_of_environment()
        if self.count != started:
            raise ValueError(
                f"--ranks: got {self.count}, and torchrun has started {started}; leave --ranks "
                "out, torchrun says how many there are"
            )
        if self.max_restarts and not has_launcher():
            raise ValueError(
                "--max-restarts: expected it as an option of torchrun, which has started this "
                f"command: torchrun --max-restarts {self.max_restarts} …"
            )

    def _check_logical(self) -> None:
        logical = self.settings()["logical"]
        if logical is not None and self.count > logical:
            raise ValueError(
                f"--ranks: expected at most {logical}, the number of logical micro-batches, got "
                f"{self.count}; start fewer, or give a larger --logical to all runs that are to "
                "be equal"
            )

    def _check_device(self, device: str) -> None:
        """One GPU for each rank, all of them on this machine."""
        import torch

        from halfstep.experiment.settings import resolve_device

        if device.startswith("cuda:"):
            raise ValueError(
                f"--device: expected auto, cpu or cuda beside --ranks {self.count}, got {device}: "
                "each rank takes a GPU of its own"
            )
        if resolve_device(device).type == "cuda":
            check_gpu_count(self.count, torch.cuda.device_count())

    def launch(self, device: str) -> int:
        """Runs this command in so many processes. Returns the exit code of rank 0."""
        from halfstep.cli.launch_ranks import launch_ranks, usable_cores
        from halfstep.experiment.settings import resolve_device

        threads = max(1, usable_cores() // self.count)
        if self.exact is not None and resolve_device(device).type == "cpu":
            threads = 1  # each number of threads has bits of its own
        return launch_ranks(self.count, max_restarts=self.max_restarts, threads=threads)


def check_gpu_count(ranks: int, gpus: int) -> None:
    """Refuses more ranks than GPUs: two on one would take turns, and NCCL refuses them."""
    if ranks > gpus:
        raise ValueError(
            f"--ranks: expected at most {gpus}, one for each GPU that torch sees here, got "
            f"{ranks}; start fewer, or add --device cpu"
        )
