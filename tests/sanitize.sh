#!/bin/sh
# Run the codec's tests on a kernel that gcc compiled with AddressSanitizer and UndefinedBehaviorSanitizer.
# Usage, in the root of the repository: tests/sanitize.sh PYTHON [pytest's arguments]
set -eu
python=$(realpath -s "$1")
shift
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
cp -r redrb tests setup.py pyproject.toml README.md LICENSE "$tree"
cd "$tree"
rm -f redrb/codec/_core.*.so
CFLAGS="-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g -O1 -DREDRB_NO_CLONES" \
  "$python" setup.py -q build_ext --inplace
ls redrb/codec/_core.*.so # fails where nothing was compiled

# Python itself was compiled without sanitizers and frees little at its end: their libraries are loaded
# before it, leaks are not looked for, and all memory comes from malloc, which they watch. Tests of the
# plain kernel are left out: there is nothing to find in them, and they take minutes here.
export PYTHONPATH="$tree" PYTHONMALLOC=malloc ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1
LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)" \
  "$python" -m pytest -p no:cacheprovider --timeout 1200 -k "not [plain" \
  tests/unit/test_codec*.py tests/unit/test_table_values.py tests/unit/test_balance.py "$@"
