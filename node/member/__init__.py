"""A node that knows its run: its run state, its training, its service to newcomers, its farewell."""
