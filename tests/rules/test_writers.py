"""Every file that halfstep writes goes through utils/atomic_files.py; what does not says why.

The source is searched for each way of Python, torch and numpy to write, make or move a file.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import halfstep

SOURCE = Path(halfstep.__file__).parent

WRITING_MODES = set("wax+")

# Methods and functions, by the last name of the call.
WRITING_CALLS = {
    "write_text",
    "write_bytes",
    "save_file",
    "serialize_file",
    "savez",
    "savez_compressed",
    "savetxt",
    "tofile",
    "memmap",
    "open_memmap",
    "to_csv",
    "touch",
    "mkstemp",
    "mkdtemp",
    "NamedTemporaryFile",
    "TemporaryFile",
    "TemporaryDirectory",
    "SpooledTemporaryFile",
    "copyfile",
    "copy2",
    "copytree",
    "copyfileobj",
    "make_archive",
    "unpack_archive",
    "extract",
    "extractall",
    "symlink_to",
    "hardlink_to",
    "symlink",
    "link",
    "rename",
    "renames",
    "truncate",
    "ftruncate",
    "pwrite",
    "SummaryWriter",
    "RotatingFileHandler",
    "FileHandler",
    "urlretrieve",
}
# Names that other things have too: only together with what stands before the dot.
WRITING_FUNCTIONS = {
    "os.replace",
    "os.write",
    "shutil.copy",
    "shutil.move",
    "torch.save",
    "np.save",
    "numpy.save",
    "page.save",
    "image.save",
    "json.dump",
    "pickle.dump",
    "marshal.dump",
    "csv.writer",
    "csv.DictWriter",
}
OPENING_CALLS = {"open", "fdopen", "open_code", "ZipFile", "TarFile", "GzipFile", "FileIO"}
WRITING_FLAGS = {"O_WRONLY", "O_RDWR", "O_CREAT", "O_TRUNC", "O_APPEND"}

# File, the call, and why it may be there.
ALLOWED = {
    ("utils/atomic_files.py", "open"): "the writer itself; a device or a pipe is written as it is",
    ("utils/atomic_files.py", "os.open"): "the writer itself",
    ("utils/atomic_files.py", "os.fdopen"): "the writer itself",
    ("utils/atomic_files.py", "os.replace"): "the writer itself",
    ("utils/atomic_files.py", "os.rename"): "the writer itself",
    ("checkpoint/disk.py", "path.open"): "a new file inside a folder that appears whole",
    ("checkpoint/disk.py", "os.write"): "the same",
    ("checkpoint/runs.py", "os.rename"): "a whole checkpoint takes the name of the one it replaces",
    (
        "checkpoint/lock.py",
        "os.open",
    ): "a lock is this very file, and its line is for people",
    ("checkpoint/lock.py", "os.ftruncate"): "the same",
    ("checkpoint/lock.py", "os.pwrite"): "the same",
    ("cli/launch_ranks.py", "tempfile.TemporaryDirectory"): "gone when the command ends",
    ("cli/rank_process.py", "open"): "the null device, in place of the output of later ranks",
    ("callbacks/logs.py", "self.path.open"): "a device or a pipe",
    ("callbacks/logs.py", "os.open"): "lines are appended; a half line is taken off again",
    ("callbacks/logs.py", "os.fdopen"): "the same",
    (
        "callbacks/logs.py",
        "self._file.truncate",
    ): "a line cut by a full disk is taken off again",
    ("callbacks/logs.py", "csv.writer"): "into memory",
    (
        "callbacks/checkpoint.py",
        "TemporaryDirectory",
    ): "empty: can the folder be written?",
    (
        "callbacks/tensorboard.py",
        "SummaryWriter",
    ): "TensorBoard appends events by itself",
    ("cli/predict.py", "csv.writer"): "into memory",
    ("data/contact_sheet.py", "page.save"): "into the file of atomic_file",
    ("data/download/archive.py", "opened_zip.extract"): "into a folder that appears whole",
    ("data/download/archive.py", "tar.extract"): "the same",
    ("data/download/store_copy.py", "open"): "inside a folder that appears whole, by a journal",
    ("data/download/store_copy.py", "os.link"): "the same: what has not changed is not copied",
    ("data/download/store_copy.py", "file.truncate"): "the same: goes on behind the part it knows",
    ("data/download/store_copy.py", "os.rename"): "the folder appears",
    ("data/shards/tar_shards.py", "np.save"): "into the file of atomic_file",
    ("experiment/run_seal.py", "os.open"): "a secret, which is private from the first byte on",
    ("experiment/run_seal.py", "open"): "the same",
    ("experiment/run_seal.py", "os.link"): "the name appears with the whole file, and stays",
    ("model/torch_file.py", "torch.save"): "into memory, or the file of atomic_file",
    ("storage/mirror.py", "path.rename"): "a checkpoint that no longer counts is moved aside",
    ("storage/store_access.py", "self.filesystem.open"): "an object of a store, read back",
    (
        "experiment/machine.py",
        "PROCESS_CLEAR_REFS.write_text",
    ): "a switch of the kernel",
}


def call_name(node: ast.Call) -> str:
    return ast.unparse(node.func)


def opens_for_writing(node: ast.Call) -> bool:
    """Whether a mode or a flag of writing is among the arguments, or may be: it is a variable."""
    arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
    names = {n.attr for a in arguments for n in ast.walk(a) if isinstance(n, ast.Attribute)}
    if names & WRITING_FLAGS:
        return True
    if call_name(node) == "os.open":
        return not names & {"O_RDONLY"}
    for argument in arguments:
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
            mode = argument.value
            if set(mode) <= set("rwaxbt+") and set(mode) & WRITING_MODES:
                return True
    return False


def writing_calls(source: str) -> Iterator[tuple[str, int]]:
    """Every call that may write a file, with its line."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = call_name(node)
        last = name.rpartition(".")[2]
        writes = last in WRITING_CALLS or name in WRITING_FUNCTIONS
        if name == "write_text":  # without a path before the dot: that of utils/files.py
            writes = False
        if last in OPENING_CALLS:
            writes = opens_for_writing(node)
        if writes:
            yield name, node.lineno


