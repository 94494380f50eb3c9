#!/bin/bash
# GSM8K under Slurm: the first node trains on its GPUs, each further node samples with a vLLM on
# each of its GPUs. Prepare the data first: python data.py gsm8k.jsonl. Then:
#   sbatch --export=ALL,VENV=/shared/redrb,VLLM=/shared/vllm slurm.sh
# VENV and VLLM are virtual environments that all nodes see; redis-server is on PATH.
#SBATCH --job-name=gsm8k
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=08:00:00
#SBATCH --output=gsm8k-%j.log
set -euo pipefail

: "${VENV:?folder of the environment with redrb}" "${VLLM:?folder of the environment with vLLM}"
export VENV VLLM GPUS=${GPUS:-8} HERE=${SLURM_SUBMIT_DIR:-$PWD}
export REDRB_MODEL_NAME=${MODEL:-Qwen/Qwen2.5-0.5B-Instruct} REDRB_DATASET=$HERE/gsm8k.jsonl
export REDRB_RECIPE=$HERE/recipe.py REDRB_NAMESPACE=gsm8k-$SLURM_JOB_ID
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export HEAD=${nodes[0]} FOLDER=$HERE/gsm8k-$SLURM_JOB_ID
mkdir -p "$FOLDER/redis"
password=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
export REDRB_URL=redis://:$password@$HEAD:6379/0

serve() {  # the settings come from standard input, which no list of processes shows
  srun --overlap --nodes=1 --ntasks=1 --nodelist="$HEAD" redis-server - <<SETTINGS
port 6379
requirepass $password
dir $FOLDER/redis
appendonly yes
save ""
maxmemory 32gb
maxmemory-policy noeviction
SETTINGS
}

sample() {  # on each further node: a vLLM and a maker for each GPU
  for gpu in $(seq 0 $((GPUS - 1))); do
    CUDA_VISIBLE_DEVICES=$gpu VLLM_SERVER_DEV_MODE=1 "$VLLM/bin/vllm" serve "$REDRB_MODEL_NAME" \
      --weight-transfer-config '{"backend": "redrb"}' --enable-scale-out \
      --host 127.0.0.1 --port $((8000 + gpu)) --max-model-len 2048 \
      --logprobs-mode processed_logprobs &
    "$VENV/bin/redrb-maker" --engine-url "http://127.0.0.1:$((8000 + gpu))" --device cpu &
  done
  wait
}
export -f sample

train() {
  srun --overlap --nodes=1 --ntasks=1 --nodelist="$HEAD" "$VENV/bin/torchrun" \
    --nproc-per-node "$GPUS" -m redrb.cli.processes.trainer --shard --groups 4 \
    --checkpoints "$FOLDER/checkpoints" --metrics "$FOLDER/trainer.jsonl"
}

serve &
others=$((${#nodes[@]} - 1))
srun --overlap --nodes=$others --ntasks=$others --exclude="$HEAD" bash -c sample &
train  # when it ends the job ends, and Slurm ends the rest
