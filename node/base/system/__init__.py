"""What depends on the operating system: Linux and macOS."""
