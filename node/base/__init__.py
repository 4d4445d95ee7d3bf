"""What every room of a node may use: settings, errors, timers, the control socket, and what differs between systems."""
