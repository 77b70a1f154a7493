# Everything starts here: `make help` lists the targets.
# Each target installs what it needs first. Nothing is installed outside .venv and the cache directory,
# except Debian packages by name (as root; otherwise you are told what to type).

SHELL := bash
# One shell per recipe, so that loops read as such.
.ONESHELL:
.SHELLFLAGS := --norc -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules --no-print-directory

CACHE := $(or $(AURA_CACHE),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/aura)
# What the trainer's tests use here; the nodes get theirs from the roles.
# Where pip is told of local wheels (find-links), a torch that lies there is taken; elsewhere the build for this
# machine's driver and cards, or torch's CPU build where there is none (TORCH_BACKEND: cpu, cu126, …).
TORCH_SPEC ?= $(shell grep '^torch==' requirements/torch.in)
BUILD_HERE := $(shell container/torch-build)
TORCH_BACKEND ?= $(BUILD_HERE)
# make image BASE=…: on this base, by its digest. TORCH: which build of torch is in it.
BASE ?=
TORCH ?= $(BUILD_HERE)
# Where make backup-keys writes and make restore-keys reads.
FILE ?= $(HOME)/aura-keys.tar.gz
# make wheels fills this directory; make controller WHEELS=… installs from it, without internet.
DIR ?= $(HOME)/aura-wheels
WHEELS ?=
# make roles ROLE=firewall tests one role only.
ROLE ?=
# make bench-learning SEEDS=5, make bench-modern SEEDS=3
SEEDS ?=
# make bench-wire ARMS='formats links' and make bench-learning ARMS='main delays' measure these groups of arms (all of
# them: ARMS=all).
ARMS ?=
# make bench-faults MINUTES=10 SEED=2: so long, other faults are drawn. TABLE=no: only those.
MINUTES ?=
SEED ?=
# make lock-torch BUILD=cu126 locks this build of torch; make wheels BUILD='cpu cu130' fetches these.
BUILD ?=

CONTROLLER_PACKAGES := python3 python3-venv ca-certificates openssh-client rsync
CHECK_PACKAGES := shellcheck
PICTURE_PACKAGES := chromium chromium-driver curl python3-matplotlib python3-selenium termtosvg

# molecule looks for ansible-config, and ansible-lint for ansible, on the PATH.
export PATH := $(CURDIR)/.venv/bin:$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Compiled modules are kept, whatever the shell says: the tests start Python and Ansible thousands of times.
unexport PYTHONDONTWRITEBYTECODE
# uv shall trust whom this machine trusts, as pip and apt do.
export UV_SYSTEM_CERTS := 1

