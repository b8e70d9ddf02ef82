#!/usr/bin/env bash
# kill -9 in the middle of `bench offload --journal`, then --verify-journal: clean every time.
# usage: tests/kills.sh BINARY WORKDIR TIMES
set -u
bin=$1 work=$2/kills times=$3
mkdir -p "$work"
for round in $(seq "$times"); do
    rm -rf "${work:?}"/*
    "$bin" bench offload --dir "$work/store" --dram 64MiB --ssd 1GiB --value 256KiB --total 768MiB --cpu off \
        --prealloc reserved --journal "$work/journal" >"$work/run.log" 2>&1 &
    pid=$!
    # A third of the rounds each is killed early, in the middle and late: after so many journalled ranges.
    lines=$((1 + (round * 3) % 9))
    for _ in $(seq 1200); do
        [ -f "$work/journal" ] && [ "$(wc -l <"$work/journal")" -ge "$lines" ] && break
        kill -0 $pid 2>/dev/null || break
        sleep 0.05
    done
    sleep "0.0$((RANDOM % 10))"
    kill -9 $pid 2>/dev/null
    wait $pid 2>/dev/null
    if ! "$bin" bench offload --dir "$work/store" --dram 64MiB --ssd 1GiB --value 256KiB --total 768MiB \
        --verify-journal "$work/journal" --json "$work/verify.json" >"$work/verify.log" 2>&1; then
        echo "FAIL round $round, killed after $(wc -l <"$work/journal") ranges"
        cat "$work/verify.log" "$work/verify.json"
        exit 1
    fi
    echo "ok   round $round: killed after $(wc -l <"$work/journal") ranges; $(tail -n 1 "$work/verify.log")"
done
