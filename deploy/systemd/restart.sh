#!/bin/sh
# Restarts the service, unless its settings are broken: then the running one is left alone.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
config=${XDG_CONFIG_HOME:-$HOME/.config}/modelyard

cd "$config"
if [ -e modelyard.env ]; then
    # Only names that a shell can take; values stay as they are written.
    while IFS= read -r line; do
        case $line in
        [A-Za-z_]*=*) export "${line%%=*}=${line#*=}" ;;
        esac
    done <modelyard.env
fi
if ! "$root/.venv/bin/modelyard" check; then
    echo "The settings in $config are broken; the service was left as it is." >&2
    exit 1
fi
systemctl --user restart modelyard.service
"$root/.venv/bin/python" "$root/deploy/systemd/health.py" --wait 120
