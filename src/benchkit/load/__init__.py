"""Everything that waits or reads a clock: requests, servers, grids."""
