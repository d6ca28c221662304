#!/bin/sh
# Stops the service: running requests finish (http.drain_s), models are unloaded, child processes end.
set -eu
systemctl --user stop modelyard.service
echo "Modelyard is stopped. It starts again at the next login unless it is disabled."
