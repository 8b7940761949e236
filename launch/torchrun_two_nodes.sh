#!/usr/bin/env bash
# One training job on two or more nodes, measured by effllm.  Start this script on every node:
#
#   MASTER_ADDR=node0 NODE_RANK=0 launch/torchrun_two_nodes.sh train.py ...    # on node0
#   MASTER_ADDR=node0 NODE_RANK=1 launch/torchrun_two_nodes.sh train.py ...    # on node1
#
# Only node 0 prints metrics and writes the run folder.  The agents of other nodes send their reports to node 0,
# over the network of torchrun's rendezvous.
set -euo pipefail

: "${MASTER_ADDR:?set it to the address of the node with NODE_RANK=0}"
: "${NODE_RANK:?set it to 0 on the first node, 1 on the second}"
[[ $# -ge 1 ]] || { echo 'usage: torchrun_two_nodes.sh SCRIPT.py [ARGUMENTS...]' >&2; exit 2; }

# shellcheck source=launch/efficientllm_config.sh
source "$(dirname "${BASH_SOURCE[0]}")/efficientllm_config.sh"

torchrun=(torchrun)
[[ -z "${PYTHON:-}" ]] || torchrun=("$PYTHON" -m torch.distributed.run)

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "${torchrun[@]}" \
  --nnodes "${NNODES:-2}" \
  --node_rank "$NODE_RANK" \
  --master_addr "$MASTER_ADDR" \
  --master_port "${MASTER_PORT:-29500}" \
  --nproc_per_node "${NPROC_PER_NODE:-gpu}" \
  "$@"
