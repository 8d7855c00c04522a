"""What a step frees stays for the next step, during a run and no longer.

Real processes, whose page faults the kernel counts.
"""

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

PAGES_PER_MIB = 256  # pages of 4 KiB

# memory.py is loaded from its file alone: no torch has allocated anything before.
MEMORY_ALONE = f"""
import ctypes, importlib.util, json, os, resource, sys, threading
spec = importlib.util.spec_from_file_location("memory", {memory.__file__!r})
memory = sys.modules["memory"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(memory)
libc = memory._libc()
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

def resident_mib():
    pages = int(open("/proc/self/statm").read().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20

def count_faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def faults_per_block(mib, times=10):
    # Pages touched for the first time by a block of that size, taken and freed again and again.
    def take_and_free():
        block = libc.malloc(mib << 20)
        libc.memset(block, 1, mib << 20)
        libc.free(block)
    take_and_free()
    before = count_faults()
    for _ in range(times):
        take_and_free()
    return (count_faults() - before) / times
"""

# Without transparent huge pages (PR_SET_THP_DISABLE): else a fault may map several pages at a time.
TRAIN = """
import json, os, resource, torch
from torch import nn
from halfstep.engine.memory import _libc, kept
torch.set_num_threads(1)
_libc().prctl(41, 1, 0, 0, 0)
net = nn.Sequential(
    nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
)
x = torch.randn(64, 784)
y = torch.randint(0, 10, (64,))
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
loss = nn.CrossEntropyLoss()

def train(steps):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(steps):
        optimizer.zero_grad()
        loss(net(x), y).backward()
        optimizer.step()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / steps

def faults_per_step():
    train(20)
    return sorted(train(20) for _ in range(5))[2]  # a heap may grow once more in one of them

# glibc's first values: it trims at 128 KiB and maps each larger block on its own.
if FIX_THRESHOLDS:
    for parameter in (-1, -3):
        _libc().mallopt(parameter, 128 << 10)
with kept() as state:
    print(json.dumps([state.kept, faults_per_step()]))
"""

# How much stays when 100 MiB at the end of the heap are freed. Nothing else is allocated meanwhile.
HEAP_TOP = """
def mib_that_stay():
    blocks = [0] * 100
    before = resident_mib()
    for i in range(100):
        blocks[i] = libc.malloc(1 << 20)
        libc.memset(blocks[i], 1, 1 << 20)
    for i in range(100):
        libc.free(blocks[i])
    return resident_mib() - before

resident_mib()
"""


def run_process(code: str, **variables: str) -> Any:
    """What the code prints as JSON, in a process without settings of malloc beside `variables`."""
    prefixes = ("MALLOC_", "GLIBC_", "LD_PRELOAD")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(prefixes)}
    process = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


def test_a_training_step_faults_its_memory_in_once() -> None:
    kept, faults = run_process(f"FIX_THRESHOLDS = False\n{TRAIN}")
    assert kept
    assert faults < 10  # a few of Python's own

    # In a process of its own: a heap from before would have free blocks.
    kept, faults = run_process(f"FIX_THRESHOLDS = True\n{TRAIN}")
    assert not kept
    assert faults > 600  # 2.7 MB of gradients alone are 650 pages


def test_blocks_of_every_size_up_to_the_limit_stay_and_are_returned_at_the_end() -> None:
    code = """
before = resident_mib()
with memory.kept():
    faults = [faults_per_block(mib) for mib in (1, 20, 100)]
    inside = resident_mib()
print(json.dumps([faults, inside - before, resident_mib() - before]))"""
    faults, mib_inside, mib_after = run_process(MEMORY_ALONE + code)
    assert max(faults) <= 2
    assert mib_inside >= 99
    assert mib_after <= 5


def test_inside_100_mib_of_small_blocks_stay_too() -> None:
    code = "with memory.kept(): print(json.dumps(mib_that_stay()))"
    assert run_process(MEMORY_ALONE + HEAP_TOP + code) >= 95


def test_afterwards_blocks_come_and_go_where_glibc_itself_would_end() -> None:
    """A block of 33 MiB is mapped again, and the heap's top is trimmed beyond 64 MiB."""
    code = """
with memory.kept():
    inside = faults_per_block(33)
print(json.dumps([inside, faults_per_block(33), mib_that_stay(), memory.look().kept]))"""
    inside, after, mib_stayed, would_keep_again = run_process(MEMORY_ALONE + HEAP_TOP + code)
    assert inside <= 2
    assert after >= 33 * PAGES_PER_MIB  # each of its pages, each time
    assert mib_stayed <= 64
    assert would_keep_again  # our own setting is not taken for somebody else's


