"""libp2p is imported as the mesh imports it, also where a test module imports it first."""

import importlib

importlib.import_module("farandole.node.mesh")
