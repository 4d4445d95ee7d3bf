"""libp2p is imported as the mesh imports it, also where a test module imports it first."""

import farandole.node.mesh  # noqa: F401  imported for its effect
