"""Programs of a node's owner that use its mesh for protocols of their own: farandole.Mesh."""
