#!/usr/bin/env bash
# Breaks one promise at a time and looks whether the simulator notices. Part of the long tests.
#
#   tests/mutants.sh [NAME...]     all of tests/mutants/*.patch, or those named
#
# Each patch is applied to a copy of the workspace; a mutant is killed when a test fails, and alive when none does.
# EBBTIDE_SEEDS and EBBTIDE_STEPS bound the search (200 and 300). Exits with 1 when one lives or does not apply.
set -uo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export CARGO_TARGET_DIR=${EBBTIDE_MUTANTS_TARGET:-$root/target/mutants}
export EBBTIDE_SEEDS=${EBBTIDE_SEEDS:-200} EBBTIDE_STEPS=${EBBTIDE_STEPS:-300} RUST_BACKTRACE=0
seconds_max=${EBBTIDE_MUTANT_SECONDS_MAX:-600}

cd "$scratch" || exit 1
tar -C "$root" --exclude ./target --exclude ./.git -cf - . | tar -xf -

# Tests that a mutant has to survive; quick ones first.
run_tests() {
    timeout "$seconds_max" cargo test --offline -q -p ebbtide-core -p ebbtide-tier-log --lib || return 1
    timeout "$seconds_max" cargo test --offline -q -p ebbtide-sim --test engine || return 1
    timeout "$seconds_max" cargo test --offline -q -p ebbtide-sim --test properties -- --skip same_seed || return 1
}

names=("$@")
if [ ${#names[@]} = 0 ]; then
    for patch in "$root"/tests/mutants/*.patch; do names+=("$(basename "$patch" .patch)"); done
fi

failed=0
printf '%-44s %-7s %8s  %s\n' mutant verdict seconds "killed by"
for name in "${names[@]}"; do
    patch=$root/tests/mutants/$name.patch
    began=$SECONDS
    if ! patch -s -p1 --forward <"$patch" >"$scratch.log" 2>&1; then
        printf '%-44s %-7s %8s  %s\n' "$name" STALE - "the patch does not apply"
        failed=1
        continue
    fi
    if ! cargo test --offline -q -p ebbtide-sim --no-run >"$scratch.log" 2>&1; then
        verdict=BROKEN by="it does not compile: $(grep -m1 '^error' "$scratch.log")"
        failed=1
    elif run_tests >"$scratch.log" 2>&1; then
        verdict=ALIVE by=
        failed=1
    else
        verdict=killed
        by="$(sed -n 's/^---- \(.*\) stdout ----$/\1/p' "$scratch.log" | head -2 | paste -sd, -)"
        by="${by:-hang or abort}: $(grep -A1 'panicked at' "$scratch.log" | grep -v 'panicked at' | head -1 | cut -c1-90)"
    fi
    printf '%-44s %-7s %8s  %s\n' "$name" "$verdict" $((SECONDS - began)) "$by"
    patch -s -p1 -R <"$patch"
done
rm -f "$scratch.log"
exit $failed
