"""`halfstep eval`: the scores of a run, a checkpoint or a file of weights."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from halfstep.cli.options import (
    BuildOption,
    DataPathOption,
    JsonOption,
    RunArgument,
    RunDeviceOption,
    RunNetOption,
    RunPrecisionOption,
    TestSamplesOption,
    TrustOption,
    option_flag,
)
from halfstep.cli.output import echo, format_scores, print_json
from halfstep.experiment import training_run
from halfstep.storage.url import is_store_url
from halfstep.utils.text import list_some, printable

if TYPE_CHECKING:
    from halfstep.experiment.builders import RunParts

# Settings that a comparison and `halfstep train` share, in the order of the advised command.
MAX_NAMED = 10  # classes in a message
SETTINGS_OF_COMPARISON = (
    "net",
    "data",
    "path",
    "size",
    "test_share",
    "split_seed",
    "class_weights",
    "target",
    "task",
    "drop",
    "epochs",
    "batch",
    "optimizer",
    "lr",
)


def evaluate(
    run: RunArgument,
    split: Annotated[
        Literal["test", "train"], typer.Option(help="which part of the data")
    ] = "test",
    net: RunNetOption = None,
    data: Annotated[str | None, typer.Option(help="other data than the run's")] = None,
    path: DataPathOption = None,
    precision: RunPrecisionOption = None,
    batch: Annotated[int | None, typer.Option(help="samples in a batch")] = None,
    test_samples: TestSamplesOption = None,
    build: BuildOption = None,
    device: RunDeviceOption = None,
    trust: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Evaluate a run, a checkpoint or a file of weights.

    Loss and metrics over the test data, each sample counted once; of a run, the newest checkpoint.
    A run of `halfstep train` knows its network and data; others need --build, or --net for a
    network by name. With --ema the averaged weights are evaluated, as during training.

    \b
    halfstep eval runs/first
    halfstep eval runs/first --precision O2+bf16  the weights in another precision
    halfstep eval runs/first/step-000000172 --split train --json
    halfstep eval mlp.safetensors --net mlp --data fashion-mnist
    halfstep eval runs/own --build train:build
    """
    options = {
        "net": net,
        "data": data,
        "path": path,
        "precision": precision,
        "batch": batch,
        "device": device,
        "test_samples": test_samples,
    }
    settings = settings_of_run("eval", run, build, options, trust=trust)
    facts = training_run.read_data_facts(run) if build is None else {}
    # Other data than the run's is evaluated as a whole, where nobody has split it.
    is_own = settings.test_share is not None or data is None
    built = training_run.build_run(settings, split=is_own, facts=facts)
    _check_same_classes(built, facts)
    weights_path = training_run.load_weights(built.model, run)

    dataset = built.data if split == "train" else _validation_data(built, settings)
    scores = built.model.evaluate(dataset)
    if as_json:
        print_json({"weights": weights_path, "split": split, "scores": scores})
    else:
        part = f"{split} data"
        if not is_own and _is_whole(built, settings):
            part = "the data given"
        echo(f"{printable(weights_path)}, {part}: {format_scores(scores)}")


