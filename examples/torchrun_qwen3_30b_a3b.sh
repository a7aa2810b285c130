#!/usr/bin/env bash
# Trainer ranks of one node; run it on every trainer node. Arguments are overrides, `train.steps=10`.
#
#   one node:   GPUS_PER_NODE=8 examples/torchrun_qwen3_30b_a3b.sh 'rollout.servers=[http://host:30000]'
#   two nodes:  NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 examples/torchrun_qwen3_30b_a3b.sh ...   # and NODE_RANK=1 on node1
#
# SIGTERM and SIGUSR1 go to the ranks, which finish the step, save, and exit; the same command goes on from there.
#
# Environment: CONFIG, NNODES, NODE_RANK, GPUS_PER_NODE, MASTER_ADDR, MASTER_PORT, and STOP_TIMEOUT_S, after which ranks
# that have not ended are killed: a step and a checkpoint must fit into it, and so long may GPUs idle when one rank fails.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# With tensor parallelism Megatron-Core wants kernels to be queued in the order of their launch.
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"

exec torchrun \
    --nnodes "${NNODES:-1}" \
    --node-rank "${NODE_RANK:-0}" \
    --nproc-per-node "${GPUS_PER_NODE:-8}" \
    --master-addr "${MASTER_ADDR:-127.0.0.1}" \
    --master-port "${MASTER_PORT:-29500}" \
    --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
    --shutdown-timeout "${STOP_TIMEOUT_S:-900}" \
    -m gspo_megatron train "${CONFIG:-examples/qwen3_30b_a3b.yaml}" "$@"
