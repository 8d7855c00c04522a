"""Which curves a report has: training loss, accuracy (or validation loss), loss scale."""

from halfstep.report import text as numbers
from halfstep.report.charts__curves import Chart
from halfstep.report.load__values import Report
from halfstep.report.series import Curves, by_change, by_epoch, by_step
from halfstep.report.series__axes import Axis, around

_WIDE = 30.0  # highest ÷ lowest from which a loss is drawn by powers
_BEYOND = 1.5  # × the reference's highest loss: what lies above is cut, so that one diverged run does not flatten all


def training(report: Report) -> list[Chart]:
    """The training loss by step, and the accuracy or else the validation loss by epoch."""
    found = []
    if loss := by_step(report, "loss"):
        axis, beyond = _loss_axis(loss)
        note = " ".join(part for part in (_averaged(loss), _band(loss), beyond) if part)
        found.append(
            Chart("chart-loss", "Training loss", note, loss, "step", axis, "number", numbers.short)
        )
    if accuracy := by_epoch(report, "valid_acc"):
        axis = _share_axis([v for line in accuracy.lines for v in line.values()])
        note = "On the test data, after each epoch. " + _band(accuracy)
        args = (
            "Accuracy",
            note.strip(),
            accuracy,
            "epoch",
            axis,
            "percent",
            numbers.percent,
            _percent,
        )
        found.append(Chart("chart-accuracy", *args))
    elif loss := by_epoch(report, "valid_loss"):
        axis, beyond = _loss_axis(loss)
        note = " ".join(
            part for part in ("On the test data, after each epoch.", _band(loss), beyond) if part
        )
        found.append(
            Chart(
                "chart-validation",
                "Validation loss",
                note,
                loss,
                "epoch",
                axis,
                "number",
                numbers.short,
            )
        )
    return found


def scaled(report: Report) -> Curves:
    """The loss scale by step, of the precisions that have one; a scale that is 1 throughout is none."""
    every = by_change(report, "scale")
    return Curves(every.x, [line for line in every.lines if any(v != 1 for v in line.values())])


def scaling(report: Report) -> Chart | None:
    """The loss scale where it moved; one that never did is said in a word."""
    curves = scaled(report)
    lines = curves.lines
    if all(len(set(line.values())) == 1 for line in lines):
        return None
    axis = around([v for line in lines for v in line.values()], log=True)
    note = f"What the loss was multiplied by, at each step. {_band(curves)}".strip()
    return Chart(
        "chart-scale",
        "Loss scale",
        note,
        curves,
        "step",
        axis,
        "scale",
        numbers.scale,
        numbers.scale,
        stairs=True,
    )


def _loss_axis(curves: Curves) -> tuple[Axis, str]:
    """An axis that shows the reference whole, and a word on who leaves it."""
    top = max(curves.lines[0].values())
    limit = top * _BEYOND if top > 0 else top + 1
    shown = [v for line in curves.lines for v in line.values() if v <= limit]
    gone = {line.name: max(line.values()) for line in curves.lines if max(line.values()) > limit}
    log = min(shown) > 0 and max(shown) / min(shown) > _WIDE
    said = ", ".join(f"{name} up to {numbers.short(value)}" for name, value in gone.items())
    return around(
        shown, log=log, floor=0.0 if min(shown) >= 0 else None
    ), f"Beyond the chart: {said}." if said else ""


def _share_axis(values: list[float]) -> Axis:
    """Air around the values, within 0 and 100 % where they are."""
    axis = around(values)
    return (
        Axis(max(axis.lo, 0.0), min(axis.hi, 1.0))
        if min(values) >= 0 and max(values) <= 1
        else axis
    )


def _percent(value: float) -> str:
    return f"{numbers.tick(round(value * 100, 9))} %"


def _averaged(curves: Curves) -> str:
    return (
        f"Each point is the mean of about {curves.every} recorded steps."
        if curves.every > 1
        else ""
    )


def _band(curves: Curves) -> str:
    most = max((line.seeds for line in curves.lines), default=1)
    return f"The band spans {numbers.plural(most, 'seed')}, lowest to highest." if most > 1 else ""
