# Two commands do everything on a fresh machine with Python >= 3.10 and a network: `make demo` and `make test`.
PYTHON ?= python3
PY := .venv/bin/python
PIP := $(PY) -m pip install -q --disable-pip-version-check
BENCH ?= ../shared/bench/actor_bench.py
ROUNDS ?= 3
MINUTES ?= 3

.PHONY: demo test lint bench soak clean

demo: .venv/stamp-demo
	$(PY) -u examples/train_digits.py --out demo.png

test: .venv/stamp-test
	$(PY) -m pytest

lint: .venv/stamp-dev .venv/stamp-test  # mypy also reads monarch.config.testing, which imports pytest
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(PY) -m mypy tests/typing
	.venv/bin/lint-imports

# make bench PEER=/path/to/python-with-torchmonarch
bench: .venv/stamp-test
	$(PY) benchmarks/compare.py --bench $(BENCH) --rounds $(ROUNDS) $(if $(PEER),--peer $(PEER))

# make soak MINUTES=10: processes are killed, frozen and crashed while clients keep calling
soak: .venv/stamp-test
	$(PY) benchmarks/soak.py --minutes $(MINUTES)
	$(PY) benchmarks/fuzz_wire.py --seconds 60

.venv/stamp:
	$(PYTHON) -m venv .venv
	touch $@

# torch first and pinned: a CPU build where one is offered, and nothing that depends on it picks another
.venv/stamp-torch: .venv/stamp constraints-dev.txt
	$(PIP) -c constraints-dev.txt torch
	touch $@

.venv/stamp-%: .venv/stamp-torch pyproject.toml
	$(PIP) -c constraints-dev.txt -e '.[$*]'
	touch $@

clean:
	rm -rf .venv build demo.png .mypy_cache .ruff_cache .pytest_cache .hypothesis
