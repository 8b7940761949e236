#!/usr/bin/env bash
# Fine-tunes a tiny Llama with LLaMA-Factory, measured by effllm: run.sh [lora|full] [NUM_PROCESSES]
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
method="${1:-lora}" num_processes="${2:-1}"
python="${PYTHON:-python3}"

"$python" "$here/make_model.py" out/llama_factory

# LLaMA-Factory imports torchaudio, but does not use torchaudio for text. If torchaudio is missing, an empty module is
# sufficient.
if ! "$python" -c 'import torchaudio' 2>/dev/null; then
  mkdir -p out/llama_factory/stand_in
  : >out/llama_factory/stand_in/torchaudio.py
  export PYTHONPATH="$PWD/out/llama_factory/stand_in${PYTHONPATH:+:$PYTHONPATH}"
fi

exec "$here/../../launch/train_with_efficientllm.sh" "$here/llama_${method}_sft.yaml" "$num_processes"