def test_everything_is_written_through_the_atomic_writer() -> None:
    unknown = []
    used = set()
    for path in sorted(SOURCE.rglob("*.py")):
        file = path.relative_to(SOURCE).as_posix()
        for name, line in writing_calls(path.read_text("utf-8")):
            if (file, name) in ALLOWED:
                used.add((file, name))
            else:
                unknown.append(f"halfstep/{file}:{line}: {name}(…)")
    assert unknown == [], "write through halfstep.utils.atomic_files, or add a reason to ALLOWED"
    assert sorted(set(ALLOWED) - used) == [], "these are not there any more"


@pytest.mark.parametrize(
    "line",
    [
        "open(path, 'w')",
        "open(path, mode='ab')",
        "path.open('x')",
        "path.open('r+b', buffering=0)",
        "io.open(path, 'wt')",
        "gzip.open(path, 'wb')",
        "zipfile.ZipFile(path, 'w')",
        "os.open(path, os.O_CREAT | os.O_WRONLY)",
        "os.open(path, flags)",
        "os.fdopen(descriptor, 'wb')",
        "path.write_text(text)",
        "Path(path).write_bytes(data)",
        "shutil.copy(a, b)",
        "shutil.move(a, b)",
        "torch.save(x, path)",
        "save_file(tensors, path)",
        "safetensors.torch.save_file(tensors, path)",
        "np.save(path, array)",
        "np.savez(path, array)",
        "array.tofile(path)",
        "image.save(path)",
        "json.dump(value, file)",
        "tar.extractall(folder)",
        "tempfile.mkstemp()",
        "path.rename(other)",
    ],
)
def test_the_search_sees_each_way_to_write(line: str) -> None:
    assert len(list(writing_calls(line))) == 1


@pytest.mark.parametrize(
    "line",
    [
        "open(path)",
        "open(path, 'rb')",
        "path.open('rb')",
        "webbrowser.open(url)",
        "os.open(path, os.O_RDONLY | os.O_NOFOLLOW)",
        "text.replace('a', 'b')",
        "rng.save()",
        "model.save(path)",
        "json.dumps(value)",
        "write_text(path, text)",
        "values.copy()",
    ],
)
def test_the_search_leaves_the_rest_alone(line: str) -> None:
    assert list(writing_calls(line)) == []
