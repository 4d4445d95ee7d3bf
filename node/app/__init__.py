"""The `farandole` command: its subcommands, the doctor, and the installed service."""
