"""The base of all node packages: settings, errors, timers, the control socket, and differences between systems."""
