#!/bin/sh
# Installs the programs named on the command line that are missing, and says so. Debian and Ubuntu; elsewhere it names them.
missing=""
for program in "$@"; do
    command -v "$program" >/dev/null 2>&1 || missing="$missing $program"
done
[ -z "$missing" ] && exit 0
if ! command -v apt-get >/dev/null 2>&1; then
    echo "Missing:$missing. Please install them (this script knows only apt-get)." >&2
    exit 1
fi
echo "Installing what is missing:$missing"
sudo=""
[ "$(id -u)" = 0 ] || sudo=sudo
$sudo apt-get update -q >/dev/null && $sudo apt-get install -y -q --no-install-recommends $missing
