"""The trainer process, which knows no network, and the handle by which the mesh process holds it."""
