#!/usr/bin/env bash
# Clone the Megatron-LM trees that the tests run, each at its commit, into checkouts/ (or $1).
# A tree that is already there is left alone.
set -euo pipefail

folder=${1:-checkouts}
url=${MEGATRON_LM_URL:-https://github.com/NVIDIA/Megatron-LM}
# folder name and commit; the first is the one that the requirements pin
trees=(
    "285068c8 285068c8108e0e8e6538f54fe27c3ee86c5217a2"
    "core_v0.16.1 core_v0.16.1"
)

for tree in "${trees[@]}"; do
    read -r name commit <<< "$tree"
    [ -d "$folder/$name" ] && continue
    rm -rf "$folder/$name.part"
    git init --quiet "$folder/$name.part"
    git -C "$folder/$name.part" fetch --quiet --depth 1 "$url" "$commit"
    git -C "$folder/$name.part" -c advice.detachedHead=false checkout --quiet FETCH_HEAD
    mv "$folder/$name.part" "$folder/$name"
    echo "$folder/$name"
done
