# Two commands do everything on a new machine: `make demo` and `make test`.
#   make demo            set up, get data, pre-train a small GPT; again: goes on where it stopped
#   make demo CLEAN=1    the same from the beginning
#   make docs            build the site of docs/ into build/site
#   make gpu             on a machine with a GPU: tests and benchmarks that need one (docs/records/gpu.md)
#   make plan-grid       full simulated trainings against dry runs of `megatron-npu plan` (docs/records/plan.md)
#   make pythons         import, doctor, check and the unit tests without torch, with every Python that is here
#   make fuzz            the property-based tests with other examples in each of ROUNDS rounds (default: 1)
#   make sanitize        the tests of the compiled kernels, with AddressSanitizer and UndefinedBehaviorSanitizer
#   make test            set up and run the whole suite; clones the Megatron trees that it runs, if it can
# WORKERS: processes that run tests side by side; three keep two cores busy, because tests wait for their own processes
# VENV: the virtual environment; PYTHON: what makes it; TORCH: installed only if PYTHON has no torch.

VENV ?= .venv
PYTHON ?= python3
TORCH ?= torch==2.13.0
WORKERS ?= 3
PYTEST_ARGS ?=
PIECES ?=
ROUNDS ?= 1

.PHONY: demo docs test fuzz sanitize gpu plan-grid megatron pythons lint clean

demo: $(VENV)/demo.stamp
	$(VENV)/bin/python demo/run.py $(if $(CLEAN),--clean)

test: $(VENV)/test.stamp
	$(MAKE) --no-print-directory megatron || echo "some Megatrons are missing: their tests are skipped"
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	@# by folders, the quick unit tests last: xdist's own order ends with files of few but long tests
	@# a worker that is gone ends the run: xdist 3.8 may wait for its replacement for ever (--dist loadfile)
	@# mypy, a minute of one core, beside the tests; told last: what it finds may hang on the version of torch
	@$(VENV)/bin/mypy > $(VENV)/mypy.log 2>&1 & types=$$!; \
	$(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0 \
		$(PYTEST_ARGS); tests=$$?; \
	wait $$types; types=$$?; cat $(VENV)/mypy.log; test $$tests = 0 && test $$types = 0

docs: $(VENV)/docs.stamp
	$(VENV)/bin/python scripts/site_pages.py

# Where CI is set, Hypothesis draws the same examples each time: here it does not. A failure prints its seed.
fuzz: $(VENV)/test.stamp
	for round in $$(seq $(ROUNDS)); do \
		env -u CI $(VENV)/bin/python -m pytest -q -m hypothesis -n $(WORKERS) $(PYTEST_ARGS) || exit 1; \
	done

sanitize: $(VENV)/test.stamp
	$(VENV)/bin/python scripts/sanitize.py

gpu: $(VENV)/test.stamp
	$(VENV)/bin/python benchmarks/gpu_day.py $(PIECES)

plan-grid: $(VENV)/test.stamp
	$(VENV)/bin/python -m tests.sim.dry_grid --output benchmarks/results/plan/grid.json
	$(VENV)/bin/python -m tests.sim.dry_mistakes --output benchmarks/results/plan/mistakes.json
	$(VENV)/bin/python -m tests.sim.dry_record

megatron: $(VENV)/test.stamp
	PYTHON=$(VENV)/bin/python timeout 300 bash scripts/get_megatron.sh

pythons:
	$(PYTHON) scripts/every_python.py

lint: $(VENV)/test.stamp
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/mypy

$(VENV)/%.stamp: pyproject.toml setup.py scripts/make_venv.sh
	PYTHON="$(PYTHON)" TORCH="$(TORCH)" bash scripts/make_venv.sh "$(VENV)" "$*"
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
