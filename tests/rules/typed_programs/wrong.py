"""Mistakes of users: mypy --strict and pyright find each line that is marked. Read, never run."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import halfstep as hs

x = torch.randn(64, 6)
y = torch.arange(64) % 3
data = DataLoader(TensorDataset(x, y), batch_size=8)
net = nn.Linear(6, 3)
loss = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
model = hs.Model(net, loss, optimizer)

hs.Model(net, loss, optimizer, clip_nrm=1.0)  # wrong: did you mean "clip_norm"?
hs.Model(net, loss, optimizer, "O9")  # wrong: expected "Literal['fp64', 'fp32',
hs.Model(net, loss, optimizer, "fp32+bf16")  # wrong: expected "Literal['fp64', 'fp32',
hs.Model(net, loss, optimizer, clip_norm="1")  # wrong: expected "float | None"
hs.Model(net, loss, optimizer, accumulate=1.5)  # wrong: expected "int"
hs.Model(net, loss, optimizer, capture="always")  # wrong: expected "bool | Literal['auto']"
hs.Model(net, loss, optimizer, nonfinite="stop")  # wrong: expected "Literal['raise', 'skip',
hs.Model(net, loss, optimizer, device=3.5)  # wrong: expected "str | device | None"
hs.Model(net, loss, "adam")  # wrong: expected "Optimizer | None"
hs.Model(net, loss, torch.optim.SGD)  # wrong: expected "Optimizer | None"
hs.Model(net, loss, optimizer, epochs=2)  # wrong: Unexpected keyword argument "epochs"
hs.TrainStep(net, loss, optimizer, clip_nrm=1.0)  # wrong: did you mean "clip_norm"?
hs.TrainStep(net, loss, optimizer, precision="O9")  # wrong: expected "Literal['fp64', 'fp32',
hs.TrainStep(net, loss, optimizer, decide="gpu")  # wrong: expected "Literal['auto', 'host',
hs.TrainStep(net, loss, optimizer, metrics={})  # wrong: Unexpected keyword argument "metrics"
hs.EvalStep(net, loss, precision="O9")  # wrong: expected "Literal['fp64', 'fp32',
model.fit(data, data)  # wrong: No overload variant of "fit"
model.fit(x, y, epochs=2)  # wrong: No overload variant of "fit"
model.fit(x, y, epochs=2, batch_size="8")  # wrong: No overload variant of "fit"
model.fit(2, data, clip_nrm=1)  # wrong: Unexpected keyword argument "clip_nrm"
model.fit(2.5, data)  # wrong: No overload variant of "fit"
model.fit("2", data)  # wrong: No overload variant of "fit"
model.fit(data, 2, valdi=data)  # wrong: did you mean "valid"?
model.evaluate(x, y, batch_size="8")  # wrong: No overload variant of "evaluate"
model.predict(x, batchsize=8)  # wrong: did you mean "batch_size"?
model.compile(optimizer="adam")  # wrong: "Model" has no attribute "compile"
model.parameters()  # wrong: "Model" has no attribute "parameters"
model(x)  # wrong: "Model" not callable
hs.Trainer()  # wrong: Module has no attribute "Trainer"
hs.Modle()  # wrong: maybe "Model"?
