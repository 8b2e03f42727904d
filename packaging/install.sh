#!/bin/sh
# Installs train_low_mem for one user: the program, its manual page and completions for bash, zsh and fish. Needs no root.
#
#   sh install.sh --from ADDRESS [--to DIR]
#
# ADDRESS is a release: an https address or a directory, with SHA256SUMS in it. DIR is the program's directory, ~/.local/bin by default.
# Nothing is replaced before the digests are right and the new program has run.
set -eu

usage='usage: sh install.sh --from ADDRESS [--to DIR]'

fail() {
    printf 'error: %s\n' "$1" >&2
    shift
    for hint in "$@"; do printf 'hint: %s\n' "$hint" >&2; done
    exit 1
}

from='' to=''
while [ $# -gt 0 ]; do
    case $1 in
        --from) from=${2-} ;;
        --to) to=${2-} ;;
        --help | -h)
            echo "$usage"
            exit 0
            ;;
        *) fail "unexpected argument \`$1\`" "$usage" ;;
    esac
    [ $# -ge 2 ] || fail "\`$1\` needs a value" "$usage"
    shift 2
done
[ -n "$from" ] || fail 'no release is named' "$usage"
[ -n "${HOME-}" ] || [ -n "$to" ] || fail 'HOME is not set' 'name a directory: --to DIR'
data=${XDG_DATA_HOME:-${HOME:-$to}/.local/share}
config=${XDG_CONFIG_HOME:-${HOME:-$to}/.config}
to=${to:-$HOME/.local/bin}

system=$(uname -s) machine=$(uname -m)
[ "$system" = Linux ] ||
    fail "there is no program for $system" 'on Windows, run this in WSL' 'elsewhere, build it: cargo install --path crates/train-low-mem'
case $machine in
    x86_64 | amd64) processor=x86_64 ;;
    aarch64 | arm64) processor=aarch64 ;;
    *) fail "there is no program for $machine, expected x86_64 or aarch64" 'build it: cargo install --path crates/train-low-mem' ;;
esac

command -v sha256sum >/dev/null || command -v shasum >/dev/null ||
    fail 'neither sha256sum nor shasum is here, so nothing can be verified' 'install coreutils'

temporary=$(mktemp -d) || fail 'no temporary directory could be made' 'set TMPDIR to a directory that can be written'
trap 'rm -rf "$temporary"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# Fetches a file of the release into the temporary directory.
fetch() {
    if [ -d "$from" ]; then
        cp "$from/$1" "$temporary/$1" 2>/dev/null
    elif command -v curl >/dev/null; then
        curl --fail --silent --show-error --location --connect-timeout 20 --retry 2 --output "$temporary/$1" "${from%/}/$1"
    elif command -v wget >/dev/null; then
        wget --quiet --timeout=20 --tries=3 --output-document="$temporary/$1" "${from%/}/$1"
    else
        fail 'neither curl nor wget is here' 'install one of them, or fetch the release by hand and use --from DIR'
    fi || fail "$from/$1: could not be fetched" 'is ADDRESS a release, with SHA256SUMS in it?'
}

digest() {
    if command -v sha256sum >/dev/null; then sha256sum "$1"; else shasum -a 256 "$1"; fi | cut -d ' ' -f 1
}

# Fetches a file, and compares its digest with the one in SHA256SUMS.
fetch_checked() {
    expected=$(awk -v name="$1" '$2 == name { print $1 }' "$temporary/SHA256SUMS")
    [ -n "$expected" ] || fail "$from/SHA256SUMS: no line for $1" 'this release has no program for this machine'
    fetch "$1"
    got=$(digest "$temporary/$1")
    [ "$got" = "$expected" ] ||
        fail "$from/$1: expected SHA-256 $expected, got $got" 'the download is damaged, or was changed: nothing was installed; try again'
}

# Puts a file in its place at once, so that a running program or a reader never sees half of it.
place() {
    directory=$(dirname "$2")
    if ! { mkdir -p "$directory" && cp "$1" "$2.new" && mv -f "$2.new" "$2"; } 2>/dev/null; then
        fail "$2: cannot be written" 'name a directory of your own: --to DIR; XDG_DATA_HOME and XDG_CONFIG_HOME set the others'
    fi
    printf '%s\n' "$2"
}

fetch SHA256SUMS
# The static program runs everywhere. Where NVIDIA's driver is, the program that knows GPUs comes first, if the release has it.
kinds='musl gnu'
if [ -e /proc/driver/nvidia/version ] || [ -e /usr/lib/wsl/lib/libcuda.so.1 ]; then kinds='gnu musl'; fi
program=train_low_mem-$processor-unknown-linux-musl
for kind in $kinds; do
    name=train_low_mem-$processor-unknown-linux-$kind
    if awk -v name="$name" '$2 == name { found = 1 } END { exit !found }' "$temporary/SHA256SUMS"; then
        program=$name
        break
    fi
done
fetch_checked "$program"
fetch_checked train_low_mem.1
chmod 755 "$temporary/$program"
version=$("$temporary/$program" --version 2>&1) ||
    fail "$program does not run here: $version" "does the directory of temporary files allow programs? set TMPDIR to one that does"

echo "$version, installed:"
place "$temporary/$program" "$to/train_low_mem"
place "$temporary/train_low_mem.1" "$data/man/man1/train_low_mem.1"
for shell in bash zsh fish; do
    "$temporary/$program" completions "$shell" >"$temporary/completions"
    case $shell in
        bash) place "$temporary/completions" "$data/bash-completion/completions/train_low_mem" ;;
        zsh) place "$temporary/completions" "$data/zsh/site-functions/_train_low_mem" ;;
        fish) place "$temporary/completions" "$config/fish/completions/train_low_mem.fish" ;;
    esac
done
echo 'To remove it, delete these files.'
case :$PATH: in
    *":$to:"*) ;;
    *) printf '%s is not on your PATH. Add it: export PATH="%s:%s"\n' "$to" "$to" "\$PATH" ;;
esac
echo 'Next: train_low_mem    (trains a tiny model on sample data, in about a minute)'
