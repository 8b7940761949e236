-- Module file for Lmod: "module load effllm" measures the jobs of this shell. With Environment Modules, write the same
-- settings as "setenv NAME value". The Python package must be installed in the environment that runs the training.

help([[Measures LLM training jobs: goodput, tokens/s, MFU, energy, stragglers, stalls.
Off for one job: export EFFICIENTLLM_METRICS_ENABLED=0]])
whatis("Metrics of LLM training jobs")

setenv("EFFICIENTLLM_ATTACH", "1")
setenv("EFFICIENTLLM_LEDGER", "/srv/effllm-ledger")
setenv("EFFICIENTLLM_PRICE_PER_GPU_HOUR", "2.50")

local files = pathJoin(os.getenv("HOME"), ".config/efficientllm")
setenv("EFFICIENTLLM_SINKS", "console,tensorboard,prometheus:port=0:interface=ib0:tls_cert=" .. files .. "/cert.pem"
    .. ":tls_key=" .. files .. "/key.pem:token_file=" .. files .. "/token:discovery_dir=/srv/effllm-targets")
