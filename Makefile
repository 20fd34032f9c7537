# A machine needs only Python >= 3.11: each target first runs `make setup`, which builds .venv, and
# rebuilds it if the pinned requirements, the package's metadata or the interpreter change.
#   make demo            the batch-scaling study on handwritten digits (under 3 minutes on 2 cores)
#   make test            all tests except the long ones                (under half an hour on 2 cores)
#   make test FILES='tests/optim tests/test_cli.py'       the tests of some folders or files
#   make lint            the checks of ruff, and of mypy in lamb_tpu
#   make format          formats the code with ruff
#   make test-long       the tests marked long
#   make test-all        all tests
#   make test-faults     runs killed at 20 moments: random, around decisions, with residuals; tables
#   make fuzz            random combinations of features against one device in float64, 20 minutes;
#                        FLAGS='--minutes=5 --seed=7'
#   make test-storage    runs on disks that are full, read-only, lost; killed in a save; with a table
#   make attack          1,000 bad inputs and 60 kills over all commands; writes the page of outcomes
#   make test-interchange  BERT beside transformers, image networks beside timm and torchvision;
#                        installs them and PyTorch
#   make docs            the documentation site in site/docs, with its links checked (under 3 minutes)
#   make report          the pages of all measurements: experiments/report, and HTML in site
#   make bench FLAGS=--data_dir=FOLDER   the benchmarks; FOLDER has MNIST's original files. Rows of
#                        PyTorch need the extra bench: .venv/bin/pip install -e '.[bench]'
#   make bench-distribution   one run on 1 to 8 devices and 1 to 4 processes: differences, traffic
#   make bench-tpu       the TPU compiler's estimates, without a TPU; on Linux with x86-64
#   make test PYTHON=python3.12          another interpreter

PYTHON ?= python3
# Processes that run the tests; each takes up to 3 GB.
JOBS ?= 2
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.ready-$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')

.PHONY: setup demo lint format test test-long test-all test-faults fuzz test-storage attack test-interchange report docs \
        bench bench-distribution bench-tpu clean

setup: $(STAMP)

$(STAMP): requirements.txt pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 14) else "error: PYTHON=$(PYTHON) is Python %d.%d; lamb_tpu needs 3.11, 3.12 or 3.13" % v)'
	$(PYTHON) -m venv --clear $(VENV)
	$(RUN) -m pip install --quiet --requirement requirements.txt
	$(RUN) -m pip install --quiet --no-deps --editable .
	@touch $@

demo: setup
	$(RUN) -m lamb_tpu.demo $(FLAGS)

docs: setup
	$(RUN) -m pip install --quiet --requirement docs/requirements.txt
	$(RUN) -m sphinx -q -W --keep-going -j auto -c docs -b html -d site/doctrees . site/docs
	$(RUN) docs/links.py site/docs
	@echo 'open site/docs/index.html'

lint: setup
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format: setup
	$(RUN) -m ruff format .

test: setup
	$(RUN) -m pytest -q -m "not long" -n $(JOBS) --dist loadfile $(FILES)

test-long: setup
	$(RUN) -m pytest -q -m long -n $(JOBS) --dist loadfile $(FILES)

test-all: test test-long

test-faults: setup
	$(RUN) -m pytest -q -s tests/test_faults.py tests/test_killing.py -m long

fuzz: setup
	$(RUN) -m tests.fuzz $(FLAGS)

test-storage: setup
	$(RUN) -m pytest -q -s tests/test_disks.py

attack: setup
	JAX_PLATFORMS=cpu $(RUN) -m experiments.attack --seed=0 --inputs=1000 --kills=60 --write $(FLAGS)

test-interchange: setup
	$(RUN) -m pip install --quiet --editable '.[interchange]'
	$(RUN) -m pytest -q tests/interchange

report: setup
	$(RUN) -m lamb_tpu.reproduce report --html=site

bench: setup
	$(RUN) -m experiments.bench.update_speed --write
	$(RUN) -m experiments.bench.train_loop --write $(FLAGS)
	$(RUN) -m experiments.bench.save_stall --write
	$(RUN) -m experiments.bench.side_by_side --write $(FLAGS)
	$(RUN) -m experiments.bench.convolution --write
	$(RUN) -m experiments.bench.lstm --write
	$(RUN) -m experiments.bench.step --write
	$(RUN) -m experiments.bench.start_up --write
	$(RUN) -m experiments.bench.agreement --write

bench-distribution: setup
	$(RUN) -m experiments.bench.distribution --write $(FLAGS)

bench-tpu: setup
	$(RUN) -m experiments.bench.update_tpu --write
	$(RUN) -m experiments.bench.lstm_tpu --write

clean:
	rm -rf $(VENV)
