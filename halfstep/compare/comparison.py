"""The comparison itself: check everything, then run by run, the summary rewritten after each."""

import platform
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from halfstep.compare import summary
from halfstep.compare.comparison__trial import trial
from halfstep.compare.progress import Progress, Silent
from halfstep.errors import Notice
from halfstep.experiment import build as recipe
from halfstep.experiment import output_folder as folder
from halfstep.experiment.datasets import Material, material
from halfstep.experiment.machine import Crowd
from halfstep.experiment.settings import Settings


def compare(
    settings: Settings, out: str | Path, *, progress: Progress | None = None, fresh: bool = False, retry: bool = False,
    command: str = "halfstep.compare.compare",
) -> dict[str, Any]:  # fmt: skip
    """Train every precision with every seed and say which to use: the content of OUT/compare.json.

    Called again with the same settings and folder it goes on: finished runs stay, the interrupted one continues from
    its checkpoint, bit for bit. More seeds or precisions may be added. `retry` repeats the failed ones, `fresh` all.
    """
    show = progress or Silent()
    with _noted(show):
        recipe.seeded(
            0
        )  # a data function that draws gives the same data to every seed, and when it goes on
        given = material(settings)
        recipe.check(settings, given)
        recipe.note(settings, given)
    out = Path(out)
    spec, around = _spec(settings, given), environment(settings.place)
    with folder.held(out):
        if fresh:
            folder.clear(out)
        folder.check(out, spec, around)
        head = _head(settings, spec, around, command)
        return _all(settings, given, out, head, show, retry)


def _all(
    settings: Settings,
    given: Material,
    out: Path,
    head: dict[str, Any],
    show: Progress,
    retry: bool,
) -> dict[str, Any]:
    results = _finished(settings, out, retry)
    told = _write(out, head, results)
    show.begin(settings, given, len(results))
    crowd = Crowd(settings.place, head["command"], show.note)
    try:
        for name, seed in settings.pairs:
            if any((r["precision"], r["seed"]) == (name, seed) for r in results):
                continue
            place = folder.run_folder(out, name, seed)
            with _noted(show):
                results.append(
                    trial(settings, given, name, seed, place, [*show.callbacks(name, seed), crowd])
                )
            told = _write(out, head, results)
            show.done(results[-1])
    finally:
        show.end()
    return told


def _finished(settings: Settings, out: Path, retry: bool) -> list[dict[str, Any]]:
    found = [
        folder.read_json(folder.run_folder(out, *pair) / "result.json") for pair in settings.pairs
    ]
    return [r for r in found if r is not None and not (retry and r["status"] == "failed")]


def _write(out: Path, head: dict[str, Any], results: list[dict[str, Any]]) -> dict[str, Any]:
    spec = head["spec"]
    order = {
        pair: i for i, pair in enumerate((p, s) for p in spec["precisions"] for s in spec["seeds"])
    }
    runs = sorted(results, key=lambda r: order[r["precision"], r["seed"]])
    table = summary.rows(spec, runs)
    told = {
        **head,
        "runs": runs,
        "rows": table,
        "recommendation": summary.recommend(spec, table, runs),
    }
    folder.write_json(out / folder.SUMMARY, told)
    return told


def _head(
    settings: Settings, spec: dict[str, Any], around: dict[str, Any], command: str
) -> dict[str, Any]:
    return {
        "halfstep_compare": folder.VERSION,
        "title": f"{settings.net} on {settings.data}",
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "environment": around,
        "spec": spec,
    }


def _spec(settings: Settings, given: Material) -> dict[str, Any]:
    schedule = None if settings.schedule == "constant" else settings.schedule
    counts = {"samples": given.train.size, "test_samples": given.test.size}
    return {**settings.asked(), "schedule": schedule, **counts}


def environment(device: torch.device) -> dict[str, Any]:
    """Where the numbers come from."""
    import halfstep

    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else _processor(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda if cuda else None,
        "threads": torch.get_num_threads(),
        "halfstep": halfstep.__version__,
        "platform": platform.platform(),
    }


def _processor() -> str:
    """The CPU by its own name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return (
        f"CPU, {named[0]}"
        if named and named[0]
        else f"CPU, {platform.processor() or platform.machine()}"
    )


@contextmanager
def _noted(show: Progress) -> Iterator[None]:
    """Notices go to the progress display, each text once; other warnings stay what they are."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", Notice)
        before = warnings.showwarning

        def tell(message: Any, category: Any, *rest: Any, **more: Any) -> None:
            show.note(str(message)) if issubclass(category, Notice) else before(
                message, category, *rest, **more
            )

        warnings.showwarning = tell
        yield
