"""Programs as users write them: mypy --strict and pyright find nothing. Read, never run."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import halfstep as hs

x = torch.randn(64, 6)
y = torch.arange(64) % 3
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
data = hs.data.Dataset((x, y), seed=1).shuffle().batch(8)
net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

# fit, evaluate, predict.

model = hs.Model(
    net, nn.CrossEntropyLoss(), optimizer, "O2+bf16", metrics={"acc": hs.metrics.Accuracy()}
)
run = model.fit(
    2,
    data,
    valid=loader,
    valid_every=[1, 2],
    valid_every_steps=4,
    callbacks=[hs.Checkpoint("runs/typed"), hs.JSONLLog("log.jsonl")],
    progress="lines",
    sink=10,
    steps_per_epoch=8,
    max_time="1h30m",
    limit_batches=0.5,
    resume="auto",
)
run = model.fit(epochs=2, data=loader, callbacks=None)
run = model.fit(loader, 2)
run = model.fit(loader, epochs=2, valid=data, callbacks=hs.History())
run = model.fit(x, y, epochs=2, batch_size=8, validation_data=(x, y), valid_every=2)
run = model.fit([x, x], y, epochs=2, batch_size=8)
run = model.fit(
    np.zeros((8, 6)),
    np.zeros(8),
    epochs=1,
    batch_size=2,
    validation_split=0.2,
    shuffle=False,
    seed=1,
)
last: dict[str, Any] = run.history[-1]
scores: dict[str, float] = model.evaluate(data)
scores = model.evaluate(x, y)
scores = model.evaluate(x, y, batch_size=8)
outputs: Tensor = model.predict(x, batch_size=8)
outputs = model.predict(loader, batch=8, stream=False, targets=True)
print(model.report())
model.save("typed.safetensors")
print(model.load("typed.safetensors", strict=False).matched)


# Every option.


def forward(net: nn.Module, a: Tensor, b: Tensor) -> Tensor:
    return nn.functional.cross_entropy(net(a), b)


hs.Model(
    net,
    loss=None,
    optimizer=optimizer,
    precision=hs.Precision("O2", dtype="bfloat16"),
    metrics=None,
    train_metrics=["acc"],
    schedule=hs.schedules.cosine(0.1, 100),
    schedule_every="update",
    labels=lambda batch: batch[1],
    step=None,
    eval_step=None,
    device=torch.device("cpu"),
    capture=False,
    verify=2,
    accumulate=2,
    clip_norm=1.0,
    clip_value=0.5,
    lr=[0.1, 0.2],
    ema=0.99,
    count=lambda batch: len(batch[1]),
    forward=forward,
    sens=2.0,
    nonfinite="skip",
    deterministic=True,
    fingerprint_every=10,
    decide="host",
    compile=True,
    channels_last=False,
    polish="auto",
    cudnn_benchmark="auto",
    strategy="auto",
    exact=None,
    logical=12,
)
step = hs.TrainStep(
    net,
    loss=nn.CrossEntropyLoss(),
    optimizer=optimizer,
    precision="O1",
    accumulate=2,
    clip_norm=1.0,
    clip_value=None,
    lr=torch.ones(3),
    ema=None,
    count=None,
    forward=None,
    sens=torch.ones(()),
    nonfinite=None,
    deterministic=False,
    fingerprint_every=0,
    decide="auto",
    compile="auto",
    channels_last="auto",
    polish=True,
    cudnn_benchmark=False,
    strategy="none",
    exact="bits",
    logical=6,
)
settings: dict[str, Any] = {"clip_norm": 1.0}
hs.Model(net, nn.CrossEntropyLoss(), optimizer, **settings)
hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, **settings)
word: str = "O1"
hs.Model(net, nn.CrossEntropyLoss(), optimizer, hs.Precision(word), device="auto")

# A loop of one's own, and hs.sink.

for a, b in loader:
    record = step(a, b)
    print(record.loss.item(), bool(record.skipped))
step.flush()
step.switch("fp32")
print(step.report(), step.evaluator()(x, y).loss)
print(hs.EvalStep(net, nn.CrossEntropyLoss(), precision="bf16+kahan").predict(x))
for records in hs.sink(step, data, every=10):
    print(records)
with hs.amp.autocast():
    net(x)
scaler = hs.amp.GradScaler()
gm = hs.GradManager().attach(net.parameters())
lenet = hs.nets.load("lenet5", classes=10)


class Printer(hs.Callback):
    def step(self, run: hs.Run, row: hs.Row) -> None:
        print(row.loss, run.global_step)


model.fit(1, loader, callbacks=[Printer(), hs.LossMonitor(50), hs.EarlyStopping("acc")])
