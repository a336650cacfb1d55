# make demo  - sets everything up and runs the main job
# make test  - sets everything up and passes the tests
# The rest is listed by `make help`. Everything a clone makes is in .venv/, build/ and the state directory below.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:

# Debian's own interpreter where it is new enough: its headers and venv come from apt, below.
PYTHON ?= $(shell /usr/bin/python3 -c 'import sys; print("/usr/bin/python3" if sys.version_info >= (3, 11) else "python3")' 2>/dev/null || echo python3)
VENV := .venv
PY := $(VENV)/bin/python
CC ?= cc
BUILD := build

# Where kernel, initramfs, runtime drive and image are kept: shared by every clone of the same user, keyed by content.
ifeq ($(shell id -u),0)
ASSETS ?= /var/lib/sandboxd/assets
else
ASSETS ?= $(or $(XDG_DATA_HOME),$(HOME)/.local/share)/sandboxd/assets
endif
export SANDBOX_TEST_ASSETS := $(ASSETS)

APT := qemu-system-x86 bubblewrap mmdebstrap e2fsprogs erofs-utils lz4 xz-utils zstd \
       gcc libc6-dev make pkg-config git ca-certificates python3 python3-venv python3-dev util-linux procps uidmap \
       nftables iproute2 libseccomp2 libcap-dev skopeo umoci
# Sanitizer and fuzzing builds use clang; a user who only runs the demo does not need it.
APT_TEST := $(APT) clang llvm libclang-rt-14-dev cpio openssh-client openssh-server curl musl-tools docker-registry zsh fish

# What the benchmarks stand beside. Its services are not started.
APT_BENCH := haproxy nginx-light libnginx-mod-stream

CFLAGS_HARD := -std=c11 -O2 -g -Wall -Wextra -Werror -fstack-protector-strong -D_FORTIFY_SOURCE=2
LDFLAGS_HARD := -Wl,-z,relro,-z,now
PROGRAMS := $(BUILD)/sandbox-vsock $(BUILD)/guest-init $(BUILD)/guest-exec

.PHONY: help demo install test standins own-kernel agents agents-test lint conformance conformance-firecracker check-kvm bench bench-check soak units fuzz clean setup apt apt-test apt-test-install apt-bench apt-bench-install assets programs sanitizers

help:
	@sed -n 's/^\(demo\|install\|test\|agents-test\|lint\|conformance\|conformance-firecracker\|check-kvm\|bench\|bench-check\|soak\|units\|fuzz\|clean\|assets\):.*## /  make \1 - /p' Makefile

demo: setup assets ## set everything up, then run a small agent on a small repository in a VM
	@mkdir -p $(BUILD)/demo
	@bash tests/demo/demo.sh $(abspath $(BUILD))/demo/repository

test: setup apt-test sanitizers standins assets lint agents ## set everything up and pass the tests
	@$(PY) -m pytest -q -n 2 --dist worksteal || { code=$$?; [ $$code = 1 ] || exit $$code; \
	    echo; echo "== what failed, once more and alone: a busy machine can be too slow for a test. Look at it all the same =="; \
	    $(PY) -m pytest -q --last-failed --last-failed-no-failures none; }

# Installed by the product itself, once for each version, and kept beside the assets.
agents: setup assets
	@$(PY) -m tests.agents.installed claude codex

agents-test: setup apt-test assets agents ## real agents do a real task in VMs, and a fleet of five; part of `make test`
	$(PY) -m pytest -q -n 2 --dist worksteal -rs tests/agents tests/path/test_agents.py tests/path/test_fleet.py

