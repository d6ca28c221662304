#!/bin/sh
# Installs the user service: the unit, and a folder for its settings. Running it again renews the unit and nothing else.
set -eu

root=$(cd "$(dirname "$0")/../.." && pwd)
config=${XDG_CONFIG_HOME:-$HOME/.config}
units=$config/systemd/user

if [ ! -x "$root/.venv/bin/modelyard" ]; then
    echo "There is no $root/.venv/bin/modelyard: run make install first." >&2
    exit 1
fi
case $root in
*[!A-Za-z0-9_./+-]*)
    echo "The path $root holds characters that a unit file would misread: move the checkout." >&2
    exit 1
    ;;
esac

mkdir -p "$units" "$config/modelyard"
sed "s|@ROOT@|$root|g" "$root/deploy/systemd/modelyard.service" >"$units/modelyard.service"
if [ ! -e "$config/modelyard/modelyard.env" ]; then
    (umask 077 && cp "$root/deploy/systemd/modelyard.env.example" "$config/modelyard/modelyard.env")
fi
echo "Installed $units/modelyard.service; settings go to $config/modelyard/."

if systemctl --user daemon-reload 2>/dev/null; then
    echo "Start it now and at every login: systemctl --user enable --now modelyard"
else
    echo "No systemd of this user is running here: the unit is read when there is one." >&2
fi
