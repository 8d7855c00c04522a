"""The report of a step: the dtypes really used, and every choice made for the user."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from halfstep.precision.casting import ObservedDtypes
from halfstep.step.lanes import Lanes
from halfstep.utils.text import list_some

if TYPE_CHECKING:
    from halfstep.step.train_step import TrainStep

KEY_WIDTH = 15  # columns for the names of the choices


@dataclass(frozen=True, repr=False)
class Report:
    """The dtypes really used, module by module, and every choice made for the user.

    Printed, and shown at the end of a notebook's cell, it is a table.
    """

    choices: dict[str, str]
    modules: dict[str, ObservedDtypes]

    def adding(self, **choices: str) -> "Report":
        """The same report with more choices in it."""
        return replace(self, choices={**self.choices, **choices})

    def __repr__(self) -> str:
        lines = [f"{name:>{KEY_WIDTH}}: {choice}" for name, choice in self.choices.items()]
        if not self.modules:
            advice = "run one step, then the dtypes of each module are listed here"
            return "\n".join([*lines, f"{'modules':>{KEY_WIDTH}}: {advice}"])

        rows = [("module", "kind", "input", "weight", "output")]
        rows += [(name or "(network)", *dtypes) for name, dtypes in self.modules.items()]
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        table = []
        for row in rows:
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            table.append("  ".join(cells).rstrip())
        return "\n".join([*lines, "", *table])


def report_step(step: "TrainStep") -> Report:
    """The choices of this step, and the dtypes that its modules were seen to use."""
    precision = step.precision
    decider = "device" if step.decides_on_device else "host"
    batches = step.options.accumulate
    choices = {
        "precision": (
            f"{precision.name}: parameters {precision.params}, compute {precision.compute}, "
            f"norms {precision.norms}, output {precision.output}"
        ),
        "loss scale": repr(precision.loss_scale),
        "half kernels": (
            "round(fp32 product) on this CPU"
            if step.applied.rounds_fp32_products
            else "torch's own"
        ),
        "optimizer": (
            f"{type(step.optimizer).__name__}, {step.optimizer_kind}; "
            f"updates decided on the {decider}"
        ),
        "non-finite": step.options.nonfinite or "ignore",
        "cycle": f"{batches} {'batch' if batches == 1 else 'batches'} per update",
        **_speed_choices(step),
    }
    if step.lanes is not None:
        choices["ranks"] = _describe_lanes(step, step.lanes)
    if step.applied.converted_names:
        count = len(step.applied.converted_names)
        choices["converted"] = f"{count} parameters to {precision.params}, in place"
    if step.applied.rounded_buffers:
        names = list_some(step.applied.rounded_buffers, 3)
        choices["rounded buffers"] = f"{names}: stored in {precision.params}, as net.half() does"
    if precision.keep_inputs:
        choices["kept inputs"] = f"{', '.join(precision.keep_inputs)}: not cast"
    if step.applied.widened_modules:
        names = list_some(step.applied.widened_modules, 3)
        choices["float32 outputs"] = (
            f"{names}: float buffers and kept inputs stay float32, and so does what is computed "
            "elementwise from them; cast it in forward, as in x + table.to(x.dtype), to stay low"
        )
    if step.notices:
        choices["notices"] = "; ".join(step.notices)
    choices = {name: choice.replace("torch.", "") for name, choice in choices.items()}
    return Report(choices, dict(step.applied.observed))


def _describe_lanes(step: "TrainStep", lanes: Lanes) -> str:
    """Who computes what, and in which order it is summed."""
    text = "this process alone"
    if step.ranks is not None and step.ranks.count > 1:
        text = f"{step.ranks.count} ranks (ddp), this one is {step.ranks.index}"
    if not lanes.exact:
        return f"{text}; each computes its part of every batch, gradients are summed by all-reduce"
    return (
        f"{text}; exact='bits': every batch in {lanes.count} logical micro-batches, summed in a "
        "fixed tree"
    )


def _speed_choices(step: "TrainStep") -> dict[str, str]:
    """The choices that make a step fast, each with its reason."""
    memory_format = "channels-last" if step.channels_last.on else "as given"
    choices = {
        "compiled": f"{_yes_or_no(step.compiled.on)}: {step.compiled.reason}",
        "memory format": f"{memory_format}: {step.channels_last.reason}",
        "cudnn benchmark": f"no: there is no cuDNN on this {step.device.type}",
    }
    if step.device.type != "cuda":
        return choices

    options = step.options
    if options.cudnn_benchmark != "auto":
        reason = f"cudnn_benchmark={options.cudnn_benchmark}"
    elif options.deterministic:
        reason = "deterministic=True"
    elif not options.measures_algorithms:
        reason = "torch.use_deterministic_algorithms(True) is on"
    else:
        reason = "the fastest algorithm is measured for each shape"
    choices["cudnn benchmark"] = f"{_yes_or_no(options.measures_algorithms)}: {reason}"

    if step.precision.name == "tf32":
        choices["tf32"] = "yes: precision 'tf32'"
    else:
        choices["tf32"] = f"no: {step.precision.name!r} keeps float32 products exact"
    return choices


def _yes_or_no(flag: bool) -> str:
    return "yes" if flag else "no"
