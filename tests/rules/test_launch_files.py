"""The launch files of examples/launch: as far as they can be checked without a cluster."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[2] / "examples" / "launch"


def test_the_slurm_script_is_a_script() -> None:
    subprocess.run(["bash", "-n", LAUNCH / "slurm.sh"], check=True)


def test_the_slurm_script_starts_torchrun_with_options_that_it_has(tmp_path: Path) -> None:
    """srun and scontrol are stand-ins; torchrun is the real one, told to run on this machine."""
    for name, lines in {
        "srun": 'exec "$@"',
        "scontrol": "echo localhost",
        "torchrun": f'exec "{sys.executable}" -m torch.distributed.run "$@"',
    }.items():
        program = tmp_path / name
        program.write_text(f"#!/bin/bash\n{lines}\n")
        program.chmod(0o755)
    train = tmp_path / "train.py"
    train.write_text("import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])")
    bash = shutil.which("bash")
    assert bash is not None
    result = subprocess.run(
        [bash, LAUNCH / "slurm.sh", train],
        env={
            "PATH": f"{tmp_path}:/usr/bin:/bin",
            "SLURM_JOB_NODELIST": "localhost",
            "SLURM_NNODES": "1",
            "SLURM_GPUS_ON_NODE": "2",
            "SLURM_JOB_ID": "7",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert sorted(result.stdout.splitlines()) == ["rank 0 of 2", "rank 1 of 2"]


def test_the_kubernetes_file_parses_and_every_pod_runs_the_same() -> None:
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load((LAUNCH / "pytorchjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    specs = job["spec"]["pytorchReplicaSpecs"]
    assert specs["Master"]["replicas"] == 1
    assert specs["Master"]["template"] == specs["Worker"]["template"]
    containers = specs["Master"]["template"]["spec"]["containers"]
    assert [container["name"] for container in containers] == ["pytorch"]
    assert re.fullmatch(r"/app/runs", containers[0]["volumeMounts"][0]["mountPath"])
