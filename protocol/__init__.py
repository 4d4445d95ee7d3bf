"""The sans-IO core: values in, values out. No sockets, no clocks, no torch; time and chance are arguments."""
