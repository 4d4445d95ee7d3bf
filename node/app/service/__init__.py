"""A node that the machine's own service manager keeps running: systemd for a user, or launchd."""
