# shellcheck shell=sh
# Enables effllm's metrics for every training job that is started from this shell:
#
#   source launch/efficientllm_config.sh
#
# A variable that is already set is kept.  bash and zsh can source this file from any folder, also repeatedly.
# `effllm env` prints every variable with its meaning.  docs/configuration.md has more explanations.

export EFFICIENTLLM_METRICS_ENABLED="${EFFICIENTLLM_METRICS_ENABLED:-true}"
export EFFICIENTLLM_COLLECTION_INTERVAL="${EFFICIENTLLM_COLLECTION_INTERVAL:-1.0}"
export EFFICIENTLLM_HISTORY_SIZE="${EFFICIENTLLM_HISTORY_SIZE:-1000}"
export EFFICIENTLLM_LOG_INTERVAL="${EFFICIENTLLM_LOG_INTERVAL:-auto}"
export EFFICIENTLLM_SINKS="${EFFICIENTLLM_SINKS:-console,tensorboard}"
export EFFICIENTLLM_RUN_DIR="${EFFICIENTLLM_RUN_DIR:-efficientllm_runs}"
export EFFICIENTLLM_ATTACH="${EFFICIENTLLM_ATTACH:-1}"

case "$(printf '%s' "$EFFICIENTLLM_METRICS_ENABLED" | tr -d '[:space:]' | tr '[:upper:]' '[:lower:]')" in
true | 1 | yes | on)
  printf '%s\n' 'EfficientLLM metrics'
  printf '  %-12s %s\n' \
    'samples' "every $EFFICIENTLLM_COLLECTION_INTERVAL s" \
    'reports' "every $(printf '%s' "$EFFICIENTLLM_LOG_INTERVAL" | sed 's/^auto$/10/') iterations$([ "$EFFICIENTLLM_LOG_INTERVAL" != auto ] || printf ', a second apart at least')" \
    'history' "$EFFICIENTLLM_HISTORY_SIZE iterations" \
    'sinks' "$EFFICIENTLLM_SINKS" \
    'run folders' "$EFFICIENTLLM_RUN_DIR"
  # effllm must be installed: a training script cannot import a package from the current folder.
  if ! "${PYTHON:-python3}" -c 'import sys; sys.path = [p for p in sys.path if p]; import effllm.records.wire' 2>/dev/null; then
    printf '%s\n' "effllm: ${PYTHON:-python3} cannot import effllm: no metrics until effllm is installed in the environment of the training" >&2
  elif ! "${PYTHON:-python3}" -m effllm env --check; then
    printf '%s\n' 'effllm: correct the EFFICIENTLLM_* variables named above and source this file again' >&2
    return 1
  fi
  ;;
false | 0 | no | off)
  printf '%s\n' "EfficientLLM metrics are off (EFFICIENTLLM_METRICS_ENABLED=$EFFICIENTLLM_METRICS_ENABLED)"
  ;;
*)
  printf '%s\n' "effllm: EFFICIENTLLM_METRICS_ENABLED='$EFFICIENTLLM_METRICS_ENABLED' is not usable: must be true, 1, yes or on, or false, 0, no or off" >&2
  return 1
  ;;
esac