def test_the_last_one_out_restores_nested_and_across_threads() -> None:
    code = """
faults = []
entered = threading.Event()
may_leave = threading.Event()
def other_thread():
    with memory.kept():
        entered.set()
        may_leave.wait()
thread = threading.Thread(target=other_thread)
with memory.kept():
    with memory.kept() as inner:
        thread.start()
        entered.wait()
    faults.append(faults_per_block(40))
faults.append(faults_per_block(40))  # the thread is still inside
may_leave.set()
thread.join()
faults.append(faults_per_block(40))
def enter_often():
    for _ in range(200):
        with memory.kept():
            libc.free(libc.malloc(1 << 20))
threads = [threading.Thread(target=enter_often) for _ in range(4)]
for t in threads: t.start()
for t in threads: t.join()
print(json.dumps([faults, inner.kept, memory._users]))"""
    (nested, in_thread, after), kept, users = run_process(MEMORY_ALONE + code)
    assert kept
    assert nested <= 2
    assert in_thread <= 2
    assert after >= 40 * PAGES_PER_MIB
    assert users == 0


def test_an_error_inside_restores_too() -> None:
    code = """
try:
    with memory.kept():
        faults_per_block(40)
        raise KeyError
except KeyError:
    pass
print(json.dumps([memory._users, faults_per_block(40)]))"""
    users, faults = run_process(MEMORY_ALONE + code)
    assert users == 0
    assert faults >= 40 * PAGES_PER_MIB


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MALLOC_TRIM_THRESHOLD_", "131072"),
        ("MALLOC_TOP_PAD_", "1"),
        ("GLIBC_TUNABLES", "glibc.malloc.mmap_max=7"),
    ],
)
def test_what_the_environment_sets_is_left_alone(name: str, value: str) -> None:
    code = """
with memory.kept() as state:
    print(json.dumps([state.kept, state.reason, faults_per_block(40)]))"""
    kept, reason, faults = run_process(MEMORY_ALONE + code, **{name: value})
    assert not kept
    assert name in reason
    assert faults >= 40 * PAGES_PER_MIB


def test_other_tunables_and_arenas_do_not_matter() -> None:
    code = "print(json.dumps(memory.look().kept))"
    variables = {"MALLOC_ARENA_MAX": "2", "GLIBC_TUNABLES": "glibc.rtld.nns=4"}
    assert run_process(MEMORY_ALONE + code, **variables)


@pytest.mark.parametrize(
    ("threshold", "mib", "is_returned"), [(1 << 20, 2, True), (512 << 20, 64, False)]
)
def test_thresholds_that_the_program_has_set_are_left_alone(
    threshold: int, mib: int, is_returned: bool
) -> None:
    """Below where glibc's own adjustment ends, and above it.

    With holes in the heap, which hide what malloc does.
    """
    code = f"""
blocks = [libc.malloc(20 << 20) for _ in range(9)]
libc.mallopt(-1, 512 << 20)
libc.mallopt(-3, {threshold})
for block in blocks[::2]: libc.free(block)
with memory.kept() as state:
    print(json.dumps([state.kept, state.reason, faults_per_block({mib})]))"""
    kept, reason, faults = run_process(MEMORY_ALONE + code)
    assert not kept
    assert "program" in reason
    assert (faults >= mib * PAGES_PER_MIB) is is_returned


def test_another_malloc_is_left_alone(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    source = tmp_path / "other.c"
    library = tmp_path / "other.so"
    source.write_text(
        "void *__libc_malloc(unsigned long);\n"
        "void *malloc(unsigned long n) { return __libc_malloc(n); }\n"
    )
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    code = "state = memory.look(); print(json.dumps([state.kept, state.reason]))"
    kept, reason = run_process(MEMORY_ALONE + code, LD_PRELOAD=str(library))
    assert not kept
    assert "LD_PRELOAD" in reason


def test_without_glibc_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_glibc_version", lambda: None)
    monkeypatch.setattr(memory, "_libc", lambda: pytest.fail("touched"))
    with memory.kept() as state:
        assert not state.kept
        assert "not glibc" in state.reason
