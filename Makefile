# All targets work in a new clone with only Python and make, because each target installs its packages into .venv.

PYTHON ?= python3
VENV := .venv
PEERS := .venv-peers
FRAMEWORKS := .venv-frameworks
LLAMA_FACTORY := .venv-llama-factory
SPARK := .venv-spark
TRACEML := .venv-traceml
DOCS := .venv-docs
FUZZ_SECONDS ?= 60
# Most tests wait for processes: three concurrent tests use two cores.
PARALLEL ?= -n 3 --dist loadgroup
BIN := $(VENV)/bin
# $(call files,MARK): the files with tests of a mark; the import of all files takes seconds.
files = $$(grep -rlE 'mark\.$(1)\>' --include='test_*.py' tests/unit tests/processes tests/faults)
comma := ,
# $(call installed,COMMAND): run COMMAND and print its duration; the durations of tests do not include it.
installed = begun=$$(date +%s) && $(1) && echo "Installed in $$(($$(date +%s) - begun)) s"
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt

# With these variables of the caller's shell, Python or pip may use a folder other than .venv, or each of the thousand
# test processes may compile its modules again.
unexport PYTHONDONTWRITEBYTECODE PYTHONPATH PYTHONHOME VIRTUAL_ENV PYTHONSAFEPATH PIP_USER PIP_TARGET \
	PIP_PREFIX PIP_REQUIRE_VIRTUALENV

.NOTPARALLEL:
.PHONY: help demo test-unit test test-faults test-trainer test-frameworks test-llama-factory test-spark test-all check docs fuzz \
	bench bench-scale bench-energy bench-compare bench-verdict bench-memory bench-traceml bench-look bench-gpu clean

help: ## List the targets (the default)
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-15s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/.ready ## Train a small GPT with Megatron on two processes and watch its efficiency
	@PYTHON=$(BIN)/python; export PYTHON; . launch/efficientllm_config.sh && \
	OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run --standalone --local_addr 127.0.0.1 \
		--nproc_per_node "$$($(NUM_PROCESSES))" integration/megatron_core/train.py --config configs/demo.yaml && \
	echo && echo 'Demo complete.'

# ARGUMENTS of the test targets: options of pytest, as in make test ARGUMENTS="-k straggler".
test-unit: $(VENV)/.unit ## Run the tests without processes and torch: a minute
	@$(BIN)/python -m pytest -n 2 --dist loadgroup tests/unit $(ARGUMENTS)

test: $(VENV)/.ready ## Run the tests: six minutes on two cores
	@$(BIN)/python -m pytest $(PARALLEL) $(ARGUMENTS)

test-faults: $(VENV)/.ready ## Run the short tests of faults: killed processes, full disks, cut networks, rejected peers
	@$(BIN)/python -m pytest $(PARALLEL) -m 'faults and not long and not alone' $(call files,faults) $(ARGUMENTS)

test-trainer: $(FRAMEWORKS)/.trainer ## Run one job of Hugging Face's Trainer with known counts
	@$(FRAMEWORKS)/bin/python -m pytest -m '' tests/frameworks/test_transformers.py -k 'two and lengths'

test-frameworks: $(FRAMEWORKS)/.ready ## Run the tests with transformers, TRL and other frameworks
	@$(FRAMEWORKS)/bin/python -m pytest $(PARALLEL) -m '' --timeout 300 tests/frameworks $(ARGUMENTS)

test-llama-factory: $(LLAMA_FACTORY)/.ready ## Run the tests with LLaMA-Factory, which needs older packages
	@$(LLAMA_FACTORY)/bin/python -m pytest -m '' tests/frameworks/test_integrations.py -k llama_factory

test-spark: $(SPARK)/.ready ## Run the test with Spark, which needs Java (apt install default-jre-headless)
	@$(SPARK)/bin/python -m pytest -m '' tests/frameworks/test_spark.py

