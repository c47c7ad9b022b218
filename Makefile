# The whole of the development: `make demo` and `make test` work from a fresh clone.
#
# PYTHON=/path/to/python3.12 chooses the interpreter; each version has an environment of its own.
# ARGS are handed on to pytest, and to the benchmark by bench-echo and bench-peers.
# Nothing is fetched or rebuilt that is already there: stamps in the environment remember it.

PYTHON ?= python3
ifeq ($(origin PYTHON),file)
VENV := .venv
else
VENV := .venv-$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
endif
# `.venv` for the default interpreter gives .venv-asan, `.venv-3.12` gives .venv-asan-3.12.
ASAN := $(patsubst .venv%,.venv-asan%,$(VENV))

PY := $(VENV)/bin/python
ASAN_PY := $(ASAN)/bin/python
# One stamp for each extra of pyproject.toml that is installed.
DEPS := $(addprefix $(VENV)/.deps-,test dev bench peers conformance frameworks)
ASAN_DEPS := $(ASAN)/.deps-test
DEPS += $(VENV)/.deps-package $(VENV)/.deps-docs
NATIVE := $(wildcard _native/*.c _native/*.h _native/*.py _native/fast/*.c _native/fast/*.h)
PACKAGE := $(shell find aiozc -name '*.py')
C_FILES := $(wildcard tests/native/*.c tests/native/*.h _native/*.c _native/*.h _native/fast/*.c _native/fast/*.h bench/*.c bench/*.h bench/*/*.c)
# What changes the native module without changing a file of it.
FLAVOUR := werror=$(AIOZC_WERROR) sanitize=$(AIOZC_SANITIZE) faults=$(AIOZC_FAULTS) CC=$(CC) CFLAGS=$(CFLAGS)
FLAVOUR += static=$(AIOZC_STATIC_LIBURING)

.PHONY: build demo test slow full asan faults slow-faults native conformance frameworks lint format bench-echo \
	bench-peers clean distclean bootstrap FORCE
.NOTPARALLEL:

build: $(VENV)/.native

demo: build
	$(PY) -m aiozc demo

test: build
	$(PY) -m pytest tests -m "not slow" $(ARGS)

# pytest's status 5 says that there was no such test.
slow: build
	$(PY) -m pytest tests -m slow $(ARGS) || [ $$? -eq 5 ]

full: test slow asan faults slow-faults conformance frameworks

# The C programs, with leaks looked for, under Valgrind, with many seeds.
native: build
	$(PY) -m pytest tests/test_native.py $(ARGS)

conformance: build $(VENV)/.deps-conformance
	$(PY) scripts/conformance.py $(ARGS)

# Their servers and clients on our loop; Redis and PostgreSQL are Debian's packages (redis-server, postgresql).
frameworks: build $(VENV)/.deps-frameworks
	$(PY) -m pytest tests/frameworks $(ARGS)

bench-echo: build $(VENV)/.deps-bench
	$(PY) bench/echo.py $(ARGS)

bench-peers: build $(VENV)/.deps-bench $(VENV)/.deps-peers
	$(PY) bench/peers.py $(ARGS)

# -- packages and documentation --

.PHONY: dist wheel wheel-check docs stubs

full: docs

