"""When a node pauses training: on request, in quiet hours, or while the machine is in use."""