# Tests that need a package of the system are skipped without it; CONTRIBUTING.md has the packages.
# The limit of open files is from effllm/network/listening.py: 1.2 times the number of ranks, plus 256.
SCALE_RANKS = $$(limit=$$(ulimit -Hn); [ "$$limit" = unlimited ] || [ "$$limit" -ge 12256 ] && echo 1000,10000 || echo 500)
# What .ci/run does not test, and the tests that run more examples or seeds here.
test-all: $(VENV)/.ready ## Run what CI does not: long tests, frameworks, the site, ten thousand ranks: 45 minutes
	@$(BIN)/python -m pytest $(PARALLEL) -m '(long or hypothesis or repeats) and not faults and not alone' \
		--hypothesis-profile=large
	@$(BIN)/python -m pytest $(PARALLEL) -m 'faults and long and not alone' $(call files,faults)
	@$(BIN)/python -m pytest -m alone $(call files,alone)
	@$(MAKE) --no-print-directory test-frameworks docs
	@if command -v java >/dev/null; then $(MAKE) --no-print-directory test-spark; else echo 'no Java: no test with Spark'; fi
	@$(MAKE) --no-print-directory bench-scale ARGUMENTS="--quick --ranks $(SCALE_RANKS)"

check: $(VENV)/.checkers ## Check the source: format, lint, types, unsafe calls, budgets of lines
	@$(BIN)/ruff format --check && $(BIN)/ruff check && $(BIN)/mypy && \
	$(BIN)/bandit -q -c pyproject.toml -r effllm launch integration benchmarks tests/scripts && \
	$(BIN)/python tests/code_report.py && echo 'Checks passed.'

# The pages of the site are the files of the repository, in the same folders: a relative link works in both.  With
# --quiet, mkdocs would not count warnings.
SITE_SOURCE := build/site-source
docs: $(DOCS)/.ready ## Build the documentation site in build/site, and check its pages and links
	@rm -rf $(SITE_SOURCE) && mkdir -p $(SITE_SOURCE)/benchmarks $(SITE_SOURCE)/tests && \
	ln -s $(addprefix '$(CURDIR)'/,README.md CONTRIBUTING.md SECURITY.md CHANGELOG.md docs integration configs launch) $(SITE_SOURCE) && \
	ln -s '$(CURDIR)'/benchmarks/results $(SITE_SOURCE)/benchmarks && \
	ln -s $(addprefix '$(CURDIR)'/tests/,unit processes faults frameworks) $(SITE_SOURCE)/tests
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict >build/docs.log 2>&1 || { grep -v ^INFO build/docs.log; exit 1; }
	@$(DOCS)/bin/python tests/check_site.py build/site && \
	echo 'The site begins with build/site/index.html.'

# Three minutes.  Failing inputs are written to build/fuzz; move an input to tests/corpus when its defect is fixed.
fuzz: $(VENV)/.fuzzer ## Search for bytes that cause errors, in frames, rings and run folders
	@for target in frames ring runfolder; do mkdir -p build/fuzz/$$target && \
	$(BIN)/python tests/fuzz_with_atheris.py $$target build/fuzz/$$target tests/corpus/$$target \
		-artifact_prefix=build/fuzz/ -max_total_time=$(FUZZ_SECONDS) -max_len=8000 || exit; done && echo 'No errors were found.'

bench: $(VENV)/.ready ## Measure the cost of effllm in a training job
	@$(BIN)/python -m benchmarks

# Five minutes.  ARGUMENTS: --keep, --quick, --ranks 100,1000, --arrival even, --security none
bench-scale: $(VENV)/.ready ## Measure an aggregator with ten thousand ranks
	@$(BIN)/python -m benchmarks.scale $(ARGUMENTS)

# Ten minutes.  ARGUMENTS: --keep, --quick, --set tuning, --tools effllm,Zeus
bench-energy: $(VENV)/.ready $(PEERS)/.ready ## Compare the errors of window energies, of effllm and of other tools
	@$(BIN)/python -m benchmarks.energy $(ARGUMENTS)