# What is in the tree, and everything that builds and tests it, without a compiler.
dist: $(VENV)/.deps-package
	rm -f dist/*.tar.gz
	AIOZC_NO_EXT=1 $(PY) -m build -q --sdist --outdir dist .

# From the sdist, not from the working tree: so nothing that lies about gets into it. liburing is inside;
# auditwheel gives it the tag that fits the C library it was built on.
wheel: dist
	rm -rf build/wheel dist/*.whl
	AIOZC_STATIC_LIBURING=1 $(PY) -m pip wheel -q --no-deps --wheel-dir build/wheel dist/*.tar.gz
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PY) -m auditwheel repair --wheel-dir dist build/wheel/*.whl
	$(PY) -m auditwheel show dist/*.whl

wheel-check: wheel
	$(PY) scripts/check_wheel.py dist/*.whl --without-liburing $(ARGS)

lint: $(VENV)/.deps-test $(VENV)/.deps-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy --strict aiozc
	@if command -v clang-format >/dev/null; then \
		echo "clang-format --dry-run -Werror $(C_FILES)"; \
		clang-format --dry-run -Werror $(C_FILES); \
	else \
		echo "clang-format is not here: C not checked"; \
	fi

# The site, in build/site. A warning, a dead link, a block of code that fails, or a stale picture is an error.
docs: build $(VENV)/.deps-docs
	$(PY) scripts/figures.py --check
	$(PY) -m pytest -q tests/test_code_blocks.py tests/test_states.py
	$(PY) -m mkdocs build --strict --quiet

stubs: build $(VENV)/.deps-dev
	$(PY) -m mypy.stubtest --mypy-config-file pyproject.toml --allowlist scripts/stubs_allowed.txt \
		--ignore-unused-allowlist aiozc._fast

format: $(VENV)/.deps-dev
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	clang-format -i $(C_FILES)

bootstrap:
	@PYTHON='$(PYTHON)' scripts/bootstrap.sh

$(PY) $(ASAN_PY): %/bin/python: | bootstrap
	$(PYTHON) -m venv $*

# AIOZC_NO_EXT: the native module has a rule of its own below.
$(DEPS) $(ASAN_DEPS): pyproject.toml setup.py
	$(@D)/bin/python -m pip install -q 'setuptools>=77' 'cffi>=1.16'
	AIOZC_NO_EXT=1 $(@D)/bin/python -m pip install -q --no-build-isolation \
		-e '.[$(patsubst .deps-%,%,$(@F))]'
	@touch $@

$(DEPS): | $(PY)
$(ASAN_DEPS): | $(ASAN_PY)

# In place: the working tree is what the environment imports.
$(VENV)/.native: $(NATIVE) $(VENV)/.deps-test $(VENV)/.flavour \
		$(if $(wildcard aiozc/_reactor_c*.so),,FORCE) | bootstrap
	$(PY) _native/build.py
	@touch $@

# Written anew only when it says something else, so that it is newer only then.
$(VENV)/.flavour: FORCE | $(PY)
	@echo '$(FLAVOUR)' | cmp -s - $@ || echo '$(FLAVOUR)' > $@

# A copy of the package, sanitized and with fault knobs, installed in an environment of its own: the
# module in the working tree stays what it is. PYTHONSAFEPATH keeps child interpreters from importing
# that one.
SANITIZED := LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0,abort_on_error=1 \
	UBSAN_OPTIONS=halt_on_error=1,print_stacktrace=1 \
	PYTHONMALLOC=malloc PYTHONSAFEPATH=1

# Left out: bounds on resident memory, which mean nothing under a sanitizer, and the scripts' own tests.
asan: $(ASAN)/.native
	$(SANITIZED) $(ASAN_PY) -m pytest tests -m "not slow" --capture=sys \
		--ignore tests/test_soak.py --ignore tests/test_conformance.py \
		-k "not less_than_a_gibibyte" $(ARGS)

# The contract and order tests under each fault knob (tests/fault_support.py).
faults: $(ASAN)/.native
	$(SANITIZED) $(ASAN_PY) scripts/faults.py $(ARGS)

# Slow tests that turn a knob themselves: `slow` has no build with knobs, and the two above leave out what is slow.
slow-faults: $(ASAN)/.native
	$(SANITIZED) $(ASAN_PY) -m pytest tests -m "slow and faults" --capture=sys $(ARGS)

$(ASAN)/.native: $(NATIVE) $(PACKAGE) $(ASAN_DEPS)
	rm -rf build/asan
	mkdir -p build/asan/scripts
	cp -r aiozc _native setup.py pyproject.toml MANIFEST.in README.md LICENSE build/asan/
	cp scripts/index_readme.py build/asan/scripts/ # setup.py asks it
	rm -f build/asan/aiozc/_reactor_c* build/asan/aiozc/_fast*.so
	AIOZC_SANITIZE=address,undefined AIOZC_FAULTS=1 $(ASAN_PY) -m pip install -q --no-build-isolation --no-deps \
		--force-reinstall ./build/asan
	rm -rf build/asan
	@touch $@

# Environments stay: `make distclean` removes them too.
clean:
	rm -rf build dist licenses site aiozc.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	rm -f aiozc/_reactor_c*.so aiozc/_reactor_c.c aiozc/_fast*.so aiozc/*.o _native/*.o .venv*/.native
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv .venv-*
