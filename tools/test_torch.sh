#!/bin/sh
# Tests of the PyTorch package, as a user would have it: a virtual environment in .venv with PyTorch from PyPI, this package installed by pip,
# pytest over 1, 2 and 4 processes on the CPU. Ends with one line that counts the cases: "N passed, N failed, N skipped".
#
#   MOK_TEST_DEVICE=cuda     on a GPU, where ranks are virtual
#   VENV=DIR  PYTHON=PROGRAM another environment, another Python (3.10 or later)
cd "$(dirname "$0")/.." || exit 1
venv=${VENV:-.venv}
python=${PYTHON:-python3}
mkdir -p build-pip
log=build-pip/test-torch.log

give_up() {
    echo "$1"
    echo "0 passed, 1 failed, 0 skipped"
    exit 1
}

if [ ! -x "$venv/bin/python" ]; then
    command -v "$python" >/dev/null 2>&1 || sh tools/need.sh python3 || give_up "there is no $python"
    "$python" -m venv "$venv" 2>/dev/null || { sh tools/need.sh python3-venv && "$python" -m venv "$venv"; } || give_up "no virtual environment could be made in $venv"
fi
py=$venv/bin/python
"$py" -c "import torch, pytest, numpy, setuptools" 2>/dev/null ||
    "$py" -m pip install -q torch pytest numpy "setuptools>=70" matplotlib || give_up "PyTorch and pytest could not be installed in $venv"
sh tools/need.sh cmake gcc g++ make || give_up "a compiler and cmake are needed"
[ "${MOK_TEST_DEVICE:-cpu}" = cpu ] && cuda=OFF || cuda=AUTO
MOK_CUDA=${MOK_CUDA:-$cuda} "$py" -m pip install -q --no-build-isolation --no-deps --force-reinstall . || give_up "the package could not be built"

"$py" -m pytest -q -rs --tb=short tests/torch "$@" >"$log" 2>&1
status=$?
[ "$status" -eq 0 ] || grep -v '^DEBUG ' "$log" | tail -n 300
grep '^SKIPPED' "$log"
count() { tail -n 5 "$log" | grep -oE "[0-9]+ $1" | tail -n 1 | grep -oE '^[0-9]+' || echo 0; }
passed=$(count passed) failed=$(count failed) errors=$(count 'errors?') skipped=$(count skipped)
failed=$((failed + errors))
[ "$status" -ne 0 ] && [ "$failed" -eq 0 ] && failed=1
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
