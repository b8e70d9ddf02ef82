#!/usr/bin/env bash
# The benches at small size (at the sizes of the issue with depth "long"): they run, verify, and write the keys that they promise.
# Rates and ratios are not tested here: these machines are noisy. A run whose figures do not count (exit code 3) passes.
# usage: tests/bench-smoke.sh BINARY WORKDIR DEPTH
set -u
bin=$1 work=$2/bench depth=$3
mkdir -p "$work"
failures=0

# run NAME KEYS ARGS...
run() {
    local name=$1 keys=$2 code
    shift 2
    timeout 1500 "$bin" bench "$@" --json "$work/$name.json" 2>&1 | tail -n 45
    code=${PIPESTATUS[0]}
    if [ "$code" != 0 ] && [ "$code" != 3 ]; then
        echo "FAIL $name: exit code $code"
        failures=$((failures + 1))
        return
    fi
    python3 - "$work/$name.json" "$keys" <<'PY' || failures=$((failures + 1))
import json, sys
figures = json.load(open(sys.argv[1]))
def walk(dotted):
    node = figures
    for part in dotted.split("."):
        node = node[part]
    return node
missing = []
for key in ["schema", "valid", "invalid_reason", "command", "machine"] + sys.argv[2].split():
    try:
        walk(key)
    except (KeyError, TypeError):
        missing.append(key)
bad = [key for key in ("wrong_objects", "missing_objects") if figures.get(key)]
shown = {key: walk(key) for key in sys.argv[2].split() if key not in missing}
print("    ", figures["valid"], figures["invalid_reason"], json.dumps(shown))
if missing or bad:
    print("FAIL", sys.argv[1], "missing keys:", missing, "violations:", bad)
    sys.exit(1)
PY
}

offload_keys="wrong_objects missing_objects put.gb_per_s get.ssd.gb_per_s device.write_gb_per_s device.read_gb_per_s ratio.write ratio.read write_amplification latency_us.dram.p50 latency_us.dram.p99 latency_us.ssd.p50 latency_us.ssd.p99"
replay_keys="hit_rate.total hit_rate.dram hit_rate.ssd lru_hit_rate belady_hit_rate"

if [ "$depth" = long ]; then
    run offload-1m "$offload_keys" offload --dram 512MiB --ssd 6GiB --value 1MiB --total 4GiB --dir "$work/s"; rm -rf "$work/s"
    run offload-64k "$offload_keys" offload --dram 512MiB --ssd 6GiB --value 64KiB --total 3GiB --dir "$work/s"; rm -rf "$work/s"
    run reclaim "$offload_keys" offload --dram 512MiB --ssd 6GiB --value 1MiB --total 18GiB --reads zipf --dir "$work/s"; rm -rf "$work/s"
    run reclaim-0 "$offload_keys" offload --dram 512MiB --ssd 6GiB --value 1MiB --total 18GiB --reads zipf --reinsert-share 0 --dir "$work/s"; rm -rf "$work/s"
    run dram "" dram
    run start "" start --objects 1000000 --dir "$work/s"; rm -rf "$work/s"
else
    run offload "$offload_keys" offload --dram 64MiB --ssd 512MiB --value 256KiB --total 256MiB --rounds 4 --prealloc reserved --dir "$work/s"; rm -rf "$work/s"
    run reclaim "$offload_keys" offload --dram 32MiB --ssd 256MiB --value 64KiB --total 512MiB --rounds 4 --prealloc reserved --reads zipf --dir "$work/s"; rm -rf "$work/s"
    run dram "" dram --rounds 2
    run start "" start --objects 20000 --dir "$work/s"; rm -rf "$work/s"
fi
run replay "$replay_keys" replay --requests 500 --bytes-per-token 32 --dram 32MiB --ssd 256MiB --dir "$work/s"; rm -rf "$work/s"
trace=../shared/traces/conversation_trace.jsonl
if [ -f "$trace" ]; then
    run conversation "$replay_keys" replay "$trace" --bytes-per-token 32 --dram 160MiB --ssd 0 --policy lru --threads 1
else
    echo "the conversation trace is not beside this tree: its replay is left out"
fi
[ $failures = 0 ]
