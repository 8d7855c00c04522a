"""Which line charts a report has: training loss, accuracy or validation loss, loss scale."""

from halfstep.report import number_format as fmt
from halfstep.report.axis import Axis, linear_axis, log_axis
from halfstep.report.line_chart import LineChart
from halfstep.report.report_data import Report
from halfstep.report.series import Curves, curves_by_change, curves_by_epoch, curves_by_step
from halfstep.utils.text import plural

# A loss whose highest value is more than this many times its lowest gets a logarithmic axis.
LOG_AXIS_RATIO = 30.0

# What lies above the reference's highest loss times this is cut off, so that one run that has
# diverged does not flatten all the others.
CUT_OFF_RATIO = 1.5

AFTER_EACH_EPOCH = "On the test data, after each epoch."


def training_charts(report: Report) -> list[LineChart]:
    """The training loss by step, and by epoch the accuracy or else the validation loss."""
    charts = []
    loss = curves_by_step(report, "loss")
    if loss:
        charts.append(_loss_chart("chart-loss", "Training loss", loss, "step", _bin_note(loss)))

    accuracy = curves_by_epoch(report, "valid_acc")
    validation_loss = curves_by_epoch(report, "valid_loss")
    if accuracy:
        charts.append(_accuracy_chart(accuracy))
    elif validation_loss:
        charts.append(
            _loss_chart(
                "chart-validation", "Validation loss", validation_loss, "epoch", AFTER_EACH_EPOCH
            )
        )
    return charts


def loss_scale_curves(report: Report) -> Curves:
    """The loss scale by step, of the precisions that have one: a scale that is always 1 is none."""
    curves = curves_by_change(report, "scale")
    lines = [line for line in curves.lines if any(v != 1 for v in line.known_values())]
    return Curves(curves.x, lines)


def loss_scale_chart(curves: Curves) -> LineChart | None:
    """The loss scale where it moved; None if it never did, which a sentence says as well."""
    if all(len(set(line.known_values())) == 1 for line in curves.lines):
        return None
    return LineChart(
        id="chart-scale",
        title="Loss scale",
        note=_join("What the loss was multiplied by, at each step.", _band_note(curves)),
        curves=curves,
        x_name="step",
        y_axis=log_axis(curves.known_values()),
        kind="scale",
        format_value=fmt.format_loss_scale,
        format_tick=fmt.format_loss_scale,
        stairs=True,
    )


def _accuracy_chart(curves: Curves) -> LineChart:
    return LineChart(
        id="chart-accuracy",
        title="Accuracy",
        note=_join(AFTER_EACH_EPOCH, _band_note(curves), _marks_note(curves)),
        curves=curves,
        x_name="epoch",
        y_axis=_share_axis(curves.known_values()),
        kind="percent",
        format_value=fmt.format_percent,
        format_tick=fmt.format_percent_tick,
    )


def _loss_chart(id: str, title: str, curves: Curves, x_name: str, about: str) -> LineChart:
    """A chart of losses whose axis shows the reference (the first line) in full."""
    reference_high = max(curves.lines[0].known_values())
    if reference_high > 0:
        limit = reference_high * CUT_OFF_RATIO
    else:
        limit = reference_high + 1

    # A logarithmic axis where the values span a wide range; a linear one does not go below 0.
    visible = [value for value in curves.known_values() if value <= limit]
    if min(visible) > 0 and max(visible) / min(visible) > LOG_AXIS_RATIO:
        axis = log_axis(visible)
    else:
        axis = linear_axis(visible, floor=0.0 if min(visible) >= 0 else None)

    return LineChart(
        id=id,
        title=title,
        note=_join(about, _band_note(curves), _marks_note(curves), _cut_off_note(curves, limit)),
        curves=curves,
        x_name=x_name,
        y_axis=axis,
        kind="number",
        format_value=fmt.format_number,
    )


def _share_axis(values: list[float]) -> Axis:
    """An axis with some space around the values, within 0 and 100 % where they are."""
    axis = linear_axis(values)
    if min(values) >= 0 and max(values) <= 1:
        return Axis(max(axis.low, 0.0), min(axis.high, 1.0))
    return axis


def _bin_note(curves: Curves) -> str:
    if curves.steps_per_bin <= 1:
        return ""
    return f"Each point is the mean of about {curves.steps_per_bin} recorded steps."


def _band_note(curves: Curves) -> str:
    if curves.max_seeds() <= 1:
        return ""
    return f"The band spans {plural(curves.max_seeds(), 'seed')}, lowest to highest."


def _marks_note(curves: Curves) -> str:
    if len(curves.lines) <= 1:
        return ""
    return "The shapes on the lines only tell them apart."


def _cut_off_note(curves: Curves, limit: float) -> str:
    """Which precisions leave the chart, and how far."""
    highest = {}
    for line in curves.lines:
        if max(line.known_values()) > limit:
            highest[line.name] = max(line.known_values())
    if not highest:
        return ""
    cut_off = [f"{name} up to {fmt.format_number(value)}" for name, value in highest.items()]
    return f"Beyond the chart: {', '.join(cut_off)}."


def _join(*sentences: str) -> str:
    return " ".join(sentence for sentence in sentences if sentence)