# A package of its own Python environment, so that nothing else on the machine can change what runs as root.
PREFIX ?= /opt/sandbox-cli
CONFIG ?= /etc
install: setup ## as root: install below PREFIX (/opt/sandbox-cli), with systemd units and an example policy
	test -x $(PREFIX)/bin/python || $(PYTHON) -m venv $(PREFIX)
	$(PREFIX)/bin/python -m pip install -q --disable-pip-version-check --require-hashes -r requirements-run.lock
	rm -rf $(BUILD)/lib* $(BUILD)/bdist* $(BUILD)/wheel
	$(PY) -m pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation -w $(BUILD)/wheel .
	$(PREFIX)/bin/python -m pip install -q --disable-pip-version-check --no-deps --force-reinstall $(BUILD)/wheel/*.whl
	install -d $(PREFIX)/libexec $(PREFIX)/share/doc $(CONFIG)/systemd/system $(CONFIG)/systemd/user
	install -m 755 $(PROGRAMS) $(PREFIX)/libexec
	install -m 644 README.md docs/*.md $(PREFIX)/share/doc
	sed 's|@PREFIX@|$(PREFIX)|g' packaging/systemd/system.service.in > $(CONFIG)/systemd/system/sandboxd.service
	sed 's|@PREFIX@|$(PREFIX)|g' packaging/systemd/user.service.in > $(CONFIG)/systemd/user/sandboxd.service
	install -d -m 755 $(CONFIG)/sandboxd
	install -d -m 700 $(CONFIG)/sandboxd/tokens
	test -e $(CONFIG)/sandboxd/policy.yaml || install -m 644 packaging/policy.yaml $(CONFIG)/sandboxd/policy.yaml
	test -e $(CONFIG)/sandboxd/environment || install -m 644 packaging/environment $(CONFIG)/sandboxd/environment
	@echo; echo "Installed. To start it:  systemctl daemon-reload && systemctl enable --now sandboxd"

lint: $(VENV)/ready ## ruff and mypy (strict)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

conformance: setup apt-test assets ## start a daemon with real VMs and hold it against the API's specification
	@$(PY) -m tests.conformance.live $(if $(ROW),--row $(ROW))

conformance-firecracker: setup apt-test standins assets ## the same through the Firecracker backend, with stand-ins for it
	@$(PY) -m tests.conformance.live --firecracker $(if $(ROW),--row $(ROW))

# Says why, and does no more, where there is no KVM to check with. OPTIONS are the program's: --firecracker PATH.
check-kvm: setup apt-test ## where KVM works: the real Firecracker under conformance, timing and attack; prints a report to send us
	@$(PY) -m tests.hardware.check $(OPTIONS)

bench: setup apt-bench assets ## all benchmarks, or a part with ONLY=name; figures in bench/out/latest.json
	$(PY) bench/run.py $(if $(ONLY),--only $(ONLY)) $(if $(SHORT),--short)

# With SHORT=1 it first takes rough figures, and a ratio may be twice as bad as its floor.
bench-check: setup apt-bench assets ## compare the figures of `make bench` with the floors in bench/pins.toml
	$(if $(SHORT),$(PY) bench/run.py --short)
	$(PY) bench/check.py $(if $(SHORT),--factor 2)

units: setup apt-test assets ## install into a Debian machine with systemd, emulated, and try the units there
	SOAK=1 $(PY) -m pytest -q tests/packaging/test_units.py --timeout 3600

soak: setup apt-test sanitizers standins own-kernel assets ## the tests with large counts; prints its seed
	RELAY_LIVES=20000 $(MAKE) -s -C native test
	SOAK=1 $(PY) -m pytest -q -n 2 --dist worksteal --timeout 3600

fuzz: setup apt-test ## fuzz what reads a guest's bytes, SECONDS each (default 60)
	$(MAKE) -C native/vsock fuzz SECONDS=$(or $(SECONDS),60)
	$(PY) tests/egress/fuzz $(or $(SECONDS),60)

clean: ## remove what was built here; the assets stay in the state directory
	rm -rf $(BUILD) $(VENV) bench/out *.egg-info native/_native*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +

setup: apt $(VENV)/ready programs

# Asks dpkg first, so that a second run needs neither root nor the network.
define apt_install
	@missing=$$(for p in $(1); do \
	    dpkg-query -W -f='$${Status}' $$p 2>/dev/null | grep -q 'ok installed' || echo $$p; done); \
	if [ -n "$$missing" ]; then \
	    if [ "$$(id -u)" = 0 ]; then \
	        echo "installing: $$missing"; \
	        apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing >/dev/null; \
	    else \
	        echo "These packages are missing. Let root run once:"; echo; \
	        echo "    apt-get update && apt-get install -y --no-install-recommends" $$missing; echo; exit 1; \
	    fi; \
	fi
endef

apt:
	@[ "$$(uname -m)" = x86_64 ] || { echo "sandbox-cli's virtual machines are for x86_64, and this machine is $$(uname -m);" \
	    "docs/firecracker.md says what is missing for arm64"; exit 1; }
	$(call apt_install,$(APT))

# Debian starts a service as it installs it, unless there is a policy against that (invoke-rc.d(8)).
define apt_unstarted
	@policy=/usr/sbin/policy-rc.d; \
	if [ "$$(id -u)" = 0 ] && [ ! -e $$policy ] && ! dpkg-query -W $(1) >/dev/null 2>&1; then \
	    printf '#!/bin/sh\nexit 101\n' > $$policy; chmod 755 $$policy; trap "rm -f $$policy" EXIT; \
	    $(MAKE) -s $(2); \
	else $(MAKE) -s $(2); fi
endef

apt-test: apt
	$(call apt_unstarted,$(APT_TEST),apt-test-install)

apt-test-install:
	$(call apt_install,$(APT_TEST))

apt-bench: apt
	$(call apt_unstarted,$(APT_BENCH),apt-bench-install)

apt-bench-install:
	$(call apt_install,$(APT_BENCH))

$(VENV)/ready: requirements.lock pyproject.toml setup.py native/build.py $(wildcard native/*.h native/*.c) | apt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q --disable-pip-version-check --require-hashes -r requirements.lock
	$(PY) -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation --config-settings editable_mode=compat -e .
	touch $@

programs: $(PROGRAMS)

.PHONY: $(BUILD)/sandbox-vsock
$(BUILD)/sandbox-vsock: | apt
	@$(MAKE) -s -C native/vsock all

# These two run inside the guest, where no shared library is to be relied on. Their bytes are part of what images are
# known by, so where the clone is must not be in them.
$(BUILD)/guest-init $(BUILD)/guest-exec: $(BUILD)/guest-%: native/guest_%.c Makefile | apt
	@mkdir -p $(BUILD)
	$(CC) $(CFLAGS_HARD) -ffile-prefix-map=$(CURDIR)=. -static $(LDFLAGS_HARD) -o $@ $<

standins: $(BUILD)/firecracker-standin

# Test tool only: stands for Firecracker where there is none. Not among PROGRAMS, so nothing installs it.
$(BUILD)/firecracker-standin: tests/firecracker_standin/shim.c | apt
	@mkdir -p $(BUILD)
	$(CC) $(CFLAGS_HARD) -static $(LDFLAGS_HARD) -o $@ $<

# A kernel as an operator may bring one, for tests of --kernel in `make soak`.
own-kernel: $(BUILD)/own-kernel/vmlinux

$(BUILD)/own-kernel/vmlinux: tests/kernel/build.sh tests/kernel/config | apt
	$(call apt_install,flex bison bc libelf-dev)
	bash tests/kernel/build.sh

# The C pieces again under ASan and UBSan, with their own tests.
sanitizers: apt-test $(VENV)/ready
	$(MAKE) -s -C native test
	$(MAKE) -s -C native/vsock asan

assets: setup
	@$(VENV)/bin/sandboxd prepare --assets-dir $(ASSETS)
