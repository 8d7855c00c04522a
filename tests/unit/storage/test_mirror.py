"""What a run makes gets into the store, and comes back; and who may write there."""

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from halfstep import checkpoint
from halfstep.checkpoint.health import HEALTH_FILE, Health
from halfstep.errors import Notice, StoreError
from halfstep.storage.mirror import RECORD_FILE, StoreMirror, working_folder
from halfstep.storage.store_access import RetryPolicy
from halfstep.storage.store_checkpoints import IndexReader, OlderAttemptError, commit_checkpoint
from tests.support.faulty_store import SECRET, FaultyFileSystem, use_faulty_store

URL = "faulty://bucket/run"
STORED = "bucket/run"
RETRIES = RetryPolicy(tries=3, first_delay_s=0.001, max_delay_s=0.01)


class Machine:
    """A computer with a folder of its own, which saves checkpoints and uploads them."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HALFSTEP_OUT", str(path))
        self.mirror = StoreMirror(URL, "out")
        self.mirror.retries = RETRIES
        self.mirror.keep = 2
        self.folder = self.mirror.folder

    def save(self, step: int, value: float | None = None, health: Health | None = None) -> None:
        tree = {"step": step, "value": torch.full((100,), float(step if value is None else value))}
        extra = {HEALTH_FILE: (health or Health()).encode()}
        with (self.folder / "log.jsonl").open("a") as log:
            log.write(f'{{"step": {step}}}\n')
        checkpoint.save(self.folder / checkpoint.name_of(step), tree, extra_files=extra)
        self.mirror.notify()

    def finish(self) -> None:
        self.mirror.finish(show=False)

    @property
    def names(self) -> list[str]:
        return [path.name for path in checkpoint.listing(self.folder)]

    def newest(self) -> float:
        path = checkpoint.latest(self.folder)
        assert path is not None
        return float(checkpoint.load(path).tree["value"][0])


class Machines:
    """As many computers as a test needs, and the store's folder."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.monkeypatch = monkeypatch
        self.count = 0
        self.set_faults()

    def set_faults(self, **settings: float) -> None:
        use_faulty_store({"folder": str(self.root / "store"), **settings})

    def add(self) -> Machine:
        self.count += 1
        return Machine(self.root / f"machine-{self.count}", self.monkeypatch)

    def stored(self) -> list[str]:
        """The steps that have a manifest in the store."""
        run = self.root / "store" / STORED
        return sorted({path.parent.name for path in run.glob("step-*/manifest-*.json")})

    def objects(self, pattern: str) -> list[Path]:
        return sorted((self.root / "store" / STORED).glob(pattern))


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    yield Machines(tmp_path, monkeypatch)
    use_faulty_store({"folder": str(tmp_path)})


def names(*steps: int) -> list[str]:
    return [checkpoint.name_of(step) for step in steps]


def start_run(machines: Machines, *steps: int) -> Machine:
    machine = machines.add()
    machine.mirror.begin(None)
    for step in steps:
        machine.save(step)
    machine.finish()
    return machine


def test_a_fresh_machine_gets_the_newest_checkpoint_and_its_log(machines: Machines) -> None:
    first = start_run(machines, 10, 20, 30)
    assert machines.stored() == names(20, 30)  # keep=2
    second = machines.add()
    second.mirror.fetch()
    assert second.names == names(30)
    assert second.newest() == 30
    assert (second.folder / "log.jsonl").read_text().count("\n") == 3
    assert first.folder != second.folder


def test_every_other_file_is_uploaded_too(machines: Machines) -> None:
    machine = machines.add()
    machine.mirror.begin(None)
    (machine.folder / "report.html").write_text("<p>")
    (machine.folder / "events").mkdir()
    (machine.folder / "events" / "one").write_bytes(b"\0" * 1000)
    (machine.folder / ".hidden").write_text("no")
    (machine.folder / "link").symlink_to("/etc/hostname")
    machine.save(1)
    machine.finish()
    relative = [
        path.relative_to(machines.root / "store" / STORED).as_posix()
        for path in machines.objects("**/*")
        if path.is_file() and not path.parent.name.startswith("step-")
    ]
    assert relative == ["attempts/0000001.json", "events/one", "log.jsonl", "report.html"]


