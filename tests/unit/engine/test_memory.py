"""What a step frees stays for the next step, during a run and no longer: real processes, counted by the kernel."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from halfstep.engine import memory

pytestmark = pytest.mark.skipif(memory._glibc_version() is None, reason="needs glibc")
FILE = memory.__file__
ALONE = f"""
import ctypes, importlib.util, json, os, resource, sys, threading
spec = importlib.util.spec_from_file_location("memory", {FILE!r})  # alone: no torch has allocated anything before
memory = sys.modules["memory"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(memory)
libc = memory._libc()

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20

def faults(mib, times=10):
    # pages touched for the first time by a block of that size, taken and freed again and again
    libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    def once():
        block = libc.malloc(mib << 20)
        libc.memset(block, 1, mib << 20)
        libc.free(block)
    once()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        once()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / times
"""
TRAIN = """
import json, os, resource, torch
from torch import nn
from halfstep.engine.memory import _libc, kept
torch.set_num_threads(1)
_libc().prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: a fault for every page, where a kernel may map several at a time
net = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
x, y = torch.randn(64, 784), torch.randint(0, 10, (64,))
optimizer, loss = torch.optim.SGD(net.parameters(), lr=1e-3), nn.CrossEntropyLoss()

def train(steps):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(steps):
        optimizer.zero_grad()
        loss(net(x), y).backward()
        optimizer.step()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / steps

def faults():
    train(20)
    return sorted(train(20) for _ in range(5))[2]  # a heap may grow once more in one of them

for what in (-1, -3) if FIXED else ():  # glibc's first: a trim at 128 KiB, a mapping for each larger block
    _libc().mallopt(what, 128 << 10)
with kept() as within:
    print(json.dumps([within.kept, faults()]))
"""


def run(code: str, **variables: str) -> Any:
    clean = {
        k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_", "LD_PRELOAD"))
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_training_step_faults_its_memory_in_once() -> None:
    kept, inside = run(f"FIXED = False\n{TRAIN}")
    assert kept
    assert inside < 10  # a few of Python's own
    refused, without = run(
        f"FIXED = True\n{TRAIN}"
    )  # its own process: a heap of before has blocks to give
    assert not refused
    assert without > 600  # 2.7 MB of gradients alone are 650 pages


def test_blocks_of_every_size_up_to_the_limit_stay_and_the_kernel_gets_them_back_at_the_end() -> (
    None
):
    code = """
before = resident()
with memory.kept():
    counts = [faults(mib) for mib in (1, 20, 100)]
    held = resident()
print(json.dumps([counts, held - before, resident() - before]))"""
    counts, held, after = run(ALONE + code)
    assert max(counts) <= 2
    assert held >= 99
    assert after <= 5  # MiB


TOP = """
def top():
    # MiB that stay when 100 of them, the end of the heap, are freed; nothing else is taken while they are held
    libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    blocks, before = [0] * 100, resident()
    for i in range(100):
        blocks[i] = libc.malloc(1 << 20)
        libc.memset(blocks[i], 1, 1 << 20)
    for i in range(100):
        libc.free(blocks[i])
    return resident() - before

resident()
"""


def test_inside_100_mib_of_small_blocks_stay_too() -> None:
    assert run(ALONE + TOP + "with memory.kept(): print(json.dumps(top()))") >= 95


def test_afterwards_blocks_come_and_go_where_glibc_itself_would_end() -> None:
    """A block of 33 MiB is mapped again, and the heap's top is trimmed beyond 64 MiB."""
    code = """
with memory.kept():
    inside = faults(33)
print(json.dumps([inside, faults(33), top(), memory.look().kept]))"""
    inside, after, stayed, again = run(ALONE + TOP + code)
    assert inside <= 2
    assert after >= 33 * 256  # each of its pages, each time
    assert stayed <= 64
    assert again  # our own setting is not taken for somebody else's


def test_the_last_one_out_restores_nested_and_across_threads() -> None:
    code = """
counts, enter, leave = [], threading.Event(), threading.Event()
def other():
    with memory.kept():
        enter.set()
        leave.wait()
thread = threading.Thread(target=other)
with memory.kept():
    with memory.kept() as inner:
        thread.start()
        enter.wait()
    counts.append(faults(40))
counts.append(faults(40))  # the thread is still inside
leave.set()
thread.join()
counts.append(faults(40))
def busy():
    for _ in range(200):
        with memory.kept():
            libc.free(libc.malloc(1 << 20))
threads = [threading.Thread(target=busy) for _ in range(4)]
for t in threads: t.start()
for t in threads: t.join()
print(json.dumps([counts, inner.kept, memory._users]))"""
    (nested, threaded, after), kept, users = run(ALONE + code)
    assert kept
    assert nested <= 2
    assert threaded <= 2
    assert after >= 40 * 256
    assert users == 0


def test_an_error_inside_restores_too() -> None:
    code = """
try:
    with memory.kept():
        faults(40)
        raise KeyError
except KeyError:
    pass
print(json.dumps([memory._users, faults(40)]))"""
    users, count = run(ALONE + code)
    assert users == 0
    assert count >= 40 * 256


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MALLOC_TRIM_THRESHOLD_", "131072"),
        ("MALLOC_TOP_PAD_", "1"),
        ("GLIBC_TUNABLES", "glibc.malloc.mmap_max=7"),
    ],
)
def test_what_the_environment_sets_is_left_alone(name: str, value: str) -> None:
    code = "with memory.kept() as m: print(json.dumps([m.kept, m.reason, faults(40)]))"
    kept, reason, count = run(ALONE + code, **{name: value})
    assert not kept
    assert name in reason
    assert count >= 40 * 256


def test_other_tunables_and_arenas_do_not_matter() -> None:
    code = "print(json.dumps(memory.look().kept))"
    assert run(ALONE + code, MALLOC_ARENA_MAX="2", GLIBC_TUNABLES="glibc.rtld.nns=4")


@pytest.mark.parametrize(
    ("threshold", "mib", "returned"), [(1 << 20, 2, True), (512 << 20, 64, False)]
)
def test_thresholds_that_the_program_has_set_are_left_alone(
    threshold: int, mib: int, returned: bool
) -> None:
    """Below where glibc's own adjustment ends, and above it; with holes in the heap, which hide what malloc does."""
    code = f"""
held = [libc.malloc(20 << 20) for _ in range(9)]
libc.mallopt(-1, 512 << 20)
libc.mallopt(-3, {threshold})
for block in held[::2]: libc.free(block)
with memory.kept() as m:
    print(json.dumps([m.kept, m.reason, faults({mib})]))"""
    kept, reason, count = run(ALONE + code)
    assert not kept
    assert "program" in reason
    assert (count >= mib * 256) is returned


def test_another_malloc_is_left_alone(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    source, library = tmp_path / "other.c", tmp_path / "other.so"
    source.write_text(
        "void *__libc_malloc(unsigned long); void *malloc(unsigned long n) { return __libc_malloc(n); }"
    )
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    kept, reason = run(
        ALONE + "m = memory.look(); print(json.dumps([m.kept, m.reason]))", LD_PRELOAD=str(library)
    )
    assert not kept
    assert "LD_PRELOAD" in reason


def test_without_glibc_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_glibc_version", lambda: None)
    monkeypatch.setattr(memory, "_libc", lambda: pytest.fail("touched"))
    with memory.kept() as within:
        assert not within.kept
        assert "not glibc" in within.reason
