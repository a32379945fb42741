#!/bin/bash
# Two machines of eight GPUs each: sbatch recipes/accelerate/slurm.sh --config recipes/clip_flickr8k.yaml
#SBATCH --job-name=hf_infcl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=04:00:00
set -euo pipefail

# One task a machine; accelerate starts one process a GPU on it.
head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
processes=$((SLURM_NNODES * SLURM_GPUS_ON_NODE))

srun bash -c '
    accelerate launch --config_file recipes/accelerate/multi_node.yaml \
        --num_machines "$SLURM_NNODES" --num_processes "$0" --machine_rank "$SLURM_NODEID" \
        --main_process_ip "$1" recipes/finetune_clip.py "${@:2}"
' "$processes" "$head_node" "$@"
