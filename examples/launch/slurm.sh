#!/bin/bash
# Two nodes, one process for each of their GPUs: sbatch examples/launch/slurm.sh train.py
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --signal=TERM@120
set -euo pipefail

# The first node of the job is where all processes meet.
first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

srun torchrun \
  --nnodes "$SLURM_NNODES" \
  --nproc-per-node "${SLURM_GPUS_ON_NODE:-1}" \
  --rdzv-backend c10d \
  --rdzv-endpoint "$first_node:29500" \
  --rdzv-id "$SLURM_JOB_ID" \
  --max-restarts 3 \
  "$@"
