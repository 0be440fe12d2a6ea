#!/usr/bin/env bash
# Makes the environments of the peers that bench_speed.py compares oomph with, one for each, versions pinned:
#
#     tests/make_peers.sh FOLDER          # then: python tests/bench_speed.py --peers FOLDER
#
# FOLDER/hf (transformers, PEFT, bitsandbytes, Liger; check_peers.py runs there too) and FOLDER/unsloth: 3 GB with a CPU
# build of torch. What is there is left alone, unless its versions below have changed. A peer that does not install is
# named in one line, with the file that says why, and the others go on; the exit code is then 1.
#
# torch comes first and a constraint keeps it, so that all peers have the same one. Liger, unsloth and its zoo also ask
# for packages that only a GPU can use: they are installed without their requirements, beside those that a CPU imports.

set -u
TORCH=${TORCH:-2.13.0}
PYTHON=${PYTHON:-python3}

HF="transformers==5.23.0 peft==0.21.2 accelerate==1.15.0 bitsandbytes==0.50.2"
UNSLOTH="transformers==5.17.0 peft==0.21.2 accelerate==1.15.0 trl==1.15.0 bitsandbytes==0.50.2 datasets>=4.6,<5
    einops hf_transfer msgspec nest-asyncio pillow protobuf requests sentencepiece tyro"
UNSLOTH_ALONE="unsloth==2026.10.9 unsloth_zoo==2026.10.9"

folder=${1:?usage: make_peers.sh FOLDER}
mkdir -p "$folder" && folder=$(cd "$folder" && pwd) || exit 1
code=0

# install NAME MODULE REQUIREMENTS [REQUIREMENTS WITHOUT THEIR OWN]: a failure anywhere ends it
install() {
    local env=$folder/$1
    rm -rf "$env"
    "$PYTHON" -m venv "$env" &&
        "$env/bin/pip" install "torch==$TORCH" &&
        "$env/bin/pip" install numpy $3 --constraint "$folder/constraint.txt" &&
        { [ -z "${4:-}" ] || "$env/bin/pip" install --no-deps $4; } &&
        (cd "$folder" && "$env/bin/python" -c "import $2")
}

peer() {
    local made="torch==$TORCH $3 ${4:-}" name=$1
    if [ "$(cat "$folder/$name/made" 2>/dev/null)" = "$made" ]; then
        echo "$name: is there"
    elif install "$@" > "$folder/$name.log" 2>&1; then
        echo "$made" > "$folder/$name/made"
        echo "$name: made"
    else
        echo "$name: FAILED and skipped, see $folder/$name.log"
        code=1
    fi
}

echo "torch==$TORCH" > "$folder/constraint.txt"
peer hf peft "$HF" "liger-kernel==0.8.5"  # whose kernels need a GPU
peer unsloth unsloth "$UNSLOTH" "$UNSLOTH_ALONE"
exit $code
