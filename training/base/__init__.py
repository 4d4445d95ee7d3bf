"""What the rest of training/ stands on: errors, devices, memory, durable files, equal bits."""