def settings_of_run(
    command: str, run: Path, build: str | None, options: dict[str, Any], *, trust: bool
) -> training_run.TrainSettings:
    """The settings of a run, with the options of the command in their place where they are given.

    For weights that no run.json describes, the options alone. `command` begins every error.
    `trust`: use what a run.json from elsewhere names.
    """
    replaced = [name for name, value in options.items() if value is not None]
    if "data" in replaced and "path" not in replaced:
        replaced.append("path")  # the run's path says where the run's data lies, not other data

    settings: training_run.TrainSettings | None
    if build:
        settings = training_run.TrainSettings(build=build)
    else:
        settings = training_run.read_own_run_file(
            run,
            trust=trust,
            command=command,
            replaced=replaced,
        )

    # A builder has made its model and data: no option can change them.
    if settings is not None and settings.build is not None:
        flags = sorted(option_flag(name) for name, value in options.items() if value is not None)
        if flags:
            raise ValueError(
                f"{command}: {', '.join(flags)} beside a builder, which made its model and data. "
                "Say it there."
            )

    if settings is None:
        _refuse_comparison(command, run)
        if not run.exists():
            raise FileNotFoundError(
                f"{command}: expected a run, a checkpoint or a file of weights, "
                f"found nothing at {run}"
            )
        if options.get("net") is None:
            raise ValueError(
                f"{command}: {run} does not say how it was built, for halfstep train did not write "
                "it. Name its network and data (--net mlp --data sample), or its builder "
                "(--build package.module:function)."
            )
        settings = training_run.TrainSettings()
    # Nothing is trained: how the ranks of the run added up does not matter, nor their one thread.
    settings = replace(settings, exact=None, logical=None)
    if "path" in replaced:
        settings = replace(settings, path=None)
    settings = _without_data_settings(settings, options.get("data"))
    return training_run.with_overrides(settings, **options)


def _without_data_settings(
    settings: training_run.TrainSettings, data: str | None
) -> training_run.TrainSettings:
    """Without what the settings say about the run's own data only, where `data` is other data."""
    if data is None or data == settings.data:
        return settings
    settings = replace(settings, test_share=None, split_seed=None, skip_damaged=None)
    if not data.startswith("csv:"):
        settings = replace(settings, target=None, task=None, drop=None)
    if not (is_store_url(data) or Path(data).expanduser().is_dir()):
        settings = replace(settings, size=None)
    return settings


def _check_same_classes(built: "RunParts", facts: dict[str, Any]) -> None:
    """Refuses data with other classes than the run's: its labels would be others."""
    before = facts.get("classes")
    now = built.facts.get("classes")
    if before is not None and now is not None and before != now:
        raise ValueError(
            f"eval: expected the run's classes, {printable(list_some(before, MAX_NAMED))}; "
            f"the data has {printable(list_some(now, MAX_NAMED))}"
        )


def _refuse_comparison(command: str, run: Path) -> None:
    """Raises an error if `run` is a comparison, or a run inside one: these keep no weights.

    The error names the command that trains the recommended precision with the same settings.
    """
    from halfstep.experiment.output_folder import SUMMARY_FILE
    from halfstep.utils.files import read_json

    folder = run
    if not (folder / SUMMARY_FILE).is_file():
        folder = run.parent.parent
    if not (folder / SUMMARY_FILE).is_file():
        return
    summary = read_json(folder / SUMMARY_FILE)
    if not isinstance(summary, dict) or not isinstance(summary.get("spec"), dict):
        return

    spec = summary["spec"]
    settings = {name: spec.get(name) for name in SETTINGS_OF_COMPARISON}
    settings["schedule"] = spec.get("schedule") or "constant"
    recommendation = summary.get("recommendation")
    if isinstance(recommendation, dict) and recommendation.get("precision"):
        settings["precision"] = recommendation["precision"]
    elif spec.get("precisions"):
        settings["precision"] = spec["precisions"][0]

    words = ["halfstep", "train"]
    for name, value in settings.items():
        if value is not None:
            words += [option_flag(name), str(value)]
    if spec.get("skip_damaged"):
        words.append("--skip-damaged")
    raise ValueError(
        f"{command}: {folder} is a comparison, which keeps results and no weights "
        f"(halfstep report {folder}). Train the precision you chose first: "
        f"{shlex.join(words)} --out runs/chosen"
    )


def _is_whole(built: "RunParts", settings: training_run.TrainSettings) -> bool:
    """Whether all of the data was evaluated: a table, or photos that nobody has split."""
    return settings.data.startswith("csv:") or "test_files" in built.facts


def _validation_data(built: "RunParts", settings: training_run.TrainSettings) -> Any:
    dataset = built.fit_arguments.get("valid")
    if dataset is None:
        raise ValueError(
            f"eval: the builder {settings.build} returns no validation data. Return (model, data, "
            "valid) from it, or evaluate its training data: --split train"
        )
    return dataset
