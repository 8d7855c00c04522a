"""`halfstep eval`: the scores of a run, a checkpoint or a file of weights."""

import shlex
from typing import Annotated, Any, Literal

import typer

from halfstep.cli import options__words as words
from halfstep.cli import output as text
from halfstep.experiment import training_run as runs

Split = Annotated[Literal["test", "train"], typer.Option(help="which part of the data")]
OwnNet = Annotated[
    str | None,
    typer.Option("--net", help="the network, for weights without a run.json beside them"),
]
OwnName = Annotated[
    str | None, typer.Option("--precision", help="another precision than the run's")
]
OwnDevice = Annotated[str | None, typer.Option("--device", help="auto, cpu, cuda or cuda:1")]


def evaluate(
    run: words.Run, split: Split = "test", net: OwnNet = None,
    data: Annotated[str | None, typer.Option(help="other data than the run's")] = None, path: words.Where = None,
    precision: OwnName = None, batch: Annotated[int | None, typer.Option(help="samples in a batch")] = None,
    test_samples: words.TestSamples = None, build: words.Build = None, device: OwnDevice = None,
    as_json: words.Json = False,
) -> None:  # fmt: skip
    """Evaluate a run, a checkpoint or a file of weights.

    Loss and metrics over the test data, each sample counted once; of a run, the newest checkpoint. A run of `halfstep
    train` knows its network and data; others need --build, or --net for a network by name. With --ema the averaged
    weights are evaluated, as during training.

    \b
    halfstep eval runs/first
    halfstep eval runs/first --precision O2+bf16              the same weights in another precision
    halfstep eval runs/first/step-000000172 --split train --json
    halfstep eval mlp.safetensors --net mlp --data fashion-mnist
    halfstep eval runs/own --build train:build
    """
    given = {
        "net": net,
        "data": data,
        "path": path,
        "precision": precision,
        "batch": batch,
        "device": device,
    }
    asked = asked_for(run, build, "eval", {**given, "test_samples": test_samples})
    made = runs.make(asked)
    origin = runs.load(made.model, run)
    scores = made.model.evaluate(made.data if split == "train" else _test(made, asked))
    if as_json:
        text.dump({"weights": origin, "split": split, "scores": scores})
    else:
        typer.echo(f"{origin}, {split} data: {text.scores(scores)}")


def asked_for(run: Any, build: str | None, what: str, given: dict[str, Any]) -> runs.Asked:
    """What the run was told, with what the command says instead; or that alone, where nothing is known of the run."""
    told = sorted(
        f"--{name.replace('_', '-')}" for name, value in given.items() if value is not None
    )
    asked = runs.Asked(build=build) if build else runs.read(run)
    if asked is not None and asked.build is not None and told:
        raise ValueError(
            f"{what}: {', '.join(told)} beside a builder, which made its model and data. Say it there."
        )
    if asked is None:
        _refuse_comparison(run, what)
    if asked is None and not run.exists():
        raise FileNotFoundError(
            f"{what}: expected a run, a checkpoint or a safetensors file, found nothing at {run}"
        )
    if asked is None and given.get("net") is None:
        raise ValueError(
            f"{what}: {run} does not say how it was built, for halfstep train did not write it. Name its network and "
            "data (--net mlp --data sample), or its builder (--build package.module:function)."
        )
    return runs.changed(asked or runs.Asked(), **given)


def _refuse_comparison(run: Any, what: str) -> None:
    """A comparison's runs leave results and no weights: the run to train is named with its settings."""
    from halfstep.experiment.output_folder import SUMMARY
    from halfstep.utils.files import read_json

    home = next((place for place in (run, run.parent.parent) if (place / SUMMARY).is_file()), None)
    found = read_json(home / SUMMARY) if home is not None else None
    if home is None or not isinstance(found, dict):
        return
    spec, best = found.get("spec", {}), found.get("recommendation", {}).get("precision")
    told = {
        name: spec.get(name)
        for name in ("net", "data", "path", "epochs", "batch", "optimizer", "lr")
    }
    told["schedule"] = spec.get("schedule") or "constant"
    options = [
        word
        for name, value in told.items()
        if value is not None
        for word in (f"--{name}", str(value))
    ]
    again = shlex.join(
        ["halfstep", "train", *options, "--precision", best or spec["precisions"][0]]
    )
    raise ValueError(
        f"{what}: {home} is a comparison, which keeps results and no weights (halfstep report {home}). Train the "
        f"precision you chose first: {again} --out runs/chosen"
    )


def _test(made: Any, asked: runs.Asked) -> Any:
    found = made.arguments.get("valid")
    if found is None:
        raise ValueError(
            f"eval: the builder {asked.build} returns no validation data. Return (model, data, valid) from it, or "
            "evaluate its training data: --split train"
        )
    return found
