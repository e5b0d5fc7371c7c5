#!/bin/bash
# sbatch examples/cluster/slurm.sh: two machines of eight GPUs, a torchrun on each; the program takes nodes from the job.
#SBATCH --job-name=fusco
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=00:10:00
set -euo pipefail

ranks_per_host=${RANKS_PER_HOST:-8}
head_host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export FUSCO_LOG=INFO
# Where kernels are kept; a folder of a shared file system serves all hosts.
export FUSCO_CACHE_DIR=${FUSCO_CACHE_DIR:-$HOME/.cache/fusco}
# export NCCL_SOCKET_IFNAME=ib0   # the interface of NCCL's bootstrap, if the default route is another network

# --kill-on-bad-exit ends the job when a task fails: fusco names the rank, and nothing waits for the time limit.
srun --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_JOB_NUM_NODES" \
    --nproc-per-node "$ranks_per_host" \
    --rdzv-id "$SLURM_JOB_ID" \
    --rdzv-backend c10d \
    --rdzv-endpoint "$head_host:29500" \
    "${PROGRAM:-examples/moe_layer.py}"
