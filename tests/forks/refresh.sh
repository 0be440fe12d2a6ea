#!/usr/bin/env bash
# Makes patches of forks fit the code again, after that has been committed: tests/forks/refresh.sh [NAME.patch ...]
# Each patch is merged into a worktree of HEAD and written anew. What stands before its first diff stays.
set -euo pipefail
cd "$(dirname "$0")"
patches=("$@")
[ $# -gt 0 ] || patches=(*.patch)

write() {  # what differs from HEAD in a worktree, as a patch
    about=$(sed '/^diff --git/,$d' "$2")
    git -C "$1" add --all
    { printf '%s\n\n' "$about"; git -C "$1" diff --cached --full-index; } >"$2.new"
    mv "$2.new" "$2"
    git worktree remove --force "$1"
}

[ "${patches[0]}" != --write ] || { write "$2" "$3"; exit; }
failed=0
for patch in "${patches[@]}"; do
    tree="$(mktemp -d)/${patch%.patch}"
    git worktree add --quiet --detach "$tree" HEAD
    if git -C "$tree" apply --3way "$PWD/$patch"; then
        write "$tree" "$patch"
    else
        echo "$patch: resolve the conflicts in $tree, run its test there, then: $0 --write $tree $patch"
        failed=1
    fi
done
exit $failed
