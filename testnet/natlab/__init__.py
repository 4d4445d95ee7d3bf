"""An internet for tests: public hosts and homes behind routers of every kind, in namespaces of one machine."""
