#!/usr/bin/env bash
# Get the Megatrons that the tests run: trees, each at its commit, and the other wheels of
# megatron-core, unpacked side by side, with the package that has Muon. What is already there is left alone.
#   get_megatron.sh [FOLDER [NAME...]]   into checkouts/, or FOLDER; all of them, or those named (285068c8, ...)
# Some trees come only when they are named, as one slow test alone runs them:
#   get_megatron.sh checkouts core_v0.13.1 core_v0.14.0 core_v0.15.3 core_v0.17.1 core_v0.18.2 core_v0.19.0
# MEGATRON_LM_URL: where those of Megatron-LM are cloned from.
set -euo pipefail

folder=${1:-checkouts}
names=("${@:2}")
url=${MEGATRON_LM_URL:-https://github.com/NVIDIA/Megatron-LM}
# folder name, commit and, if it is no Megatron-LM, where it is cloned from; the first is what the requirements pin
trees=(
    "285068c8 285068c8108e0e8e6538f54fe27c3ee86c5217a2"
    "core_v0.12.1 core_v0.12.1"
    "core_v0.16.1 core_v0.16.1"
    "core_main_d98e8a64 d98e8a64ddf34856e74b24714e3bedb2f5a39553"
    "8387ae17 8387ae17c4704f6579f88a84500b535d19d7fbbf https://github.com/bigscience-workshop/Megatron-DeepSpeed"
    "4efb479d 4efb479d5317ce9b86096b9d8e3e8030b0b5263b https://github.com/deepspeedai/Megatron-DeepSpeed"
)
on_request=(core_v0.13.1 core_v0.14.0 core_v0.15.3 core_v0.17.1 core_v0.18.2 core_v0.19.0)

wheels=(emerging_optimizers-0.3.0 megatron_core-{0.12.1,0.13.1,0.14.0,0.15.3,0.17.1,0.18.2,0.19.2})
python=${PYTHON:-python3}

# wanted NAME: whether it is asked for and not there yet
wanted() {
    [ ! -d "$folder/$1" ] && { [ ${#names[@]} -eq 0 ] || [[ " ${names[*]} " == *" $1 "* ]]; }
}

for name in "${names[@]}"; do
    known=" ${trees[*]%% *} ${wheels[*]} ${on_request[*]} "
    [[ $known == *" $name "* ]] || { echo "no $name; there are:$known" >&2; exit 2; }
    [[ " ${on_request[*]} " != *" $name "* ]] || trees+=("$name $name")
done

fetch_wheel() {
    rm -rf "$folder/$1.part"
    # From 0.17 on there are wheels for Python 3.12 alone, whose one compiled module has a stand-in here.
    local newer=()
    # Muon's package says that it is for Python 3.12, too.
    case $1 in
        *-0.17.* | *-0.18.* | *-0.19.* | emerging_*) newer=(--python-version 3.12 --ignore-requires-python) ;;
    esac
    "$python" -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: "${newer[@]}" \
        --target "$folder/$1.part" "${1/-/==}"
    mv "$folder/$1.part" "$folder/$1"
    echo "$folder/$1"
}

# fetch_tree NAME COMMIT URL: one that cannot be had does not keep the others away
fetch_tree() {
    rm -rf "$folder/$1.part"
    git init --quiet "$folder/$1.part" &&
        git -C "$folder/$1.part" fetch --quiet --depth 1 "$3" "$2" &&
        git -C "$folder/$1.part" -c advice.detachedHead=false checkout --quiet FETCH_HEAD &&
        mv "$folder/$1.part" "$folder/$1" &&
        echo "$folder/$1"
}

# Side by side: each waits for the package index most of the time.
fetches=() failed=0
for name in "${wheels[@]}"; do
    wanted "$name" || continue
    (fetch_wheel "$name") &
    fetches+=($!)
done
for fetch in "${fetches[@]}"; do
    wait "$fetch" || failed=1
done
((failed == 0)) || exit 1

for tree in "${trees[@]}"; do
    read -r name commit from <<< "$tree"
    wanted "$name" || continue
    fetch_tree "$name" "$commit" "${from:-$url}" || {
        echo "could not fetch $name from ${from:-$url}" >&2
        rm -rf "$folder/$name.part"
        failed=1
    }
done
exit "$failed"
