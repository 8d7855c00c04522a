"""What a notebook shows of a Model and of its report."""

from typing import Any

import torch
from torch import nn

import halfstep as hs


def make_model(precision: Any = "fp32") -> hs.Model:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    metrics = {"acc": hs.metrics.Accuracy()}
    return hs.Model(net, nn.CrossEntropyLoss(), optimizer, precision, metrics=metrics)


def test_a_model_is_shown_by_its_parts() -> None:
    expected = "Sequential with 67 parameters, CrossEntropyLoss, SGD, precision 'O1', metrics acc"
    assert repr(make_model("O1")) == f"Model({expected})"
    assert repr(hs.Model(nn.Linear(2, 1))) == "Model(Linear with 3 parameters)"
    model = hs.Model(nn.Linear(2, 1), nn.functional.mse_loss)
    assert repr(model) == "Model(Linear with 3 parameters, mse_loss)"


def test_a_report_is_shown_as_its_table() -> None:
    model = make_model()
    model.fit(1, [(torch.ones(2, 4), torch.zeros(2, dtype=torch.int64))])
    report = model.report()
    lines = repr(report).splitlines()
    assert lines[0].strip().startswith("precision: fp32: parameters")
    assert [line.split()[0] for line in lines if line.startswith(("module", "0", "2"))] == [
        "module",
        "0",
        "2",
    ]
    assert str(report) == repr(report)
    assert report.choices["precision"].startswith("fp32")  # and the fields are there as before
    assert report.modules["0"].kind
