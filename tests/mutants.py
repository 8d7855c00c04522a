"""Plants faults in a copy of the source, one at a time; each must make the tests fail. Prints the score.

    python tests/mutants.py [--only WORD] [--list]

A mutant is a file, a piece of its text that stands there once, what it becomes, and the tests that should notice.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Mutant(NamedTuple):
    """One planted fault."""

    fault: str
    file: str
    old: str
    new: str
    tests: str


TRANSACTION = "tests/faults/test_transaction.py"
CYCLE = "tests/test_cycle.py"
PARITY = "tests/parity"
APPLIED = "tests/test_applied.py"
STATE = "tests/test_state.py"

MUTANTS = [
    Mutant("buffers are not restored on a skip", "step/select.py", "torch._foreach_copy_(now, list(old))", "pass", TRANSACTION),
    Mutant("a skipped update still steps", "step/commit.py", "if skip:", "if skip and False:", TRANSACTION),
    Mutant("the device keeps the new state on a skip", "step/commit.py", "old.keep_old_where(skip)", "pass", PARITY),
    Mutant("select keeps the wrong side", "step/select.py", "torch.where(flag, old, _flat(tensors))", "torch.where(flag, _flat(tensors), old)", PARITY),
    Mutant("the average moves on a skip", "step/commit.py", "*state.ema, *state.residue]", "*state.residue]", PARITY),
    Mutant("update counter advances on a skip", "step/update.py", "state.updates += updated", "state.updates += 1", PARITY),
    Mutant("clip before unscale", "step/update.py", "found = self._unscale(state, values, looks)", "self._clip(values, gradients.total(gradients.norms(values))) if values else None; found = self._unscale(state, values, looks)", "tests/faults/test_nonfinite.py tests/parity"),
    Mutant("no unscale at all", "step/update.py", "return gradients.unscale_(values, inverse(state.scale))", "return gradients.unscale_(values, self.one)", PARITY),
    Mutant("tail weighted as a full cycle", "step/update.py", "n = torch.where(cycle.weight > 0, cycle.weight, 1)\n            torch", "n = torch.full_like(cycle.weight, self.options.accumulate)\n            torch", CYCLE),
    Mutant("micro-batches weigh alike", "step/accumulate.py", "weight = count / torch.where(cycle.nominal > 0, cycle.nominal, 1)", "weight = torch.ones_like(count)", CYCLE),
    Mutant("ignored targets are counted", "step/count.py", 'kept = target != s["ignore_index"]', "kept = target == target", CYCLE),
    Mutant("class weights are not counted", "step/count.py", 'if s["weight"] is None:', "if True:", CYCLE),
    Mutant("an empty cycle updates", "step/update.py", "empty = not live or self._no_terms(state.cycle, ready.norm)", "empty = not live", CYCLE),
    Mutant("stale low copies", "precision/lowcopy.py", "torch._foreach_copy_(store, list(masters))", "None if ctx is None or getattr(_Copy, 'done', 0) > 2 else torch._foreach_copy_(store, list(masters)); _Copy.done = getattr(_Copy, 'done', 0) + 1", APPLIED),
    Mutant("scale is not capped", "precision/scale.py", "scale.clamp_(self.floor, self.cap)", "scale.clamp_(self.floor)", "tests/test_precision.py tests/faults/test_nonfinite.py"),
    Mutant("scale has no floor", "precision/scale.py", "scale.clamp_(self.floor, self.cap)", "scale.clamp_(max=self.cap)", "tests/test_precision.py tests/faults/test_nonfinite.py"),
    Mutant("growth tracker stuck above the interval", "precision/scale.py", "state.growth.clamp(max=self.interval - 1)", "state.growth.clone()", "tests/test_precision.py"),
    Mutant("scale halves on an empty cycle", "step/update.py", "if not empty:\n            self._move", "if True:\n            self._move", CYCLE),
    Mutant("rates move with steps, not updates", "step/commit.py", "self.rates.set(state.updates)\n        if skip:", "self.rates.set(state.updates + state.skips)\n        if skip:", "tests/parity/test_decide.py tests/faults/test_transaction.py"),
    Mutant("gradients of the last cycle leak into the next", "step/accumulate.py", "cycle.grads = [None] * len(self.params)\n        cycle.weight", "cycle.grads = cycle.grads or [None] * len(self.params)\n        cycle.weight", "tests/mutants_none tests/test_cycle.py"),
    Mutant("the open cycle is not saved", "step/inspect.py", '"state": save(step.state),', '"state": {**save(step.state), "cycle": save(type(step.state.cycle)())},', STATE),
    Mutant("growth tracker is not saved", "step/state.py", "return {f.name: save(getattr(state, f.name)) for f in fields(state)}", "return {f.name: save(getattr(state, f.name)) if f.name != 'growth' else getattr(state, f.name) * 0 for f in fields(state)}", STATE),
    Mutant("fp32 optimizer state rounded on load", "step/train.py", "if self._widened is None:\n            self.optimizer", "if True:\n            self.optimizer", "tests/test_rounding.py tests/test_state.py"),
    Mutant("kahan forgets the residue", "precision/rounding.py", "residue[i].copy_(p.data.sub_(low))", "residue[i].zero_()", "tests/test_rounding.py"),
    Mutant("stochastic rounding is nearest", "precision/rounding.py", "noise = _hash32(x.numel(), key).view(x.shape) & ((1 << drop) - 1)", "noise = torch.full(x.shape, 1 << (drop - 1), dtype=torch.int32, device=x.device)", "tests/test_rounding.py"),
    Mutant("stochastic rounding repeats its draws", "precision/rounding.py", "(update * 0x9E3779B1 + index * 0x85EBCA77)", "(update * 0 + index * 0x85EBCA77)", "tests/test_rounding.py"),
    Mutant("norms run low in O2", "precision/plan.py", "return Place(precision.norms if is_norm(module) and not in_kept_block else around, around, False)", "return Place(around, around, False)", "tests/test_applied.py tests/test_report.py"),
    Mutant("a kept head is rounded through half", "precision/casting.py", "return leaf if kept is None or leaf._version != kept[1] else kept[2]", "return leaf", APPLIED),
    Mutant("frozen layers take part in backward", "precision/lowcopy.py", "if not m.requires_grad", "if False", APPLIED),
    Mutant("low statistics are lost", "precision/applied.py", "_write_back(slot, now)", "pass", "tests/test_applied.py tests/parity"),
    Mutant("slots are not put back after an error", "precision/slots.py", "while self._before:", "while False:", APPLIED),
    Mutant("products accumulate in half", "precision/kernels.py", "return value.float() if _is(value, self.low) else value", "return value", "tests/test_kernels.py"),
    Mutant("non-finite gradients pass without a scaler", "step/update.py", "return self.zero if math.isfinite(norm.item()) else gradients.unscale_(values, self.one)", "return self.zero", "tests/faults"),
    Mutant("a large finite norm is called an overflow", "step/update.py", "return self.zero if math.isfinite(norm.item()) else gradients.unscale_(values, self.one)", "return self.zero if math.isfinite(norm.item()) else self.one", "tests/faults/test_nonfinite.py"),
    Mutant("the streak is never noticed", "step/trouble.py", "if isinstance(scale, NoScale) or skips < scale.max_skips:", "if True:", "tests/faults/test_nonfinite.py"),
    Mutant("the wrong parameter is blamed", "step/update.py", "bad = ~torch.isfinite(each)", "bad = torch.isfinite(each)", "tests/faults/test_nonfinite.py"),
    Mutant("sens is dropped", "step/accumulate.py", "seed: Any = self.options.sens", "seed: Any = 1.0", CYCLE),
    Mutant("a fingerprint ignores positions", "step/fingerprint.py", "mix(part ^ place).sum()", "mix(part).sum()", "tests/test_fingerprint.py"),
    Mutant("eval leaves the network in eval mode", "step/evaluate.py", "module.training = training", "pass", "tests/test_eval.py"),
    Mutant("autocast caches casts", "precision/applied.py", "cache_enabled=False", "cache_enabled=True", "tests/mutants_none tests/test_autocast.py tests/test_applied.py tests/test_networks.py"),
    Mutant("a scaler's second optimizer skips alone under skip='all'", "amp/scaler.py", "if together and (found := self._found()) is not None:", "if False and (found := self._found()) is not None:", "tests/test_scaler.py"),
    Mutant("unscale twice goes unnoticed", "amp/checks.py", "if by_hand and any(id(p) in by_hand for p in with_grads(optimizer)):", "if False:", "tests/test_scaler.py"),
    Mutant("a callback's result is dropped", "grads.py", "PLACEHOLDER", "", "tests/test_grads.py"),
]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run the mutants whose description contains this")
    parser.add_argument("--list", action="store_true", help="list them and stop")
    args = parser.parse_args()
    chosen = [m for m in MUTANTS if args.only in m.fault]
    if args.list:
        print("\n".join(f"{m.file:24} {m.fault}" for m in chosen))
        return 0
    survivors = [m for m in chosen if not killed(m)]
    print(f"mutants: {len(chosen) - len(survivors)} of {len(chosen)} killed")
    for m in survivors:
        print(f"  survived: {m.fault} ({m.file})")
    return 1 if survivors else 0


def killed(mutant: Mutant) -> bool:
    """Whether the tests notice this fault, in a copy of the tree that holds it."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        tree = Path(folder)
        for part in ("halfstep", "tests", "docs", "benchmarks"):
            if (ROOT / part).exists():
                shutil.copytree(ROOT / part, tree / part, ignore=shutil.ignore_patterns("__pycache__", "sample"))
        shutil.copy(ROOT / "pyproject.toml", tree)
        plant(tree, mutant)
        tests = [t for t in mutant.tests.split() if (tree / t).exists()]
        command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", *tests]
        env = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{mutant.fault}: pytest could not run\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    by = next((line.split(" ")[1] for line in done.stdout.splitlines() if line.startswith("FAILED")), "nothing")
    print(
        f"{'killed' if done.returncode else 'SURVIVED':9} {time.perf_counter() - start:5.0f} s  {mutant.fault}: {by}",
        flush=True,
    )
    return done.returncode == 1


def plant(tree: Path, mutant: Mutant) -> None:
    path = tree / "halfstep" / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise SystemExit(
            f"{mutant.fault}: expected its text once in {mutant.file}, found it {text.count(mutant.old)} times"
        )
    path.write_text(text.replace(mutant.old, mutant.new))


if __name__ == "__main__":
    sys.exit(main())
