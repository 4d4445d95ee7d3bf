"""A port that the home's router opens for this node, so that others can dial it: asked for, kept, given back."""