# Ten minutes.  ARGUMENTS: --keep, --pairs 500, --seed 2
bench-compare: $(VENV)/.ready ## Count false and missed differences of comparisons, of effllm and of other tools
	@$(BIN)/python -m benchmarks.compare $(ARGUMENTS)

# Half an hour; an interrupted benchmark continues.  ARGUMENTS: --fast-only (two minutes), --quick, --keep, --markdown
bench-verdict: $(VENV)/.ready ## Compare the verdicts on jobs with a planted cause with this cause
	@$(BIN)/python -m benchmarks.verdict $(ARGUMENTS)

# Ten minutes.  ARGUMENTS: --count 22, --seed 16, --megatron CHECKOUT, --keep, --gpu, --again benchmarks/results/FILE
bench-memory: $(FRAMEWORKS)/.ready ## Compare effllm fit with counted tensors, transformers, published peaks and others
	@OMP_NUM_THREADS=1 $(FRAMEWORKS)/bin/python -m benchmarks.memory $(ARGUMENTS)

# Five minutes: TraceML's own demonstration jobs, on the CPU.
bench-traceml: $(TRACEML)/.ready ## Compare the verdicts of TraceML and effllm on TraceML's demonstration jobs
	@$(TRACEML)/bin/python -m benchmarks.traceml $(ARGUMENTS)

# Two minutes.  ARGUMENTS: --keep, --realtime (as root), --ranks 1000
bench-look: $(VENV)/.ready $(PEERS)/.ready ## Measure effllm top and nvitop on a pseudo terminal
	@$(BIN)/python -m benchmarks.look $(ARGUMENTS)

# This takes ten minutes.  ARGUMENTS: --keep, --quick, --device 3
bench-gpu: $(VENV)/.ready ## Run all measurements on a machine with a GPU
	@$(BIN)/python -m benchmarks.gpu $(ARGUMENTS)

clean: ## Remove the files of these targets, except run folders
	rm -rf $(VENV) $(PEERS) $(FRAMEWORKS) $(LLAMA_FACTORY) $(TRACEML) $(SPARK) $(DOCS) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One process per GPU, at most two.  The import of torch is slow, so torch is used only if nvidia-smi lists a GPU.
NUM_PROCESSES = if nvidia-smi -L 2>/dev/null | grep -q GPU; \
	then $(BIN)/python -c 'import torch; print(min(torch.cuda.device_count() or 2, 2))'; else echo 2; fi

$(VENV)/.unit: $(VENV)/.made pyproject.toml constraints.txt
	@echo 'Installing effllm and pytest into $(VENV)'
	@$(call installed,$(PIP_INSTALL) --no-compile -e '.[test]')
	@touch $@

# Users install torch themselves.  For the demo and the tests, this target installs torch.
$(VENV)/.ready: $(VENV)/.made pyproject.toml constraints.txt
	@echo 'Installing effllm, megatron-core and torch into $(VENV): a few minutes, once'
	@$(call installed,$(PIP_INSTALL) -e '.[megatron$(comma)test]' torch)
	@touch $@ $(VENV)/.unit

$(VENV)/.fuzzer: $(VENV)/.ready
	@echo 'Installing atheris into $(VENV)'
	@$(PIP_INSTALL) -e '.[fuzz,test]'
	@touch $@

$(VENV)/.checkers: $(VENV)/.made pyproject.toml constraints.txt
	@echo 'Installing effllm and its checkers into $(VENV)'
	@$(PIP_INSTALL) -e '.[check]'
	@touch $@

# The compared tools are not in .venv: effllm does not need these tools, which have many dependencies.
$(PEERS)/.ready: $(VENV)/.made benchmarks/peers/requirements.txt
	@echo 'Installing the compared tools into $(PEERS)'
	@'$(PYTHON)' -m venv --clear $(PEERS)
	@$(PEERS)/bin/python -m pip install -qq --disable-pip-version-check -r benchmarks/peers/requirements.txt
	@touch $@