def test_nothing_is_visible_before_all_of_it_is_there(machines: Machines) -> None:
    """A store that stops in any call: what counts then is a whole checkpoint, or none."""
    counts = set()
    for call in range(1, 60, 4):
        (machines.root / "store").mkdir(exist_ok=True)
        machines.set_faults()
        machine = machines.add()
        machine.mirror.start_over([])
        machine.mirror.begin(None)
        machine.finish()
        machine.save(call)
        machines.set_faults(down=call)
        with suppress(StoreError):  # what the thread does, without one
            machine.mirror._upload_all(machine.mirror._connect(), threading.Event())
        machines.set_faults()
        index = IndexReader(machines.add().mirror._connect().store).read()
        fresh = machines.add()
        fresh.mirror.fetch()
        counts.add(len(fresh.names))
        assert fresh.names == [stored.name for stored in index.checkpoints]
        assert index.broken == {}
    assert counts == {0, 1}


@pytest.mark.parametrize("damage", ["cut", "changed", "removed", "manifest", "log"])
def test_a_damaged_checkpoint_is_passed_over_and_named(machines: Machines, damage: str) -> None:
    start_run(machines, 10, 20)
    [tensors] = machines.objects("step-000000020/*tensors.safetensors")
    [manifest] = machines.objects("step-000000020/manifest-*.json")
    [log] = machines.objects("step-000000020/*log.jsonl")
    content = tensors.read_bytes()
    if damage == "cut":
        tensors.write_bytes(content[:-1])
    elif damage == "changed":
        tensors.write_bytes(content[:-1] + b"\x07")
    elif damage == "removed":
        tensors.unlink()
    elif damage == "manifest":
        manifest.write_bytes(manifest.read_bytes()[:100])
    else:
        log.write_bytes(log.read_bytes().replace(b"20", b"21"))

    fresh = machines.add()
    expected = r"1 checkpoint of faulty://bucket/run damaged, step-000000010 is used instead"
    with pytest.warns(Notice, match=expected):
        fresh.mirror.fetch()
    assert fresh.names == names(10)
    assert fresh.newest() == 10
    # The log is that of the checkpoint, or longer: a run cuts it back to where it goes on.
    log_lines = (fresh.folder / "log.jsonl").read_text().splitlines()
    assert log_lines in (['{"step": 10}'], ['{"step": 10}', '{"step": 20}'])

    # The run goes on from there, and the damaged one goes when its successor is in the store.
    fresh.mirror.check_no_other_run(10)
    fresh.mirror.begin(10)
    fresh.save(20, value=21)
    fresh.save(30)
    fresh.finish()
    assert machines.stored() == names(20, 30)
    last = machines.add()
    last.mirror.fetch()
    assert last.newest() == 30


def test_an_older_attempt_uploads_nothing_more(machines: Machines) -> None:
    first = start_run(machines, 10)
    second = machines.add()
    second.mirror.fetch()
    second.mirror.begin(10)
    second.save(20, value=2020)
    second.finish()
    manifests = {path: path.read_bytes() for path in machines.objects("**/manifest-*.json")}

    first.save(20, value=1020)
    first.save(30)
    with pytest.warns(Notice, match=r"attempt 2 of this run writes to faulty://bucket/run, this "):
        first.finish()
    assert machines.stored() == names(10, 20)
    assert {path: path.read_bytes() for path in machines.objects("**/manifest-*.json")} == manifests
    fresh = machines.add()
    fresh.mirror.fetch()
    assert fresh.newest() == 2020


