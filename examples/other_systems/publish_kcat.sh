#!/usr/bin/env bash
# Publish a training job with kcat and its default settings, then wait for the answer on the replies topic.
#   BOOTSTRAP=127.0.0.1:9092 examples/other_systems/publish_kcat.sh [MANIFEST] [CE_ID] [KEY]
# The same CE_ID from the same source is the same job, however often it is sent. KEY may be anything, or nothing.
set -euo pipefail
manifest=${1:-examples/cartpole-v1.json}
ce_id=${2:-kcat-$(date +%s%N)}
key=${3:-}
bootstrap=${BOOTSTRAP:?set BOOTSTRAP to the address of Kafka, see: opentinker status}

if [ ! -f "$manifest" ]; then
  echo "no file $manifest" >&2
  exit 2
fi
# kcat alone repeats every connection that is refused, in words of its library.
if ! kcat -b "$bootstrap" -L -t opentinker.jobs.requests.v1 -m 5 >/dev/null 2>&1; then
  echo "no answer from Kafka at $bootstrap; \`opentinker status\` shows its address" >&2
  exit 2
fi

# kcat sends a file as one message when it is named; -D with a separator that never occurs does the same for standard input.
kcat -b "$bootstrap" -P -t opentinker.jobs.requests.v1 ${key:+-k "$key"} \
  -H ce_specversion=1.0 -H "ce_id=$ce_id" -H ce_type=io.opentinker.SubmitTrainingJob.v1 -H ce_source=kcat-example \
  -H content-type=application/json "$manifest"

# Answers are keyed by the ce_id of the request. -o -200: the last 200 of each partition; -e: end at the end.
for _ in $(seq 20); do
  answer=$(kcat -b "$bootstrap" -C -t opentinker.jobs.replies.v1 -o -200 -e -q -f '%k\t%s\n' 2>/dev/null | awk -F'\t' -v id="$ce_id" '$1 == id' | tail -n 1)
  if [ -n "$answer" ]; then
    printf '%s\n' "${answer#*$'\t'}"
    case "$answer" in *'"errors":'*) exit 1 ;; esac
    exit 0
  fi
  sleep 0.1
done
echo "no answer for $ce_id yet; is the ingress running? opentinker status" >&2
exit 1