# The packages of one real job, which is a part of CI; .ready adds the other frameworks.
$(FRAMEWORKS)/.trainer: $(VENV)/.made pyproject.toml constraints.txt tests/frameworks/trainer.txt
	@echo 'Installing effllm, torch and transformers into $(FRAMEWORKS): a few minutes, once'
	@test -x $(FRAMEWORKS)/bin/python || '$(PYTHON)' -m venv --clear $(FRAMEWORKS)
	@$(call installed,$(FRAMEWORKS)/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt \
		-e '.[test]' torch -r tests/frameworks/trainer.txt)
	@touch $@

$(FRAMEWORKS)/.ready: $(VENV)/.made pyproject.toml constraints.txt tests/frameworks/requirements.txt
	@echo 'Installing effllm, torch and the frameworks into $(FRAMEWORKS): a few minutes, once'
	@test -x $(FRAMEWORKS)/bin/python || '$(PYTHON)' -m venv --clear $(FRAMEWORKS)
	@$(call installed,$(FRAMEWORKS)/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt \
		-e '.[test]' torch -r tests/frameworks/requirements.txt)
	@touch $@ $(FRAMEWORKS)/.trainer

# The site needs neither effllm nor torch: the API page is made from the source.
$(DOCS)/.ready: $(VENV)/.made docs/requirements.txt
	@echo 'Installing mkdocs into $(DOCS)'
	@test -x $(DOCS)/bin/python || '$(PYTHON)' -m venv --clear $(DOCS)
	@$(DOCS)/bin/python -m pip install -qq --disable-pip-version-check -r docs/requirements.txt
	@touch $@

$(TRACEML)/.ready: $(VENV)/.made pyproject.toml constraints.txt
	@echo 'Installing effllm, torch and TraceML into $(TRACEML)'
	@test -x $(TRACEML)/bin/python || '$(PYTHON)' -m venv --clear $(TRACEML)
	@$(TRACEML)/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e . torch traceml-ai==0.5.0
	@touch $@

$(LLAMA_FACTORY)/.ready: $(VENV)/.made pyproject.toml constraints.txt tests/frameworks/llama_factory.txt
	@echo 'Installing effllm, torch and LLaMA-Factory into $(LLAMA_FACTORY): a few minutes, once'
	@test -x $(LLAMA_FACTORY)/bin/python || '$(PYTHON)' -m venv --clear $(LLAMA_FACTORY)
	@$(LLAMA_FACTORY)/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt \
		-e '.[test]' torch -r tests/frameworks/llama_factory.txt
	@$(LLAMA_FACTORY)/bin/python -m pip install -qq --disable-pip-version-check --no-deps llamafactory==0.9.5
	@touch $@

$(SPARK)/.ready: $(VENV)/.made pyproject.toml constraints.txt
	@echo 'Installing effllm and Spark into $(SPARK): a few minutes, once'
	@test -x $(SPARK)/bin/python || '$(PYTHON)' -m venv --clear $(SPARK)
	@$(SPARK)/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[test]' 'pyspark>=4'
	@touch $@

$(VENV)/.made:
	@command -v '$(PYTHON)' >/dev/null || \
		{ echo "make: there is no $(PYTHON): install Python 3.10 or newer, or set PYTHON=/path/to/python3" >&2; exit 1; }
	@'$(PYTHON)' -c 'import sys; sys.exit(sys.version_info < (3, 10) and \
		"make: Python 3.10 or newer is needed, but $(PYTHON) is %d.%d: set PYTHON=/path/to/python3" % sys.version_info[:2])'
	@'$(PYTHON)' -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "make: $(PYTHON) cannot create virtual environments: on Debian and Ubuntu, apt install python3-venv" >&2; exit 1; }
	@'$(PYTHON)' -m venv --clear $(VENV)
	@touch $@
