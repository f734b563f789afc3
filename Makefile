# The two commands of the README are `make demo` and `make test`; both make the environment.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NO_PACKAGES := echo "error: cannot install the packages, see above. Without a way to the public\
 registry, name a mirror in PIP_INDEX_URL and UV_DEFAULT_INDEX, or a proxy in HTTPS_PROXY." >&2; exit 1

.PHONY: install demo test faults lint monitoring docker-check docs lock cuda-check clean

install: $(STAMP)

$(BIN)/uv: requirements-uv.lock
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "clawstream needs Python 3.11 or later; set PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-uv.lock || { $(NO_PACKAGES); }
	touch $@

$(STAMP): $(BIN)/uv requirements.lock pyproject.toml
	$(BIN)/uv pip sync --python $(BIN)/python --require-hashes requirements.lock || { $(NO_PACKAGES); }
	$(BIN)/uv pip install --python $(BIN)/python --no-deps --no-build-isolation --editable .
	touch $@

# A real conversation becomes a new policy version. ARGS="--json summary.json" keeps the figures.
demo: install
	$(BIN)/clawstream demo $(ARGS)

# One process for each core, each with a broker of its own. ARGS="tests/unit -k window" runs a part,
# ARGS="-n 0" all of it in one process.
test: install
	$(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(ARGS)

# The fault matrix. ONLY=zombie plays one case, JSON=path keeps the figures, ARGS=--list shows all.
faults: install
	$(BIN)/python -m tests.faults $(if $(ONLY),--only $(ONLY)) $(if $(JSON),--json $(JSON)) $(ARGS)

# On a machine with an NVIDIA GPU: the same numbers as on the CPU, speed, memory. JSON=path.
cuda-check: install
	$(BIN)/clawstream bench cuda-check $(if $(JSON),--json $(JSON)) $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Check alerts and their tests with promtool (taken from Debian's package if it is not there).
monitoring:
	docker/monitoring/check

# Lint the Dockerfile, and hold the compose file to its schema. Needs no container engine.
docker-check: install
	docker/check

# Bring what the pages in docs/ take from the code up to date.
docs: install
	$(BIN)/python docs/generate.py

# Resolve the newest dependencies again. Hashes only: no registry's address goes into the files.
lock: $(BIN)/uv
	$(BIN)/uv pip compile pyproject.toml --all-extras --universal --python-version 3.11 --upgrade \
	  --generate-hashes --no-emit-index-url --no-header --quiet -o requirements.lock
	echo uv | $(BIN)/uv pip compile - --universal --python-version 3.11 --upgrade \
	  --generate-hashes --no-emit-index-url --no-header --quiet -o requirements-uv.lock

# Everything that runs left behind: broker, registry, adapters, models, logs.
clean:
	-test -x $(BIN)/clawstream && $(BIN)/clawstream kafka down
	rm -rf .clawstream
