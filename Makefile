# A thin front over CMake for people. `make demo` and `make test` are all a newcomer needs. `make` builds all, tests too; `make lib` the library and the tool.
BUILD ?= build
JOBS  ?= $(shell nproc 2>/dev/null || echo 2)
CTEST  = ctest --output-on-failure -j $(JOBS)

.PHONY: all lib tools demo test test-asan test-tsan test-torch test-long install clean

all: tools
	@cmake -S . -B $(BUILD) >$(BUILD).log 2>&1 || { cat $(BUILD).log; exit 1; }
	@cmake --build $(BUILD) -j $(JOBS)

lib: tools
	@cmake -S . -B $(BUILD) >$(BUILD).log 2>&1 || { cat $(BUILD).log; exit 1; }
	@cmake --build $(BUILD) -j $(JOBS) --target mok mok_tool

# What is missing is installed, saying so; nothing is touched that is there.
tools:
	@sh tools/need.sh cmake gcc g++ make

demo: lib
	@sh tools/demo.sh $(BUILD)

test: all
	@sh tools/test.sh $(BUILD)

# Sanitizers see host code and the emulator; the kernels are compiled by `make`.
test-asan: tools
	@cmake -S . -B $(BUILD)-asan -DMOK_SANITIZE=address,undefined -DMOK_CUDA=OFF >$(BUILD)-asan.log 2>&1 || { cat $(BUILD)-asan.log; exit 1; }
	@cmake --build $(BUILD)-asan -j $(JOBS)
	@sh tools/test.sh $(BUILD)-asan

test-tsan: tools
	@cmake -S . -B $(BUILD)-tsan -DMOK_SANITIZE=thread -DMOK_CUDA=OFF >$(BUILD)-tsan.log 2>&1 || { cat $(BUILD)-tsan.log; exit 1; }
	@cmake --build $(BUILD)-tsan -j $(JOBS)
	@sh tools/test.sh $(BUILD)-tsan

# The PyTorch package, in a virtual environment that this makes.
test-torch:
	@sh tools/test_torch.sh

# Hours: the emulator over many seeds, then every mutant of the kernels.
test-long: all
	@MOK_TEST_SEEDS=20 sh tools/test.sh $(BUILD) -L emu
	@python3 tools/mutate.py --build $(BUILD) --jobs $(JOBS)

install: lib
	@cmake --install $(BUILD) $(if $(PREFIX),--prefix $(PREFIX))

clean:
	rm -rf $(BUILD) $(BUILD)-asan $(BUILD)-tsan $(BUILD)*.log
