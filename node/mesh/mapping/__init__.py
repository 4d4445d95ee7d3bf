"""Ports that the home's router opens for this node, so that others can dial it: requested, renewed, released."""