def test_what_an_older_attempt_commits_in_a_race_does_not_count(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its look at the attempts came right before the newer one began."""
    first = start_run(machines, 10)
    second = machines.add()
    second.mirror.fetch()
    second.mirror.begin(10)
    second.save(20, value=2020)
    second.finish()

    class SlowReader(IndexReader):
        """Has seen the attempts before there was a second one."""

        def read_attempts(self, objects: object = None) -> dict[int, int]:
            return {1: -1}

    manifests = {path: path.read_bytes() for path in machines.objects("**/manifest-*.json")}
    first.save(20, value=1020)
    first.save(30, value=1030)
    store = first.mirror._connect().store
    with pytest.raises(OlderAttemptError, match="attempt 2 of this run"):
        commit_checkpoint(IndexReader(store), 1, first.folder / checkpoint.name_of(20), {})
    monkeypatch.setattr(store, "list", lambda folder="": {})  # nor any manifest
    for step in (20, 30):
        path = first.folder / checkpoint.name_of(step)
        stored = commit_checkpoint(SlowReader(store), 1, path, {})
        assert stored.number == (2 if step == 20 else 1)  # the newer one's name was taken
    assert {path: path.read_bytes() for path in manifests} == manifests
    fresh = machines.add()
    fresh.mirror.fetch()
    assert fresh.newest() == 2020

    # The newest attempt clears them away.
    second.save(40)
    second.finish()
    assert machines.stored() == names(20, 40)
    assert len(machines.objects("step-000000020/manifest-*.json")) == 1


def test_a_machine_whose_run_went_on_elsewhere_moves_its_own_steps_aside(
    machines: Machines,
) -> None:
    first = start_run(machines, 10)
    machines.set_faults(down=1)
    first.mirror._stop.set()
    first.save(20, value=1020)  # never uploaded
    machines.set_faults()
    second = machines.add()
    second.mirror.fetch()
    second.mirror.begin(10)
    second.save(15, value=2015)
    second.finish()

    with pytest.warns(Notice, match=r"attempt 2 of this run went on elsewhere without step-0+20"):
        first.mirror.fetch()
    assert first.names == names(10, 15)
    assert first.newest() == 2015
    [aside] = first.folder.glob(".halfstep-abandoned-*/step-000000020")
    assert checkpoint.load(aside).tree["value"][0] == 1020


def test_a_store_that_is_away_stops_nothing_and_nothing_is_removed(machines: Machines) -> None:
    machine = machines.add()
    machine.mirror.begin(None)
    machines.set_faults(down=1)
    for step in (10, 20, 30, 40):
        start = time.monotonic()
        machine.save(step)
        assert time.monotonic() - start < 5
        # As Checkpoint prunes: only what is in the store counts.
        uploaded = machine.mirror.uploaded()
        assert checkpoint.prune(machine.folder, 1, successors=uploaded) == []
    deadline = time.monotonic() + 20
    while machine.mirror._problem is None and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.warns(Notice, match=r"Training goes on; what it makes waits in") as caught:
        machine.mirror.warn_of_problems()
    machine.mirror.warn_of_problems()  # no second time: a warning is an error here
    machine.mirror.give_up_after_s = 0.1
    with pytest.warns(Notice, match=r"not uploaded to .*: step-000000010, step-0+20") as at_end:
        machine.finish()
    assert SECRET not in f"{caught[0].message} {at_end[0].message}"
    assert machines.stored() == []

    # The same machine uploads it in its next run.
    machines.set_faults()
    again = Machine(machine.folder.parent, machines.monkeypatch)
    again.mirror.fetch()
    again.mirror.begin(40)
    again.finish()
    assert machines.stored() == names(30, 40)


def test_a_new_run_is_refused_where_there_is_one(machines: Machines) -> None:
    start_run(machines, 10)
    fresh = machines.add()
    with pytest.raises(FileExistsError, match=r"holds checkpoints of another run, up to step-0+10"):
        fresh.mirror.check_no_other_run(None)
    with pytest.raises(
        FileExistsError, match=r"goes on from step 5, and faulty://bucket/run holds"
    ):
        fresh.mirror.check_no_other_run(5)
    fresh.mirror.start_over(["log.jsonl"])
    fresh.mirror.check_no_other_run(None)
    fresh.mirror.begin(None)
    assert machines.objects("log.jsonl") == []
    assert machines.stored() == names(10)  # until its successor is there
    fresh.save(5)
    fresh.finish()
    assert machines.stored() == names(5)


def test_failed_checkpoints_do_not_push_out_good_ones(machines: Machines) -> None:
    machine = machines.add()
    machine.mirror.begin(None)
    machine.save(10)
    machine.save(20)
    for step in (30, 40, 50):
        machine.save(step, health=Health(nonfinite=("weight",)))
    machine.finish()
    assert {*names(10, 20)} < {*machines.stored()}
    fresh = machines.add()
    fresh.mirror.fetch()
    with pytest.warns(Notice, match="training that had failed"):
        assert fresh.newest() == 20


def test_a_checkpoint_that_is_replaced_has_a_second_manifest(machines: Machines) -> None:
    machine = start_run(machines, 10, 20)
    path = machine.folder / checkpoint.name_of(20)
    checkpoint.runs.replace(path, {"value": torch.full((100,), 77.0)})
    machine.finish()
    assert [path.name for path in machines.objects("step-000000020/manifest-*.json")] == [
        "manifest-0002.json"
    ]
    fresh = machines.add()
    fresh.mirror.fetch()
    assert fresh.newest() == 77


def test_no_file_of_the_store_leads_out_of_the_folder(machines: Machines) -> None:
    """A manifest that somebody else wrote, with a right seal."""
    from halfstep.storage.store_checkpoints import _seal, _unseal

    start_run(machines, 10)
    [manifest] = machines.objects("step-000000010/manifest-0001.json")
    content = _unseal(manifest.read_bytes())
    assert content is not None
    for name in ("../evil.jsonl", "/tmp/evil.jsonl", ".hidden", "a/../../b"):
        log = content["logs"]["log.jsonl"]
        manifest.write_bytes(_seal({**content, "logs": {name: log}}))
        fresh = machines.add()
        with pytest.warns(Notice, match="damaged, no whole one is left"):
            fresh.mirror.fetch()
        assert fresh.names == []


def test_a_run_that_was_killed_in_its_first_manifest_can_begin_again(machines: Machines) -> None:
    start_run(machines, 10)
    [manifest] = machines.objects("step-000000010/manifest-0001.json")
    manifest.write_bytes(manifest.read_bytes()[:100])
    fresh = machines.add()
    with pytest.warns(Notice, match=r"damaged, no whole one is left:\n.*the beginning of one"):
        fresh.mirror.fetch()
    fresh.mirror.check_no_other_run(None)
    manifest.write_bytes(b'{"format": "of another program"}\n')
    with pytest.raises(FileExistsError, match="up to damaged ones"):
        fresh.mirror.check_no_other_run(None)


def test_a_store_that_lets_nobody_remove_has_everything_all_the_same(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: FaultyFileSystem, path: str) -> None:
        raise PermissionError("AccessDenied")

    monkeypatch.setattr(FaultyFileSystem, "rm_file", refuse)
    with pytest.warns(Notice, match=r"older checkpoints stay in the store: .*AccessDenied"):
        machine = start_run(machines, 10, 20, 30)
    assert machines.stored() == names(10, 20, 30)
    assert machine.mirror.missing() == []


def test_the_folder_says_where_it_belongs(machines: Machines) -> None:
    machine = start_run(machines, 10)
    record = (machine.folder / RECORD_FILE).read_text()
    assert URL in record
    assert working_folder(machine.mirror.url) == machine.folder


def test_a_url_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a store that can be written"):
        StoreMirror("https://host/run", "out")


def test_an_older_attempt_that_saves_while_a_newer_one_begins_is_no_obstacle(
    machines: Machines,
) -> None:
    """It commits between the newer one's look for a checkpoint and its claim."""
    first = start_run(machines, 10)
    second = machines.add()
    second.mirror.fetch()
    first.save(20, value=1020)
    first.finish()
    second.mirror.check_no_other_run(10)
    second.mirror.begin(10)
    second.save(15, value=2015)
    second.finish()
    fresh = machines.add()
    fresh.mirror.fetch()
    assert fresh.newest() == 2015
