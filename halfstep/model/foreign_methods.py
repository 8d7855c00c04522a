"""Methods that models of other libraries have: each answered with the line to write here."""

from halfstep.errors import closest_name
from halfstep.utils.text import write_line

_NETWORK = "a Model is no module: its network is model.net"
_WEIGHTS = "the weights are the network's"

# Name → what is different here, and the line.
METHODS: dict[str, tuple[str, str]] = {
    "compile": (
        "a Model gets its parts when it is built",
        "model = hs.Model(net, loss, optimizer, metrics={'acc': hs.metrics.Accuracy()})",
    ),
    "train": ("fit puts the network into train mode", "model.net.train()"),
    "eval": ("evaluate and predict use eval mode by themselves", "model.net.eval()"),
    "forward": (_NETWORK, "model.net(x)"),
    "parameters": (_NETWORK, "model.net.parameters()"),
    "named_parameters": (_NETWORK, "model.net.named_parameters()"),
    "buffers": (_NETWORK, "model.net.buffers()"),
    "modules": (_NETWORK, "model.net.modules()"),
    "named_modules": (_NETWORK, "model.net.named_modules()"),
    "children": (_NETWORK, "model.net.children()"),
    "layers": (_NETWORK, "list(model.net.children())"),
    "apply": (_NETWORK, "model.net.apply(print)"),
    "requires_grad_": (_NETWORK, "model.net.requires_grad_(True)"),
    "freeze": (_NETWORK, "model.net.requires_grad_(False)"),
    "unfreeze": (_NETWORK, "model.net.requires_grad_(True)"),
    "zero_grad": ("a step leaves no gradients behind", "optimizer.zero_grad()"),
    "backward": ("a step does it, one batch for each call", "record = model.step(x, y)"),
    "training_step": ("a step is one batch", "record = model.step(x, y)"),
    "train_step": ("a step is one batch", "record = model.step(x, y)"),
    "train_on_batch": ("a step is one batch", "record = model.step(x, y)"),
    "test_on_batch": ("a batch is a short data set", "model.evaluate([(x, y)])"),
    "predict_on_batch": ("a batch is predicted like any data", "model.predict(x)"),
    "predict_step": ("a batch is predicted like any data", "model.predict(x)"),
    "predict_proba": ("predict returns the network's outputs", "model.predict(x).softmax(1)"),
    "predict_classes": ("predict returns the network's outputs", "model.predict(x).argmax(1)"),
    "transform": ("predict returns the network's outputs", "model.predict(x)"),
    "score": ("evaluate returns the loss and the metrics by name", "model.evaluate(x, y)"),
    "test": ("evaluate returns the loss and the metrics by name", "model.evaluate(data)"),
    "validate": ("evaluate returns the loss and the metrics by name", "model.evaluate(data)"),
    "fit_generator": ("fit takes any batches", "model.fit(2, data)"),
    "fit_one_cycle": (
        "the schedule belongs to the Model",
        "hs.Model(net, loss, optimizer, schedule=hs.schedules.one_cycle(0.1, 100))",
    ),
    "to": (
        "the parts are moved when the Model is built",
        "hs.Model(net, loss, optimizer, device='auto')",
    ),
    "cuda": (
        "the parts are moved when the Model is built",
        "hs.Model(net, loss, optimizer, device='auto')",
    ),
    "cpu": (
        "the parts are moved when the Model is built",
        "hs.Model(net, loss, optimizer, device='cpu')",
    ),
    "half": ("the precision is one word", "hs.Model(net, loss, optimizer, 'fp16')"),
    "bfloat16": ("the precision is one word", "hs.Model(net, loss, optimizer, 'bf16')"),
    "float": ("the precision is one word", "hs.Model(net, loss, optimizer, 'fp32')"),
    "double": ("the precision is one word", "hs.Model(net, loss, optimizer, 'fp64')"),
    "summary": ("it is a function", "hs.summary(model, data)"),
    "save_weights": ("save writes the weights", "model.save('weights.safetensors')"),
    "save_pretrained": ("save writes the weights", "model.save('weights.safetensors')"),
    "load_weights": ("load reads weights", "model.load('weights.safetensors')"),
    "save_checkpoint": (
        "a callback saves whole runs",
        "model.fit(2, data, callbacks=[hs.Checkpoint('runs/mine')])",
    ),
    "load_from_checkpoint": ("load reads weights", "model.load('weights.safetensors')"),
    "get_weights": (_WEIGHTS, "model.net.state_dict()"),
    "set_weights": (_WEIGHTS, "model.load(model.net.state_dict())"),
    "state_dict": (_WEIGHTS, "model.net.state_dict()"),
    "load_state_dict": (_WEIGHTS, "model.load(model.net.state_dict())"),
    "count_params": (_WEIGHTS, "sum(p.numel() for p in model.net.parameters())"),
    "history": ("fit returns the run", "run = model.fit(2, data)"),
    "optimizers": ("there is one", "model.optimizer"),
    "configure_optimizers": ("there is one", "model.optimizer"),
    "log": (
        "every step's loss, rate and norm are logged by a callback",
        "model.fit(2, data, callbacks=[hs.CSVLog('log.csv')])",
    ),
}


def missing_attribute_message(name: str, known: list[str]) -> str:
    """What to write instead of a method that a Model does not have."""
    if name in METHODS:
        problem, line = METHODS[name]
        return write_line(f"Model has no {name!r}: {problem}", line)
    close = closest_name(name, [known_name for known_name in known if known_name[0] != "_"])
    suggestion = f"; did you mean {close!r}?" if close else ""
    return f"'Model' object has no attribute {name!r}{suggestion}"


NOT_CALLABLE = write_line(
    "a Model is not called like its network: predict is in eval mode, and model.net(x) as it is",
    "model.predict(x)",
)
