#!/bin/sh
# Switches effllm on for the jobs of a site. Slurm runs this script as the user before each task (TaskProlog= in
# slurm.conf, or srun --task-prolog=FILE), and sets each printed "export NAME=value" in the environment of the task.
#
# A value of the user is kept. A user opts out with: export EFFICIENTLLM_METRICS_ENABLED=0
# A site opts partitions out with: case $SLURM_JOB_PARTITION in interactive|debug) exit 0 ;; esac

TARGETS=/srv/effllm-targets               # discovery folder of Prometheus
LEDGER=/srv/effllm-ledger                 # one line for each ended job
INTERFACE=ib0                             # of the page; Prometheus must reach it
FILES=$HOME/.config/efficientllm          # cert.pem, key.pem and token of the user, each with mode 0600

default() {
    eval "given=\${$1:-}"
    [ -n "$given" ] || echo "export $1=$2"
}

default EFFICIENTLLM_ATTACH 1
[ ! -d "$LEDGER" ] || default EFFICIENTLLM_LEDGER "$LEDGER"
if [ -r "$FILES/token" ]; then
    protected="interface=$INTERFACE:tls_cert=$FILES/cert.pem:tls_key=$FILES/key.pem:token_file=$FILES/token"
    default EFFICIENTLLM_SINKS "console,tensorboard,prometheus:port=0:$protected:discovery_dir=$TARGETS"
fi
