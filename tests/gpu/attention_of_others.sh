#!/bin/sh
# Runs the tests of attention kernels that others make, where python3 has kvdock, pytest and FlashInfer: sh tests/gpu/attention_of_others.sh
# The two distributions are installed into a folder of their own without their build tool. FlashInfer compiles four kernels, side by side.
set -u
cd "$(dirname "$0")/../.."
site=$(mktemp -d)
for name in flashinfer varlen; do
  cp -r "examples/${name}_attention/src/kvdock_$name" "$site"
  info="$site/kvdock_$name-1.0.0.dist-info"
  mkdir "$info"
  printf 'Metadata-Version: 2.1\nName: kvdock-%s\nVersion: 1.0.0\n' "$name" >"$info/METADATA"
  printf '[kvdock.backends]\n%s = kvdock_%s\n' "$name" "$name" >"$info/entry_points.txt"
done
export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
python3 -m kvdock.cli explain paged_attention --device cuda
tests="python3 -m pytest -q -p no:cacheprovider tests/gpu/test_attention_of_others.py"
for of in "order_is_read and flashinfer" test_capped; do
  for counts in decode prefill; do
    $tests -k "$of and $counts" >"$site/$of-$counts.log" 2>&1 &
  done
done
wait
$tests "$@"
code=$?
for name in flashinfer varlen; do
  (cd "examples/${name}_attention" && python3 -m pytest -q -p no:cacheprovider -rs --ignore tests/test_conformance.py) || code=1
done
rm -r "$site"
exit $code
