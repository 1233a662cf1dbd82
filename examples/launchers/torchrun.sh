#!/bin/bash
# torchrun on several nodes: training goes on with the nodes that are left. Run this on each node, and on a new one.
#
#     export CKPT_DOMAIN=zone-a/rack-7                # what fails together with this node
#     examples/launchers/torchrun.sh 3:4 stable:29400 first examples/fsdp2.py s3://bucket/run --steps 10000
#
# The arguments: how few and how many nodes, where the rendezvous store listens, the launch id, the program.
# docs/guides/nodes.md explains the settings and starts the rendezvous store.
set -eu
nodes=$1 rendezvous=$2 launch=$3
shift 3

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export PET_NPROC_PER_NODE=${PET_NPROC_PER_NODE:-auto} # each option of torchrun has such a variable
exec torchrun --nnodes "$nodes" --max-restarts 100 --rdzv-id "$launch" \
    --rdzv-backend c10d --rdzv-endpoint "$rendezvous" \
    --rdzv-conf is_host=0,last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=5 "$@"
