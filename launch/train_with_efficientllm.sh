#!/usr/bin/env bash
# Trains with effllm's metrics: sources efficientllm_config.sh, then starts the given script.
set -euo pipefail

repository="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

usage() {
  cat <<'TEXT'
usage: train_with_efficientllm.sh SCRIPT NUM_GPUS [ARGUMENTS...]

  SCRIPT     train.py        started by torchrun, one process per GPU
             job.yaml        a run configuration for integration/SYSTEM/train.py, with 'system: SYSTEM';
                             or a configuration of LLaMA-Factory, with 'stage:', started by
                             llamafactory-cli
             pretrain.sh     started with bash; GPUS_PER_NODE and NPROC_PER_NODE are set to NUM_GPUS
  NUM_GPUS   number of processes on this machine (without GPUs: processes on the CPU)
  ARGUMENTS  arguments of SCRIPT

examples:
  launch/train_with_efficientllm.sh configs/demo.yaml 2
  launch/train_with_efficientllm.sh configs/demo.yaml 2 --tp 2 --iterations 20
  launch/train_with_efficientllm.sh my_training.py 8 --learning-rate 3e-4
  EFFICIENTLLM_LOG_INTERVAL=50 launch/train_with_efficientllm.sh run_mcore_qwen.sh 8 7B

PYTHON is the interpreter of the training.  The default is python3 and torchrun on PATH.
TEXT
}

refuse() {
  printf 'train_with_efficientllm.sh: %s\n\n' "$1" >&2
  usage >&2
  exit 2
}

system_of() { # YAML_FILE: the value of its 'system:' key
  sed -n "s/^system:[[:space:]]*[\"']\{0,1\}\([A-Za-z0-9_]*\)[\"']\{0,1\}[[:space:]]*\(#.*\)\{0,1\}$/\1/p" "$1" | head -n 1
}

torchrun_here() { # NUM_PROCESSES SCRIPT [ARGUMENTS...]
  local num_processes="$1" torchrun=(torchrun)
  shift
  if [[ -n "${PYTHON:-}" ]]; then
    torchrun=("$PYTHON" -m torch.distributed.run)
  elif ! command -v torchrun >/dev/null; then
    refuse 'torchrun is not on PATH: activate the environment of the training, or set PYTHON'
  fi
  # --standalone uses a free port, so that two jobs on one machine have different ports.
  exec "${torchrun[@]}" --standalone --local_addr 127.0.0.1 --nproc_per_node "$num_processes" "$@"
}

if [[ "${1:-}" == -h || "${1:-}" == --help ]]; then
  usage
  exit 0
fi
[[ $# -ge 2 ]] || refuse 'a script and a number of GPUs are needed'
script="$1" num_gpus="$2"
shift 2
[[ -f "$script" ]] || refuse "there is no file $script"
[[ "$num_gpus" =~ ^[1-9][0-9]*$ ]] || refuse "the number of GPUs must be a whole number, at least 1, not '$num_gpus'"

case "$script" in
*.py | *.sh) ;;
*.yaml | *.yml)
  if grep -q '^stage:' "$script" && [[ -z "$(system_of "$script")" ]]; then
    command -v llamafactory-cli >/dev/null ||
      refuse "$script is for LLaMA-Factory, but llamafactory-cli is not on PATH: activate the environment with it"
    # shellcheck source=launch/efficientllm_config.sh
    source "$repository/launch/efficientllm_config.sh"
    export NPROC_PER_NODE="$num_gpus"
    [[ "$num_gpus" == 1 ]] || export FORCE_TORCHRUN=1
    exec llamafactory-cli train "$script" "$@"
  fi
  system="$(system_of "$script")"
  [[ -n "$system" ]] || refuse "$script has no 'system:' key, the name of a folder in integration/"
  system_script="$repository/integration/$system/train.py"
  [[ -f "$system_script" ]] || refuse "$script: there is no integration/$system/train.py"
  set -- --config "$script" "$@"
  script="$system_script"
  ;;
*) refuse "$script is neither a .py, a .yaml nor a .sh file" ;;
esac

# shellcheck source=launch/efficientllm_config.sh
source "$repository/launch/efficientllm_config.sh"

if [[ "$script" == *.sh ]]; then
  export GPUS_PER_NODE="$num_gpus" NPROC_PER_NODE="$num_gpus"
  exec bash "$script" "$@"
fi
# torchrun also uses 1 if the variable is not set, but then it prints a banner.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
torchrun_here "$num_gpus" "$script" "$@"
