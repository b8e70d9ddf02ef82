#!/usr/bin/env bash
# Bad input gets one clear line that names the thing, and exit code 2; nothing is overwritten.
# usage: tests/inputs.sh BINARY WORKDIR
set -u
bin=$1 work=$2/inputs
mkdir -p "$work"
failures=0

# refuses WHAT EXPECTED ARGS...: exit code 2 and a line on standard error that holds EXPECTED
refuses() {
    local what=$1 expected=$2 code
    shift 2
    timeout 60 "$bin" "$@" >"$work/out" 2>"$work/err"
    code=$?
    if [ $code != 2 ]; then
        echo "FAIL $what: exit code $code, not 2"
        failures=$((failures + 1))
    elif ! grep -qF -- "$expected" "$work/err"; then
        echo "FAIL $what: no \"$expected\" in:"
        cat "$work/err"
        failures=$((failures + 1))
    elif grep -qE "panicked|RUST_BACKTRACE" "$work/err"; then
        echo "FAIL $what: panicked"
        failures=$((failures + 1))
    else
        echo "ok   $what: $(grep -F -- "$expected" "$work/err" | head -n 1)"
    fi
}

offload=(bench offload --dram 16MiB --ssd 128MiB --value 64KiB --total 64MiB --rounds 2)

refuses "an unknown flag" "--dramm" bench offload --dramm 1GiB
refuses "an unknown command" "offlod" bench offlod
refuses "a size without sense" "plenty" bench offload --dram plenty
refuses "an unknown policy" "clock" bench replay --policy clock
refuses "a directory that cannot be written" "/proc/ebbtide" "${offload[@]}" --dir /proc/ebbtide
touch "$work/file"
refuses "a directory that is a file" "$work/file" "${offload[@]}" --dir "$work/file"
refuses "a device too small" "too small" bench offload --dram 16MiB --ssd 2MiB --value 64KiB --total 64MiB --dir "$work/small"
refuses "a trace that is not there" "none.jsonl" bench replay "$work/none.jsonl"
printf '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}\nnot json\n' >"$work/bad.jsonl"
refuses "a trace with a bad line" "bad.jsonl:2" bench replay "$work/bad.jsonl"

# A corrupt superblock: refused, and not a byte changed.
mkdir -p "$work/corrupt"
head -c 134217728 /dev/zero | tr '\0' 'U' >"$work/corrupt/ssd-0.ebb"
before=$(cksum <"$work/corrupt/ssd-0.ebb")
refuses "a corrupt superblock" "superblock of" "${offload[@]}" --dir "$work/corrupt" --journal "$work/j"
if [ "$before" != "$(cksum <"$work/corrupt/ssd-0.ebb")" ]; then
    echo "FAIL a corrupt superblock: the file was changed"
    failures=$((failures + 1))
fi

# A second opener, while the first one runs.
"$bin" bench offload --dram 16MiB --ssd 1GiB --value 64KiB --total 512MiB --dir "$work/twice" >/dev/null 2>&1 &
first=$!
for _ in $(seq 100); do
    [ -s "$work/twice/LOCK" ] && break
    sleep 0.1
done
refuses "a second opener" "in use by pid $first" "${offload[@]}" --dir "$work/twice"
kill -9 $first 2>/dev/null
wait $first 2>/dev/null

[ $failures = 0 ]