STEP := tests/step
# uv's own version and hashes come from the controller's lock file.
UV_VERSION := $(shell sed -n 's/^uv==\([0-9.]*\).*/\1/p' requirements/controller.txt)
UV_VENV := $(CACHE)/uv-$(UV_VERSION)
ifneq ($(WHEELS),)
$(if $(wildcard $(WHEELS)/controller/*.whl),,$(error $(WHEELS) has no wheels: make wheels DIR=$(WHEELS), where there is internet))
export PIP_NO_INDEX := 1
export PIP_FIND_LINKS := $(abspath $(WHEELS))/controller
export UV_OFFLINE := 1
export UV_NO_INDEX := 1
export UV_FIND_LINKS := $(PIP_FIND_LINKS)
export UV_PYTHON_INSTALL_MIRROR := file://$(abspath $(WHEELS))/python
endif
UV := $(UV_VENV)/bin/uv
# Each stamp says: what this lock file names is in .venv.
CONTROLLER := .venv/.controller
TRAINER := .venv/.trainer-$(TORCH_BACKEND)
DEV := .venv/.dev
TOOLS := .venv/.tools

# ── what people type ─────────────────────────────────────────────────────────────────────────────

.PHONY: help
help: ## print this
	@echo "make <target>:"
	awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: demo
demo: $(CONTROLLER) ## build five virtual nodes on this machine, provision them, train on them, show the result
	@tests/e2e/demo

.PHONY: test
test: ## prove everything that can be proved here: check, ranks, roles, e2e, in this order
	@tests/all

.PHONY: check
check: $(DEV) $(TRAINER) check-packages ## the fast part of the tests: linters, types, our own checks, unit tests
	@python tests/run check

.PHONY: ranks
ranks: $(DEV) $(TRAINER) ## test the trainer as processes that meet over sockets, hang, die and go on
	@python tests/run ranks

.PHONY: house
house: $(DEV) ## print the house in figures: lines by room, longest functions, circles (beside a revision: BASE=)
	@python tests/house.py $(if $(BASE),--base $(BASE))

.PHONY: lint
lint: $(DEV) $(TRAINER) check-packages ## the linters only
	@python tests/run lint

.PHONY: roles
roles: $(DEV) ## test each role on a fresh virtual node (one only: make roles ROLE=firewall)
	@python tests/run roles $(ROLE)

.PHONY: e2e
e2e: $(DEV) $(TRAINER) ## test the whole cluster on five virtual nodes
	@pytest tests/e2e -m "not more" --durations=12

.PHONY: test-vm
test-vm: $(DEV) ## test on virtual machines what needs a kernel of its own: network cards, power cuts, the clock
	@pytest tests/vm -m "not more"

.PHONY: test-more
test-more: $(DEV) $(TRAINER) $(TOOLS) ## the tests that take too long for those two: before a release
	@python tests/run roles --more
	@pytest tests/training tests/vm tests/e2e tests/containers tests/null_card -m more

.PHONY: null-card
null-card: $(DEV) $(TRAINER) ## the memory of every preset, with torch's CUDA build (5 GB) on a card that computes nothing
	@python tests/null_card/presets.py

.PHONY: lab-up
lab-up: $(CONTROLLER) ## start the five virtual nodes and leave them running
	@tests/lab/lab up

.PHONY: lab-down
lab-down: ## remove the virtual nodes and everything that belongs to them
	@tests/lab/lab down

.PHONY: controller
controller: $(CONTROLLER) ## install what ansible-playbook needs on this machine, into .venv
	@case "$$(stat -c %A .)" in ????????w?)
	    echo "Everybody may write into $(CURDIR), so Ansible ignores the ansible.cfg there: chmod o-w . (On a drive of Windows" >&2
	    echo "that changes nothing: clone into your home there.)" >&2; exit 1 ;;
	esac
	@echo "Ready: source .venv/bin/activate"

.PHONY: backup-keys
backup-keys: ## put your clusters' keys into one file (FILE=…; ~/aura-keys.tar.gz): without them nobody gets into the nodes
	@inventory/keys backup "$(FILE)"

.PHONY: restore-keys
restore-keys: ## take them out of it again (FILE=…); keys that differ are never overwritten
	@inventory/keys restore "$(FILE)"

.PHONY: image
image: $(CONTROLLER) ## build the container image aura-trainer, for `docker compose run` (its torch: TORCH=cu126; on BASE=…)
	@container/build "$(CACHE)" .venv/bin/python "$(TORCH)" "$(BASE)"

.PHONY: wheels
wheels: $(CONTROLLER) ## fetch the wheels for a cluster without internet (DIR=…; ~/aura-wheels), with these builds of torch (BUILD='cpu cu130')
	@requirements/wheels "$(DIR)" .venv/bin/uv .venv/bin/python $(or $(BUILD),cpu)
	echo "$(DIR): $$(du -sh "$(DIR)" | cut -f1)"

.PHONY: packages
packages: $(CONTROLLER) ## list the Debian packages that the roles install (for a mirror)
	@python requirements/packages

.PHONY: setup
setup: $(CONTROLLER) $(TRAINER) $(DEV) check-packages ## install everything now, so that nothing has to be installed later
	@echo "Everything is installed: .venv ($$(du -sh .venv | cut -f1)), with $$(.venv/bin/python --version)."

.PHONY: bench
bench: $(DEV) $(TRAINER) ## measure speed and learning on this machine's CPU against two plain loops (10 minutes)
	@PYTHONPATH=$(CURDIR)/training python benchmarks/cpu.py

.PHONY: bench-gpu
bench-gpu: $(DEV) $(TRAINER) ## measure speed and memory of the presets on one GPU (10 minutes; with CORPUS=DIR also two models to one loss)
	@PYTHONPATH=$(CURDIR)/training python benchmarks/gpu.py
	@$(if $(CORPUS),PYTHONPATH=$(CURDIR)/training python benchmarks/to_loss.py --corpus $(CORPUS))

.PHONY: bench-learning
bench-learning: $(DEV) $(TRAINER) ## measure what few bits and a delay cost in loss, and the time to a loss, on the CPU (25 minutes; others: ARMS=, SEEDS=)
	@PYTHONPATH=$(CURDIR)/training python benchmarks/learning.py $(if $(SEEDS),--seeds $(SEEDS)) $(if $(ARMS),--arms $(ARMS))

.PHONY: bench-modern
bench-modern: $(DEV) $(TRAINER) ## measure what today's recipe and each of its ingredients are worth, on the CPU (40 minutes; goes on where it stopped; SEEDS=)
	@PYTHONPATH=$(CURDIR)/training python benchmarks/modern.py $(if $(SEEDS),--seeds $(SEEDS))

.PHONY: bench-wire
bench-wire: $(DEV) $(TRAINER) lab-up ## measure five ranks on the lab's shaped links, their GPUs emulated, against one (10 minutes; others: ARMS=)
	@PYTHONPATH=$(CURDIR)/training python benchmarks/wire.py --lab $(if $(ARMS),--arms $(ARMS))

.PHONY: bench-faults
bench-faults: $(DEV) $(TRAINER) ## measure what faults cost a run on the lab that make demo has left (35 minutes, and MINUTES=60 of drawn ones)
	@PYTHONPATH=$(CURDIR)/training:$(CURDIR)/tests/e2e python benchmarks/faults.py $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SEED),--seed $(SEED)) $(if $(filter no,$(TABLE)),--no-table)

.PHONY: format
format: $(DEV) ## write the Python files again as ruff formats them
	@ruff check --fix --quiet || true
	ruff format

.PHONY: pictures
pictures: $(TRAINER) ## draw the README's pictures again: the last demo (make e2e leaves its log), three short runs (5 minutes)
	@requirements/apt $(PICTURE_PACKAGES)
	docs/pictures/draw

.PHONY: docs
docs: $(DEV) ## write again what is made from the roles: the tables in their READMEs
	@python tests/check/role_tables.py

LOCK_TORCH = roles/python_env/files/lock-torch $(1) requirements/torch-$(1).txt $(UV) requirements/node.txt requirements/torch.in

.PHONY: lock
lock: $(UV) ## compile requirements/*.in again (newest versions: make lock UPGRADE=1)
	@compile() { # NAME LOCK [OPTION...]
	    $(STEP) "Compiling $$2" $(UV) pip compile --python-version 3.11 --generate-hashes --no-annotate --no-header \
	        $(if $(UPGRADE),--upgrade) "$${@:3}" "requirements/$$1.in" --output-file "$$2"
	}
	for name in controller node dev; do compile "$$name" "requirements/$$name.txt"; done
	# torch and what it brings: the trainer's.
	compile tools requirements/tools.txt --override <(echo "torch; sys_platform == 'never'")
	# The build of torch that PyPI has.
	$(call LOCK_TORCH,cu130)

.PHONY: lock-torch
lock-torch: $(UV) ## lock the hashes of another build of torch, from its own index (BUILD=cu126)
	@if [[ -z "$(BUILD)" ]]; then echo "Which one? make lock-torch BUILD=cu126" >&2; exit 1; fi
	$(call LOCK_TORCH,$(BUILD))

.PHONY: clean
clean: lab-down ## remove the lab, .venv and what the tools left behind (downloads and your clusters' keys stay)
	@rm -rf .venv .ansible .import_linter_cache .mypy_cache .pytest_cache .ruff_cache dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	if [[ -d "$(CACHE)" ]]; then echo "Downloads stay in $(CACHE) ($$(du -sh "$(CACHE)" | cut -f1)); remove them by hand if you like."; fi

# ── what those need ──────────────────────────────────────────────────────────────────────────────

.PHONY: check-packages
check-packages:
	@requirements/apt $(CHECK_PACKAGES)

.PHONY: trainer
trainer: $(TRAINER) ## install the trainer into .venv: the command aura, for who trains on this machine without nodes

$(UV): | requirements/controller.txt
	@requirements/apt $(CONTROLLER_PACKAGES)
	mkdir -p "$(CACHE)"
	# Built aside and renamed, so that an interrupted or a second make never sees half of it.
	new=$$(mktemp -d "$(CACHE)/uv.XXXXXX")
	trap 'rm -rf "$$new"' EXIT
	sed -n '/^uv==/,/[^\\]$$/p' requirements/controller.txt >"$$new/requirements.txt"
	$(STEP) "Installing uv $(UV_VERSION), which installs the rest" bash -euo pipefail -c '
	    python3 -m venv "$$1/venv"
	    "$$1/venv/bin/pip" install --quiet --only-binary :all: --require-hashes -r "$$1/requirements.txt"' - "$$new"
	rm -rf "$(UV_VENV)"
	mv "$$new/venv" "$(UV_VENV)"

# The system's Python if that is a 3.11 (Debian 12); elsewhere uv fetches one.
.venv/bin/python: | $(UV)
	@python=3.11
	kind=--managed-python
	for candidate in /usr/bin/python3 "$$(command -v python3)"; do
	    if "$$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11) or sys.version_info[3] != "final")' 2>/dev/null; then
	        python=$$candidate
	        kind=--no-managed-python
	        break
	    fi
	done
	$(STEP) "Making .venv with Python $$python" $(UV) venv --quiet --clear --no-project $$kind --python "$$python" .venv

UV_INSTALL = VIRTUAL_ENV="$(CURDIR)/.venv" $(STEP) $(1) $(UV) pip install --quiet

$(CONTROLLER): requirements/controller.txt | .venv/bin/python
	@requirements/apt $(CONTROLLER_PACKAGES)
	$(call UV_INSTALL,"Installing ansible (requirements/controller.txt)") --require-hashes -r $<
	touch $@

$(DEV): requirements/dev.txt $(CONTROLLER)
	@$(call UV_INSTALL,"Installing the test tools (requirements/dev.txt)") --require-hashes -r $<
	touch $@

.PHONY: tools
tools: $(TOOLS) ## install others' tools that use a model (TRL, lm-evaluation-harness) into .venv, for their test

# What lacks in the lock file, torch and what it brings, is not looked for.
$(TOOLS): requirements/tools.txt $(DEV) $(TRAINER)
	@$(call UV_INSTALL,"Installing TRL and lm-evaluation-harness (requirements/tools.txt)") --no-deps --require-hashes -r $<
	touch $@

# torch's hash depends on where it comes from, so it is not in the lock file; its dependencies are.
$(TRAINER): requirements/node.txt training/pyproject.toml $(CONTROLLER)
	@$(call UV_INSTALL,"Installing what the trainer needs (requirements/node.txt)") --require-hashes -r $<
	find_links=()
	for place in $${PIP_FIND_LINKS:-$$("$(UV_VENV)/bin/python" -m pip config get global.find-links 2>/dev/null || true)}; do
	    find_links+=(--find-links "$$place")
	done
	install=(env VIRTUAL_ENV="$(CURDIR)/.venv" $(UV) pip install)
	rm -f .venv/.trainer-* # only one build of torch can be there
	if [[ $${#find_links[@]} -gt 0 ]] &&
	    "$${install[@]}" --quiet --dry-run --no-index "$${find_links[@]}" "$(TORCH_SPEC)" 2>/dev/null; then
	    $(STEP) "Installing $(TORCH_SPEC) from the local wheels" "$${install[@]}" --no-index "$${find_links[@]}" "$(TORCH_SPEC)"
	else
	    $(STEP) "Installing $(TORCH_SPEC), the build for $(TORCH_BACKEND)" "$${install[@]}" --reinstall-package torch --torch-backend "$(TORCH_BACKEND)" "$(TORCH_SPEC)"
	fi
	$(STEP) "Installing the command aura (training/)" "$${install[@]}" --quiet --no-deps --no-build-isolation --editable ./training
	touch $@
